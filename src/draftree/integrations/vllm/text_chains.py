"""Draft chains by suffix matches and a corpus, with one native call for all requests of a step.

This is what the proposer does by default. vLLM waits for the proposer in every step, so that little
is done in Python. See `drafters/retrieval/chain_drafting.py` for how chains are drafted.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftree.costs.step_costs import Costs, CostSource
from draftree.costs.step_timings import DraftStep, StepTimes
from draftree.drafters._fused import INITIAL_HIT_MEAN, LEARNING
from draftree.drafters.retrieval.chain_drafting import (
    FEATURES,
    INITIAL_WEIGHTS,
    ChainDraft,
    ChainPrices,
    IndexedCorpus,
    draft_chains,
    learn_chains,
)
from draftree.drafters.retrieval.suffix_match_drafts import Outputs
from draftree.drafters.suffix import Suffix
from draftree.integrations.vllm.chains import NO_TOKENS, Figures
from draftree.integrations.vllm.requests import RequestStep, Slots
from draftree.policies.yield_ import PRIOR_PASSES, RATE_DECAY
from draftree.tree import Floats, Ints

MATCHES = Suffix(factor=1.0)
"""Options of the suffix matches. One token is drafted for each token of a match, as in
SuffixDecoding; then the chain is matched again.
"""
ALL_TIMED, TIMING_INTERVAL = 64, 4
"""Number of first steps of each batch size that are all timed.

Of later steps, one in `TIMING_INTERVAL` is timed.

