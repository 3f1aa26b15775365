"""Lookahead decoding: n-grams that the target generates by Jacobi iteration (Fu et al. 2024).

A window of guessed tokens is part of every verification pass. The target's choices after them fill
n-grams, diagonal by diagonal. An n-gram is drafted when its first token is generated.

Shapes: R slots, N tokens of an n-gram, W columns of the window, P probes, V vocabulary, F frontier
nodes, K candidates.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.drafters.base import Drafter, Method, select_slots, slots_or_all
from draftree.drafters.retrieval.text_drafter import pad_candidates
from draftree.errors import UserError
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, Probes, Target
from draftree.tree import AcceptResult, Bools, Candidates, Ints, Tree
from draftree.utils.validated_dataclass import knob

Gram = tuple[int, ...]
"""The N − 1 tokens of an n-gram after its first token, or a prefix of them."""
Pool = Mapping[int, tuple[Gram, ...]]
"""Maps the first token of n-grams to their other tokens; the most recent n-gram is last."""
Continuations = tuple[Sequence[int], Sequence[float]]
"""The tokens that may come next, and the share of each, in descending order of share."""
NO_CONTINUATIONS: Continuations = ((), ())
MAX_PROBES = 4096
"""Largest number of tokens of a window; all of them are read in every step."""
Window = tuple[Ints, ...]
"""Levels 0, 1, … of guessed tokens.

