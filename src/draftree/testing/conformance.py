"""The conformance suite: check every drafter with every policy and acceptor.

Each method's drafter is its `example`, which has random weights and is almost never right. A
script therefore puts the right token among its candidates (`fakes.Coached`), so that drafts are
accepted. A `Case` is one check with one drafter, policy and acceptor; `Suite.run` raises
AssertionError if it fails. `Coverage` counts what occurred, for example accepted drafts, because a
suite that never accepts a draft proves nothing.

Shapes: R rows, V vocabulary.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, cast, final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from typing_extensions import override

from draftree.acceptors.base import Acceptor
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import CONSTANTS, Costs
from draftree.costs.step_timings import StepTimes
from draftree.drafters.base import Drafter, Trainable
from draftree.engine import Engine, PrefixCache
from draftree.loop import Components, State, admit, decode, decode_plain, release, step
from draftree.policies.base import Policy, append
from draftree.registry import KINDS, is_exact, part, parts
from draftree.request import Request, override_sampling
from draftree.sampling.distributions import Distributions, apply_processors
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.keyed_noise import Keyed, RandomSource
from draftree.sampling.params import Sampling
from draftree.scheduling.handle import Handle
from draftree.target.target import HiddenStateSpec, Target
from draftree.testing.fakes import Always, Coached, Never, Scripted, Sometimes, tiny_target
from draftree.testing.pauses import Pausing
from draftree.tree import AcceptResult, Candidates, Draw, Ints, Tree, TreeBudget

NOISE = 1e-6
"""Largest difference that counts as numerical noise between passes over different numbers of
tokens.

It is not smaller because models in float64 still compute norms and softmax in float32.
"""
SCRIPTED: dict[str, type[Scripted]] = {"always": Always, "never": Never, "sometimes": Sometimes}
COSTS = Costs({1: 0.1}, {1: 1.0})


@final
class RandomCosts:
    """Return different random costs at every step, because no text may depend on costs."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def at(self, context: int, rows: int) -> Costs:
        """Return random costs whose curves rise and fall over five orders of magnitude."""
        draft, target = (
            dict(zip((1, 4, 16, 64), 10 ** self._rng.uniform(-5, 0, 4), strict=True))
            for _ in range(2)
        )
        seconds = self._rng.uniform(0, 0.1, len(CONSTANTS)).tolist()
        constants = dict(zip(CONSTANTS, seconds, strict=True))
        return Costs(draft, target, **constants)

    def expected(self, context: int, rows: int) -> Costs:
        """Return random costs."""
        return self.at(context, rows)

    def needs_plain_step(self) -> bool:
        """Return at random whether the next step runs without drafts."""
        return self._rng.random() < 0.125

    def observe(self, step: StepTimes) -> None:
        """Ignore the times of a step."""


REFERENCE_TOKENS = 14
"""Number of tokens that the reference generates after every prompt. Requests have smaller
limits."""


@dataclass(frozen=True)
class Case:
    """Describe one case: the names of a check, a drafter, a policy and an acceptor."""

    check: str
    drafter: str
    policy: str
    acceptor: str

    def __str__(self) -> str:
        """Return the name of the case."""
        return f"{self.check}-{self.drafter}-{self.policy}-{self.acceptor}"


