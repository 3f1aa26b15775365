"""Tri-gram statistics of a corpus, adapted to what the target writes (ADED, Liu et al. 2024; official code: Adaptix)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from draftree.drafters.base import Drafter, every, put
from draftree.drafters.lookup.datastore import Documents, Stored
from draftree.drafters.lookup.ngram_build import Plan, Run, build, contexts, grams_of, summed
from draftree.drafters.lookup.ngrams import Array, Grams, Table, stored_at, width_of
from draftree.errors import UnknownName, UserError
from draftree.kernels.compiled import compiled
from draftree.models.target import Taps, Target
from draftree.sampling.drawing import Drawing
from draftree.tree import Candidates, Floats, Ints, Tree, Verdict

# What a text adds.


class Memory(NamedTuple):
    """Increments of earlier texts, by n-gram.

    Attributes:
        context: [C] in order, as numbers.
        start: [C + 1] where the successors of each begin.
        token: [S] in order within a context.
        times: [S] how many increments each got.
        widest: successors of the context that has most.
    """

    context: Array
    start: Array
    token: Array
    times: Array
    widest: int

    @classmethod
    def empty(cls) -> "Memory":
        return cls(np.zeros(0, np.uint64), np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), 0)

    def plus(self, texts: Iterable["Adapted"], n: int, width: int, most: int) -> "Memory":
        """With the increments of finished texts; more than `most` of one n-gram make no difference to its weight."""
        runs = [Run(np.repeat(self.context, np.diff(self.start)), self.token, self.times)]
        for text in texts:
            times = text.times[n - 1 :]
            there = times > 0
            runs.append(Run(contexts(text.tokens, n, width)[there], text.tokens[n - 1 :][there], times[there].astype(np.int64)))
        run = summed(Run(*(np.concatenate(column) for column in zip(*runs, strict=True))), n, width)
        context, start = np.unique(run.context, return_index=True)
        start = np.append(start, len(run.token)).astype(np.int64)
        widest = int(np.diff(start).max(initial=0))
        return Memory(context, start, run.token, np.minimum(run.times, most), widest)


class Adapted(NamedTuple):
    """A row's text with the increments of its n-grams, and an index of their contexts.

    Attributes:
        tokens: [T] the text, the root at its end.
        times: [T] how many increments the n-gram got that ends here.
        heads: [power of 2] the last place of each bucket of contexts, −1 for none.
        before: [T] the place before this one in its bucket.
    """

    tokens: Ints
    times: Array
    heads: Array
    before: Array

    @classmethod
    def empty(cls) -> "Adapted":
        none = np.zeros(0, np.int32)
        return cls(np.zeros(0, np.int64), none, np.full(256, -1, np.int32), none)

    def plus(self, tokens: Ints, n: int) -> "Adapted":
        """With further tokens behind, and no increments for them yet. The arrays here stay as they are."""
        old, new = len(self.tokens), len(tokens)
        text = np.concatenate((self.tokens, tokens))
        before = np.concatenate((self.before, np.full(new, -1, np.int32)))
        times = np.concatenate((self.times, np.zeros(new, np.int32)))
        if len(text) > len(self.heads):
            heads = np.full(1 << (2 * len(text)).bit_length(), -1, np.int32)
            index(text, heads, before, 0, n)
        else:
            heads = self.heads.copy()
            index(text, heads, before, old, n)
        return Adapted(text, times, heads, before)

    def incremented(self, since: int, n: int) -> "Adapted":
        """With one increment more for each n-gram that lies behind place `since` (Algorithm 2, lines 2-13)."""
        times = self.times.copy()
        times[max(0, since) + n - 1 :] += 1
        return self._replace(times=times)


@compiled
def bucket(text: Ints, at: int, n: int, size: int) -> int:
    """Of the context before place `at`; `size` is a power of 2."""
    mixed = np.uint64(0)
    for i in range(at - n + 1, at):
        mixed = (mixed ^ np.uint64(text[i])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return int(mixed & np.uint64(size - 1))


@compiled
def index(text: Ints, heads: Array, before: Array, start: int, n: int) -> None:
    """Enters the contexts of the places from `start` on."""
    for at in range(max(start, n - 1), len(text)):
        slot = bucket(text, at, n, len(heads))
        before[at] = heads[slot]
        heads[slot] = at


# Looking up.


@compiled
def _added(tokens: Ints, times: Ints, found: int, token: int, more: int) -> int:
    """Adds increments to a token, found before or new; returns how many tokens there are."""
    for i in range(found):
        if tokens[i] == token:
            times[i] += more
            return found
    tokens[found], times[found] = token, more
    return found + 1


@compiled
def _context(out: Ints, text: Ints, node: int, tokens: Ints, parents: Ints) -> bool:
    """Fills in the tokens that end with a node; False where the text is too short. The root stands at the text's end."""
    at = len(text) - 2
    for i in range(len(out) - 1, -1, -1):
        if node >= 0:
            out[i] = tokens[node]
            node = parents[node]
        elif at >= 0:
            out[i] = text[at]
            at -= 1
        else:
            return False
    return True


