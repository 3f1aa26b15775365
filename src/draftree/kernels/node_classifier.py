"""A batch-invariant two-layer classifier of tree nodes.

Shapes: M nodes, X features, D hidden units.
"""

import math

import numpy as np

from draftree.native import Array, native


@native
def confidences(
    x: Array, hidden: Array, hidden_bias: Array, output: Array, output_bias: float
) -> Array:
    """Return the outputs [M] of a ReLU layer followed by a linear layer and a sigmoid.

    Args:
        x: [X, M] the inputs, one column for each example.
        hidden: [D, X] weights of the first layer.
        hidden_bias: [D] biases of the first layer.
        output: [D] weights of the second layer.
        output_bias: the bias of the second layer.
    """
    found = np.full(x.shape[1], output_bias)
    for d in range(len(hidden)):
        unit = np.full(len(found), hidden_bias[d])
        for feature, weight in zip(x, hidden[d], strict=True):
            unit += feature * weight
        found += np.where(unit < 0, 0.0, unit) * output[d]
    return np.array(
        [0.5 * (1 + math.tanh(each / 2)) for each in found]
    )  # the sigmoid, without overflow
