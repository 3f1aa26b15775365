"""Runs to be compared: the plain baseline and every cell side by side, one text at a time.

No cache is reused between runs, whoever comes first changes from prompt to prompt, and all of it happens in one process.
What a drafter keeps over a session goes from prompt to prompt, within its own cell.
"""

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from draftree.acceptors.base import check_exact
from draftree.costs import Costs, CostTable
from draftree.engine import UNIT, Engine, Generation
from draftree.errors import UserError
from draftree.evaluation._driven import Text, drive
from draftree.evaluation.suites import Prompt
from draftree.files import append, understood, write_text
from draftree.prompts import encode
from draftree.registry import build, names
from draftree.sampling import Sampling, processed
from draftree.stats import Stats, Step, Work
from draftree.target import Needs, Target
from draftree.text import Request, check
from draftree.timing import measured

TOGETHER = 8
"""Texts along which a drafter is driven at a time."""
WARM_PROMPT, WARM_TOKENS = 64, 16
"""How much of the first prompt is read, and how much written behind it, before anything is timed."""


@dataclass(frozen=True)
class Cell:
    """One combination to be measured; plain decoding has neither drafter nor policy, and no acceptor is the usual one."""

    drafter: str | None
    policy: str | None
    temperature: float
    acceptor: str | None = None

    @property
    def plain(self) -> bool:
        """Whether it is the baseline."""
        return self.drafter is None


@dataclass(frozen=True)
class Written:
    """What one cell wrote for one prompt: the ids, and the figures of every repeat."""

    tokens: list[int]
    repeats: list[Stats]

    @property
    def stats(self) -> Stats:
        """The counts of the first repeat, which are those of all, with the mean seconds of all."""
        return replace(
            self.repeats[0],
            draft_seconds=statistics.fmean(s.draft_seconds for s in self.repeats),
            verify_seconds=statistics.fmean(s.verify_seconds for s in self.repeats),
            seconds=statistics.fmean(s.seconds for s in self.repeats),
        )


@dataclass(frozen=True)
class Quality:
    """A drafter's own figures, whatever the policy.

    Attributes:
        overlap: E[Σ min(p, q)] over drafts of depth 1 … 5 at temperature 1, Leviathan's α; None where nothing was written.
        cost_ratio: sₐ/sₜ for one token each.
    """

    overlap: float | None
    cost_ratio: float


