"""Examine a drafter: its fit to a target, its quality, and likely faults.

It is driven along texts, by default the target's own greedy answers, and measured at every token.
Then it is driven again with one thing changed at a time (the hidden layer, the rope, …): a change
that makes it better for certain names the fault.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftree.costs.step_costs import Costs
from draftree.doctor.block_drafter_faults import (
    INJECTION,
    block_alternatives,
    find_missing_injection,
)
from draftree.doctor.chain_gains import gains_of_chains, take_minimum
from draftree.doctor.faults import (
    UNTRAINED_AGREEMENT,
    VOCABULARY,
    Map,
    alternatives,
    best_by_cause,
    draft_vocabulary,
    rotary_base,
    rotary_frequencies,
    rotary_modules,
    vocabulary_map,
)
from draftree.doctor.finding import HALF, PROBABILITY_NOISE, Finding, Said, nan_to_null
from draftree.doctor.forward_parity import largest_difference
from draftree.doctor.numerical_noise import narrow_and_wide
from draftree.doctor.state_memory import state_findings
from draftree.drafters.base import Drafter, Trainable
from draftree.errors import UserError
from draftree.evaluation.target_trace import TokenText
from draftree.evaluation.teacher_forcing import COMPARED_DEPTH, ComparedDrafts, drive
from draftree.formats.checkpoint import Checkpoint, fingerprint
from draftree.target.attention_strength import MIN_OUTPUT_NORM, Attending, measure_attention
from draftree.target.target import HiddenStateSpec, Target
from draftree.utils.hardware import describe_contention
from draftree.utils.progress_callback import Tell, ignore_progress

COMPARED_BLOCKS = ((1, 0), (5, 0), (4, 3))
"""Blocks for which the training forward is compared with decoding, as (length in tokens, number of
tokens that the first block lacks)."""
COMPARED_TOKENS = 24
"""Number of tokens of each text on which they are compared; at most two texts are used."""
BINS = 10
"""Number of confidence bins for the calibration error."""
STAGES = 5
"""Number of stages of an examination, for the progress display. Stages that do not apply are
skipped."""
AGREEMENT, OVERLAP, COVERAGE, SPEED_UP = (0.5, 0.2), (0.4, 0.15), (0.9, 0.7), (1.1, 0.9)
"""Limits of figures that should be high: at least the first value is `ok`, below the second is
`bad`, and between them is `warn`."""
CALIBRATION = (0.15, 0.3)
"""Limits of the calibration error: up to the first value is `ok`, above the second is `bad`, and
between them is `warn`."""
FORWARDS = "mask or position off by one between training and decoding"
NUMBERS = "weights are not finite numbers"
UNTRAINED_CAUSE = "not trained, or trained for another target"
TOKENIZER = "another tokenizer"


@dataclass(frozen=True)
class Suspect:
    """Store a likely fault of a drafter and the evidence for it, both in words."""

    cause: str
    evidence: str


@dataclass(frozen=True)
class Depth:
    """Store a drafter's figures at one depth of its chains.

    Attributes:
        depth: distance in tokens from the root, from 1.
        places: number of positions.
        drafted: share of positions at which the drafter proposed a token.
        agreement: share of drafted positions at which the likeliest draft is the target's greedy
            choice.
        overlap: mean of Σ min(p, q) over drafted positions, with the target's distribution p at
            temperature 1 and the drafter's q.
        confidence: mean probability q that the drafter gives to its likeliest draft.
        calibration: expected calibration error of q; see `calibration_error`.
        accepted: acceptance rate of a greedy chain's draft at this depth, given that all drafts
            before it were accepted.
    """

    depth: int
    places: int
    drafted: float
    agreement: float
    overlap: float
    confidence: float
    calibration: float
    accepted: float


@dataclass(frozen=True)
class Report:
    """Store the result of examining a drafter.

    Attributes:
        target: name of the target.
        drafter: description of the drafter.
        texts: number of texts.
        tokens: number of tokens of the texts, without prompts.
        findings: figures with verdicts.
        depths: figures by depth.
        layers: measured attention of the target's layers; empty if it cannot be measured.
        suspects: likely faults; empty for a healthy drafter.
    """

    target: str
    drafter: str
    texts: int
    tokens: int
    findings: tuple[Finding, ...]
    depths: tuple[Depth, ...]
    layers: tuple[Attending, ...]
    suspects: tuple[Suspect, ...]

    @property
    def healthy(self) -> bool:
        """Return whether no fault is suspected and no figure is bad.

        A healthy drafter may still be slow.
        """
        return not self.bad

    @property
    def bad(self) -> list[str]:
        """Return the suspected faults, or if there are none, the names of bad figures."""
        return [s.cause for s in self.suspects] or [
            f.name for f in self.findings if f.verdict == "bad"
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the report in the form for JSON; numbers that are not finite become None."""
        return nan_to_null(self) | {"healthy": self.healthy, "verdict": "bad" if self.bad else "ok"}


