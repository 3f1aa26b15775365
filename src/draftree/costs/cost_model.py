"""A cost model that starts from an estimate and is corrected by timings: s(tokens, context, sequences).

The estimate is a roofline: a pass reads its weights and the KV cache at the memory's bandwidth, or
multiplies at the processor's rate, whichever takes longer, and every operation has an overhead.
What the estimate gets wrong is learnt as a correction of the logarithm of the seconds, a linear
function of the place of a pass:

    log s(place) = log estimate(place) + h(place) · θ

h holds linear interpolation weights on a grid of token counts, of context lengths and of numbers of
sequences, and an indicator for the first draft step of a tree. θ has a Gaussian prior under which
neighbouring grid points are correlated, so that a timing corrects its neighbours too (a Kalman
filter: West & Harrison, Bayesian Forecasting and Dynamic Models, section 4.3). The level of θ
drifts, and the rest of θ does so slowly, so that a change of load is followed.

Shapes: G entries of θ, P places, W widths.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from draftree.costs.step_costs import MAX_WIDTH
from draftree.tree import Floats

TOKEN_GRID = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 17, 20, 24, 28, 32, 33, 40,
    48, 64, 65, 96, 128, 129, 192, 256, 512, 1024,
)  # fmt: skip
"""Grid points for the number of tokens of all sequences.

The time of kernels often rises after 8, 16, 32, 64 and 128 tokens.
"""
CURVE_WIDTHS = tuple(n for n in TOKEN_GRID if n <= 128)
"""Numbers of tokens of a single sequence at which cost curves have a point."""
CONTEXT_GRID = (64, 256, 1024, 4096, 16384, 65536)
"""Grid points for the context length of a sequence."""
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
"""Grid points for the number of sequences."""
LEVEL_STD, SLOPE_STD, STEP_STD = 1.4, 0.25, 0.15
"""Prior standard deviations of θ, the corrections of log seconds at the grid points.

They belong to the level, to the slope per doubling of the tokens, and to local steps. The level's
value 1.4 covers a level, or a slope between 1 and 16 tokens, that is wrong by a factor of 4.
"""
STEP_CORRELATION_DOUBLINGS = 0.25
"""Doublings of the number of tokens over which local steps are correlated."""
OTHER_AXES_STD = 0.3
"""Prior standard deviation per doubling of the context or of the number of sequences.

It is also that of the first draft step.
"""
TIMING_NOISE_STD, MEASURED_NOISE = 0.1, 0.03
"""Standard deviation of the logarithm of a single timing of a step in use.

`MEASURED_NOISE` is that of an explicit measurement.
"""
DRIFT_STD, FORGETTING_RATE = 0.02, 1e-3
"""Standard deviation by which the level drifts per timing.

`FORGETTING_RATE` is the share of the shape's prior covariance that returns with each timing. The
shape is all but the level. It changes, for example, if another program uses the memory's bandwidth.
"""
MAX_FORGOTTEN_STD = 0.15
"""Standard deviation of the slope from 1 to 32 tokens from which on nothing more is forgotten."""
OUTLIER_STDS = 3.0
"""Number of standard deviations beyond which a timing is an outlier."""
MIN_CONFIRMING_OUTLIERS = 3
"""Number of consecutive outliers in one direction that count as a change of speed."""
MAX_MACHINE_RATE, MAX_CORRECTION_ENTRY, EIGENVALUE_TOLERANCE = 1e30, 100.0, 1e-6
"""Bounds for values in a file.

They are the largest rate of a machine per second, the largest entry of θ and of its covariance, and
the tolerated rounding error of the covariance's smallest eigenvalue.
"""
RELOAD_STD = 0.1
"""Standard deviation that is added to the level when a model is read from disk.

