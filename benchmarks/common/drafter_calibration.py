"""Calibration of a drafter, and acceptance of its candidates by depth, rank and entropy.

Shapes: M places, K candidates, D depths.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from draftree.drafters.base import Drafter
from draftree.evaluation import step_codec
from draftree.evaluation.bootstrap import ResultRow
from draftree.evaluation.target_trace import TokenText
from draftree.evaluation.teacher_forcing import Source, replay
from draftree.metrics import Step
from draftree.tree import Bools, Floats, Ints

RANKS, MAX_DEPTHS, BINS = 8, 10, 10
"""Number of ranks that tables show, number of depths D, and number of bins for confidence and
entropy."""
CANDIDATES = 20
"""Number of candidates K, the ranks of C2T's heat maps (Figure 2)."""
ENTROPY_LIMITS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
"""Lower ends of the entropy intervals of C2T's heat maps in nats; the last one has no upper end."""


@dataclass(frozen=True)
class CandidateTrace:
    """Store figures of a drafter's candidates at each position of texts written by the target.

    Before each position the drafter is given the text's own tokens. All arrays have length M, the
    number of positions.

    Attributes:
        depth: [M] distance in tokens from the root of the position's block, from 1.
        rank: [M] rank of the text's token among the K candidates, from 0; at least K if it is not
            a candidate.
        confidence: [M] probability q that the drafter gives to its likeliest candidate.
        entropy: [M] entropy of the drafter's distribution q in nats.
        reached: [M] whether the likeliest candidates at all earlier depths of the block equal the
            text's tokens, so that a greedy chain reaches the position.
        candidates: [M, K] q of each candidate; 0 where the drafter gives fewer than K.
    """

    depth: Ints
    rank: Ints
    confidence: Floats
    entropy: Floats
    reached: Bools
    candidates: Floats

    @classmethod
    def along(cls, source: Source, drafter: Drafter[Any], texts: Sequence[TokenText]) -> Self:
        """Replay texts in blocks of `MAX_DEPTHS` tokens, and collect the drafter's candidates.

        Args:
            source: the target, or a recording of these texts.
            drafter: drafter that proposes K candidates after every token.
            texts: greedy texts, all in one batch.
        """
        parts = list[tuple[Ints, Ints, Floats, Floats, Bools, Floats]]()
        for block in replay(source, drafter, texts, CANDIDATES, MAX_DEPTHS):
            alive = np.ones(int(block.tree.row.max()) + 1, np.bool_)
            for nodes, found in block.asked:
                rows, there = block.tree.row[nodes], np.isfinite(found.log_q)
                hit = (found.tokens == block.following(nodes)[:, None]) & there
                rank = np.where(hit.any(1), hit.argmax(1), CANDIDATES)
                q = np.zeros((len(nodes), CANDIDATES))
                q[:, : there.shape[1]] = np.where(there, np.exp(found.log_q), 0.0)
                drafted = there[:, 0]
                columns = (
                    block.tree.depth[nodes] + 1,
                    rank,
                    q[:, 0],
                    np.asarray(found.entropy(), np.float64),
                    alive[rows],
                    q,
                )
                parts.append(tuple(c[drafted] for c in columns))  # type: ignore[arg-type]
                alive[rows] &= rank == 0
        if not parts:
            empty: list[Any] = [*[np.zeros(0)] * 5, np.zeros((0, CANDIDATES))]
            return cls(*empty)
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def reliability(self) -> list[dict[str, float]]:
        """Return the mean confidence, the share of correct candidates and the count of each bin.

        The bins are intervals of the confidence. Only the likeliest candidate of each position is
        judged, and only positions with `share_by_depth` count (EDD, section 3.2 and Figure 3b).
        Empty bins are left out.
        """
        bins = np.minimum((self.confidence * BINS).astype(np.int64), BINS - 1)
        found = []
        for b in range(BINS):
            which = self.reached & (bins == b)
            if which.any():
                right, sure = (
                    float((self.rank[which] == 0).mean()),
                    float(self.confidence[which].mean()),
                )
                found.append({"confidence": sure, "accepted": right, "count": int(which.sum())})
        return found

    @property
    def calibration_error(self) -> float | None:
        """Return the expected calibration error (ECE) of the drafter's confidence.

        It is the mean of |confidence − acceptance| over the bins, weighted by their counts. It is
        None without positions.
        """
        bins = self.reliability()
        count = sum(b["count"] for b in bins)
        return (
            sum(abs(b["confidence"] - b["accepted"]) * b["count"] for b in bins) / count
            if count
            else None
        )

    def by_depth(self) -> list[list[float]]:
        """Return [D, K] for each depth the shares of positions whose token has rank 0 … K − 1."""
        return self._shares(self.depth - 1, MAX_DEPTHS)

    def by_entropy(self) -> tuple[list[float], list[list[float]]]:
        """Return the limits of entropy bins, and [bins, K] the share of each rank in each bin.

        Each bin has about the same number of positions.
        """
        ends = (
            np.unique(np.quantile(self.entropy, np.linspace(0, 1, BINS + 1)))
            if len(self.entropy)
            else np.zeros(2)
        )
        which = np.clip(
            np.searchsorted(ends, self.entropy, side="right") - 1, 0, max(len(ends) - 2, 0)
        )
        return ends.tolist(), self._shares(which, max(len(ends) - 1, 1))

    def by_entropy_interval(self) -> tuple[Floats, Floats, Ints]:
        """Return q and acceptance by entropy interval and rank, after one draft pass.

        Only positions at depth 1 count: their context is the text alone, and one forward pass of
        the drafter gives all of their candidates (C2T, Figure 2).

        Returns:
            The mean q [intervals, K] and the share of positions whose token has this rank
            [intervals, K], both 0 in empty intervals, and the number of positions [intervals].
        """
        first = self.depth == 1
        interval = np.searchsorted(ENTROPY_LIMITS, self.entropy[first], side="right") - 1
        rank = self.rank[first]
        counts = np.bincount(interval, minlength=len(ENTROPY_LIMITS))
        mean_q, accepted = (np.zeros((len(ENTROPY_LIMITS), CANDIDATES)) for _ in range(2))
        np.add.at(mean_q, interval, self.candidates[first])
        found = rank < CANDIDATES
        np.add.at(accepted, (interval[found], rank[found]), 1)
        places = np.maximum(counts, 1)[:, None]
        return mean_q / places, accepted / places, counts

    def _shares(self, group: Ints, groups: int) -> list[list[float]]:
        counts = np.zeros((groups, RANKS + 1))
        np.add.at(counts, (group, np.minimum(self.rank, RANKS)), 1)
        shares: list[list[float]] = (counts / np.maximum(counts.sum(1, keepdims=True), 1))[
            :, :RANKS
        ].tolist()
        return shares

    def as_json(self) -> dict[str, Any]:
        """Return the figures as a dictionary with the names that the command line prints."""
        ends, shares = self.by_entropy()
        mean_q, accepted, counts = self.by_entropy_interval()
        return {
            "places": len(self.rank),
            "calibration_error": self.calibration_error,
            "reliability": self.reliability(),
            "rank_by_depth": self.by_depth(),
            "rank_by_entropy": {"ends": ends, "shares": shares},
            "rank_by_interval": {
                "from": list(ENTROPY_LIMITS),
                "places": counts.tolist(),
                "q": mean_q.round(4).tolist(),
                "accepted": accepted.round(4).tolist(),
            },
        }


