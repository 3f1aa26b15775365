"""One figure of a report with its verdict."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

Said = Literal["ok", "warn", "bad"]
APART = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference of a probability between training forward and decoding that is noise; `HALF`
in half precision."""
HALF = 0.1


@dataclass(frozen=True)
class Finding:
    """Store one figure: its name, value and verdict, and what it means in words."""

    name: str
    value: float | str | None
    verdict: Said
    text: str


def finite(report: Any) -> dict[str, Any]:
    """Return a dataclass for JSON; figures that are not finite become null."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(report)), parse_constant=lambda _: None)
    return found
