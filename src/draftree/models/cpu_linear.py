"""Linear layers on a CPU over packed weights, by oneDNN or the native kernels.

Torch's own kernel reads a weight in its stored layout. For a few tokens this uses about half of the
memory's speed, and in float32 a pass over eight tokens takes up to twice as long as one over one
token. With a weight packed in blocks, eight tokens take about as long as one. Which kernel is
faster depends on the processor and the shape, so both are timed here, and the result is saved.

Shapes: D and E entries of a row before and after, V′ selected outputs of an LM head.
"""

import copy
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from draftree.models.backend_names import Kernels
from draftree.models.native_linear import NativeLinear, can_pack
from draftree.utils.hardware import drop_pages, second_is_faster

TIMED_BATCH_SIZES = (1, 8)
"""Pass widths at which kernels are timed: the width of plain decoding, and of a draft tree."""
MIN_WEIGHT_ENTRIES, MAX_TIMED_LAYERS = 1 << 16, 8
"""Number of entries below which a weight is not packed.

`MAX_TIMED_LAYERS` is the number of layers of a shape that are timed in turn; together they exceed the
processor's cache.
"""


@final
class Packed:
    """Multiply by a weight that is packed in blocks for oneDNN.

    Args:
        weight: [E, D] the weight, which must not change.
        bias: [E] the bias; None for none.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def with_rows(self, weight: Tensor, bias: Tensor | None) -> "Packed":
        """Return a product with other weights [E′, D]."""
        return Packed(weight, bias)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the outputs […, E] for inputs […, D]."""
        made: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            rows, self._blocks, self._bias, "none", [], ""
        )
        return made


@final
class KernelLinear(nn.Linear):
    """Compute a linear layer on a CPU by another kernel than torch's own.

    A deep copy is a stock linear layer again, because the weights of the copy may change.

    Args:
        linear: the layer that it replaces; its weight and bias must not change.
        kind: makes the kernel from the weight and the bias.

    Attributes:
        kernel: multiplies inputs by the weight and adds the bias.
    """

    def __init__(
        self, linear: nn.Linear, kind: Callable[[Tensor, Tensor | None], Packed | NativeLinear]
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.training = linear.training
        self.kernel = kind(linear.weight, linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the outputs […, E] for inputs […, D]."""
        given = rows.requires_grad or self.weight.requires_grad
        if (torch.is_grad_enabled() and given) or rows.dtype is not self.weight.dtype:
            return linear(rows, self.weight, self.bias)
        return self.kernel(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """Return a stock linear layer with copies of the weights."""
        other = nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta")
        other.weight = copy.deepcopy(self.weight, memo)
        other.bias = copy.deepcopy(self.bias, memo)
        return other.train(self.training)


def use_kernels(
    model: nn.Module, kernels: Kernels | None = None, but: Container[nn.Module] = ()
) -> None:
    """Replace a model's linear layers by layers with the faster kernel.

    Args:
        model: a model loaded by draftree; its weights must not change.
        kernels: `stock` keeps torch's, `packed` uses oneDNN's wherever possible, `native` uses
            draftree's; by default the faster one of the first two.
        but: modules that are not replaced.
    """
    alike: dict[tuple[Any, ...], list[tuple[nn.Module, str, nn.Linear]]] = {}
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    ours = kernels in ("native", "tiled")
    kind, able = (NativeLinear, can_pack) if ours else (Packed, packable)
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is not nn.Linear or child in but:
                continue
            if able(child.weight, child.bias):
                shape = *child.weight.shape, child.bias is None, child.weight.dtype
                alike.setdefault(shape, []).append((parent, name, child))
    for same in alike.values():
        linears = [child for *_, child in same]
        large = linears[0].weight.numel() >= MIN_WEIGHT_ENTRIES
        if ours or kernels == "packed" or (kernels is None and large and is_onednn_faster(linears)):
            made: dict[nn.Linear, KernelLinear] = {}
            for parent, name, child in same:
                if child not in made:
                    made[child] = KernelLinear(child, kind)
                setattr(parent, name, made[child])
                if id(child.weight) not in looked_up:
                    drop_pages(child.weight)


def round_head(model: PreTrainedModel) -> None:
    """Let a model's LM head multiply by its weight in eight bits, if native kernels support it.

    The weight itself stays as it is, for an embedding that shares it and for drafters. The model's
    layers must run on native kernels, so that their sizes are multiples of a group's 32.
    """
    head: Any = model.get_output_embeddings()
    if type(head) is nn.Linear and can_pack(head.weight, head.bias):
        model.set_output_embeddings(KernelLinear(head, partial(NativeLinear, eight_bits=True)))
        embedding: Any = model.get_input_embeddings()
        if embedding.weight is not head.weight:
            drop_pages(head.weight)


def packable(weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether oneDNN can multiply by a weight on this machine."""
    given = (weight,) if bias is None else (weight, bias)
    if not all(
        t.device.type == "cpu" and type(t.data) is Tensor and not t.is_inference() for t in given
    ):
        return False
    ops, here = (
        torch.ops.mkldnn,
        torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
    )
    half = {
        torch.bfloat16: ops._is_mkldnn_bf16_supported,
        torch.float16: ops._is_mkldnn_fp16_supported,
    }
    return here and (
        weight.dtype is torch.float32 or (weight.dtype in half and bool(half[weight.dtype]()))
    )


def packed_shapes(model: nn.Module) -> list[str]:
    """Return the shapes [E, D] of the linear layers that use another kernel than torch's."""
    found = [m for m in model.modules() if isinstance(m, KernelLinear)]
    native = {m: " native" * isinstance(m.kernel, NativeLinear) for m in found}
    return sorted({"x".join(map(str, m.weight.shape)) + native[m] for m in found})


def make_row_product(
    head: nn.Module, weight: Tensor, bias: Tensor | None, for_drafts: bool = False
) -> Callable[[Tensor], Tensor]:
    """Return a function that computes some outputs of an LM head, with the kernel of that head.

    Args:
        head: the LM head.
        weight: [V′, D] the weights of these outputs.
        bias: [V′] their biases; None for none.
        for_drafts: whether they may be computed less exactly.
    """
    if not isinstance(head, KernelLinear):
        return lambda states: linear(states, weight, bias)
    kernel = head.kernel
    rounded = for_drafts and isinstance(kernel, NativeLinear)
    by = NativeLinear.for_drafts(weight, bias) if rounded else kernel.with_rows(weight, bias)
    return lambda states: linear(states, weight, bias) if states.requires_grad else by(states)


def is_onednn_faster(layers: Sequence[nn.Linear]) -> bool:
    """Return whether layers of one shape are faster with oneDNN's kernel on this machine.

    The first comparison is timed, and its result is saved.
    """
    weight = layers[0].weight
    some = [torch.ones(n, weight.shape[1], dtype=weight.dtype) for n in TIMED_BATCH_SIZES]

    def work(by: Callable[[], Sequence[Callable[[Tensor], Any]]]) -> Callable[[], Any]:
        laid_out = by()
        return lambda: [layer(rows) for rows in some for layer in laid_out]

    stock = lambda: [
        partial(linear, weight=layer.weight, bias=layer.bias) for layer in layers[:MAX_TIMED_LAYERS]
    ]
    packed = lambda: [Packed(layer.weight, layer.bias) for layer in layers[:MAX_TIMED_LAYERS]]
    about = {
        "dtype": str(weight.dtype),
        "shape": str(tuple(weight.shape)),
        "tried": str(TIMED_BATCH_SIZES),
    }
    return second_is_faster("kernels", about, lambda: (work(stock), work(packed)))
