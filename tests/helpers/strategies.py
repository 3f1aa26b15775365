"""Hypothesis strategies for what may meet in a batch: requests, drafters, policies, acceptors, joins and cancellations."""

from dataclasses import dataclass
from functools import cache

from hypothesis import strategies as st

from architectures import target
from draftree.errors import UserError
from draftree.registry import build, check_exact, names, part
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.testing.conformance import REFERENCE_TOKENS, SCRIPTED, Ruled, Suite
from draftree.testing.fakes import tiny_target
from policy_specs import VARIATIONS

MODELS = ("tiny", "llama", "mistral-sliding", "gemma2", "qwen3")
"""Targets: a context of few tokens, and architectures with sliding windows, soft caps and tied
embeddings."""
DRAFTERS = (*SCRIPTED, *names("drafter"))
ACCEPTORS = names("acceptor")


@cache
def suite(model: str) -> Suite:
    """Return the conformance suite of a target, which knows what plain decoding writes."""
    return Suite(tiny_target() if model == "tiny" else target(model))


@cache
def exact_pairs() -> tuple[tuple[str, str], ...]:
    """Return the specs of policies with the acceptors under which their trees may be verified."""
    found = []
    for spec in (*(n for n in names("policy")), *VARIATIONS):
        policy = build("policy", spec)
        for name in ACCEPTORS:
            try:
                check_exact(policy, part("acceptor", name)())
            except UserError:
                continue
            found.append((spec, name))
    return tuple(found)


@dataclass(frozen=True)
class Batch:
    """A batch with the parts that write it.

    Attributes:
        model: name of the target.
        drafter: name of the drafter, whose candidates are coached.
        policy: spec of the policy.
        acceptor: name of the acceptor.
        slots: sequences at a time.
        requests: in the order in which they come.
        events: for each tick how many requests join and which slot is cancelled, if any; the last
            one is repeated.
        seed: of the costs, which are other ones at every step.
    """

    model: str
    drafter: str
    policy: str
    acceptor: str
    slots: int
    requests: tuple[Request, ...]
    events: tuple[tuple[int, int | None], ...]
    seed: int


@dataclass(frozen=True)
class Served:
    """Requests that are submitted to an engine, with its parts and limits.

    Attributes:
        model: name of the target.
        drafter: name of the drafter, whose candidates are coached.
        policy: spec of the policy.
        requests: in the order in which they are submitted; greedy and sampled ones are mixed.
        events: for each step how many requests are submitted before it, and which one is cancelled
            after it, if any.
        sequences: that run at a time.
        cache: tokens of the cache beyond those of the largest request, so that some are preempted.
        tokens: of a prompt that are read in a step.
        seed: of the costs, which are other ones at every step.
    """

    model: str
    drafter: str
    policy: str
    requests: tuple[Request, ...]
    events: tuple[tuple[int, int | None], ...]
    sequences: int
    cache: int
    tokens: int
    seed: int


def samplings() -> st.SearchStrategy[Sampling]:
    """Return a strategy for sampling parameters with a temperature above 0."""
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5, 3.0]),
        top_k=st.sampled_from([0, 0, 1, 3, 20]),
        top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.0, 0.1]),
        seed=st.integers(0, 2**64 - 1),
    )


@st.composite
def prompts(draw: st.DrawFn, vocabulary: int, longest: int) -> list[int]:
    """Draw a prompt: any ids, a repeated pattern, or both."""
    ids = st.integers(0, vocabulary - 1)
    pattern = draw(st.lists(ids, min_size=1, max_size=6))
    return (pattern * draw(st.integers(1, 4)) + draw(st.lists(ids, max_size=4)))[:longest]


@st.composite
def requests(draw: st.DrawFn, model: str, acceptor: str) -> Request:
    """Draw a request that an acceptor serves."""
    decoder, rule = suite(model).target.decoder, part("acceptor", acceptor)
    kinds = [st.just(Sampling())] * rule.greedy + [samplings()] * rule.sampling
    processors, forced = (), None
    if draw(st.integers(0, 4)) == 0:
        ruled = Ruled(decoder.vocab)
        processors, forced = (ruled,), draw(st.sampled_from([None, ruled.forced_token]))
    return Request(
        draw(prompts(decoder.vocab, min(decoder.context, 40))),
        max_new_tokens=draw(st.integers(1, REFERENCE_TOKENS)),
        eos=draw(st.frozensets(st.integers(0, decoder.vocab + 2), max_size=3)),
        number=draw(st.integers(0, 3)),
        processors=processors,
        guides=draw(st.sampled_from([(), processors])),
        stateless=processors,
        forced=forced,
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        sampling=draw(st.one_of(kinds)),
    )


@st.composite
def batches(draw: st.DrawFn, models: tuple[str, ...] = MODELS) -> Batch:
    """Draw a batch with joins and cancellations."""
    model = draw(st.sampled_from(models))
    policy, acceptor = draw(st.sampled_from(exact_pairs()))
    slots = draw(st.integers(1, 4))
    event = st.tuples(st.integers(0, 3), st.one_of(st.none(), st.none(), st.integers(0, slots - 1)))
    return Batch(
        model,
        draw(st.sampled_from(DRAFTERS)),
        policy,
        acceptor,
        slots,
        tuple(draw(st.lists(requests(model, acceptor), min_size=1, max_size=6))),
        tuple(draw(st.lists(event, min_size=1, max_size=12))),
        draw(st.integers(0, 2**32 - 1)),
    )


@st.composite
def served(draw: st.DrawFn, models: tuple[str, ...] = MODELS) -> Served:
    """Draw requests that are submitted, cancelled and preempted."""
    model = draw(st.sampled_from(models))
    policies = [policy for policy, acceptor in exact_pairs() if acceptor == "match"]
    asked = draw(st.lists(requests(model, "match"), min_size=1, max_size=6))
    event = st.tuples(
        st.integers(0, 3),
        st.one_of(st.none(), st.none(), st.none(), st.integers(0, len(asked) - 1)),
    )
    return Served(
        model,
        draw(st.sampled_from(DRAFTERS)),
        draw(st.sampled_from(policies)),
        tuple(asked),
        tuple(draw(st.lists(event, min_size=1, max_size=10))),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 40)),
        draw(st.integers(1, 40)),
        draw(st.integers(0, 2**32 - 1)),
    )
