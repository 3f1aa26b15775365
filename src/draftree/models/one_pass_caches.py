"""Caches for one pass over whole texts: one stores nothing, the others collect keys and values.

Shapes: R rows, n tokens of each, H key-value heads.
"""

from collections.abc import Callable, Container
from contextlib import suppress
from typing import Any

from torch import Tensor
from transformers import Cache
from typing_extensions import override


class PassThroughCache(Cache):
    """Provide an empty cache for one pass over whole texts.

    Layers with a recurrent state find no state in it and store none.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    @override
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that the model computes the convolution over all tokens."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that the model starts from an empty state."""

    @override
    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = 0) -> bool:
        return False

    @override
    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    @override
    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        return conv_states

    @override
    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Any:
        return recurrent_states


class KVCollector(PassThroughCache):
    """Collect the keys and values [R, H, n, width] that one pass over whole texts stores, by layer.

    Args:
        layers: the layers whose keys and values are collected; all by default.
    """

    def __init__(self, layers: Container[int] | None = None) -> None:
        super().__init__()
        self._layers = layers
        self.caught: dict[int, tuple[Tensor, Tensor]] = {}

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._layers is None or layer_idx in self._layers:
            self.caught[layer_idx] = key_states, value_states
        return key_states, value_states


class _InterruptingCache(KVCollector):
    """Stop a pass when a layer first writes to the cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        super().update(key_states, value_states, layer_idx)
        raise _PassStopped


class _PassStopped(Exception):
    """Signal that a pass has computed the requested keys and values."""


def capture_first_kv(run: Callable[[Cache], Any]) -> tuple[Tensor, Tensor]:
    """Return the first keys and values [R, H, n, width] that a pass hands to its cache.

    The pass is stopped at that point.
    """
    cut = _InterruptingCache()
    with suppress(_PassStopped):
        run(cut)
    (found,) = cut.caught.values()
    return found
