"""A classifier of two layers as machine code: one node after the other, so that each is judged alike in any company.

Shapes: M nodes, X features, D hidden units.
"""

import math

import numpy as np

from draftree.kernels.compiled import Array, compiled


@compiled
def confidences(x: Array, hidden: Array, hidden_bias: Array, output: Array, output_bias: float) -> Array:
    """[M] what a ReLU layer, a linear one and a sigmoid make of features.

    Args:
        x: [M, X].
        hidden: [D, X] weights of the first layer.
        hidden_bias: [D].
        output: [D] weights of the second.
        output_bias: of the second.
    """
    found = np.empty(len(x))
    for m in range(len(x)):
        logit = output_bias
        for d in range(len(hidden)):
            unit = hidden_bias[d]
            for i in range(x.shape[1]):
                unit += x[m, i] * hidden[d, i]
            if unit > 0:
                logit += unit * output[d]
        found[m] = 0.5 * (1 + math.tanh(logit / 2))  # the sigmoid, without overflow
    return found
