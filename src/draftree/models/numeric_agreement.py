"""How far the results of two implementations of a layer are apart."""

import torch
from torch import Tensor

MAX_LAYER_EPSILONS, MAX_SUM_EPSILONS = 4.0, 64.0
"""Largest difference of a layer's output from the model's own, relative to what the layer adds.

`MAX_LAYER_EPSILONS` is in units of the layer's precision. `MAX_SUM_EPSILONS` is in units of
float32's precision, because sums of thousands of terms are computed in another order.
"""


def relative_distance(found: Tensor, wanted: Tensor) -> float:
    """Return the distance of two tensors relative to the norm of the second."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-9))


def median_distance(found: Tensor, wanted: Tensor) -> float:
    """Return the median over tokens of the distance of results [N, …], relative to their norms.

    A wrong computation changes the results of nearly all tokens. Rounding changes them little,
    except at a token where a model forms its largest activations: there it has no bound.
    """
    each = (found.float() - wanted.float()).flatten(1).norm(dim=1)
    return float((each / wanted.float().flatten(1).norm(dim=1).clamp_min(1e-9)).median())


def differs_by_rounding(
    found: Tensor, wanted: Tensor, before: Tensor, weight_eps: float = 0.0
) -> bool:
    """Return whether a layer's output differs from the model's own only by rounding.

    Args:
        found: [R, n, H] the output.
        wanted: [R, n, H] the output of the model's own layer.
        before: [R, n, H] the layer's input, in the layer's precision.
        weight_eps: the relative precision of the weights, if it is less than the layer's.
    """
    apart = (found.float() - wanted.float()).norm() / (wanted - before).float().norm()
    allowed = (
        MAX_LAYER_EPSILONS * max(weight_eps, torch.finfo(before.dtype).eps)
        + MAX_SUM_EPSILONS * torch.finfo(torch.float32).eps
    )
    return bool(apart < allowed)
