"""Profile a step phase by phase, beside the limits of the machine."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.metrics import Stats
from draftree.models.causal_lm import CausalLM
from draftree.target.target import Target
from draftree.utils.hardware import product_dtypes, time_interleaved

PHASES_BY_PART: Mapping[str, tuple[str, ...]] = {
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
"""Phases of the decoding loop by the name of the part to which their seconds are added. Time
outside these phases is called `other`."""
READ, RATE = 1 << 26, 1024
"""Number of float32 values that are read to measure the memory bandwidth, and number of rows and
columns of the matrices that are multiplied to measure the arithmetic rate."""
MAX_PROBE_SECONDS = 1.0
"""Time limit in seconds for measuring a machine's upper limits."""


@dataclass(frozen=True)
class Ceilings:
    """Store a machine's upper limits: bytes read per second, and operations per second."""

    bytes: float
    operations: float

    @classmethod
    def measure(cls, decoder: CausalLM) -> "Ceilings":
        """Measure the limits of the model's device: read a large tensor, and multiply matrices.

        The matrices have the fastest of `product_dtypes`.
        """
        device = decoder.device
        row = torch.ones(READ, device=device)
        dtypes = product_dtypes(device, decoder.dtype)
        squares = [torch.ones(RATE, RATE, device=device, dtype=dtype) for dtype in dtypes]
        works: list[Callable[[], Tensor]] = [row.sum, *(partial(torch.mm, s, s) for s in squares)]
        with torch.inference_mode():
            read, *products = time_interleaved(works, device, MAX_PROBE_SECONDS)
        return cls(4 * READ / read, 2 * RATE**3 / min(products))

    def floor(self, decoder: CausalLM, tokens: float, context: float) -> float:
        """Return a lower bound for the seconds of a pass over `tokens` after `context` tokens.

        The bound is the time for reading all data once or the time for all operations, whichever is
        longer. The data are the weights without the embedding, and the keys and values of the
        context.
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
        seconds: seconds of the part per step; for the part `prompt`, per text.
        share: share of the part in all seconds of the text.
        floor: lower bound for the seconds on this machine; None if it is not known.
    """

    name: str
    seconds: float
    share: float
    floor: float | None = None


def part_figures(stats: Stats, floor: float | None = None) -> list[Part]:
    """Return the figures of a step's parts, in the order in which they run.

    Args:
        stats: figures of generated texts.
        floor: lower bound for the seconds of a target pass.
    """
    steps, whole = max(len(stats.work), 1), max(stats.seconds, 1e-12)
    return [
        Part(
            name,
            seconds / (1 if name == "prompt" else steps),
            seconds / whole,
            floor if name == "target pass" else None,
        )
        for name, seconds in sum_phases(stats.phases, stats.seconds).items()
    ]


def sum_phases(phases: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return the seconds of each part of a step, such as `target pass`.

    A part is one or several phases of the decoding loop (`PHASES_BY_PART`). Time outside all phases
    is the part `other`. Parts that took no time are left out.

    Args:
        phases: the seconds of each phase.
        whole: the seconds of the whole step.
    """
    known = {
        name: sum(phases.get(phase, 0.0) for phase in those)
        for name, those in PHASES_BY_PART.items()
    }
    known["other"] = max(whole - sum(known.values()), 0.0)
    return {name: seconds for name, seconds in known.items() if seconds}


def per_token(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds per new token by part, from a benchmark's row."""
    parts = sum_phases(row["phases"], row["seconds"])
    return {name: 1e3 * seconds / max(row["new_tokens"], 1) for name, seconds in parts.items()}


def profile_step(target: Target, stats: Stats) -> list[Part]:
    """Return the figures of a step's parts, with a lower bound for the target pass.

    The bound is computed from the limits of this machine, which this function measures.
    """
    work = stats.work
    tokens, context = (
        float(np.mean(each)) if work else 1.0
        for each in ([w.fed for w in work], [w.context for w in work])
    )
    return part_figures(
        stats, Ceilings.measure(target.decoder).floor(target.decoder, tokens, context)
    )


def as_json(found: list[Part]) -> list[dict[str, Any]]:
    """Return the parts as dictionaries with the names that the command line prints."""
    return [asdict(part) for part in found]
