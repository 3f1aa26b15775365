"""Whether what is written is what the target would have written, on the user's own target, drafter and prompts.

Texts are compared with plain decoding's token for token where a rule promises them: in greedy decoding, and for the same
seed. A rule that promises no more than the distribution is put to a two-sample test of the tokens that come behind a fixed
root. Passes of different width round differently, which nobody can help: how much is measured beside the comparison, with
the stock model and no mask of ours, so that a fault in a verification cannot excuse itself.

Shapes: n tokens of a text, V vocabulary.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftree.acceptors.base import Acceptor
from draftree.costs import Costs, CostTable
from draftree.data.prompts import encode
from draftree.doctor.fit import APART, HALF, Finding, Said
from draftree.doctor.noise import (
    LOOK,
    Heard,
    Noise,
    Root,
    behind,
    common,
    distances,
    noise,
    opened,
    plainly,
    shifts,
    speculated,
)
from draftree.doctor.statistics import detectable, two_sample
from draftree.drafters.base import Drafter
from draftree.engine import UNIT, Engine
from draftree.errors import UserError
from draftree.evaluation import suites
from draftree.evaluation.driven import TEXTS, TOKENS, read
from draftree.models.target import Target
from draftree.policies.base import Policy
from draftree.registry import build, check_exact, parts
from draftree.request import Request
from draftree.sampling.noise import Keyed
from draftree.sampling.settings import Sampling

LEVEL = 1e-3
"""How probable it is that a frequency test fails by chance, all tests of a report together."""
SURE = 0.99
"""How surely an error is found that is as large as is told."""
ROWS = 40
"""Trials that are made in one batch."""
CHAINS, TREES = "chain", "vct:width=2,depth=2"
"""Policies for rules that the given ones would make inexact."""

Tell = Callable[[int, str, int], None]
"""tell(done, what is done next, of how many)."""


@dataclass(frozen=True)
class Plan:
    """How much is tried.

    Attributes:
        max_new_tokens: of each text.
        seeds: how many are compared at each temperature above 0.
        trials: how often plain decoding and each rule draw, behind all roots together.
        roots: how many there are, each in another text.
        seed: the first of the seeds.

    Raises:
        UserError: there would be nothing to try.
    """

    max_new_tokens: int = TOKENS
    seeds: int = 2
    trials: int = 2000
    roots: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("seeds", 1), ("trials", 100), ("roots", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}, allowed is a whole number of at least {least}")


@dataclass(frozen=True)
class Case:
    """What is examined: a rule with a policy at a temperature.

    Attributes:
        acceptor: its spec.
        policy: its spec.
        temperature: 0 for greedy decoding.
        rule: the acceptor.
        grown: the policy.
        instead: why the policy is not one of those that were asked for.
    """

    acceptor: str
    policy: str
    temperature: float
    rule: Acceptor = field(repr=False)
    grown: Policy = field(repr=False)
    instead: str = ""

    @property
    def name(self) -> str:
        return f"{self.acceptor}, {self.policy}, T = {self.temperature:g}"

    @property
    def keeps_text(self) -> bool:
        """Whether its texts must be plain decoding's; else their distribution must be."""
        return self.rule.keeps_text or self.temperature == 0


@dataclass(frozen=True)
class Parted:
    """Where a text leaves plain decoding's.

    Attributes:
        text: the number of its prompt.
        seed: of the run.
        token: the first that differs, counted from 0.
        plain: what plain decoding chose there; None where it had ended.
        ours: what came instead.
        margin: by how much plain decoding preferred its own, in logits: ∞ where it could never have chosen ours.
    """

    text: int
    seed: int
    token: int
    plain: int | None
    ours: int | None
    margin: float


@dataclass(frozen=True)
class Compared:
    """One case beside plain decoding.

    Attributes:
        case: its name.
        texts: how many were compared.
        tokens: how many tokens plain decoding wrote.
        parted: the texts that differ.
        shift: how much a verification's logits differ from plain decoding's behind the same text, at most; see `shifts`.
    """

    case: str
    texts: int
    tokens: int
    parted: tuple[Parted, ...]
    shift: float


