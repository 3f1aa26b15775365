"""A figure with its verdict, and what counts as noise."""

from dataclasses import dataclass
from typing import Literal

import torch

Said = Literal["ok", "warn", "bad"]
APART = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference of a probability between training forward and decoding that is noise; `HALF` in half precision."""
HALF = 0.1


@dataclass(frozen=True)
class Finding:
    """One figure: its name, value and verdict, and what it means in words."""

    name: str
    value: float | str | None
    verdict: Said
    text: str