@dataclass(frozen=True)
class Bench:
    """Everything to be run.

    Attributes:
        cells: the baseline of each temperature among them.
        engines: by (drafter, policy).
        requests: one for each prompt.
        seed: of the draws.
        repeats: how often each text is written.
        carried: what each cell's drafter keeps from prompt to prompt; no cell finds another's text, nor its own of an
            earlier repeat.
    """

    cells: Sequence[Cell]
    engines: Mapping[tuple[str, str], Engine]
    requests: Sequence[Request]
    seed: int = 0
    repeats: int = 1
    carried: dict[Cell, Any] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        """The target of all of them."""
        return next(iter(self.engines.values())).target

    def write(self, cell: Cell, request: Request, last: bool = False) -> Generation:
        """One text by one cell; after the last of its repeats the drafter may remember it."""
        sampling = Sampling(temperature=cell.temperature, seed=self.seed)
        if cell.drafter is None or cell.policy is None:
            return next(iter(self.engines.values())).plain([request], sampling)
        engine = self.engines[cell.drafter, cell.policy]
        engine.acceptor = None if cell.acceptor is None else build("acceptor", cell.acceptor)
        engine.carried = self.carried.get(cell)
        written = engine.write([request], sampling, reuse=False)
        if last:
            self.carried[cell] = engine.carried
        return written

    def prompt(self, index: int) -> dict[Cell, Written]:
        """All cells on one prompt; each repeat starts with another cell."""
        request = self.requests[index]
        done: dict[Cell, list[Generation]] = {cell: [] for cell in self.cells}
        for repeat in range(self.repeats):
            first = (index * self.repeats + repeat) % len(self.cells)
            for cell in [*self.cells[first:], *self.cells[:first]]:
                done[cell].append(self.write(cell, request, last=repeat == self.repeats - 1))
        return {cell: Written(g[0].tokens[0], [x.stats for x in g]) for cell, g in done.items()}

    def warm(self) -> None:
        """Runs every cell for a moment."""
        for cell in self.cells:
            self.write(cell, short(self.requests[0]))

    def price(self, tell: Callable[[str], None] = lambda _: None) -> dict[str, Costs | CostTable]:
        """By drafter, the costs that were given, or else this machine's; all its policies read them from now on."""
        for (drafter, _), engine in self.engines.items():

            def named(what: str, drafter: str = drafter) -> None:
                tell(f"{drafter}: {what}")

            if engine.costs is None:
                engine.costs = measured(self.target, engine.drafter, tell=named)
        return {d: e.costs for (d, _), e in self.engines.items() if e.costs is not None}

    def quality(self, drafter: str, done: Sequence[Mapping[Cell, "Written"]], costs: Costs | CostTable) -> "Quality":
        """How good and how cheap a drafter is by itself, along what plain decoding wrote."""
        engine = next(e for (d, _), e in self.engines.items() if d == drafter)
        plain = next(c for c in self.cells if c.plain)
        texts = [
            Text(np.array([*r.prompt, *written[plain].tokens], np.int64), len(r.prompt))
            for r, written in zip(self.requests, done, strict=True)
        ]
        long = [t for t in texts if len(t.tokens) > t.start + 1]
        places = [drive(self.target, engine.drafter, long[i : i + TOGETHER]) for i in range(0, len(long), TOGETHER)]
        overlap = float(np.concatenate([p.overlap for p in places]).mean()) if places else None
        return Quality(overlap, costs.ratio)

    def remember(self, requests: Sequence[Request]) -> None:
        """Writes again, for a run that goes on, what cells have learnt from: what a drafter or a policy keeps is not saved."""
        for cell in self.cells:
            if cell.drafter is not None and cell.policy is not None:
                engine = self.engines[cell.drafter, cell.policy]
                if engine.carried is not None or any(memory is not None for memory in engine.learned.values()):
                    for request in requests:
                        self.write(cell, request, last=True)

    def run(self, journal: "Journal", advance: Callable[[int], None] = lambda _: None) -> list[dict[Cell, Written]]:
        """All prompts, in order; those in the journal are not run again."""
        self.warm()
        done = journal.read(self.cells)[: len(self.requests)]
        self.remember(self.requests[: len(done)])
        for index in range(len(self.requests)):
            if index >= len(done):
                done.append(self.prompt(index))
                journal.add(done[-1])
            advance(index + 1)
        return done


def short(request: Request) -> Request:
    """A request to warm up with; it does not end early."""
    tokens = min(WARM_TOKENS, request.max_new_tokens)
    return replace(request, prompt=request.prompt[-WARM_PROMPT:], max_new_tokens=tokens, eos=frozenset())


Pairing = tuple[str, str, str | None]
"""The specs of a drafter, a policy and an acceptor; None for the usual one."""


