"""Refuse unsupported architectures, with the reason, before weights are loaded."""

import inspect
import json
import sys
from collections.abc import Mapping

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from draftree.errors import UserError
from draftree.models.model_config import (
    CACHES,
    FULL,
    SLIDING,
    STATEFUL,
    STATELESS,
    cache_argument,
    stored_quantization,
)
from draftree.models.recurrent.replaced_functions import NAMES

MIN_TRANSFORMERS_VERSION = (5, 23)
"""The oldest transformers whose recurrent layers are supported.

Its layers call the functions of `recurrent/replaced_functions.py` with the expected arguments.
"""
UNSUPPORTED_REASONS: Mapping[str, str] = {
    "minimax": "its lightning attention is computed inside the layer, with a cache of its own kind",
    "recurrent_gemma": "its states lie in its modules, outside any cache",
    "rwkv": "its states are lists of its own, outside any cache",
    "xlstm": "its states are an object of its own, which takes several tokens at a time only at the beginning",
}
"""Models whose recurrent states cannot be reached, with the reason."""
SLOT_WINDOW_MODELS = ("gpt_neo",)
"""Models whose layers apply their attention window by cache slot rather than by position."""


def refuse_unsupported(config: PreTrainedConfig, kind: type[PreTrainedModel] | None) -> None:
    """Refuse an architecture in which a draft tree cannot be verified.

    The weights are not read, so that they need not be loaded before this check.

    Args:
        config: the config of the model.
        kind: the class of the model; None if transformers has no causal language model for the
            config.

    Raises:
        UserError: the message names the architecture and the reason.
    """
    if reason := _explain_unsupported(config, config.get_text_config(decoder=True), kind):
        name = type(config).__name__ if kind is None else kind.__name__
        raise UserError(f"{name} (model_type '{config.model_type}') is not supported: {reason}")


def _explain_unsupported(
    whole: PreTrainedConfig, config: PreTrainedConfig, kind: type[PreTrainedModel] | None
) -> str | None:
    """Return why a draft tree cannot be verified in a model, or None if it can.

    Args:
        config: the part of `whole` that describes the text model.
        whole: the config of the model.
        kind: the class of the model; None if transformers has none.
    """
    if whole.is_encoder_decoder:
        return "it is an encoder-decoder, and draftree drives decoder-only models"
    if {"is_decoder", "add_cross_attention"} <= vars(
        config
    ).keys():  # BERT's family, decoder or not
        return "it is an encoder by design, and draftree drives decoder-only models"
    types = set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING}
    states = has_recurrent_state(config, kind)
    if states and (reason := _explain_unreachable(config, kind)):
        return reason
    if strange := sorted(types - set(STATEFUL + STATELESS if states else ())):
        return f"its {', '.join(strange)} layers see by rules of their own; allowed are {FULL} and {SLIDING}"
    if getattr(config, "num_kv_shared_layers", None):
        return "its last layers share the keys and values of earlier ones"
    if getattr(config, "alibi", False) or config.model_type in SLOT_WINDOW_MODELS:
        return "it measures distances in cache slots, where a tree's nodes do not lie in the order of their positions"
    if reason := shared_rounding(whole):
        return reason
    if kind is None:
        return "transformers has no causal language model of this type"
    parameters = inspect.signature(kind.forward).parameters
    alone = states and not getattr(
        config, "num_attention_heads", None
    )  # states are all it has: no mask and no positions
    laid_out = () if alone else ("position_ids", "attention_mask")
    needed = *laid_out, cache_argument(parameters) or CACHES[0], "logits_to_keep"
    if missing := [p for p in needed if p not in parameters]:
        return f"its forward takes no {', '.join(missing)}, so a tree cannot be laid out in it"
    return None


def _explain_unreachable(
    config: PreTrainedConfig, kind: type[PreTrainedModel] | None
) -> str | None:
    """Return why recurrent states cannot be computed along tree paths; None if they can."""
    if kind is None:
        return None
    about = "it folds the text into a state, "
    if not kind.__module__.startswith("transformers."):
        return f"{about}and its code is not transformers' own, so how it does is not known"
    if not NAMES.keys() & vars(sys.modules[kind.__module__]).keys():
        return about + UNSUPPORTED_REASONS.get(
            config.model_type, "by code of its own, for which draftree has no tree"
        )
    if tuple(map(int, transformers.__version__.split(".")[:2])) < MIN_TRANSFORMERS_VERSION:
        oldest = ".".join(map(str, MIN_TRANSFORMERS_VERSION))
        return f"{about}which takes transformers {oldest} or newer, and this is {transformers.__version__}"
    return None


def shared_rounding(config: PreTrainedConfig) -> str | None:
    """Return why a token's rounding depends on the other tokens of a pass; None if it does not.

    With such rounding, a token's logits would depend on the draft tree in which it is verified.
    """
    said = stored_quantization(config)
    threshold = float(said.get("llm_int8_threshold", 6.0)) if said.get("load_in_8bit") else 0.0
    if threshold:
        return f"its llm_int8_threshold of {threshold} lets all tokens of a pass decide how each is rounded; allowed is 0"
    groups = said.get("config_groups") or {}
    rounded = [g.get("input_activations") or {} for g in groups.values() if isinstance(g, dict)]
    whole = any(a.get("dynamic") and a.get("strategy") == "tensor" for a in rounded)
    kinds = json.dumps(said.get("quant_type"), default=str)  # of torchao
    if whole or ("DynamicActivation" in kinds and "PerTensor" in kinds):
        told = "its activations are rounded by one scale for all tokens of a pass"
        return (
            f"{told}, which is measured in that pass; allowed is one for each token, or a fixed one"
        )
    return None


def has_recurrent_state(config: PreTrainedConfig, kind: type[PreTrainedModel] | None) -> bool:
    """Return whether a model with such a config has layers with a recurrent state.

    Only the config and the class are inspected.
    """
    types = getattr(config, "layer_types", None)
    return (
        any(t in STATEFUL for t in types) if types else bool(getattr(kind, "_is_stateful", False))
    )