@dataclass
class Coverage:
    """Count the situations that occurred while the cases ran.

    Attributes:
        cases: number of passed cases by check.
        parts: names of the drafters, policies and acceptors that ran.
        refused: pairings of policy and acceptor that were refused because they are not exact.
        accepted: number of steps by number of accepted drafted nodes.
        siblings: number of accepted nodes by their index among their siblings.
        inside: number of texts that ended in the middle of an accepted path.
        preempted: number of preemptions of sequences.
        shared: number of requests that took a part of their prompt from the prefix cache.
        beside: number of passes over nodes that also read chunks of prompts.
        ties: names of the cases whose text differs from plain decoding at two logits that are
            closer than the numerical noise.
    """

    cases: Counter[str] = field(default_factory=Counter)
    parts: dict[str, set[str]] = field(
        default_factory=lambda: {"drafter": set(), "policy": set(), "acceptor": set()}
    )
    refused: set[str] = field(default_factory=set)
    accepted: Counter[int] = field(default_factory=Counter)
    siblings: Counter[int] = field(default_factory=Counter)
    inside: int = 0
    preempted: int = 0
    shared: int = 0
    beside: int = 0
    ties: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the counts as lines of text."""

        def counts(of: Counter[Any]) -> str:
            return ", ".join(f"{k}: {n}" for k, n in sorted(of.items())) or "none"

        lines = [f"{kind:10}{', '.join(sorted(ran))}" for kind, ran in self.parts.items()]
        return "\n".join(
            [
                *lines,
                f"cases     {self.cases.total()} passed ({counts(self.cases)})",
                f"refused   {', '.join(sorted(self.refused)) or 'none'}",
                f"accepted  drafted nodes in a step: {counts(self.accepted)}",
                f"siblings  accepted nodes by their place: {counts(self.siblings)}",
                f"inside    texts that ended in the middle of an accepted path: {self.inside}",
                f"preempted sequences that made room for others: {self.preempted}",
                f"shared    requests whose prompt was read in part with another's: {self.shared}",
                f"beside    passes over nodes that also read chunks of prompts: {self.beside}",
                f"ties      {', '.join(self.ties) or 'none'}",
            ]
        )


class Watched(Acceptor):
    """Wrap an acceptor to check every draft tree, and to count the accepted nodes."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True

    def __init__(self, rule: Acceptor, room: Callable[[], TreeBudget], coverage: Coverage) -> None:
        self._rule = rule
        self._room = room
        self._coverage = coverage

    @property
    @override
    def keeps_text(self) -> bool:  # type: ignore[override]
        return self._rule.keeps_text

    @property
    @override
    def draw(self) -> Draw:
        return self._rule.draw

    @override
    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        room = self._room()
        assert (tree.parents < np.arange(len(tree))).all(), "a node comes before its parent"
        if tree.drafted:  # the tree of the prefill is bare, and comes before there is any room
            assert (tree.depth <= room.depth[tree.row]).all(), "a node lies deeper than the room"
            assert np.bincount(tree.row).max() - 1 <= room.nodes, (
                "a row has more nodes than the room"
            )
        verdict = self._rule.accept(tree, p, chance)
        for root, path in enumerate(verdict.paths):
            self._coverage.accepted[len(path)] += 1
            for parent, node in itertools.pairwise([root, *path.tolist()]):
                siblings = tree.children(parent).tolist()
                assert node in siblings, "an accepted node is no child of the one before"
                self._coverage.siblings[siblings.index(node)] += 1
        return verdict


