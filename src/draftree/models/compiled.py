"""Decoder layers of the Llama kind as machine code, over weights that are laid out for it (`kernels/layer.py`).

A layer of a stock model takes some hundred operations of torch. Over a cache of ours all layers are one call, unless somebody
looks at what lies between them (a hook does); over another cache a layer is two, between which keys and values are handed to
it. They stand in for a model's own layers where a trial finds them equal (`compiling.py`), and give a token the same bits in
any company.

Shapes: R rows, n tokens of each, S slots, H entries of a hidden state, G key-value heads, D entries of a head.
"""

import itertools
import operator
from abc import ABC
from array import array
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
from draftree.models.tiled import COLUMNS, DTYPES, GROUP, ROWS, place, scratch, single, tiles, tiles_of_four
from draftree.tree import Ints

FIRST_PART, SECOND_PART, BOTH = 1, 2, 3
"""Of a layer: up to what it stores, and from its attention on."""
THROUGH = "draftree_layers"
"""An attribute of a tensor that several layers made in one call: those behind the first one, which have nothing to do."""
QUERIES = 8
"""Queries of an attention that are worked on at a time; as in `kernels/attending.py`."""
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
    """What layers have to have in common to be computed in one call.

    Attributes:
        width: D.
        groups: G.
        heads: queries' heads that share a key-value head.
        deep: H.
        reads: entries of the rows that attention reads.
        inner: entries between the two products of the feed-forward layer.
        dtype: of all weights.
        four: whether weights are held in four bits.
        scale: of scores, as the bits of a float32.
    """

    width: int
    groups: int
    heads: int
    deep: int
    reads: int
    inner: int
    dtype: torch.dtype
    four: bool
    scale: int

    @property
    def wide(self) -> int:
        """Entries of the queries of a token."""
        return self.groups * self.heads * self.width

    def own(self, tokens: int, slots: int) -> tuple[int, int]:
        """The address of the first thread's own memory for a pass, and the bytes to the next one's."""
        size, heads, blocks = self.dtype.itemsize, QUERIES * self.heads, -(-slots // COLUMNS)
        attending = blocks * (8 + self.width * size * 32) + heads * (blocks * 128 + self.width * 4) + (heads + 4) * 4
        widest = max(self.deep, self.inner, self.reads, self.wide)
        feeding = tokens * max(self.deep, self.reads) * size + (tokens * widest // GROUP * 4 if self.four else 0)
        return scratch(max(attending, feeding + max(2 * ROWS * 128, ROWS * self.width * 4)), torch.get_num_threads())


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
    """The machine code of one layer.

    Args:
        module: a layer that `fits`.

    Attributes:
        sizes: of it.
        record: what the code reads of it.
    """

    def __init__(self, module: Any) -> None:
        attention, mlp, dtype = module.self_attn, module.mlp, module.post_attention_layernorm.weight.dtype
        width, groups = int(attention.head_dim), attention.k_proj.out_features // int(attention.head_dim)
        self.sizes = Sizes(
            width, groups, attention.q_proj.out_features // width // groups, mlp.gate_proj.in_features,
            attention.q_proj.in_features, mlp.gate_proj.out_features, dtype, type(mlp.gate_proj) is FourBits,
            single(float(attention.scaling)),
        )  # fmt: skip
        self._module, self._index, self._behind = module, int(attention.layer_idx), list[Layer]()
        self._last, self._laid_out = mlp.down_proj, Unchanged(module.parameters())
        self._own = vars(module)
        self._all_laid_out = self._laid_out
        reading = attention.q_proj, attention.k_proj, attention.v_proj
        biased = reading[0].bias is not None
        into, bias = torch.cat(list(map(_tiles, reading))), torch.cat([x.bias.detach() for x in reading]) if biased else None
        others = attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self._held = into, bias, *map(_tiles, others)
        prepared = isinstance(module, PreparedLayer) or isinstance(module.input_layernorm, nn.Identity)
        first, second = None if prepared else module.input_layernorm, module.post_attention_layernorm
        heads = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        (o, gate, up, down), biases = map(place, self._held[2:]), [place(x.bias) for x in others]
        self.record = array("q", (
            0 if first is None else single(epsilon(first)), 0 if first is None else place(first.weight),
            place(into), place(bias), *(0 if norm is None else place(norm.weight) for norm in heads),
            single(epsilon(second)), o, biases[0], place(second.weight), gate, biases[1], up, biases[2], down, biases[3],
        ))  # fmt: skip
        for weight in (p for p in module.parameters() if p.dim() > 1):
            let_go(weight)

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
            out = one.run(BOTH, [self, *following], read, held, mask, behind=behind)
            vars(out)[THROUGH] = frozenset(following)
            return out
        k, v = (x.new_empty(rows, self.sizes.groups, n, self.sizes.width) for _ in range(2))
        written = Within(k, v, None, n)
        one.run(FIRST_PART, [self], read, written, None)
        if cache is not None:
            k, v = (t if t.stride(3) == 1 else t.contiguous() for t in cache.update(k, v, self._index))
            written = Within(k, v, None, k.shape[2])
        return one.run(SECOND_PART, [self], x, written, mask, behind=behind)

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
        (rows, n, _), self._x, self._sizes, self._turned = x.shape, x, sizes, turned
        each = rows * n * sizes.dtype.itemsize
        parts = [each * width for width in (sizes.wide, sizes.wide, sizes.inner, sizes.deep, sizes.deep)]
        self._shared = torch.empty(sum(parts), dtype=torch.uint8)  # of all threads
        self._places = list(itertools.accumulate(parts[:-1], initial=self._shared.data_ptr()))

    def run(
        self, parts: int, layers: Sequence[Layer], read: Tensor, within: Within, mask: Tensor | None,
        looked: Mapping[int, Tensor] = MappingProxyType({}), behind: Ending | None = None,
    ) -> Tensor:  # fmt: skip
        """[R, n, H] behind the last layer, if its second part is run.

        Args:
            parts: of the layers.
            layers: at least one.
            read: [R, n, …] what the first one's attention reads.
            within: the first one's keys and values; those of the others lie behind them.
            mask: [R or 1, 1, n, S] what is added to scores; by default causal.
            looked: [R, n, H] where the outputs of some layers go, by their place among them; the last one's is returned.
            behind: norm and head of the last one's.
        """
        from draftree.kernels.layer import layers as code  # numba takes half a second to import
        from draftree.kernels.team import run

        x, sizes, out, size = self._x, self._sizes, torch.empty_like(self._x), self._x.element_size()
        (rows, n, _), (q, after, act, hidden, between) = x.shape, self._places
        if parts & SECOND_PART and (mask is None or mask.dtype is not x.dtype or mask.stride(3) != 1):
            mask = additive(x[:, None], within.slots, mask).to(x.dtype).contiguous()
        by_mask = (0, 0) if mask is None else (size * mask.stride(0) * (len(mask) > 1), size * mask.stride(2))
        cosines, sines, at = self._turned
        keys, values, own = within.keys, within.values, sizes.own(rows * n, within.slots)
        records = array("q", [layer.record.buffer_info()[0] for layer in layers])
        turns, last = (between, place(out)), len(layers) - 1
        outs = array("q", [place(looked[i]) if i in looked else turns[(last - i + 1) % 2] for i in range(last + 1)])
        told = None if behind is None else behind.told(x, own)
        run(code(sizes.dtype is torch.bfloat16, sizes.four), (
            parts, len(layers), place(read), outs.buffer_info()[0], place(keys), size * within.of_keys,
            place(values), size * within.of_values, records.buffer_info()[0], place(x),
            0 if told is None else told.buffer_info()[0],
            place(cosines), place(sines), at.ctypes.data, q,
            0 if within.starts is None else within.starts.ctypes.data,
            *(size * step for t in (keys, values) for step in t.stride()[:3]),
            rows, n, sizes.groups, sizes.heads, sizes.width, sizes.reads, *own,
            place(mask), *by_mask, within.slots, sizes.scale,
            LOWEST[x.dtype], sizes.deep, sizes.inner, after, act, hidden,
        ))  # fmt: skip
        return out


LOWEST = {dtype: single(torch.finfo(dtype).min / 2) for dtype in DTYPES}
"""A mask that hides a key is below, as the bits of a float32."""


def epsilon(norm: Any) -> float:
    """What a norm adds to a mean square."""
    return float(vars(norm).get("variance_epsilon", vars(norm).get("eps", 0.0)))


def _tiles(linear: Any) -> Tensor:
    """A linear layer's weight as it is laid out for the code."""
    return tiles_of_four(linear.numbers, linear.scales.detach()) if type(linear) is FourBits else tiles(linear.weight)


def is_machine_code(function: Any) -> bool:
    """True for what `Layer.use` puts in the place of a module's own."""
    return isinstance(function, MethodType) and getattr(function.__func__, "func", None) in (_forward, _finish)


def machine_code(module: nn.Module) -> Layer | None:
    """The code that stands in the place of a stock layer's own, if there is any."""
    function: Any = vars(module).get("forward")
    found: Layer | None = function.__func__.keywords["ours"] if is_machine_code(function) else None
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