def share_by_depth(steps: Sequence[Step]) -> list[float]:
    """Return for each depth from 1 the share of steps that accepted a node at it."""
    deepest = max((step.accepted for step in steps), default=0)
    return [
        sum(step.accepted >= depth for step in steps) / len(steps)
        for depth in range(1, deepest + 1)
    ]


def share_by_depth_of_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a list with the shares by depth of each saved row; see `share_by_depth`.

    Rows without a policy, or without the work of their steps, are left out.
    """
    found = []
    for r in (r for r in rows if r["policy"] and "work" in r):
        steps = [step for of, _ in step_codec.decode_steps(r["work"], "row") for step in of]
        found.append(
            {
                "drafter": r["drafter"],
                "policy": r["policy"],
                "temperature": r["temperature"],
                "reached": share_by_depth(steps),
            }
        )
    return found


HIGH_ENTROPY, LOW_ENTROPY = 2.0, 1.0
"""Entropies in nats: at least `HIGH_ENTROPY` is high, and below `LOW_ENTROPY` is low (C2T, Figure 2, has seven
intervals)."""
PositionGrouping = Callable[[CandidateTrace], tuple[Bools, Floats | Bools]]
GROUPS: Mapping[str, PositionGrouping] = {
    "sure": lambda at: (at.reached & (at.confidence >= 0.5), at.rank == 0),
    "unsure": lambda at: (at.reached & (at.confidence < 0.5), at.rank == 0),
    "upper-left": lambda at: (at.depth == 1, at.rank == 0),
    "deep": lambda at: (at.depth == 5, at.rank == 0),
    "lower-right": lambda at: (at.depth == 3, at.rank == 2),
    "open": lambda at: (at.entropy >= HIGH_ENTROPY, at.rank == 0),
    "open-said": lambda at: (at.entropy >= HIGH_ENTROPY, at.confidence),
    "closed": lambda at: (at.entropy < LOW_ENTROPY, at.rank == 0),
    "closed-said": lambda at: (at.entropy < LOW_ENTROPY, at.confidence),
}
"""Groups of positions that claims of papers compare. Each function returns [M] whether a position
belongs to the group, and [M] whether its candidate was right or the drafter's probability q of
that."""


def group_figures(looked: Sequence[CandidateTrace], drafter: str) -> list[ResultRow]:
    """Return the figures of `GROUPS` for a drafter as rows of a result.

    For each text, a row gives the number of positions in the group (`places`) and the number of
    right candidates (`tokens`).

    Args:
        looked: figures of the drafter's candidates, one object for each text.
        drafter: spec of the drafter.
    """
    rows = list[ResultRow]()
    for name, group in GROUPS.items():
        found = [group(one) for one in looked]
        places, right = (
            [int(at.sum()) for at, _ in found],
            [float(hit[at].sum()) for at, hit in found],
        )
        share = sum(right) / max(sum(places), 1)
        row = {"drafter": drafter, "policy": name, "temperature": 0.0, "acceptance_length": share}
        rows.append(row | {"per_prompt": {"tokens": right, "places": places}})
    return rows
