"""Decoder layers of the Llama kind by native kernels, over packed weights (`native/`).

A layer of a stock model takes some hundred operations of torch. Over a cache of ours all layers are one call, unless a hook
looks at what is between them; over another cache a layer is two calls, between which keys and values are handed to it. They
replace a model's own layers where a trial finds them equal (`compiling.py`), and are batch invariant.

Shapes: R sequences, n tokens of each, S slots, H entries of a hidden state, G key-value heads, D entries of a head.
"""

import operator
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, MethodType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from draftree.models.cache import Within, Writer
from draftree.models.ending import Ending, ending
from draftree.models.exact_attention import additive
from draftree.models.four_bits import FourBits
from draftree.models.linears import let_go
from draftree.native import dense
from draftree.native.dense import address
from draftree.tree import Ints

FIRST_PART, SECOND_PART, BOTH = 1, 2, 3
"""Of a layer: up to what it stores, and from its attention on."""
THROUGH = "draftree_layers"
"""An attribute of a tensor that several layers made in one call: those after the first one, which have nothing to do."""
UNIT = 32
"""The outputs of the gate and of the up projection alternate in units of it."""
_VERSION = operator.attrgetter("_version")


class PreparedLayer(nn.Module, ABC):
    """A layer of a drafter that makes its input ready in a way of its own, and goes on as a Llama's does.

    Attributes:
        self_attn: its attention, which may read wider rows than it makes.
        mlp: its feed-forward layer.
        post_attention_layernorm: the norm before that.
    """

    self_attn: nn.Module
    mlp: nn.Module
    post_attention_layernorm: nn.Module

    def finish(
        self, ready: Tensor, before: Tensor, turned: tuple[Tensor, Tensor], mask: Tensor, cache: dict[str, Any],
        norm: nn.Module | None = None, head: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """[R, n, H] behind the layer, and logits of that; itself where no head is given.

        Args:
            ready: [R, n, …] what its attention reads.
            before: [R, n, H] what that is added to.
            turned: [R, n, D] cosines and sines of the positions.
            mask: [R or 1, 1, n, S] what is added to scores.
            cache: under the name that the attention has for it.
            norm: behind the layer, and
            head: behind that.
        """
        attended, _ = self.self_attn(ready, position_embeddings=turned, attention_mask=mask, **cache)
        x = before + attended
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out, out if head is None or norm is None else head(norm(out))


@dataclass(frozen=True)
class Sizes:
    """What layers must have in common to be computed in one call.

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
        """The same as the kernels read it."""
        code = dense.code_of(self.dtype)
        return dense.core.Shape(self.deep, self.inner, self.groups, self.heads, self.width, code, self.scale)


@final
class Unchanged:
    """Sees whether weights have changed, or lie elsewhere.

    Args:
        weights: as they are now.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = tuple(weights)
        self._counted = tuple(w for w in self.weights if not w.is_inference())  # of others no changes are counted
        self._state = self._found()

    def _found(self) -> int:
        versions: int = sum(map(_VERSION, self._counted))  # asked in every pass, of all weights: no loop of Python's
        return versions + sum(map(Tensor.data_ptr, self.weights))

    @property
    def still(self) -> bool:
        """True where they are what they were."""
        return self._found() == self._state


@final
class Layer:
    """One layer by native kernels.

    Args:
        module: a layer that `fits`.

    Attributes:
        sizes: of it.
        record: what the kernels read of it.
    """

    def __init__(self, module: Any) -> None:
        attention, mlp, dtype = module.self_attn, module.mlp, module.post_attention_layernorm.weight.dtype
        width, groups = int(attention.head_dim), attention.k_proj.out_features // int(attention.head_dim)
        self.sizes = Sizes(
            width, groups, attention.q_proj.out_features // width // groups, mlp.gate_proj.in_features,
            attention.q_proj.in_features, mlp.gate_proj.out_features, dtype, type(mlp.gate_proj) is FourBits,
            float(attention.scaling),
        )  # fmt: skip
        self._module, self._index, self._behind = module, int(attention.layer_idx), list[Layer]()
        self._last, self._laid_out = mlp.down_proj, Unchanged(module.parameters())
        self._own = vars(module)
        self._all_laid_out = self._laid_out
        self._held: list[Tensor | None] = []  # whose memory the record reads
        prepared = isinstance(module, PreparedLayer) or isinstance(module.input_layernorm, nn.Identity)
        self.record = dense.core.Layer(
            input_norm=_norm(None if prepared else module.input_layernorm),
            qkv=self._linear(_joined, attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=_norm(getattr(attention, "q_norm", None)),
            k_norm=_norm(getattr(attention, "k_norm", None)),
            o_proj=self._linear(_joined, attention.o_proj),
            post_norm=_norm(module.post_attention_layernorm),
            gate_up=self._linear(_alternating, mlp.gate_proj, mlp.up_proj),
            down=self._linear(_joined, mlp.down_proj),
        )
        for weight in (p for p in module.parameters() if p.dim() > 1):
            let_go(weight)

    def _linear(self, join: "Callable[..., Tensor]", *parts: Any) -> Any:
        """Return linear layers of the same inputs as one for the kernels, with the outputs joined."""
        first = parts[0]
        bias = None if first.bias is None else join(0, *(part.bias.detach() for part in parts))
        if type(first) is FourBits:
            scales = join(1, *(part.scales.detach() for part in parts))
            packed, code = dense.pack_int4(join(0, *(part.numbers for part in parts)), scales), dense.INT4
        else:
            packed, code = dense.pack(join(0, *(part.weight.detach() for part in parts))), dense.code_of(first.weight.dtype)
        self._held += packed, bias
        outputs = sum(part.out_features for part in parts)
        return dense.core.Linear(address(packed), address(bias), first.in_features, outputs, code)

    def __deepcopy__(self, memo: Any) -> "Layer":
        """Itself: it is no code for a copy's weights, and the copy sees that they are others."""
        return self

    def use(self, behind: "list[Layer]") -> None:
        """Puts the code in the place of the module's own, and in one call with those behind it."""
        self._behind, self._all_laid_out = behind, Unchanged(w for layer in [self, *behind] for w in layer._laid_out.weights)
        if isinstance(self._module, PreparedLayer):
            self._module.finish = MethodType(partial(_finish, ours=self), self._module)  # type: ignore[method-assign]
        else:
            self._bound = self._module.forward = MethodType(partial(_forward, ours=self), self._module)

    @property
    def behind(self) -> "list[Layer]":
        """The layers that may be computed in one call with this one."""
        return self._behind

    def stands_in(self, module: nn.Module) -> bool:
        """True for the layer whose code this is, and not for a copy of it."""
        return self._module is module

    @property
    def untouched(self) -> bool:
        """True where the code stands in the place of the module's own, and nobody looks at what goes in or comes out."""
        own = self._own
        watched = own["_forward_hooks"] or own["_forward_pre_hooks"]
        last = own["_modules"]["mlp"]._modules["down_proj"]
        return not watched and own.get("forward") is self._bound and last is self._last

    @property
    def all_still(self) -> bool:
        """True where the weights of this layer and of those behind it are those that were laid out, unchanged."""
        return self._all_laid_out.still

    def of(self, module: Any) -> bool:
        """True where a layer's weights are those that were laid out, unchanged."""
        return module.mlp.down_proj is self._last and self._laid_out.still

    def __call__(
        self, x: Tensor, mask: Tensor | None, turned: tuple[Tensor, Tensor], cache: Cache | None, ready: Tensor | None = None,
        behind: Ending | None = None,
    ) -> Tensor:  # fmt: skip
        """[R, n, H] behind the layer, or behind several ones, which are noted at the tensor.

        Args:
            x: [R, n, H] before it.
            mask: [R or 1, 1, n, S] what is added to scores; by default causal.
            turned: [R or 1, n, D] cosines and sines of the positions.
            cache: gives keys and values for those that are stored there.
            ready: [R, n, …] what its attention reads of a layer without a first norm; by default the same.
            behind: norm and head of what comes out.
        """
        (rows, n, _), x = x.shape, x.contiguous()
        read = x if ready is None else ready.contiguous()
        held = cache.within(self._index) if isinstance(cache, Writer) else None
        one = Pass(self.sizes, x, in_order(turned, rows, n))
        if held is not None:
            following = self._following(held.more) if ready is None else []
            out = one.run(BOTH, [self, *following], read, held, mask, end=behind)
            vars(out)[THROUGH] = frozenset(following)
            return out
        k, v = (x.new_empty(rows, self.sizes.groups, n, self.sizes.width) for _ in range(2))
        written = Within(k, v, None, n)
        one.run(FIRST_PART, [self], read, written, None)
        if cache is not None:
            k, v = (t if t.stride(3) == 1 else t.contiguous() for t in cache.update(k, v, self._index))
            written = Within(k, v, None, k.shape[2])
        return one.run(SECOND_PART, [self], x, written, mask, end=behind)

    def _following(self, most: int) -> "list[Layer]":
        """The layers that can be computed in one call with this one: nobody looks at what lies between them."""
        found, module = list[Layer](), self._module
        for layer in self._behind[:most]:
            watched, module = module._forward_hooks or layer._module._forward_pre_hooks, layer._module
            if watched or vars(module).get("forward") is not layer._bound or module.mlp.down_proj is not layer._last:
                break
            found.append(layer)
        return found if self._all_laid_out.still else []


Turned = tuple[Tensor, Tensor, Ints]
"""Cosines and sines [P, D], and which of them are those of each token [R, n]."""


def in_order(turned: tuple[Tensor, Tensor], rows: int, n: int) -> Turned:
    """Cosines and sines that are those of each token [R or 1, n, D], in order."""
    places = np.arange(len(turned[0]) * n, dtype=np.int64)
    cosines, sines = (t.contiguous() for t in turned)
    return cosines, sines, places if len(cosines) == rows else np.tile(places, rows)


@final
class Pass:
    """A pass over some tokens, through one layer or several of the same sizes.

    Args:
        sizes: of the layers.
        x: [R, n, H] what the first one's output is added to.
        turned: the positions' angles.
    """

    def __init__(self, sizes: Sizes, x: Tensor, turned: Turned) -> None:
        self._x, self._sizes, self._turned = x, sizes, turned

    def run(
        self, parts: int, layers: Sequence[Layer], read: Tensor, within: Within, mask: Tensor | None,
        wanted: Mapping[int, Tensor] = MappingProxyType({}), end: Ending | None = None,
    ) -> Tensor:  # fmt: skip
        """Return [R, n, H] after the last layer, if its second part is run.

        Args:
            parts: of the layers.
            layers: at least one.
            read: [R, n, …] what the first one's attention reads.
            within: the first one's keys and values; those of the others follow.
            mask: [R or 1, 1, n, S] added to the scores; by default causal.
            wanted: [R, n, H] where the outputs of some layers are written, by their place among them.
            end: the last one's norm and head.
        """
        x, out = self._x, torch.empty_like(self._x)
        if parts & SECOND_PART and (mask is None or mask.dtype is not x.dtype or mask.stride(3) != 1):
            mask = additive(x[:, None], within.slots, mask).to(x.dtype).contiguous()
        cosines, sines, positions = self._turned
        keys, values, it = within.keys, within.values, dense.core.Pass()
        it.shape, it.parts = self._sizes.shape, parts
        it.sequences, it.tokens = x.shape[:2]
        it.input, it.residual = address(read), address(x)
        it.cosines, it.sines, it.positions = address(cosines), address(sines), positions.ctypes.data
        it.starts = 0 if within.starts is None else within.starts.ctypes.data
        it.keys, it.key_strides, it.key_layer = address(keys), keys.stride()[:3], within.of_keys
        it.values, it.value_strides, it.value_layer = address(values), values.stride()[:3], within.of_values
        if mask is not None:
            it.mask, it.mask_strides = address(mask), (mask.stride(0) * (len(mask) > 1), mask.stride(2))
        it.slots, it.hidden_below = within.slots, torch.finfo(x.dtype).min / 2
        if end is not None:
            end.add_to(it, x)
        last = len(layers) - 1
        outputs = [address(wanted.get(i)) if i < last else address(out) for i in range(len(layers))]
        dense.core.forward(it, [layer.record for layer in layers], outputs, dense.thread_count())
        return out


def _norm(norm: Any) -> Any:
    """Return a norm for the kernels; none stands for itself."""
    return dense.core.Norm() if norm is None else dense.core.Norm(address(norm.weight), epsilon(norm))


def _joined(dim: int, *parts: Tensor) -> Tensor:
    return torch.cat(parts, dim)


def _alternating(dim: int, *parts: Tensor) -> Tensor:
    """Return tensors whose units of outputs, along a dimension, take turns."""
    return torch.stack([part.unflatten(dim, (-1, UNIT)) for part in parts], dim + 1).flatten(dim, dim + 2)


def epsilon(norm: Any) -> float:
    """What a norm adds to a mean square."""
    return float(vars(norm).get("variance_epsilon", vars(norm).get("eps", 0.0)))


def is_native(function: Any) -> bool:
    """True for what `Layer.use` puts in the place of a module's own."""
    return isinstance(function, MethodType) and getattr(function.__func__, "func", None) in (_forward, _finish)


def native_layer(module: nn.Module) -> Layer | None:
    """The code that stands in the place of a stock layer's own, if there is any."""
    function: Any = vars(module).get("forward")
    found: Layer | None = function.__func__.keywords["ours"] if is_native(function) else None
    return found if found is not None and found.stands_in(module) else None


def _may(module: Any, ours: Layer, turned: Any, mask: Any, *given: Tensor) -> bool:
    """True where a pass is one of those that the machine code does."""
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *module.parameters()))
    alike = all(t.dtype is ours.sizes.dtype for t in (*given, *turned))
    return alike and not grad and ours.of(module) and (mask is None or mask.shape[1] == 1)


def _forward(module: Any, hidden_states: Tensor, ours: Layer, **given: Any) -> Any:
    """The forward of a layer."""
    if ours in vars(hidden_states).get(THROUGH, ()):
        return hidden_states
    turned, mask = given.get("position_embeddings"), given.get("attention_mask")
    if turned is None or not _may(module, ours, turned, mask, hidden_states):
        own: Callable[..., Any] = type(module).forward
        return own(module, hidden_states, **given)
    return ours(hidden_states, mask, turned, given.get("cache", given.get("past_key_values")))


def _finish(
    module: Any, ready: Tensor, before: Tensor, turned: Any, mask: Tensor, cache: dict[str, Any], norm: Any = None,
    head: Any = None, *, ours: Layer,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The rest of a layer whose input is ready, and the head behind it."""
    if not _may(module, ours, turned, mask, ready, before):
        stock: tuple[Tensor, Tensor] = type(module).finish(module, ready, before, turned, mask, cache, norm, head)
        return stock
    code = None if head is None else ending(norm, head, before)
    out = ours(before, mask, turned, next(iter(cache.values()), None), ready, code)
    return out, code.logits if code is not None else out if head is None else head(norm(out))