class Suite:
    """Run cases on one tiny target.

    Args:
        target: target to use. By default it has float64 weights, so that numerical noise is far
            smaller than the differences between its logits.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = tiny_target() if target is None else target
        self.coverage = Coverage()
        self._references: dict[tuple[Any, ...], list[int]] = {}
        self._examples: dict[str, Drafter[Any]] = {}

    def run(self, case: Case) -> None:
        """Run a case, and raise AssertionError if a check fails."""
        policy: Policy = part("policy", case.policy)()
        acceptor: Acceptor = part("acceptor", case.acceptor)()
        if not is_exact(policy, acceptor):
            self.coverage.refused.add(f"{case.policy} with {case.acceptor}")
            return
        CHECKS[case.check](self, case, policy, acceptor)
        self.coverage.cases[case.check] += 1
        for kind, ran in self.coverage.parts.items():
            ran.add(getattr(case, kind))

    def prompt(self, length: int) -> list[int]:
        """Return a prompt that repeats itself after five tokens, for retrieval drafters."""
        return [(7 + 11 * (i % 5)) % self.target.decoder.vocab for i in range(length)]

    def drafter(
        self,
        name: str,
        requests: Sequence[Request],
        sampling: Sampling | None = None,
        coach: type[Scripted] = Sometimes,
    ) -> Drafter[Any]:
        """Return a drafter that knows plain decoding's texts for the given requests.

        `name` is a key of `SCRIPTED`, or the name of a method. A method's example drafter gets the
        right tokens from the script `coach`; see `Coached`.
        """
        plans = [[*r.prompt, *self.reference(r, sampling or r.sampling)] for r in requests]
        if name in SCRIPTED:
            return SCRIPTED[name](plans, self.target.decoder.vocab)
        if name not in self._examples:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                made = part("drafter", name)().example(self.target)
            if isinstance(made, Trainable) and self.target.decoder.native_kinds:
                made.use_kernels(self.target)
            self._examples[name] = made
        return Coached(self._examples[name], coach(plans, self.target.decoder.vocab))

    def reference(self, request: Request, sampling: Sampling) -> list[int]:
        """Return the tokens that plain decoding generates for a request alone.

        End tokens and stopping criteria do not end them: there are `REFERENCE_TOKENS` tokens, or as
        many as the target's context has room for.
        """
        key = (tuple(request.prompt), request.number, request.processors, sampling)
        if key not in self._references:
            unending = replace(
                request, max_new_tokens=REFERENCE_TOKENS, eos=frozenset(), criteria=()
            )
            alone = SequenceBatch(self.target.new_cache(1, 8))
            rule: Acceptor = part("acceptor", "greedy" if sampling.greedy else "match")()
            endless = override_sampling([unending], sampling)
            for _ in decode_plain(self.target, rule, alone, endless):
                pass
            self._references[key] = alone.written[0]
        return self._references[key]

    def baseline(self, acceptor: str) -> None:
        """Check that plain decoding of three sequences in a batch equals that of each one alone."""
        rule, sampling = part("acceptor", acceptor)(), sampling_for(acceptor)
        requests = [Request(self.prompt(n), m, number=n) for n, m in ((1, 6), (11, 3), (5, 9))]
        requests[2] = replace(
            requests[2], eos=frozenset({self.reference(requests[2], sampling)[4]})
        )
        rows = SequenceBatch(self.target.new_cache(3, 8))
        for _ in decode_plain(self.target, rule, rows, override_sampling(requests, sampling)):
            pass
        for request, got in zip(requests, rows.written, strict=True):
            self.judge(rule, request, sampling, got, f"plain decoding with {acceptor}")
        self.coverage.cases["plain"] += 1

    def expected_tokens(self, request: Request, sampling: Sampling) -> list[int]:
        """Return the tokens that plain decoding generates for a request.

        They end after `max_new_tokens` tokens, or after the first token that is an end token or
        fulfils a stopping criterion. This token is included.
        """
        tokens = self.reference(request, sampling)[: request.max_new_tokens]
        return tokens[: min(_ends(request, tokens), default=len(tokens)) + 1]

    def write(
        self,
        case: Case,
        policy: Policy,
        acceptor: Acceptor,
        requests: Sequence[Request],
        each_step: Callable[[SequenceBatch, Drafter[Any], State], None] | None = None,
        coach: type[Scripted] = Sometimes,
    ) -> None:
        """Generate the texts of requests with drafts, and compare them with the reference.

        Args:
            case: case that names the drafter.
            policy: policy that grows the trees.
            acceptor: acceptor to use.
            requests: requests whose texts are generated.
            each_step: function that is called after the prefill and after every step.
            coach: script for a method's example drafter.
        """
        sampling = sampling_for(case.acceptor)
        drafter = self.drafter(case.drafter, requests, sampling, coach)
        rows = SequenceBatch(self.target.new_cache(len(requests), 8))
        parts = Components(
            self.target,
            drafter,
            policy,
            Watched(acceptor, lambda: rows.room(self.target), self.coverage),
            COSTS,
        )
        streamed: list[list[int]] = [[] for _ in requests]
        for events, state in decode(parts, rows, override_sampling(requests, sampling)):
            for event in events:
                assert len(event.origins) == len(event.tokens) > 0
                streamed[event.row] += event.tokens
            if each_step is not None:
                each_step(rows, drafter, state)
        assert streamed == rows.written
        assert rows.stats.new_tokens == sum(map(len, streamed))

        for request, got, committed in zip(requests, rows.written, rows.committed, strict=True):
            self.judge(acceptor, request, sampling, got, str(case))
            self.coverage.inside += (
                len(committed) > len(request.prompt) + len(got) - 1
            )  # more accepted than written

    def judge(
        self, acceptor: Acceptor, request: Request, sampling: Sampling, got: list[int], where: str
    ) -> None:
        """Check a text against the guarantee of its acceptor.

        If the acceptor guarantees the text, it must equal the reference; see `reference`. Otherwise
        the text must end at the right position, and contain no token that a processor forbids.
        """
        if acceptor.keeps_text:
            return self.same(request, sampling, got, where)
        limit = min(request.max_new_tokens, self.target.decoder.context - len(request.prompt) + 1)
        assert (ends := _ends(request, got)) == [len(got) - 1] or (
            not ends and len(got) == limit
        ), f"{where}: {got}"
        for i, token in enumerate(got):
            text = [*request.before, *request.prompt, *got[:i]]
            scores = apply_processors(
                torch.zeros(self.target.decoder.vocab), request.processors, text
            )
            assert scores[token] > -torch.inf, (
                f"{where}: {got} has a token at {i} that the processors forbid"
            )

    def same(self, request: Request, sampling: Sampling, got: list[int], where: str) -> None:
        """Check that the tokens equal the reference, token by token.

        A difference is allowed if plain decoding prefers its token by less than the numerical
        noise.
        """
        want = self.expected_tokens(request, sampling)
        if got == want:
            return
        at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        assert at is not None, (
            f"{where}: {len(got)} tokens {got}, plain decoding writes {len(want)}: {want}"
        )
        margin = preference(self.target, request, sampling, want[: at + 1], got[at])
        assert margin < NOISE, (
            f"{where}: {got} differs from plain {want} at token {at}, preferred by {margin:.2e}"
        )
        self.coverage.ties.append(where)


def preference(
    target: Target, request: Request, sampling: Sampling, text: Sequence[int], other: int
) -> float:
    """Return the absolute difference of two scores: of the last token of a text and of another one.

    The scores have the scale of logits. If tokens are drawn, a score is T · (l + g) with the
    temperature T, the processed logit l and the request's Gumbel noise g. A token that the
    processors forbid has the score −∞.
    """
    before = [*request.prompt, *text[:-1]]
    cache = target.new_cache(1, len(before))
    logits = target.prefill(cache, [np.array(before)], HiddenStateSpec()).logits
    shown, steps = [*request.before, *before], (*request.processors, *sampling.processors)
    p = Distributions(logits, lambda _: steps, lambda _: shown, lambda _: sampling.greedy)
    scores = p.processed_logits(0).cpu().double().numpy()
    if not sampling.greedy:
        keyed = Keyed(sampling.seed, np.array([request.number]), np.array([len(before) - 1]))
        scores = sampling.temperature * (scores + keyed.gumbel(0, 0, len(scores)))
    return abs(float(scores[text[-1]] - scores[other]))


def _ends(request: Request, response: Sequence[int]) -> list[int]:
    """Return the positions at which an end token or a stopping criterion ends a response."""
    texts = [
        torch.tensor([[*request.before, *request.prompt, *response[: i + 1]]])
        for i in range(len(response))
    ]
    return [
        i
        for i, t in enumerate(response)
        if t in request.eos or any(c(texts[i], None) for c in request.criteria)
    ]


def sampling_for(acceptor: str) -> Sampling:
    """Return the sampling settings with which an acceptor is tested.

    The temperature is 1.5, so that many tokens are possible. It is 0 for an acceptor that does not
    support sampling.
    """
    rule: type[Acceptor] = part("acceptor", acceptor)
    return Sampling(temperature=1.5, top_p=0.95, seed=11) if rule.sampling else Sampling()


def _one(suite: Suite, case: Case, policy: Policy, acceptor: Acceptor) -> None:
    """Check the text of a single sequence."""
    suite.write(case, policy, acceptor, [Request(suite.prompt(7), 9)])


def _check_ragged(suite: Suite, case: Case, policy: Policy, acceptor: Acceptor) -> None:
    """Check three sequences of different lengths that end at different steps.

    One of the prompts has a single token.
    """
    asked = ((1, 6), (11, 3), (6, 9))
    requests = [Request(suite.prompt(n), m, number=i) for i, (n, m) in enumerate(asked)]
    suite.write(case, policy, acceptor, requests, coach=Always)


def _limit(suite: Suite, case: Case, policy: Policy, acceptor: Acceptor) -> None:
    """Check that each text has exactly `max_new_tokens` tokens."""
    for limits in ((1,), (2, 1, 5)):
        suite.write(
            case, policy, acceptor, [Request(suite.prompt(4 + n), n, number=n) for n in limits]
        )


def _eos(suite: Suite, case: Case, policy: Policy, acceptor: Acceptor) -> None:
    """Check that each text ends with its first end token.

    The end token comes first, after the first step, or in the middle of an accepted path.
    """
    sampling, requests = sampling_for(case.acceptor), []
    for number, at in enumerate((0, 2, 4)):
        request = Request(suite.prompt(5 + number), 9, number=number)
        token = suite.reference(request, sampling)[at]
        requests.append(
            replace(request, eos=frozenset({token, suite.target.decoder.vocab + number}))
        )
    suite.write(case, policy, acceptor, requests, coach=Always)


def _context(suite: Suite, case: Case, policy: Policy, acceptor: Acceptor) -> None:
    """Check that texts end with the context.

    For a context of C tokens, prompts of C, C − 1 and C − 4 tokens leave 1, 2 and 5 new tokens.
    """
    context = suite.target.decoder.context
    for missing in ((0,), (4, 0, 1)):
        requests = [Request(suite.prompt(context - m), 9, number=m) for m in missing]
        if acceptor.keeps_text:
            assert [
                len(suite.expected_tokens(r, sampling_for(case.acceptor))) for r in requests
            ] == [m + 1 for m in missing]
        suite.write(case, policy, acceptor, requests)


def _caches(suite: Suite, case: Case, policy: Policy, acceptor: Acceptor) -> None:
    """Compare the target's cache and the drafter's state with fresh ones after every step.

    They must equal the results of a fresh prefill and of a fresh `start` with the same tokens.
    """
    look = partial(_look, suite.target, str(case))
    for coach in (Always, Sometimes):
        suite.write(
            case,
            policy,
            acceptor,
            [Request(suite.prompt(n), 10, number=n) for n in (3, 8)],
            look,
            coach,
        )


def _look(
    target: Target, where: str, rows: SequenceBatch, drafter: Drafter[Any], state: State
) -> None:
    """Check that the cache and the state of a running batch are like fresh ones.

    Nothing is checked while the drafter has steps to catch up with.
    """
    if state.unread:
        return
    held = PrefixCache(rows.committed, rows.cache, state.drafter)
    _as_if_fresh(target, drafter, held, rows.last, rows.live, where)


def _as_if_fresh(
    target: Target, drafter: Drafter[Any], held: PrefixCache, last: Ints, live: Ints, where: str
) -> None:
    """Check that the target's cache equals that of a fresh prefill, and the drafter's state too.

    A drafter's state is checked by its distributions q after the root and after each of its
    children. They must equal those of a drafter that has just read this sequence alone and drafted
    this child alone. Drafters without a q over the whole vocabulary are not checked, because
    retrieval drafters may know more than the text.
    """
    fresh = target.new_cache(len(held.texts), 8)
    target.prefill(fresh, held.texts, HiddenStateSpec())
    assert held.cache.lengths.tolist() == fresh.lengths.tolist() == [len(t) for t in held.texts]
    for layer in range(len(fresh.shapes)):
        for ours, theirs in zip(held.cache.layer(layer), fresh.layer(layer), strict=True):
            for row, n in ((r, n) for r, n in enumerate(fresh.lengths.tolist()) if n):
                far = float((ours[row, :, :n] - theirs[row, :, :n]).abs().max())
                assert far < NOISE, (
                    f"{where}: layer {layer} of the cache is {far:.2e} from a fresh prefill"
                )
    if not live.size or isinstance(drafter, Scripted):  # a script goes by the row's number
        return
    bush, q = _two_layers(drafter, held.drafter_state, Tree.from_roots(live, last[live]), None)
    for child in range(bush.roots, len(bush)):
        row, root = int(bush.row[child]), int(bush.parents[child])
        verified = target.prefill(target.new_cache(1, 8), [held.texts[row]], drafter.needs)
        state = drafter.start([held.texts[row]], last[[row]], verified.hidden_states)
        alone = Tree.from_roots(np.zeros(1, np.int64), last[[row]])
        _, wanted = _two_layers(drafter, state, alone, int(bush.tokens[child]))
        for mine, theirs in zip((q[root], q[child]) if q else (), wanted, strict=True):
            far = float((mine - theirs).abs().max())
            assert far < 10 * NOISE, (
                f"{where}: the drafter's state drafts {far:.2e} away from a fresh start"
            )


def _two_layers(
    drafter: Drafter[Any], state: Any, roots: Tree, token: int | None
) -> tuple[Tree, list[Tensor]]:
    """Return the roots with one given child each, or with the two that the drafter proposes.

    The second value is the distribution q [V] after every node, or empty for a drafter without it.
    `token` is the given child; None for proposed ones.
    """
    first, state = drafter.expand(state, roots, np.arange(roots.roots), 2, Drawing())
    children = first if token is None else Candidates(np.array([[token]]), np.zeros((1, 1)))
    tree = append(roots, np.arange(roots.roots), children)
    if first.log_probs is None or not tree.drafted:
        return tree, []
    second, _ = drafter.expand(state, tree, np.arange(roots.roots, len(tree)), 2, Drawing())
    assert second.log_probs is not None, "a whole q after the roots, and none after their children"
    return tree, [*first.log_probs.exp(), *second.log_probs.exp()]


@final
class Ruled(LogitsProcessor):
    """Force the token after an id divisible by three; elsewhere make even ids less likely."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def forced_token(self, ids: Sequence[int]) -> int | None:
        """Return the forced token after the given ids; None if no token is forced."""
        return (5 * ids[-1] + 7) % self._vocab if ids[-1] % 3 == 0 else None

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.forced_token(input_ids[0].tolist())
        if token is None:
            return scores - 2.0 * (torch.arange(self._vocab, device=scores.device) % 2 == 0)
        only = torch.full_like(scores, -torch.inf)
        only[:, token] = 0
        return only


