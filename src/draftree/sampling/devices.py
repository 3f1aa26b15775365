"""Where sampling is computed, and how whole numbers come there."""

import torch
from torch import Tensor

from draftree.boundary.machine import has_float64
from draftree.tree import Ints


def on_host(device: torch.device) -> bool:
    """Return whether the host samples from scores that lie on a device: on itself, or without float64."""
    return device.type == "cpu" or not has_float64(device)


def to_device(values: Ints, device: torch.device) -> Tensor:
    """Return whole numbers on a device, without waiting for it."""
    given = torch.from_numpy(values)
    return given.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else given.to(device)
