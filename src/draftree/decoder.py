"""A stock Hugging Face causal language model, fed with tokens, positions, mask and cache from outside.

The target is one, and so are the drafters that are transformers; no modeling file is forked.

Shapes: R rows, n tokens a row in one pass (padded), S slots, D hidden size, V vocabulary, L layers.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, PreTrainedConfig, PreTrainedModel

from draftree.cache import LayerShape, SlotCache
from draftree.errors import UserError
from draftree.tree import Bools, Ints

FULL, SLIDING = "full_attention", "sliding_attention"
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Feed:
    """The tokens of one forward pass.

    Attributes:
        tokens: [R, n] ids; rows with fewer tokens are padded with anything.
        positions: [R, n] position ids.
        starts: [R] the slot of each row's first token.
        visible: for each row, [n_r, m_r] whether its token i sees scratch slot j, where scratch slot 0 is the first
            slot behind the row's committed ones and m_r = starts[r] + n_r − committed. Committed slots are seen by all.
        scratch_positions: for each row, [m_r] the positions of its scratch slots.
    """

    tokens: Tensor
    positions: Ints
    starts: Ints
    visible: Sequence[Bools]
    scratch_positions: Sequence[Ints]

    @classmethod
    def packed(cls, rows: Sequence[Ints], positions: Sequence[Ints], starts: Ints, visible: Sequence[Bools],
               scratch_positions: Sequence[Ints], device: torch.device) -> Self:
        """The feed of ragged rows: `rows[r]` holds the token ids of row r."""
        n = max(1, max(len(t) for t in rows))
        tokens, places = np.zeros((len(rows), n), np.int64), np.zeros((len(rows), n), np.int64)
        for r, (ids, at) in enumerate(zip(rows, positions, strict=True)):
            tokens[r, : len(ids)], places[r, : len(ids)] = ids, at
        return cls(torch.from_numpy(tokens).to(device), places, starts, visible, scratch_positions)

    @classmethod
    def chains(cls, rows: Sequence[Ints], starts: Ints, device: torch.device) -> Self:
        """The feed of plain text behind each row's committed tokens: a prompt, or one token of plain decoding."""
        positions = [s + np.arange(len(t)) for s, t in zip(starts.tolist(), rows, strict=True)]
        visible = [np.tri(len(t), dtype=np.bool_) for t in rows]
        return cls.packed(rows, positions, starts, visible, positions, device)