def examine(
    target: Target,
    drafter: Drafter[Any],
    texts: Sequence[TokenText],
    costs: Costs | None = None,
    tell: Tell = ignore_progress,
    again: Callable[[], Costs] | None = None,
) -> Report:
    """Measure a drafter's figures on given texts, and search for its faults.

    Args:
        target: the target.
        drafter: drafter that was opened for this target.
        texts: texts along which the drafter is driven; see `teacher_forcing.answers` and `read`.
        costs: costs from which a speed-up is predicted; None for no prediction.
        tell: called with the number and the name of the next stage.
        again: function that measures the costs again. It is called if the predicted speed-up is
            poor, because another program may have slowed the first measurement.
    """
    chart = (
        vocabulary_map(drafter.model, target.decoder.vocab)
        if isinstance(drafter, Trainable)
        else None
    )
    findings = [
        _vocabulary(target, drafter, chart),
        _dtype(target, drafter),
        *_training_differences(target, drafter),
    ]
    findings += state_findings(target)
    suspects = [*_weight_faults(drafter, chart), *_tokenizer(target, drafter)]
    depths: tuple[Depth, ...] = ()
    if not any(s.cause == NUMBERS for s in suspects):
        # Draft ids that stand for no token of the target stand for its last one: else the drafter
        # could not draft at all.
        usable = (
            nullcontext()
            if chart is None or not chart.complaints
            else chart.putting(chart.drafted)()
        )
        with usable:
            more, depths, likely = _run_with_changes(
                target,
                drafter,
                texts,
                partial(_predict_speed, costs=costs, again=again),
                chart,
                tell,
            )
        findings, suspects = findings + more, suspects + likely
    tell(3, "measuring the target's numerical noise", STAGES)
    findings.append(_noise(target, texts))
    tell(4, "measuring the attention of the target's layers", STAGES)
    layers, attention = _attention(target, drafter.needs, texts)
    findings.append(attention)
    count = sum(len(t.tokens) - t.start for t in texts)
    causes = dict.fromkeys(s.cause for s in suspects)
    merged = tuple(
        Suspect(c, "; ".join(s.evidence for s in suspects if s.cause == c)) for c in causes
    )
    return Report(
        target.name, drafter.description, len(texts), count, tuple(findings), depths, layers, merged
    )


def _run_with_changes(
    target: Target,
    drafter: Drafter[Any],
    texts: Sequence[TokenText],
    predicted: Callable[[ComparedDrafts], Iterator[Finding]],
    chart: Map | None,
    tell: Tell,
) -> tuple[list[Finding], tuple[Depth, ...], list[Suspect]]:
    """Drive the drafter along the texts, and again with one change at a time.

    The results are findings, figures by depth, and likely faults.
    """
    tell(0, "running the drafter on the texts", STAGES)
    places = drive(target, drafter, texts)
    depths = tuple(_at_depth(places, d) for d in range(1, COMPARED_DEPTH + 1))
    findings, suspects = [*_figures(places, depths), *predicted(places)], list[Suspect]()
    if isinstance(drafter, Trainable) and (
        chart is None or chart.distinct
    ):  # else a token has two logits, and which counts?
        tell(1, "comparing the training forward with decoding", STAGES)
        if (finding := _compare_forwards(target, drafter, texts)) is not None:
            findings.append(finding)
            suspects += [Suspect(FORWARDS, finding.text)] if finding.verdict == "bad" else []
    tried = [
        *alternatives(target, drafter, texts, chart),
        *block_alternatives(target, drafter, target),
    ]
    if told := find_missing_injection(target, drafter, texts):
        suspects.append(Suspect(INJECTION, told))
    if tried:
        tell(2, f"running it again with one change, {len(tried)} times", STAGES)
    suspects += [Suspect(b.cause, b.evidence) for b in best_by_cause(drafter, texts, places, tried)]
    lost = chart is not None and not bool(chart.d2t.any())
    if lost and _is_untrained(drafter, places, depths[0]):
        suspects.append(
            Suspect(VOCABULARY, "every offset in d2t is 0, as if it had never been filled in")
        )
    if not suspects and _is_untrained(drafter, places, depths[0]):
        suspects.append(
            Suspect(
                UNTRAINED_CAUSE,
                f"after a root it agrees with the target at {depths[0].agreement:.0%} of the places",
            )
        )
    return findings, depths, suspects


