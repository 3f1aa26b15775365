"""Build models of transformers: from a checkpoint, or small new ones of the same architecture."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from draftree.errors import UserError
from draftree.models.model_config import FULL
from draftree.target.config_size_checks import check_bounds, check_shapes
from draftree.target.no_loading_bar import no_loading_bar


def load_pretrained(
    folder: str, config: PreTrainedConfig, dtype: torch.dtype, **how: Any
) -> tuple[Any, dict[str, Any]]:
    """Load a model with transformers; return the model and transformers' loading report.

    Args:
        folder: a folder or a hub id.
        config: the model's config.
        dtype: the dtype of the weights.
        how: further arguments of `from_pretrained`.

    Raises:
        UserError: the sizes in the config differ from the sizes of the weights.
    """
    check_bounds(config, Path(folder))
    if not how.get("trust_remote_code"):  # else the checkpoint brings its class
        check_shapes(config, Path(folder))
    auto: Any = AutoModelForCausalLM
    try:
        with no_loading_bar():
            model, info = auto.from_pretrained(
                folder, config=config, dtype=dtype, output_loading_info=True, **how
            )
    except RuntimeError as error:
        if "mismatch" in str(error):  # transformers names them in a log
            raise UserError(
                f"'{folder}' has a config.json whose sizes are not those of the weights beside it"
            ) from error
        raise
    return model, info


def one_layer(config: PreTrainedConfig, layers: int = 1, **changes: Any) -> PreTrainedModel:
    """Return a new float32 model of the same architecture with few layers and random weights.

    All layers get full attention if the architecture mixes layer types.

    Args:
        config: the config of the original model.
        layers: the number of layers.
        changes: other config entries that replace the original ones.
    """
    values = config.to_dict() | {"num_hidden_layers": layers, "dtype": "float32"} | changes
    for name in ("layer_types", "layers_block_type"):
        if values.get(name):
            values[name] = [FULL] * layers
    if "attn_layer_period" in values:  # Jamba
        values |= {"attn_layer_period": 1, "attn_layer_offset": 0}
    if values.get("attn_layer_indices"):  # Bamba
        values["attn_layer_indices"] = list(range(layers))
    if values.get("mlp_layer_types"):
        values["mlp_layer_types"] = values["mlp_layer_types"][:layers]
    small = type(config)(**{k: v for k, v in values.items() if k != "transformers_version"})
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(small, dtype=torch.float32)
    return model
