"""Llama-like decoder layers by native kernels over packed weights.

A layer of transformers takes some hundred operations of torch; here all layers of a pass are one
call. They are batch invariant.

Shapes: R sequences, n tokens of each, S slots, H entries of a hidden state, G key-value heads, D
entries of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from draftree.models.int4_linear import Int4Linear
from draftree.models.invariant_attention import to_additive_mask
from draftree.models.kv_cache import KVView
from draftree.models.llama_structure import (
    CHILDREN,
    causal_mask,
    child_names,
    epsilon,
    first_linears,
    is_rms_norm,
    linears,
    norms,
)
from draftree.models.native_linear import can_pack
from draftree.models.numeric_agreement import differs_by_rounding
from draftree.models.pair_layer import PairLayer, Pairs
from draftree.native import cpu_threads, transformer_kernels
from draftree.native.transformer_kernels import address
from draftree.tree import Ints
from draftree.utils.hardware import drop_pages

FIRST_PART, SECOND_PART, BOTH = 1, 2, 3
"""Parts of a layer: up to storing keys and values; from attention on; or both."""
BLOCK_OUTPUTS = 32
"""Number of outputs in a block: blocks of the gate and of the up projection alternate in memory."""
MAX_HEAD_DIM = 1024
"""The largest attention head that the kernels support."""


@dataclass(frozen=True)
class Sizes:
    """Hold the properties that layers must share to be computed in one call.

    Attributes:
        head_dim: D, the size of an attention head.
        kv_heads: G, the number of key-value heads.
        heads_per_kv_head: the number of query heads that share a key-value head.
        hidden_size: H, the size of a hidden state.
        intermediate_size: the size of the feed-forward layer's inner vector.
        dtype: the dtype of the norms, and of weights that are not stored in 4 bits.
        int4: whether the weights of linear layers are stored in 4 bits (`Int4Linear`).
        scale: the factor by which attention scores are multiplied.
    """

    head_dim: int
    kv_heads: int
    heads_per_kv_head: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    int4: bool
    scale: float

    @property
    def shape(self) -> Any:
        """Return the sizes in the form that the kernels read."""
        code = transformer_kernels.code_of(self.dtype)
        return transformer_kernels.core.Shape(
            self.hidden_size,
            self.intermediate_size,
            self.kv_heads,
            self.heads_per_kv_head,
            self.head_dim,
            code,
            self.scale,
        )


@dataclass(frozen=True)
class Angles:
    """Hold rotary cosines and sines by position, and the position index of each token.

    Attributes:
        cosines: [P, D] by position.
        sines: [P, D] by position.
        positions: [N] each token's index into them.
    """

    cosines: Tensor
    sines: Tensor
    positions: Ints

    @classmethod
    def in_order(cls, turned: tuple[Tensor, Tensor], rows: int, n: int) -> "Angles":
        """Return angles from cosines and sines [R or 1, n, D] that are given token by token."""
        positions = np.arange(len(turned[0]) * n, dtype=np.int64)
        cosines, sines = (t.contiguous() for t in turned)
        if len(cosines) != rows:
            positions = np.tile(positions, rows)
        return cls(cosines, sines, positions)

    @property
    def without_rotation(self) -> "Angles":
        """Return angles of zero for the same tokens, for a layer that does not rotate."""
        cosines, sines = torch.ones_like(self.cosines[:1]), torch.zeros_like(self.sines[:1])
        return Angles(cosines, sines, np.zeros_like(self.positions))


@dataclass(frozen=True)
class Head:
    """Hold the final norm of a pass, and the LM head if it is native.

    Attributes:
        norm: the norm in the form that the kernels read.
        linear: the LM head in the form that the kernels read; None if it is not native.
        states: [N, H] memory for the norm's output.
        logits: [N, V] memory for the logits; None without a native head.
    """

    norm: Any
    linear: Any
    states: Tensor
    logits: Tensor | None


@dataclass(frozen=True)
class PackedMask:
    """Hold which slots the tokens of packed sequences see.

    Attributes:
        values: the masks [n, S] of the sequences, one after the other, added to the scores.
        table: [R + 1, 5] the layout: for each sequence the first token, the slot of that token, the
            number of visible slots, the offset of its mask in `values`, and the S of that mask.
        depths: [N] the number of each token's ancestors among the pass's tokens; None if all of
            them are visible, that is, without a sliding window.
    """

    values: Tensor
    table: Ints
    depths: Ints | None = None


@dataclass(frozen=True)
class PassOutputs:
    """Hold the memory for outputs of a pass beside that of the last layer.

    Attributes:
        layers: [R, n, H] memory for the outputs of some layers, by index among the pass's layers.
        head: the final norm and LM head, if they follow the last layer.
        selected: [M] indices, from 0 to R n − 1, of the tokens for which the last layer's output,
            the final norm and the LM head are computed; None for all tokens.
    """

    layers: Mapping[int, Tensor] = field(default_factory=dict)
    head: Head | None = None
    selected: Ints | None = None


LAST_LAYER = PassOutputs()
"""Stands for the output of the last layer alone."""


@final
class NativeLayer:
    """Compute one layer by native kernels.

    Args:
        module: a layer for which `fits` returned True; its weights must not change.
        eight_bits: whether weights that are not stored in 4 bits are rounded to eight bits.

    Attributes:
        sizes: the sizes of the layer.
        record: the layer in the form that the kernels read.
        eight_bits: whether weights are rounded to eight bits.
        rotates: whether the attention rotates queries and keys. Some layers of SmolLM3 do not.
    """

    def __init__(self, module: Any, eight_bits: bool = False) -> None:
        self.eight_bits = eight_bits
        attention, mlp = module.self_attn, module.mlp
        self.rotates = bool(getattr(attention, "use_rope", True))
        width, heads = int(attention.head_dim), attention.o_proj.in_features
        first, gates = first_linears(attention), first_linears(mlp)
        groups = (sum(linear.out_features for linear in first) - heads) // 2 // width
        self.sizes = Sizes(
            head_dim=width,
            kv_heads=groups,
            heads_per_kv_head=heads // width // groups,
            hidden_size=mlp.down_proj.out_features,
            intermediate_size=mlp.down_proj.in_features,
            dtype=module.post_attention_layernorm.weight.dtype,
            int4=type(mlp.down_proj) is Int4Linear,
            scale=float(attention.scaling),
        )
        self._held: list[Any] = [module]  # keeps memory of the record
        unnormed = isinstance(module.input_layernorm, nn.Identity)
        self.record = transformer_kernels.core.Layer(
            input_norm=norm_record(None if unnormed else module.input_layernorm),
            feature_norm=norm_record(getattr(module, "hidden_norm", None)),
            qkv=self._linear(_concatenate, *first),
            q_norm=norm_record(getattr(attention, "q_norm", None)),
            k_norm=norm_record(getattr(attention, "k_norm", None)),
            o_proj=self._linear(_concatenate, attention.o_proj),
            post_norm=norm_record(module.post_attention_layernorm),
            gate_up=self._linear(_alternating, *gates, pieces=2 // len(gates)),
            down=self._linear(_concatenate, mlp.down_proj),
        )

    @property
    def weight_eps(self) -> float:
        """Return the relative precision of rounded weights; 0 if they are as precise as the layer."""
        return 1 / 127 if self.eight_bits else 0.0

    @property
    def bytes(self) -> int:
        """Return the size of the packed weights in bytes."""
        return sum(t.nbytes for t in self._held[1:] if t is not None)

    def release(self) -> None:
        """Release the memory of the original weights, if they are mapped from a file."""
        for part in self._held[0].modules():
            if isinstance(part, Int4Linear):
                part.release()
            for weight in (p for p in part.parameters(recurse=False) if p.dim() > 1):
                drop_pages(weight)

    def _linear(self, join: Callable[..., Tensor], *linears: Any, pieces: int = 1) -> Any:
        """Pack linear layers with the same input as one linear layer with all their outputs.

        Args:
            join: joins tensors along a dimension.
            linears: the layers.
            pieces: the number of projections that are fused in each of the layers.
        """
        first = linears[0]

        def join_tensors(name: str, dim: int = 0) -> Tensor:
            tensors = (getattr(linear, name).detach() for linear in linears)
            return join(dim, *(piece for tensor in tensors for piece in tensor.chunk(pieces, dim)))

        bias = None if first.bias is None else join_tensors("bias")
        if type(first) is Int4Linear:
            packed, code = (
                transformer_kernels.pack_int4(join_tensors("numbers"), join_tensors("scales", 1)),
                transformer_kernels.INT4,
            )
        elif self.eight_bits:
            packed, code = (
                transformer_kernels.pack_int8(join_tensors("weight")),
                transformer_kernels.INT8,
            )
        else:
            packed, code = (
                transformer_kernels.pack(join_tensors("weight")),
                transformer_kernels.code_of(first.weight.dtype),
            )
        self._held += packed, bias
        outputs = sum(linear.out_features for linear in linears)
        return transformer_kernels.core.Linear(
            address(packed), address(bias), first.in_features, outputs, code
        )

    def __deepcopy__(self, memo: Any) -> "NativeLayer":
        """Return the layer itself, because its packed weights do not change."""
        return self


def run_layers(
    layers: Sequence[NativeLayer],
    x: Tensor,
    angles: Angles,
    within: KVView,
    mask: Tensor | PackedMask | None,
    parts: int = BOTH,
    pairs: Pairs | None = None,
    outputs: PassOutputs = LAST_LAYER,
) -> Tensor:
    """Run layers of the same sizes, one after the other, in one native call.

    Either all of them rotate queries and keys, or none.

    Args:
        layers: the layers; at least one.
        x: [R, n, H] the residual stream before the first layer.
        angles: the rotary angles of the tokens.
        within: the memory of the first layer's keys and values; that of the others follows it.
        mask: [R or 1, 1, n, S] added to the scores; by default causal. With a `PackedMask`, x is
            [1, N, H].
        parts: the parts of each layer that run.
        pairs: the attention inputs of a `PairLayer`, contiguous; x by default.
        outputs: memory for further outputs.

    Returns:
        The output of the last layer, if its second part is run: [R, n, H], or [M, H] for M selected
        tokens.
    """
    x = x.contiguous()
    angles = angles if layers[0].rotates else angles.without_rotation
    selected = outputs.selected
    out = torch.empty_like(x) if selected is None else x.new_empty(len(selected), x.shape[2])
    table = depths = None
    if isinstance(mask, PackedMask):
        table = mask.table
        depths = mask.depths
        mask = mask.values
    given = mask is not None and mask.dtype is x.dtype and mask.stride(-1) == 1
    if parts & SECOND_PART and not given:
        mask = to_additive_mask(x[:, None], within.slots, mask).to(x.dtype).contiguous()
    keys = within.keys
    values = within.values
    it = transformer_kernels.core.Pass()
    it.shape, it.parts = layers[0].sizes.shape, parts
    it.sequences, it.tokens = x.shape[:2]
    it.input = it.residual = address(x)
    if pairs is not None:
        it.input, it.features = address(pairs.embeddings), address(pairs.features)
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
        it.depths = 0 if depths is None else depths.ctypes.data
        it.mask = address(mask)
    elif mask is not None:
        it.mask = address(mask)
        it.mask_strides = (mask.stride(0) * (len(mask) > 1), mask.stride(2) * (mask.shape[2] > 1))
    it.slots, it.hidden_below = within.slots, torch.finfo(x.dtype).min / 2
    if selected is not None:
        it.selected, it.selected_count = selected.ctypes.data, len(selected)
    head = outputs.head
    if head is not None:
        it.final_norm, it.final_states = head.norm, address(head.states)
        if head.linear is not None:
            it.head, it.logits = head.linear, address(head.logits)
    last = len(layers) - 1
    ends = [outputs.layers.get(i) if i < last else out for i in range(len(layers))]
    records, addresses = [layer.record for layer in layers], [address(end) for end in ends]
    transformer_kernels.core.forward(it, records, addresses, cpu_threads.thread_count())
    return out


def norm_record(norm: Any) -> Any:
    """Return a norm in the form that the kernels read; an empty record stands for no norm."""
    if norm is None:
        return transformer_kernels.core.Norm()
    return transformer_kernels.core.Norm(address(norm.weight), epsilon(norm))


def _concatenate(dim: int, *parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _alternating(dim: int, *parts: Tensor) -> Tensor:
    """Join tensors along a dimension so that blocks of `BLOCK_OUTPUTS` outputs of each alternate."""
    units = [part.unflatten(dim, (-1, BLOCK_OUTPUTS)) for part in parts]
    return torch.stack(units, dim + 1).flatten(dim, dim + 2)


def _packable(linear: Any) -> bool:
    """Return whether the native kernels support a linear layer."""
    if type(linear) is Int4Linear:
        return transformer_kernels.core is not None
    return isinstance(linear, nn.Linear) and can_pack(linear.weight, linear.bias)


def fits(module: Any) -> bool:
    """Return whether a module has the structure of a layer that the kernels can run."""
    if not isinstance(module, PairLayer) and child_names(module) != CHILDREN:
        return False
    found = linears(module)
    if found is None or len({type(x) for x in found}) > 1 or not all(map(_packable, found)):
        return False
    if not all(isinstance(norm, nn.Identity) or is_rms_norm(norm) for norm in norms(module)):
        return False
    attention, mlp = module.self_attn, module.mlp
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) != 1:
        return False
    widths = [getattr(attention, "head_dim", None), mlp.down_proj.in_features]
    widths += (x.out_features for x in found)
    if not all(isinstance(w, int) and w % BLOCK_OUTPUTS == 0 for w in widths):
        return False
    return int(widths[0]) <= MAX_HEAD_DIM


@torch.inference_mode()
def agrees(module: Any, ours: NativeLayer) -> bool:
    """Return whether a layer and its native form differ only by rounding.

    Both run on random hidden states, with a mask that hides some earlier tokens.
    """
    n = 5
    draw = torch.Generator().manual_seed(0)
    sizes = ours.sizes
    dtype = sizes.dtype
    x, *pair = (
        torch.empty(2, n, sizes.hidden_size).normal_(generator=draw).to(dtype) for _ in range(3)
    )
    angles = torch.empty(2, n, sizes.head_dim // 2).uniform_(0, 6, generator=draw).repeat(1, 1, 2)
    turned = angles.cos().to(dtype), angles.sin().to(dtype)
    mask = causal_mask(n, x).repeat(2, 1, 1, 1)
    mask[0, 0, 3, 1:3] = torch.finfo(dtype).min
    pairs = Pairs(*pair) if isinstance(module, PairLayer) else None
    try:
        if pairs is not None:
            wanted = module.run_modules(pairs, x, turned, mask, {})
        else:
            wanted = module(x, attention_mask=mask, position_embeddings=turned)
    except Exception:  # a layer with other arguments is not supported
        return False
    if not isinstance(wanted, Tensor):
        return False
    k, v = (x.new_empty(2, sizes.kv_heads, n, sizes.head_dim) for _ in range(2))
    given = Angles.in_order(turned, 2, n), KVView(k, v, None, n), mask
    found = run_layers([ours], x, *given, pairs=pairs)
    return differs_by_rounding(found, wanted, x, ours.weight_eps)
