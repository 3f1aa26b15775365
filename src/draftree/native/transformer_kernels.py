"""Native kernels of transformer layers: pack weights, compute linear layers, norms and gates.

The kernels are C++ (`kernels/`); without them `core` is None, and models run on PyTorch.

Shapes: K inputs and E outputs of a linear layer, D entries of a vector.
"""

import threading
from typing import Any

import torch
from torch import Tensor

from draftree.native import core as core
from draftree.native import cpu_threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernels support, in the order of their codes."""
INT4 = len(DTYPES)
"""The code of four-bit weights."""
INT8 = INT4 + 1
"""The code of eight-bit weights."""
INT8_GROUP = 32
"""The number of inputs that share a step in eight-bit weights."""


def code_of(dtype: torch.dtype) -> int:
    """Return the kernels' code for a dtype."""
    return DTYPES.index(dtype)


def address(tensor: Tensor | None) -> int:
    """Return the memory address of a tensor's first entry; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


if core is not None:
    cpu_threads.share_torch_threads()


class Arena:
    """Hold packed weights in few large blocks of memory, which huge pages can back."""

    PIECE = 64 << 20
    """Bytes of a block; the system provides its pages when they are first written to."""
    ALIGNMENT = 64

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        """Return aligned memory of `size` bytes, which lasts as long as the tensor."""
        with self._lock:
            if len(self._rest) < size + self.ALIGNMENT:
                self._rest = torch.empty(max(self.PIECE, size + self.ALIGNMENT), dtype=torch.uint8)
            start = -self._rest.data_ptr() % self.ALIGNMENT
            taken, self._rest = self._rest[start : start + size], self._rest[start + size :]
            return taken


_ARENA = Arena()


def pack(weight: Tensor) -> Tensor:
    """Convert a weight [E, K] to the kernels' layout, as bytes."""
    outputs, inputs = weight.shape
    weight, code = weight.detach().contiguous(), code_of(weight.dtype)
    packed = _ARENA.take(core.packed_bytes(code, outputs, inputs))
    core.pack(code, address(weight), outputs, inputs, address(packed), cpu_threads.thread_count())
    return packed


def pack_int4(numbers: Tensor, scales: Tensor) -> Tensor:
    """Convert a four-bit weight to the kernels' layout, as bytes.

    Args:
        numbers: [E, K] from 0 to 15; K is a multiple of 32.
        scales: [K / 32, E, 2] bfloat16: the step of each group, and the value for which the number
            8 stands.
    """
    outputs, inputs = numbers.shape
    numbers, scales = (
        numbers.to(torch.uint8).contiguous(),
        scales.detach().to(torch.bfloat16).contiguous(),
    )
    packed = _ARENA.take(core.packed_bytes(INT4, outputs, inputs))
    core.pack_int4(
        address(numbers),
        address(scales),
        outputs,
        inputs,
        address(packed),
        cpu_threads.thread_count(),
    )
    return packed


def pack_int8(weight: Tensor) -> Tensor:
    """Round a weight [E, K] to eight bits, and convert it to the kernels' layout, as bytes.

    Each group of 32 inputs has a step in float32: its largest weight is 127 steps. K is a multiple
    of 32.
    """
    outputs, inputs = weight.shape
    weight, code = weight.detach().contiguous(), code_of(weight.dtype)
    packed = _ARENA.take(core.packed_bytes(INT8, outputs, inputs))
    core.pack_int8(
        code, address(weight), outputs, inputs, address(packed), cpu_threads.thread_count()
    )
    return packed


def linear(layer: Any, rows: Tensor) -> Tensor:
    """Return the outputs […, E] for inputs […, K]; `layer` is a `core.Linear`."""
    rows = rows.contiguous()
    out = rows.new_empty(*rows.shape[:-1], layer.outputs)
    core.linear(
        layer,
        code_of(rows.dtype),
        address(rows),
        rows.numel() // layer.inputs,
        address(out),
        cpu_threads.thread_count(),
    )
    return out


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return vectors […, D] divided by their root mean square, rounded, times a weight [D].

    All tensors must be contiguous.
    """
    out, width = torch.empty_like(rows), rows.shape[-1]
    core.rms_norm(
        code_of(rows.dtype),
        address(rows),
        address(weight),
        address(out),
        rows.numel() // width,
        width,
        epsilon,
    )
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up; both must be contiguous."""
    out = torch.empty_like(gate)
    core.swiglu(code_of(gate.dtype), address(gate), address(up), address(out), gate.numel())
    return out