Column j of level l is a guess at the token that is l + j places after the root. Level 0 begins with
column 1, because its column 0 is the root. The other levels begin with column 0.
"""


@final
@dataclass(frozen=True)
class Lookahead(Method):
    """Lookahead decoding, the paper's algorithm 2 (lookahead branch, verification branch and n-gram pool in one pass).

    The defaults are those of the run in the ADED paper (appendix F). The authors of Lookahead
    recommend `ngram=5`, `window=7` and `guesses=7` for a target of 7 billion parameters. Two errors
    of the official code are not repeated. It accepts at most N − 2 of the N − 1 tokens of a guess,
    because it counts a full match as one token less. When several tokens are accepted, it adds
    n-grams to the pool that repeat the last of these tokens, instead of the n-grams of the text.

    Attributes:
        ngram: N, the number of tokens of an n-gram; the window has N − 1 levels.
        window: W, the number of columns of the window. Every target pass also reads (N − 1) · W − 1
            probes when the window is full, and somewhat fewer in the N − 2 steps before.
        guesses: G, the number of n-grams with the same first token that the pool keeps; the least
            recently seen one is dropped first.
        seed_prompt: whether the n-grams of the text (prompt and output) are added to the pool, in
            addition to those of the window.
        chain: whether drafts continue after the N − 1 tokens of a guess with the guesses for its
            last token.
    """

    ngram: int = knob(5, least=3)
    window: int = knob(15, least=1)
    guesses: int = knob(15, least=1)
    seed_prompt: bool = True
    chain: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if (probes := (self.ngram - 1) * self.window) > MAX_PROBES:
            raise UserError(
                f"lookahead: (ngram - 1) * window is {probes}, allowed is at most {MAX_PROBES}"
            )

    @override
    def open(self, target: Target) -> "LookaheadDrafter":
        return LookaheadDrafter(self)

    @override
    def example(self, target: Target) -> "LookaheadDrafter":
        return LookaheadDrafter(Lookahead(ngram=4, window=3, guesses=4))


@final
@dataclass(frozen=True)
class LookaheadSequence:
    """The state of one sequence.

    Attributes:
        text: the committed tokens.
        pool: n-grams seen in the window and, with `seed_prompt`, in the text including the root.
        window: the window. After the text has been cut, it has no levels until the text continues.
        tried: [N − 1] the number of positions at which the pool had guesses. Entry i counts guesses
            of which i tokens had come before.
        right: [N − 1] the number of these positions at which the next token was among the guesses.
    """

    text: Ints
    pool: Pool
    window: Window
    tried: tuple[int, ...]
    right: tuple[int, ...]


@final
@dataclass(frozen=True)
class LookaheadState:
    """The states of all sequences, and the slots that are known to be still running."""

    rows: tuple[LookaheadSequence, ...]
    live: Ints


@final
class LookaheadDrafter(Drafter[LookaheadState]):
    """Drafts from a pool of n-grams, and sends the window as probes with each verification.

    q(token | path) is a product of two numbers. The first is the share of the token among those
    n-grams of the root's token that begin with the path. The most recently seen n-gram has weight
    1, the one before 1/2, then 1/3 and so on. The second is the rate at which this text has
    continued with any of them so far, for each depth: (right + 1) / (tried + 2).

    Guesses in the window do not depend on the sampling: each is the most likely token. The output
    does not depend on them.
    """

    knobs: Lookahead
    searches = True
    sends_probes = True

    def __init__(self, knobs: Lookahead) -> None:
        self.knobs = knobs

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: LookaheadState | None = None,
        rows: Ints | None = None,
    ) -> LookaheadState:
        state = state or LookaheadState((self._empty(),) * len(prompts), np.arange(0))
        found, begun = list(state.rows), slots_or_all(rows, len(prompts))
        for r in begun.tolist():
            row, text = found[r], np.append(prompts[r], roots[r])
            read = self._append_committed(row, text[len(row.text) :].tolist(), len(row.text))
            found[r] = replace(read, window=first_window(text, self.knobs))
        return LookaheadState(tuple(found), np.union1d(state.live, begun))

    @override
    def expand(
        self, state: LookaheadState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, LookaheadState]:
        found = self._find_candidates(state, tree, frontier)
        tokens, q = pad_candidates([nexts for nexts, _ in found], k)
        q *= np.array([[rate] for _, rate in found])
        log_q = np.log(q, out=np.full(q.shape, -np.inf), where=q > 0)
        return Candidates(tokens, log_q), replace(state, live=tree.row[: tree.roots])

    def _find_candidates(
        self, state: LookaheadState, tree: Tree, frontier: Ints
    ) -> list[tuple[Continuations, float]]:
        """Return, for each frontier node, its possible next tokens and a success rate.

        Each token has a share of the total weight. The rate estimates how often the text continues
        with one of the tokens.
        """
        parents = tree.parents.tolist()
        tokens = tree.tokens.tolist()
        length = self.knobs.ngram - 1
        found = list[tuple[Continuations, float]]()
        for node, at, depth in zip(
            frontier.tolist(),
            tree.row[frontier].tolist(),
            tree.depth[frontier].tolist(),
            strict=True,
        ):
            row, behind = state.rows[at], depth % length if self.knobs.chain else depth
            if behind >= length:
                found.append((NO_CONTINUATIONS, 0.0))
                continue
            path = [0] * behind
            for i in range(behind - 1, -1, -1):
                path[i], node = tokens[node], parents[node]
            rate = (row.right[behind] + 1) / (row.tried[behind] + 2)
            found.append((find_continuations(row.pool, tokens[node], tuple(path)), rate))
        return found

    @override
    def probes(self, state: LookaheadState) -> Probes | None:
        sent = self._probe_places(state)
        if not sent:
            return None
        rows = np.repeat(list(sent), [len(where[0]) for where in sent.values()])
        windows = [np.concatenate(state.rows[r].window) for r in sent]
        positions = [
            len(state.rows[r].text) + level + column for r, (level, column) in sent.items()
        ]
        visible, at = np.zeros((len(rows), len(rows)), np.bool_), 0
        for level, column in sent.values():
            end = at + len(level)
            visible[at:end, at:end] = window_visibility(level, column)
            at = end
        return Probes(np.concatenate(windows), rows, np.concatenate(positions), visible)

    def _probe_places(self, state: LookaheadState) -> dict[int, tuple[Ints, Ints]]:
        """Return the places of the probes in each sequence's window: level and column of each one.

        The keys are the numbers of the sequences. Places are in the order in which probes are sent.
        """
        windows = {r: state.rows[r].window for r in state.live.tolist()}
        return {r: places(tuple(map(len, window))) for r, window in windows.items() if window}

    @override
    def commit(
        self, state: LookaheadState, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> LookaheadState:
        rows, next_level = list(state.rows), self._next_level(state, hidden_states.probe_logits)
        for root, bonus in enumerate(verdict.bonus.tolist()):
            r = int(tree.row[root])
            new = [*tree.tokens[verdict.committed_nodes(root)].tolist(), bonus]
            graded = self._update_success_counts(rows[r], new)
            moved = self._advance_window(graded, new[0], next_level.get(r))
            rows[r] = self._append_committed(moved, new, len(moved.text) + 1)
        return LookaheadState(tuple(rows), tree.row[: tree.roots])

    def _next_level(self, state: LookaheadState, logits: Tensor | None) -> dict[int, Ints]:
        """Return, by slot, the target's choices after the last level of the window.

        Slots that sent no probes are missing.
        """
        sent = self._probe_places(state)
        end = 0
        last = dict[int, Ints]()
        if logits is None or not sent:
            return {}
        for r, (level, _) in sent.items():
            end += len(level)
            last[r] = np.arange(end - len(state.rows[r].window[-1]), end)
        index = torch.from_numpy(np.concatenate(list(last.values()))).to(logits.device)
        chosen = logits.index_select(0, index).argmax(dim=-1).cpu().numpy()
        cuts = np.cumsum([len(each) for each in last.values()])[:-1]
        return dict(zip(last, np.split(chosen, cuts), strict=True))

    def _advance_window(
        self, row: LookaheadSequence, root: int, new: Ints | None
    ) -> LookaheadSequence:
        """Return a sequence's state after the target's choices for a new level.

        The n-grams that the level completes are added to the pool, and the window moves on by one
        step.
        """
        if new is None:
            return row
        full = len(row.window) == self.knobs.ngram - 1
        met = window_ngrams(row.window, root, new) if full else ()
        return replace(
            row,
            pool=add_to_pool(row.pool, met, self.knobs.guesses),
            window=advance_window(row.window, new, full),
        )

    def _update_success_counts(
        self, row: LookaheadSequence, new: Sequence[int]
    ) -> LookaheadSequence:
        """Return the state with success counts updated by a root and the tokens after it."""
        tried = list(row.tried)
        right = list(row.right)
        start = 0
        for i, token in enumerate(new[1:]):
            if self.knobs.chain and i - start == len(tried):
                start = i
            if i - start == len(tried):
                break
            nexts, _ = find_continuations(row.pool, new[start], tuple(new[start + 1 : i + 1]))
            if not nexts:
                break
            tried[i - start] += 1
            right[i - start] += token in nexts
        return replace(row, tried=tuple(tried), right=tuple(right))

    def _append_committed(
        self, row: LookaheadSequence, new: Sequence[int], known: int
    ) -> LookaheadSequence:
        """Return the state with committed tokens appended; the last of `new` is the root.

        Args:
            row: the state so far.
            new: the tokens after its text.
            known: length of the prefix whose n-grams the pool already contains.
        """
        n, whole = self.knobs.ngram, np.concatenate((row.text, np.array(new, np.int64)))
        met = (
            text_ngrams(whole[max(0, known + 1 - n) :].tolist(), n)
            if self.knobs.seed_prompt
            else ()
        )
        return replace(row, text=whole[:-1], pool=add_to_pool(row.pool, met, self.knobs.guesses))

    def _empty(self) -> LookaheadSequence:
        none = (0,) * (self.knobs.ngram - 1)
        return LookaheadSequence(np.zeros(0, np.int64), {}, (), none, none)

    def truncate(
        self, state: LookaheadState, lengths: Ints, rows: Ints | None = None
    ) -> LookaheadState:
        """Return the state with the texts of some sequences cut.

        Their pools keep only the n-grams of the remaining text. A new window is drawn when the text
        continues.
        """
        found, cut = list(state.rows), slots_or_all(rows, len(lengths))
        for r in cut.tolist():
            text = found[r].text[: lengths[r]]
            met = text_ngrams(text.tolist(), self.knobs.ngram) if self.knobs.seed_prompt else ()
            found[r] = replace(
                self._empty(), text=text, pool=add_to_pool({}, met, self.knobs.guesses)
            )
        return LookaheadState(tuple(found), np.setdiff1d(state.live, cut))

    @override
    def select(self, state: LookaheadState, rows: Ints, cache: SlotCache) -> LookaheadState:
        return LookaheadState(
            select_slots(state.rows, rows, self._empty()), np.flatnonzero(np.isin(rows, state.live))
        )


def first_window(text: Ints, knobs: Lookahead) -> Window:
    """Return level 0 of a new window, with W + N − 3 columns.

    The N − 2 steps that fill the other levels use up N − 2 of these columns. The guesses are tokens
    drawn from the text. The seed depends only on the length of the text, so that the same text
    begins with the same window.
    """
    generator = np.random.Generator(np.random.Philox(key=0, counter=[0, 0, 0, len(text)]))
    return (text[generator.integers(len(text), size=knobs.window + knobs.ngram - 3)],)


@lru_cache(maxsize=64)
def places(widths: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Return level and column of each token of a window, level by level.

    `widths` gives the number of tokens of each level.
    """
    level = np.repeat(np.arange(len(widths)), widths)
    column = np.concatenate([np.arange(n) + (i == 0) for i, n in enumerate(widths)])
    return level, column