@dataclass(frozen=True)
class Frequencies:
    """One test of whether tokens come as often as plain sampling has them come.

    Attributes:
        case: its name.
        look: how many tokens behind a root were counted together.
        trials: in each of the two samples, behind all roots.
        statistic: χ².
        dof: its degrees of freedom.
        p_value: how probable so large a one is where nothing is wrong.
        distance: total variation between the two samples.
        chance: what it is expected to be where nothing is wrong.
        detectable: the total variation that would have been found, with probability `SURE`, whatever its shape; None where
            the tokens are too certain to tell anything.
        exact: whether the rule promises to pass.
    """

    case: str
    look: int
    trials: int
    statistic: float
    dof: int
    p_value: float
    distance: float
    chance: float
    detectable: float | None
    exact: bool


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        target: its name.
        drafter: what it is.
        texts: how many prompts there were.
        noise: between passes of different width.
        allowed: the largest difference of logits that it explains.
        level: below it a p-value is too small, so that all tests together fail by chance with probability `LEVEL`.
        findings: a verdict on each case, after those on plain decoding and its noise.
        compared: all comparisons.
        frequencies: all tests.
        lossy: the cases that promise nothing.
    """

    target: str
    drafter: str
    texts: int
    noise: Noise
    allowed: float
    level: float
    findings: tuple[Finding, ...]
    compared: tuple[Compared, ...]
    frequencies: tuple[Frequencies, ...]
    lossy: tuple[str, ...]

    @property
    def lossless(self) -> bool:
        """Whether something was examined that promises it, and nothing was found that the noise does not explain."""
        return self.promised and all(f.verdict != "bad" for f in self.findings)

    @property
    def promised(self) -> bool:
        """Whether any rule that was examined promises plain decoding's texts, or their distribution."""
        return bool(self.compared) or any(f.exact for f in self.frequencies)

    @property
    def parted(self) -> tuple[tuple[str, Parted], ...]:
        """Every text that differs, with its case."""
        return tuple((c.case, p) for c in self.compared for p in c.parted)

    @property
    def summary(self) -> str:
        """All of it in a line."""
        said = [f"{name} is lossy by design" for name in self.lossy]
        if not self.lossless:
            nobody = [] if self.promised else ["nothing that was asked for promises it"]
            wrong = [*(f.name for f in self.findings if f.verdict == "bad"), *nobody]
            return "; ".join([f"NOT lossless: {'; '.join(wrong)}", *said])
        texts, parted = sum(c.texts for c in self.compared), len(self.parted)
        told = [f"{texts - parted} of {texts} texts the same as plain decoding's"] if texts else []
        told += [f"{parted} parted where the margin is within the numerical noise"] if parted else []
        tests = sum(f.exact for f in self.frequencies)
        told += [f"{tests} of {tests} frequency tests passed"] if tests else []
        return "; ".join([f"lossless: {', '.join(told)}", *said])

    def as_json(self) -> dict[str, Any]:
        """All of it; a figure that is no finite number is null."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return found | {"lossless": self.lossless, "summary": self.summary}

    def __getitem__(self, name: str) -> Finding:
        return next(f for f in self.findings if f.name == name)


def cases(policies: Sequence[str], acceptors: Sequence[str], temperatures: Sequence[float]) -> list[Case]:
    """Every rule with every policy at every temperature that go together.

    A rule that none of the policies leaves exact gets one of its own.

    Args:
        policies: specs.
        acceptors: specs; where there are none, all that are exact.
        temperatures: 0 for greedy decoding.

    Raises:
        UserError: something does not exist, or serves none of the temperatures.
    """
    grown = {p: build("policy", p) for p in policies}
    rules: dict[str, Acceptor] = {a: build("acceptor", a) for a in acceptors or _exact()}
    found: list[Case] = []
    for temperature in dict.fromkeys(temperatures):
        greedy = Sampling(temperature).greedy
        for name, rule in rules.items():
            serves = rule.greedy if greedy else rule.sampling
            if serves and (acceptors or not greedy or name == "greedy"):  # at 0 match is greedy by another name
                found += _with_policies(name, rule, temperature, grown)
    for name in acceptors:
        if all(c.acceptor != name for c in found):
            given = ", ".join(f"{t:g}" for t in temperatures)
            allowed = "0" if rules[name].greedy else "above 0"
            raise UserError(f"acceptor '{name}' serves none of the temperatures {given}; allowed: {allowed}")
    return found


def _exact() -> list[str]:
    rules: dict[str, type[Acceptor]] = parts("acceptor")
    return [name for name, rule in rules.items() if not rule.lossy]


def _with_policies(name: str, rule: Acceptor, temperature: float, grown: dict[str, Policy]) -> list[Case]:
    found, reasons = [], []
    for spec, policy in grown.items():
        try:
            check_exact(policy, rule)
            found.append(Case(name, spec, temperature, rule, policy))
        except UserError:
            reasons.append(spec)
    if not found:
        spec = CHAINS if name in ("rejection", "block") else TREES
        instead = f"with {' or '.join(reasons)}, which prune{'s' * (len(reasons) == 1)} on what was drawn, it is refused"
        found.append(Case(name, spec, temperature, rule, build("policy", spec), instead))
    return found


def prompts(target: Target, data: Path | None = None, count: int = TEXTS, tokens: int = TOKENS) -> list[list[int]]:
    """What is to be continued: what stands before the responses of a file, or shipped prompts.

    Args:
        target: whose tokenizer it is about.
        data: a file as `doctor.read` takes it.
        count: how many prompts at most, spread over all.
        tokens: how many will be written behind each.

    Raises:
        UserError: the file cannot be read, or no prompt fits the target's context.
    """
    context = target.decoder.context
    if data is not None:
        found = [t.tokens[: t.start].tolist() for t in read(target, data, count, tokens)]
    else:
        found = [encode(target.tokenizer, p.content) for p in suites.load("demo").prompts]
    fit = [p for p in found if len(p) + tokens <= context]
    if not fit:
        shortest = min(map(len, found)) + tokens
        told = f"with {tokens} new tokens the shortest has {shortest}, allowed is the target's context of {context}"
        raise UserError(f"all {len(found)} prompts are too long: {told}")
    count = min(count, len(fit))
    return [fit[i * len(fit) // count] for i in range(count)]


def examine(
    target: Target,
    drafter: Drafter[Any],
    prompts: Sequence[Sequence[int]],
    chosen: Sequence[Case],
    plan: Plan = Plan(),
    costs: Costs | CostTable = UNIT,
    tell: Tell = lambda done, what, of: None,
) -> Report:
    """Compares what is written with what the target writes by itself.

    Args:
        target: the model whose output is promised.
        drafter: opened for that target.
        prompts: token ids.
        chosen: see `cases`.
        plan: how much is tried.
        costs: for policies that read them.
        tell: is told how far it is.

    Raises:
        UserError: a prompt cannot be served.
    """
    work = _Work(target, [Engine(target, drafter, c.grown, c.rule, costs) for c in chosen], list(chosen), plan, tell)
    work.total = work.size(len(prompts))
    for number, prompt in enumerate(prompts):
        work.compare(number, list(prompt))
    work.draw()
    return work.report(drafter.described, len(prompts))


@dataclass
class _Work:
    """An examination under way."""

    target: Target
    engines: list[Engine]
    cases: list[Case]
    plan: Plan
    tell: Tell
    total: int = 0
    done: int = 0
    noise: Noise = field(default_factory=Noise)
    roots: list[Root] = field(default_factory=list)
    compared: dict[str, Compared] = field(default_factory=dict)
    tests: list[Frequencies] = field(default_factory=list)

    @property
    def drawn(self) -> list[tuple[Case, Engine]]:
        """The cases that are tested by frequencies."""
        return [(c, e) for c, e in zip(self.cases, self.engines, strict=True) if not c.keeps_text]

    def followed(self, temperature: float) -> list[tuple[Case, Engine]]:
        """The cases that are compared at a temperature."""
        pairs = zip(self.cases, self.engines, strict=True)
        return [(c, e) for c, e in pairs if c.keeps_text and c.temperature == temperature]

    @property
    def runs(self) -> list[Sampling]:
        """How each text is written; where none is to be compared, greedily: noise and roots are still wanted."""
        temperatures = dict.fromkeys(c.temperature for c in self.cases if c.keeps_text) or [0.0]
        return [Sampling(t, seed=self.plan.seed + i) for t in temperatures for i in range(self.plan.seeds if t else 1)]

    def size(self, texts: int) -> int:
        """How much there is to do."""
        runs = sum(1 + len(self.followed(s.temperature)) for s in self.runs)
        batches = sum(len(self.numbers(i, min(self.plan.roots, texts))) for i in range(min(self.plan.roots, texts)))
        return texts * runs + batches * (len(self.drawn) + len({c.temperature for c, _ in self.drawn}))

    def advance(self, what: str) -> None:
        self.tell(self.done, what, self.total)
        self.done += 1

    def compare(self, text: int, prompt: list[int]) -> None:
        """All cases on one prompt."""
        request = Request(prompt, self.plan.max_new_tokens, self.target.eos, text, keep_scores=True)
        best: Root | None = None
        for sampling in self.runs:
            self.advance(f"plain decoding, T = {sampling.temperature:g}")
            base = Heard()
            self.engines[0].plain([request], sampling, base)
            self.noise = self.noise.joined(noise(self.target, prompt, base))
            best = best or opened(text, prompt, base)
            for case, engine in self.followed(sampling.temperature):
                self.advance(case.name)
                ours = Heard()
                engine.write([request], sampling, ours, reuse=False)
                self.note(case.name, request, sampling, base, ours)
        self.roots += [] if best is None else [best]

    def note(self, name: str, request: Request, sampling: Sampling, base: Heard, ours: Heard) -> None:
        """Writes down how a text stands beside plain decoding's."""
        before = self.compared.get(name, Compared(name, 0, 0, (), 0.0))
        at, parted = common(base.tokens, ours.tokens), before.parted
        if base.tokens != ours.tokens:
            root = np.array([len(request.prompt) - 1 + at])
            margin = behind(base, ours, at, sampling, Keyed(sampling.seed, np.array([request.number]), root))
            token = [h.tokens[at] if at < len(h.tokens) else None for h in (base, ours)]
            parted += (Parted(request.number, sampling.seed, at, token[0], token[1], margin),)
        alike = min(at + 1, len(base.tokens), len(ours.tokens))  # logits that stand behind the same text
        shift = max(before.shift, shifts(base.raw(alike), ours.raw(alike)))
        self.compared[name] = Compared(name, before.texts + 1, before.tokens + len(base.tokens), parted, shift)

    def draw(self) -> None:
        """All frequency tests."""
        if self.drawn and not self.roots:
            raise UserError("every text ends with its first token, so nothing can be drawn behind one; give other prompts")
        roots = sorted(self.roots, key=lambda r: r.distance)[: self.plan.roots]
        for temperature in dict.fromkeys(c.temperature for c, _ in self.drawn):
            # Each has its own seed: with the same one, both samples would follow the same noise.
            first, second = (Sampling(temperature, seed=self.plan.seed + i) for i in (0, 1))
            base = [
                (i, *drawn)
                for i, root in enumerate(roots)
                for drawn in plainly(self.target, root, first, self.batches(i, len(roots), "plain sampling"))
            ]
            for case, engine in self.drawn:
                if case.temperature == temperature:
                    ours = [
                        (i, *drawn)
                        for i, root in enumerate(roots)
                        for drawn in speculated(engine, root, second, self.batches(i, len(roots), case.name))
                    ]
                    self.tests += [self.tested(case, base, ours, look) for look in (1, LOOK)]

    def numbers(self, root: int, roots: int) -> list[range]:
        """The numbers of the trials behind one of the roots, batch by batch."""
        first, end = (self.plan.trials * i // roots for i in (root, root + 1))
        rows = math.ceil((end - first) / math.ceil((end - first) / ROWS))  # batches of one size go on in one another's caches
        return [range(n, min(n + rows, end)) for n in range(first, end, rows)]

    def batches(self, root: int, roots: int, what: str) -> Iterator[range]:
        """The same, telling how far it is."""
        for numbers in self.numbers(root, roots):
            self.advance(f"{what}: {numbers[0]:,} of {self.plan.trials:,} trials")
            yield numbers

    def tested(self, case: Case, base: Sequence[tuple[int, ...]], ours: Sequence[tuple[int, ...]], look: int) -> Frequencies:
        """Two samples side by side; the first part of an outcome is its root's number."""
        counted = [Counter(s[: 1 + look] for s in sample) for sample in (ours, base)]
        outcomes = sorted(counted[0] | counted[1])
        a, b = (np.array([c[o] for o in outcomes], np.float64) for c in counted)
        found = two_sample(a, b)
        n = len(ours) * len(base) // (len(ours) + len(base))
        least = detectable(n, found.dof, self.level, SURE) if found.dof else None
        return Frequencies(case.name, look, len(ours), *found, *distances(a, b), least, not case.rule.lossy)

    @property
    def level(self) -> float:
        """Below it a p-value is too small."""
        return LEVEL / max(2 * sum(not c.rule.lossy for c, _ in self.drawn), 1)

    def report(self, drafter: str, texts: int) -> Report:
        dtype = self.target.decoder.dtype
        allowed = self.noise.allowed(dtype)
        compared = tuple(self.compared.values())
        findings = [_stock(dtype, self.noise), _width(self.noise, allowed), *(_texts(c, allowed) for c in compared)]
        for case, _ in self.drawn:
            tests = [t for t in self.tests if t.case == case.name]
            findings.append(_lossy(case, tests) if case.rule.lossy else _frequencies(case, tests, self.level, self.noise))
        lossy = tuple(c.name for c, _ in self.drawn if c.rule.lossy)
        return Report(
            self.target.name, drafter, texts, self.noise, allowed, self.level, tuple(findings), compared, tuple(self.tests),
            lossy,
        )  # fmt: skip


def _stock(dtype: torch.dtype, found: Noise) -> Finding:
    """Plain decoding beside the stock model."""
    limit = APART.get(dtype, HALF)
    text = f"its probabilities and those of one pass of the stock model over the text differ by at most {found.p:.1g}"
    verdict: Said = "ok" if found.p <= limit else "bad" if dtype in APART else "warn"
    return Finding("plain decoding", found.p, verdict, text if verdict == "ok" else f"{text}; noise is below {limit:.0e}")


def _width(found: Noise, allowed: float) -> Finding:
    text = f"passes of different width move logits by up to {found.logits:.1g}; differences up to {allowed:.1g} count as that"
    return Finding("noise", found.logits, "ok", text)


def _texts(found: Compared, allowed: float) -> Finding:
    """A verdict on texts."""
    same = f"{found.texts - len(found.parted)}/{found.texts}"
    wrong = [p for p in found.parted if not p.margin <= allowed]
    if wrong:
        told = f"{len(wrong)} texts part from plain decoding's where no noise explains it"
        return Finding(found.case, same, "bad", told)
    if not found.shift <= allowed:
        told = f"the logits of a verification differ from plain decoding's by {found.shift:.2g}, which no noise explains"
        return Finding(found.case, same, "bad", told)
    told = f"{found.tokens} tokens; the logits of a verification differ from plain decoding's by up to {found.shift:.1g}"
    if not found.parted:
        return Finding(found.case, same, "ok", told)
    largest = max(p.margin for p in found.parted)
    told += f"; texts part only where two tokens are within that, {largest:.1g} apart at most"
    return Finding(found.case, same, "warn", told)


def _frequencies(case: Case, tests: Sequence[Frequencies], level: float, found: Noise) -> Finding:
    """A verdict on a rule that promises its distribution."""
    worst = min(tests, key=lambda t: t.p_value)
    told = f"smallest p-value of {len(tests)} tests, {tests[0].trials:,} trials each"
    rejected = [t for t in tests if t.p_value < level]
    if any(t.distance - t.chance > found.tv for t in rejected):
        far = max(rejected, key=lambda t: t.distance - t.chance)
        told += f"; below {level:.1g}: the next {_tokens(far.look)} {'comes' if far.look == 1 else 'come'} otherwise than in "
        told += f"plain sampling, {far.distance:.2f} apart where chance makes {far.chance:.2f}"
        return Finding(case.name, worst.p_value, "bad", told)
    if rejected:
        return Finding(case.name, worst.p_value, "warn", f"{told}; below {level:.1g}, but no further apart than noise makes")
    reach = tests[0].detectable
    if reach is None:
        return Finding(case.name, worst.p_value, "warn", f"{told}; the next token is too certain for anything to be found")
    told += f"; an error of {reach:.2f} (total variation) in the next token would be found"
    return Finding(case.name, worst.p_value, "ok", f"{told}; {case.instead}" if case.instead else told)


def _lossy(case: Case, tests: Sequence[Frequencies]) -> Finding:
    """What is told of a rule that promises nothing."""
    far = max(tests, key=lambda t: t.distance - t.chance)
    verb = "is" if far.look == 1 else "are"
    told = f"lossy by design: the next {_tokens(far.look)} {verb} {far.distance:.2f} (total variation) from plain sampling's"
    return Finding(case.name, far.distance, "warn", f"{told}; chance makes {far.chance:.2f}")


def _tokens(look: int) -> str:
    return "token" if look == 1 else f"{look} tokens"
