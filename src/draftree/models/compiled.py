"""Decoder layers of the Llama kind as machine code: two calls a layer, whose weights are laid out for them.

A layer of a stock model takes some hundred operations of torch. Here it is compiled as two (`kernels/layer.py`), between which
the keys and values go to whatever cache the model was given. They stand in for a model's own layers where a trial finds them
equal, and give a token the same bits in any company.

Shapes: R rows, n tokens of each, S slots, H entries of a hidden state, G key-value heads, D entries of a head.
"""

import itertools
import struct
from abc import ABC
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import Cache

from draftree.errors import UserError
from draftree.models.between import GATED
from draftree.models.cache import Writer
from draftree.models.exact_attention import additive
from draftree.models.four_bits import FourBits
from draftree.models.linears import let_go, quicken
from draftree.models.sources import Loading
from draftree.models.tiled import COLUMNS, GROUP, ROWS, has_dots, place, scratch, tileable, tiles, tiles_of_four

QUERIES = 8
"""Queries of an attention that are worked on at a time; as in `kernels/layer.py`."""
CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""The parts of a layer that we know."""
CLOSE, SUMS = 4.0, 64.0
"""How far what a trial gives may lie from the model's own, beside the size of all of it: in units of its precision, and, as
sums of thousands go another way, of float32's."""