def _check_processors(suite: Suite, case: Case, policy: Policy, acceptor: Acceptor) -> None:
    """Check requests with logits processors and stopping criteria.

    The processors depend on the path, some of them also guide the drafts, and one forces tokens.
    """
    sampling, requests = sampling_for(case.acceptor), []
    for number, length in enumerate((6, 1, 9)):
        ruled = Ruled(suite.target.decoder.vocab)
        own = (RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(3), ruled)
        guides, forced = ((), None) if number == 1 else (own[1:], ruled.forced_token)
        plain = Request(
            suite.prompt(length),
            9,
            number=number,
            processors=own,
            guides=guides,
            forced=forced,
            before=(0,) * number,
        )
        last = suite.reference(plain, sampling)[5]
        ended = (
            (lambda ids, scores, n=length, last=last: ids.shape[1] > n and ids[0, -1] == last)
            if number
            else None
        )
        requests.append(plain if ended is None else replace(plain, criteria=(ended,)))
    for rows in (requests, requests[:1]):
        suite.write(case, policy, acceptor, rows, coach=Always)


def _reuse(suite: Suite, case: Case, policy: Policy, acceptor: Acceptor) -> None:
    """Check prompts that continue the previous text, or share only its beginning.

    The new text must be the same as without the previous one.
    """
    sampling = sampling_for(case.acceptor)
    first = Request(suite.prompt(6), 5)
    on = [*first.prompt, *suite.reference(first, sampling)[:4], 1, 2]
    requests = [first, Request(on, 4), Request(on[:8], 1), Request([*on[:4], 9, 9], 5)]
    engine = Engine(
        suite.target, suite.drafter(case.drafter, requests, sampling), policy, acceptor, COSTS
    )
    for request in requests:
        written = engine.write([request], sampling).tokens[0]
        suite.judge(acceptor, request, sampling, written, str(case))
        assert engine.held is not None
        _as_if_fresh(
            suite.target,
            engine.drafter,
            engine.held,
            np.array(written[-1:]),
            np.arange(1),
            str(case),
        )


