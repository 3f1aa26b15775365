"""The result of an examination of the output: comparisons, frequency tests, and verdicts on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftree.doctor.cases import Case
from draftree.doctor.findings import APART, HALF, Finding, Said, finite
from draftree.doctor.noise import Noise


@dataclass(frozen=True)
class Parted:
    """The first difference of a text from plain decoding's.

    Attributes:
        text: the number of its prompt.
        seed: of the run.
        token: the first that differs, counted from 0.
        plain: the token that plain decoding chose there; None where it had ended.
        ours: the token that came instead.
        margin: by how much plain decoding preferred its own, in logits: ∞ where it could never have
            chosen ours.
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
        shift: how much a verification's logits differ from plain decoding's behind the same text,
            at most; see `shifts`.
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
        detectable: the total variation that would have been found, with probability `SURE`,
            whatever its shape; None where the tokens are too certain to tell anything.
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
    """The result of an examination of the output.

    Attributes:
        target: its name.
        drafter: what it is.
        texts: how many prompts there were.
        noise: between passes of different width.
        allowed: the largest difference of logits that it explains.
        level: below it a p-value is too small, so that all tests together fail by chance with
            probability `LEVEL`.
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
        """Return whether a rule that promises it was tested and noise explains all findings."""
        return self.promised and all(f.verdict != "bad" for f in self.findings)

    @property
    def promised(self) -> bool:
        """Return whether any tested rule promises plain decoding's texts or their distribution."""
        return bool(self.compared) or any(f.exact for f in self.frequencies)

    @property
    def parted(self) -> tuple[tuple[str, Parted], ...]:
        """Every text that differs, with its case."""
        return tuple((c.case, p) for c in self.compared for p in c.parted)

    @property
    def summary(self) -> str:
        """The verdict in a line."""
        said = [f"{name} is lossy by design" for name in self.lossy]
        if not self.lossless:
            nobody = [] if self.promised else ["nothing that was asked for promises it"]
            wrong = [*(f.name for f in self.findings if f.verdict == "bad"), *nobody]
            return "; ".join([f"NOT lossless: {'; '.join(wrong)}", *said])
        texts, parted = sum(c.texts for c in self.compared), len(self.parted)
        told = [f"{texts - parted} of {texts} texts the same as plain decoding's"] if texts else []
        told += (
            [f"{parted} parted where the margin is within the numerical noise"] if parted else []
        )
        tests = sum(f.exact for f in self.frequencies)
        told += [f"{tests} of {tests} frequency tests passed"] if tests else []
        return "; ".join([f"lossless: {', '.join(told)}", *said])

    def as_json(self) -> dict[str, Any]:
        """All of it; a figure that is no finite number is null."""
        return finite(self) | {"lossless": self.lossless, "summary": self.summary}


def plain(dtype: torch.dtype, found: Noise) -> Finding:
    """Plain decoding beside the stock model."""
    limit = APART.get(dtype, HALF)
    text = f"its probabilities and those of one pass of the stock model over the text differ by at most {found.p:.1g}"
    verdict: Said = "ok" if found.p <= limit else "bad" if dtype in APART else "warn"
    return Finding(
        "plain decoding",
        found.p,
        verdict,
        text if verdict == "ok" else f"{text}; noise is below {limit:.0e}",
    )


def noisy(found: Noise, allowed: float) -> Finding:
    """Return the finding on how far logits depend on the width of a pass."""
    text = f"passes of different width move logits by up to {found.logits:.1g}; differences up to {allowed:.1g} count as that"
    return Finding("noise", found.logits, "ok", text)


def texts(found: Compared, allowed: float) -> Finding:
    """Return a verdict on texts."""
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


def frequencies(case: Case, tests: Sequence[Frequencies], level: float, found: Noise) -> Finding:
    """Return a verdict on a rule that is tested by frequencies."""
    if case.rule.lossy:
        return _lossy(case, tests)
    worst = min(tests, key=lambda t: t.p_value)
    told = f"smallest p-value of {len(tests)} tests, {tests[0].trials:,} trials each"
    rejected = [t for t in tests if t.p_value < level]
    if any(t.distance - t.chance > found.tv for t in rejected):
        far = max(rejected, key=lambda t: t.distance - t.chance)
        told += f"; below {level:.1g}: the next {_tokens(far.look)} {'comes' if far.look == 1 else 'come'} otherwise than in "
        told += f"plain sampling, {far.distance:.2f} apart where chance makes {far.chance:.2f}"
        return Finding(case.name, worst.p_value, "bad", told)
    if rejected:
        return Finding(
            case.name,
            worst.p_value,
            "warn",
            f"{told}; below {level:.1g}, but no further apart than noise makes",
        )
    reach = tests[0].detectable
    if reach is None:
        return Finding(
            case.name,
            worst.p_value,
            "warn",
            f"{told}; the next token is too certain for anything to be found",
        )
    told += f"; an error of {reach:.2f} (total variation) in the next token would be found"
    return Finding(
        case.name, worst.p_value, "ok", f"{told}; {case.instead}" if case.instead else told
    )


def _lossy(case: Case, tests: Sequence[Frequencies]) -> Finding:
    """Return the verdict on a rule that promises nothing."""
    far = max(tests, key=lambda t: t.distance - t.chance)
    verb = "is" if far.look == 1 else "are"
    told = f"lossy by design: the next {_tokens(far.look)} {verb} {far.distance:.2f} (total variation) from plain sampling's"
    return Finding(case.name, far.distance, "warn", f"{told}; chance makes {far.chance:.2f}")


def _tokens(look: int) -> str:
    return "token" if look == 1 else f"{look} tokens"
