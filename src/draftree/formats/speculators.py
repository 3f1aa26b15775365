"""Checkpoint layout of the library `speculators`: EAGLE, EAGLE-3 and P-EAGLE.

Beside the original layout: `fc.` is `fusion_fc.` and `layers.0.` is `transformer.` in EAGLE's,
which has no embedding of its own; `midlayer.` is `layers.0.` in EAGLE-3's; P-EAGLE's tensors are
named alike in both. The config nests the layers' as `transformer_layer_config` and says under
`speculators_config` how and for which target ("verifier") to draft.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftree.errors import UserError
from draftree.formats import config_entries
from draftree.formats.checkpoint import CONFIG, DRAFTREE_ENTRY, Checkpoint
from draftree.utils.files import Entries

KIND = "speculators_model_type"
LAYER_CONFIG = "transformer_layer_config"
SPECULATORS_CONFIG_KEY = "speculators_config"
EMBEDDING_WEIGHT = "embed_tokens.weight"
"""The name of a drafter's own embedding, in either layout."""
PREFIXES: Mapping[str, Mapping[str, str]] = {
    "eagle": {"fc.": "fusion_fc.", "layers.0.": "transformer."},
    "eagle3": {"midlayer.": "layers.0."},
}
"""Prefixes of tensor names in the original layout, with those in the layout of speculators."""
OMITTED_TENSORS: Mapping[str, Sequence[str]] = {"eagle": (EMBEDDING_WEIGHT,), "eagle3": ()}
"""Tensors of the original layout that the layout of speculators does not have."""
ARCHITECTURES = {
    "eagle": ("EagleSpeculator", "LlamaForCausalLM"),
    "eagle3": ("Eagle3Speculator", "LlamaForCausalLMEagle3"),
    "peagle": ("PEagleSpeculator", "PEagleDraftModel"),
}
"""The network's name in configs of speculators, and in the original layout."""
VERSIONS = {"eagle": "0.1.0", "eagle3": "0.2.0", "peagle": "0.5.0"}
"""The version of speculators whose layout is written; later versions have no EAGLE-1."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FIELDS = ("draft_vocab_size", "norm_before_residual", "target_hidden_size", LAYER_IDS)
"""EAGLE-3's own config entries outside the layer's config; the original layout is flat."""
TYPES: Mapping[str, Any] = {
    "draft_vocab_size": int | None,
    "target_hidden_size": int | None,
    "norm_before_residual": bool | None,
    "bias": bool,
    "fusion_bias": bool,
    LAYER_IDS: list[int] | None,
}
"""The types of optional entries, in either layout."""
DEFAULT_DRAFT_TOKENS = 5
"""The length of the chain that a server drafts by default."""
WRAPPER_KEYS = (
    DRAFTREE_ENTRY,
    KIND,
    SPECULATORS_CONFIG_KEY,
    LAYER_CONFIG,
    "speculators_version",
    "transformers_version",
)
"""Entries about the checkpoint rather than the network."""
MASKS = ("mask_token_id", "ptd_token_id", "pard_token")
"""The possible names of a P-EAGLE's mask token."""
DEPTHS_ENTRY = "num_depths"
"""The entry of a flat P-EAGLE config for the number of tokens that a pass drafts."""


