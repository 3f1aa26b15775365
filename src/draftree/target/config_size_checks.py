"""Refuse configs whose sizes the weights of a checkpoint cannot have, before a model is built."""

import copy
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from draftree.errors import UserError
from draftree.utils.files import check_value, tensor_names, tensor_shapes

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Config entries that must be at least 1 in a language model.

The first and the last two may be missing.
"""


def check_bounds(config: PreTrainedConfig, folder: Path) -> None:
    """Refuse sizes that a folder's weights cannot have, before a model is built.

    Args:
        config: the config of the model.
        folder: the folder of the model. If it does not exist, as for a hub id, only sizes below 1
            are refused.

    Raises:
        UserError: the message names the entry.
    """
    text, where = config.get_text_config(decoder=True), folder / "config.json"
    files = [p for p in folder.glob("*") if p.suffix in (".safetensors", ".bin")]
    numbers = sum(p.stat().st_size for p in files)
    layers = sum(len(tensor_names(p)) for p in files if p.suffix == ".safetensors")
    for name in SIZES:
        value = getattr(text, name, None)
        size = check_value(
            value, int | list | None, f"'{where}': {name}", least=1
        )  # some have a list, one for each layer
        most = layers if name == "num_hidden_layers" and layers else numbers
        if files and isinstance(size, int) and size > most:
            raise UserError(
                f"'{where}': {name} is {size}, the weights beside it have room for {most} at most"
            )
    width, heads, depth = (
        getattr(text, name, None) for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if (
        files
        and isinstance(width, int)
        and isinstance(heads, int)
        and isinstance(depth, int)
        and width * heads * depth > 2 * numbers
    ):
        told = f"{heads} heads of {depth} for a hidden size of {width}"  # of the smallest weights, two are in a byte
        raise UserError(
            f"'{where}': head_dim makes {told}, the weights beside it have room for {2 * numbers} numbers at most"
        )


def check_shapes(config: PreTrainedConfig, folder: Path) -> None:
    """Refuse a config whose sizes differ from those in the headers of the weights.

    The check runs before any memory is allocated for the weights: the model is built on the `meta`
    device. A tensor is compared with the one of the same name by its number of elements, because
    transformers renames and transposes some as it reads them. A tensor without a namesake, such as
    merged experts, must not have more elements than all weights together. Quantised weights are not
    checked.

    Args:
        config: the config of the model.
        folder: the folder of the model. Nothing is checked if it does not exist, as for a hub id,
            or if weights are pickled.

    Raises:
        UserError: the message names a tensor, and the config entry of its size if one is known.
    """
    files = [folder / "model.safetensors"]
    files = files if files[0].is_file() else sorted(folder.glob("model-*-of-*.safetensors"))
    if not files or getattr(config, "quantization_config", None):
        return
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"), no_init_weights():
        model = auto.from_config(copy.deepcopy(config), dtype=torch.float32)
    found = {
        name: (shape, file.name) for file in files for name, shape in tensor_shapes(file).items()
    }
    numbers = sum(prod(shape) for shape, _ in found.values())
    for name, value in model.state_dict().items():
        wanted = list(value.shape)
        shape, file = found.get(name, ([], ""))
        if prod(wanted) == prod(shape) if file else prod(wanted) <= numbers:
            continue
        values = config.get_text_config(decoder=True).to_dict().items()
        odd = set(wanted) - set(shape)
        entries = [f"{key} {size}" for key, size in values if type(size) is int and size in odd]
        cause = f"{' or '.join(entries)} makes" if file and entries else "its sizes make"
        there = (
            f"'{file}' has {shape}"
            if file
            else f"the weights beside it have {numbers} numbers in all"
        )
        raise UserError(f"'{folder / 'config.json'}': {cause} {name} {wanted}, {there}")