def single(value: float) -> int:
    """A number as the bits of a float32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


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
        self, ready: Tensor, before: Tensor, turned: tuple[Tensor, Tensor], mask: Tensor, cache: dict[str, Any]
    ) -> Tensor:
        """[R, n, H] behind the layer.

        Args:
            ready: [R, n, …] what its attention reads.
            before: [R, n, H] what that is added to.
            turned: [R, n, D] cosines and sines of the positions.
            mask: [R or 1, 1, n, S] what is added to scores.
            cache: under the name that the attention has for it.
        """
        attended, _ = self.self_attn(ready, position_embeddings=turned, attention_mask=mask, **cache)
        x = before + attended
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


@final
class Layer:
    """The machine code of one layer.

    Args:
        module: a layer that `fits`.
    """

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.weights = list(module.parameters())
        self._as_laid_out = _state(self.weights)
        self._last = mlp.down_proj
        self.width = int(attention.head_dim)
        self.groups = attention.k_proj.out_features // self.width
        self.heads = attention.q_proj.out_features // self.width // self.groups
        self.index = int(attention.layer_idx)
        self.inner, self.deep, self.reads = mlp.gate_proj.out_features, mlp.gate_proj.in_features, attention.q_proj.in_features
        self.dtype = module.post_attention_layernorm.weight.dtype
        self.half, self.four = self.dtype is torch.bfloat16, type(mlp.gate_proj) is FourBits
        reading = attention.q_proj, attention.k_proj, attention.v_proj
        self._into = torch.cat([_tiles(linear) for linear in reading])
        biased = reading[0].bias is not None
        self._bias = torch.cat([linear.bias.detach() for linear in reading]) if biased else None
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        prepared = isinstance(module, PreparedLayer) or isinstance(module.input_layernorm, nn.Identity)
        first, second = None if prepared else module.input_layernorm, module.post_attention_layernorm
        self._linears = [_tiles(x) for x in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        self._first = (
            0 if first is None else place(first.weight), place(self._into), place(self._bias),
            *(0 if norm is None else place(norm.weight) for norm in norms),
        )  # fmt: skip
        self.size = 2 if self.half else 4
        self._limits = single(float(attention.scaling)), single(torch.finfo(self.dtype).min / 2)
        self._epsilons = 0 if first is None else single(epsilon(first)), single(epsilon(second))
        o, gate, up, down = map(place, self._linears)
        self._rest = (
            o, place(attention.o_proj.bias), place(second.weight), gate, place(mlp.gate_proj.bias),
            up, place(mlp.up_proj.bias), down, place(mlp.down_proj.bias),
        )  # fmt: skip
        for weight in (p for p in self.weights if p.dim() > 1):
            let_go(weight)

    def __deepcopy__(self, memo: Any) -> "Layer":
        """Itself: it is no code for a copy's weights, and the copy sees that they are others."""
        return self

    def of(self, module: Any) -> bool:
        """True where a layer's weights are those that were laid out, unchanged."""
        return module.mlp.down_proj is self._last and _state(self.weights) == self._as_laid_out

    def __call__(
        self, x: Tensor, mask: Tensor | None, turned: tuple[Tensor, Tensor], cache: Cache | None, ready: Tensor | None = None
    ) -> Tensor:
        """[R, n, H] behind the layer.

        Args:
            x: [R, n, H] before it.
            ready: [R, n, …] what its attention reads of a layer without a first norm; by default the same.
            mask: [R or 1, 1, n, S] what is added to scores; by default causal.
            turned: [R or 1, n, D] cosines and sines of the positions.
            cache: gives keys and values for those that are stored there.
        """
        from draftree.kernels.layer import finished, stored  # numba takes half a second to import
        from draftree.kernels.team import run

        (rows, n, _), wide = x.shape, self.groups * self.heads * self.width
        keys, values, starts, slots = cache.within(self.index) if isinstance(cache, Writer) else (None, None, None, n)
        apart = keys is None or values is None  # then the cache is one that takes tensors
        if keys is None or values is None:
            keys, values = (x.new_empty(rows, self.groups, n, self.width) for _ in range(2))
        tokens, sizes, read = rows * n, (rows, n, self.groups, self.heads, self.width), x if ready is None else ready
        parts = [tokens * width * self.size for width in (wide, wide, self.inner, self.deep)]
        shared = torch.empty(sum(parts), dtype=torch.uint8)  # of all threads
        q, after, act, hidden, _ = itertools.accumulate(parts, initial=shared.data_ptr())
        angles = *map(place, turned), n if len(turned[0]) > 1 else 0
        to = 0 if starts is None else starts.ctypes.data, *self._lie(keys), *self._lie(values)
        run(stored(self.half, self.four), (place(read), *self._first, *angles, q, *to, *sizes, self.reads,
                                           self._epsilons[0], *self._own(tokens, wide, 0)))  # fmt: skip
        if apart and cache is not None:
            keys, values = (t if t.stride(3) == 1 else t.contiguous() for t in cache.update(keys, values, self.index))
            slots = keys.shape[2]
        if mask is None or mask.dtype is not x.dtype or mask.stride(3) != 1:
            mask = additive(x[:, None], slots, mask).to(x.dtype).contiguous()
        by_mask = self.size * mask.stride(0) * (len(mask) > 1), self.size * mask.stride(2)
        out = torch.empty_like(x)
        run(finished(self.half, self.four), (
            place(x), q, place(mask), *self._lie(keys), *self._lie(values), *sizes, self.deep, self.inner, slots, *by_mask,
            *self._limits, self._epsilons[1], *self._own(tokens, wide, slots), after, act, hidden, place(out), *self._rest,
        ))  # fmt: skip
        return out

    def _lie(self, tensor: Tensor) -> tuple[int, int, int, int]:
        """Where keys or values [R, G, S, D] lie, and how many bytes rows, groups and slots lie apart."""
        by_row, by_group, by_slot, _ = tensor.stride()
        return tensor.data_ptr(), self.size * by_row, self.size * by_group, self.size * by_slot

    def _own(self, tokens: int, wide: int, slots: int) -> tuple[int, int]:
        """The address of the first thread's own memory, and the bytes to the next one's."""
        widest, blocks, heads = max(self.deep, self.inner, self.reads, wide), -(-slots // COLUMNS), QUERIES * self.heads
        attending = blocks * 4 + self.width * 128 + heads * (blocks * 128 + self.width * 4) + (heads + 4) * 4
        feeding = tokens * max(self.deep, self.reads) * self.size + (tokens * widest // GROUP * 4 if self.four else 0)
        return scratch(max(attending, feeding + max(2 * ROWS * 128, ROWS * self.width * 4)), torch.get_num_threads())


def _state(weights: Sequence[Tensor]) -> int:
    """Changes with the values of weights, and with where they lie."""
    return sum(w._version + w.data_ptr() for w in weights)


def epsilon(norm: Any) -> float:
    """What a norm adds to a mean square."""
    return float(vars(norm).get("variance_epsilon", vars(norm).get("eps", 0.0)))


def _tileable(linear: Any) -> bool:
    """True for a linear layer that we have code for."""
    if type(linear) is FourBits:
        return has_dots()
    return type(linear) is nn.Linear and tileable(linear.weight, linear.bias)


def _tiles(linear: Any) -> Tensor:
    """A linear layer's weight as it is laid out for the code."""
    return tiles_of_four(linear.numbers, linear.scales.detach()) if type(linear) is FourBits else tiles(linear.weight)


def fits(module: Any) -> bool:
    """True for a module that looks like a layer that is compiled."""
    if not isinstance(module, PreparedLayer) and {name for name, _ in module.named_children()} != CHILDREN:
        return False
    attention, mlp = module.self_attn, module.mlp
    parts, known = {name for name, _ in attention.named_children()}, {"q_proj", "k_proj", "v_proj", "o_proj"}
    if not known <= parts <= known | {"q_norm", "k_norm"} or {n for n, _ in mlp.named_children()} != GATED:
        return False
    linears = [*(getattr(attention, name) for name in sorted(known)), mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if len({type(x) for x in linears}) > 1 or not all(map(_tileable, linears)):
        return False
    one = len({p.dtype for p in module.parameters() if p.is_floating_point()}) == 1 and not [
        *attention.parameters(recurse=False)
    ]
    widths = [getattr(attention, "head_dim", None), *(x.out_features for x in linears)]
    return one and all(isinstance(w, int) and w % COLUMNS == 0 for w in widths)


def compile_layers(model: nn.Module) -> bool:
    """Lets the layers of a model that can be compiled be computed as machine code; the others stay what they are.

    Args:
        model: whose weights are not expected to change.

    Returns:
        Whether there are any.
    """
    agreed: dict[Any, bool] = {}
    found = [m for m in model.modules() if fits(m)]
    for module in found:
        ours = Layer(module)
        kind = repr(module)
        if kind not in agreed:
            agreed[kind] = agrees(module, ours)
        if agreed[kind]:
            if isinstance(module, PreparedLayer):
                module.finish = MethodType(partial(_finish, ours=ours), module)  # type: ignore[method-assign]
            else:
                module.forward = MethodType(partial(_forward, ours=ours), module)
    return any(agreed.values())


def hasten(model: Any, loading: Loading, must: bool = True) -> None:
    """Lets a model be computed by the kernels that are asked for.

    Args:
        model: as it was loaded, where it is to be.
        loading: the options.
        must: whether it is a mistake to ask that it be compiled where it cannot be.

    Raises:
        UserError: it cannot be compiled.
    """
    compiled = loading.compile and compile_layers(model)
    quicken(model, loading.kernels or ("tiled" if loading.compile else None), inside(model))
    if must and loading.compile and not compiled and next(model.parameters()).device.type == "cpu":
        told = "layers of the Llama kind, in bfloat16 or float32 on a CPU"
        raise UserError(f"compile is true for a {type(model).__name__}, allowed is it for models with {told}")


def is_compiled(module: nn.Module) -> bool:
    """True where a layer is computed as machine code."""
    ours = (vars(module).get(name) for name in ("forward", "finish"))
    return any(isinstance(own, MethodType) and getattr(own.__func__, "func", None) in (_forward, _finish) for own in ours)


def inside(model: nn.Module) -> set[nn.Module]:
    """The parts of the layers of a model that are computed as machine code."""
    return {part for layer in filter(is_compiled, model.modules()) for part in layer.modules()}


def compiled_kinds(model: nn.Module) -> list[str]:
    """The kinds of layers that are computed as machine code, for the record."""
    return sorted({type(m).__name__ for m in model.modules() if is_compiled(m)})


@torch.inference_mode()
def agrees(module: Any, ours: Layer) -> bool:
    """True where a layer and its machine code differ by rounding alone, over random states that some see and some do not."""
    n, draw, dtype = 5, torch.Generator().manual_seed(0), ours.dtype
    x, ready = (torch.empty(2, n, deep).normal_(generator=draw).to(dtype) for deep in (ours.deep, ours.reads))
    angles = torch.empty(2, n, ours.width // 2).uniform_(0, 6, generator=draw).repeat(1, 1, 2)
    turned = angles.cos().to(dtype), angles.sin().to(dtype)
    mask = torch.full((2, 1, n, n), torch.finfo(dtype).min, dtype=dtype).triu(1)
    mask[0, 0, 3, 1:3] = torch.finfo(dtype).min
    if isinstance(module, PreparedLayer):
        wanted, found = type(module).finish(module, ready, x, turned, mask, {}), ours(x, mask, turned, None, ready)
    else:
        try:
            wanted = type(module).forward(module, x, attention_mask=mask, position_embeddings=turned)
        except Exception:  # a layer of that look that takes something else is another one
            return False
        found = ours(x, mask, turned, None)
    if not isinstance(wanted, Tensor):
        return False
    apart = (found.float() - wanted.float()).norm() / (wanted - x).float().norm()
    return bool(apart < CLOSE * torch.finfo(dtype).eps + SUMS * torch.finfo(torch.float32).eps)


def _may(module: Any, ours: Layer, turned: Any, mask: Any, *given: Tensor) -> bool:
    """True where a pass is one of those that the machine code does."""
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *ours.weights))
    whole = all(t.is_contiguous() and t.dtype is ours.dtype for t in (*given, *turned))
    return whole and not grad and ours.of(module) and (mask is None or mask.shape[1] == 1)


def _forward(module: Any, hidden_states: Tensor, ours: Layer, **given: Any) -> Any:
    """The forward of a layer."""
    turned, mask = given.get("position_embeddings"), given.get("attention_mask")
    if turned is None or not _may(module, ours, turned, mask, hidden_states):
        own: Callable[..., Any] = type(module).forward
        return own(module, hidden_states, **given)
    return ours(hidden_states, mask, turned, given.get("cache", given.get("past_key_values")))


def _finish(
    module: Any, ready: Tensor, before: Tensor, turned: Any, mask: Tensor, cache: dict[str, Any], ours: Layer
) -> Tensor:
    """The rest of a layer whose input is ready."""
    if not _may(module, ours, turned, mask, ready, before):
        stock: Tensor = type(module).finish(module, ready, before, turned, mask, cache)
        return stock
    return ours(before, mask, turned, next(iter(cache.values()), None), ready)
