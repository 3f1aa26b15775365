"""A pass straight through layers that are machine code: embedding, layers, norm and head, without the modules around them.

What transformers does around layers that are one call, a module for each of them among it, takes as long as several of them
compute. The first pass goes both ways, and this one is kept where it gives the same bits.

Shapes: R rows, n tokens of each, S slots, D hidden size, V vocabulary, L layers.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor, nn

from draftree.models.angles import Angles
from draftree.models.cache import Within, Writer
from draftree.models.ending import ending
from draftree.models.native_layers import BOTH, FIRST_PART, Layer, Pass, native_layer
from draftree.tree import Ints

PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
"""The parts of a stack that we know."""
SELDOM = 64
"""Passes after which layers and weights are looked at again, at the latest."""
Head, Change = Callable[[], nn.Module], Callable[[Tensor], Tensor]


@final
class Straight:
    """Passes of one model.

    Args:
        model: a causal language model.
        stack: its transformer.
        layers: all of its layers, as machine code.
        head: gives the module that makes logits of what the last norm gave, and
        behind: what the model makes of them.
    """

    def __init__(
        self,
        model: nn.Module,
        stack: Any,
        layers: Sequence[Layer],
        head: Callable[[], nn.Module],
        behind: Callable[[Tensor], Tensor],
    ) -> None:
        self._model, self._stack, self._layers, self._head, self._behind = model, stack, list(layers), head, behind
        self._hooks = [hooks for m in (model, stack) for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._angles = Angles(stack.rotary_emb)
        self._agreed: bool | None = None  # nothing was compared
        self._untouched, self._passes = False, SELDOM  # nothing was looked at

    @staticmethod
    def may(stack: nn.Module) -> bool:
        """True once the first layer of a model's transformer is machine code."""
        layers = stack._modules.get("layers")
        return isinstance(layers, nn.ModuleList) and len(layers) > 0 and native_layer(layers[0]) is not None

    @classmethod
    def of(
        cls, model: nn.Module, stack: Any, head: Callable[[], nn.Module], behind: Callable[[Tensor], Tensor] | None
    ) -> Self | None:
        """The passes of a model, if all of its layers are one call of machine code, and nothing is unknown around them."""
        if behind is None or {name for name, _ in stack.named_children()} != PARTS:
            return None
        layers = [layer for module in stack.layers if (layer := native_layer(module)) is not None]
        whole = layers and len(layers) == len(stack.layers) and layers[0].behind == layers[1:]
        return cls(model, stack, layers, head, behind) if whole else None

    def free(self, anew: bool) -> bool:
        """True where a pass may go this way: nobody looks at what the modules around the layers do, or has changed them.

        To look at all layers and weights takes as long as some of them compute, as hundreds of objects are in no cache: it is
        done where a text begins, `anew`, and else once in a while.
        """
        self._passes += 1
        if anew or self._passes >= SELDOM:
            self._passes, first = 0, self._layers[0]
            patched = "forward" in vars(self._model) or "forward" in vars(self._stack)
            standing = not patched and first.stands_in(self._stack.layers[0])
            self._untouched = standing and all(layer.untouched for layer in self._layers) and first.all_still
        return self._untouched and self._agreed is not False and not any(self._hooks) and not torch.is_grad_enabled()

    def within(self, writer: Writer) -> Within | None:
        """Where the first layer's keys and values lie, if those of all others lie behind them as one call needs it."""
        held = writer.within(0)
        return held if held is not None and held.more + 1 >= len(self._layers) else None

    def __call__(
        self, tokens: Tensor, positions: Ints, mask: Tensor, held: Within, keep: int | Tensor, wanted: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Logits [R, n or len(keep), V], and the wanted hidden states [R, n, D].

        Args:
            tokens: [R, n].
            positions: [R, n].
            mask: [R, 1, n, S] what is added to scores.
            held: see `within`.
            keep: as transformers' `logits_to_keep`.
            wanted: numbers of hidden states: before layer 0 … L − 1; L is behind the norm, L + 1 before it.
        """
        x, count = self._stack.embed_tokens(tokens), len(self._layers)
        looked = {i - 1: torch.empty_like(x) for i in wanted if 0 < i < count}
        code = None if isinstance(keep, Tensor) or keep else ending(self._stack.norm, self._head(), x)
        last = self._pass(x, positions).run(BOTH, self._layers, x, held, mask, looked, code)
        states: Tensor = self._stack.norm(last) if code is None else code.states
        caught = {0: x, count: states, count + 1: last} | {i + 1: out for i, out in looked.items()}
        if isinstance(keep, Tensor) or keep:
            states = states[:, slice(-keep, None) if isinstance(keep, int) else keep]
        logits = self._head()(states) if code is None else code.logits
        return self._behind(logits), *(caught[i] for i in wanted)

    def _pass(self, x: Tensor, positions: Ints) -> Pass:
        """A pass over inputs [R, n, D] at positions [R, n]."""
        known = self._angles.known(x, int(positions.max()))
        return Pass(self._layers[0].sizes, x, (*known, np.ascontiguousarray(positions)))

    def stored(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [R, G, n, width] that the first layer makes of inputs [R, n, D] at positions [R, n]."""
        sizes, (rows, n, _) = self._layers[0].sizes, x.shape
        k, v = (x.new_empty(rows, sizes.groups, n, sizes.width) for _ in range(2))
        x = x.contiguous()
        self._pass(x, positions.numpy()).run(FIRST_PART, self._layers[:1], x, Within(k, v, None, n), None)
        return k, v

    @property
    def agreed(self) -> bool:
        """True once a pass has gone both ways and given the same bits."""
        return bool(self._agreed)

    def compare(self, ours: Callable[[], tuple[Tensor, ...]], stock: tuple[Tensor, ...]) -> None:
        """Takes note of whether a pass gives the same here as on the model's own way."""
        try:
            self._agreed = all(map(torch.equal, ours(), stock))
        except Exception:  # a module of that name that takes something else is another one
            self._agreed = False
