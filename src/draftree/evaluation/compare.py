"""Compare one run with speculation to one without, on one prompt."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from draftree.batch import Generation
from draftree.costs.curves import Costs
from draftree.engine import Engine, common
from draftree.evaluation.grid import PromptResult
from draftree.metrics import Stats
from draftree.request import Emitted, Request
from draftree.sampling.distributions import processed
from draftree.target.target import Needs, Target

WARM_PROMPT, WARM_TOKENS = 64, 16
"""Tokens of the warm-up: prompt tokens that are read, and tokens generated after them."""

CHEAP = Costs({1: 1e-3}, {1: 1.0})
"""Costs at which every drafter is asked for as many candidates as it has."""


def short(request: Request) -> Request:
    """Return a request to warm up with; it does not end early."""
    tokens = min(WARM_TOKENS, request.max_new_tokens)
    return replace(
        request, prompt=request.prompt[-WARM_PROMPT:], max_new_tokens=tokens, eos=frozenset()
    )


@dataclass(frozen=True)
class Difference:
    """Describe the first token at which two greedy outputs differ.

    The margin is the difference of plain decoding's two best logits at that token. In half
    precision a pass over many tokens rounds differently from a pass over one. A margin above that
    noise is a bug.
    """

    token: int
    margin: float


@dataclass(frozen=True)
class Comparison:
    """Store a generated text and, where requested, its comparison with plain decoding.

    Attributes:
        tokens: tokens of the text.
        stats: figures of its runs.
        plain: figures of plain decoding's runs.
        same_output: whether all runs returned the same tokens.
        difference: the first token at which they differ.
        same_bits: whether every token had the same log-probability, to the last bit, in both; None
            where that is not guaranteed.
    """

    tokens: list[int]
    stats: Stats
    plain: Stats | None = None
    same_output: bool = True
    difference: Difference | None = None
    same_bits: bool | None = None

    @property
    def speedup(self) -> float | None:
        """Return the ratio of tokens per second."""
        if self.plain is None or not self.plain.tokens_per_second:
            return None
        return self.stats.tokens_per_second / self.plain.tokens_per_second

    def as_json(self) -> dict[str, Any]:
        """Return the figures by the names of the command line."""
        if self.plain is None:
            return {"stats": self.stats.as_json()}
        seconds, speed = self.plain.seconds, self.plain.tokens_per_second
        baseline: dict[str, Any] = {
            "seconds": seconds,
            "tokens_per_second": speed,
            "same_output": self.same_output,
        }
        if self.difference is not None:
            baseline["difference"] = asdict(self.difference)
        if self.same_bits is not None:
            baseline["same_bits"] = self.same_bits
        return {"stats": self.stats.as_json(), "baseline": baseline, "speedup": self.speedup}


def warm(engine: Engine, request: Request, baseline: bool) -> None:
    """Warm up what is timed afterwards.

    What drafter, policy and caches keep of the warm-up is dropped, so that the timed run does not
    find its own text.
    """
    if engine.policy.reads_costs:  # with cheap drafts, every size that may be used runs once
        replace(engine, costs=CHEAP, learned={}).write([short(request)], reuse=False)
    replace(engine, learned={}).write([short(request)], reuse=False)
    if baseline:
        engine.plain([short(request)])


def compare(engine: Engine, request: Request, first: Generation) -> Comparison:
    """Compare a finished run with plain decoding.

    After it run plain decoding twice and the engine once more; seconds are means of the two runs.
    With this order, a machine that slowly becomes faster or slower favours neither.
    """
    plain = [engine.plain([request]) for _ in range(2)]
    again = replace(
        engine, carried=None, learned={}
    )  # it shall not find the first one's text, nor what was learnt from it
    runs = [first, again.write([request], reuse=False)]
    written, base = (PromptResult(g[0].tokens[0], [x.stats for x in g]) for g in (runs, plain))
    other = next((g.tokens[0] for g in (*runs, *plain) if g.tokens != plain[0].tokens), None)
    parted = (
        None
        if other is None or not request.sampling.greedy
        else difference(engine.target, request, other, base.tokens)
    )
    promised = engine.target.loading.exactness == "bits" and engine.keeps_text(request.sampling)
    return Comparison(
        written.tokens,
        written.stats,
        base.stats,
        other is None,
        parted,
        bits(engine, request) if promised else None,
    )


def bits(engine: Engine, request: Request) -> bool:
    """Return whether each token has the log-probability of plain decoding, to the last bit.

    The text is written twice more for that.
    """
    ours = list[Emitted]()
    plain = list[Emitted]()
    told = replace(request, logprobs=0)
    replace(engine, carried=None, learned={}).write([told], on_tokens=ours.extend, reuse=False)
    engine.plain([told], on_tokens=plain.extend)
    return [each for part in ours for each in part.logprobs] == [
        each for part in plain for each in part.logprobs
    ]


def difference(
    target: Target, request: Request, ours: Sequence[int], plain: Sequence[int]
) -> Difference:
    """Return the first token at which another greedy output differs, and its margin of logits.

    It is compared with plain decoding's.
    """
    at = common(ours, plain)
    text = np.array([*request.prompt, *plain[:at]], np.int64)
    logits = target.prefill(target.new_cache(1, len(text)), [text], Needs()).logits[0]
    best = processed(logits, request.processors, [*request.before, *text.tolist()]).topk(2).values
    return Difference(at, float(best[0] - best[1]))
