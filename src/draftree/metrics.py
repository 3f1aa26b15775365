"""Counters of a run: tokens, passes, seconds and acceptance length."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from draftree.aliases import STATS
from draftree.errors import Hinting


@dataclass(frozen=True)
class Step:
    """One verification of one sequence.

    Attributes:
        accepted: drafted nodes that were accepted.
        nodes: drafted nodes and probes.
        depth: of its tree.
        sequence: its number, by the order in which sequences began in the batch.
    """

    accepted: int
    nodes: int
    depth: int
    sequence: int = 0


@dataclass(frozen=True)
class Work:
    """Count the passes of one step of all rows together.

    Attributes:
        frontiers: number of nodes that each draft step was fed.
        fed: number of tokens that the target was fed: roots, drafted nodes and probes.
        rows: number of rows that took part.
        context: length of the longest of them.
        finds: number of retrievals without a pass.
    """

    frontiers: tuple[int, ...]
    fed: int
    rows: int
    context: int
    finds: int = 0


@dataclass(repr=False)
class Stats(Hinting):
    """Figures of one or more generations.

    Attributes:
        new_tokens: tokens emitted, after every cut.
        steps: one for each row and verification; the prefill is none.
        draft_seconds: drafting, growing and the drafter's commit.
        verify_seconds: the target's pass, the acceptance and the commit.
        seconds: everything from the prompt's ids to the last token's.
        work: one for each verification.
        acceptor: the rule that accepted drafts; none for plain decoding.
        draw: the kind of draw that it requested.
        lossy: whether a rule that may change the output was used.
        deepest: the deepest layer that the policy allows; None where it allows any, and for plain
            decoding.
        state_bytes: the largest size of recurrent states and their snapshots, of a target that has
            them.
        phases: seconds by phase of the loop, each without those inside it (see
            `evaluation/step_profile.py`).
    """

    kind_of_name: ClassVar[str] = STATS

    new_tokens: int = 0
    steps: list[Step] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0
    work: list[Work] = field(default_factory=list)
    acceptor: str | None = None
    draw: str | None = None
    lossy: bool = False
    deepest: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    state_bytes: int = 0

    def __repr__(self) -> str:
        """Return the main figures."""
        told = f"{self.new_tokens} tokens, {self.tokens_per_second:.1f} tokens/s, "
        told += f"acceptance_length={self.acceptance_length:.2f}"
        return f"Stats({told})"

    @property
    def acceptance_length(self) -> float:
        """Return τ = Σ(accepted + 1) / steps, before any cut at the end; 1.00 is plain decoding."""
        return _mean([s.accepted + 1 for s in self.steps], 1.0)

    @property
    def acceptance_lengths(self) -> dict[int, float]:
        """Return τ of each sequence that was verified, by its number."""
        numbers = sorted({step.sequence for step in self.steps})
        return {
            n: _mean([s.accepted + 1 for s in self.steps if s.sequence == n], 1.0) for n in numbers
        }

    @property
    def alpha(self) -> float | None:
        """Return the mean of τ / depth over the steps that drafted; it can exceed 1.

        τ is that of the step, and depth that of its verified tree. EDD + PCT (section 4.1) divides
        "by the maximum depth of the candidate tree", which for its own trees, of any depth, is
        nearest to this: 3.99 / 0.74 = 5.4 layers where `max_depth` is 10.
        """
        rates = [(s.accepted + 1) / s.depth for s in self.steps if s.depth]
        return _mean(rates, 0.0) if rates else None

    @property
    def alpha_bound(self) -> float | None:
        """Return τ / the deepest layer that the policy allows, None where it allows any.

        This is α of EDD + PCT (section 4.1) where trees are all drafted to one depth: its Table 2
        has 3.99 / 6 = 0.67 for EAGLE-2, whatever of the six layers is left after reranking, and
        3.56 / 5 = 0.71 for VCT.
        """
        return self.acceptance_length / self.deepest if self.deepest else None

    @property
    def nodes_per_step(self) -> float:
        """Return the mean γ: drafted nodes and probes sent to the target, the root not counted."""
        return _mean([s.nodes for s in self.steps], 0.0)

    @property
    def depth_per_step(self) -> float:
        """Return the mean depth of the trees."""
        return _mean([s.depth for s in self.steps], 0.0)

    @property
    def draft_steps_per_step(self) -> float:
        """Return the mean number of draft steps for a verification."""
        return _mean([len(w.frontiers) for w in self.work], 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Return new tokens divided by all seconds, with those of the prefill."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the figures by the names of the command line."""
        names = (
            "new_tokens",
            "acceptance_length",
            "alpha",
            "alpha_bound",
            "nodes_per_step",
            "depth_per_step",
            "draft_seconds",
            "verify_seconds",
            "seconds",
            "tokens_per_second",
            "acceptor",
            "draw",
            "lossy",
            "state_bytes",
        )
        return {"steps": len(self.steps)} | {n: getattr(self, n) for n in names}


def total(parts: Sequence[Stats]) -> Stats:
    """Return the figures of several generations together."""
    summed = ("new_tokens", "draft_seconds", "verify_seconds", "seconds")
    return replace(
        parts[0] if parts else Stats(),
        **{name: sum(getattr(p, name) for p in parts) for name in summed},
        phases=dict(sum((Counter(p.phases) for p in parts), Counter[str]())),
        steps=[s for p in parts for s in p.steps],
        work=[w for p in parts for w in p.work],
        lossy=any(p.lossy for p in parts),
        state_bytes=max((p.state_bytes for p in parts), default=0),
    )


def repeated_ngrams(tokens: Sequence[int], n: int = 8) -> float:
    """Return the share of a text's n-grams that occur in it before.

    It is near 0 for prose, and near 1 for a model caught in a loop.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _mean(values: Sequence[float], empty: float) -> float:
    return float(np.mean(values)) if values else empty
