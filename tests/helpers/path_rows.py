"""An oracle without mathematics of its own: stock mixers, fed every root-to-leaf path of a tree as a text of its own.

All else stays as it is. On commit the inputs of the accepted nodes are read once more.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from draftree.models.kv_cache import SlotCache
from draftree.models.model_config import cache_argument
from draftree.models.recurrent.replaced_functions import _CURRENT_FUNCTIONS
from draftree.target.target import HiddenStateSpec, Target
from draftree.tree import AcceptResult, Ints, Tree

STEPWISE = ("jamba", "mamba", "falcon_mamba", "nemotron_h", "zamba2")
"""Families whose mixers, fed several tokens behind a state, forget it or clamp their step: fed one
token at a time."""


class One(Cache):
    """A cache of one layer of a model."""

    def __init__(self, index: int, layer: LinearAttentionLayer) -> None:
        super().__init__(layers=[])
        layers: Any = {index: layer}
        self.layers = layers


class PathRows:
    """Stands between a target and the mixers of its model.

    Args:
        target: its mixers are replaced for the oracle's own passes.
        rows: of its cache.
    """

    def __init__(self, target: Target, rows: int) -> None:
        self.target, self._stepwise = target, target.name in STEPWISE
        convolving = lambda m: any(isinstance(c, nn.Conv1d) for c in m.children())
        mixers = [
            m for m in target.decoder.model.modules() if hasattr(m, "layer_idx") and convolving(m)
        ]
        self._own = {m: [LinearAttentionLayer() for _ in range(rows)] for m in mixers}
        self._inputs: dict[nn.Module, Tensor] = {}
        self._tree: Tree | None = None
        self._widths: list[int] = []

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """Inside, mixers are fed paths."""
        for mixer in self._own:
            mixer.forward = partial(self._forward, mixer)
        try:
            yield
        finally:
            for mixer in self._own:
                del mixer.forward

    def prefill(self, cache: SlotCache, prompts: list[Ints]) -> Tensor:
        """Logits [R, V] after prompts, read at once."""
        self._tree, self._widths = None, [len(p) for p in prompts]
        with self._standing(), torch.inference_mode():
            return self.target.prefill(cache, prompts, HiddenStateSpec()).logits

    def verify(self, cache: SlotCache, tree: Tree) -> Tensor:
        """Logits [N, V] after every node."""
        self._tree = tree
        with self._standing(), torch.inference_mode():
            return self.target.verify(cache, tree, HiddenStateSpec()).logits

    @torch.inference_mode()
    def commit(self, cache: SlotCache, tree: Tree, verdict: AcceptResult) -> None:
        """Lets every mixer read the accepted nodes' inputs; keys and values are the cache's matter, as ever."""
        self.target.commit(cache, tree, verdict)
        for mixer, hidden in self._inputs.items():
            for row in range(tree.roots):
                at = np.searchsorted(tree.of_row(row), verdict.committed_nodes(row))
                self._run(mixer, hidden[row, at], self._own[mixer][row])

    def _run(
        self, mixer: nn.Module, hidden: Tensor, layer: LinearAttentionLayer, prompt: bool = False
    ) -> Tensor:
        stock: Any = type(mixer).forward
        name = str(cache_argument(inspect.signature(stock).parameters))
        index: Any = mixer.layer_idx
        token = _CURRENT_FUNCTIONS.set(None)
        try:
            parts = [hidden] if prompt or not self._stepwise else hidden.split(1)
            read = [stock(mixer, part[None], **{name: One(index, layer)})[0] for part in parts]
        finally:
            _CURRENT_FUNCTIONS.reset(token)
        return torch.cat(read)

    def _forward(self, mixer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        out, own = torch.zeros_like(hidden), self._own[mixer]
        if self._tree is None:
            for row, width in enumerate(self._widths):
                out[row, :width] = self._run(mixer, hidden[row, :width], own[row], prompt=True)
            return out
        for row in range(len(own)):
            nodes = self._tree.of_row(row)
            seen = self._tree.ancestors[np.ix_(nodes, nodes)]
            for leaf in np.flatnonzero(seen.sum(0) == 1):
                path = np.flatnonzero(seen[leaf])
                out[row, path] = self._run(mixer, hidden[row, path], copy.deepcopy(own[row]))
        self._inputs[mixer] = hidden.clone()
        return out
