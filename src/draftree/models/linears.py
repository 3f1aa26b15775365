"""Linear layers on a CPU by another kernel than torch's own: oneDNN's over weights laid out for it beforehand, or ours.

Torch's own reads a weight as it lies, which over a few tokens uses some half of the memory's speed, and in float32 a pass over
eight tokens takes up to twice as long as one over a token. Laid out in blocks, the same multiplication takes about as long
for eight as for one. Which is faster depends on the processor and the shape, so both are timed here, and the answer is kept.

Shapes: n tokens of a pass, D and E entries of a row before and after.
"""

import ctypes
import json
import mmap
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from draftree.boundary.files import read_object, write_text
from draftree.boundary.machine import interleaved, kept, machine
from draftree.errors import UserError
from draftree.models.native_linear import NativeLinear, can_pack
from draftree.models.sources import Kernels

TRIED = (1, 8)
"""Tokens of a pass over which kernels are timed: plain decoding's, and a tree's."""
SMALL, SOME = 1 << 16, 8
"""Entries of a weight below which nothing is won, and layers of a shape that are timed: more than a cache holds."""
PAGEOUT = 21
"""Linux's MADV_PAGEOUT: what lies in a file is dropped, nothing is lost."""
LONGEST = 0.15
"""Seconds in which the kernels of a shape are timed."""


@final
class Packed:
    """Multiplies by a weight that is laid out in blocks for oneDNN.

    Args:
        weight: [E, D], which stays what it is.
        bias: [E], if there is one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __call__(self, rows: Tensor) -> Tensor:
        """[…, E] of rows […, D]."""
        made: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, self._blocks, self._bias, "none", [], "")
        return made


@final
class Laid:
    """A weight as it is laid out for a kernel, and whether it is still that weight.

    Args:
        kind: of the kernel.
        weight: [E, D], which stays what it is: for gradients, for all who read it, and for when it is changed.
        bias: [E], if there is one.
    """

    def __init__(self, kind: type[Packed] | type[NativeLinear], weight: Tensor, bias: Tensor | None) -> None:
        self.kind, self._weight, self._bias = kind, weight, bias
        self._place, self._version = weight.data_ptr(), weight._version
        self.multiply = kind(weight, bias)

    def of(self, weight: Tensor, bias: Tensor | None) -> bool:
        """True where these are the weight that was laid out, unchanged, and its bias, which is read where it lies."""
        same = weight is self._weight and bias is self._bias
        return same and weight._version == self._version and weight.data_ptr() == self._place


def quicken(model: nn.Module, kernels: Kernels | None = None, but: Container[nn.Module] = ()) -> None:
    """Lets a model's linear layers be computed by the faster kernel; what they are made of stays what it is.

    A weight that changes, or that a gradient is wanted for, is multiplied by torch's own kernel again.

    Args:
        model: whose weights are not expected to change.
        kernels: `stock` leaves it as it is, `packed` takes oneDNN's wherever that can be had, `native` ours; by default the
            faster one of the first two.
        but: modules that are left as they are.
    """
    alike: dict[tuple[Any, ...], list[nn.Linear]] = {}
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    ours = kernels in ("native", "tiled")
    kind, able = (NativeLinear, can_pack) if ours else (Packed, packable)
    for module in model.modules():
        if type(module) is nn.Linear and module not in but and able(module.weight, module.bias):
            alike.setdefault((*module.weight.shape, module.bias is None, module.weight.dtype), []).append(module)
    for same in alike.values():
        if ours or kernels == "packed" or (kernels is None and same[0].weight.numel() >= SMALL and faster(same)):
            for module in same:
                by = partial(_forward, by=Laid(kind, module.weight, module.bias))
                module.forward = MethodType(by, module)  # type: ignore[method-assign]
                if id(module.weight) not in looked_up:
                    let_go(module.weight)


def let_go(weight: Tensor) -> None:
    """Gives back the memory of a weight that lies in a file; who reads it again has it read from there.

    So a packed weight is in memory once. One that was converted as it was loaded stays there twice, as it is in no file.
    """
    size = mmap.PAGESIZE
    begin, end = -(-weight.data_ptr() // size) * size, (weight.data_ptr() + weight.nbytes) // size * size
    if sys.platform == "linux" and begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), PAGEOUT)  # no harm where it fails


def packable(weight: Tensor, bias: Tensor | None) -> bool:
    """True for weights that oneDNN multiplies on this machine."""
    given = (weight,) if bias is None else (weight, bias)
    if not all(t.device.type == "cpu" and type(t.data) is Tensor and not t.is_inference() for t in given):
        return False
    ops, here = torch.ops.mkldnn, torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    half = {torch.bfloat16: ops._is_mkldnn_bf16_supported, torch.float16: ops._is_mkldnn_fp16_supported}
    return here and (weight.dtype is torch.float32 or (weight.dtype in half and bool(half[weight.dtype]())))


def laid(module: nn.Module) -> Laid | None:
    """The weight of a layer as it is laid out for a kernel; None where the layer is computed as torch does it."""
    own = vars(module).get("forward")
    ours = isinstance(own, MethodType) and getattr(own.__func__, "func", None) is _forward
    return own.__func__.keywords["by"] if ours else None  # type: ignore[union-attr]


def is_packed(module: nn.Module) -> bool:
    """True where a layer is computed by another kernel than torch's own."""
    return laid(module) is not None


