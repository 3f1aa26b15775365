"""The grid of a benchmark: combinations of drafter, policy, acceptor and temperature."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from draftree.costs.cost_table import CostTable
from draftree.data.prompts import encode, question
from draftree.data.readers import Messages
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.evaluation.suites import SuitePrompt
from draftree.evaluation.teacher_forcing import prompts_that_fit
from draftree.metrics import Stats
from draftree.registry import build, check_exact, names
from draftree.request import Request, check_requests
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.tree import Ints


@dataclass(frozen=True)
class Cell:
    """Describe one combination to measure: drafter, policy, acceptor and temperature.

    For plain decoding, drafter and policy are None. If `acceptor` is None, the default acceptor for
    the temperature is used.
    """

    drafter: str | None
    policy: str | None
    temperature: float
    acceptor: str | None = None

    @property
    def plain(self) -> bool:
        """Return whether the cell is plain decoding, which is the baseline."""
        return self.drafter is None


@dataclass(frozen=True)
class PromptResult:
    """Store one cell's output for one prompt: the token ids, and the figures of every repeat."""

    tokens: list[int]
    repeats: list[Stats]

    @property
    def stats(self) -> Stats:
        """Return the first repeat's figures, with seconds and phases that are means over all repeats.

        All repeats have the same counts.
        """
        return replace(
            self.repeats[0],
            draft_seconds=statistics.fmean(s.draft_seconds for s in self.repeats),
            verify_seconds=statistics.fmean(s.verify_seconds for s in self.repeats),
            seconds=statistics.fmean(s.seconds for s in self.repeats),
            phases={
                name: statistics.fmean(s.phases.get(name, 0.0) for s in self.repeats)
                for name in self.repeats[0].phases
            },
        )


@dataclass(frozen=True)
class Quality:
    """Store measurements of a drafter that do not depend on the policy.

    Attributes:
        overlap: mean of Σ min(p, q) over drafted positions in texts sampled at temperature 1. It is
            Leviathan's α; None without such texts.
        cost_ratio: sₐ/sₜ, the seconds of a draft step over those of a target pass, for one token
            each.
        reach: for each prompt, the number of tokens in a row that the drafter proposes correctly
            after every root; see `oracle.reaches`.
    """

    overlap: float | None
    cost_ratio: float
    reach: tuple[Ints, ...] = ()


Pairing = tuple[str, str, str | None]
"""Specs of a drafter, a policy and an acceptor. None stands for the default acceptor."""


def pairings(
    drafters: Sequence[str],
    policies: Sequence[str],
    pairs: Sequence[str] = (),
    acceptors: Sequence[str] = (),
) -> list[Pairing]:
    """Return every combination of drafter, policy and acceptor, followed by the explicit pairs.

    In an explicit pair, the specs are separated by spaces.

    Raises:
        UserError: an explicit pair does not consist of the specs of a drafter, a policy and
            optionally an acceptor.
    """
    rules: Sequence[str | None] = acceptors or (None,)
    found = [(d, p, a) for d in drafters for p in policies for a in rules]
    for pair in pairs:
        before, _, last = pair.strip().rpartition(" ")
        rule = last if last.partition(":")[0] in names("acceptor") else None
        drafter, _, policy = (before if rule else pair.strip()).rpartition(" ")
        if not drafter or (" " in drafter.strip() and not Path(drafter.strip()).exists()):
            told = "the specs of a drafter and a policy, and perhaps of an acceptor, with spaces between them"
            raise UserError(f"--pair is '{pair}', allowed are {told}")
        found += [(drafter.strip(), policy, a) for a in ((rule,) if rule else rules)]
    return list(dict.fromkeys(found))


def product(pairs: Sequence[Pairing], temperatures: Sequence[float]) -> list[Cell]:
    """Return the cells to measure: the baseline and every pairing, at each temperature.

    Raises:
        UserError: an acceptor is not exact with its policy, or does not support a temperature.
    """
    for (_, policy, acceptor), temperature in itertools.product(pairs, temperatures):
        if acceptor is not None:
            asked = Request([0], sampling=Sampling(temperature=temperature))
            check_exact(build("policy", policy), build("acceptor", acceptor), [asked])
    cells = [(None, None, None), *pairs]
    return [Cell(d, p, t, a) for t in dict.fromkeys(temperatures) for d, p, a in cells]


