"""Find what each layer of a model caches, by a pass over one token.

A layer may hand keys and values to its cache, or a state, or both. A state must be computed by a
function that draftree replaces; a layer that hides it, such as one with a kernel for the whole
layer, is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from typing_extensions import override

from draftree.errors import UserError
from draftree.models.kv_cache import LayerShape
from draftree.models.model_config import STATEFUL, STATELESS
from draftree.models.one_pass_caches import PassThroughCache
from draftree.models.recurrent.replaced_functions import Stock, state_dtype
from draftree.models.recurrent.state_cache import Key, StateShape


@dataclass(frozen=True)
class StoredShapes:
    """Describe the keys, values and recurrent states that a model's layers store.

    Attributes:
        shapes: the shape of each layer's keys and values; width 0 for layers without them.
        states: the shapes of recurrent states, by layer and number of the state.
        clamped: whether the model bounds time steps in a prompt but not in decoding.
        rules: the names of the functions that update the states.
    """

    shapes: tuple[LayerShape, ...]
    states: dict[Key, StateShape]
    clamped: bool
    rules: frozenset[str]


class _Ours:
    """Mark a recurrent state that was passed to one of draftree's functions."""

    def __init__(self, last: Tensor) -> None:
        self.shape, self.dtype = tuple(last.shape[1:]), state_dtype(last.dtype)

    def to(self, *_: object) -> "_Ours":
        return self


class ShapeRecorder(PassThroughCache):
    """Record the shapes of the tensors that layers hand to their cache, in a pass over one token.

    Recurrent layers run transformers' own functions.

    Args:
        config: the config of the text model.
        name: the name of the model's class, for errors.
        device: the device of the cache.
    """

    def __init__(self, config: PreTrainedConfig, name: str, device: torch.device) -> None:
        super().__init__()
        self._config = config
        self._name = name
        self._device = device
        self._keys: dict[int, LayerShape] = {}
        self._columns: dict[Key, tuple[int, int]] = {}
        self._states: dict[Key, _Ours] = {}
        self._convolved = set[Key]()
        self._rules = set[str]()
        self._clamped = False
        self._now: Key = (-1, 0)

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        device = None if key_states.device == self._device else key_states.device
        self._keys[layer_idx] = LayerShape(
            key_states.shape[1], key_states.shape[3], value_states.shape[3], device
        )
        return key_states, value_states

    @override
    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        self._now = layer_idx, state_idx
        if conv_kernel_size is None:
            self._refuse(
                f"layer {layer_idx} ({self._kind(layer_idx)}) does not say how wide its convolution is"
            )
        self._columns[self._now] = conv_states.shape[1], conv_kernel_size
        return conv_states

    @override
    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Any:
        key = layer_idx, state_idx
        if not isinstance(recurrent_states, _Ours) or key not in self._columns:
            told = "folds the text into a state by a function that draftree has no tree for"
            self._refuse(f"layer {layer_idx} ({self._kind(layer_idx)}) {told}")
        self._states[key] = recurrent_states
        return recurrent_states

    def conv(self, stock: Stock, /, *args: Any, **kwargs: Any) -> Any:
        """Record that the layer has a convolution, and call transformers' own function `stock`."""
        self._convolved.add(self._now)
        return stock(*args, **kwargs)

    def delta(self, stock: Stock, /, *args: Any, **kwargs: Any) -> Any:
        """Record the shape of a gated delta rule's state, and call transformers' own function."""
        return self._stateful("delta", stock, *args, **kwargs)

    def ssd(self, stock: Stock, /, *args: Any, **kwargs: Any) -> Any:
        """Record the shape of a Mamba-2 layer's state, and call transformers' own function.

        Whether the layer clamps its time steps is recorded, too.
        """
        self._clamped |= tuple(kwargs.get("dt_limit", (0.0, float("inf")))) != (0.0, float("inf"))
        return self._stateful("ssd", stock, *args, **kwargs)

    def s6(self, stock: Stock, /, *args: Any, **kwargs: Any) -> Any:
        """Record the shape of a Mamba-1 layer's state, and call transformers' own function."""
        return self._stateful("s6", stock, *args, **kwargs)

    def _stateful(self, rule: str, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out, last = stock(*args, **kwargs)
        self._rules.add(rule)
        return out, _Ours(last)

    def _refuse(self, reason: str) -> NoReturn:
        raise UserError(f"{self._name} is not supported: {reason}")

    def _kind(self, layer: int) -> str:
        types = getattr(self._config, "layer_types", None) or ()
        return str(types[layer]) if layer < len(types) else "of no named type"

    def stored_shapes(self) -> StoredShapes:
        """Return the recorded shapes.

        Raises:
            UserError: a layer stores nothing although it should, or its convolution does not call
                draftree's function.
        """
        layers, stateful = (
            range(int(self._config.num_hidden_layers)),
            {layer for layer, _ in self._columns},
        )
        types = getattr(self._config, "layer_types", None) or ()
        if bypassed := sorted(self._columns.keys() - self._convolved):
            layer = bypassed[0][0]
            self._refuse(
                f"the convolution of layer {layer} ({self._kind(layer)}) is computed by a kernel that knows no tree"
            )
        for layer in sorted(set(layers) - self._keys.keys() - stateful):
            if not stateful and not any(t in STATEFUL for t in types):
                self._refuse("its layers share or skip keys and values")
            if self._kind(layer) not in STATELESS:
                told = "hands its cache neither keys nor a state: it keeps them for itself, or a kernel stands in its place"
                self._refuse(f"layer {layer} ({self._kind(layer)}) {told}")
        none = LayerShape(0, 0, 0)
        states = {
            key: StateShape(
                *form,
                *((s.shape, s.dtype) if (s := self._states.get(key)) else (None, torch.float32)),
            )
            for key, form in self._columns.items()
        }
        shapes = tuple(self._keys.get(layer, none) for layer in layers)
        return StoredShapes(
            shapes,
            states,
            self._clamped,
            frozenset(self._rules | ({"conv"} if self._columns else set())),
        )
