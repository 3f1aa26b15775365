"""Native kernels of transformer layers: linear layers over packed weights, attention, norms, rotations, gates, whole passes.

The kernels are C++ (`kernels/`); without them `core` is None, and models run on PyTorch.

Shapes: N tokens, K inputs and E outputs of a linear layer.
"""

import ctypes
import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.native import core as core

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of the kernels, in the order of their codes."""
INT4 = len(DTYPES)
"""The code of weights in four bits."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def code_of(dtype: torch.dtype) -> int:
    """Return the kernels' code of a dtype."""
    return DTYPES.index(dtype)


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first entry, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


@cache
def _quota() -> int:
    """Return the processors that a container may use at most, rounded up; all by default."""
    try:
        most, period = CPU_QUOTA.read_text().split()
        return max(1, math.ceil(int(most) / int(period)))
    except (OSError, ValueError):  # no container, or "max"
        return os.cpu_count() or 1


def thread_count() -> int:
    """Return the threads of a kernel: torch's, but no more than the container's share of the machine."""
    return min(torch.get_num_threads(), max(_quota(), 1))


@cache
def share_torch_threads() -> bool:
    """Let the kernels run on torch's own OpenMP threads, if it brings GNU's; otherwise they use threads of their own.

    Torch's threads wait for more work in a loop for a while. Threads of another pool would compete with them for processors.
    """
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    try:
        library = ctypes.CDLL(str(libraries[0]))
        functions = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
    except (IndexError, OSError, AttributeError):
        return False
    core.use_openmp(*(int(ctypes.cast(function, ctypes.c_void_p).value or 0) for function in functions))
    return True


if core is not None:
    share_torch_threads()


def pack(weight: Tensor) -> Tensor:
    """Return a weight [E, K] in the kernels' layout, as bytes."""
    outputs, inputs = weight.shape
    weight, code = weight.detach().contiguous(), code_of(weight.dtype)
    packed = torch.empty(core.packed_bytes(code, outputs, inputs) + 64, dtype=torch.uint8)
    packed = packed[-packed.data_ptr() % 64 :]
    core.pack(code, address(weight), outputs, inputs, address(packed), thread_count())
    return packed


def pack_int4(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return a weight in four bits in the kernels' layout, as bytes.

    Args:
        numbers: [E, K] of 0 to 15; K is a multiple of 32.
        scales: [K / 32, E, 2] bfloat16: the step of each group, and the value of number 8.
    """
    outputs, inputs = numbers.shape
    numbers, scales = numbers.to(torch.uint8).contiguous(), scales.detach().to(torch.bfloat16).contiguous()
    packed = torch.empty(core.packed_bytes(INT4, outputs, inputs) + 64, dtype=torch.uint8)
    packed = packed[-packed.data_ptr() % 64 :]
    core.pack_int4(address(numbers), address(scales), outputs, inputs, address(packed), thread_count())
    return packed


def linear(layer: Any, rows: Tensor) -> Tensor:
    """Return [..., E] of rows [..., K]; `layer` is a `core.Linear`."""
    rows = rows.contiguous()
    out = rows.new_empty(*rows.shape[:-1], layer.outputs)
    core.linear(layer, code_of(rows.dtype), address(rows), rows.numel() // layer.inputs, address(out), thread_count())
    return out


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return rows [..., D] divided by the root of their mean square, rounded, times a weight [D]; all are contiguous."""
    out, width = torch.empty_like(rows), rows.shape[-1]
    core.rms_norm(code_of(rows.dtype), address(rows), address(weight), address(out), rows.numel() // width, width, epsilon)
    return out


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return heads [N, H, D] with their halves rotated by the angles [N, D] of their token; all are contiguous."""
    out, (tokens, count, width) = torch.empty_like(heads), heads.shape
    places = address(heads), address(cosines), address(sines), address(out)
    core.rotate(code_of(heads.dtype), *places, tokens, count, width)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) times up; both are contiguous."""
    out = torch.empty_like(gate)
    core.swiglu(code_of(gate.dtype), address(gate), address(up), address(out), gate.numel())
    return out
