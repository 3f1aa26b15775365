"""Benchmark plain decoding and every pairing side by side, one text at a time.

No cache is reused between runs, whoever comes first changes from prompt to prompt, and all of it
happens in one process. What a drafter keeps over a session goes from prompt to prompt, within its
own cell.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from draftree.batch import Generation
from draftree.cost_estimate import learnt_costs
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.drafters.base import Drafter
from draftree.engine import Engine, cache_of, common_prefix_length, generate_plain
from draftree.evaluation.compare import shorten_request
from draftree.evaluation.grid import QUESTION_STRIDE, Cell, PromptResult, Quality
from draftree.evaluation.oracle import correct_tokens
from draftree.evaluation.resume import Journal
from draftree.evaluation.target_trace import Recording, TokenText
from draftree.evaluation.teacher_forcing import Source, drive
from draftree.evaluation.trace_store import Recordings
from draftree.measure_costs import reliable_costs
from draftree.models.kv_cache import SlotCache
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.tree import Ints
from draftree.utils.progress_callback import Tell, ignore_progress

TEXTS_PER_BATCH = 8
"""Number of texts that are replayed in one batch when a drafter's quality is measured."""
SAMPLED_TEXTS = 16
"""Number of texts that are sampled for measuring the overlap if the run has no temperature 1."""


