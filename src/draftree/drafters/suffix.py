"""SuffixDecoding: the most frequent continuations of the longest match in the text and earlier outputs (Oliaro et al. 2024)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from typing_extensions import override

from draftree.drafters.base import Drafter, Method, select_slots, slots_or_all
from draftree.drafters.retrieval.suffix_match_drafts import Limits, Outputs
from draftree.drafters.retrieval.suffix_node_expansion import (
    PATH_TOKENS,
    RootText,
    children,
    descendants,
    root_texts,
)
from draftree.drafters.retrieval.text_drafter import NO_TEXT, Texts, extend_texts, truncate_texts
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, Target
from draftree.tree import MAX_NODES, AcceptResult, Candidates, Ints, SubtreeCandidates, Tree
from draftree.utils.validated_dataclass import knob

CachedDraft = tuple[int, RootText]


@final
@dataclass(frozen=True)
class Suffix(Method):
    """SuffixDecoding (arXiv 2411.04975, section 4).

    Patterns are the last p tokens of the text, for each length p. For each p, one tree is grown
    from the pattern's continuations in the text, and another tree from its continuations in the
    memory. Nodes with the largest probability along their path are added first, up to factor · p
    nodes. The draft is the tree with the largest sum of these probabilities. The q of a token is
    its share of the continuations of its path.

    Attributes:
        longest: largest number of tokens of a pattern.
        length: largest number of tokens of a continuation. (In the official code, pattern and
            continuation together have at most 64.)
        factor: α, number of drafted tokens for each token of the pattern (1 by default in the
            official code).
        least: smallest probability of a drafted token along its path (0.1 in the official code).
        session: whether earlier outputs are remembered.
        memory: largest number of tokens of earlier outputs; the oldest are dropped.
        places: largest number of occurrences of a pattern that are counted. Those that match the
            text over the largest length are preferred.
    """

    longest: int = knob(32, least=1, most=2**16)
    length: int = knob(64, least=1)
    factor: float = knob(4.0, least=1)
    least: float = knob(0.1, least=0, most=1)
    session: bool = True
    memory: int = knob(1_000_000, least=24, most=2**31 - 1)
    places: int = knob(256, least=1)

    @property
    def limits(self) -> Limits:
        """Return the bounds of patterns and drafts."""
        return Limits(self.longest, self.length, float(self.factor), float(self.least), self.places)

    @override
    def open(self, target: Target) -> "SuffixDrafter":
        return SuffixDrafter(self)

    @override
    def example(self, target: Target) -> "SuffixDrafter":
        return SuffixDrafter(self)


@dataclass(frozen=True)
class SuffixState:
    """The texts that the drafter has read.

    Attributes:
        texts: the committed tokens of each sequence.
        begun: [R] the index in the text at which the output begins.
        memory: outputs of earlier calls.
        drafts: a cache of drafts by slot, so that a draft is computed once in a step. Each entry
            has the root, and its text and draft.
    """

    texts: Texts
    begun: Ints
    memory: Outputs
    drafts: tuple[tuple[int, CachedDraft], ...] = ()


@final
class SuffixDrafter(Drafter[SuffixState]):
    """Drafts the most frequent continuations."""

    knobs: Suffix
    searches = True
    remembers = True

    def __init__(self, knobs: Suffix) -> None:
        self.knobs = knobs
        self._limits = knobs.limits

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: SuffixState | None = None,
        rows: Ints | None = None,
    ) -> SuffixState:
        fresh = state is None or not state.texts  # the result of `carry` has no sequences
        lengths, at = (
            np.array([len(p) for p in prompts], np.int64),
            slots_or_all(None if fresh else rows, len(prompts)),
        )
        begun = lengths.copy() if state is None or fresh else state.begun.copy()
        begun[at] = lengths[at]
        return SuffixState(
            tuple(prompts), begun, Outputs.empty() if state is None else state.memory
        )

    @override
    def expand(
        self, state: SuffixState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, SuffixState]:
        texts, owners, state = self._texts_of(state, tree, frontier)
        bounds = state.memory, self._limits
        tokens, log_q, used = children(
            texts, owners, tree.nodes, frontier, min(k, MAX_NODES), *bounds
        )
        return Candidates(tokens[:, :used], log_q[:, :used]), state

    @override
    def below(
        self,
        state: SuffixState,
        tree: Tree,
        frontier: Ints,
        k: int,
        drawing: Drawing,
        deepest: Ints,
    ) -> tuple[SubtreeCandidates | None, SuffixState]:
        texts, owners, state = self._texts_of(state, tree, frontier)
        rows = np.zeros(len(texts), np.int64)
        rows[owners] = tree.row[frontier]
        bounds = deepest[rows], state.memory, self._limits
        nodes, whose, tokens, log_q = descendants(
            texts, owners, tree.nodes, frontier, min(k, MAX_NODES), *bounds
        )
        return SubtreeCandidates(nodes, rows[whose], Candidates(tokens, log_q)), state

    def _texts_of(
        self, state: SuffixState, tree: Tree, frontier: Ints
    ) -> tuple[list[RootText], Ints, SuffixState]:
        """Return the text of each sequence that has a node in the frontier [F].

        A text ends with the root. Its array has space for the longest path below the root.

        Returns:
            The texts; [F] the index of each frontier node's text; and the state, which caches the
                texts so that each is computed only once in a step.
        """
        nodes = tree.nodes
        rows = nodes.row[frontier].tolist()
        places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        roots = dict(zip(nodes.row[: tree.roots].tolist(), nodes.tokens.tolist(), strict=False))
        known = dict(state.drafts)
        missing = [row for row in places if row not in known or known[row][0] != roots[row]]
        if missing:
            asked = [state.texts[row] for row in missing], [roots[row] for row in missing]
            for row, found in zip(
                missing, root_texts(*asked, state.memory, self._limits), strict=True
            ):
                known[row] = roots[row], RootText(*found)
            state = SuffixState(state.texts, state.begun, state.memory, tuple(known.items()))
        texts = [known[row][1] for row in places]
        if (depth := int(nodes.depth[frontier].max())) > PATH_TOKENS:
            space = np.empty(depth, np.int32)
            texts = [t._replace(tokens=np.append(t.tokens[: t.end], space)) for t in texts]
        return texts, np.array([places[row] for row in rows], np.int64), state

    @override
    def commit(
        self, state: SuffixState, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> SuffixState:
        return SuffixState(extend_texts(state.texts, tree, verdict), state.begun, state.memory)

    @override
    def truncate(self, state: SuffixState, lengths: Ints, rows: Ints | None = None) -> SuffixState:
        at, begun = slots_or_all(rows, len(lengths)), state.begun.copy()
        begun[at] = lengths[at]
        return SuffixState(
            truncate_texts(state.texts, lengths, rows), begun, self._extend_memory(state, at)
        )

    @override
    def select(self, state: SuffixState, rows: Ints, cache: SlotCache) -> SuffixState:
        begun = np.array(select_slots(state.begun.tolist(), rows, 0), np.int64)
        return SuffixState(select_slots(state.texts, rows, NO_TEXT), begun, state.memory)

    @override
    def carry(self, state: SuffixState) -> SuffixState | None:
        if not self.knobs.session:
            return None
        return SuffixState(
            (), np.zeros(0, np.int64), self._extend_memory(state, np.arange(len(state.texts)))
        )

    def _extend_memory(self, state: SuffixState, rows: Ints) -> Outputs:
        """Return the memory with the outputs of some sequences added."""
        if not self.knobs.session:
            return state.memory
        outputs = [state.texts[row][state.begun[row] :] for row in rows]
        return state.memory.remember(outputs, self.knobs.longest, self.knobs.memory)