def packed_shapes(model: nn.Module) -> list[str]:
    """The shapes [E, D] of the layers that are computed by another kernel than torch's, for the record."""
    found = ((m.weight.shape, by.kind) for m in model.modules() if isinstance(m, nn.Linear) and (by := laid(m)))
    return sorted({"x".join(map(str, shape)) + " native" * (kind is NativeLinear) for shape, kind in found})


def rows_of(head: nn.Module, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Multiplies by some rows of a linear layer, by the kernel that the layer itself is computed by."""
    if (own := laid(head)) is None:
        return lambda states: linear(states, weight, bias)
    by = own.kind(weight, bias)
    return lambda states: linear(states, weight, bias) if states.requires_grad else by(states)


def _forward(module: nn.Linear, rows: Tensor, by: Laid) -> Tensor:
    """The layer of a module, by blocks while they are those of its weight."""
    weight, bias = module.weight, module.bias
    if (torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)) or not by.of(weight, bias):
        return linear(rows, weight, bias)
    return by.multiply(rows)


def faster(layers: Sequence[nn.Linear]) -> bool:
    """True where layers of one shape take less time by oneDNN's kernel on this machine; timed once, and kept."""
    weight = layers[0].weight
    some = [torch.ones(n, weight.shape[1], dtype=weight.dtype) for n in TRIED]

    def work(by: Callable[[], Sequence[Callable[[Tensor], Any]]]) -> Callable[[], Any]:
        laid_out = by()
        return lambda: [layer(rows) for rows in some for layer in laid_out]

    stock = lambda: [partial(linear, weight=layer.weight, bias=layer.bias) for layer in layers[:SOME]]
    packed = lambda: [Packed(layer.weight, layer.bias) for layer in layers[:SOME]]
    about = {"dtype": str(weight.dtype), "shape": str(tuple(weight.shape)), "tried": str(TRIED)}
    return quicker("kernels", about, lambda: (work(stock), work(packed)))


@torch.inference_mode()
def quicker(topic: str, about: Mapping[str, str], works: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]) -> bool:
    """True where the second of two works takes less time on this machine; timed once, and kept.

    Args:
        topic: the folder where it is kept.
        about: what it depends on beside the machine.
        works: makes both.
    """
    cpu = torch.device("cpu")
    told = {**machine(cpu), **about}
    path = kept(topic, told)
    with suppress(UserError, KeyError, TypeError):
        if path.is_file():
            return bool(read_object(path, topic)["packed"] < 1)
    own, ours = interleaved(works(), cpu, LONGEST)
    with suppress(OSError):  # a home that cannot be written to: timed again the next time
        write_text(path, json.dumps({"packed": ours / own, "about": told}, indent=1))
    return ours < own