def _vocabulary(target: Target, drafter: Drafter[Any], chart: Map | None) -> Finding:
    """Return the finding about the draft vocabulary.

    A drafter whose vocabulary or shapes do not fit the target is refused earlier, when it is
    opened.
    """
    vocab = target.decoder.vocab
    size = draft_vocabulary(drafter.model, vocab) if isinstance(drafter, Trainable) else vocab
    if chart is not None and chart.complaints:
        return Finding("vocabulary", size, "bad", "; ".join(chart.complaints))
    sound = "" if chart is None else "; its map is sound"
    told = (
        f"all {vocab} tokens of the target"
        if size == vocab
        else f"{size} of the target's {vocab} tokens"
    )
    return Finding("vocabulary", size, "ok", f"drafts {told}{sound}")


def _dtype(target: Target, drafter: Drafter[Any]) -> Finding:
    theirs = str(target.decoder.dtype).removeprefix("torch.")
    if not isinstance(drafter, Trainable):
        return Finding("dtype", theirs, "ok", f"the target's is {theirs}")
    own = {str(p.dtype).removeprefix("torch.") for p in drafter.model.parameters()}
    names = ", ".join(sorted(own))
    return Finding(
        "dtype",
        names,
        "ok" if own <= {theirs} else "warn",
        f"its weights are {names}, the target's {theirs}",
    )


def _training_differences(target: Target, drafter: Drafter[Any]) -> Iterator[Finding]:
    """Yield findings for differences between the target and the one that the drafter learnt from.

    They are found by the hash of the target's config, which the checkpoint stores, and by the
    rotary base.
    """
    if not isinstance(drafter, Trainable):
        return
    said = Checkpoint.at(Path(drafter.knobs.checkpoint)).about if drafter.knobs.checkpoint else {}
    if said.get("target_hash", fingerprint(target.decoder.config)) != fingerprint(
        target.decoder.config
    ):
        yield Finding(
            "trained for",
            str(said.get("target")),
            "warn",
            "its checkpoint was trained for a target of another config",
        )
    theirs = next(map(rotary_frequencies, rotary_modules(target.decoder.stack).values()), None)
    own = sorted(
        {
            round(rotary_base(rotary_frequencies(m)))
            for m in rotary_modules(drafter.model, drafter).values()
        }
    )
    if own and theirs is not None and own != [round(rotary_base(theirs))]:
        names = ", ".join(map(str, own))
        base = f"its rotary base is {names}, the target's {rotary_base(theirs):.0f}"
        text = f"{base}; drafters with a rope of their own may differ"
        yield Finding("rope", names, "warn", text)


def _weight_faults(drafter: Drafter[Any], chart: Map | None) -> Iterator[Suspect]:
    """Yield faults of the weights and the vocabulary map, which can be found without texts."""
    if isinstance(drafter, Trainable):
        odd = [
            name
            for name, p in drafter.model.named_parameters()
            if not bool(torch.isfinite(p).all())
        ]
        if odd:
            yield Suspect(NUMBERS, f"NaN or ∞ in {len(odd)} tensors: {', '.join(odd[:4])}")
    if chart is not None and chart.complaints:
        yield Suspect(VOCABULARY, "; ".join(chart.complaints))


def _tokenizer(target: Target, drafter: Drafter[Any]) -> Iterator[Suspect]:
    """Yield a fault if a draft model's tokenizer has other ids than the target's."""
    if drafter.language_model is None:
        return
    try:
        ours, theirs = (model.tokenizer.get_vocab() for model in (drafter.language_model, target))
    except UserError:  # one of them has none, so nothing can be said
        return
    if odd := [token for token, number in theirs.items() if ours.get(token) != number]:
        yield Suspect(
            TOKENIZER,
            f"{len(odd)} of the target's {len(theirs)} tokens have another id in its tokenizer, or none",
        )


