"""Linear layers as machine code of ours: over weights laid out for it, as fast for eight tokens as for one, the same bits.

Shapes: n rows of a pass, K and E entries of a row before and after.
"""

import struct
from functools import cache
from threading import local
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

COLUMNS, ROWS = 32, 8
"""Columns and rows of a product that are made together; as in `kernels/tiles.py`, which takes half a second to import."""
GROUP = 32
"""Numbers of a group in four bits."""
DTYPES = (torch.bfloat16, torch.float32)
_SCRATCH = local()


def tileable(weight: Tensor, bias: Tensor | None) -> bool:
    """True for weights that we have code for."""
    given = (weight,) if bias is None else (weight, bias)
    ours = all(t.device.type == "cpu" and type(t.data) is Tensor and t.dtype is weight.dtype for t in given)
    ours &= not any(t.is_inference() for t in given)
    return ours and weight.dtype in DTYPES and weight.shape[1] % 2 == 0


@cache
def has_dots() -> bool:
    """True where the processor multiplies pairs of bfloat16, which the code for four bits needs."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def tiles(weight: Tensor) -> Tensor:
    """A weight [E, K] in blocks of 32 of its E, the last one filled up with 0; words of all 32 one after the other.

    Returns:
        [blocks, words, 32, numbers of a word].
    """
    width, deep = weight.shape
    per = 4 // weight.element_size()
    whole = weight.detach() if width % COLUMNS == 0 else pad(weight.detach(), (0, 0, 0, -width % COLUMNS))
    return whole.reshape(-1, COLUMNS, deep // per, per).transpose(1, 2).contiguous()


def tiles_of_four(numbers: Tensor, scales: Tensor) -> Tensor:
    """A weight in four bits as 32-bit words: of blocks of 32 of its E, the groups of K one after the other.

    A group's words are the 32 steps and middles, and four times 32 with eight numbers each: those of even places in the lower
    half, so that a look-up of either half's four bits gives a pair.

    Args:
        numbers: [E, K] of 0 … 15.
        scales: [K / 32, E, 2] bfloat16: steps, and what 8 stands for.

    Returns:
        [E / 32, K / 32, 5, 32] int32.
    """
    width, deep = numbers.shape
    eights = numbers.view(width // COLUMNS, COLUMNS, deep // GROUP, 4, 4, 2).long()  # … groups, words, pairs, places
    shifts = torch.tensor([[4 * pair + 16 * place for place in (0, 1)] for pair in range(4)])
    words = (eights << shifts).sum((-1, -2)).permute(0, 2, 3, 1)
    both = (scales.view(torch.int16).long() & 0xFFFF) << torch.tensor([0, 16])
    steps = both.sum(-1).view(deep // GROUP, width // COLUMNS, 1, COLUMNS).transpose(0, 1)
    return torch.cat((steps, words), dim=2).to(torch.uint32).view(torch.int32)


def scratch(size: int, threads: int) -> tuple[int, int]:
    """The address of memory for so many threads, and the bytes of each; it is the caller's until its thread asks again."""
    size = -(-size // 128) * 128
    held: Tensor | None = getattr(_SCRATCH, "bytes", None)
    if held is None or held.numel() < size * threads:
        held = _SCRATCH.bytes = torch.empty(size * threads, dtype=torch.uint8)
    return held.data_ptr(), size


def single(value: float) -> int:
    """A number as the bits of a float32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def place(tensor: Tensor | None) -> int:
    """A tensor's address, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


@final
class Tiled:
    """Multiplies by a weight that is laid out for our code.

    Args:
        weight: [E, K], which stays what it is.
        bias: [E], if there is one.

    Attributes:
        tiles: the weight as it is laid out.
        wide: E.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.tiles, self.bias, self._half = tiles(weight), bias, weight.dtype is torch.bfloat16
        self.wide, self._deep = weight.shape

    def __call__(self, rows: Tensor) -> Tensor:
        """[…, E] of rows […, K]."""
        from draftree.kernels.layer import columns
        from draftree.kernels.team import run

        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], self.wide)
        if count := rows.numel() // self._deep:
            own, each = scratch(ROWS * COLUMNS * 4, torch.get_num_threads())
            told = rows.data_ptr(), place(self.tiles), place(self.bias), out.data_ptr(), count, self._deep, self.wide
            run(columns(self._half), (*told, own, each))
        return out
