"""ADED: trigram counts of a corpus that adapt to the target's output (Liu et al. 2024; official code: Adaptix)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from typing_extensions import override

from draftree.drafters.base import Drafter, replace_slots, select_slots, slots_or_all
from draftree.drafters.retrieval.adaptive_ngrams import Adapted, Increments, Weighting, successors
from draftree.drafters.retrieval.datastore_drafter import DatastoreMethod, Documents
from draftree.drafters.retrieval.ngram_build import GramSettings, build_ngram_table, grams_of
from draftree.drafters.retrieval.ngram_table import Grams, width_of
from draftree.errors import UnknownName, UserError
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, Target
from draftree.tree import AcceptResult, Candidates, Ints, Tree
from draftree.utils.validated_dataclass import knob, parse_value

TOP = 12
"""Number of successors of a context (appendix, "Configuration of ADED")."""
SETTINGS = {"n": 3, "top": TOP, "threshold": 1}
"""Settings of the build of a datastore, with their defaults.

They are the number of tokens of an n-gram, the number of successors stored for each context (0 for
all), and the smallest count that is stored.
"""


@final
@dataclass(frozen=True)
class ADED(DatastoreMethod):
    """Draft from the n-grams of a corpus (eq. 1); recent n-grams weigh more (Algorithm 2).

    It is meant for the policy `mcts`. It proposes no token after a context that occurs neither in
    the corpus nor in the text.

    - In every step each n-gram of the last `window` tokens, including the root, is counted once
      more. Its weight is initially its share in the corpus (0 if it does not occur). Each count
      adds `increment` to the weight, up to `cap`. Neither the paper nor the official code
      normalises the weights. Here q is a weight divided by the sum of all weights after the
      context, including n-grams that are not stored. An n-gram that was not adapted thus keeps its
      share, and no q exceeds 1.
    - The paper has a "threshold for the elimination of tri-gram probability, at 12". The official
      code reads the 12 most likely successors, and so does this drafter (`top`). If the threshold
      is meant as a count, the setting `threshold` of a build has this effect.
    - By Figure 2 the n-grams of the prompt are added to the matrix first. The official code reads
      only the last `window` tokens (`prompt=false`).

    Attributes:
        n: number of tokens of an n-gram, 2 to 4; by default that of the datastore, or 3 without a
            datastore.
        top: number of successors of a context that are read from the datastore.
        adapt: whether the generated text changes the weights.
        window: number of tokens that are counted in each step (16 in the official code). The paper
            gives no numbers for this and the next two options.
        increment: amount added to a weight for each occurrence of the n-gram (0.04 in the official
            code).
        cap: largest weight (3 in the official code).
        prompt: whether all n-grams of a prompt count once when it is read.
        session: whether the weights that a text added are kept for later texts. Otherwise each text
            begins with the datastore alone.
        memory: largest number of n-grams of earlier texts that are kept.
    """

    n: int | None = knob(None, least=2, most=4)
    top: int = knob(TOP, least=1)
    adapt: bool = True
    window: int = knob(16, least=1)
    increment: float = knob(0.04, above=0)
    cap: float = knob(3.0, above=0)
    prompt: bool = True
    session: bool = True
    memory: int = knob(200_000, least=1)

    @override
    def open(self, target: Target) -> "ADEDDrafter":
        if (folder := self.store(target)) is None:
            return ADEDDrafter(self, Grams.none(self.n or 3, target.decoder.vocab))
        drafter = self.searching(folder)
        if width_of(drafter.grams.vocab) < width_of(
            target.decoder.vocab
        ):  # larger ids would be mistaken for others
            raise UserError(
                f"aded: '{folder}' has room for ids up to {2 ** width_of(drafter.grams.vocab) - 1}, but target '{target.name}' "
                f"has {target.decoder.vocab} ids, more than its tokenizer; rest can serve it"
            )
        return drafter

    def searching(self, folder: Path) -> "ADEDDrafter":
        """Return the drafter with the datastore of a folder; the caller checks its tokenizer.

        Raises:
            UserError: the datastore contains n-grams of another n, or none.
        """
        grams = Grams.from_folder(folder)
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
        given = SETTINGS | {name: parse_value(text, int) for name, text in settings.items()}
        return build_ngram_table(documents, GramSettings(vocab=vocab, **given), folder, tell)


@dataclass(frozen=True)
class ADEDState:
    """The state of all sequences.

    Attributes:
        memory: increments from earlier texts of the session, shared by all sequences.
        rows: [R] the text of each sequence with its root, and the increments from that text.
        shared: in a truncated state, [R] the number of tokens of each slot's text with which its
            next text begins; otherwise empty.
    """

    memory: Increments
    rows: tuple[Adapted, ...]
    shared: tuple[int, ...] = ()


@final
class ADEDDrafter(Drafter[ADEDState]):
    """Looks up the tokens that followed the last n − 1 tokens.

    Args:
        knobs: the options of the method.
        grams: the n-grams of the corpus, which never change.
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
    def description(self) -> str:
        return f"{replace(self.knobs, datastore='')}, {len(self.grams)} {self.grams.n}-grams"

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: ADEDState | None = None,
        rows: Ints | None = None,
    ) -> ADEDState:
        state = state or ADEDState(Increments.empty(), ())
        found, begun = (
            list(state.rows) or [Adapted.empty()] * len(prompts),
            slots_or_all(rows, len(prompts)),
        )
        shared = state.shared or (0,) * len(prompts)
        for r in begun.tolist():
            found[r] = self._start_sequence(np.append(prompts[r], roots[r]), shared[r])
        return ADEDState(state.memory, tuple(found))

    def _start_sequence(self, text: Ints, shared: int) -> Adapted:
        """Return the state of a sequence after its prompt and root.

        The n-grams of the first `shared` tokens have been counted before and are in the memory.
        """
        row = Adapted.empty().plus(text, self.grams.n)
        if self.knobs.adapt and self.knobs.prompt:
            row = row.with_increments(max(0, shared - self.grams.n + 1), self.grams.n)
        return self._count_newest(row)

    def _count_newest(self, row: Adapted) -> Adapted:
        """Return the sequence's state after counting its newest n-grams again (Algorithm 2)."""
        if not self.knobs.adapt:
            return row
        return row.with_increments(len(row.tokens) - self.knobs.window, self.grams.n)

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
    def commit(
        self, state: ADEDState, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> ADEDState:
        rows = list(state.rows)
        # The text already contains the root; the bonus token is the next root.
        for root in range(tree.roots):
            new = np.append(tree.tokens[verdict.paths[root]], verdict.bonus[root])
            row = int(tree.row[root])
            rows[row] = self._count_newest(rows[row].plus(new, self.grams.n))
        return replace(state, rows=tuple(rows))

    @override
    def truncate(self, state: ADEDState, lengths: Ints, rows: Ints | None = None) -> ADEDState:
        cut = slots_or_all(rows, len(lengths))
        left = replace_slots(state.rows, cut, (Adapted.empty(),) * len(lengths))
        if not self.knobs.session:
            return ADEDState(state.memory, left)
        shared = replace_slots(state.shared or (0,) * len(lengths), cut, lengths.tolist())
        return ADEDState(self._extend_memory(state, cut), left, shared)

    @override
    def select(self, state: ADEDState, rows: Ints, cache: SlotCache) -> ADEDState:
        shared = select_slots(state.shared, rows, 0) if state.shared else ()
        return ADEDState(state.memory, select_slots(state.rows, rows, Adapted.empty()), shared)

    @override
    def carry(self, state: ADEDState) -> ADEDState | None:
        return (
            ADEDState(self._extend_memory(state, np.arange(len(state.rows))), ())
            if self.knobs.session
            else None
        )

    def _extend_memory(self, state: ADEDState, rows: Ints) -> Increments:
        """Return the memory with the increments of some sequences added."""
        return state.memory.plus(
            [state.rows[row] for row in rows],
            self.grams.n,
            self._by.width,
            self._most,
            self.knobs.memory,
        )
