"""Decoder layers of the Llama kind by native kernels, over packed weights (`native/`).

A layer of transformers takes some hundred operations of torch; here all layers of a pass are one
call. They are batch invariant.

Shapes: R sequences, n tokens of each, S slots, H entries of a hidden state, G key-value heads, D
entries of a head.
"""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from draftree.models.int4_linear import FourBits
from draftree.models.invariant_attention import additive
from draftree.models.kv_cache import Within
from draftree.models.llama_structure import (
    CHILDREN,
    child_names,
    differs_by_rounding,
    epsilon,
    first_linears,
    linears,
)
from draftree.models.native_linear import can_pack
from draftree.models.packed_linear import let_go
from draftree.native import transformer_kernels
from draftree.native.transformer_kernels import address
from draftree.tree import Ints

FIRST_PART, SECOND_PART, BOTH = 1, 2, 3
"""Parts of a layer: up to the keys and values that it stores, and from its attention on."""
UNIT = 32
"""The outputs of the gate and of the up projection alternate in units of it."""


class PreparedLayer(nn.Module, ABC):
    """Describe a drafter's layer that prepares its own input and continues as a Llama layer.

    Attributes:
        self_attn: its attention, which may read wider rows than it makes.
        mlp: its feed-forward layer.
        post_attention_layernorm: the norm before that.
        native: the same layer by native kernels, where they are used.
    """

    self_attn: nn.Module
    mlp: nn.Module
    post_attention_layernorm: nn.Module
    native: "NativeLayer | None" = None


@dataclass(frozen=True)
class Sizes:
    """Hold what layers must have in common to be computed in one call.

    Attributes:
        width: D.
        groups: G.
        heads: query heads that share a key-value head.
        deep: H.
        reads: entries of the rows that attention reads.
        inner: entries between the two products of the feed-forward layer.
        dtype: of all weights.
        four: whether weights are held in four bits.
        scale: of scores.
    """

    width: int
    groups: int
    heads: int
    deep: int
    reads: int
    inner: int
    dtype: torch.dtype
    four: bool
    scale: float

    @property
    def shape(self) -> Any:
        """Return the sizes in the form that the kernels read."""
        code = transformer_kernels.code_of(self.dtype)
        return transformer_kernels.core.Shape(
            self.deep, self.inner, self.groups, self.heads, self.width, code, self.scale
        )


@dataclass(frozen=True)
class Angles:
    """Hold cosines and sines [P, D] of positions, and the index [N] of each token's."""

    cosines: Tensor
    sines: Tensor
    positions: Ints

    @classmethod
    def in_order(cls, turned: tuple[Tensor, Tensor], rows: int, n: int) -> "Angles":
        """Return the angles that are given for each token, [R or 1, n, D]."""
        positions = np.arange(len(turned[0]) * n, dtype=np.int64)
        cosines, sines = (t.contiguous() for t in turned)
        if len(cosines) != rows:
            positions = np.tile(positions, rows)
        return cls(cosines, sines, positions)


@dataclass(frozen=True)
class Head:
    """Hold the last norm of a pass, and its LM head if that is native.

    Attributes:
        norm: as the kernels read it.
        linear: the LM head as the kernels read it; None for no head.
        states: [N, H] where the norm's output is written.
        logits: [N, V].
    """

    norm: Any
    linear: Any
    states: Tensor
    logits: Tensor | None