def paired(
    drafters: Sequence[str], policies: Sequence[str], pairs: Sequence[str] = (), acceptors: Sequence[str] = ()
) -> list[Pairing]:
    """Every drafter with every policy under every acceptor, and further pairs, written with spaces between their specs.

    Raises:
        UserError: a pair is not the specs of a drafter and a policy, and perhaps of an acceptor.
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
    """The baseline and every pairing, at each temperature.

    Raises:
        UserError: a pairing is not exact, or its acceptor does not serve a temperature.
    """
    for (_, policy, acceptor), temperature in itertools.product(pairs, temperatures):
        if acceptor is not None:
            check_exact(build("policy", policy), build("acceptor", acceptor), Sampling(temperature=temperature))
    cells = [(None, None, None), *pairs]
    return [Cell(d, p, t, a) for t in dict.fromkeys(temperatures) for d, p, a in cells]


def assemble(
    load: Callable[[], Target],
    pairs: Sequence[tuple[str, str] | Pairing],
    costs: Mapping[str, CostTable] | CostTable | None,
    acceptor: str | None = None,
) -> dict[tuple[str, str], Engine]:
    """An engine for every pair; specs are read before the target is loaded, so mistakes come at once.

    Args:
        load: the target.
        pairs: specs of a drafter and a policy.
        costs: for all drafters or by drafter, instead of measuring.
        acceptor: a spec; chosen by the temperature where it is not given.
    """
    known = costs if isinstance(costs, Mapping) else dict.fromkeys((d for d, *_ in pairs), costs)
    methods = {d: build("drafter", d) for d, *_ in pairs}
    grown = {p: build("policy", p) for _, p, *_ in pairs}
    rule = None if acceptor is None else build("acceptor", acceptor)
    target = load()
    opened = {d: method.open(target) for d, method in methods.items()}
    return {(d, p): Engine(target, opened[d], grown[p], rule, known.get(d)) for d, p, *_ in pairs}


@dataclass
class Journal:
    """What a run has done so far, beside its output, so that an interrupted one can go on.

    Attributes:
        path: removed when the result was saved.
        key: what the run is; a journal of another run is started anew.
    """

    path: Path
    key: Mapping[str, Any]
    _begun: bool = field(default=False, init=False)

    def read(self, cells: Sequence[Cell]) -> list[dict[Cell, Written]]:
        """The prompts done, if the journal is of this run; a last line that was broken off is not counted."""
        lines = list(self._lines())
        if not lines or lines[0] != json.loads(json.dumps(self.key)):
            return []
        found = []
        with suppress(UserError), understood("what comes after it cannot be read"):
            for line in lines[1:]:
                found.append(dict(zip(cells, map(_written, line), strict=True)))
        self._begun = True
        write_text(self.path, "".join(map(_line, lines[: 1 + len(found)])))
        return found

    def add(self, done: Mapping[Cell, Written]) -> None:
        """Notes one prompt."""
        line = [[w.tokens, [astuple(s) for s in w.repeats]] for w in done.values()]
        if not self._begun:
            write_text(self.path, _line(self.key))
            self._begun = True
        append(self.path, _line(line))

    def remove(self) -> None:
        """Forgets it: the result is saved."""
        self.path.unlink(missing_ok=True)

    def _lines(self) -> Iterator[Any]:
        """Those before the first that was broken off."""
        if self.path.is_file():
            with suppress(UserError), understood("what comes after it cannot be read"):
                yield from map(json.loads, self.path.read_text("utf-8", errors="replace").splitlines())


def _line(said: Any) -> str:
    return json.dumps(said) + "\n"


def _written(line: Any) -> Written:
    tokens, repeats = line
    return Written(tokens, [_stats(*s) for s in repeats])


def _stats(
    tokens: int, steps: Sequence[Any], draft: float, verify: float, seconds: float, work: Sequence[Any], *rule: Any
) -> Stats:
    did = [Work(tuple(frontiers), *rest) for frontiers, *rest in work]
    return Stats(tokens, [Step(*step) for step in steps], draft, verify, seconds, did, *rule)


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs part, and how far apart the target's two best logits are there, as plain decoding sees them.

    In half precision a pass over many tokens rounds otherwise than a pass over one; a margin above that noise is a bug.
    """

    token: int
    margin: float


@dataclass(frozen=True)
class Comparison:
    """One text, and where it was asked for, the baseline's seconds for it and whether it wrote the same."""

    tokens: list[int]
    stats: Stats
    plain: Stats | None = None
    same_output: bool = True
    difference: Difference | None = None

    @property
    def speedup(self) -> float | None:
        """The ratio of tokens per second."""
        if self.plain is None or not self.plain.tokens_per_second:
            return None
        return self.stats.tokens_per_second / self.plain.tokens_per_second

    def as_json(self) -> dict[str, Any]:
        """The figures by the names of the command line."""
        if self.plain is None:
            return {"stats": self.stats.as_json()}
        seconds, speed = self.plain.seconds, self.plain.tokens_per_second
        baseline: dict[str, Any] = {"seconds": seconds, "tokens_per_second": speed, "same_output": self.same_output}
        if self.difference is not None:
            baseline["difference"] = asdict(self.difference)
        return {"stats": self.stats.as_json(), "baseline": baseline, "speedup": self.speedup}