@compiled
def _earlier(memory: Memory, context: Ints, width: int, tokens: Ints, times: Ints, found: int) -> int:
    """Adds the increments of earlier texts."""
    wanted = np.uint64(0)
    for i in range(len(context)):
        wanted = wanted << np.uint64(width) | np.uint64(context[i])
    place = np.searchsorted(memory.context, wanted)
    if place < len(memory.context) and memory.context[place] == wanted:
        for i in range(memory.start[place], memory.start[place + 1]):
            found = _added(tokens, times, found, memory.token[i], memory.times[i])
    return found


@compiled
def _here(text: Adapted, context: Ints, tokens: Ints, times: Ints, found: int) -> int:
    """Adds the increments of the row's own text."""
    n = len(context) + 1
    at = text.heads[bucket(context, n - 1, n, len(text.heads))]
    while at >= 0:
        same = text.times[at] > 0
        for i in range(n - 1):
            same = same and text.tokens[at - n + 1 + i] == context[i]
        if same:
            found = _added(tokens, times, found, text.tokens[at], text.times[at])
        at = text.before[at]
    return found


@compiled
def successors(
    table: Table,
    memory: Memory,
    text: Adapted,
    frontier: Ints,
    tokens: Ints,
    parents: Ints,
    k: int,
    n: int,
    width: int,
    top: int,
    increment: float,
    cap: float,
) -> tuple[Ints, Floats]:
    """What may follow nodes of one row.

    The weight of an n-gram is its share in the table (0 if it is not there) plus its increments, at most `cap` if it has
    any; q is its weight divided by those of all, what the table has pruned included.

    Args:
        frontier: [F] nodes.
        tokens, parents: [N] of the tree.
        k: likeliest successors wanted.
        n: tokens of an n-gram.
        width: bits of an id.
        top: successors of a context that are read from the table.
        increment, cap: Algorithm 2.

    Returns:
        [F, K] tokens and log q, the likeliest first, of equals the lower id; −∞ behind the last.
    """
    found_tokens, log_q = np.zeros((len(frontier), k), np.int64), np.full((len(frontier), k), -np.inf)
    most = min(top, len(table.share)) + memory.widest + len(text.tokens)
    context, weights = np.empty(n - 1, np.int64), np.empty(most)
    ids, times = np.empty(most, np.int64), np.empty(most, np.int64)
    for row in range(len(frontier)):
        if not _context(context, text.tokens, frontier[row], tokens, parents):
            continue
        stored = stored_at(table, context, width, top, ids, weights)
        pruned = max(0.0, 1 - weights[:stored].sum()) if stored else 0.0
        times[:stored] = 0
        found = _earlier(memory, context, width, ids, times, stored)
        found = _here(text, context, ids, times, found)
        for i in range(found):
            weight = weights[i] if i < stored else 0.0
            weights[i] = min(weight + increment * times[i], cap) if times[i] else weight
        whole = pruned + weights[:found].sum()
        for j in range(min(k, found)):
            best = j
            for i in range(j + 1, found):
                if weights[i] > weights[best] or (weights[i] == weights[best] and ids[i] < ids[best]):
                    best = i
            found_tokens[row, j], log_q[row, j] = ids[best], np.log(weights[best] / whole)
            ids[best], weights[best] = ids[j], weights[j]
    return found_tokens, log_q


