"""Compare one run with speculation to one without, on one prompt."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from draftree.batch import Generation
from draftree.costs.step_costs import Costs
from draftree.engine import Engine, common_prefix_length
from draftree.evaluation.grid import PromptResult
from draftree.metrics import Stats
from draftree.request import Emitted, Request
from draftree.sampling.distributions import apply_processors
from draftree.target.target import HiddenStateSpec, Target

WARM_PROMPT, WARM_TOKENS = 64, 16
"""Number of prompt tokens that the warm-up reads, and number of tokens that it generates."""

FREE_DRAFTING = Costs({1: 1e-3}, {1: 1.0})
"""Costs with which a policy asks every drafter for as many candidates as it has: a draft step takes
1 ms, and a target pass 1 s."""


def shorten_request(request: Request) -> Request:
    """Return a short version of a request for the warm-up; it ignores end tokens."""
    tokens = min(WARM_TOKENS, request.max_new_tokens)
    return replace(
        request, prompt=request.prompt[-WARM_PROMPT:], max_new_tokens=tokens, eos=frozenset()
    )


@dataclass(frozen=True)
class Difference:
    """Describe the first token at which two greedy outputs differ.

    `token` is the index of the first token that differs, and `margin` is the difference of plain
    decoding's two largest logits there. In half precision, a pass over many tokens rounds
    differently from a pass over one token. If the margin is larger than this rounding noise, the
    difference is a bug.
    """

    token: int
    margin: float


@dataclass(frozen=True)
class Comparison:
    """Store a generated text and, if requested, its comparison with plain decoding.

    Attributes:
        tokens: token ids of the text.
        stats: figures of the runs with drafts.
        plain: figures of the runs with plain decoding; None without a comparison.
        same_output: whether all runs, with drafts and without, returned the same tokens.
        difference: the first token at which the runs differ; None if they do not.
        same_bits: whether every token had the same log-probability as in plain decoding, to the
            last bit; None if that is not guaranteed.
    """

    tokens: list[int]
    stats: Stats
    plain: Stats | None = None
    same_output: bool = True
    difference: Difference | None = None
    same_bits: bool | None = None

    @property
    def speedup(self) -> float | None:
        """Return the tokens per second with drafts, divided by those of plain decoding."""
        if self.plain is None or not self.plain.tokens_per_second:
            return None
        return self.stats.tokens_per_second / self.plain.tokens_per_second

    def as_json(self) -> dict[str, Any]:
        """Return the figures as a dictionary with the names that the command line prints."""
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


def warm_up(engine: Engine, request: Request, baseline: bool) -> None:
    """Run short versions of a request before it is timed, with drafts and on request without.

    What drafter, policy and caches remember of them is dropped. Otherwise the timed run could draft
    from the text of the warm-up.
    """
    if engine.policy.reads_costs:  # with cheap drafts, every size that may be used runs once
        replace(engine, costs=FREE_DRAFTING, learned={}).write(
            [shorten_request(request)], reuse=False
        )
    replace(engine, learned={}).write([shorten_request(request)], reuse=False)
    if baseline:
        engine.plain([shorten_request(request)])


def compare(engine: Engine, request: Request, first: Generation) -> Comparison:
    """Compare a finished run with plain decoding.

    After the finished run, plain decoding runs twice and the engine once more. Seconds are means of
    the two runs. With this order, a machine that slowly becomes faster or slower favours neither
    method.
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
        else first_difference(engine.target, request, other, base.tokens)
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
    """Return whether each token has the same log-probability as in plain decoding, bit by bit.

    The text is generated twice more for this check.
    """
    ours = list[Emitted]()
    plain = list[Emitted]()
    told = replace(request, logprobs=0)
    replace(engine, carried=None, learned={}).write([told], on_tokens=ours.extend, reuse=False)
    engine.plain([told], on_tokens=plain.extend)
    return [each for part in ours for each in part.logprobs] == [
        each for part in plain for each in part.logprobs
    ]


def first_difference(
    target: Target, request: Request, ours: Sequence[int], plain: Sequence[int]
) -> Difference:
    """Return the first token at which a greedy output differs from plain decoding's.

    The result includes the margin of the two largest logits there.
    """
    at = common_prefix_length(ours, plain)
    text = np.array([*request.prompt, *plain[:at]], np.int64)
    logits = target.prefill(target.new_cache(1, len(text)), [text], HiddenStateSpec()).logits[0]
    best = (
        apply_processors(logits, request.processors, [*request.before, *text.tolist()])
        .topk(2)
        .values
    )
    return Difference(at, float(best[0] - best[1]))