def warm(
    engine: Engine, request: Request, sampling: Sampling, baseline: bool, tell: Callable[[str], None] = lambda _: None
) -> None:
    """Runs for a moment what is timed later, after measuring the costs that the policy asks for; tells what it measures."""
    if engine.policy.reads_costs and engine.costs is None:
        replace(engine, costs=UNIT).write([short(request)], sampling, reuse=False)  # mistakes are told before measuring
        engine.costs = measured(engine.target, engine.drafter, tell=tell)
    engine.write([short(request)], sampling, reuse=False)
    engine.held = engine.carried = None  # what is timed shall not find its own beginning
    if baseline:
        engine.plain([short(request)], sampling)


def compare(engine: Engine, request: Request, sampling: Sampling, first: Generation) -> Comparison:
    """A finished run beside the baseline: after it come plain, plain and another of ours; seconds are means.

    In that order a machine that slowly becomes faster or slower favours neither.
    """
    plain = [engine.plain([request], sampling) for _ in range(2)]
    engine.carried = None  # nor the first run's text
    runs = [first, engine.write([request], sampling, reuse=False)]
    written, base = (Written(g[0].tokens[0], [x.stats for x in g]) for g in (runs, plain))
    other = next((g.tokens[0] for g in (*runs, *plain) if g.tokens != plain[0].tokens), None)
    parted = None if other is None or not sampling.greedy else difference(engine.target, request, other, base.tokens)
    return Comparison(written.tokens, written.stats, base.stats, other is None, parted)


def difference(target: Target, request: Request, ours: Sequence[int], plain: Sequence[int]) -> Difference:
    """Where another greedy output leaves plain decoding's, and by what margin of its logits."""
    at = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), min(len(ours), len(plain)))
    text = np.array([*request.prompt, *plain[:at]], np.int64)
    logits = target.prefill(target.new_cache(1, len(text)), [text], Needs()).logits[0]
    best = processed(logits, request.processors, [*request.before, *text.tolist()]).topk(2).values
    return Difference(at, float(best[0] - best[1]))


def chosen(
    prompts: Sequence[Prompt], engine: Engine, max_new_tokens: int, limit: int | None, per_category: int | None = None
) -> tuple[list[Request], dict[str, int]]:
    """The requests to run, and by category how many prompts were left out because their text would not fit the context.

    Args:
        prompts: in the order of their file.
        engine: whose target and tokenizer it is about.
        max_new_tokens: for each of them.
        limit: the first so many of those that fit.
        per_category: before that, the first so many of each category.

    Raises:
        UserError: none fits.
    """
    context = engine.target.decoder.context
    asked = [Request(encode(engine.tokenizer, p.content), max_new_tokens, engine.eos, p.number) for p in prompts]
    fit = [(r, p.category) for r, p in zip(asked, prompts, strict=True) if len(r.prompt) + max_new_tokens <= context]
    if not fit:
        raise UserError(
            f"all {len(prompts)} prompts are too long: with {max_new_tokens} new tokens the shortest has "
            f"{min(len(r.prompt) for r in asked) + max_new_tokens}, allowed is the target's context of {context}"
        )
    check([request for request, _ in fit], engine.target)
    left_out = Counter(p.category for p in prompts) - Counter(category for _, category in fit)
    if per_category is not None:
        at = [Counter(c for _, c in fit[:i])[category] for i, (_, category) in enumerate(fit)]  # how many came before it
        fit = [f for f, before in zip(fit, at, strict=True) if before < per_category]
    return [request for request, _ in fit[:limit]], dict(left_out)