The load of the machine may have changed since it was written.
"""


class PassShape(NamedTuple):
    """The properties of a pass on which its predicted time depends.

    Attributes:
        tokens: number of tokens of all sequences together.
        context: number of tokens in the KV cache of the longest sequence.
        sequences: number of sequences.
        first: whether the pass is the first draft step of a tree.
    """

    tokens: float
    context: int = 0
    sequences: int = 1
    first: bool = False


@dataclass(frozen=True)
class Speed:
    """Describe the speed of a machine.

    Attributes:
        bandwidth: bytes read from memory per second.
        rate: multiply-add operations per second, in the dtype in use.
        overhead: seconds of one small operation.
    """

    bandwidth: float
    rate: float
    overhead: float

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """Return a speed from the dictionary that `asdict` returned.

        Raises:
            ValueError: a figure is missing or impossible for a machine.
        """
        figures: list[Any] = [stored.get(f.name) for f in fields(cls)]
        if not all(type(x) in (int, float) and 0 <= x <= MAX_MACHINE_RATE for x in figures):
            raise ValueError(
                f"figures are {figures}, allowed are numbers of 0 … {MAX_MACHINE_RATE:g}"
            )
        found = cls(*map(float, figures))
        if not found.bandwidth or not found.rate:
            raise ValueError("the bandwidth or the rate is 0, which no machine has")
        return found


@dataclass(frozen=True)
class Size:
    """Describe the memory and operations that one pass of a network needs.

    Attributes:
        weights: multiply-add operations per token outside attention.
        bytes: bytes of the weights that every pass reads.
        expert_bytes: bytes of the weights of all experts; a pass reads only the experts that its
            tokens are routed to.
        experts: number of experts of a layer.
        routed: number of experts that a token is routed to.
        kv_bytes: bytes of the KV cache per token of context.
        attention: multiply-add operations per token and token of context.
        operations: number of small operations, each with an overhead.
        seconds: constant seconds of work outside the network.
    """

    weights: float = 0.0
    bytes: float = 0.0
    expert_bytes: float = 0.0
    experts: int = 1
    routed: int = 1
    kv_bytes: float = 0.0
    attention: float = 0.0
    operations: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Size") -> "Size":
        """Return the size of two successive passes, with the first one's numbers of experts."""
        summed = (
            "weights",
            "bytes",
            "expert_bytes",
            "kv_bytes",
            "attention",
            "operations",
            "seconds",
        )
        return replace(
            self, **{name: getattr(self, name) + getattr(other, name) for name in summed}
        )

    def estimate(self, speed: Speed, place: PassShape) -> float:
        """Return the seconds of a pass by the roofline model."""
        return float(
            self.estimates(speed, np.array([place.tokens]), place.context, place.sequences)[0]
        )

    def estimates(self, speed: Speed, tokens: Floats, context: int, sequences: int) -> Floats:
        """Return the seconds [W] of passes over several numbers of tokens [W], by the roofline."""
        touched = 1 - (1 - self.routed / self.experts) ** tokens
        read = (self.bytes + touched * self.expert_bytes) / speed.bandwidth
        cache = self.kv_bytes * context * sequences / speed.bandwidth
        multiplied, attended = (
            tokens * (self.weights / speed.rate),
            tokens * (self.attention * context / speed.rate),
        )
        constant = self.seconds + self.operations * speed.overhead
        return np.asarray(constant + np.maximum(read, multiplied) + np.maximum(cache, attended))


