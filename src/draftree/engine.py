"""A target, a drafter, a policy and an acceptor, put together and ready to write."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from draftree.acceptors.base import Acceptor, check_exact
from draftree.acceptors.greedy import Greedy
from draftree.acceptors.match import Match
from draftree.cache import SlotCache
from draftree.costs import Costs, CostTable
from draftree.drafters.base import Drafter, Method
from draftree.loop import plain, speculate
from draftree.policies.base import Policy
from draftree.registry import build
from draftree.sampling import Sampling
from draftree.stats import Stats
from draftree.target import Target
from draftree.text import Emitted, Request, Texts, check
from draftree.timing import measured
from draftree.tree import Ints

UNIT = Costs({1: 1.0}, {1: 1.0})
"""For policies that do not ask what anything costs."""


@dataclass(frozen=True)
class Generation:
    """What was written for each request, and the figures of all of them together."""

    tokens: list[list[int]]
    stats: Stats


@dataclass(frozen=True)
class Held:
    """What a finished call leaves for the next one: each row's text in the caches, and the caches."""

    texts: list[Ints]
    cache: SlotCache
    drafter_state: Any


@dataclass
class Engine:
    """Writes with one target, one drafter and one policy.

    Attributes:
        target: the model whose output is wanted.
        drafter: proposes tokens.
        policy: grows them into trees.
        acceptor: keeps what the target would have produced; by default `greedy` at temperature 0, else `match`.
        costs: seconds on this machine; measured on first use where the policy asks.
        held: what the last call left in the caches, for the next one with the same beginning.
        carried: what the drafter keeps from text to text.
        learned: what policies that learn have learnt, by policy, drafter, how tokens are chosen, and acceptor.
    """

    target: Target
    drafter: Drafter[Any]
    policy: Policy
    acceptor: Acceptor | None = None
    costs: Costs | CostTable | None = None
    held: Held | None = field(default=None, init=False, repr=False)
    carried: Any = field(default=None, init=False, repr=False)
    learned: dict[tuple[Policy, str, Sampling, Acceptor], Any] = field(default_factory=dict, init=False, repr=False)
    _measured: CostTable | None = field(default=None, init=False, repr=False)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return self.target.tokenizer

    @property
    def eos(self) -> frozenset[int]:
        """The ids that end a text, by the target's generation config."""
        return self.target.eos

    def write(
        self,
        requests: Sequence[Request],
        sampling: Sampling = Sampling(),
        on_tokens: Callable[[list[Emitted]], None] | None = None,
        reuse: bool = True,
    ) -> Generation:
        """Writes what the target would write, in fewer passes.

        Args:
            requests: one for each row.
            sampling: how tokens are chosen.
            on_tokens: told the new tokens of every step; its own time is not counted.
            reuse: whether a prefix shared with the last call's texts is taken from the caches. What a drafter carries from
                text to text it keeps in any case.

        Raises:
            UserError: a request cannot be served, or the pairing of policy and acceptor is not exact.
        """
        texts, steps = self.begin(requests, sampling, reuse)
        run(steps, texts, on_tokens)
        return Generation(texts.written, texts.stats)

    def begin(
        self, requests: Sequence[Request], sampling: Sampling = Sampling(), reuse: bool = True
    ) -> tuple[Texts, Iterator[list[Emitted]]]:
        """The texts to be written, and the steps that write them; `write` in slow motion.

        Raises:
            UserError: a request cannot be served, or the pairing of policy and acceptor is not exact.
        """
        check(requests, self.target)
        acceptor = self.acceptor or usual(sampling)
        check_exact(self.policy, acceptor, sampling)
        costs = self.prices(len(requests))
        texts = self._texts(requests, sampling, reuse)
        self.held = None
        texts.stats.acceptor = type(acceptor).__name__.lower()
        texts.stats.draw = texts.drawing(acceptor.draw).kind.value
        return texts, self._steps(texts, acceptor, costs)

    def _steps(self, texts: Texts, acceptor: Acceptor, costs: Costs | CostTable) -> Iterator[list[Emitted]]:
        lesson = self.policy, self.drafter.described, texts.sampling.knobs, acceptor
        texts.memory = self.learned.get(lesson)
        yield from speculate(self.target, self.drafter, self.policy, acceptor, costs, texts)
        self.learned[lesson] = texts.memory
        self.held = Held(texts.committed, texts.cache, texts.drafter_state)
        self.carried = self.drafter.carry(texts.drafter_state)

    def plain(
        self,
        requests: Sequence[Request],
        sampling: Sampling = Sampling(),
        on_tokens: Callable[[list[Emitted]], None] | None = None,
    ) -> Generation:
        """Writes one token a pass: the baseline, and what `generate` must equal."""
        check(requests, self.target)
        texts = Texts(requests, sampling, self._cache(requests))
        run(plain(self.target, usual(sampling), texts), texts, on_tokens)
        return Generation(texts.written, texts.stats)

    def prices(self, rows: int = 1) -> Costs | CostTable:
        """The costs that the policy reads for so many rows; measured where they are not known, but only if it asks."""
        if self.costs is not None or not self.policy.reads_costs:
            return self.costs or UNIT
        if self._measured is None or not self._measured.has(rows):
            self._measured = measured(self.target, self.drafter, rows)
        return self._measured

    def _cache(self, requests: Sequence[Request]) -> SlotCache:
        longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
        return self.target.new_cache(len(requests), min(longest, self.target.decoder.context) + 64)

    def _texts(self, requests: Sequence[Request], sampling: Sampling, reuse: bool) -> Texts:
        held = self.held
        if not reuse or held is None or len(held.texts) != len(requests) or not self.target.reuses_prefixes:
            return Texts(requests, sampling, self._cache(requests), self.carried)
        shared = np.array([common(t, r.prompt) for t, r in zip(held.texts, requests, strict=True)], np.int64)
        held.cache.truncate(shared)
        return Texts(requests, sampling, held.cache, self.drafter.truncate(held.drafter_state, shared))


