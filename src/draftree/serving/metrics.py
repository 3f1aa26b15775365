"""Prometheus metrics of the server, and figures of one request; named as in vLLM where possible."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftree.metrics import Step

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class RequestFigures:
    """Store the figures of one text, or of all texts of a request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    steps: list[Step] = field(default_factory=list)

    def as_json(self, detailed: bool = False) -> dict[str, Any]:
        """Return the field `speculative_decoding` of an answer, with the names of vLLM.

        `acceptance_histogram[j]` is the number of steps that accepted j drafted tokens;
        `num_spec_tokens` is the depth of the deepest tree. If `detailed` is true, the figures of
        each step are added.
        """
        accepted = [step.accepted for step in self.steps]
        drafted = sum(step.nodes for step in self.steps)
        histogram = [accepted.count(j) for j in range(max(accepted, default=-1) + 1)]
        found: dict[str, Any] = {
            "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else 1.0,
            "draft_acceptance_rate": sum(accepted) / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": len(self.steps),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": drafted,
            "num_spec_tokens": max((step.depth for step in self.steps), default=0),
        }
        if detailed:
            found["per_step_accepted"] = accepted
            found["per_step_drafted"] = [step.nodes for step in self.steps]
        return found


class Metrics:
    """Store the Prometheus metrics of a server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.drafts = Counter(
            "spec_decode_num_drafts", "Verified trees that had drafted tokens", registry=registry
        )
        self.drafted = Counter(
            "spec_decode_num_draft_tokens",
            "Drafted tokens that were verified",
            registry=registry,
        )
        self.accepted = Counter(
            "spec_decode_num_accepted_tokens",
            "Drafted tokens that were accepted",
            registry=registry,
        )
        self.by_position = Counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their depth in the tree, from 0",
            ["position"],
            registry=registry,
        )
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts", registry=registry)
        self.prefix_queries = Counter(
            "prefix_cache_queries", "Tokens of prompts looked for in the cache", registry=registry
        )
        self.prefix_hits = Counter(
            "prefix_cache_hits", "Tokens of prompts found there", registry=registry
        )
        self.new_tokens = Counter("generation_tokens", "Tokens written", registry=registry)
        self.finished = Counter(
            "request_success", "Texts that ended", ["finished_reason"], registry=registry
        )
        self.refused = Counter(
            "request_refused", "Requests refused because too many wait", registry=registry
        )
        self.first = Histogram(
            "time_to_first_token_seconds",
            "From a request to its first token",
            buckets=SECONDS,
            registry=registry,
        )
        self.between = Histogram(
            "inter_token_latency_seconds",
            "From one token to the next",
            buckets=SECONDS,
            registry=registry,
        )
        self.running = Gauge(
            "num_requests_running", "Texts that are being written", registry=registry
        )
        self.waiting = Gauge(
            "num_requests_waiting", "Texts that wait for a place", registry=registry
        )
        self.cache = Gauge(
            "kv_cache_usage_perc", "Share of the cache's tokens in use, 1 is all", registry=registry
        )

    def count_prompt(self, figures: RequestFigures) -> None:
        """Add the prompt of one text to the counters."""
        self.prompt_tokens.inc(figures.prompt_tokens)
        self.prefix_queries.inc(figures.prompt_tokens)
        self.prefix_hits.inc(figures.cached_tokens)

    def count_step(self, step: Step) -> None:
        """Add one verification of one text to the counters."""
        if step.nodes:
            self.drafts.inc()
        self.drafted.inc(step.nodes)
        self.accepted.inc(step.accepted)
        for position in range(step.accepted):
            self.by_position.labels(str(position)).inc()

    def count_tokens(self, seconds: float, tokens: int, first: bool) -> None:
        """Add new tokens of a text to the counters, and record their latency.

        For the first tokens of a text, `seconds` is the time since the request arrived; for later
        tokens, the time since the previous ones.
        """
        self.new_tokens.inc(tokens)
        if first:
            self.first.observe(seconds)
            return
        for _ in range(tokens):
            self.between.observe(seconds / tokens)

    def page(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


def merge_figures(parts: Sequence[RequestFigures]) -> RequestFigures:
    """Return the joint figures of several texts of one request; the prompt counts once."""
    return RequestFigures(
        max((part.prompt_tokens for part in parts), default=0),
        max((part.cached_tokens for part in parts), default=0),
        sum(part.new_tokens for part in parts),
        [step for part in parts for step in part.steps],
    )
