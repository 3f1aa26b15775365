"""The state of a transformer drafter within a step, and the inputs of its next pass.

Shapes: R slots, F frontier nodes, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.drafters.base import replace_slots, select_slots
from draftree.drafters.neural.draft_vocabulary import Shared
from draftree.kernels.tree_layout import draft_pass_layout
from draftree.models.decoder import Decoder
from draftree.models.forward_batch import ForwardBatch
from draftree.models.graph_capture import Epilogue, InputTensors, OutputTensors
from draftree.models.kv_cache import SlotCache
from draftree.target.device_tree import BatchTensors, Choose, Layers, NodeBatch, Nodes
from draftree.target.target import HiddenStates
from draftree.tree import AcceptResult, Candidates, DraftVocab, Ints, Tree
from draftree.utils.hardware import to_device

NO_TOKENS = np.zeros(0, np.int64)
SPARE_SLOTS = 256
"""Number of slots that a new cache has in addition to the prompt, so that it seldom grows."""

Pick = Callable[[Tensor, InputTensors], Tensor]
"""A function `pick(results, inputs)` that selects the results of the frontier's nodes [R, F, …].

`results` [R, n, …] are those of all tokens of a pass, and `inputs` are the inputs of the pass.
"""


@dataclass(frozen=True)
class Decoding:
    """A transformer drafter's state.

    Attributes:
        cache: the keys and values. The states of one text share its tensors.
        pending: for each slot, the committed tokens after the cached ones, which the network has
            not read.
        fed: for each slot, the nodes that the network has read in this step, in the order of their
            scratch slots, which follow those of the pending tokens.
        unread: hidden states of committed tokens that have not been read, for a drafter that caches
            values computed from them.
    """

    cache: SlotCache
    pending: tuple[Ints, ...]
    fed: tuple[Ints, ...]
    unread: tuple[HiddenStates, ...] = ()

    @classmethod
    def empty(cls, cache: SlotCache) -> "Decoding":
        """Return a state in which no tokens are pending and no nodes have been read."""
        return cls(cache, (NO_TOKENS,) * cache.rows, (NO_TOKENS,) * cache.rows)


@dataclass(frozen=True)
class StepLayout:
    """The places of a frontier's nodes in one pass.

    Attributes:
        feed: the forward batch, which contains the frontier nodes of each sequence. In the first
            pass of a step, the pending tokens of the sequence come before them.
        rows: [F] the slot of each frontier node.
        columns: [F] the column of each frontier node in its slot.
        fed: for each slot, the nodes that have been read in this step after the pass.
    """

    feed: ForwardBatch
    rows: Ints
    columns: Ints
    fed: tuple[Ints, ...]

    @property
    def packed_places(self) -> Ints:
        """Return [F] the index of each frontier node among the N tokens of a packed pass."""
        return self.feed.firsts[self.rows] + self.columns

    @property
    def padded_places(self) -> Ints:
        """Return [F] the index of each frontier node among the R n tokens of a padded pass."""
        return self.rows * self.feed.width + self.columns

    def pick(self, out: Tensor) -> Tensor:
        """Select the frontier's part [F, …] of the output [R, n, …] of a padded pass."""
        if len(out) == 1:  # frontier nodes follow the pending tokens in order
            return out[0, self.columns[0] : self.columns[-1] + 1]
        return out[to_device(self.rows, out.device), to_device(self.columns, out.device)]


