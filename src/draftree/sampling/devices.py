"""Where sampling is computed."""

import torch

from draftree.boundary.machine import has_float64


def on_host(device: torch.device) -> bool:
    """Return whether the host samples from scores that lie on a device: on itself, or without float64."""
    return device.type == "cpu" or not has_float64(device)
