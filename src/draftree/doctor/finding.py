"""One figure of a report with its verdict."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

Said = Literal["ok", "warn", "bad"]
PROBABILITY_NOISE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference of a probability between two ways of computing it that counts as noise, by
dtype. In half precision it is `HALF`."""
HALF = 0.1


@dataclass(frozen=True)
class Finding:
    """Store one figure: its name, its value, a verdict, and an explanation."""

    name: str
    value: float | str | None
    verdict: Said
    text: str


def nan_to_null(report: Any) -> dict[str, Any]:
    """Return a report for JSON, dataclasses as dictionaries; numbers not finite become None."""
    text = json.dumps(report, default=asdict)
    found: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
    return found
