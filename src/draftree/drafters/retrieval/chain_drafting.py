"""Draft chains from suffix matches and a corpus, for engines that verify one chain per request.

After each token of a chain there are up to two candidates. One is the most likely continuation of
the best matches in the text and in earlier outputs (`suffix_match_drafts.py`). The other is the
most frequent successor in a corpus of the last few tokens (`suffix_array.py`). Acceptance is
estimated by a logistic regression for each kind of candidate, and the better candidate continues
the chain.
The lengths of all chains of a batch are chosen together by the cost of their verification.

One call drafts for a whole batch. The time of a call matters, because the engine waits for it in
every step.

Shapes: R requests, T tokens of a text, D tokens of a chain before it is cut, C drafted tokens, X
features, M drafted tokens of the batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.drafters.retrieval.suffix_array import SEPARATOR, Corpus, search
from draftree.drafters.retrieval.suffix_match_drafts import (
    Draft,
    Limits,
    Outputs,
    draft,
    match_in_memory,
    match_in_text,
)
from draftree.kernels.hit_acceptance import LearningRates
from draftree.kernels.logistic_regression import newton
from draftree.kernels.scalar_log_exp import exp, log
from draftree.native import Array, native_as
from draftree.tree import Floats, Ints

SUFFIX, CORPUS, BOTH = 0, 1, 2
"""Kinds of candidates: found by a suffix match, in the corpus, or by both."""
NO_CANDIDATE = -1
FEATURES = 7
"""Number of features of a candidate.

They are 1; the log-odds of its share; a figure about the other kind; the recent success of the
request; the log length of the match in the text; the log depth in the chain; and the log length of
the match in earlier outputs or in the corpus.
"""
INITIAL_WEIGHTS = np.array(
    [
        [-0.5, 0.3, 0.0, 0.5, 0.7, 0.0, 0.0],
        [-0.5, 0.5, -1.5, 0.2, -0.3, 0.0, 0.2],
        [0.0, 0.35, 0.35, 0.6, 0.5, 0.2, 0.0],
    ]
)
"""Weights of the regressions of each kind before anything is learnt."""
MIN_SHARE_MARGIN = 1e-3
"""Shares are clipped to this distance from 0 and 1."""
NEUTRAL_MATCH = 1.0
"""Log of the length of a match, plus one token, for which the feature is 0."""
SAMPLE = 32
"""Largest number of occurrences of a context whose successors are counted.

They are evenly spread over all occurrences.
"""
PRIOR_HITS, PRIOR_COUNT = 0.3, 1.0
"""Successes and trials that are added to the counts of a context, so that few counts mean less."""
LONGEST_CONTEXT, SHORTEST_CONTEXT = 4, 1
"""Number of tokens of the contexts that are searched for in a corpus."""
MIN_VALUE = 0.02
"""A chain ends after a token that is accepted with a smaller probability."""
LOST = -2
"""Stands for a place outside of a draft."""


class IndexedCorpus(NamedTuple):
    """A corpus, and the contexts that are searched for.

    Attributes:
        tokens: the tokens of the corpus.
        suffixes: the suffix array of the corpus.
        longest: largest number of tokens of a context; 0 to draft by suffix matches alone.
        shortest: smallest number of tokens of a context.
    """

    tokens: Array
    suffixes: Array
    longest: int
    shortest: int

    @classmethod
    def of(cls, corpus: Corpus) -> "IndexedCorpus":
        """Return a corpus with the usual contexts."""
        return cls(corpus.tokens, corpus.suffixes, LONGEST_CONTEXT, SHORTEST_CONTEXT)

    @classmethod
    def none(cls) -> "IndexedCorpus":
        """Return an empty corpus, with which suffix matches alone are drafted."""
        empty = np.zeros(0, np.uint32)
        return cls(empty, empty, 0, 1)


class ChainPrices(NamedTuple):
    """The cost of verification and the bounds of the chains.

    Attributes:
        seconds: [1 + M] seconds of a pass that verifies 0 to M drafted tokens of the batch.
        rate: the value of a second, in tokens.
        longest: [R] largest number of tokens of each chain.
    """

    seconds: Floats
    rate: float
    longest: Ints


ChainDraft = tuple[Ints, Ints, Ints, Floats]
"""A chain and its candidates.

