"""Lookahead decoding: n-grams that the target itself makes up beside the text, by Jacobi iteration (Fu et al. 2024).

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

from draftree.drafters.base import Drafter, Method, every, picked
from draftree.drafters.retrieval.text_drafter import ragged
from draftree.errors import UserError
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Probes, Taps, Target
from draftree.tree import Bools, Candidates, Ints, Tree, Verdict
from draftree.utils.validated_dataclass import knob

Gram = tuple[int, ...]
"""The N − 1 tokens of an n-gram after its first one, or a beginning of them."""
Pool = Mapping[int, tuple[Gram, ...]]
"""By the first token of an n-gram, what may follow it; the most recent one is last."""
Nexts = tuple[Sequence[int], Sequence[float]]
"""The tokens that came next at some position, and the share of each; the largest first."""
NOTHING: Nexts = ((), ())
MOST = 4096
"""Tokens of a window, all of which are fed in every step."""
Window = tuple[Ints, ...]
"""Levels 0, 1, … of guessed tokens.

Column j of level l is a guess at the token l + j places after the root. Level 0 begins with column
1, its column 0 being the root; the others begin with column 0.
"""


@final
@dataclass(frozen=True)
class Lookahead(Method):
    """Lookahead decoding, the paper's algorithm 2 (lookahead branch, verification branch and n-gram pool in one pass).

    The defaults are those of the run in the ADED paper (appendix F); the authors of Lookahead
    recommend 5, 7, 7 for a target of 7 billion parameters. Two errors of the official code are not
    repeated: it accepts at most N − 2 of the N − 1 tokens of a guess, because a full match is
    counted one short, and when several tokens were accepted it enters n-grams into the pool that
    end with the last of them again and again, instead of those of the text.

    Attributes:
        ngram: N, tokens of an n-gram; the window has N − 1 levels.
        window: W, columns of the window. (N − 1) · W − 1 probe rows ride along in every pass once
            the window is filled, somewhat fewer in the N − 2 steps before.
        guesses: G, how many n-grams of the same first token the pool keeps; the least recently met
            goes first.
        seed_prompt: whether the n-grams of the text, prompt and output, are put in the pool with
            those of the window.
        chain: whether drafts go on after the N − 1 tokens of a guess with the guesses for its last
            token.
    """

    ngram: int = knob(5, least=3)
    window: int = knob(15, least=1)
    guesses: int = knob(15, least=1)
    seed_prompt: bool = True
    chain: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if (probes := (self.ngram - 1) * self.window) > MOST:
            raise UserError(
                f"lookahead: (ngram - 1) * window is {probes}, allowed is at most {MOST}"
            )

    @override
    def open(self, target: Target) -> "LookaheadDrafter":
        return LookaheadDrafter(self)

    @override
    def example(self, target: Target) -> "LookaheadDrafter":
        return LookaheadDrafter(Lookahead(ngram=4, window=3, guesses=4))


@final
@dataclass(frozen=True)
class Guesses:
    """The state of one sequence.

    Attributes:
        text: the committed tokens.
        pool: n-grams met in the window and, with `seed_prompt`, in the text and its root.
        window: the window; it has no levels after the text was cut, until the text goes on.
        tried: [N − 1] at how many positions the pool had guesses, by the number of their tokens
            that had come before.
        right: [N − 1] at how many of these positions the next token was among the guesses.
    """

    text: Ints
    pool: Pool
    window: Window
    tried: tuple[int, ...]
    right: tuple[int, ...]


@final
@dataclass(frozen=True)
class Lookaheads:
    """The state: all sequences, and which of them are still generated, as far as is known."""

    rows: tuple[Guesses, ...]
    live: Ints


@final
class LookaheadDrafter(Drafter[Lookaheads]):
    """Drafts from its pool of n-grams and has the window verified along with the drafts.

    q(token | path) is a product of two numbers. One is the share of the token among the n-grams of
    the root's token that begin with the path, the most recently met counting 1, the one before 1/2,
    then 1/3 and so on. The other is how often the text went on with any of them in this row so far,
    by depth, (right + 1) / (tried + 2).

    The window holds guesses whatever the sampling: each next one is the likeliest token. The output
    does not depend on it.
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
        taps: Taps,
        state: Lookaheads | None = None,
        rows: Ints | None = None,
    ) -> Lookaheads:
        state = state or Lookaheads((self._empty(),) * len(prompts), np.arange(0))
        found, begun = list(state.rows), every(rows, len(prompts))
        for r in begun.tolist():
            row, text = found[r], np.append(prompts[r], roots[r])
            read = self._read(row, text[len(row.text) :].tolist(), len(row.text))
            found[r] = replace(read, window=first_window(text, self.knobs))
        return Lookaheads(tuple(found), np.union1d(state.live, begun))

    @override
    def expand(
        self, state: Lookaheads, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, Lookaheads]:
        found = self._found(state, tree, frontier)
        tokens, q = ragged([nexts for nexts, _ in found], k)
        q *= np.array([[rate] for _, rate in found])
        log_q = np.log(q, out=np.full(q.shape, -np.inf), where=q > 0)
        return Candidates(tokens, log_q), replace(state, live=tree.row[: tree.roots])

    def _found(self, state: Lookaheads, tree: Tree, frontier: Ints) -> list[tuple[Nexts, float]]:
        """Return the next tokens of each frontier node with their shares.

        The number after them is how often one of such tokens is right.
        """
        parents = tree.parents.tolist()
        tokens = tree.tokens.tolist()
        length = self.knobs.ngram - 1
        found = list[tuple[Nexts, float]]()
        for node, at, depth in zip(
            frontier.tolist(),
            tree.row[frontier].tolist(),
            tree.depth[frontier].tolist(),
            strict=True,
        ):
            row, behind = state.rows[at], depth % length if self.knobs.chain else depth
            if behind >= length:
                found.append((NOTHING, 0.0))
                continue
            path = [0] * behind
            for i in range(behind - 1, -1, -1):
                path[i], node = tokens[node], parents[node]
            rate = (row.right[behind] + 1) / (row.tried[behind] + 2)
            found.append((after(row.pool, tokens[node], tuple(path)), rate))
        return found

    @override
    def probes(self, state: Lookaheads) -> Probes | None:
        sent = self._sent(state)
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
            visible[at:end, at:end] = sees(level, column)
            at = end
        return Probes(np.concatenate(windows), rows, np.concatenate(positions), visible)

    def _sent(self, state: Lookaheads) -> dict[int, tuple[Ints, Ints]]:
        """Return, by slot, the levels and columns of the probes that it sends, in their order."""
        windows = {r: state.rows[r].window for r in state.live.tolist()}
        return {r: places(tuple(map(len, window))) for r, window in windows.items() if window}

    @override
    def commit(self, state: Lookaheads, tree: Tree, verdict: Verdict, taps: Taps) -> Lookaheads:
        rows, next_level = list(state.rows), self._next_level(state, taps.probe_logits)
        for root, bonus in enumerate(verdict.bonus.tolist()):
            r = int(tree.row[root])
            new = [*tree.tokens[verdict.kept(root)].tolist(), bonus]
            graded = self._graded(rows[r], new)
            moved = self._looked_ahead(graded, new[0], next_level.get(r))
            rows[r] = self._read(moved, new, len(moved.text) + 1)
        return Lookaheads(tuple(rows), tree.row[: tree.roots])

    def _next_level(self, state: Lookaheads, logits: Tensor | None) -> dict[int, Ints]:
        """Return, by slot, the target's choices after the last level of its window.

        There is none for a slot that sent no probes.
        """
        sent = self._sent(state)
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

    def _looked_ahead(self, row: Guesses, root: int, new: Ints | None) -> Guesses:
        """Return a sequence's n-gram pool and window after a new level.

        The pool gets the n-grams that the level completes, and the window moves on by one step.
        """
        if new is None:
            return row
        full = len(row.window) == self.knobs.ngram - 1
        met = grams(row.window, root, new) if full else ()
        return replace(
            row,
            pool=filled(row.pool, met, self.knobs.guesses),
            window=advanced(row.window, new, full),
        )

    def _graded(self, row: Guesses, new: Sequence[int]) -> Guesses:
        """Return the guesses' success counts, updated by a root and the tokens after it."""
        tried = list(row.tried)
        right = list(row.right)
        start = 0
        for i, token in enumerate(new[1:]):
            if self.knobs.chain and i - start == len(tried):
                start = i
            if i - start == len(tried):
                break
            nexts, _ = after(row.pool, new[start], tuple(new[start + 1 : i + 1]))
            if not nexts:
                break
            tried[i - start] += 1
            right[i - start] += token in nexts
        return replace(row, tried=tuple(tried), right=tuple(right))

    def _read(self, row: Guesses, new: Sequence[int], known: int) -> Guesses:
        """Return the text with committed tokens appended; the last of `new` is the root.

        Args:
            row: the text so far.
            new: what comes after it.
            known: how many of all these tokens' beginning are in the pool.
        """
        n, whole = self.knobs.ngram, np.concatenate((row.text, np.array(new, np.int64)))
        met = of_text(whole[max(0, known + 1 - n) :].tolist(), n) if self.knobs.seed_prompt else ()
        return replace(row, text=whole[:-1], pool=filled(row.pool, met, self.knobs.guesses))

    def _empty(self) -> Guesses:
        none = (0,) * (self.knobs.ngram - 1)
        return Guesses(np.zeros(0, np.int64), {}, (), none, none)

    def truncate(self, state: Lookaheads, lengths: Ints, rows: Ints | None = None) -> Lookaheads:
        """Return the state with the texts of some sequences cut.

        Their pools keep only the n-grams of their own text. A new window is drawn when the text
        goes on.
        """
        found, cut = list(state.rows), every(rows, len(lengths))
        for r in cut.tolist():
            text = found[r].text[: lengths[r]]
            met = of_text(text.tolist(), self.knobs.ngram) if self.knobs.seed_prompt else ()
            found[r] = replace(self._empty(), text=text, pool=filled({}, met, self.knobs.guesses))
        return Lookaheads(tuple(found), np.setdiff1d(state.live, cut))

    @override
    def select(self, state: Lookaheads, rows: Ints, cache: SlotCache) -> Lookaheads:
        return Lookaheads(
            picked(state.rows, rows, self._empty()), np.flatnonzero(np.isin(rows, state.live))
        )


