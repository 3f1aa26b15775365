"""Load a target's weights: device placement, adapters, quantisation to 8 and 4 bits."""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from draftree.errors import DraftreeWarning, UserError, format_value
from draftree.models.accelerate_dispatch import is_offloaded, is_spread
from draftree.models.backend_names import EXACT
from draftree.models.int4_linear import GROUP, ROWS, Int4Linear, can_round
from draftree.models.invariant_experts import are_experts
from draftree.target.hub import locate_model
from draftree.target.load_options import Loading
from draftree.target.quantization_support import refuse_missing_packages
from draftree.target.target_names import short_target_name
from draftree.utils.files import as_user_error, check_value, tensor_shapes


def loading_arguments(
    config: PreTrainedConfig, loading: Loading, place: torch.device
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for device and quantisation.

    Args:
        config: the config of the checkpoint.
        loading: the options.
        place: the device of the weights.

    Raises:
        UserError: a package is missing, or an adapter or quantisation was requested for a
            checkpoint that is quantised already.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is not None and (loading.quantize or loading.adapter):
        what = "quantize" if loading.quantize else "adapter"
        raise UserError(
            f"{what} is given for a target that is quantised, allowed only for weights without quantisation"
        )
    refuse_missing_packages(short_target_name(str(config.name_or_path)), config, place)
    told: dict[str, Any] = {}
    # Straight to the device, without a copy of all weights in the host's memory; quantised ones
    # cannot all be moved.
    if (
        loading.device_map is None
        and place.type != "cpu"
        and (stored or loading.quantize or find_spec("accelerate"))
    ):
        told["device_map"] = {"": place}
    if loading.quantize == "int8":
        try:
            from torchao.quantization import Int8WeightOnlyConfig
            from transformers import TorchAoConfig
        except ModuleNotFoundError as error:
            raise UserError(
                f"quantize needs the package '{error.name}': pip install torchao"
            ) from error
        told["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    return told


def merge_adapter(model: Any, loading: Loading) -> Any:
    """Return a model with its adapter merged into the weights; without one, the same model.

    Raises:
        UserError: peft is missing, or the adapter is incomplete, of a kind that cannot be merged,
            or has tensors for layers that the model lacks.
    """
    if loading.adapter is None:
        return model
    try:
        from peft import PeftConfig, PeftModel
    except ModuleNotFoundError as error:
        raise UserError(
            f"an adapter needs the package '{error.name}': pip install 'draftree[adapter]'"
        ) from error
    with as_user_error(f"adapter '{loading.adapter}' cannot be loaded"):
        place = locate_model(
            loading.adapter, file="adapter_config.json"
        )  # without the hub's retries where it cannot be reached
    config = PeftConfig.from_pretrained(place)
    if config.is_prompt_learning:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise UserError(
            f"adapter '{loading.adapter}' is of type {kind}, allowed is one that merges into the weights, as LORA"
        )
    _check_ranks(config, Path(place))
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".is_gradient_checkpointing", FutureWarning
        )  # which peft reads
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        warnings.filterwarnings(
            "error", "Found missing adapter keys"
        )  # else they would keep initial values
        whole: Any = PeftModel.from_pretrained(model, place, config=config)
    unused = whole.load_adapter(place, "default").unexpected_keys  # `from_pretrained` drops them
    if unused:
        told = f"{len(unused)} tensors for layers that the target lacks, such as {unused[0]}"
        raise UserError(
            f"adapter '{loading.adapter}' has {told}: allowed is one trained for this target"
        )
    _untie_adapted_head(model)
    return whole.merge_and_unload()


def _untie_adapted_head(model: Any) -> None:
    """Copy the weight that LM head and embedding share if an adapter changes one of them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    adapted = any(isinstance(layer, BaseTunerLayer) for layer in (head, embedding))
    if adapted and head.weight is embedding.weight:
        inner = getattr(head, "base_layer", head)
        inner.weight = torch.nn.Parameter(inner.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


READ_WEIGHTS = frozenset({"dt_proj", "wg"})
"""Names of linear layers whose weights a model reads by itself, as Mamba, Jamba and HunYuan do."""
RANK_TENSORS = {
    "LORA": ("lora_A.weight", "lora_embedding_A"),
    "LOHA": ("hada_w1_b",),
    "VERA": ("vera_lambda_d",),
}
"""The tensors of an adapter whose first dimension is its rank, by adapter type."""


def _check_ranks(config: Any, folder: Path) -> None:
    """Refuse an adapter's config whose ranks differ from those in the header of its weights.

    The check runs before memory is allocated for the weights.

    Args:
        config: the adapter's peft config.
        folder: the adapter's folder. Nothing is checked if it does not exist, as for a hub id, or
            if weights are pickled.

    Raises:
        UserError: the message names the rank and a tensor.
    """
    file, kind = (
        folder / "adapter_model.safetensors",
        getattr(config.peft_type, "value", config.peft_type),
    )
    if not file.is_file() or kind not in RANK_TENSORS:
        return
    from peft.utils.other import get_pattern_key

    where = f"'{folder / 'adapter_config.json'}'"
    ranks = (
        check_value(
            getattr(config, "rank_pattern", None), dict[str, int] | None, f"{where}: rank_pattern"
        )
        or {}
    )
    for name, shape in tensor_shapes(file).items():
        if not shape or not name.endswith(RANK_TENSORS[kind]):
            continue
        module = next(
            name.removesuffix(f".{end}") for end in RANK_TENSORS[kind] if name.endswith(end)
        )
        pattern = get_pattern_key(list(ranks), module)
        entry = f"rank_pattern['{pattern}']" if pattern in ranks else "r"
        rank = ranks.get(pattern, config.r)
        if rank != shape[0]:
            raise UserError(
                f"{where}: {entry} is {format_value(rank)}, '{file.name}' has {name} {shape}"
            )


def check_weights(model: PreTrainedModel, loading: Loading) -> None:
    """Refuse a model without weights, and options that need all weights on one device.

    Raises:
        UserError: the message names the model or the option.
    """
    if any(p.is_meta for p in model.parameters()) and not is_offloaded(model):
        raise UserError(
            f"the {type(model).__name__} has no weights (device 'meta'), allowed is a model that is loaded"
        )
    wrong = {
        "adapter": loading.adapter,
        "quantize int4": loading.quantize == "int4",
        "exactness bits": loading.exactness == "bits",
        f"attn_implementation {EXACT}": loading.attn_implementation == EXACT,
        "kernels": loading.kernels,
        "compile": loading.compile,
    }
    given = [name for name, value in wrong.items() if value]
    if given and is_spread(model):
        places = sorted(
            {str(p.device).replace("meta", "disk or host memory") for p in model.parameters()}
        )
        told = f"device_map spreads the target over {', '.join(places)}"
        raise UserError(
            f"{given[0]} is given and {told}, allowed with it is one device for all of it"
        )


def round_to_four_bits(model: Any) -> None:
    """Replace a model's linear layers by four-bit layers.

    The LM head is not replaced, nor are layers whose sizes are not multiples of the group size. A
    warning tells the share of rounded weights if experts stay in bfloat16.

    Raises:
        UserError: the model is not on a CPU in bfloat16, or no layer can be rounded.
    """
    if model.device.type != "cpu" or model.dtype is not torch.bfloat16:
        found = f"{str(model.dtype).removeprefix('torch.')} on {model.device}"
        raise UserError(f"quantize is 'int4' for {found}, allowed with it is bfloat16 on a CPU")
    head = model.get_output_embeddings()
    fitting = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if child is not head and name not in READ_WEIGHTS and can_round(child)
    ]
    if not fitting:
        told = f"linear layers whose rows are multiples of {GROUP} and {ROWS} long"
        raise UserError(
            f"quantize is 'int4' for a {type(model).__name__}, allowed only for models with {told}"
        )
    if any(map(are_experts, model.modules())):
        rounded = sum(child.weight.numel() for *_, child in fitting)
        share = rounded / sum(p.numel() for p in model.parameters())
        told = f"quantize int4 rounds {share:.1%} of the weights of a {type(model).__name__}"
        warnings.warn(f"{told}: its experts stay in bfloat16", DraftreeWarning, stacklevel=3)
    for parent, name, child in fitting:
        setattr(parent, name, Int4Linear(child))
