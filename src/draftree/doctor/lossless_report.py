"""The report of the lossless check: comparisons, frequency tests and verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftree.doctor.finding import HALF, PROBABILITY_NOISE, Finding, Said, nan_to_null
from draftree.doctor.lossless_cases import Case
from draftree.doctor.numerical_noise import Noise


@dataclass(frozen=True)
class FirstDifference:
    """Store the first difference between a text and plain decoding's.

    Attributes:
        text: number of the prompt.
        seed: seed of the run.
        token: index of the first new token that differs, from 0.
        plain: plain decoding's token at this index; None if its text had ended.
        ours: the other text's token at this index; None if it had ended.
        margin: difference of plain decoding's logits for the two tokens; ∞ if it could not have
            chosen the other token.
    """

    text: int
    seed: int
    token: int
    plain: int | None
    ours: int | None
    margin: float


@dataclass(frozen=True)
class ComparedCase:
    """Store the comparison of one case's texts with plain decoding's.

    Attributes:
        case: name of the case.
        texts: number of texts that were compared.
        tokens: number of tokens in plain decoding's texts.
        parted: the first difference of each text that differs.
        shift: largest difference between the logits of a verification and of plain decoding after
            the same tokens; see `shifts`.
    """

    case: str
    texts: int
    tokens: int
    parted: tuple[FirstDifference, ...]
    shift: float


@dataclass(frozen=True)
class FrequencyTest:
    """Store one χ² test of whether tokens are as frequent as in plain sampling.

    Attributes:
        case: name of the case.
        look: number of tokens after a root that were counted together.
        trials: number of trials in each of the two samples, over all roots.
        statistic: value of χ².
        dof: degrees of freedom.
        p_value: probability of a statistic of at least this size if both distributions are equal.
        distance: total variation distance between the two samples.
        chance: expected value of `distance` if both distributions are equal.
        detectable: total variation distance from which on an error would have been detected with
            probability `SURE`; None if the tokens are too certain for a test.
        exact: whether the acceptor guarantees the target's distribution.
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
    """Store the result of a test for losslessness.

    Attributes:
        target: name of the target.
        drafter: description of the drafter.
        texts: number of prompts.
        noise: rounding differences between passes over different numbers of tokens.
        allowed: largest difference of logits that noise explains.
        level: p-value below which a single test fails. It is chosen so that the probability of any
            failure by chance is at most `LEVEL`.
        findings: verdicts on plain decoding, on its noise, and then on each case.
        compared: comparisons of texts, one for each case.
        frequencies: all frequency tests.
        lossy: names of the cases whose acceptors guarantee nothing.
    """

    target: str
    drafter: str
    texts: int
    noise: Noise
    allowed: float
    level: float
    findings: tuple[Finding, ...]
    compared: tuple[ComparedCase, ...]
    frequencies: tuple[FrequencyTest, ...]
    lossy: tuple[str, ...]

    @property
    def lossless(self) -> bool:
        """Return whether an exact acceptor was tested, and noise explains all differences."""
        return self.promised and all(f.verdict != "bad" for f in self.findings)

    @property
    def promised(self) -> bool:
        """Return whether any tested acceptor guarantees the target's texts or distribution."""
        return bool(self.compared) or any(f.exact for f in self.frequencies)

    @property
    def parted(self) -> tuple[tuple[str, FirstDifference], ...]:
        """Return (name of the test case, first difference from plain decoding) by text.

        Only texts that differ from plain decoding's are included.
        """
        return tuple((c.case, p) for c in self.compared for p in c.parted)

    @property
    def summary(self) -> str:
        """Return the overall verdict as one line."""
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
        """Return the report in the form for JSON; numbers that are not finite become None."""
        return nan_to_null(self) | {"lossless": self.lossless, "summary": self.summary}


def compare_plain(dtype: torch.dtype, found: Noise) -> Finding:
    """Return the finding on the difference between plain decoding and the stock model."""
    limit = PROBABILITY_NOISE.get(dtype, HALF)
    text = f"its probabilities and those of one pass of the stock model over the text differ by at most {found.p:.1g}"
    verdict: Said = "ok" if found.p <= limit else "bad" if dtype in PROBABILITY_NOISE else "warn"
    return Finding(
        "plain decoding",
        found.p,
        verdict,
        text if verdict == "ok" else f"{text}; noise is below {limit:.0e}",
    )


def noise_finding(found: Noise, allowed: float) -> Finding:
    """Return the finding on how much logits depend on the number of tokens in a pass."""
    text = f"passes of different width move logits by up to {found.logits:.1g}; differences up to {allowed:.1g} count as that"
    return Finding("noise", found.logits, "ok", text)


def text_verdict(found: ComparedCase, allowed: float) -> Finding:
    """Return the finding on the comparison of a case's texts; `allowed` is the largest noise."""
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


def frequency_verdict(
    case: Case, tests: Sequence[FrequencyTest], level: float, found: Noise
) -> Finding:
    """Return the finding on a case that was tested by the frequencies of tokens."""
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


def _lossy(case: Case, tests: Sequence[FrequencyTest]) -> Finding:
    """Return the finding on a case whose acceptor guarantees nothing."""
    far = max(tests, key=lambda t: t.distance - t.chance)
    verb = "is" if far.look == 1 else "are"
    told = f"lossy by design: the next {_tokens(far.look)} {verb} {far.distance:.2f} (total variation) from plain sampling's"
    return Finding(case.name, far.distance, "warn", f"{told}; chance makes {far.chance:.2f}")


def _tokens(look: int) -> str:
    return "token" if look == 1 else f"{look} tokens"