def lay_out(state: Decoding, tree: Tree, frontier: Ints, device: torch.device) -> StepLayout:
    """Return a pass over the frontier's nodes.

    Each node sees the committed tokens of its sequence, and those nodes of its path that were read.

    Args:
        state: the drafter's state.
        tree: the tree so far.
        frontier: [F] nodes that have not been read in this step.
        device: the device of the pass.
    """
    cache, owner = state.cache, tree.row[frontier]
    rows = [frontier[owner == r] for r in range(cache.rows)] if cache.rows > 1 else [frontier]
    parts = []
    starts = cache.lengths.copy()
    columns = np.empty(len(frontier), np.int64)
    for r, nodes in enumerate(rows):
        before, base = state.fed[r], int(cache.lengths[r])
        pending = (
            state.pending[r] if before.size or nodes.size else NO_TOKENS
        )  # a sequence without drafts takes no slots
        waiting = 0 if before.size else len(pending)  # the first pass of a step reads them
        parts.append(
            draft_pass_layout(pending, before, nodes, base, tree.tokens, tree.depth, tree.parents)
        )
        starts[r] += len(pending) + len(before) if before.size else 0
        columns[owner == r] = waiting + np.arange(len(nodes))
    tokens, positions, visible, scratch = zip(*parts, strict=True)
    feed = ForwardBatch.from_sequences(tokens, positions, starts, visible, scratch, device)
    feed = feed.with_width(cache.ladder.width(feed.width))  # as in captured passes
    fed = tuple(np.concatenate(pair) for pair in zip(state.fed, rows, strict=True))
    return StepLayout(feed, owner, columns, fed)


@torch.inference_mode()
def keep_path(state: Decoding, tree: Tree, verdict: AcceptResult, again: bool = False) -> Decoding:
    """Commit the nodes of each accepted path that were read; other tokens wait for the next step.

    With `again`, all tokens of the path are read again in the next step.
    """
    cache, pending = state.cache, list(state.pending)
    for root in range(tree.roots):
        row = int(tree.row[root])
        nodes, before = verdict.committed_nodes(root), state.fed[row]
        done = (
            NO_TOKENS if again else np.flatnonzero(np.isin(before, tree.number[nodes]))
        )  # a node is read after its parent
        if before.size:
            waited = len(state.pending[row])
            cache.keep(row, cache.lengths[row] + np.concatenate((np.arange(waited), waited + done)))
            pending[row] = tree.tokens[nodes[len(done) :]]
        else:
            pending[row] = np.concatenate((state.pending[row], tree.tokens[nodes]))
    return Decoding(cache, tuple(pending), (NO_TOKENS,) * cache.rows)


def rewind(state: Decoding, lengths: Ints, rows: Ints | None) -> Decoding:
    """Truncate the cache in place, and return the state at the beginning of a step.

    No nodes have been read in it, and it has no unread hidden states.

    Args:
        state: the drafter's state.
        lengths: [R] the largest number of committed tokens that the cache keeps of each sequence.
        rows: the sequences whose pending tokens are dropped; None for all.
    """
    state.cache.truncate(lengths)
    empty = Decoding.empty(state.cache)
    return replace(empty, pending=replace_slots(state.pending, rows, empty.pending))


def select_sequences(state: Decoding, rows: Ints, cache: SlotCache) -> Decoding:
    """Return the state with sequences moved to other slots, see `Drafter.select`."""
    empty, pending = (
        Decoding.empty(state.cache.copy_sequences(rows, SPARE_SLOTS)),
        select_slots(state.pending, rows, NO_TOKENS),
    )
    return replace(empty, pending=pending, unread=move_unread(state.unread, rows, cache))


def move_unread(
    unread: Sequence[HiddenStates], rows: Ints, cache: SlotCache
) -> tuple[HiddenStates, ...]:
    """Return the unread hidden states after sequences have moved, see `Drafter.select`."""
    return tuple(
        hidden_states for every in unread if len((hidden_states := every.select(rows, cache)).rows)
    )


def truncate_unread(unread: Sequence[HiddenStates], lengths: Ints) -> tuple[HiddenStates, ...]:
    """Return the unread hidden states of tokens before position `lengths[r]` of each sequence."""
    return tuple(
        hidden_states for every in unread if len((hidden_states := every.before(lengths)).rows)
    )


def no_candidates(nodes: int, k: int) -> Candidates:
    """Return the candidates of nodes that have none."""
    return Candidates(np.zeros((nodes, k), np.int64), np.full((nodes, k), -np.inf))


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
        decoder: Decoder,
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
