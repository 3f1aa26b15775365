"""Draft trees on the device with a network that has a KV cache.

Shapes: R slots, F frontier nodes, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import numpy as np
from torch import Tensor
from typing_extensions import override

from draftree.drafters.neural.decoding_state import NO_TOKENS, Decoding
from draftree.drafters.neural.frontier_layout import Pick, lay_out
from draftree.drafters.neural.shared_vocabulary import Shared
from draftree.models.causal_lm import CausalLM
from draftree.models.forward_batch import ForwardBatch
from draftree.models.graph_capture import Epilogue, InputTensors, OutputTensors
from draftree.target.device_tree import BatchTensors, Choose, Layers, NodeBatch, Nodes
from draftree.tree import DraftVocab, Ints, Tree
from draftree.utils.hardware import to_device


class CachingLayers(Layers):
    """Passes of a network with a KV cache over the layers of a tree that grows on the device.

    The host does not see the nodes of these layers, but knows their number in advance.

    Args:
        state: the drafter's state, without postponed work.
        roots: the roots of the step.
        depth: [R] the largest depth of each sequence's tree; 0 for a sequence without drafts.
        drafted: the tokens that can be drafted; None for all.
        reads: [V] the token that the network reads in place of each target token; by default the
            token itself.
        context: number of positions that the network supports; by default unlimited.
    """

    def __init__(
        self,
        state: Decoding,
        roots: Tree,
        depth: Ints,
        drafted: DraftVocab | None,
        reads: Tensor | None = None,
        context: int = 2**31,
    ) -> None:
        self._decoding = state
        self._roots = roots
        self._live = depth > 0
        self._reads = reads
        self.device, self._ids = state.cache.device, None if drafted is None else drafted.ids
        self._last = context - 1
        self.begin = state.cache.lengths + np.array([len(p) for p in state.pending], np.int64)
        self.reach = int((self.begin + depth)[self._live].max())

    @override
    def first(self, nodes: Nodes, choose: Choose) -> Nodes:
        layout = lay_out(
            self._decoding, self._roots, np.flatnonzero(self._live[self._roots.row]), self.device
        )
        feed, at = layout.feed, np.zeros((len(self._live), 1, 1), np.int64)
        if self._reads is not None:
            feed = replace(feed, tokens=self._reads[feed.tokens])
        at[layout.rows, 0, 0] = layout.columns
        columns = to_device(at, self.device)
        of_roots = lambda out, given: out.gather(1, given["columns"].expand(-1, -1, out.shape[2]))
        return self._pass(feed, nodes, choose, {"columns": columns}, of_roots)

    @override
    def below(self, nodes: Nodes, count: int, choose: Choose) -> Nodes:
        last = self._last
        reads = self._reads
        fed = nodes.fed.shape[1]

        def make(given: InputTensors) -> BatchTensors:
            nodes = Nodes.of(given)
            frontier = nodes.fed[:, -count:]
            ids, depth = nodes.tokens.gather(1, frontier), nodes.depth.gather(1, nodes.fed)
            places = (nodes.begin + depth).clamp(max=last)  # padding may be anywhere
            return (
                ids if reads is None else reads[ids],
                places,
                nodes.lines(frontier, nodes.fed),
                nodes.begin,
            )

        feed = NodeBatch(count, self.begin + fed - count, nodes.as_inputs, "layer", count, make)
        return self._pass(feed, nodes, choose, {}, lambda out, given: out[:, :count])

    def _pass(
        self,
        feed: ForwardBatch | NodeBatch,
        nodes: Nodes,
        choose: Choose,
        given: InputTensors,
        pick: Pick,
    ) -> Nodes:
        # Tensors that a CUDA graph reads must live as long as the graph, or be inputs.
        given = given if self._ids is None else {**given, "ids": self._ids}
        given = given if isinstance(feed, NodeBatch) else {**nodes.as_inputs, **given}
        return self.run(feed, nodes, choose, given, pick)

    @abstractmethod
    def run(
        self,
        feed: ForwardBatch | NodeBatch,
        nodes: Nodes,
        choose: Choose,
        given: InputTensors,
        pick: Pick,
    ) -> Nodes:
        """Run one pass of the network, and return the trees with the children that it chooses.

        Args:
            feed: the tokens of the pass.
            nodes: the draft trees so far.
            choose: adds children by the logits of the frontier. If `given` has `ids`, it gets them;
                they are the token ids of the columns of the logits.
            given: the other input tensors of the pass, by name.
            pick: selects the results [R, F, …] of the frontier from those [R, n, …] of all tokens.
        """

    def read(self, fed: Sequence[Ints]) -> Decoding:
        """Return the decoding state after the given nodes have been read, see `state`."""
        numbers = np.concatenate(fed, axis=1)
        rows = zip(numbers, self._live, strict=True)
        return replace(self._decoding, fed=tuple(n if live else NO_TOKENS for n, live in rows))


@final
class DecoderLayers(CachingLayers):
    """Passes of a transformer over a tree on the device.

    Args:
        decoder: the transformer.
        shared: the tokens that a drafter with another vocabulary shares with the target; None for
            the same vocabulary.
        state: see `CachingLayers`, as for the other arguments.
    """

    def __init__(
        self,
        decoder: CausalLM,
        shared: Shared | None,
        state: Decoding,
        roots: Tree,
        depth: Ints,
        drafted: DraftVocab | None,
    ) -> None:
        super().__init__(
            state, roots, depth, drafted, None if shared is None else shared.reads, decoder.context
        )
        self._decoder, self._shared = decoder, shared

    @property
    def fit(self) -> bool:
        """Return whether the transformer supports all positions that it would read."""
        return self.reach <= self._decoder.context

    @override
    def run(
        self,
        feed: ForwardBatch | NodeBatch,
        nodes: Nodes,
        choose: Choose,
        given: InputTensors,
        pick: Pick,
    ) -> Nodes:
        columns = None if self._shared is None else self._shared.columns

        def grow_trees(results: OutputTensors, given: InputTensors) -> OutputTensors:
            logits = pick(results[0], given)
            return choose(
                logits if columns is None else logits[..., columns],
                Nodes.of(given),
                given.get("ids"),
            ).growing_tensors

        then = Epilogue(choose, given, grow_trees)
        return nodes.after(self._decoder.forward_on_device(feed, self._decoding.cache, (), then))

    @override
    def state(self, fed: Sequence[Ints]) -> Decoding:
        return self.read(fed)
