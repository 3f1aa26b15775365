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
    """The figures of one verification of one sequence.

    Attributes:
        accepted: number of drafted nodes that were accepted.
        nodes: number of drafted nodes and probes.
        depth: depth of the verified tree.
        sequence: the number of the sequence, by the order in which sequences began in the batch.
    """

    accepted: int
    nodes: int
    depth: int
    sequence: int = 0


@dataclass(frozen=True)
class Work:
    """The number of tokens that the models read in one step, for all sequences together.

    Attributes:
        frontiers: number of nodes that each draft step read.
        fed: number of tokens that the target read: roots, drafted nodes and probes.
        rows: number of sequences in the step.
        context: number of committed tokens of the longest of these sequences.
        finds: number of retrievals without a model pass.
        paused: whether the step ran without the drafter, because the policy paused or the step
            timed a plain pass.
    """

    frontiers: tuple[int, ...]
    fed: int
    rows: int
    context: int
    finds: int = 0
    paused: bool = False


@dataclass(repr=False)
class Stats(Hinting):
    """Figures of one or more generations.

    Attributes:
        new_tokens: number of tokens emitted, without those after the end of a text.
        steps: one entry for each sequence and verification; the prefill has none.
        draft_seconds: seconds of drafting, tree growth and the drafter's commit.
        verify_seconds: seconds of the target's pass, the acceptance and the target's commit.
        seconds: total seconds from the prompt's ids to the last token's id.
        work: one entry for each verification.
        acceptor: name of the acceptor; None for plain decoding.
        draw: how the acceptor needed candidates to be drawn.
        lossy: whether an acceptor that may change the output distribution was used.
        deepest: the largest depth that the policy allows. None if the policy has no bound, and for
            plain decoding.
        state_bytes: largest size in bytes of recurrent states and their snapshots, for a target
            that has such states.
        phases: seconds of each phase of the loop, without the phases inside it (see
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
        """Return a text with the main figures."""
        told = f"{self.new_tokens} tokens, {self.tokens_per_second:.1f} tokens/s, "
        told += f"acceptance_length={self.acceptance_length:.2f}"
        return f"Stats({told})"

    @property
    def acceptance_length(self) -> float:
        """Return τ, the mean of (accepted + 1) over all steps; it is 1.00 for plain decoding.

        Tokens that are cut off after the end of a text are counted.
        """
        return _mean([s.accepted + 1 for s in self.steps], 1.0)

    @property
    def acceptance_lengths(self) -> dict[int, float]:
        """Return τ of each verified sequence, keyed by the number of the sequence."""
        numbers = sorted({step.sequence for step in self.steps})
        return {
            n: _mean([s.accepted + 1 for s in self.steps if s.sequence == n], 1.0) for n in numbers
        }

    @property
    def alpha(self) -> float | None:
        """Return the mean of (accepted + 1) / depth over the steps that drafted; it can exceed 1.

        The depth is that of the step's verified tree. EDD + PCT (section 4.1) divides "by the
        maximum depth of the candidate tree". For the paper's own trees, whose depths vary, this
        definition gives the nearest values: 3.99 / 0.74 = 5.4 layers with `max_depth` 10.
        """
        rates = [(s.accepted + 1) / s.depth for s in self.steps if s.depth]
        return _mean(rates, 0.0) if rates else None

    @property
    def alpha_bound(self) -> float | None:
        """Return τ divided by the largest depth that the policy allows; None if it has no bound.

        This is α of EDD + PCT (section 4.1) for policies that draft all trees to one depth. Its
        Table 2 has 3.99 / 6 = 0.67 for EAGLE-2, even if reranking leaves fewer than six layers, and
        3.56 / 5 = 0.71 for VCT.
        """
        return self.acceptance_length / self.deepest if self.deepest else None

    @property
    def nodes_per_step(self) -> float:
        """Return the mean γ, the number of drafted nodes and probes per verification.

        The root is not counted.
        """
        return _mean([s.nodes for s in self.steps], 0.0)

    @property
    def depth_per_step(self) -> float:
        """Return the mean depth of the verified trees."""
        return _mean([s.depth for s in self.steps], 0.0)

    @property
    def draft_steps_per_step(self) -> float:
        """Return the mean number of draft steps per verification."""
        return _mean([len(w.frontiers) for w in self.work], 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Return new tokens divided by all seconds, the prefill included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the figures as a dictionary, under the names that the command line uses."""
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
    """Return the fraction of a text's n-grams that have occurred in the text before.

    It is near 0 for prose, and near 1 for a model that repeats itself in a loop.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _mean(values: Sequence[float], empty: float) -> float:
    return float(np.mean(values)) if values else empty