@final
class NativeLayer:
    """Compute one layer by native kernels.

    Args:
        module: a layer that `fits`; its weights are not expected to change.

    Attributes:
        sizes: the sizes of the layer.
        record: the layer in the form that the kernels read.
    """

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        width, heads = int(attention.head_dim), attention.o_proj.in_features
        first, gates = first_linears(attention), first_linears(mlp)
        groups = (sum(linear.out_features for linear in first) - heads) // 2 // width
        self.sizes = Sizes(
            width=width,
            groups=groups,
            heads=heads // width // groups,
            deep=mlp.down_proj.out_features,
            reads=first[0].in_features,
            inner=mlp.down_proj.in_features,
            dtype=module.post_attention_layernorm.weight.dtype,
            four=type(mlp.down_proj) is FourBits,
            scale=float(attention.scaling),
        )
        self._held: list[Any] = [module]  # whose memory the record reads
        prepared = isinstance(module, PreparedLayer)
        prepared = prepared or isinstance(module.input_layernorm, nn.Identity)
        self.record = transformer_kernels.core.Layer(
            input_norm=norm_record(None if prepared else module.input_layernorm),
            qkv=self._linear(_joined, *first),
            q_norm=norm_record(getattr(attention, "q_norm", None)),
            k_norm=norm_record(getattr(attention, "k_norm", None)),
            o_proj=self._linear(_joined, attention.o_proj),
            post_norm=norm_record(module.post_attention_layernorm),
            gate_up=self._linear(_alternating, *gates, pieces=2 // len(gates)),
            down=self._linear(_joined, mlp.down_proj),
        )

    @property
    def bytes(self) -> int:
        """Return the size of the packed weights."""
        return sum(t.nbytes for t in self._held[1:] if t is not None)

    def release(self) -> None:
        """Release the memory of the weights that were packed, if they are mapped from a file."""
        for part in self._held[0].modules():
            if isinstance(part, FourBits):
                part.release()
            for weight in (p for p in part.parameters(recurse=False) if p.dim() > 1):
                let_go(weight)

    def _linear(self, join: Callable[..., Tensor], *linears: Any, pieces: int = 1) -> Any:
        """Return linear layers of the same inputs as one, with the outputs joined.

        Args:
            join: joins tensors along a dimension.
            linears: the layers.
            pieces: the number of layers that each of them stands for; those of a fused one are
                views.
        """
        first = linears[0]

        def joined(name: str, dim: int = 0) -> Tensor:
            tensors = (getattr(linear, name).detach() for linear in linears)
            return join(dim, *(piece for tensor in tensors for piece in tensor.chunk(pieces, dim)))

        bias = None if first.bias is None else joined("bias")
        if type(first) is FourBits:
            packed, code = (
                transformer_kernels.pack_int4(joined("numbers"), joined("scales", 1)),
                transformer_kernels.INT4,
            )
        else:
            packed, code = (
                transformer_kernels.pack(joined("weight")),
                transformer_kernels.code_of(first.weight.dtype),
            )
        self._held += packed, bias
        outputs = sum(linear.out_features for linear in linears)
        return transformer_kernels.core.Linear(
            address(packed), address(bias), first.in_features, outputs, code
        )

    def __deepcopy__(self, memo: Any) -> "NativeLayer":
        """Return the layer itself: its packed weights do not change."""
        return self


def run_layers(
    layers: Sequence[NativeLayer],
    x: Tensor,
    angles: Angles,
    within: Within,
    mask: Tensor | None,
    parts: int = BOTH,
    read: Tensor | None = None,
    wanted: Mapping[int, Tensor] = MappingProxyType({}),
    head: Head | None = None,
    table: Ints | None = None,
) -> Tensor:
    """Run layers of the same sizes, one after the other, in one call.

    Args:
        layers: one layer at least.
        x: [R, n, H] what the first one's output is added to.
        angles: of the tokens.
        within: the first layer's keys and values; those of the others follow.
        mask: [R or 1, 1, n, S] added to the scores; by default causal.
        parts: of the layers.
        read: [R, n, …] what the first one's attention reads; x by default.
        wanted: [R, n, H] where the outputs of some layers are written, by their place among them.
        head: after the last layer.
        table: [R' + 1, 5] of packed sequences, x being [1, N, H]: of each its first token, the slot
            of that, the slots seen, where its mask [n, S] begins in `mask`, and that mask's S.

    Returns:
        [R, n, H] after the last layer, if its second part is run.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    given = mask is not None and mask.dtype is x.dtype and mask.stride(-1) == 1
    if parts & SECOND_PART and not given:
        mask = additive(x[:, None], within.slots, mask).to(x.dtype).contiguous()
    keys = within.keys
    values = within.values
    it = transformer_kernels.core.Pass()
    it.shape, it.parts = layers[0].sizes.shape, parts
    it.sequences, it.tokens = x.shape[:2]
    it.input, it.residual = address(x if read is None else read), address(x)
    it.cosines, it.sines = address(angles.cosines), address(angles.sines)
    it.positions = angles.positions.ctypes.data
    it.starts = 0 if within.starts is None else within.starts.ctypes.data
    it.keys = address(keys)
    it.key_strides = keys.stride()[:3]
    it.key_layer = within.of_keys
    it.values, it.value_strides = address(values), values.stride()[:3]
    it.value_layer = within.of_values
    if table is not None:
        it.sequences = len(table) - 1
        it.table = table.ctypes.data
        it.mask = address(mask)
    elif mask is not None:
        it.mask = address(mask)
        it.mask_strides = (mask.stride(0) * (len(mask) > 1), mask.stride(2))
    it.slots, it.hidden_below = within.slots, torch.finfo(x.dtype).min / 2
    if head is not None:
        it.final_norm, it.final_states = head.norm, address(head.states)
        if head.linear is not None:
            it.head, it.logits = head.linear, address(head.logits)
    last = len(layers) - 1
    outputs = [address(wanted.get(i)) if i < last else address(out) for i in range(len(layers))]
    transformer_kernels.core.forward(
        it, [layer.record for layer in layers], outputs, transformer_kernels.thread_count()
    )
    return out


def norm_record(norm: Any) -> Any:
    """Return a norm in the form that the kernels read, or None for no norm."""
    if norm is None:
        return transformer_kernels.core.Norm()
    return transformer_kernels.core.Norm(address(norm.weight), epsilon(norm))


def _joined(dim: int, *parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _alternating(dim: int, *parts: Tensor) -> Tensor:
    """Return tensors whose units of outputs, along a dimension, alternate."""
    units = [part.unflatten(dim, (-1, UNIT)) for part in parts]
    return torch.stack(units, dim + 1).flatten(dim, dim + 2)


def _packable(linear: Any) -> bool:
    """Return whether there is a kernel for a linear layer."""
    if type(linear) is FourBits:
        return transformer_kernels.core is not None
    return isinstance(linear, nn.Linear) and can_pack(linear.weight, linear.bias)


def fits(module: Any) -> bool:
    """Return whether a module looks like a layer that the kernels can run."""
    if not isinstance(module, PreparedLayer) and child_names(module) != CHILDREN:
        return False
    found = linears(module)
    if found is None or len({type(x) for x in found}) > 1 or not all(map(_packable, found)):
        return False
    attention, mlp = module.self_attn, module.mlp
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) != 1 or [*attention.parameters(recurse=False)]:
        return False
    widths = [getattr(attention, "head_dim", None), mlp.down_proj.in_features]
    widths += (x.out_features for x in found)
    return all(isinstance(w, int) and w % UNIT == 0 for w in widths)


@torch.inference_mode()
def agrees(module: Any, ours: NativeLayer) -> bool:
    """Return whether a layer and its native form differ by rounding alone.

    The states are random; some see each other and some do not.
    """
    n = 5
    draw = torch.Generator().manual_seed(0)
    sizes = ours.sizes
    dtype = sizes.dtype
    x, ready = (
        torch.empty(2, n, deep).normal_(generator=draw).to(dtype)
        for deep in (sizes.deep, sizes.reads)
    )
    angles = torch.empty(2, n, sizes.width // 2).uniform_(0, 6, generator=draw).repeat(1, 1, 2)
    turned = angles.cos().to(dtype), angles.sin().to(dtype)
    mask = torch.full((2, 1, n, n), torch.finfo(dtype).min, dtype=dtype).triu(1)
    mask[0, 0, 3, 1:3] = torch.finfo(dtype).min
    prepared = isinstance(module, PreparedLayer)
    try:
        if prepared:
            wanted = finish_layer(module, ready, x, turned, mask, {})
        else:
            wanted = module(x, attention_mask=mask, position_embeddings=turned)
    except Exception:  # a layer of that look that takes something else is another one
        return False
    if not isinstance(wanted, Tensor):
        return False
    k, v = (x.new_empty(2, sizes.groups, n, sizes.width) for _ in range(2))
    given = Angles.in_order(turned, 2, n), Within(k, v, None, n), mask
    found = run_layers([ours], x, *given, read=ready if prepared else None)
    return differs_by_rounding(found, wanted, x)


def finish_layer(
    layer: PreparedLayer,
    ready: Tensor,
    before: Tensor,
    turned: tuple[Tensor, Tensor],
    mask: Tensor,
    cache: dict[str, Any],
) -> Tensor:
    """Return [R, n, H] after a layer whose input is ready, by its modules.

    Args:
        layer: a layer of a drafter.
        ready: [R, n, …] what its attention reads.
        before: [R, n, H] what that is added to.
        turned: [R, n, D] cosines and sines of the positions.
        mask: [R or 1, 1, n, S] added to the scores.
        cache: under the name that the attention has for it.
    """
    attended, _ = layer.self_attn(ready, position_embeddings=turned, attention_mask=mask, **cache)
    x = before + attended
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out
