"""Linear layers with 4-bit weights in groups, each with a scale and a zero point.

A pass over a few tokens takes the time in which its weights are read. Torch's kernel multiplies by
the packed weights directly. Weights of a file that held four bits of the same kind, GGUF's Q4_1,
are reproduced exactly, up to bfloat16: the groups are the same.

Shapes: D and E entries of a row before and after, G groups of a row.
"""

from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn

GROUP = 32
"""Number of weights that share a scale."""
ROWS = 16
"""Number of outputs of which E must be a multiple."""
MAX_INT4_VALUE = 15
"""The largest quantised weight; the integer 8 stands for a group's middle value."""
MAX_STEPS_OFF = 0.1
"""Root mean square error, in steps, below which a group's weights had four bits before.

It is 0.29 for weights between the steps, and some 0.02 for rounding to bfloat16.
"""


@final
class Int4Linear(nn.Module):
    """Replace a linear layer by one whose weights are rounded to four bits.

    Args:
        linear: a layer of weight [E, D] on a CPU, in bfloat16.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        numbers, scales = quantise_weight(linear.weight.detach())
        self.pairs = nn.Parameter(
            (numbers[:, ::2] | numbers[:, 1::2] << 4).to(torch.uint8), requires_grad=False
        )
        self.scales = nn.Parameter(scales, requires_grad=False)

    @property
    def numbers(self) -> Tensor:
        """Return the quantised weights [E, D], integers from 0 to 15."""
        return torch.stack((self.pairs & 15, self.pairs >> 4), dim=2).flatten(1).int()

    @cached_property
    def _blocks(self) -> Tensor:
        """Return the packed weights in the layout of torch's kernel; the first call makes it."""
        blocks: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(self.numbers, 1)
        return blocks

    def release(self) -> None:
        """Free the weights' copy in the layout of torch's kernel; the next call remakes it."""
        vars(self).pop("_blocks", None)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the layer's outputs […, E] for inputs […, D]."""
        flat = rows.reshape(-1, self.in_features).contiguous()
        made: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
            flat, self._blocks, GROUP, self.scales
        )
        made = made.view(*rows.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the quantised weights [E, D], integers from 0 to 15, and the scales [G, E, 2].

    Each scale holds the step of a group and the value for which the integer 8 stands. The integers
    0 and 15 stand for the smallest and the largest weight of a group. If these have different
    signs, the values are shifted by at most half a step, so that one of them is zero: many weights
    are close to it. Groups that had four bits before are not shifted.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    step = ((high - low) / MAX_INT4_VALUE).to(weight.dtype)  # rounding uses the stored step
    size = step.float().clamp_min(torch.finfo(torch.float32).tiny)

    def round_to_grid(middle: Tensor) -> Tensor:
        return (torch.round((groups - middle.float()) / size) + 8).clamp(0, MAX_INT4_VALUE)

    middle = (low + 8 * step.float()).to(weight.dtype)
    numbers = round_to_grid(middle)
    off = (numbers - 8) * step.float() + middle.float() - groups
    had_four_bits = off.square().mean(dim=2, keepdim=True).sqrt() < MAX_STEPS_OFF * step.float()
    with_zero = (step.float() * (8 - torch.round(-low / size))).to(weight.dtype)
    shifted = (low < 0) & (high > 0) & ~had_four_bits
    middle = torch.where(shifted, with_zero, middle)
    numbers = torch.where(shifted, round_to_grid(with_zero), numbers)
    scales = torch.cat((step, middle), dim=2).transpose(0, 1).contiguous()
    return numbers.flatten(1).int(), scales


def can_round(layer: nn.Module) -> bool:
    """Return whether a module is a stock linear layer whose sizes the kernel supports."""
    if type(layer) is not nn.Linear:
        return False
    return not layer.in_features % GROUP and not layer.out_features % ROWS
