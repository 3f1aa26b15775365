"""A copy of a model that shares its weights and whose modules draftree may change.

If a pass needs modules that compute in another way, they are changed in such a copy. The original
model stays as it was, and no weight is stored twice.
"""

import copy
from types import MethodType
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedConfig

Model = TypeVar("Model", bound=nn.Module)
OLD_FORWARD = "_old_forward"
"""The attribute in which accelerate keeps the forward that its hook replaces."""


def share_weights(model: Model) -> Model:
    """Return a copy of a model with modules and configs of its own, but the same weight tensors."""
    return cast(Model, _copy_module(model, {}, {}))


def _copy_module(
    module: nn.Module, made: dict[nn.Module, nn.Module], configs: dict[int, Any]
) -> nn.Module:
    if module in made:
        return made[module]
    new = made[module] = copy.copy(module)
    own = vars(new)
    for name, value in list(own.items()):
        if isinstance(value, PreTrainedConfig):
            own[name] = copy.deepcopy(value, configs)
        elif isinstance(value, dict):  # of weights, buffers, hooks
            own[name] = copy.copy(value)
        elif isinstance(value, nn.Module):  # held in addition to the parts
            own[name] = _copy_module(value, made, configs)
    forward = own.get(OLD_FORWARD, own.get("forward"))
    if isinstance(forward, MethodType) and forward.__self__ is module:
        own["forward"] = MethodType(forward.__func__, new)
    own["_modules"] = {
        name: None if part is None else _copy_module(part, made, configs)
        for name, part in module._modules.items()
    }
    return new