def _joining(count: int, suite: Suite, case: Case, policy: Policy, acceptor: Acceptor) -> None:
    """Let up to `count` requests join and leave a batch at random steps, under random costs.

    Check that every text equals that of the request alone.
    """
    sampling, rng = sampling_for(case.acceptor), np.random.default_rng(crc32(str(case).encode()))
    mixed = (sampling, Sampling()) if acceptor.greedy and acceptor.sampling else (sampling,)
    draw = np.random.default_rng(
        count
    )  # the same requests in every case, so that plain decoding writes them once
    lengths = zip(
        draw.integers(1, 12, 2 * count), draw.integers(1, REFERENCE_TOKENS, 2 * count), strict=True
    )
    waiting = [
        Request([*suite.prompt(int(n)), i], int(limit), number=i, sampling=mixed[i % len(mixed)])
        for i, (n, limit) in enumerate(lengths)
    ]
    drafter, costs = (
        suite.drafter(case.drafter, waiting, coach=Always),
        RandomCosts(crc32(str(case).encode())),
    )
    rows = SequenceBatch(suite.target.new_cache(count, 8))
    state = State()
    owners = dict[int, Request]()
    parts = Components(
        suite.target,
        drafter,
        policy,
        Watched(acceptor, lambda: rows.room(suite.target), suite.coverage),
        costs,
    )

    def look(state: State) -> None:
        if rows.live.size:
            _look(suite.target, str(case), rows, drafter, state)

    while waiting or owners:
        come = (
            int(rng.integers(not owners, 1 + min(len(rows.free), len(waiting), 3)))
            if waiting and rows.free.size
            else 0
        )
        if come:
            new, waiting = waiting[:come], waiting[come:]
            events, state = admit(parts, rows, new, state)
            owners |= {event.row: request for event, request in zip(events, new, strict=True)}
            look(state)
        if rows.live.size:
            _, state = step(parts, rows, state)
        for row in [row for row in owners if rng.random() < (0.05 if row in rows.live else 0.7)]:
            request = owners.pop(row)
            got = rows.written[row]
            cancelled = row in rows.live
            state = release(parts, rows, row, state)
            if not cancelled:
                suite.judge(acceptor, request, request.sampling, got, str(case))
            elif acceptor.keeps_text:
                suite.same(
                    replace(request, max_new_tokens=len(got)), request.sampling, got, str(case)
                )
        look(state)


