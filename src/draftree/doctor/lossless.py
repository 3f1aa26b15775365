"""Check that the output equals the target's own for given prompts.

Texts are compared with plain decoding's token for token where a rule promises them: in greedy
decoding, and for the same seed. A rule that promises no more than the distribution is put to a
two-sample test of the tokens that come behind a fixed root. Passes of different width round
differently, which nobody can help: how much is measured beside the comparison, with the stock model
and no mask of ours, so that a fault in a verification cannot excuse itself.

Shapes: n tokens of a text, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftree.costs.curves import UNIT_COSTS, Costs, CostTable
from draftree.data.prompts import encode
from draftree.doctor import lossless_report
from draftree.doctor.chi_square import critical_value, detectable_distance, two_sample_test
from draftree.doctor.lossless_cases import Case
from draftree.doctor.lossless_report import ComparedCase, FirstDifference, FrequencyTest, Report
from draftree.doctor.numerical_noise import (
    COUNTED_TOKENS,
    Noise,
    OutputRecorder,
    Root,
    frequency_distance,
    logit_shift,
    margin_at_difference,
    measure_noise,
    most_uncertain_root,
    sample_plain,
    sample_speculative,
)
from draftree.drafters.base import Drafter
from draftree.engine import Engine, common_prefix_length
from draftree.errors import UserError
from draftree.evaluation import suites
from draftree.evaluation.teacher_forcing import (
    DEFAULT_TEXTS,
    DEFAULT_TOKENS,
    prompts_that_fit,
    read_texts,
    take_evenly,
)
from draftree.request import Request
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.utils.progress_callback import Tell, ignore_progress
from draftree.utils.validated_dataclass import Knobs, knob

ERROR_LEVEL = 1e-3
"""Probability that at least one frequency test of a report fails by chance."""
DETECTION_POWER = 0.99
"""Probability with which a frequency test detects an error of the size that the report states."""
MAX_BATCH = 40
"""Largest number of trials in one batch."""
Drawn = list[tuple[int, ...]]
"""Tokens that each trial generated after a root."""


@dataclass(frozen=True)
class Extent(Knobs):
    """Set the extent of a test for losslessness.

    Attributes:
        max_new_tokens: largest number of new tokens in each text.
        seeds: number of seeds with which texts are generated at each temperature above 0.
        trials: number of draws after all roots together, with plain decoding and with each
            acceptor.
        roots: number of roots after which tokens are drawn, each in another text.
        seed: first seed; the others follow it.

    Raises:
        UserError: a value is out of its range.
    """

    max_new_tokens: int = knob(DEFAULT_TOKENS, least=1)
    seeds: int = knob(2, least=1)
    trials: int = knob(2000, least=100)
    roots: int = knob(2, least=1)
    seed: int = knob(0, least=0)


def load_prompts(
    target: Target,
    data: Path | None = None,
    count: int = DEFAULT_TEXTS,
    tokens: int = DEFAULT_TOKENS,
) -> list[list[int]]:
    """Return the token ids of the prompts: those in a file, or shipped prompts.

    Args:
        target: target whose tokenizer is used.
        data: file in a format that `teacher_forcing.read` accepts; None for shipped prompts.
        count: largest number of prompts; they are spread evenly over all available ones.
        tokens: number of tokens that will be generated after each prompt.

    Raises:
        UserError: the file cannot be read, or no prompt fits the target's context.
    """
    if data is not None:
        found = [t.tokens[: t.start].tolist() for t in read_texts(target, data, count, tokens)]
    else:
        found = [encode(target.tokenizer, p.content) for p in suites.load("demo").prompts]
    return take_evenly(prompts_that_fit(found, target, tokens), count)


def examine(
    target: Target,
    drafter: Drafter[Any],
    prompts: Sequence[Sequence[int]],
    chosen: Sequence[Case],
    extent: Extent = Extent(),
    costs: Costs | CostTable = UNIT_COSTS,
    tell: Tell = ignore_progress,
) -> Report:
    """Test whether the output with drafts equals the output of the target alone.

    Args:
        target: the target.
        drafter: drafter that was opened for this target.
        prompts: token ids of each prompt.
        chosen: cases to test; see `cases`.
        extent: number of texts, seeds and trials.
        costs: costs for policies that read them.
        tell: called with the number of finished runs and batches, the next work, and the total.

    Raises:
        UserError: a prompt cannot be generated from, such as one that exceeds the context.
    """
    work = _Work(
        target, [(c, Engine(target, drafter, c.grown, c.rule, costs)) for c in chosen], extent, tell
    )
    if work.drawn:
        critical_value(1, ERROR_LEVEL)  # report a missing package before texts are generated
    work.total = work.size(len(prompts))
    for number, prompt in enumerate(prompts):
        work.compare(number, list(prompt))
    work.draw()
    return work.report(drafter.description, len(prompts))


@dataclass
class _Work:
    """Store the state of a test for losslessness while it runs."""

    target: Target
    pairs: list[tuple[Case, Engine]]
    extent: Extent
    tell: Tell
    total: int = 0
    done: int = 0
    noise: Noise = field(default_factory=Noise)
    roots: list[Root] = field(default_factory=list)
    compared: dict[str, ComparedCase] = field(default_factory=dict)
    tests: list[FrequencyTest] = field(default_factory=list)

    @property
    def drawn(self) -> list[tuple[Case, Engine]]:
        """Return the cases that are tested by the frequencies of drawn tokens."""
        return [(c, e) for c, e in self.pairs if not c.keeps_text]

    def followed(self, temperature: float) -> list[tuple[Case, Engine]]:
        """Return the cases at a temperature whose texts are compared token by token."""
        return [(c, e) for c, e in self.pairs if c.keeps_text and c.temperature == temperature]

    @property
    def runs(self) -> list[Sampling]:
        """Return the sampling settings with which each prompt is continued.

        If no texts are compared, it is continued greedily, because noise and roots are needed
        anyway.
        """
        temperatures = dict.fromkeys(c.temperature for c, _ in self.pairs if c.keeps_text) or [0.0]
        return [
            Sampling(t, seed=self.extent.seed + i)
            for t in temperatures
            for i in range(self.extent.seeds if t else 1)
        ]

    def size(self, texts: int) -> int:
        """Return the total number of runs and batches for the given number of texts."""
        runs = sum(1 + len(self.followed(s.temperature)) for s in self.runs)
        batches = sum(
            len(self.numbers(i, min(self.extent.roots, texts)))
            for i in range(min(self.extent.roots, texts))
        )
        return texts * runs + batches * (
            len(self.drawn) + len({c.temperature for c, _ in self.drawn})
        )

    def advance(self, what: str) -> None:
        self.tell(self.done, what, self.total)
        self.done += 1

    def compare(self, text: int, prompt: list[int]) -> None:
        """Continue one prompt with plain decoding and in all cases, and compare the texts."""
        request = Request(
            prompt, self.extent.max_new_tokens, self.target.eos, text, keep_scores=True
        )
        best: Root | None = None
        for sampling in self.runs:
            self.advance(f"plain decoding, T = {sampling.temperature:g}")
            base = OutputRecorder()
            self.pairs[0][1].plain([request], sampling, base)
            self.noise = self.noise.joined(measure_noise(self.target, prompt, base))
            best = best or most_uncertain_root(text, prompt, base)
            for case, engine in self.followed(sampling.temperature):
                self.advance(case.name)
                ours = OutputRecorder()
                engine.write([request], sampling, ours, reuse=False)
                self.note(case.name, request, sampling, base, ours)
        self.roots += [] if best is None else [best]

    def note(
        self,
        name: str,
        request: Request,
        sampling: Sampling,
        base: OutputRecorder,
        ours: OutputRecorder,
    ) -> None:
        """Record the comparison of one text with plain decoding's."""
        before = self.compared.get(name, ComparedCase(name, 0, 0, (), 0.0))
        at, parted = common_prefix_length(base.tokens, ours.tokens), before.parted
        if base.tokens != ours.tokens:
            root = np.array([len(request.prompt) - 1 + at])
            margin = margin_at_difference(
                base, ours, at, sampling, Keyed(sampling.seed, np.array([request.number]), root)
            )
            token = [h.tokens[at] if at < len(h.tokens) else None for h in (base, ours)]
            parted += (
                FirstDifference(request.number, sampling.seed, at, token[0], token[1], margin),
            )
        alike = min(at + 1, len(base.tokens), len(ours.tokens))  # logits after the same text
        shift = max(before.shift, logit_shift(base.raw(alike), ours.raw(alike)))
        self.compared[name] = ComparedCase(
            name, before.texts + 1, before.tokens + len(base.tokens), parted, shift
        )

    def draw(self) -> None:
        """Draw tokens after the roots, and run all frequency tests."""
        if self.drawn and not self.roots:
            raise UserError(
                "every text ends with its first token, so no second token can be drawn; give other prompts"
            )
        self.roots = sorted(self.roots, key=lambda r: r.distance)[: self.extent.roots]
        for temperature in dict.fromkeys(c.temperature for c, _ in self.drawn):
            # Each has its own seed: with the same one, both samples would follow the same noise.
            first, second = (Sampling(temperature, seed=self.extent.seed + i) for i in (0, 1))
            plain = [
                sample_plain(self.target, r, first, self.batches(i, "plain sampling"))
                for i, r in enumerate(self.roots)
            ]
            for case, engine in self.drawn:
                if case.temperature == temperature:
                    ours = [
                        sample_speculative(engine, r, second, self.batches(i, case.name))
                        for i, r in enumerate(self.roots)
                    ]
                    self.tests += [
                        self.tested(case, plain, ours, look) for look in (1, COUNTED_TOKENS)
                    ]

    def numbers(self, root: int, roots: int) -> list[range]:
        """Return the trials after one root, as a list with a range of trial indices for each batch.

        Args:
            root: index of the root.
            roots: number of roots, among which all trials are divided evenly.
        """
        first, end = (self.extent.trials * i // roots for i in (root, root + 1))
        rows = math.ceil(
            (end - first) / math.ceil((end - first) / MAX_BATCH)
        )  # batches of one size go on in one another's caches
        return [range(n, min(n + rows, end)) for n in range(first, end, rows)]

    def batches(self, root: int, what: str) -> Iterator[range]:
        """Yield the numbers of the trials after a root, batch by batch, and report the progress."""
        for numbers in self.numbers(root, len(self.roots)):
            self.advance(f"{what}: {numbers[0]:,} of {self.extent.trials:,} trials")
            yield numbers

    def tested(
        self, case: Case, plain: Sequence[Drawn], ours: Sequence[Drawn], look: int
    ) -> FrequencyTest:
        """Test whether two samples have the same distribution.

        A sample contains the tokens that were drawn after every root. `look` is the number of
        tokens after a root that are counted together.
        """
        counted = [
            Counter((i, *s[:look]) for i, drawn in enumerate(sample) for s in drawn)
            for sample in (ours, plain)
        ]
        outcomes = sorted(counted[0] | counted[1])
        a, b = (np.array([c[o] for o in outcomes], np.float64) for c in counted)
        found = two_sample_test(a, b)
        trials, others = (sum(counts.values()) for counts in counted)
        n = trials * others // (trials + others)
        least = (
            detectable_distance(n, found.dof, self.level, DETECTION_POWER) if found.dof else None
        )
        return FrequencyTest(
            case.name, look, trials, *found, *frequency_distance(a, b), least, not case.rule.lossy
        )

    @property
    def level(self) -> float:
        """Return the p-value below which a single test fails."""
        return ERROR_LEVEL / max(2 * sum(not c.rule.lossy for c, _ in self.drawn), 1)

    def report(self, drafter: str, texts: int) -> Report:
        dtype = self.target.decoder.dtype
        allowed = self.noise.allowed(dtype)
        compared = tuple(self.compared.values())
        findings = [
            lossless_report.compare_plain(dtype, self.noise),
            lossless_report.noise_finding(self.noise, allowed),
        ]
        findings += [lossless_report.text_verdict(c, allowed) for c in compared]
        for case, _ in self.drawn:
            tests = [t for t in self.tests if t.case == case.name]
            findings.append(lossless_report.frequency_verdict(case, tests, self.level, self.noise))
        lossy = tuple(c.name for c, _ in self.drawn if c.rule.lossy)
        return Report(
            self.target.name,
            drafter,
            texts,
            self.noise,
            allowed,
            self.level,
            tuple(findings),
            compared,
            tuple(self.tests),
            lossy,
        )