def checkpoint_name_map(config: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function that maps tensor names of the original layout to a checkpoint's names.

    Args:
        config: the checkpoint's config, which says whether it has the layout of speculators.
    """
    prefixes = PREFIXES.get(str(config.get(KIND)), {})
    return lambda key: _replace_prefix(key, prefixes)


def to_original_name(config: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function that maps tensor names of a checkpoint to names of the original layout.

    Args:
        config: the checkpoint's config, which says whether it has the layout of speculators.
    """
    prefixes = {here: there for there, here in PREFIXES.get(str(config.get(KIND)), {}).items()}
    return lambda key: _replace_prefix(key, prefixes)


def _replace_prefix(key: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def load_checkpoint(stored: Checkpoint, method: str) -> tuple[Checkpoint, dict[str, Any]]:
    """Return a checkpoint in either layout with its tensors, and its config.

    The config is a copy in the original layout.

    Raises:
        UserError: the checkpoint cannot be read, belongs to another method, or has an unsupported
            network; the message names the flag.
    """
    stored = replace(stored.load_tensors(), name=checkpoint_name_map(stored.config))
    config, where = deepcopy(stored.config), stored.folder
    said = Entries(config, where / CONFIG)
    for name, hint in TYPES.items():
        said.get(name, hint, None, least=0)
    _refuse_unsupported(config, method, where)
    layer = layer_of(config, method, where)
    if KIND not in config:
        return stored, config
    if method == "eagle":
        return stored, layer | {
            "bias": config.get("fusion_bias", "fusion_fc.bias" in stored.tensors)
        }
    return stored, layer | {k: config[k] for k in FIELDS if config.get(k) is not None}


def layer_of(config: dict[str, Any], method: str, where: Path) -> dict[str, Any]:
    """Return the config of the decoder layer, in either layout, after checking its entries.

    Raises:
        UserError: the layer is of another type, or an entry changes the network in a way that is
            not supported.
    """
    if KIND not in config:
        (config_entries.PEAGLE if method == "peagle" else config_entries.EAGLE).check_layer(
            config, where, method
        )
        return dict(config)
    config_entries.SPECULATORS.check(config, where, method)
    layer = config.get(LAYER_CONFIG)
    if not isinstance(layer, dict) or layer.get("model_type", "llama") != "llama":
        got = layer.get("model_type") if isinstance(layer, dict) else layer
        raise UserError(f"'{where}' has a {LAYER_CONFIG} of '{got}', allowed is 'llama'")
    config_entries.LLAMA.check_layer(layer, where, method)
    return layer


def _refuse_unsupported(config: dict[str, Any], method: str, where: Path) -> None:
    if KIND in config and config[KIND] != method:
        raise UserError(f"'{where}' has {KIND} '{config[KIND]}', allowed is '{method}'")
    ids = config.get(LAYER_IDS)
    if ids and len(ids) != 3:
        raise UserError(f"'{where}' has {LAYER_IDS} {ids}, allowed are three layers")


def make_defaults_explicit(values: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return a dict of a flat config's optional entries; missing entries get their defaults."""
    if method == "eagle":
        return {"bias": bool(values.get("bias", True))}
    return {"draft_vocab_size": values.get("draft_vocab_size") or values["vocab_size"]}


def to_speculators(
    values: Mapping[str, Any],
    method: str,
    verifier: Mapping[str, Any],
    layers: int = 1,
    drafted: int = DEFAULT_DRAFT_TOKENS,
) -> dict[str, Any]:
    """Convert a config from the original layout to the layout of speculators.

    Args:
        values: the config in the original layout.
        method: `eagle`, `eagle3` or `peagle`.
        verifier: `name_or_path` and `architectures` of the target.
        layers: the number of layers of the drafter.
        drafted: the number of tokens in a drafted chain.
    """
    outside = {*FIELDS, *MASKS, DEPTHS_ENTRY, "bias", "architectures", "torch_dtype", "dtype"}
    layer = {k: v for k, v in values.items() if k not in outside} | {
        "model_type": "llama",
        "num_hidden_layers": layers,
    }
    if method == "eagle":
        flags: dict[str, Any] = {
            "fusion_bias": make_defaults_explicit(values, method)["bias"],
            "layernorms": False,
        }
    else:
        flags = {k: values.get(k) for k in FIELDS} | make_defaults_explicit(values, method)
        flags["norm_before_residual"] = bool(flags["norm_before_residual"])
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafted,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    how = {
        "algorithm": method,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": dict(verifier),
    }
    about: dict[str, Any] = {
        KIND: method,
        "speculators_version": VERSIONS[method],
        "architectures": [ARCHITECTURES[method][0]],
    }
    if dtype := values.get("torch_dtype", values.get("dtype")):
        about |= {"torch_dtype": dtype}
    return about | flags | {SPECULATORS_CONFIG_KEY: how, LAYER_CONFIG: layer}


def describe_verifier(config: Mapping[str, Any]) -> tuple[str, Sequence[str]] | None:
    """Return name and architectures of the target that a config names."""
    how = config.get(SPECULATORS_CONFIG_KEY)
    said = how.get("verifier") if isinstance(how, dict) else None
    if not isinstance(said, dict) or not said.get("name_or_path"):
        return None
    return str(said["name_or_path"]), list(said.get("architectures") or [])