def _check_scheduler(
    count: int, suite: Suite, case: Case, policy: Policy, acceptor: Acceptor
) -> None:
    """Let the scheduler run requests that join, leave, are cancelled and preempted at random.

    Check that every text equals that of the request alone.

    At most `count` requests run at the same time. In two of three cases, chunks of prompts are read
    in the passes of running sequences.
    """
    sampling, rng = sampling_for(case.acceptor), np.random.default_rng(crc32(str(case).encode()))
    mixed = (sampling, Sampling()) if acceptor.greedy and acceptor.sampling else (sampling,)
    waiting = [
        Request(
            [*suite.prompt(1 + (5 * i) % 11), i],
            2 + (7 * i) % 12,
            number=i,
            sampling=mixed[i % len(mixed)],
        )
        for i in range(count + 2)
    ]
    drafter, costs = (
        suite.drafter(case.drafter, waiting, coach=Always),
        RandomCosts(crc32(str(case).encode())),
    )
    engine, handles = (
        Engine(suite.target, drafter, policy, costs=cast(Costs, costs)),
        list[Handle](),
    )
    bound = max(10 * count, 25)
    limits = {
        "max_sequences": count,
        "max_cache_tokens": bound,
        "max_batch_tokens": 5,
        "prefix_block": 2,
    }
    engine.set_limits(**limits, share_passes=bool(rng.integers(3)))
    scheduler = engine.scheduler

    def room() -> TreeBudget:
        assert scheduler.batch is not None
        return scheduler.batch[1].room(suite.target)

    engine.acceptor = Watched(acceptor, room, suite.coverage)
    while waiting or scheduler.num_unfinished:
        while waiting and rng.random() < 0.4:
            handles.append(engine.submit(waiting.pop(0)))
        engine.step()
        assert scheduler.cache_tokens <= bound, (
            f"{case}: {scheduler.cache_tokens} tokens are in the cache"
        )
        if scheduler.batch is not None and scheduler.batch[1].live.size and rng.random() < 0.15:
            _look(suite.target, str(case), scheduler.batch[1], drafter, scheduler.state)
        for handle in handles:
            if not handle.finished and rng.random() < 0.02:
                engine.cancel(handle)
    for handle in handles:
        request, got = handle.request, handle.result().tokens
        if handle.status == "finished":
            suite.judge(acceptor, request, request.sampling, got, str(case))
        elif acceptor.keeps_text and got:
            suite.same(replace(request, max_new_tokens=len(got)), request.sampling, got, str(case))
    suite.coverage.beside += scheduler.shared_passes
    suite.coverage.preempted += sum(handle.stats.preemptions for handle in handles)
    suite.coverage.shared += sum(handle.cached_tokens > 0 for handle in handles)