def _at_depth(places: ComparedDrafts, depth: int) -> Depth:
    at = places.depth == depth
    drafted = at & places.drafted

    def mean(values: np.ndarray) -> float:
        return float(values[drafted].mean()) if drafted.any() else 0.0

    return Depth(
        depth,
        int(at.sum()),
        float(places.drafted[at].mean()) if at.any() else 0.0,
        mean(places.agree),
        mean(places.overlap),
        mean(places.confidence),
        calibration_error(places.confidence[drafted], places.agree[drafted]),
        float(places.rates[depth - 1]),
    )


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error of a drafter.

    It is the mean of |mean confidence − hit rate| over bins of confidence, weighted by the number
    of positions in each.

    `confidence` and `right` have one entry for each position.
    """
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    gaps = (abs(float((confidence - right)[bins == b].sum())) for b in np.unique(bins))
    return sum(gaps) / max(len(confidence), 1)


def _grade(name: str, value: float, marks: tuple[float, float], text: str) -> Finding:
    """Return a finding whose verdict depends on two limits, `marks`.

    The verdict is `ok` up to the first limit, `warn` between the limits, and `bad` beyond the
    second one. If the first limit is larger than the second, large values are good. Otherwise small
    values are good.
    """
    better = np.sign(marks[0] - marks[1])
    verdict: Said = (
        "ok"
        if better * value >= better * marks[0]
        else "warn"
        if better * value >= better * marks[1]
        else "bad"
    )
    return Finding(name, value, verdict, text)


def _figures(places: ComparedDrafts, depths: Sequence[Depth]) -> Iterator[Finding]:
    drafted, first = places.drafted, depths[0]
    if not drafted.any():
        yield Finding("agreement", 0.0, "bad", "it drafted nothing")
        return
    text = f"after a root its likeliest draft is the target's choice at {first.agreement:.0%} of {first.places} places"
    yield _grade("agreement", first.agreement, AGREEMENT, text)
    overlap = float(places.overlap[drafted].mean())
    yield _grade(
        "overlap",
        overlap,
        OVERLAP,
        f"drafts drawn from q would be accepted at {overlap:.0%} at temperature 1",
    )
    error = calibration_error(places.confidence[drafted], places.agree[drafted])
    sure, right = float(places.confidence[drafted].mean()), float(places.agree[drafted].mean())
    text = (
        f"expected calibration error; its mean confidence is {sure:.2f}, its hit rate {right:.2f}"
    )
    yield _grade("calibration", error, CALIBRATION, text)
    coverage = float(places.covered[drafted].mean())
    if coverage < 1:
        yield _grade(
            "coverage", coverage, COVERAGE, f"{coverage:.0%} of the target's choices can be drafted"
        )


MAX_REMEASUREMENTS = 2
"""Largest number of repeated cost measurements while the predicted speed-up is poor."""


def _predict_speed(
    places: ComparedDrafts, costs: Costs | None, again: Callable[[], Costs] | None = None
) -> Iterator[Finding]:
    """Yield the predicted acceptance length τ of greedy chains and, with costs, their speed-up.

    The speed-up for chains of γ tokens is τ · sₜ(1) / (sₜ(1 + γ) + γ · sₐ(1) + commit). Here sₜ(n)
    are the seconds of a target pass over n tokens, sₐ(1) those of a draft step, and `commit` those
    of a commit, including work that it leaves to the next draft step.

    Args:
        places: the comparison of drafts with the target's greedy choices.
        costs: the measured costs; None to leave out the speed-up.
        again: a function that measures the costs again. It is called if the speed-up is poor.
    """
    lengths = 1 + np.cumsum(np.cumprod(places.rates))
    yield Finding(
        "acceptance length",
        float(lengths[-1]),
        "ok",
        f"predicted τ of chain:length={COMPARED_DEPTH} at temperature 0",
    )
    if costs is None:
        return
    gains, tries = gains_of_chains(lengths.tolist(), costs), 0
    while again is not None and tries < MAX_REMEASUREMENTS and max(gains) < SPEED_UP[0]:
        costs, tries = take_minimum(costs, again()), tries + 1
        gains = gains_of_chains(lengths.tolist(), costs)
    most = int(np.argmax(gains))
    text = (
        f"predicted for the best chain, of {most + 1}, from the costs on this machine; "
        f"one of {COMPARED_DEPTH} gives {gains[-1]:.2f}"
    )
    if tries:
        text += f"; costs were measured {tries} more time{'s' * (tries > 1)}, and the least count"
    if gains[most] < SPEED_UP[0] and (told := describe_contention()):
        text += f"; {told}: run it again when the machine is idle"
    yield _grade("speed-up", float(gains[most]), SPEED_UP, text)


def _compare_forwards(
    target: Target, drafter: Trainable[Any], texts: Sequence[TokenText]
) -> Finding | None:
    """Compare a drafter's training forward with its decoding on the beginnings of two texts.

    The result is None if every text ends before the second block.
    """
    longest = sorted(texts, key=lambda t: -len(t.tokens))[:2]
    longest = [t for t in longest if len(t.tokens) > max(length for length, _ in COMPARED_BLOCKS)]
    if not longest:
        return None
    count = min(COMPARED_TOKENS, *(len(t.tokens) for t in longest))
    tokens = np.stack([t.tokens[:count] for t in longest])
    allowed = PROBABILITY_NOISE.get(target.decoder.dtype, HALF)
    differences = [largest_difference(target, drafter, tokens, *cut) for cut in COMPARED_BLOCKS]
    worst = int(np.argmax(differences))  # NaN is the largest
    largest, (length, phase) = differences[worst], COMPARED_BLOCKS[worst]
    text = (
        f"draft probabilities of training forward and decoding differ by at most {largest:.1g} (in blocks of {length}, "
        f"phase {phase}); noise is below {allowed:.0e}"
    )
    if why := drafter.decodes_otherwise:
        return Finding("training = decoding", largest, "warn", f"{text}; {why}")
    return Finding("training = decoding", largest, "ok" if largest <= allowed else "bad", text)


def _is_untrained(drafter: Drafter[Any], places: ComparedDrafts, first: Depth) -> bool:
    """Return whether a drafter with weights almost never agrees with the target after a root.

    For a drafter that looks up continuations in text the result is false, because it may simply
    find nothing.
    """
    weights = isinstance(drafter, Trainable) or drafter.language_model is not None
    return weights and bool(places.drafted.any()) and first.agreement < UNTRAINED_AGREEMENT


def _attention(
    target: Target, needs: HiddenStateSpec, texts: Sequence[TokenText]
) -> tuple[tuple[Attending, ...], Finding]:
    """Measure the attention of the target's layers, and warn if the drafter reads a dead one.

    The attention of a dead layer adds almost nothing to the residual stream. A drafter reads a
    layer if it uses its keys and values, or its output as a hidden state. The last hidden state is
    not counted, because it is the sum of the work of all layers.
    """
    try:
        layers = measure_attention(target.decoder, [t.tokens for t in texts])
    except UserError as error:  # of an architecture of its own
        return (), Finding("attention", None, "ok", str(error))
    count = len(layers)
    keys = {layer % count: "whose keys and values it reads" for layer in needs.kv}
    entries = {target.decoder.hidden_index(layer) for layer in needs.hidden}
    read = {entry - 1: "whose output it reads" for entry in entries if 0 < entry < count} | keys
    if not read:
        return layers, Finding("attention", None, "ok", "it reads of no layer in particular")
    least = min(read, key=lambda i: layers[i].output)
    adds = {
        i: f"layer {i}, {what}, adds {layers[i].output:.2g}" for i, what in sorted(read.items())
    }
    told = f"of the residual stream before it, attention of {'; '.join(adds.values())}"
    dead = f"; below {MIN_OUTPUT_NORM} a layer looks at hardly anything, and another should be read"
    said: Said = "warn" if layers[least].dead else "ok"
    return layers, Finding("attention", layers[least].output, said, told + dead * (said == "warn"))


def _noise(target: Target, texts: Sequence[TokenText]) -> Finding:
    """Measure how the margin of the two largest logits differs between narrow and wide passes.

    A narrow pass reads one token, and a wide pass reads a whole text.
    """
    changes, margins = narrow_and_wide(target, texts)
    noise, smallest = float(changes.max()), float(margins.min())
    if (
        not noise and margins.any()
    ):  # bits are kept: two equal logits are equal in every pass, and the first is chosen
        text = f"passes of different width have the same margins at all {len(margins)} tokens: no choice can turn"
        return Finding("margin / noise", None, "ok", text)
    below, flipped = int((margins <= noise).sum()), int((changes >= margins).sum())
    text = (
        f"passes of different width move the margin of the two best logits by up to {noise:.1g}; it is smaller than that at "
        f"{below} of {len(margins)} tokens, the smallest being {smallest:.1g}"
    )
    if below:
        text += f" ({flipped} may have turned): there, greedy output may part from plain decoding's"
    return Finding(
        "margin / noise", smallest / noise if noise else None, "warn" if below else "ok", text
    )
