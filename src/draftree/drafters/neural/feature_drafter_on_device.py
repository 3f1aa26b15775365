"""Draft passes of feature drafters over trees that stay on the device.

Shapes: R slots, n tokens a slot, M nodes fed, F frontier nodes, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.drafters.neural.decoding_state import Decoding
from draftree.drafters.neural.feature_model_interface import PairNet
from draftree.drafters.neural.frontier_layout import Pick
from draftree.drafters.neural.kv_cached_drafter_on_device import CachingLayers
from draftree.models.forward_batch import ForwardBatch
from draftree.models.graph_capture import Capture, Epilogue, InputTensors, OutputTensors, Weights
from draftree.models.kv_cache import SlotCache, Writer
from draftree.models.network_pass import run_pass
from draftree.target.device_tree import Choose, NodeBatch, Nodes
from draftree.tree import Ints, Tree
from draftree.utils.hardware import to_device
from draftree.utils.padding import pad_end


def known_features(features: SlotCache, positions: Ints, level: int = 0) -> Tensor:
    """Return the features [R, n, D] that a level reads at positions [R, n] of true pairs."""
    known = features.layer(level)[0]
    index = positions + np.arange(len(positions))[:, None] * features.capacity
    return known.view(-1, known.shape[-1])[to_device(index, known.device)]


@dataclass(frozen=True)
class PairPasses:
    """The objects that passes over pairs use.

    Attributes:
        network: a network without levels.
        capture: runs the network's passes, possibly as CUDA graphs.
        weights: the weights that the passes read.
        features: the features of true pairs.
    """

    network: PairNet
    capture: Capture
    weights: Weights
    features: SlotCache


@final
class PairLayers(CachingLayers):
    """Passes over drafted pairs, which consist of a node's token and the output after its parent.

    Args:
        passes: the network and the objects for its passes.
        state_of: returns the drafter's state for a decoding state.
        decoding: the decoding state, without postponed work.
        roots: the roots of the step.
        depth: [R] the largest depth of each sequence's tree.
    """

    def __init__(
        self,
        passes: PairPasses,
        state_of: Callable[[Decoding], Any],
        decoding: Decoding,
        roots: Tree,
        depth: Ints,
    ) -> None:
        super().__init__(decoding, roots, depth, passes.network.draft_vocabulary)
        self._passes, self._state_of = passes, state_of
        self._outputs: Tensor | None = None  # [R, M, D] the outputs after the nodes that were read

    @override
    def run(
        self,
        feed: ForwardBatch | NodeBatch,
        nodes: Nodes,
        choose: Choose,
        given: InputTensors,
        pick: Pick,
    ) -> Nodes:
        passes, cache = self._passes, self._decoding.cache
        feed = feed.with_width(cache.ladder.width(feed.width))
        if isinstance(feed, ForwardBatch):  # true pairs, including the root's
            given = {**given, "features": known_features(passes.features, feed.padded_positions)}
        else:
            assert self._outputs is not None
            given = {**given, "outputs": self._outputs}

        def run_network(laid: InputTensors, past: Writer) -> OutputTensors:
            features = laid["features"] if "features" in laid else _of_parents(laid, feed)
            return passes.network.with_logits(
                laid["tokens"], features, laid["positions"], laid["full"], past
            )

        def grow_trees(results: OutputTensors, given: InputTensors) -> OutputTensors:
            out, logits = (pick(each, given) for each in results)
            before = (given["outputs"],) if "outputs" in given else ()
            return torch.cat((*before, out), dim=1), *choose(
                logits, Nodes.of(given), given.get("ids")
            ).growing_tensors

        kind = passes.weights.version if cache.ladder.few else None
        self._outputs, *grown = run_pass(
            run_network, kind, cache, feed, passes.capture, Epilogue(choose, given, grow_trees)
        )
        return nodes.after(tuple(grown))

    @override
    def state(self, fed: Sequence[Ints]) -> Any:
        return self._state_of(self.read(fed))


def _of_parents(laid: InputTensors, feed: ForwardBatch | NodeBatch) -> Tensor:
    """Return [R, n, D] the output after the parent of each node in a pass.

    `laid` holds the draft trees and, as `outputs` [R, M, D], the outputs after the nodes read
    before. Entries of padding are undefined.
    """
    assert isinstance(feed, NodeBatch)
    nodes, outputs = Nodes.of(laid), laid["outputs"]
    before = outputs.shape[1]
    read = nodes.lines(nodes.fed[:, -feed.count :], nodes.fed[:, :before])
    parents = (read * torch.arange(before, device=read.device)).amax(
        dim=2
    )  # the last ancestor that was read
    found = outputs.gather(1, parents[..., None].expand(-1, -1, outputs.shape[2]))
    return pad_end(found, 1, feed.width - feed.count)
