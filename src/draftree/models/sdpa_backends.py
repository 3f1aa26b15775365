"""Choose among torch's attention kernels for sizes that occur once."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

UNPLANNED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention kernels of torch that need no planning for a new size."""


def unplanned_attention(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which a GPU computes attention without cuDNN.

    cuDNN plans each new size for about 50 ms (H100, torch 2.11), which is several passes.
    """
    return sdpa_kernel(UNPLANNED_BACKENDS) if device.type == "cuda" else nullcontext()