def window_visibility(level: Ints, column: Ints) -> Bools:
    """Return whether token i of a window sees token j, as a matrix [P, P].

    A token sees level 0 up to its own column, and its own column up to its own level.
    """
    along = (level[None, :] == 0) & (column[None, :] <= column[:, None])
    up = (column[None, :] == column[:, None]) & (level[None, :] <= level[:, None])
    seen: Bools = along | up
    return seen


def advance_window(window: Window, new: Ints, full: bool) -> Window:
    """Return the window after the next token of the text.

    Every guess keeps its place in the text, and is therefore one token closer to the root. The
    window advances by one token even if several were accepted, as in the official code. A guess
    then refers to a place in the text that is so many tokens further on.

    Args:
        window: the levels that are filled.
        new: the target's choices after the last level.
        full: whether all levels are filled. If so, the lowest level is dropped; otherwise each
            level loses its first column.
    """
    if full:
        lowest, *others = (*window[1:], new)
        return lowest[1:], *others
    if (
        len(window) == 1
    ):  # column 0 of level 0 is the root, which is no probe: `new` begins after column 1
        return window[0][1:], new
    return *(level[1:] for level in window), new[1:]


def window_ngrams(window: Window, root: int, new: Ints) -> list[tuple[int, Gram]]:
    """Return the n-gram of each column of a full window, as its first token and the other tokens.

    The last token of each n-gram is the target's choice in `new`.
    """
    first = [root, *window[0].tolist()]
    return list(
        zip(first, zip(*(level.tolist() for level in (*window[1:], new)), strict=True), strict=True)
    )