@dataclass(frozen=True)
class Bench:
    """Run a benchmark: generate the texts of requests with every cell, and time them.

    Attributes:
        cells: combinations of drafter, policy, acceptor and temperature to measure, including the
            baseline for each temperature.
        engines: engines by (spec of the drafter, spec of the policy).
        requests: requests, one for each prompt.
        seed: seed of sampling.
        repeats: number of times each text is generated.
        top_p: least mass of likeliest tokens that is sampled from, above temperature 0.
        recordings: recordings of the texts if they are replayed; None if they are generated.
        read: costs by drafter that the policies read, if they are not those by which the result is
            counted; empty otherwise.
        sessions: each cell's engine after its last prompt; its drafter keeps what it remembers for
            the next prompt.
        plains: token ids and cache of each baseline's last text, for later questions of the same
            conversation.
    """

    cells: Sequence[Cell]
    engines: Mapping[tuple[str, str], Engine]
    requests: Sequence[Request]
    seed: int = 0
    repeats: int = 1
    top_p: float = 1.0
    recordings: Recordings | None = None
    read: Mapping[str, Costs | CostTable] = field(default_factory=dict)
    sessions: dict[Cell, Engine] = field(default_factory=dict)
    plains: dict[Cell, tuple[tuple[int, ...], SlotCache]] = field(default_factory=dict)
    _written: list[TokenText] = field(default_factory=list)

    @property
    def target(self) -> Target:
        """Return the target of all engines."""
        return next(iter(self.engines.values())).target

    def write(self, cell: Cell, request: Request, last: bool = False) -> Generation:
        """Generate the text of one request with the drafter, policy and temperature of one cell.

        If `last` is true, this is the last repeat, and the drafter may remember the text.
        """
        request, follows = (
            self.at_temperature(request, cell.temperature),
            request.number >= QUESTION_STRIDE and self.recordings is None,
        )
        target = self.target if self.recordings is None else self.recordings.source(request)
        if cell.drafter is None or cell.policy is None:
            return (
                self._plain(cell, request, follows)
                if self.converses
                else generate_plain(target, [request])
            )
        if (session := self.sessions.get(cell)) is None:
            acceptor = None if cell.acceptor is None else build("acceptor", cell.acceptor)
            session = replace(self.engines[cell.drafter, cell.policy], acceptor=acceptor)
        if follows:  # a conversation's later question: the caches hold what came before it
            return session.write([request])
        # No text finds itself in what the warm-up, another cell or an earlier repeat has left
        # behind.
        engine = replace(session, target=target, learned=dict(session.learned))
        written = engine.write([request], reuse=False)
        if last:
            self.sessions[cell] = (
                engine if self.converses else replace(engine)
            )  # without the caches
        return written

    @property
    def converses(self) -> bool:
        """Return whether any request is a later question of a conversation, which needs caches."""
        return self.recordings is None and any(r.number >= QUESTION_STRIDE for r in self.requests)

    def _plain(self, cell: Cell, request: Request, follows: bool) -> Generation:
        """Run plain decoding with the cache that the conversation's earlier turns have left."""
        text, cache = self.plains.get(cell, ((), None))
        if follows and cache is not None and self.target.reuses_prefixes:
            cache.truncate(
                np.minimum(common_prefix_length(text, request.prompt[:-1]), cache.reusable)
            )
        else:
            cache = cache_of(self.target, [request])
        written = generate_plain(self.target, [request], cache=cache)
        self.plains[cell] = (*request.prompt, *written.tokens[0][:-1]), cache
        return written

    def at_temperature(self, request: Request, temperature: float) -> Request:
        """Return a copy of the request with the given temperature and the run's seed."""
        chosen = Sampling(temperature=temperature, top_p=self.top_p, seed=self.seed)
        return replace(request, sampling=chosen)

    def prompt(self, index: int) -> dict[Cell, PromptResult]:
        """Run all cells on one prompt, and return the result of each cell.

        The prompt is run `repeats` times. The order of the cells rotates by one in each repeat.
        """
        request = self.requests[index]
        done: dict[Cell, list[Generation]] = {cell: [] for cell in self.cells}
        for repeat in range(self.repeats):
            first = (index * self.repeats + repeat) % len(self.cells)
            for cell in [*self.cells[first:], *self.cells[:first]]:
                done[cell].append(self.write(cell, request, last=repeat == self.repeats - 1))
        return {
            cell: PromptResult(g[0].tokens[0], [x.stats for x in g]) for cell, g in done.items()
        }

    @property
    def prices(self) -> dict[str, Costs | CostTable]:
        """Return the costs by drafter: the fixed costs, or those learnt on this machine so far."""
        return {
            d: e.costs or learnt_costs(e.target, e.drafter).table()
            for (d, _), e in self.engines.items()
        }

    def quality(
        self, drafter: str, done: Sequence[Mapping[Cell, PromptResult]], costs: Costs | CostTable
    ) -> Quality:
        """Measure a drafter's overlap with the target, its relative cost, and its reach.

        The overlap is measured along texts sampled at temperature 1. It is the α of Leviathan et
        al.: the share of drafts that rejection sampling accepts at temperature 1. The reach of a
        token is the number of tokens in a row that the drafter proposes correctly after it. It is
        measured along the baseline's texts at the first temperature.
        """
        engine = next(e for (d, _), e in self.engines.items() if d == drafter)
        reach: list[Ints] = [np.zeros(0, np.int64)] * len(done)
        carried = None
        first = next(c for c in self.cells if c.plain)
        for numbers, source, texts in self._along(
            engine.drafter, self._texts(first, done), first.temperature
        ):
            several, carried = correct_tokens(source, engine.drafter, texts, carried)
            for i, found in zip(numbers, several, strict=True):
                reach[i] = found
        sampled = self._along(engine.drafter, self.sampled_texts(done), 1.0)
        places = [drive(source, engine.drafter, texts) for _, source, texts in sampled]
        overlap = float(np.concatenate([p.overlap for p in places]).mean()) if places else None
        return Quality(overlap, costs.ratio, tuple(reach))

    def sampled_texts(self, done: Sequence[Mapping[Cell, PromptResult]]) -> list[TokenText]:
        """Return texts that the target samples at temperature 1.

        They come from the run if temperature 1 is part of it. Otherwise they are generated once.
        """
        if (
            cell := next((c for c in self.cells if c.plain and c.temperature == 1), None)
        ) is not None:
            return self._texts(cell, done)
        if not self._written:
            asked = [self.at_temperature(r, 1.0) for r in self.requests[:SAMPLED_TEXTS]]
            for at in range(0, len(asked), TEXTS_PER_BATCH):
                several = asked[at : at + TEXTS_PER_BATCH]
                self._written.extend(
                    map(_as_token_text, several, generate_plain(self.target, several).tokens)
                )
        return self._written

    def _texts(self, cell: Cell, done: Sequence[Mapping[Cell, PromptResult]]) -> list[TokenText]:
        """Return the texts that a baseline cell generated, in the order of the prompts."""
        return [
            _as_token_text(request, written[cell].tokens)
            for request, written in zip(self.requests, done, strict=True)
        ]

    def _along(
        self, drafter: Drafter[Any], found: Sequence[TokenText], temperature: float
    ) -> Iterator[tuple[list[int], Source, list[TokenText]]]:
        """Yield batches (indices, source, texts) of the texts that are long enough to draft for.

        The source provides the target's hidden states: it is the target itself, or a recording.

        Args:
            drafter: the drafter.
            found: the texts, in the order of the requests.
            temperature: the temperature at which the texts were generated.
        """
        long = [i for i, text in enumerate(found) if len(text.tokens) > text.start + 1]
        if self.recordings is not None and any(
            c.plain and c.temperature == temperature for c in self.cells
        ):
            for i in long:
                yield (
                    [i],
                    self.recordings.recording(self.at_temperature(self.requests[i], temperature)),
                    [found[i]],
                )
            return
        together = (
            1 if drafter.remembers else TEXTS_PER_BATCH
        )  # what is learnt of a text is for those after it
        for at in range(0, len(long), together):
            texts = [found[i] for i in long[at : at + together]]
            source = (
                self.target
                if not drafter.replayable
                else Recording.of(self.target, texts, drafter.needs.hidden)
            )
            yield long[at : at + together], source, texts

    def remember(self, requests: Sequence[Request]) -> None:
        """Generate the texts of earlier requests again for drafters and policies to learn from.

        The memory of drafters and policies is not saved, nor are the caches of a conversation, so a
        resumed run has to rebuild them.
        """
        conversation = self._earlier_turns(requests)
        for cell in self.cells:
            engine = self.engines.get((cell.drafter or "", cell.policy or ""))
            learns = engine is not None and (
                engine.drafter.remembers or engine.policy.start() is not None
            )
            for request in requests if learns else conversation:
                self.write(cell, request, last=True)

    def _earlier_turns(self, done: Sequence[Request]) -> list[Request]:
        """Return the finished requests that belong to the conversation of the next request."""
        following = self.requests[len(done) :]
        if not self.converses or not following or following[0].number < QUESTION_STRIDE:
            return []
        return [r for r in done if (following[0].number - r.number) % QUESTION_STRIDE == 0]

    def warm(self) -> None:
        """Generate a few tokens with every cell as a warm-up before timing.

        A cell is a combination of drafter, policy, acceptor and temperature.
        """
        for cell in self.cells:
            self.write(cell, shorten_request(self.requests[0]))

    def run(
        self, journal: Journal, advance: Callable[[int], None] = lambda _: None
    ) -> list[dict[Cell, PromptResult]]:
        """Run all prompts that the journal does not contain, and return the results by prompt."""
        if self.recordings is None:
            self.warm()
        done = journal.read(self.cells)[: len(self.requests)]
        self.remember(self.requests[: len(done)])
        for index in range(len(self.requests)):
            if index >= len(done):
                done.append(self.prompt(index))
                journal.add(done[-1])
            advance(index + 1)
        return done


def _as_token_text(request: Request, written: Sequence[int]) -> TokenText:
    """Return the prompt and the generated tokens as one text."""
    return TokenText(np.array([*request.prompt, *written], np.int64), len(request.prompt))


def with_fixed_costs(
    engines: Mapping[tuple[str, str], Engine], tell: Tell = ignore_progress
) -> dict[tuple[str, str], Engine]:
    """Return the engines with fixed costs: their own costs, or those learnt on this machine.

    Learnt costs are read after all drafters have been measured. All drafters then share one cost
    curve of the target.
    """
    known = {drafter: engine.costs for (drafter, _), engine in engines.items()}
    learnt = {d: e for (d, _), e in engines.items() if e.costs is None}
    for drafter, engine in learnt.items():
        named = lambda done, remark="", of=None, drafter=drafter: tell(
            done, f"{drafter}: {remark}", of
        )
        reliable_costs(engine.target, engine.drafter, named)
    known |= {
        drafter: learnt_costs(engine.target, engine.drafter).table()
        for drafter, engine in learnt.items()
    }
    return {pair: replace(engine, costs=known[pair[0]]) for pair, engine in engines.items()}
