"""Read a model's config: types of layers and rotary embeddings, and the cache argument."""

import inspect
import warnings
from collections.abc import Container
from typing import Any

from transformers import PreTrainedConfig

from draftree.errors import DraftreeWarning, format_value

FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers with attention, over the whole text and over a window of it."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Types of rotary embeddings whose frequencies depend on the length of the text."""
STATEFUL = ("linear_attention", "conv", "mamba", "hybrid", "recurrent")
"""Types of layers with a recurrent state; `hybrid` layers also have keys and values."""
STATELESS = ("moe", "mlp")
"""Types of layers that store nothing in a cache."""
CACHES = ("cache", "past_key_values", "cache_params")
"""Names of a forward's cache argument.

The first is that of transformers from 5.24 on. The second is that of earlier versions, and the
third that of earlier versions for models with only recurrent states.
"""


def cache_argument(takes: Container[str]) -> str | None:
    """Return the name of a forward's cache argument, or None if it accepts no cache."""
    return next((name for name in CACHES if name in takes), None)


def entry(config: PreTrainedConfig, name: str) -> Any:
    """Return an entry of a config, or None if the config's class does not define the entry.

    transformers keeps all entries of a `config.json`, even if no model of the class reads them. A
    warning names the entry that is left out. Classes from outside transformers are not checked:
    their entries are always returned.
    """
    value, kind = getattr(config, name, None), type(config)
    if not value or _has(kind, name) or not kind.__module__.startswith("transformers."):
        return value
    told = (
        f"the target's config has {name} {format_value(value)}, "
        f"which a {config.model_type} has not: it is not used"
    )
    warnings.warn(told, DraftreeWarning, stacklevel=4)
    return None


def _has(kind: type[PreTrainedConfig], name: str) -> bool:
    """Return whether a class of configs has an entry.

    Computed entries count too, such as `layer_types` of hybrid models.
    """
    if hasattr(kind, name) or name in inspect.signature(kind.__init__).parameters:
        return True
    try:
        return hasattr(kind(), name)
    except Exception:  # a class without defaults
        return False


def stored_quantization(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a checkpoint's `quantization_config` as a dictionary; empty if it is not quantised."""
    stored = getattr(config, "quantization_config", None) or {}
    said: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    return said