def usual(sampling: Sampling) -> Acceptor:
    """The acceptor where none is named, and that of plain decoding."""
    return Greedy() if sampling.greedy else Match()


def common(text: Ints, prompt: Sequence[int]) -> int:
    """How many first tokens two texts share, one less than the prompt's at most: its last token must be read again."""
    n = min(len(text), len(prompt) - 1)
    differ = np.flatnonzero(text[:n] != np.array(prompt[:n], np.int64))
    return int(differ[0]) if differ.size else n


def run(steps: Iterator[list[Emitted]], texts: Texts, on_tokens: Callable[[list[Emitted]], None] | None = None) -> None:
    """Drives a loop to its end and times it; the listener's time is not the loop's."""
    while True:
        start = time.perf_counter()
        events = next(steps, None)
        texts.stats.seconds += time.perf_counter() - start
        if events is None:
            return
        if on_tokens is not None:
            on_tokens(events)


def load(
    target: str | Target = "demo",
    drafter: str | Method = "edd",
    policy: str | Policy = "pct",
    acceptor: str | Acceptor | None = None,
    costs: Costs | CostTable | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> Engine:
    """Puts together what specs name.

    Args:
        target: `demo`, a Hugging Face folder, a hub id, or a loaded target.
        drafter: a spec, a checkpoint folder, or a method's knobs.
        policy: a spec or a policy.
        acceptor: a spec or an acceptor; chosen by the temperature where it is not given.
        costs: a cost model to use instead of measuring.
        dtype: of the target's weights.
        device: to compute on.

    Raises:
        UserError: something does not exist or does not fit.
    """
    method = build("drafter", drafter) if isinstance(drafter, str) else drafter
    grown = build("policy", policy) if isinstance(policy, str) else policy
    rule = build("acceptor", acceptor) if isinstance(acceptor, str) else acceptor
    model = Target.load(target, dtype, device) if isinstance(target, str) else target
    return Engine(model, method.open(model), grown, rule, costs)