def assemble(
    load: Callable[[], Target],
    pairs: Sequence[tuple[str, str] | Pairing],
    costs: Mapping[str, CostTable] | CostTable | None,
    acceptor: str | None = None,
) -> dict[tuple[str, str], Engine]:
    """Return an engine for every pair of drafter and policy.

    Specs are parsed before the target is loaded, so that mistakes in them are reported at once.

    Args:
        load: function that loads the target.
        pairs: pairs of specs of a drafter and a policy; a third spec is ignored.
        costs: fixed costs, for all drafters or by drafter; None for costs learnt on this machine.
        acceptor: spec of the acceptor; by default it depends on the temperature.
    """
    known = costs if isinstance(costs, Mapping) else dict.fromkeys((d for d, *_ in pairs), costs)
    methods = {d: build("drafter", d) for d, *_ in pairs}
    grown = {p: build("policy", p) for _, p, *_ in pairs}
    rule = None if acceptor is None else build("acceptor", acceptor)
    target = load()
    opened = {d: method.open(target) for d, method in methods.items()}
    return {(d, p): Engine(target, opened[d], grown[p], rule, known.get(d)) for d, p, *_ in pairs}


def choose_requests(
    prompts: Sequence[SuitePrompt],
    engine: Engine,
    max_new_tokens: int,
    limit: int | None,
    per_category: int | None = None,
    shuffled: int | None = None,
) -> tuple[list[Request], dict[str, int]]:
    """Return the requests to run, and by category the number of prompts that are left out.

    A prompt is left out if it and its new tokens would not fit the target's context.

    Args:
        prompts: prompts in the order of their file.
        engine: engine whose target and tokenizer are used.
        max_new_tokens: number of new tokens for each request.
        limit: largest number of requests; None for no limit.
        per_category: largest number of requests of each category, applied before `limit`.
        shuffled: seed for choosing the requests at random instead of from the start of the file.
            The chosen requests stay in the order of the file.

    Raises:
        UserError: no prompt fits.
    """
    encoded = [encode(engine.tokenizer, p.content) for p in prompts]
    room = max(map(len, prompts_that_fit(encoded, engine.target, max_new_tokens)))
    asked = [
        Request(ids, max_new_tokens, engine.eos, p.number)
        for ids, p in zip(encoded, prompts, strict=True)
    ]
    fit = [(r, p.category) for r, p in zip(asked, prompts, strict=True) if len(r.prompt) <= room]
    check_requests([request for request, _ in fit], engine.target)
    left_out = Counter(p.category for p in prompts) - Counter(category for _, category in fit)
    if shuffled is not None:
        fit = [fit[i] for i in np.random.default_rng(shuffled).permutation(len(fit))]
    if per_category is not None:
        at = [
            Counter(c for _, c in fit[:i])[category] for i, (_, category) in enumerate(fit)
        ]  # how many came before it
        fit = [f for f, before in zip(fit, at, strict=True) if before < per_category]
    taken = sorted(fit[:limit], key=lambda f: f[0].number)
    return [request for request, _ in taken], dict(left_out)


QUESTION_STRIDE = 1 << 32
"""Difference between the numbers of successive questions in a conversation. The k-th later question
has the number of its prompt plus k times this value."""


def conversations(
    engine: Engine, prompts: Sequence[SuitePrompt], requests: Sequence[Request]
) -> list[Request]:
    """Return the requests, each followed by requests for the later questions of its conversation.

    The prompts of later questions contain the target's greedy answers to the earlier ones. A
    conversation ends before the first question that does not fit the context.

    Args:
        engine: engine whose target generates the answers.
        prompts: prompts of the suite.
        requests: requests for the first questions of some of these prompts.
    """
    of, found = {p.number: p for p in prompts}, list[Request]()
    for request in requests:
        prompt, asked = of[request.number], request
        chat: Messages = [] if isinstance(prompt.content, str) else list(prompt.content)
        found.append(request)
        for turn, text in enumerate(prompt.later if chat else (), 1):
            answer = engine.plain([replace(asked, sampling=Sampling())]).tokens[0]
            said = str(engine.tokenizer.decode(answer, skip_special_tokens=True))
            chat += [{"role": "assistant", "content": said}, *question(text)]
            ids = encode(engine.tokenizer, chat)
            if len(ids) + request.max_new_tokens > engine.target.decoder.context:
                break
            asked = replace(request, prompt=ids, number=request.number + turn * QUESTION_STRIDE)
            found.append(asked)
    return found