@dataclass(frozen=True)
class Correction:
    """Correct the logarithm of estimated seconds by a Gaussian over θ.

    θ holds a correction for each of G grid points.

    Attributes:
        mean: [G] the mean of θ.
        covariance: [G, G] the covariance of θ.
        timings: number of timings from which it has learnt.
        outliers: number of consecutive outliers among the last timings; negative if they were too
            fast.
    """

    mean: Floats
    covariance: Floats
    timings: int = 0
    outliers: int = 0

    @classmethod
    def prior(cls) -> Self:
        """Return the correction before any timing."""
        return cls(np.zeros(len(_PRIOR)), _PRIOR)

    def learn(self, place: PassShape, log_ratio: float, measured: bool = False) -> "Correction":
        """Return the correction after one timing.

        An outlier changes nothing, unless it is the third in a row in the same direction. All times
        are then assumed to have changed, above all their level.

        Args:
            place: the properties of the timed pass.
            log_ratio: the logarithm of measured seconds divided by estimated seconds.
            measured: whether the timing is a median of several repetitions, which is never an
                outlier.
        """
        at, weights = _features(place)
        gain = self.covariance[:, at] @ weights
        variance = (
            float(weights @ gain[at]) + (MEASURED_NOISE if measured else TIMING_NOISE_STD) ** 2
        )
        residual = log_ratio - float(self.mean[at] @ weights)
        covariance, outliers = self.covariance, 0
        if not measured and abs(residual) > OUTLIER_STDS * math.sqrt(variance):
            outliers = self.outliers + 1 if residual > 0 else self.outliers - 1
            if outliers * self.outliers < 0:
                outliers = 1 if residual > 0 else -1
            if abs(outliers) < MIN_CONFIRMING_OUTLIERS:
                return replace(self, outliers=outliers)
            covariance = covariance + residual**2 * (_LEVEL + _SHAPE)
            gain = covariance[:, at] @ weights
            variance, outliers = float(weights @ gain[at]) + TIMING_NOISE_STD**2, 0
        mean = self.mean + gain * (residual / variance)
        covariance = covariance - np.outer(gain, gain / variance) + _DRIFT
        if _SLOPE @ covariance @ _SLOPE < MAX_FORGOTTEN_STD**2:
            covariance = (1 - FORGETTING_RATE) * covariance + FORGETTING_RATE * _SHAPE
        return Correction(mean, covariance, self.timings + 1, outliers)

    def fuse(self, other: "Correction") -> "Correction":
        """Combine this correction with another one, which may come from another process.

        Both may have learnt from the same timings, because processes exchange their corrections
        again and again. So each counts with half its precision (covariance intersection: Julier &
        Uhlmann, A Non-divergent Estimation Algorithm in the Presence of Unknown Correlations,
        1997). Two equal corrections give the same one.
        """
        both = (
            self.covariance + other.covariance + 1e-9 * np.eye(len(self.mean))
        )  # some entries of θ have no variance
        gain = np.linalg.solve(both, self.covariance).T
        mean, covariance = (
            self.mean + gain @ (other.mean - self.mean),
            self.covariance - gain @ self.covariance,
        )
        return Correction(mean, covariance + covariance.T, max(self.timings, other.timings))

    def at(self, places: tuple[PassShape, ...]) -> Floats:
        """Return the corrections [P] of log seconds for several passes."""
        return np.asarray(_matrix(places) @ self.mean)

    def deviation(self, places: tuple[PassShape, ...]) -> Floats:
        """Return the standard deviations [P] of the corrections for several passes."""
        h = _matrix(places)
        return np.asarray(np.sqrt(np.maximum(((h @ self.covariance) * h).sum(axis=1), 0)))

    def as_json(self) -> dict[str, Any]:
        """Return the correction as lists, with only the lower triangle of the covariance."""
        lower = self.covariance[np.tril_indices(len(self.mean))]
        return {
            "mean": self.mean.tolist(),
            "covariance": [float(f"{x:.9g}") for x in lower],
            "timings": self.timings,
        }

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """Return a correction from the dictionary of `as_json`, with a slightly larger uncertainty.

        Raises:
            ValueError: the content is invalid, or belongs to another grid.
        """
        mean, lower = (
            np.array(stored["mean"], np.float64),
            np.array(stored["covariance"], np.float64),
        )
        count = len(_PRIOR)
        if (
            mean.shape != (count,)
            or lower.shape != (count * (count + 1) // 2,)
            or not np.isfinite([*mean, *lower]).all()
        ):
            raise ValueError("the correction belongs to another grid")
        covariance = np.zeros((count, count))
        covariance[np.tril_indices(count)] = lower
        covariance = covariance + np.tril(covariance, -1).T
        if (
            max(np.abs(mean).max(), np.abs(lower).max()) > MAX_CORRECTION_ENTRY
            or np.linalg.eigvalsh(covariance)[0] < -EIGENVALUE_TOLERANCE
        ):
            raise ValueError("the correction has values that timings cannot give")
        return cls(mean, covariance + RELOAD_STD**2 * _LEVEL, int(stored["timings"]))


@dataclass(frozen=True)
class CostModel:
    """Predict the seconds of one kind of pass by an estimate and a learnt correction.

    It is immutable: `learn` returns a new model.

    Attributes:
        size: the size of the pass.
        speed: the speed of the machine.
        correction: the correction learnt from timings.
    """

    size: Size
    speed: Speed
    correction: Correction

    def learn(self, place: PassShape, seconds: float, measured: bool = False) -> "CostModel":
        """Return the model after learning from one timing.

        Args:
            place: the properties of the timed pass.
            seconds: the seconds that it took.
            measured: whether they are a median of several repetitions; see `Correction.learn`.
        """
        ratio = math.log(max(seconds, 1e-9) / self.size.estimate(self.speed, place))
        return CostModel(self.size, self.speed, self.correction.learn(place, ratio, measured))

    def seconds(self, place: PassShape) -> float:
        """Return the expected seconds of a pass."""
        return float(self.curve((place.tokens,), place.context, place.sequences, place.first)[0])

    def curve(
        self,
        tokens: Sequence[float],
        context: int,
        sequences: int,
        first: bool = False,
        optimism: float = 0.0,
    ) -> Floats:
        """Return the expected seconds [W] of passes over several numbers of tokens.

        Args:
            tokens: [W] numbers of tokens of all sequences together.
            context: number of tokens in the KV cache of the longest sequence.
            sequences: number of sequences.
            first: whether the passes are first draft steps of a tree.
            optimism: number of standard deviations by which passes are assumed to be faster than
                expected.
        """
        places = tuple(PassShape(n, context, sequences, first) for n in tokens)
        correction = self.correction.at(places)
        if optimism:
            correction = correction - optimism * self.correction.deviation(places)
        return self.size.estimates(self.speed, np.array(tokens), context, sequences) * np.exp(
            correction
        )


@lru_cache(maxsize=64)
def curve_points(rows: int) -> tuple[float, ...]:
    """Return the numbers of tokens of R sequences together at which cost curves have a point.

    Kernels have steps at numbers of tokens of the whole batch. A pass over eight sequences may take
    no longer for 16 tokens than for nine, and much longer than for eight.
    """
    shared = (n for n in TOKEN_GRID if n <= CURVE_WIDTHS[-1] * rows)
    multiples = (n * rows for n in CURVE_WIDTHS if n == 1 or n * rows > TOKEN_GRID[-1])
    return tuple(map(float, sorted({*shared, *multiples})))


@lru_cache(maxsize=4096)
def _features(place: PassShape) -> tuple[Any, Floats]:
    """Return the indices of the entries of θ on which a pass depends, and their weights."""
    at = list[int]()
    weights = list[float]()
    offset = 0
    for grid, value in (
        (TOKEN_GRID, place.tokens),
        (CONTEXT_GRID, place.context),
        (SEQUENCES, place.sequences),
    ):
        x = min(max(float(value), grid[0]), grid[-1])
        i = min(int(np.searchsorted(grid, x, side="right")) - 1, len(grid) - 2)
        share = math.log(x / grid[i]) / math.log(grid[i + 1] / grid[i])
        for entry, weight in ((i, 1 - share), (i + 1, share)):
            if weight > 0:
                at.append(offset + entry)
                weights.append(weight)
        offset += len(grid)
    if place.first:
        at.append(offset)
        weights.append(1.0)
    return np.array(at), np.array(weights)


@lru_cache(maxsize=256)
def _matrix(places: tuple[PassShape, ...]) -> Floats:
    """Return h [P, G] for P passes, so that h @ θ is the correction of their log seconds.

    A row has the interpolation weights of a pass over the grid entries θ.
    """
    h = np.zeros((len(places), len(_PRIOR)))
    for row, place in zip(h, places, strict=True):
        at, weights = _features(place)
        row[at] = weights
    return h


def _prior() -> Floats:
    """Return the prior covariance [G, G] of θ.

    Over numbers of tokens, θ is a level, a slope, a random walk in log2 of the tokens, and local
    steps. Over contexts and numbers of sequences it is a random walk. It begins at 256 tokens and
    at one sequence, where it is 0 because the level covers this case.
    """
    tokens = np.log2(TOKEN_GRID)
    apart = np.abs(tokens[:, None] - tokens)
    walk = np.minimum(tokens[:, None], tokens)
    over_tokens = (
        LEVEL_STD**2
        + SLOPE_STD**2 * (np.outer(tokens, tokens) + walk)
        + STEP_STD**2 * np.exp(-apart / STEP_CORRELATION_DOUBLINGS)
    )
    found = np.zeros((len(TOKEN_GRID) + len(CONTEXT_GRID) + len(SEQUENCES) + 1,) * 2)
    found[: len(TOKEN_GRID), : len(TOKEN_GRID)] = over_tokens
    offset = len(TOKEN_GRID)
    for grid, origin in ((CONTEXT_GRID, 256), (SEQUENCES, 1)):
        x = np.log2(np.array(grid) / origin)
        same_side = np.outer(x, x) > 0
        walk = np.where(same_side, np.minimum(np.abs(x)[:, None], np.abs(x)), 0)
        found[offset : offset + len(grid), offset : offset + len(grid)] = OTHER_AXES_STD**2 * walk
        offset += len(grid)
    found[-1, -1] = OTHER_AXES_STD**2
    return found


_PRIOR = _prior()
_LEVEL = np.zeros_like(_PRIOR)
_LEVEL[: len(TOKEN_GRID), : len(TOKEN_GRID)] = 1.0
_SHAPE = _PRIOR - LEVEL_STD**2 * _LEVEL
_SLOPE = np.zeros(len(_PRIOR))
_SLOPE[TOKEN_GRID.index(1)], _SLOPE[TOKEN_GRID.index(32)] = -1.0, 1.0
_DRIFT = DRIFT_STD**2 * _LEVEL
assert TOKEN_GRID[-1] < MAX_WIDTH
