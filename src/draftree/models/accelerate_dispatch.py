"""Models that accelerate has distributed over devices, or offloaded to host memory or disk.

accelerate's hooks move the inputs of a layer to the device where the layer computes. draftree
stores the keys and values of each layer there, and brings all else to the device of the input
tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def is_spread(model: nn.Module) -> bool:
    """Return whether a model's weights are on several devices or are loaded during each pass."""
    return len({p.device for p in model.parameters()}) > 1 or is_offloaded(model)


def is_offloaded(model: nn.Module) -> bool:
    """Return whether the model has weights that hooks load when their layer runs."""
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    return hooked and any(p.is_meta for p in model.parameters())


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device on which the embedding runs; token ids must be there."""
    if not (hasattr(model, "_hf_hook") or hasattr(model, "hf_device_map")):
        return model.device
    embedding: Any = model.get_input_embeddings()
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    if device is None:
        return model.device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def move_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without a copy if it is already there."""
    return values if values.device == device else values.to(device)
