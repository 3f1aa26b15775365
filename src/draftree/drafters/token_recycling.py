"""Token Recycling: the tokens that the target found likely after the same token before (Luo et al. 2024).

The target's likeliest next tokens after every verified node, the rejected ones too, go into a table
from a token to its successors. Drafts are read from it layer by layer.

Shapes: R slots, F frontier nodes, K successors, S degrees of sureness.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from typing_extensions import override

from draftree.drafters.base import Drafter, Method, replace_slots, select_slots, slots_or_all
from draftree.drafters.retrieval.adjacency_table import (
    MAX_CONFIRMATIONS,
    MISSING,
    Adjacency,
    merge_lists,
    pairs_of,
)
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, HiddenStateSpec, Target
from draftree.tree import AcceptResult, Candidates, Floats, Ints, Tree
from draftree.utils.validated_dataclass import knob

MEASURED_ACCEPTANCE = (
    (0.30, 0.13, 0.08, 0.03),
    (0.53, 0.09, 0.03, 0.02),
    (0.75, 0.05, 0.02, 0.01),
    (0.87, 0.03, 0.01, 0.01),
)
"""Initial acceptance of the first four ranks, for each degree of sureness.

It was measured with SmolLM2 on Spec-Bench's six tasks. Later ranks get the value of the fourth.
"""
PRIOR = 16.0
"""The number of observations for which `MEASURED_ACCEPTANCE` counts."""


@final
@dataclass(frozen=True)
class TokenRecycling(Method):
    """Token Recycling (arXiv 2408.08696).

    The paper's tree is the policy `static:paths=token_recycling/2.2.2`; other policies grow their
    trees by q. The q of a successor is the rate at which its rank has been correct so far. The rate
    is taken over lines of the table whose first successor has been confirmed the same number of
    times in a row.

    - In the official code only verifications fill the matrix. If a token is verified at several
      nodes, the code does not define which node's successors are stored. Here the successors of the
      accepted node are stored, or else those of the last node.
    - Initially, the line of each token contains the tokens that followed it in the prompt
      (`prompt=false`: no lines, as in the official code).

    Attributes:
        successors: k, the number of successors stored for each token.
        prompt: whether the pairs of consecutive tokens in a prompt are added when it is read.
        session: whether the table of a text is kept for later texts. Otherwise each text begins
            with an empty table.
    """

    spec_name: ClassVar[str] = "token_recycling"

    successors: int = knob(8, least=1, most=1024)
    prompt: bool = True
    session: bool = True

    @override
    def open(self, target: Target) -> "TokenRecyclingDrafter":
        return TokenRecyclingDrafter(self, target.decoder.vocab)

    @override
    def example(self, target: Target) -> "TokenRecyclingDrafter":
        return self.open(target)


@dataclass(frozen=True)
class TokenRecyclingState:
    """The state of all sequences.

    Attributes:
        memory: lines from earlier texts, shared by all sequences.
        known: [2, S, K] counts from earlier texts, by degree of sureness and rank: how often a
            successor was judged, and how often it was correct.
        tables: [R] lines from each sequence's own text.
        judged: [R] counts like `known` from each sequence's own text.
    """

    memory: Adjacency
    known: Floats
    tables: tuple[Adjacency, ...] = ()
    judged: tuple[Floats, ...] = ()


@final
class TokenRecyclingDrafter(Drafter[TokenRecyclingState]):
    """Drafts the most likely successors in the table.

    Args:
        knobs: the options of the method.
        vocab: V, the size of the target's vocabulary.
    """

    knobs: TokenRecycling
    searches = True
    remembers = True

    def __init__(self, knobs: TokenRecycling, vocab: int) -> None:
        self.knobs = knobs
        self._width = min(knobs.successors, vocab)
        self._empty = Adjacency.empty(vocab, self._width)
        prior = np.array(MEASURED_ACCEPTANCE)[
            :, np.minimum(np.arange(self._width), len(MEASURED_ACCEPTANCE[0]) - 1)
        ]
        self._prior = np.stack((np.full_like(prior, PRIOR), PRIOR * prior))
        self._none = np.zeros_like(self._prior)

    @property
    @override
    def needs(self) -> HiddenStateSpec:
        return HiddenStateSpec(top=self._width)

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: TokenRecyclingState | None = None,
        rows: Ints | None = None,
    ) -> TokenRecyclingState:
        state, count = state or TokenRecyclingState(self._empty, self._none), len(prompts)
        tables, judged = (
            list(state.tables or (self._empty,) * count),
            list(state.judged or (self._none,) * count),
        )
        for row in slots_or_all(rows if state.tables else None, count).tolist():
            tables[row] = self._start_table(np.append(prompts[row], roots[row]), state.memory)
            judged[row] = self._none
        return replace(state, tables=tuple(tables), judged=tuple(judged))

    def _start_table(self, text: Ints, memory: Adjacency) -> Adjacency:
        """Return a sequence's table after its prompt and root."""
        if not self.knobs.prompt:
            return self._empty
        tokens, followed = pairs_of(text, self._width)
        return self._empty.plus(tokens, merge_lists(followed, memory.look_up(tokens)[0]))

    @override
    def expand(
        self, state: TokenRecyclingState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, TokenRecyclingState]:
        width, rows = min(k, self._width), tree.row[frontier]
        tokens, log_q = (
            np.zeros((len(frontier), width), np.int64),
            np.full((len(frontier), width), -np.inf),
        )
        for row in np.unique(rows).tolist():
            here = rows == row
            found, sureness = state.tables[row].look_up(tree.tokens[frontier[here]], state.memory)
            found, q = found[:, :width], self._rates(state, row)[sureness, :width]
            tokens[here], log_q[here] = (
                np.where(found == MISSING, 0, found),
                np.where(found == MISSING, -np.inf, np.log(q)),
            )
        return Candidates(tokens, log_q), state

    def _rates(self, state: TokenRecyclingState, row: int) -> Floats:
        """Return q [S, K] by degree of sureness and rank.

        It does not increase with the rank, which is the order of the candidates.
        """
        tried, right = self._prior + state.known + state.judged[row]
        rates: Floats = np.minimum.accumulate(right / tried, axis=1)
        return rates

    @override
    def commit(
        self,
        state: TokenRecyclingState,
        tree: Tree,
        verdict: AcceptResult,
        hidden_states: HiddenStates,
    ) -> TokenRecyclingState:
        tables, judged = list(state.tables), list(state.judged)
        top = (
            None if hidden_states.top is None else hidden_states.top[:, : self._width].cpu().numpy()
        )
        for root in range(tree.roots):
            row, kept = int(tree.row[root]), verdict.committed_nodes(root)
            nexts = np.append(tree.tokens[kept[1:]], verdict.bonus[root])
            judged[row] = judged[row] + self._judgement(state, row, tree.tokens[kept], nexts)
            if top is not None:
                mine = tree.of_row(row)
                order = np.concatenate(
                    (mine[~np.isin(mine, kept)], kept)
                )  # among equal tokens the accepted node counts
                tables[row] = tables[row].plus(tree.tokens[order], top[order], state.memory)
        return replace(state, tables=tuple(tables), judged=tuple(judged))

    def _judgement(self, state: TokenRecyclingState, row: int, tokens: Ints, nexts: Ints) -> Floats:
        """Return counts [2, S, K] of judged and correct successors, by degree of sureness and rank.

        Args:
            state: the state.
            row: the slot of the sequence.
            tokens: [n] the tokens whose successors in the table are judged.
            nexts: [n] the token that followed each of them; a successor is correct if it equals it.
        """
        found, sureness = state.tables[row].look_up(tokens, state.memory)
        counts = np.zeros_like(self._none)
        np.add.at(counts[0], sureness, found != MISSING)
        np.add.at(counts[1], sureness, found == nexts[:, None])
        return counts

    def truncate(
        self, state: TokenRecyclingState, lengths: Ints, rows: Ints | None = None
    ) -> TokenRecyclingState:
        """Return the state with empty tables for some sequences, because a table cannot be cut.

        Their lines and counts are added to the memory.
        """
        at = slots_or_all(rows, len(lengths))
        memory, known = self._extend_memory(state, at)
        tables = replace_slots(state.tables, at, (self._empty,) * len(lengths))
        return TokenRecyclingState(
            memory, known, tables, replace_slots(state.judged, at, (self._none,) * len(lengths))
        )

    @override
    def select(
        self, state: TokenRecyclingState, rows: Ints, cache: SlotCache
    ) -> TokenRecyclingState:
        tables, judged = (
            select_slots(state.tables, rows, self._empty),
            select_slots(state.judged, rows, self._none),
        )
        return replace(state, tables=tables, judged=judged)

    @override
    def carry(self, state: TokenRecyclingState) -> TokenRecyclingState | None:
        return (
            TokenRecyclingState(*self._extend_memory(state, np.arange(len(state.tables))))
            if self.knobs.session
            else None
        )

    def _extend_memory(self, state: TokenRecyclingState, rows: Ints) -> tuple[Adjacency, Floats]:
        """Return the memory with the lines and counts of some sequences added."""
        memory, known = state.memory, state.known
        if self.knobs.session:
            for row in rows.tolist():
                memory, known = memory.join(state.tables[row]), known + state.judged[row]
        return memory, known


assert len(MEASURED_ACCEPTANCE) == MAX_CONFIRMATIONS + 1