They are [C] the drafted tokens; [D, 2] the kinds of the candidates after each token, with
`NO_CANDIDATE` for none; [D, 2] their tokens; and [D, 2, X] their features.
"""


def odds(share: float) -> float:
    """Return the log-odds of a share, which is clipped to `MIN_SHARE_MARGIN` from 0 and 1."""
    p = min(max(share, MIN_SHARE_MARGIN), 1 - MIN_SHARE_MARGIN)
    return log(p) - log(1 - p)


def first_child(drafted: Draft, node: int) -> int:
    """Return the first child of a node in a draft; −1 if there is none."""
    parents = drafted[0][:, 1]
    for i in range(node + 1, len(parents)):
        if parents[i] == node:
            return i
    return -1


def find_successor(text: Ints, corpus: IndexedCorpus) -> tuple[int, float, int]:
    """Return the most frequent token after the end of a text in a corpus.

    The longest context that occurs is used. Where the corpus does not have even the shortest one,
    the token is −1.

    Args:
        text: the tokens.
        corpus: the corpus.

    Returns:
        The token, its share of the successors, and the number of tokens of the context.
    """
    tokens, suffixes, longest, shortest = corpus
    longest = min(longest, len(text))
    length, low, high = search(tokens, suffixes, text[len(text) - longest :], longest, shortest)
    read = min(high - low, SAMPLE)
    best = before = -1
    most = run = 0  # equal tokens stand side by side
    for i in range(read):
        place = int(suffixes[low + i * (high - low) // read]) + length
        if not 0 <= place < len(tokens):  # in a broken file
            continue
        token = int(tokens[place])
        run = run + 1 if token == before else 1
        before = token
        if token != SEPARATOR and run > most:
            best, most = token, run
    if best < 0:
        return -1, 0.0, 0
    whole = high - low
    return best, (whole * (most / read) + PRIOR_HITS) / (whole + PRIOR_COUNT), length


def grow_chain(
    text: Ints,
    longest: int,
    recent: float,
    weights: Floats,
    memory: Outputs,
    limits: Limits,
    corpus: IndexedCorpus,
) -> tuple[list[int], list[float], ChainDraft]:
    """Grow a chain after a text; return its tokens, their probabilities and their candidates.

    The probability of a token is that of accepting it and all tokens before it. The chain ends
    after a token whose probability is below `MIN_VALUE`. The arguments are those of `draft_chains`.
    """
    path, values = list[int](), list[float]()
    kinds, tokens = list[list[int]](), list[list[int]]()
    features = list[list[list[float]]]()
    drafted: Draft = (np.zeros((0, 2), np.int32), np.zeros(0))
    at, matched, value = LOST, [0, 0], 1.0
    while len(path) < longest and value >= MIN_VALUE:
        whole = np.append(text, np.array(path, np.int64))
        found = -1 if at == LOST else first_child(drafted, at)
        if found < 0:
            short = whole.astype(np.int32)
            drafted = draft(short, len(short), memory, limits)
            lengths = [
                match_in_text(short, len(short), limits)[1],
                match_in_memory(memory, short, len(short), limits)[1],
            ]
            matched = [int(each[0]) if len(each) else 0 for each in lengths]
            found = first_child(drafted, -1)
        token, share = (
            (int(drafted[0][found, 0]), float(drafted[1][found])) if found >= 0 else (-1, 0.0)
        )
        other, their_share, context = find_successor(whole, corpus)
        here, earlier = (log(float(n + 1)) - NEUTRAL_MATCH for n in matched)
        depth = log(float(len(path) + 1))
        kind, its, x = [NO_CANDIDATE] * 2, [0, 0], [[0.0] * FEATURES, [0.0] * FEATURES]
        worth = [0.0, 0.0]
        if both := 0 <= token == other:
            kind[0], its[0] = BOTH, token
            x[0] = [1.0, odds(share), odds(their_share), recent, here, depth, earlier]
        elif token >= 0:
            kind[0], its[0] = SUFFIX, token
            about = their_share - 0.5 if other >= 0 else 0.0
            x[0] = [1.0, odds(share), about, recent, here, depth, earlier]
        if other >= 0 and not both:
            kind[1], its[1] = CORPUS, other
            beside, length = 1.0 if token >= 0 else 0.0, log(float(context))
            x[1] = [1.0, odds(their_share), beside, recent, beside * here, depth, length]
        for i in range(2):
            if kind[i] != NO_CANDIDATE:
                logit = 0.0
                for a in range(FEATURES):
                    logit += x[i][a] * weights[kind[i], a]
                worth[i] = 1 / (1 + exp(-logit))
        kinds.append(kind)
        tokens.append(its)
        features.append(x)
        best = int(kind[1] != NO_CANDIDATE and (kind[0] == NO_CANDIDATE or worth[1] > worth[0]))
        if kind[best] == NO_CANDIDATE:
            break
        value *= worth[best]
        path.append(its[best])
        values.append(value)
        at = found if its[best] == token else LOST
    candidates = (
        np.array(path, np.int64),
        np.array(kinds, np.int64).reshape(-1, 2),
        np.array(tokens, np.int64).reshape(-1, 2),
        np.array(features).reshape(-1, 2, FEATURES),
    )
    return path, values, candidates


@native_as("draft_chains")
def draft_chains(
    texts: Sequence[Ints],
    recent: Floats,
    weights: Floats,
    memory: Outputs,
    limits: Limits,
    corpus: IndexedCorpus,
    prices: ChainPrices,
) -> list[ChainDraft]:
    """Draft a chain for each request of a batch.

    The lengths maximise the sum of the probabilities that the drafted tokens are accepted, minus
    the value of the time that their verification takes.

    Args:
        texts: [R] the committed tokens of each request [T], including the one that the next pass
            reads.
        recent: [R] how often a candidate of each request was right recently, minus the mean.
        weights: [3, X] weights of the regressions; see `learn_chains`.
        memory: outputs of earlier requests.
        limits: bounds of suffix matches.
        corpus: the corpus.
        prices: the cost of verification and the bounds of the chains.
    """
    grown = [
        grow_chain(text, int(longest), float(success), weights, memory, limits, corpus)
        for text, longest, success in zip(texts, prices.longest, recent, strict=True)
    ]
    nodes = [
        (value, row, i + 1)
        for row, (_, values, _) in enumerate(grown)
        for i, value in enumerate(values)
    ]
    nodes.sort(key=lambda node: -node[0])  # stable: among equals the earlier request comes first
    gained, best, kept = 0.0, -prices.rate * prices.seconds[0], 0
    for i, (value, _, _) in enumerate(nodes[: len(prices.seconds) - 1]):
        gained += value
        worth = gained - prices.rate * prices.seconds[i + 1]
        if worth > best:
            best, kept = worth, i + 1
    lengths = [0] * len(grown)
    for _, row, length in nodes[:kept]:
        lengths[row] = max(lengths[row], length)
    return [
        (path[:length], kinds, tokens, x)
        for (_, _, (path, kinds, tokens, x)), length in zip(grown, lengths, strict=True)
    ]


@native_as("learn_chains")
def learn_chains(
    drafts: Sequence[ChainDraft],
    continuations: Sequence[Ints],
    recent: Floats,
    weights: Floats,
    information: Floats,
    rates: LearningRates,
) -> tuple[Floats, Floats, Floats]:
    """Learn the acceptance of candidates from the tokens that the target has chosen.

    Each token of the target decides about the candidates at its place, whether they were drafted or
    not. Nothing is learnt from candidates after a token that was not accepted.

    Args:
        drafts: [R] the chains of a step.
        continuations: [R] the tokens that each request got in this step.
        recent: [R] how often a candidate of each request was right recently.
        weights: [3, X] weights of the regressions of suffix matches, of those in the corpus, and
            of candidates that both have found.
        information: [3, X, X] their information matrices.
        rates: constants.

    Returns:
        The weights, the information matrices, and the recent success after the step.
    """
    examples: list[list[Floats]] = [[], [], []]
    right: list[list[bool]] = [[], [], []]
    success = recent.copy()
    for row, ((chain, kinds, tokens, x), text) in enumerate(
        zip(drafts, continuations, strict=True)
    ):
        for depth in range(min(len(kinds), len(text))):
            found = [i for i in range(2) if kinds[depth, i] != NO_CANDIDATE]
            hits = [bool(tokens[depth, i] == text[depth]) for i in found]
            for i, hit in zip(found, hits, strict=True):
                examples[kinds[depth, i]].append(x[depth, i])
                right[kinds[depth, i]].append(hit)
            if found:
                success[row] += rates.recent * (any(hits) - success[row])
            if depth >= len(chain) or chain[depth] != text[depth]:
                break
    weights, information = weights.copy(), information.copy()
    for kind in range(3):
        if right[kind]:
            weights[kind], information[kind] = newton(
                weights[kind],
                information[kind],
                rates.prior,
                np.array(examples[kind]),
                np.array(right[kind]),
                rates.forgetting,
                rates.least,
            )
    return weights, information, success