def _with_pauses(
    check: "Check", suite: Suite, case: Case, policy: Policy, acceptor: Acceptor
) -> None:
    """Run another check with a policy that pauses again and again."""
    check(suite, case, Pausing(policy), acceptor)


Check = Callable[[Suite, Case, Policy, Acceptor], None]
FULL_CHECKS: dict[str, Check] = {"one": _one, "ragged": _check_ragged}
"""Checks that are run for every pairing of drafter and policy."""
PAIRWISE: dict[str, Check] = {
    "limit": _limit,
    "eos": _eos,
    "context": _context,
    "caches": _caches,
    "reuse": _reuse,
    "processed": _check_processors,
    "joining": partial(_joining, 3),
    "joining-8": partial(_joining, 8),
    "scheduled": partial(_check_scheduler, 3),
    "scheduled-8": partial(_check_scheduler, 8),
}
"""Checks that are run for a selection of pairings: any two values of check, drafter, policy and
acceptor occur together in some case."""
PAUSED: dict[str, Check] = {
    "paused": partial(_with_pauses, partial(_joining, 3)),
    "paused-scheduled": partial(_with_pauses, partial(_check_scheduler, 3)),
}
"""Checks that are run for every drafter with every acceptor, and policies in turn."""
CHECKS = FULL_CHECKS | PAIRWISE | PAUSED


