"""Benchmarks the plain baseline and every cell side by side, one text at a time.

No cache is reused between runs, whoever comes first changes from prompt to prompt, and all of it happens in one process.
What a drafter keeps over a session goes from prompt to prompt, within its own cell.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from draftree.boundary.progress import Tell, silent
from draftree.costs import Costs, CostTable
from draftree.engine import Engine
from draftree.evaluation.cells import Cell, PromptResult, Quality
from draftree.evaluation.compare import short
from draftree.evaluation.driven import Text, drive
from draftree.evaluation.journal import Journal
from draftree.models.target import Target
from draftree.registry import build
from draftree.request import Request
from draftree.rows import Generation
from draftree.sampling.settings import Sampling
from draftree.timing import measured

TOGETHER = 8
"""Texts along which a drafter is driven at a time."""


@dataclass(frozen=True)
class Bench:
    """A benchmark: cells, engines and requests.

    Attributes:
        cells: the baseline of each temperature among them.
        engines: by (drafter, policy).
        requests: one for each prompt.
        seed: of the draws.
        repeats: how often each text is written.
        sessions: each cell's engine behind its last prompt, with what its drafter keeps from prompt to prompt.
    """

    cells: Sequence[Cell]
    engines: Mapping[tuple[str, str], Engine]
    requests: Sequence[Request]
    seed: int = 0
    repeats: int = 1
    sessions: dict[Cell, Engine] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        """The target of all of them."""
        return next(iter(self.engines.values())).target

    def write(self, cell: Cell, request: Request, last: bool = False) -> Generation:
        """One text by one cell; after the last of its repeats the drafter may remember it."""
        sampling = Sampling(temperature=cell.temperature, seed=self.seed)
        if cell.drafter is None or cell.policy is None:
            return next(iter(self.engines.values())).plain([request], sampling)
        if (session := self.sessions.get(cell)) is None:
            acceptor = None if cell.acceptor is None else build("acceptor", cell.acceptor)
            session = replace(self.engines[cell.drafter, cell.policy], acceptor=acceptor)
        engine = replace(session)  # no text finds itself in what another cell, or an earlier repeat, has left behind
        written = engine.write([request], sampling, reuse=False)
        if last:
            self.sessions[cell] = replace(engine)  # without the caches
        return written

    def prompt(self, index: int) -> dict[Cell, PromptResult]:
        """All cells on one prompt; each repeat starts with another cell."""
        request = self.requests[index]
        done: dict[Cell, list[Generation]] = {cell: [] for cell in self.cells}
        for repeat in range(self.repeats):
            first = (index * self.repeats + repeat) % len(self.cells)
            for cell in [*self.cells[first:], *self.cells[:first]]:
                done[cell].append(self.write(cell, request, last=repeat == self.repeats - 1))
        return {cell: PromptResult(g[0].tokens[0], [x.stats for x in g]) for cell, g in done.items()}

    @property
    def prices(self) -> dict[str, Costs | CostTable]:
        """The cost model of each drafter, where that is known."""
        return {d: e.costs for (d, _), e in self.engines.items() if e.costs is not None}

    def quality(self, drafter: str, done: Sequence[Mapping[Cell, PromptResult]], costs: Costs | CostTable) -> Quality:
        """A drafter's overlap with the target and its relative cost, along the texts that plain decoding wrote."""
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
        """Writes again, for a run that goes on, what cells learn from: what a drafter or a policy keeps is not saved."""
        for (drafter, policy), engine in self.engines.items():
            if engine.drafter.remembers or engine.policy.start() is not None:
                for cell in (c for c in self.cells if (c.drafter, c.policy) == (drafter, policy)):
                    for request in requests:
                        self.write(cell, request, last=True)

    def run(self, journal: Journal, advance: Callable[[int], None] = lambda _: None) -> list[dict[Cell, PromptResult]]:
        """All prompts, in order; those in the journal are not run again."""
        for cell in self.cells:  # the warm-up
            self.write(cell, short(self.requests[0]))
        done = journal.read(self.cells)[: len(self.requests)]
        self.remember(self.requests[: len(done)])
        for index in range(len(self.requests)):
            if index >= len(done):
                done.append(self.prompt(index))
                journal.add(done[-1])
            advance(index + 1)
        return done


def priced(engines: Mapping[tuple[str, str], Engine], tell: Tell = silent) -> dict[tuple[str, str], Engine]:
    """The same engines with the costs that were given for their drafter, or else this machine's."""
    known = {drafter: engine.costs for (drafter, _), engine in engines.items()}
    for (drafter, _), engine in engines.items():
        named = lambda done, remark="", of=None, drafter=drafter: tell(done, f"{drafter}: {remark}", of)
        known[drafter] = known[drafter] or measured(engine.target, engine.drafter, tell=named)
    return {pair: replace(engine, costs=known[pair[0]]) for pair, engine in engines.items()}
