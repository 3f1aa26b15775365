"""Tri-gram statistics of a corpus, adapted to what the target writes (ADED, Liu et al. 2024; official code: Adaptix)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from typing_extensions import override

from draftree.drafters.base import Drafter, every, picked, put
from draftree.drafters.retrieval.adaptive_ngrams import Adapted, Increments, Weighting, successors
from draftree.drafters.retrieval.datastore import Documents, Stored
from draftree.drafters.retrieval.ngram_build import GramSettings, build, grams_of
from draftree.drafters.retrieval.ngram_table import Grams, width_of
from draftree.errors import UnknownName, UserError
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Taps, Target
from draftree.tree import Candidates, Ints, Tree, Verdict
from draftree.utils.validated_dataclass import knob, read

TOP = 12
"""Successors of a context (appendix, "Configuration of ADED")."""
SETTINGS = {"n": 3, "top": TOP, "threshold": 1}
"""Of a build: tokens of an n-gram; successors stored of each context, 0 for all; the least count
that is stored."""


@final
@dataclass(frozen=True)
class ADED(Stored):
    """An n-gram model of a corpus (eq. 1) that what was written lately makes likelier (Algorithm 2).

    The policy that belongs to it is `mcts`. After a context that neither the corpus nor the text
    has, it proposes nothing.

    - Every step counts each n-gram of the last `window` tokens, the root among them, once more: its
      weight, which is its share in the corpus or 0, grows by `increment`, to `cap` at most. Neither
      the paper nor the official code renormalises; here q is the weight's part of all weights after
      that context, those not stored included, so that an n-gram that was not adapted keeps its
      share and none has a q above 1.
    - The paper's "threshold for the elimination of tri-gram probability, at 12" is what the
      official code does: it reads the 12 likeliest successors. Read as a count it is the setting
      `threshold` of a build.
    - By Figure 2 the n-grams of the prompt go into the matrix first; the official code looks at the
      last `window` tokens only (`prompt=false`).

    Attributes:
        n: tokens of an n-gram, 2 to 4; the datastore's by default, 3 without one.
        top: successors of a context that are read from the datastore.
        adapt: whether what is written changes the weights.
        window: tokens looked at in each step (the official code's 16; in the paper it is a letter,
            as the next two are).
        increment: added to a weight for each time it is seen (the official code's 0.04).
        cap: the most that a weight grows to (the official code's 3).
        prompt: whether all n-grams of a prompt count once when it is read.
        session: whether what one text added is kept for the next ones; else each begins with the
            datastore alone.
    """

    n: int | None = knob(None, least=2, most=4)
    top: int = knob(TOP, least=1)
    adapt: bool = True
    window: int = knob(16, least=1)
    increment: float = knob(0.04, above=0)
    cap: float = knob(3.0, above=0)
    prompt: bool = True
    session: bool = True

    @override
    def open(self, target: Target) -> "ADEDDrafter":
        if (folder := self.store(target)) is None:
            return ADEDDrafter(self, Grams.none(self.n or 3, target.decoder.vocab))
        drafter = self.searching(folder)
        if width_of(drafter.grams.vocab) < width_of(
            target.decoder.vocab
        ):  # ids beyond would pass for others
            raise UserError(
                f"aded: '{folder}' has room for ids up to {2 ** width_of(drafter.grams.vocab) - 1}, but target '{target.name}' "
                f"has {target.decoder.vocab} ids, more than its tokenizer; rest can serve it"
            )
        return drafter

    def searching(self, folder: Path) -> "ADEDDrafter":
        """Return the drafter with the datastore of a folder; the caller checks its tokenizer.

        Raises:
            UserError: it holds n-grams of another n, or none.
        """
        grams = Grams.opened(folder)
        if self.n not in (None, grams.n):
            raise UserError(
                f"aded: n is {self.n}, allowed is {grams.n}: '{folder}' holds {grams.n}-grams"
            )
        return ADEDDrafter(self, grams)

    @override
    def example(self, target: Target) -> "ADEDDrafter":
        vocab = target.decoder.vocab
        steps = [np.arange(200) * step % vocab for step in (1, 3, 11)]
        return ADEDDrafter(self, grams_of(steps, GramSettings(self.n or 3, vocab)))

    @classmethod
    @override
    def build(
        cls,
        documents: Documents,
        vocab: int,
        folder: Path,
        settings: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        for name in settings:
            if name not in SETTINGS:
                raise UnknownName("setting of an aded datastore", name, SETTINGS)
        given = SETTINGS | {name: read(text, int) for name, text in settings.items()}
        return build(documents, GramSettings(vocab=vocab, **given), folder, tell)


@dataclass(frozen=True)
class ADEDState:
    """The state of all sequences.

    Attributes:
        memory: increments of earlier texts of the session, shared by all sequences.
        rows: the text of each sequence with its root, and its own increments.
        shared: tokens of each slot's text that the next one begins with, of a truncated state; none
            of any other.
    """

    memory: Increments
    rows: tuple[Adapted, ...]
    shared: tuple[int, ...] = ()


@final
class ADEDDrafter(Drafter[ADEDState]):
    """Looks up what followed the last n − 1 tokens.

    Args:
        knobs: of the method.
        grams: of the corpus; never changed.
    """

    knobs: ADED
    searches = True
    remembers = True

    def __init__(self, knobs: ADED, grams: Grams) -> None:
        self.knobs, self.grams = knobs, grams
        self._most = math.ceil(min(knobs.cap / knobs.increment, 2**31 - 1))
        self._by = Weighting(
            grams.n, width_of(grams.vocab), knobs.top, float(knobs.increment), float(knobs.cap)
        )

    @property
    @override
    def described(self) -> str:
        return f"{replace(self.knobs, datastore='')}, {len(self.grams)} {self.grams.n}-grams"

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        taps: Taps,
        state: ADEDState | None = None,
        rows: Ints | None = None,
    ) -> ADEDState:
        state = state or ADEDState(Increments.empty(), ())
        found, begun = (
            list(state.rows) or [Adapted.empty()] * len(prompts),
            every(rows, len(prompts)),
        )
        shared = state.shared or (0,) * len(prompts)
        for r in begun.tolist():
            found[r] = self._read(np.append(prompts[r], roots[r]), shared[r])
        return ADEDState(state.memory, tuple(found))

    def _read(self, text: Ints, shared: int) -> Adapted:
        """Return a prompt and its root; what was read of it before is in the memory."""
        row = Adapted.empty().plus(text, self.grams.n)
        if self.knobs.adapt and self.knobs.prompt:
            row = row.incremented(max(0, shared - self.grams.n + 1), self.grams.n)
        return self._stepped(row)

    def _stepped(self, row: Adapted) -> Adapted:
        """Return the text once the n-grams of its last tokens have counted again (Algorithm 2)."""
        if not self.knobs.adapt:
            return row
        return row.incremented(len(row.tokens) - self.knobs.window, self.grams.n)

    @override
    def expand(
        self, state: ADEDState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, ADEDState]:
        tokens, log_q = np.zeros((len(frontier), k), np.int64), np.full((len(frontier), k), -np.inf)
        rows = tree.row[frontier]
        for row in np.unique(rows).tolist():
            here = rows == row
            tokens[here], log_q[here] = successors(
                self.grams.table,
                state.memory,
                state.rows[row],
                frontier[here],
                tree.tokens,
                tree.parents,
                k,
                self._by,
            )
        return Candidates(tokens, log_q), state

    @override
    def commit(self, state: ADEDState, tree: Tree, verdict: Verdict, taps: Taps) -> ADEDState:
        rows = list(state.rows)
        for root in range(tree.roots):  # the root is in the text already; the bonus is the next one
            new = np.append(tree.tokens[verdict.paths[root]], verdict.bonus[root])
            row = int(tree.row[root])
            rows[row] = self._stepped(rows[row].plus(new, self.grams.n))
        return replace(state, rows=tuple(rows))

    @override
    def truncate(self, state: ADEDState, lengths: Ints, rows: Ints | None = None) -> ADEDState:
        cut = every(rows, len(lengths))
        left = put(state.rows, cut, (Adapted.empty(),) * len(lengths))
        if not self.knobs.session:
            return ADEDState(state.memory, left)
        shared = put(state.shared or (0,) * len(lengths), cut, lengths.tolist())
        return ADEDState(self._remembered(state, cut), left, shared)

    @override
    def select(self, state: ADEDState, rows: Ints, cache: SlotCache) -> ADEDState:
        shared = picked(state.shared, rows, 0) if state.shared else ()
        return ADEDState(state.memory, picked(state.rows, rows, Adapted.empty()), shared)

    @override
    def carry(self, state: ADEDState) -> ADEDState | None:
        return (
            ADEDState(self._remembered(state, np.arange(len(state.rows))), ())
            if self.knobs.session
            else None
        )

    def _remembered(self, state: ADEDState, rows: Ints) -> Increments:
        """Return the increments of earlier texts with those of some sequences."""
        return state.memory.plus(
            [state.rows[row] for row in rows], self.grams.n, self._by.width, self._most
        )
