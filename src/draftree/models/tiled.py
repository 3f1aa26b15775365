"""Linear layers as machine code of ours: over weights laid out for it, as fast for eight tokens as for one, the same bits.

Shapes: n rows of a pass, K and E entries of a row before and after.
"""

from threading import local
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

COLUMNS, ROWS = 32, 8
"""Columns and rows of a product that are made together; as in `kernels/tiles.py`, which takes half a second to import."""
DTYPES = (torch.bfloat16, torch.float32)
_SCRATCH = local()


def tileable(weight: Tensor, bias: Tensor | None) -> bool:
    """True for weights that we have code for."""
    given = (weight,) if bias is None else (weight, bias)
    ours = all(t.device.type == "cpu" and type(t.data) is Tensor and t.dtype is weight.dtype for t in given)
    return ours and weight.dtype in DTYPES and weight.shape[1] % 2 == 0


def tiles(weight: Tensor) -> Tensor:
    """A weight [E, K] in blocks of 32 of its E, the last one filled up with 0; words of all 32 one after the other.

    Returns:
        [blocks, words, 32, numbers of a word].
    """
    width, deep = weight.shape
    per = 4 // weight.element_size()
    whole = weight.detach() if width % COLUMNS == 0 else pad(weight.detach(), (0, 0, 0, -width % COLUMNS))
    return whole.reshape(-1, COLUMNS, deep // per, per).transpose(1, 2).contiguous()


def scratch(size: int, threads: int) -> tuple[int, int]:
    """The address of memory for so many threads, and the bytes of each; it is the caller's until its thread asks again."""
    size = -(-size // 128) * 128
    held: Tensor | None = getattr(_SCRATCH, "bytes", None)
    if held is None or held.numel() < size * threads:
        held = _SCRATCH.bytes = torch.empty(size * threads, dtype=torch.uint8)
    return held.data_ptr(), size


def place(tensor: Tensor | None) -> int:
    """A tensor's address, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


@final
class Tiled:
    """Multiplies by a weight that is laid out for our code.

    Args:
        weight: [E, K], which stays what it is.
        bias: [E], if there is one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._tiles, self._bias, self._half = tiles(weight), bias, weight.dtype is torch.bfloat16
        self._wide, self._deep = weight.shape

    def __call__(self, rows: Tensor) -> Tensor:
        """[…, E] of rows […, K]."""
        from draftree.kernels.layer import codes
        from draftree.kernels.team import run

        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], self._wide)
        if count := rows.numel() // self._deep:
            own, each = scratch(ROWS * COLUMNS * 4, torch.get_num_threads())
            told = rows.data_ptr(), place(self._tiles), place(self._bias), out.data_ptr(), count, self._deep, self._wide
            run(codes(self._half)[2], (*told, own, each))
        return out