def first_window(text: Ints, knobs: Lookahead) -> Window:
    """Return level 0 of a window, with W + N − 3 columns.

    The N − 2 steps that fill the other levels use up N − 2 of them.

    Tokens of the text, drawn by its length, so that the same text begins with the same window.
    """
    generator = np.random.Generator(np.random.Philox(key=0, counter=[0, 0, 0, len(text)]))
    return (text[generator.integers(len(text), size=knobs.window + knobs.ngram - 3)],)


@lru_cache(maxsize=64)
def places(widths: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Return level and column of each token of a window, level by level.

    The argument gives the number of tokens of each level.
    """
    level = np.repeat(np.arange(len(widths)), widths)
    column = np.concatenate([np.arange(n) + (i == 0) for i, n in enumerate(widths)])
    return level, column


def sees(level: Ints, column: Ints) -> Bools:
    """Return whether token i of a window sees token j, as [P, P].

    A token sees level 0 up to its own column, and its column up to its own level.
    """
    along = (level[None, :] == 0) & (column[None, :] <= column[:, None])
    up = (column[None, :] == column[:, None]) & (level[None, :] <= level[:, None])
    seen: Bools = along | up
    return seen


def advanced(window: Window, new: Ints, full: bool) -> Window:
    """Return the window after the next token.

    Every guess keeps its place in the text, and so comes one token nearer to the root.

    The window goes on by one token however many were accepted, as in the official code: what the
    target found after a root is then a guess at the text that is as many tokens further on.

    Args:
        window: all its levels, or those filled so far.
        new: the target's choices after the last of them.
        full: whether the last level is the last there is. Then the lowest level goes, else each
            loses its first column.
    """
    if full:
        lowest, *others = (*window[1:], new)
        return lowest[1:], *others
    if (
        len(window) == 1
    ):  # column 0 of level 0 is the root, which is no probe: `new` begins after column 1
        return window[0][1:], new
    return *(level[1:] for level in window), new[1:]


def grams(window: Window, root: int, new: Ints) -> list[tuple[int, Gram]]:
    """Return the n-gram of each column of a full window, as its first token and the others.

    The target's choices are the last tokens of the n-grams.
    """
    first = [root, *window[0].tolist()]
    return list(
        zip(first, zip(*(level.tolist() for level in (*window[1:], new)), strict=True), strict=True)
    )


def of_text(text: Sequence[int], n: int) -> Iterable[tuple[int, Gram]]:
    """Return the n-grams of a text in their order: first token, the others."""
    return ((text[i], tuple(text[i + 1 : i + n])) for i in range(len(text) - n + 1))


def filled(pool: Pool, met: Iterable[tuple[int, Gram]], cap: int) -> Pool:
    """Return the pool after it has met further n-grams.

    It keeps the last `cap` different n-grams for each first token.
    """
    new = dict(pool)
    for first, rest in met:
        kept = tuple(known for known in new.get(first, ()) if known != rest)
        new[first] = (*kept, rest)[-cap:]
    return new


def after(pool: Pool, token: int, path: Gram) -> Nexts:
    """Return the tokens that follow `token` and `path` in a pool's n-grams, with their shares."""
    known = pool.get(token)
    return NOTHING if known is None else trie(known).get(path, NOTHING)


@lru_cache(maxsize=256)
def trie(known: tuple[Gram, ...]) -> Mapping[Gram, Nexts]:
    """Return the tokens that follow each beginning of a first token's n-grams.

    A more recent n-gram has a larger weight.
    """
    weights: dict[Gram, dict[int, float]] = {}
    for age, gram in enumerate(reversed(known), start=1):
        for i, token in enumerate(gram):
            nexts = weights.setdefault(gram[:i], {})
            nexts[token] = nexts.get(token, 0.0) + 1 / age
    found = dict[Gram, Nexts]()
    for path, nexts in weights.items():
        order, whole = sorted(nexts, key=lambda token: -nexts[token]), sum(nexts.values())
        found[path] = order, [nexts[token] / whole for token in order]
    return found
