"""Refuse quantised checkpoints that cannot be served, before their weights are loaded."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from draftree.errors import UserError, format_value
from draftree.models.model_config import stored_quantization

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "awq": ("accelerate", "gptqmodel"),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "compressed-tensors": ("accelerate", "compressed-tensors"),
    "fp8": ("accelerate",),
    "gptq": ("accelerate", "gptqmodel", "optimum"),
    "mxfp8": ("accelerate",),
    "torchao": ("torchao",),
}
"""The packages that transformers needs for each quantization method.

For other methods transformers names the missing packages itself.
"""
ON_CUDA: Mapping[str, tuple[str, ...]] = {"fp8": ("kernels",), "mxfp8": ("kernels",)}
"""The packages that transformers also needs on a CUDA device."""


def refuse_missing_packages(name: str, config: PreTrainedConfig, place: torch.device) -> None:
    """Refuse quantised weights whose method is unknown or whose packages are not installed.

    transformers loads weights of an unknown method as if they were not quantised. Of several
    missing packages it names only the first.

    Args:
        name: the name of the target, for errors.
        config: the config of the checkpoint.
        place: the device of the weights.

    Raises:
        UserError: the message names the method and the packages to install.
    """
    said = stored_quantization(config)
    if not said:
        return
    method = str(getattr(said.get("quant_method"), "value", said.get("quant_method")))
    about = f"the weights of target '{name}' are quantised by"
    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    if method not in known:
        raise UserError(f"{about} {format_value(method)}, allowed are {', '.join(sorted(known))}")
    needed = PACKAGES.get(method, ()) + (ON_CUDA.get(method, ()) if place.type == "cuda" else ())
    missing = [name for name in needed if find_spec(name.replace("-", "_")) is None]
    if missing:
        told = "which needs packages that are not installed"
        raise UserError(f"{about} {method}, {told}: pip install {' '.join(missing)}")


def packed_weights(network: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers in which methods such as GPTQ and AWQ pack weights into integers."""
    for buffer in network.buffers():
        if buffer.dim() == 2 and buffer.dtype is torch.int32:
            yield buffer


def packed_bits(config: PreTrainedConfig) -> int:
    """Return the number of bits of a weight that is packed into an integer buffer."""
    return int(stored_quantization(config).get("bits") or 4)


def count_parameters(model: PreTrainedModel) -> int:
    """Return the number of a model's weights; weights packed into one integer count separately."""
    plain = sum(p.numel() * (2 if p.dtype is torch.uint8 else 1) for p in model.parameters())
    bits = packed_bits(model.config)
    return plain + sum(packed.nbytes * 8 // bits for packed in packed_weights(model))
