"""A classifier of two layers as machine code: each node by the same operations in any company.

Shapes: M nodes, X features, D hidden units.
"""

import math

import numpy as np

from draftree.kernels.compiled import Array, compiled


@compiled
def confidences(x: Array, hidden: Array, hidden_bias: Array, output: Array, output_bias: float) -> Array:
    """[M] what a ReLU layer, a linear one and a sigmoid make of features.

    Args:
        x: [X, M].
        hidden: [D, X] weights of the first layer.
        hidden_bias: [D].
        output: [D] weights of the second.
        output_bias: of the second.
    """
    nodes = x.shape[1]
    found, unit = np.full(nodes, output_bias), np.empty(nodes)
    for d in range(len(hidden)):
        unit[:] = hidden_bias[d]
        for i in range(len(x)):
            weight = hidden[d, i]
            for m in range(nodes):
                unit[m] += x[i, m] * weight
        weight = output[d]
        for m in range(nodes):
            found[m] += max(unit[m], 0.0) * weight
    for m in range(nodes):
        found[m] = 0.5 * (1 + math.tanh(found[m] / 2))  # the sigmoid, without overflow
    return found