TOP = 12
"""Successors of a context (appendix, "Configuration of ADED")."""
SETTINGS = {"n": 3, "top": TOP, "threshold": 1}
"""Of a build: tokens of an n-gram; successors stored of each context, 0 for all; the least count that is stored."""


@final
@dataclass(frozen=True)
class ADED(Stored):
    """An n-gram model of a corpus (eq. 1) that what was written lately makes likelier (Algorithm 2).

    The policy that belongs to it is `mcts`. After a context that neither the corpus nor the text has, it proposes nothing.

    - Every step counts each n-gram of the last `window` tokens, the root among them, once more: its weight, which is its
      share in the corpus or 0, grows by `increment`, to `cap` at most. Neither the paper nor the official code
      renormalises; here q is the weight's part of all weights after that context, those not stored included, so that an
      n-gram that was not adapted keeps its share and none has a q above 1.
    - The paper's "threshold for the elimination of tri-gram probability, at 12" is what the official code does: it reads
      the 12 likeliest successors. Read as a count it is the setting `threshold` of a build.
    - By Figure 2 the n-grams of the prompt go into the matrix first; the official code looks at the last `window` tokens
      only (`prompt=false`).

    Attributes:
        n: tokens of an n-gram, 2 to 4; the datastore's by default, 3 without one.
        top: successors of a context that are read from the datastore.
        adapt: whether what is written changes the weights.
        window: tokens looked at in each step (the official code's 16; in the paper it is a letter, as the next two are).
        increment: added to a weight for each time it is seen (the official code's 0.04).
        cap: the most that a weight grows to (the official code's 3).
        prompt: whether all n-grams of a prompt count once when it is read.
        session: whether what one text added is kept for the next ones; else each begins with the datastore alone.
    """

    n: int | None = None
    top: int = TOP
    adapt: bool = True
    window: int = 16
    increment: float = 0.04
    cap: float = 3.0
    prompt: bool = True
    session: bool = True

    def __post_init__(self) -> None:
        for name, ok, allowed in (
            ("n", self.n in (None, 2, 3, 4), "2, 3, 4 and none"),
            ("top", self.top >= 1, "at least 1"),
            ("window", self.window >= 1, "at least 1"),
            ("increment", 0 < self.increment < math.inf, "a number above 0"),
            ("cap", 0 < self.cap < math.inf, "a number above 0"),
        ):
            if not ok:
                raise UserError(f"aded: {name} is {getattr(self, name)}, allowed is {allowed}")

    def open(self, target: Target) -> "ADEDDrafter":
        if (folder := self.store(target)) is None:
            return ADEDDrafter(self, Grams.none(self.n or 3, target.decoder.vocab))
        drafter = self.searching(folder)
        if width_of(drafter.grams.vocab) < width_of(target.decoder.vocab):  # ids beyond would pass for others
            raise UserError(
                f"aded: '{folder}' has room for ids up to {2 ** width_of(drafter.grams.vocab) - 1}, but target '{target.name}' "
                f"has {target.decoder.vocab} ids, more than its tokenizer; rest can serve it"
            )
        return drafter

    def searching(self, folder: Path) -> "ADEDDrafter":
        """The drafter with what is in a folder, for whose tokenizer it is looked after elsewhere.

        Raises:
            UserError: it holds n-grams of another n, or none.
        """
        grams = Grams.opened(folder)
        if self.n not in (None, grams.n):
            raise UserError(f"aded: n is {self.n}, allowed is {grams.n}: '{folder}' holds {grams.n}-grams")
        return ADEDDrafter(self, grams)

    def example(self, target: Target) -> "ADEDDrafter":
        vocab = target.decoder.vocab
        steps = [np.arange(200) * step % vocab for step in (1, 3, 11)]
        return ADEDDrafter(self, grams_of(steps, Plan(self.n or 3, vocab)))

    @classmethod
    def build(
        cls, documents: Documents, vocab: int, folder: Path, settings: Mapping[str, str], tell: Callable[[str], None]
    ) -> dict[str, Any]:
        values = dict(SETTINGS)
        for name, text in settings.items():
            if name not in SETTINGS:
                raise UnknownName("setting of an aded datastore", name, SETTINGS)
            if not text.isdecimal() or (name == "n" and text not in ("2", "3", "4")):
                allowed = "2, 3 and 4" if name == "n" else "a whole number of at least 0"
                raise UserError(f"aded: {name} is '{text}', allowed is {allowed}")
            values[name] = int(text)
        return build(documents, Plan(values["n"], vocab, values["top"], values["threshold"]), folder, tell)