def batch_cases(
    sizes: Sequence[int], only: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> list[Case]:
    """Return the cases of every drafter × policy × acceptor under continuous batching.

    In these cases, sequences join, leave, are preempted and share prefixes.

    Args:
        sizes: largest numbers of sequences in a batch; each number gives its own cases.
        only: names of the parts to test; see `cases`.
    """
    checks = []
    for size in sizes:
        name = next(
            (n for n, check in CHECKS.items() if _size_of(check) == size), f"scheduled-{size}"
        )
        CHECKS.setdefault(name, partial(_check_scheduler, size))
        checks.append(name)
    return [Case(*c) for c in itertools.product(checks, *_selected_names(only))]


def _size_of(check: Check) -> int | None:
    """Return the largest number of sequences in a scheduler check; None for other checks."""
    return (
        int(check.args[0])
        if isinstance(check, partial) and check.func is _check_scheduler
        else None
    )


def _selected_names(only: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the names of drafters, policies and acceptors to test: those in `only`, or all."""
    found = {kind: tuple(parts(kind)) for kind in KINDS}
    found["drafter"] = (*SCRIPTED, *found["drafter"])
    return [tuple(only.get(kind) or found[kind]) for kind in ("drafter", "policy", "acceptor")]


def cases(
    full: bool = False, only: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> list[Case]:
    """Return the cases of the conformance suite.

    By default, the checks `FULL_CHECKS` run for every drafter × policy, each time with another
    third of the acceptors. The checks `PAIRWISE` run for a selection of combinations, and those of
    `PAUSED` for every drafter × acceptor.

    So each acceptor is tested with each drafter and with each policy, but only `full` covers all
    combinations. The check of a single sequence uses only acceptors that guarantee the text. For
    the others, the check of three sequences is sufficient.

    Args:
        full: whether every check is run for every combination.
        only: names by kind (`drafter`, `policy`, `acceptor`) of the parts to test with all parts of
            the other kinds. All parts of a kind without names are tested.
    """
    every = _selected_names(only)
    rest = [tuple(PAIRWISE), *every]
    chosen = itertools.product(*rest) if full else pairwise(rest)
    rules: dict[str, type[Acceptor]] = {name: part("acceptor", name) for name in every[2]}
    known = [name for name, rule in rules.items() if rule.keeps_text]
    turns = 3 if max(map(len, every[:2])) >= 3 else 1  # fewer would leave out pairs

    def due(check: str, drafter: str, policy: str, rule: str) -> bool:
        turn = every[0].index(drafter) + every[1].index(policy)
        if check == "one":
            return full or (rule in known and rule == known[turn % len(known)])
        return full or (turn + every[2].index(rule)) % turns == 0

    everywhere = (c for c in itertools.product(FULL_CHECKS, *every) if due(*c))
    turns_of_policies = itertools.cycle(every[1])
    paused = [
        (check, drafter, policy, rule)
        for check, drafter, rule in itertools.product(PAUSED, every[0], every[2])
        for policy in (every[1] if full else (next(turns_of_policies),))
    ]
    return [Case(*c) for c in (*everywhere, *chosen, *paused)]


def pairwise(factors: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return few combinations in which any two values of different factors occur together."""
    places = [[(i, value) for value in values] for i, values in enumerate(factors)]
    missing = dict.fromkeys(
        frozenset(p) for u, v in itertools.combinations(places, 2) for p in itertools.product(u, v)
    )
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for choices in places:
            if choices[0][0] not in row:
                row.update([max(choices, key=partial(_new_pairs, missing, tuple(row.items())))])
        for pair in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append(tuple(row[i] for i in range(len(factors))))
    return rows


def _new_pairs(
    missing: Container[object], row: Sequence[tuple[int, str]], choice: tuple[int, str]
) -> int:
    return sum(frozenset((choice, other)) in missing for other in row)
