"""Choose where sampling is computed: on the host or on the device."""

import torch

from draftree.utils.hardware import has_float64


def on_host(device: torch.device) -> bool:
    """Return whether scores are sampled on the host, given their device.

    They are if the device is a CPU or has no float64.
    """
    return device.type == "cpu" or not has_float64(device)
