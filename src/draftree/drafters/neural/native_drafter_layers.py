"""Transformer layers of drafters by native kernels, in one call or two each.

Shapes: R sequences, n tokens, D entries.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import Cache

from draftree.models.backend_names import Kernels
from draftree.models.cpu_linear import KernelLinear, use_kernels
from draftree.models.fused_cpu_modules import (
    KernelRMSNorm,
    Replacement,
    named_submodules,
    replace_modules,
)
from draftree.models.kv_cache import KVView, Writer
from draftree.models.native_layers import (
    FIRST_PART,
    LAST_LAYER,
    SECOND_PART,
    Angles,
    Head,
    NativeLayer,
    PassOutputs,
    agrees,
    fits,
    run_layers,
)
from draftree.models.native_linear import NativeLinear, can_pack, rounds_drafters
from draftree.models.pair_layer import PairLayer, Pairs
from draftree.utils.hardware import drop_pages


@final
class KernelLayer(Replacement):
    """Compute a decoder layer of a drafter by native kernels, in one call or two.

    Args:
        replaced: the layer that is replaced.
        native: the same layer by native kernels.
    """

    def __init__(self, replaced: nn.Module, native: NativeLayer) -> None:
        super().__init__(replaced)
        self.native = native

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """Return the layer's output [R, n, D] for hidden states [R, n, D]."""
        turned, mask = given.get("position_embeddings"), given.get("attention_mask")
        if turned is None or not usable(self.native, mask, hidden_states, *turned):
            stock: Tensor = self.replaced_module(hidden_states, **given)
            return stock
        cache = given.get("cache", given.get("past_key_values"))
        index = int(self.self_attn.layer_idx)
        return run_native([self.native], index, hidden_states, turned, mask, cache)


def usable(native: NativeLayer, mask: Tensor | None, *given: Tensor) -> bool:
    """Return whether the native kernels support a pass with the given inputs."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    if mask is not None and mask.shape[1] != 1:
        return False
    return all(t.dtype is native.sizes.dtype and t.is_cpu for t in given)


def run_native(
    layers: Sequence[NativeLayer],
    index: int,
    x: Tensor,
    turned: tuple[Tensor, Tensor] | Angles,
    mask: Tensor | None,
    cache: Cache | None,
    pairs: Pairs | None = None,
    outputs: PassOutputs = LAST_LAYER,
) -> Tensor:
    """Run native layers, and return the hidden states after the last one.

    They are [R, n, D], or [M, D] for M selected tokens.

    With a cache of class `Writer` one call runs all layers, otherwise each layer is run separately.

    Args:
        layers: the layers.
        index: the index of the first layer in the cache.
        x: [R, n, D] the hidden states before the first layer.
        turned: [R or 1, n, D] cosines and sines of the rotary angles of the positions, or tables of
            them.
        mask: [R or 1, 1, n, S] added to the scores; by default causal.
        cache: stores keys and values, and returns the keys and values of all visible slots.
        pairs: the attention inputs of a `PairLayer`; x by default.
        outputs: memory for further outputs, and the selected tokens.
    """
    (rows, n, _), sizes = x.shape, layers[0].sizes
    angles = turned if isinstance(turned, Angles) else Angles.in_order(turned, rows, n)
    x = x.contiguous()
    within = cache.within(index) if isinstance(cache, Writer) else None
    if within is not None and within.more + 1 >= len(layers):
        return run_layers(layers, x, angles, within, mask, pairs=pairs, outputs=outputs)
    for place, layer in enumerate(layers):
        k, v = (x.new_empty(rows, sizes.kv_heads, n, sizes.head_dim) for _ in range(2))
        own = KVView(k, v, None, n)
        run_layers([layer], x, angles, own, None, FIRST_PART, pairs)
        if cache is not None:
            k, v = cache.update(k, v, index + place)
            k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (k, v))
            own = KVView(k, v, None, k.shape[2])
        last = outputs if place + 1 == len(layers) else LAST_LAYER
        x = run_layers([layer], x, angles, own, mask, SECOND_PART, outputs=last)
    return x


def native_head(norm: nn.Module, linear: nn.Module, x: Tensor, count: int) -> Head | None:
    """Return a norm and a head that a native pass computes after its layers, with their memory.

    It is None if they do not run on native kernels.

    Args:
        norm: the RMSNorm before the head.
        linear: the head.
        x: […, H] hidden states like those that the norm reads.
        count: the number of tokens that they read.
    """
    kernel = linear.kernel if isinstance(linear, KernelLinear) else None
    if not isinstance(kernel, NativeLinear) or not isinstance(norm, KernelRMSNorm):
        return None
    states = x.new_empty(count, x.shape[-1])
    return Head(norm.record, kernel.record, states, x.new_empty(count, kernel.wide))


def layer_kinds(network: nn.Module) -> list[str]:
    """Return the class names of a drafter's layers that native kernels compute, for the record."""
    found = {
        type(m.replaced_module).__name__ for m in network.modules() if isinstance(m, KernelLayer)
    }
    pairs = (m for m in network.modules() if isinstance(m, PairLayer) and m.native)
    return sorted(found | {type(m).__name__ for m in pairs})


def native_layer(module: nn.Module) -> NativeLayer | None:
    """Return a drafter's layer by native kernels, in eight bits if that is faster and near enough.

    It is None if the kernels compute something else than the layer.
    """
    for eight_bits in (True, False) if rounds_drafters() else (False,):
        native = NativeLayer(module, eight_bits)
        agreed = agrees(module, native)
        native.release()
        if agreed:
            return native
    return None


def accelerate(network: nn.Module, kernels: Kernels | None, layers: bool) -> None:
    """Replace the layers of a drafter's network by kernels, as was done for its target.

    Args:
        network: the network of a loaded drafter; its weights must not change.
        kernels: the option with which the target was loaded.
        layers: whether whole layers are replaced by native ones where possible.
    """
    inside = set[nn.Module]()
    if layers:
        for parent, name, child in [(None, "", network), *named_submodules(network)]:
            if child in inside or not fits(child):
                continue
            native = native_layer(child)
            if native is None:
                continue
            inside |= set(child.modules())
            if isinstance(child, PairLayer):
                child.native = native
                continue
            if parent is not None:
                setattr(parent, name, KernelLayer(child, native))
        head: Any = getattr(network, "lm_head", None)
        if type(head) is nn.Linear and can_pack(head.weight, head.bias):
            network.lm_head = KernelLinear(head, NativeLinear.for_drafts)
            drop_pages(head.weight)
    use_kernels(network, kernels or ("native" if layers else None), inside)
    replace_modules(network, kernels, inside)