Costs change slowly, and learning them takes as long as drafting.
"""
NO_PAIRS = np.zeros((0, 2), np.int64)
NO_DRAFT: ChainDraft = NO_TOKENS, NO_PAIRS, NO_PAIRS, np.zeros((0, 2, FEATURES))
"""The chain of a request for which nothing was drafted yet."""


@dataclass
class DraftedRequest:
    """Store a request between two calls.

    Attributes:
        text: all token ids.
        begun: number of tokens at its first call without the root, after which the output begins.
        recent: how often a candidate was right recently.
        draft: the chain of the last call.
    """

    text: Ints
    begun: int
    recent: float = INITIAL_HIT_MEAN
    draft: ChainDraft = NO_DRAFT


@dataclass(frozen=True)
class PendingStep:
    """Store what is known of a step until the next call shows its time.

    Attributes:
        context: largest number of tokens of a text.
        rows: number of requests.
        drafted: number of drafted tokens.
        relative: expected seconds of the pass, relative to a pass without drafted tokens.
        search: seconds of the drafting.
        timed: whether costs are learnt from the step.
        began: time at which the call began, by `time.perf_counter`.
        ended: time at which the call ended.
    """

    context: int
    rows: int
    drafted: int
    relative: float
    search: float
    timed: bool
    began: float
    ended: float


class TextChains:
    """Draft chains for the requests of vLLM, and learn from the accepted tokens.

    Args:
        corpus: the corpus in which contexts are searched for.
        costs: costs of a step, which are corrected by the time between two calls.
        longest: largest number of tokens in a chain.
        context: largest number of tokens in a text.
        vocab: number of token ids.
    """

    def __init__(
        self, corpus: IndexedCorpus, costs: CostSource, longest: int, context: int, vocab: int
    ) -> None:
        self.corpus = corpus
        self.costs = costs
        self.longest = longest
        self.context = context
        self.vocab = vocab
        self.slots, self.figures = Slots(), Figures()
        self.outputs = Outputs.empty()
        self._requests = list[DraftedRequest]()
        self._weights = INITIAL_WEIGHTS
        self._information = np.tile(LEARNING.prior * np.eye(FEATURES), (len(INITIAL_WEIGHTS), 1, 1))
        self._gained, self._spent = 0.0, 0.0
        self._last: PendingStep | None = None
        self._seconds = dict[int, Floats]()
        self._counts = Counter[int]()

    def step(self, rows: Sequence[RequestStep], steady: bool = True) -> list[list[int]]:
        """Learn from the last step, and return a chain of token ids for each request.

        Args:
            rows: requests that got a token in the last step of vLLM.
            steady: whether no other request took part in this step, so that its time is the cost of
                the verification.
        """
        began = time.perf_counter()
        before = self._requests
        slots = self.slots.match_after_gap(rows, self.slots.match(rows))
        found = [
            None if slot is None else before[slot] if _continues(before[slot], row) else None
            for slot, row in zip(slots, rows, strict=True)
        ]
        self.figures.resumed += sum(
            slot is not None and same is None for slot, same in zip(slots, found, strict=True)
        )
        known = [
            (same, row)
            for same, row in zip(found, rows, strict=True)
            if same is not None and not _missed(same, row)
        ]
        last, self._last = self._last, None
        if known and last is not None:
            self._learn(known)
            timed = steady and last.timed and len(known) == len(rows) == last.rows
            timed = timed and all(row.has_verified(each.draft[0]) for each, row in known)
            self._account(last, known, began, timed)
        self._release([each for each in before if not any(each is same for same in found)])
        self._requests = [self._place(same, row) for same, row in zip(found, rows, strict=True)]
        self.slots.texts = [row.text for row in rows]
        chains = self._draft(began) if rows else []
        self.figures.calls += 1
        self.figures.seconds += time.perf_counter() - began
        return chains

    def _learn(self, known: Sequence[tuple[DraftedRequest, RequestStep]]) -> None:
        """Learn from the tokens that requests got after their chains."""
        drafts = [each.draft for each, _ in known]
        new = [row.text[len(row.text) - row.new :] for _, row in known]
        recent = np.array([each.recent for each, _ in known])
        self._weights, self._information, recent = learn_chains(
            drafts, new, recent, self._weights, self._information, LEARNING
        )
        for (each, row), success in zip(known, recent.tolist(), strict=True):
            each.recent = success
            self.figures.accepted += row.new - 1
        self.figures.steps += len(known)

    def _account(
        self,
        last: PendingStep,
        known: Sequence[tuple[DraftedRequest, RequestStep]],
        began: float,
        timed: bool,
    ) -> None:
        """Update the rate of tokens, and learn costs from the time of the last step of vLLM.

        Args:
            last: the step.
            known: requests that took part in it.
            began: time at which the present call began.
            timed: whether the time between the calls is the cost of the verification.
        """
        gained = sum(row.new for _, row in known)
        self._gained += gained / len(known) - RATE_DECAY * self._gained
        self._spent += last.relative - RATE_DECAY * self._spent
        if timed:
            times = StepTimes(
                last.context,
                last.rows,
                last.rows + last.drafted,
                began - last.ended,
                drafts=(DraftStep(last.rows, last.search),),
                seconds=began - last.began,
                gained=gained,
            )
            self.costs.observe(times)
            self.figures.timed += 1

    def _release(self, gone: Sequence[DraftedRequest]) -> None:
        """Remember the outputs of requests that have ended or were preempted."""
        if gone:
            written = [each.text[each.begun :] for each in gone]
            self.outputs = self.outputs.remember(written, MATCHES.longest, MATCHES.memory)

    def _place(self, same: DraftedRequest | None, row: RequestStep) -> DraftedRequest:
        """Return the request of a row with its new text."""
        if same is None:
            self.figures.requests += 1
            return DraftedRequest(row.text, len(row.text) - 1)
        same.text = row.text
        return same

    def _draft(self, began: float) -> list[list[int]]:
        requests, count = self._requests, len(self._requests)
        texts = [each.text for each in requests]
        context = max(map(len, texts))
        self._counts[count] += 1
        timed = self._counts[count] <= ALL_TIMED or self._counts[count] % TIMING_INTERVAL == 0
        if timed:
            self._seconds[count] = self._price(self.costs.at(context, count), count)
        seconds = self._seconds[count]
        recent = np.array([each.recent for each in requests]) - INITIAL_HIT_MEAN
        longest = np.array([self.context - 1 - len(text) for text in texts]).clip(0, self.longest)
        gain = max((self._gained + PRIOR_PASSES) / (self._spent + PRIOR_PASSES), 1.0)
        prices = ChainPrices(seconds, gain * count / float(seconds[0]), longest)
        start = time.perf_counter()
        drafts = [NO_DRAFT] * count
        if _may_pay(prices):
            drafts = draft_chains(
                texts, recent, self._weights, self.outputs, MATCHES.limits, self.corpus, prices
            )
        search = time.perf_counter() - start
        drafts = [_within(draft, self.vocab) for draft in drafts]
        for each, draft in zip(requests, drafts, strict=True):
            each.draft = draft
        drafted = sum(len(draft[0]) for draft in drafts)
        self.figures.drafted += drafted
        relative = float(seconds[drafted] / seconds[0])
        ended = time.perf_counter()
        self._last = PendingStep(context, count, drafted, relative, search, timed, began, ended)
        return [draft[0].tolist() for draft in drafts]

    def _price(self, costs: Costs, rows: int) -> Floats:
        """Return [1 + M] the seconds of a pass with 0 to M drafted tokens of the batch."""
        return costs.targets(1 + np.arange(1 + rows * self.longest) / rows)


def _may_pay(prices: ChainPrices) -> bool:
    """Return whether drafted tokens would pay if all of them were accepted."""
    price = prices.rate * (prices.seconds[1:] - prices.seconds[0])
    return bool((price < np.arange(1, len(prices.seconds))).any())


def _within(draft: ChainDraft, vocab: int) -> ChainDraft:
    """Cut a chain before the first token that is not in the vocabulary."""
    chain, kinds, tokens, features = draft
    foreign = np.flatnonzero(chain >= vocab)
    return (chain[: foreign[0]], kinds, tokens, features) if len(foreign) else draft


def _missed(request: DraftedRequest, row: RequestStep) -> bool:
    """Return whether a request got tokens between the calls; see `Slots.match_after_gap`."""
    return len(request.text) < len(row.before)


def _continues(request: DraftedRequest, row: RequestStep) -> bool:
    """Return whether a text continues with tokens of the request's chain and one more token.

    After tokens between the calls, nothing is known of the chain, and the request goes on.
    """
    if _missed(request, row):
        return True
    accepted = row.text[len(row.text) - row.new : -1]  # the last one is the target's own
    return bool(np.array_equal(request.draft[0][: len(accepted)], accepted))
