"""Run mixture-of-experts layers one expert at a time, so that they can be batch invariant.

With transformers' own implementations, a token's bits depend on how many tokens go to the same
expert.

Shapes: n tokens, k experts chosen by each, D entries of a token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from draftree.models.invariant_widths import Rows, find_elementwise_widths


def are_experts(module: nn.Module) -> bool:
    """Return whether a module holds all its experts in one tensor for each kind of weight."""
    return "is_transposed" in vars(module)  # set by its decorator of such classes


def expert(module: Any, number: int) -> Rows:
    """Return one expert as a function of vectors [n, D]."""

    def apply_weights(rows: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)[number]
        bias = getattr(module, f"{name}_bias")[number] if module.has_bias else None
        return linear(rows, weight.T if module.is_transposed else weight, bias)

    def forward(rows: Tensor) -> Tensor:
        first, between = (
            ("gate_up_proj", module._apply_gate) if module.has_gate else ("up_proj", module.act_fn)
        )
        wide = apply_weights(rows, first)
        inner = find_elementwise_widths(wide.shape[-1] // (1 + module.has_gate)).apply(
            between, wide
        )
        out = apply_weights(inner, "down_proj")
        return module.post_expert_norm(out) if module.has_post_expert_norm else out

    return forward


def make_expert_forward(apply: Callable[[Rows, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a forward of experts that runs one expert after the other.

    Args:
        apply: calls an operation with input vectors.

    Returns:
        A function of the module, tokens [n, D], the experts of each token [n, k] and their weights
            [n, k]. A token's k results are added in the order in which it chose the experts, in at
            least float32.
    """

    def forward(module: nn.Module, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        answers = tokens.new_zeros(
            *chosen.shape, tokens.shape[-1], dtype=torch.promote_types(tokens.dtype, torch.float32)
        )
        for number in chosen.unique().tolist():
            rows, places = torch.where(chosen == number)
            answers[rows, places] = apply(expert(module, number), tokens[rows]).to(answers.dtype)
        total = torch.zeros_like(answers[:, 0])
        for place, weight in enumerate(weights.to(answers.dtype).unbind(1)):
            total = total + answers[:, place] * weight[:, None]
        return total.to(tokens.dtype)

    return forward