class Decoder:
    """A model with the little that trees need to know about it.

    Args:
        model: a causal language model of transformers 5.

    Raises:
        UserError: the architecture cannot be fed a tree; the text names it and the reason.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.config: PreTrainedConfig = model.config.get_text_config(decoder=True)
        refuse_unsupported(model)
        self.layer_types: tuple[str, ...] = tuple(getattr(self.config, "layer_types", None) or ())
        self.window: int | None = self._window()

    def _window(self) -> int | None:
        if self.layer_types and SLIDING not in self.layer_types:
            return None
        return getattr(self.config, "sliding_window", None)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return self.model.dtype

    @property
    def vocab(self) -> int:
        """V, the width of its logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def hidden(self) -> int:
        """D, the width of its hidden states."""
        return int(self.config.hidden_size)

    @property
    def context(self) -> int:
        """How many positions it knows."""
        return int(getattr(self.config, "max_position_embeddings", None) or 2**31)

    @cached_property
    def layers(self) -> nn.ModuleList:
        """Its transformer layers."""
        count = self.config.num_hidden_layers
        return next(m for m in self.model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)

    @cached_property
    def rope_boundary(self) -> tuple[str, int] | None:
        """(kind, length) where the rotary frequencies change with the length of the text, else None."""
        parameters = getattr(self.config, "rope_parameters", None) or {}
        for each in (parameters, *(p for p in parameters.values() if isinstance(p, dict))):
            if each.get("rope_type") in LENGTH_DEPENDENT_ROPE:
                return each["rope_type"], int(each.get("original_max_position_embeddings") or self.context)
        return None

    @cached_property
    def shapes(self) -> tuple[LayerShape, ...]:
        """What each layer stores, read off a pass over one token."""
        recorder = _Recorder()
        with torch.inference_mode():
            one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            mask = self.by_type(torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device))
            self.model(input_ids=one, position_ids=one, attention_mask=mask, past_key_values=recorder, use_cache=True)
        if sorted(recorder.seen) != list(range(self.config.num_hidden_layers)):
            raise UserError(f"{type(self.model).__name__} is not supported: its layers share or skip keys and values")
        return tuple(recorder.seen[i] for i in sorted(recorder.seen))

    def new_cache(self, rows: int, slots: int) -> SlotCache:
        """An empty cache for `rows` sequences with room for `slots` tokens each, to begin with."""
        cache = SlotCache(self.shapes, rows, self.dtype, self.device)
        cache.reserve(slots)
        return cache

    def by_type(self, full: Tensor, sliding: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """The mask in the form the model takes: one tensor, or one for each type of layer it mixes."""
        windowed = full if sliding is None else sliding
        if len(set(self.layer_types)) > 1:
            return {FULL: full, SLIDING: windowed}
        return windowed if self.window is not None else full

    def mask(self, feed: Feed, committed: Ints) -> Tensor | dict[str, Tensor]:
        """Additive attention mask [R, 1, n, S] of a feed; S ends with its last token."""
        rows, n = feed.tokens.shape
        slots = int(feed.starts.max()) + n
        lowest = torch.finfo(self.dtype).min  # finite: a padding row that sees nothing must not become NaN
        full = torch.full((rows, 1, n, slots), lowest, dtype=self.dtype)
        for r, seen in enumerate(feed.visible):
            length, (wide, deep) = int(committed[r]), seen.shape
            full[r, 0, :, :length] = 0
            full[r, 0, :wide, length : length + deep].masked_fill_(torch.from_numpy(seen), 0)
        if self.window is None:
            return self.by_type(full.to(self.device))
        sliding = full.clone()
        for r, scratch in enumerate(feed.scratch_positions):
            keys = np.concatenate((np.arange(committed[r]), scratch))
            far = feed.positions[r][:, None] - keys[None, :] >= self.window
            sliding[r, 0, :, : len(keys)].masked_fill_(torch.from_numpy(far), lowest)
        return self.by_type(full.to(self.device), sliding.to(self.device))

    def forward(self, cache: SlotCache, feed: Feed, keep: int | Tensor = 0) -> Tensor:
        """One pass over a feed, written into scratch slots of the cache.

        Args:
            cache: of this model.
            feed: the tokens.
            keep: as transformers' `logits_to_keep`: 0 for all columns, or a tensor of columns.

        Returns:
            Logits [R, n or len(keep), V].
        """
        output = self.model(
            input_ids=feed.tokens,
            position_ids=torch.from_numpy(feed.positions).to(self.device),
            attention_mask=self.mask(feed, cache.lengths),
            past_key_values=cache.writer(feed.starts, feed.tokens.shape[1]),
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits

    def hidden_index(self, layer: int) -> int:
        """A layer number in transformers' `hidden_states` numbering as 0 … L: 0 embeds, L is after the last norm.

        Raises:
            UserError: there is no such entry.
        """
        count = self.config.num_hidden_layers + 1
        if not -count <= layer < count:
            raise UserError(f"hidden state {layer} does not exist: the target's are {-count} … {count - 1}")
        return layer % count

    @contextmanager
    def tapped(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Catches hidden states [R, n, D] of the passes inside, without storing every layer.

        Args:
            layers: entries of transformers' `hidden_states`, negative ones counted from the end.
        """
        caught: dict[int, Tensor] = {}

        def catch(layer: int, value: Any) -> None:
            caught[layer] = value if isinstance(value, Tensor) else value[0]

        with ExitStack() as stack:
            for layer in layers:
                index = self.hidden_index(layer)
                if index == 0:
                    module = self.model.get_input_embeddings()
                elif index == self.config.num_hidden_layers:
                    module = self.model.base_model
                else:
                    module = self.layers[index - 1]
                hook = module.register_forward_hook(lambda _m, _i, out, layer=layer: catch(layer, out))
                stack.callback(hook.remove)
            yield caught

    def keys_and_values(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer would cache for given inputs [R, n, D] at positions [R, n]: [R, H, n, width] each.

        The pass is cut where the layer hands them to its cache, so that nothing behind them is computed.
        """
        try:
            self.model.base_model(
                inputs_embeds=embeds,
                position_ids=positions,
                attention_mask=self.by_type(embeds.new_zeros(1, 1, 1, 1)),
                past_key_values=_Cut(),
                use_cache=True,
            )
        except _Stored as stored:
            return stored.keys, stored.values
        raise AssertionError("the model's first layer does not cache")


class _Recorder(Cache):
    """Notes the shapes of what a pass would store."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, LayerShape] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.seen[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _Stored(Exception):
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class _Cut(Cache):
    """Ends the pass at its first write."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise _Stored(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raises a `UserError` that names the architecture and the reason, where a tree cannot be verified in it."""
    name = f"{type(model).__name__} (model_type '{model.config.model_type}') is not supported: "
    if model.config.is_encoder_decoder:
        raise UserError(name + "it is an encoder-decoder, and draftree drives decoder-only models")
    config = model.config.get_text_config(decoder=True)
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING})
    if strange:
        raise UserError(name + f"its {', '.join(strange)} layers keep a state that cannot take back a rejected token")
    if getattr(model, "_is_stateful", False):
        raise UserError(name + "its recurrent state cannot take back a rejected token")
    parameters = inspect.signature(model.forward).parameters
    missing = [p for p in ("position_ids", "past_key_values", "attention_mask") if p not in parameters]
    if missing:
        raise UserError(name + f"its forward takes no {', '.join(missing)}, so a tree cannot be laid out in it")


def one_layer(config: PreTrainedConfig, layers: int = 1) -> PreTrainedModel:
    """A fresh float32 model of the same architecture with few layers, all with full attention where types are mixed."""
    values = config.to_dict() | {"num_hidden_layers": layers, "dtype": "float32"}
    if values.get("layer_types"):
        values["layer_types"] = [FULL] * layers
    small = type(config)(**{k: v for k, v in values.items() if k != "transformers_version"})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    return model