def text_ngrams(text: Sequence[int], n: int) -> Iterable[tuple[int, Gram]]:
    """Return the n-grams of a text in order, each as its first token and the other tokens."""
    return ((text[i], tuple(text[i + 1 : i + n])) for i in range(len(text) - n + 1))


def add_to_pool(pool: Pool, met: Iterable[tuple[int, Gram]], cap: int) -> Pool:
    """Return the pool with further n-grams added.

    It keeps the `cap` most recent different n-grams for each first token.
    """
    new = dict(pool)
    for first, rest in met:
        kept = tuple(known for known in new.get(first, ()) if known != rest)
        new[first] = (*kept, rest)[-cap:]
    return new


def find_continuations(pool: Pool, token: int, path: Gram) -> Continuations:
    """Return the tokens that follow a context in the pool's n-grams, with their shares.

    Args:
        pool: the n-grams by their first token.
        token: the first token of the context.
        path: the tokens of the context after the first one.
    """
    known = pool.get(token)
    return NO_CONTINUATIONS if known is None else trie(known).get(path, NO_CONTINUATIONS)


@lru_cache(maxsize=256)
def trie(known: tuple[Gram, ...]) -> Mapping[Gram, Continuations]:
    """Return, for each prefix of some n-grams, the weighted tokens that may follow it.

    Args:
        known: the n-grams that begin with the same token, without that token, oldest first. More
            recent ones have larger weights.
    """
    weights: dict[Gram, dict[int, float]] = {}
    for age, gram in enumerate(reversed(known), start=1):
        for i, token in enumerate(gram):
            nexts = weights.setdefault(gram[:i], {})
            nexts[token] = nexts.get(token, 0.0) + 1 / age
    found = dict[Gram, Continuations]()
    for path, nexts in weights.items():
        order, whole = sorted(nexts, key=lambda token: -nexts[token]), sum(nexts.values())
        found[path] = order, [nexts[token] / whole for token in order]
    return found
