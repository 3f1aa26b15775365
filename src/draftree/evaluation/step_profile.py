"""Profile a step phase by phase, beside the limits of the machine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from draftree.metrics import Stats
from draftree.models.decoder import Decoder
from draftree.target.target import Target
from draftree.utils.hardware import interleaved

PARTS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "prompt/model"),
    "draft passes": ("grow/draft/model", "draft/model"),
    "draft bookkeeping": ("grow/draft", "draft"),
    "growing": ("grow",),
    "packing, mask": ("verify",),
    "target pass": ("verify/model",),
    "p, accepting": ("accept",),
    "committing": ("commit",),
    "text": ("text",),
}
"""Names of the loop's phases, and which of them are summed; the rest is `other`."""
READ, RATE = 1 << 26, 1024
"""Numbers that are read to measure the memory's speed, and the size of the matrices that measure
the arithmetic's."""
LONGEST = 1.0
"""Seconds in which a machine's ceilings are measured."""


@dataclass(frozen=True)
class Ceilings:
    """Store a machine's upper limits: bytes read and operations done per second."""

    bytes: float
    operations: float

    @classmethod
    def measured(cls, decoder: Decoder) -> "Ceilings":
        """Measure the limits by reading much memory and by multiplying large matrices.

        The matrices have the model's dtype.
        """
        row = torch.ones(READ, device=decoder.device)
        square = torch.ones(RATE, RATE, device=decoder.device, dtype=decoder.dtype)
        with torch.inference_mode():
            read, done = interleaved(
                [lambda: row.sum(), lambda: square @ square], decoder.device, LONGEST
            )
        return cls(4 * READ / read, 2 * RATE**3 / done)

    def floor(self, decoder: Decoder, tokens: float, context: float) -> float:
        """Return a lower bound of the seconds of a pass over some tokens with a given context.

        It is the time to read all data once, or to do all operations, whichever is longer. Weights
        are read once per pass; of the embedding only the tokens' rows are read. Keys and values of
        the context are read once, too.
        """
        model: Any = decoder.model
        own = {id(p): p for p in model.parameters()}
        table, head = (
            getattr(get(), "weight", None)
            for get in (model.get_input_embeddings, model.get_output_embeddings)
        )
        if table is not None and table is not head:
            own.pop(id(table), None)
        numbers = sum(p.numel() for p in own.values())
        kept = context * sum(s.heads * (s.key + s.value) for s in decoder.shapes)
        size = torch.empty(0, dtype=decoder.dtype).element_size()
        return float(
            max((numbers + kept) * size / self.bytes, 2 * numbers * tokens / self.operations)
        )


@dataclass(frozen=True)
class Part:
    """Store the figures of one part of a step.

    Attributes:
        name: name of the part.
        seconds: seconds of the part per step; for the prompt, per text.
        share: share of all seconds of the text.
        floor: lower bound of the seconds on this machine, where it is known.
    """

    name: str
    seconds: float
    share: float
    floor: float | None = None


def parts(stats: Stats, floor: float | None = None) -> list[Part]:
    """Return the parts of a step, in the order of the loop.

    Args:
        stats: figures of generated texts.
        floor: lower bound of the seconds of a target pass.
    """
    steps, whole = max(len(stats.work), 1), max(stats.seconds, 1e-12)
    return [
        Part(
            name,
            seconds / (1 if name == "prompt" else steps),
            seconds / whole,
            floor if name == "target pass" else None,
        )
        for name, seconds in together(stats.phases, stats.seconds).items()
    ]


def together(phases: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return the seconds by part, from all seconds and those by phase.

    Parts without any time are left out.
    """
    known = {name: sum(phases.get(phase, 0.0) for phase in those) for name, those in PARTS.items()}
    known["other"] = max(whole - sum(known.values()), 0.0)
    return {name: seconds for name, seconds in known.items() if seconds}


def per_token(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds per token by part, from a benchmark's row."""
    parts = together(row["phases"], row["seconds"])
    return {name: 1e3 * seconds / max(row["new_tokens"], 1) for name, seconds in parts.items()}


def profiled(target: Target, stats: Stats) -> list[Part]:
    """Return the parts of a step with a lower bound for the target's pass.

    The bound follows from the limits of this machine, which are measured here.
    """
    work = stats.work
    tokens, context = (
        float(np.mean(each)) if work else 1.0
        for each in ([w.fed for w in work], [w.context for w in work])
    )
    return parts(stats, Ceilings.measured(target.decoder).floor(target.decoder, tokens, context))


def as_json(found: list[Part]) -> list[dict[str, Any]]:
    """Return the parts by the names of the command line."""
    return [asdict(part) for part in found]
