"""Prompt lookup: the continuation of the last tokens where they occurred before in the text (Saxena 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from typing_extensions import override

from draftree.drafters.base import Drafter, Method, select_slots
from draftree.drafters.retrieval.text_drafter import (
    NO_TEXT,
    Texts,
    extend_texts,
    pad_candidates,
    truncate_texts,
)
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, Target
from draftree.tree import AcceptResult, Candidates, Floats, Ints, Tree
from draftree.utils.validated_dataclass import knob

PADDING = -1
"""Fills the rows of continuations that are shorter than others."""


@final
@dataclass(frozen=True)
class PLD(Method):
    """Prompt lookup decoding.

    There are two differences from the run of Spec-Bench (earliest match, 10 tokens). If fewer than
    `length` tokens follow a match, they are drafted, whereas Spec-Bench drafts none. If there is no
    match, no token is drafted, whereas Spec-Bench drafts an arbitrary one.

    Attributes:
        ngram: number of tokens of the longest suffix that is searched for; shorter ones, down to
            one token, are tried after it.
        length: number of tokens of a continuation that are drafted.
        match: the occurrences of the longest suffix found that are used: the latest, the earliest
            (as in Spec-Bench), or all, in which case their continuations are merged into a trie.
        confidence: assumed probability that the text continues as it did before. Policies that
            prune by value need such a number, and there is no model that computes it. q is the
            confidence, multiplied by the share of the continuations that continue with the token.
    """

    ngram: int = knob(3, least=1)
    length: int = knob(10, least=1)
    match: Literal["latest", "earliest", "all"] = "latest"
    confidence: float = knob(0.8, above=0, most=1)

    @override
    def open(self, target: Target) -> "PLDDrafter":
        return PLDDrafter(self)

    @override
    def example(self, target: Target) -> "PLDDrafter":
        return PLDDrafter(self)


@final
class PLDDrafter(Drafter[Texts]):
    """Drafts the continuations of earlier occurrences of the last tokens.

    Its state is the committed text of each sequence.
    """

    knobs: PLD
    searches = True

    def __init__(self, knobs: PLD) -> None:
        self.knobs = knobs

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: Texts | None = None,
        rows: Ints | None = None,
    ) -> Texts:
        return tuple(prompts)

    @override
    def expand(
        self, state: Texts, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, Texts]:
        through: dict[int, Ints] = {}
        below = [
            shares(self._through(state, tree, node, through), int(tree.depth[node]))
            for node in frontier.tolist()
        ]
        tokens, share = pad_candidates(below, k)
        with np.errstate(divide="ignore"):  # a share of 0 means no candidate
            return Candidates(tokens, np.log(self.knobs.confidence * share)), state

    def _through(self, state: Texts, tree: Tree, node: int, known: dict[int, Ints]) -> Ints:
        """Return the continuations [places, length] that begin with the path to a node.

        The text is searched once for each root.

        Args:
            state: the texts.
            tree: the tree of the node.
            node: the number of the node.
            known: the continuations of other nodes; those of the node and of its ancestors are
                added.
        """
        if node not in known:
            parent = int(tree.parents[node])
            if parent < 0:
                known[node] = continuations(
                    np.append(state[int(tree.row[node])], tree.tokens[node]), self.knobs
                )
            else:
                above, depth = self._through(state, tree, parent, known), int(tree.depth[parent])
                known[node] = (
                    above[above[:, depth] == tree.tokens[node]]
                    if depth < above.shape[1]
                    else above[:0]
                )
        return known[node]

    @override
    def commit(
        self, state: Texts, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> Texts:
        return extend_texts(state, tree, verdict)

    @override
    def truncate(self, state: Texts, lengths: Ints, rows: Ints | None = None) -> Texts:
        return truncate_texts(state, lengths, rows)

    @override
    def select(self, state: Texts, rows: Ints, cache: SlotCache) -> Texts:
        return select_slots(state, rows, NO_TEXT)


def continuations(text: Ints, knobs: PLD) -> Ints:
    """Return the tokens [places, length] that follow earlier occurrences of the end of `text`.

    The longest suffix of at most `knobs.ngram` tokens that occurs earlier is used. `knobs.match`
    chooses its latest, its earliest or all occurrences. Each of them gives one row, in the order of
    the text. After the end of the text, `PADDING` fills a row. There are no rows if the last token
    is new.
    """
    last = len(text) - 1
    ends = np.flatnonzero(text[:last] == text[last:]) if last > 0 else np.zeros(0, np.int64)
    for n in range(1, min(knobs.ngram, last)):
        longer = ends[ends >= n]
        longer = longer[text[longer - n] == text[last - n]]
        if not longer.size:
            break
        ends = longer
    chosen = {"latest": ends[-1:], "earliest": ends[:1], "all": ends}[knobs.match]
    places = chosen[:, None] + np.arange(
        1, min(knobs.length, len(text)) + 1
    )  # none is longer than the text
    return (
        np.where(places <= last, text[np.minimum(places, last)], PADDING) if chosen.size else places
    )


def shares(found: Ints, depth: int) -> tuple[Ints, Floats]:
    """Return the tokens that come next in continuations at a depth, and their shares.

    The shares are fractions of the continuations that reach this depth. They are in descending
    order; among equals the lower token comes first.

    Args:
        found: [places, length] the continuations.
        depth: number of tokens that all continuations have in common.
    """
    following = found[:, depth] if depth < found.shape[1] else found[:0, 0]
    following = following[following != PADDING]
    if len(following) < 2:  # always so with a single occurrence
        return following, np.ones(len(following))
    tokens, counts = np.unique(following, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return tokens[order], counts[order] / len(following)