@dataclass(frozen=True)
class State:
    """What is known of each row.

    Attributes:
        memory: increments of earlier texts of the session; the same for all rows.
        rows: of each row its text with the root behind it, and its own increments.
        shared: tokens of each row's text that the next one begins with, of a truncated state; none of any other.
    """

    memory: Memory
    rows: tuple[Adapted, ...]
    shared: tuple[int, ...] = ()


@final
class ADEDDrafter(Drafter[State]):
    """Looks up what followed the last n − 1 tokens.

    Args:
        knobs: of the method.
        grams: of the corpus; never changed.
    """

    def __init__(self, knobs: ADED, grams: Grams) -> None:
        self.knobs, self.grams = knobs, grams
        self._most = math.ceil(min(knobs.cap / knobs.increment, 2**31 - 1))
        self._width = width_of(grams.vocab)

    @property
    def described(self) -> str:
        return f"{replace(self.knobs, datastore='')}, {len(self.grams)} {self.grams.n}-grams"

    @property
    def remembers(self) -> bool:
        return self.knobs.session

    def start(
        self, prompts: Sequence[Ints], roots: Ints, taps: Taps, state: State | None = None, rows: Ints | None = None
    ) -> State:
        state = state or State(Memory.empty(), ())
        found, begun = list(state.rows) or [Adapted.empty()] * len(prompts), every(rows, len(prompts))
        shared = state.shared or (0,) * len(prompts)
        for r in begun.tolist():
            found[r] = self._read(np.append(prompts[r], roots[r]), shared[r])
        return State(state.memory, tuple(found))

    def _read(self, text: Ints, shared: int) -> Adapted:
        """A prompt and its root; what was read of it before is in the memory."""
        row = Adapted.empty().plus(text, self.grams.n)
        if self.knobs.adapt and self.knobs.prompt:
            row = row.incremented(max(0, shared - self.grams.n + 1), self.grams.n)
        return self._stepped(row)

    def _stepped(self, row: Adapted) -> Adapted:
        """Algorithm 2: the n-grams of the last tokens count once more."""
        if not self.knobs.adapt:
            return row
        return row.incremented(len(row.tokens) - self.knobs.window, self.grams.n)

    def expand(self, state: State, tree: Tree, frontier: Ints, k: int, drawing: Drawing) -> tuple[Candidates, State]:
        tokens, log_q = np.zeros((len(frontier), k), np.int64), np.full((len(frontier), k), -np.inf)
        rows, knobs = tree.row[frontier], self.knobs
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
                self.grams.n,
                self._width,
                knobs.top,
                knobs.increment,
                knobs.cap,
            )
        return Candidates(tokens, log_q), state

    def commit(self, state: State, tree: Tree, verdict: Verdict, taps: Taps) -> State:
        rows = list(state.rows)
        for root in range(tree.roots):  # the root is in the text already; the bonus is the next one
            new = np.append(tree.tokens[verdict.paths[root]], verdict.bonus[root])
            row = int(tree.row[root])
            rows[row] = self._stepped(rows[row].plus(new, self.grams.n))
        return replace(state, rows=tuple(rows))

    def truncate(self, state: State, lengths: Ints, rows: Ints | None = None) -> State:
        cut = every(rows, len(lengths))
        left = put(state.rows, cut, (Adapted.empty(),) * len(lengths))
        if not self.knobs.session:
            return State(state.memory, left)
        shared = put(state.shared or (0,) * len(lengths), cut, lengths.tolist())
        return State(self._remembered(state, cut), left, shared)

    def carry(self, state: State) -> State | None:
        return State(self._remembered(state, np.arange(len(state.rows))), ()) if self.knobs.session else None

    def _remembered(self, state: State, rows: Ints) -> Memory:
        """The increments of earlier texts with those of some rows."""
        return state.memory.plus([state.rows[row] for row in rows], self.grams.n, self._width, self._most)
