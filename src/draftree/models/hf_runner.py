"""Run any supported transformers model over a padded batch.

This is the only file that knows masks as transformers takes them, rotary embeddings that depend on
the length of a text, and the calls of layers with a recurrent state.

Shapes: R sequences, N tokens of all, n tokens of each where they are padded, S slots, D hidden
size, V vocabulary, L layers.
"""

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from draftree.errors import UserError
from draftree.models.accelerate_dispatch import input_device, move_to_device
from draftree.models.forward_batch import DeviceBatch, ForwardBatch
from draftree.models.graph_capture import (
    Capture,
    EagerCapture,
    Epilogue,
    InputTensors,
    OutputTensors,
    Weights,
)
from draftree.models.kv_cache import SlotCache, Writer
from draftree.models.llama_gpu_layers import LlamaLayers
from draftree.models.model_config import FULL, LENGTH_DEPENDENT_ROPE, SLIDING, cache_argument, entry
from draftree.models.model_runner import ModelOutput, ModelRunner, Outputs
from draftree.models.network_pass import run_pass
from draftree.models.recurrent.cache_probe import ShapeRecorder, StoredShapes
from draftree.models.recurrent.replaced_functions import (
    PassFunctions,
    dispatch_functions,
    use_functions,
)

Rotation = Tensor | tuple[Tensor, ...]
"""What a rotary embedding returns: (cos, sin), or a complex tensor as in DeepSeek-V2."""
UNNORMED = 2**16
"""Index of a hidden state that transformers lacks: the last layer's output before the norm."""


@final
class HFRunner(ModelRunner):
    """Run a model of transformers with its own modules.

    Args:
        model: the model to run.
        few_operations: whether passes of Llama-like models use `LlamaLayers`; by default on a GPU.

    Attributes:
        model: the given model, or one that shares its weights and whose recurrent layers support
            draft trees.
        config: the config of the model's text part.
        layer_types: the type of each layer; empty if all are alike.
        window: number of positions that sliding-window layers see; None if no layer has a window.
    """

    def __init__(self, model: PreTrainedModel, few_operations: bool | None = None) -> None:
        self.model, self._wanted = dispatch_functions(model), few_operations
        self._found: tuple[Hashable, LlamaLayers | None] | None = None
        self.config: PreTrainedConfig = self.model.config.get_text_config(decoder=True)
        self.layer_types: tuple[str, ...] = tuple(entry(self.config, "layer_types") or ())
        self._takes = inspect.signature(type(model).forward).parameters
        sliding = not self.layer_types or SLIDING in self.layer_types
        self.window: int | None = entry(self.config, "sliding_window") if sliding else None

    @cached_property
    def device(self) -> torch.device:
        """Return the device of the tokens and of the logits."""
        return input_device(self.model)

    @cached_property
    def stack(self) -> PreTrainedModel:
        """Return the transformer without its LM head and without encoders of images or audio."""
        base: Any = self.model.base_model
        inner: PreTrainedModel = base.get_decoder()  # an outer model may name its LM head so
        return inner

    @cached_property
    def layers(self) -> nn.ModuleList:
        """Return the transformer layers."""
        count = self.config.num_hidden_layers
        for module in self.stack.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        name = type(self.model).__name__
        raise UserError(f"{name} is not supported: its {count} layers are not one stack")

    @property
    def attention_types(self) -> tuple[str, ...]:
        """Return the type of each layer, also where all are alike."""
        alike = FULL if self.window is None else SLIDING
        return self.layer_types or (alike,) * int(self.config.num_hidden_layers)

    @cached_property
    def stored_shapes(self) -> StoredShapes:
        """Return the shapes of keys, values and states that the layers store.

        Raises:
            UserError: a layer stores something that draftree cannot access.
        """
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        mask = self.by_type(torch.zeros(1, 1, 1, 1, dtype=self.model.dtype, device=one.device))
        recording = use_functions(
            ShapeRecorder(self.config, type(self.model).__name__, self.device)
        )
        with torch.inference_mode(), recording as recorder:
            self.model(
                input_ids=one,
                **self._position_arguments(one, mask),
                **self.cache_arguments(recorder),
            )
        return recorder.stored_shapes()

    @cached_property
    def _weights(self) -> Weights:
        return Weights(self.model)

    def few_operations(self) -> LlamaLayers | None:
        """Return the model's `LlamaLayers`; None if they are unwanted or do not support the model.

        They are built again after a module was replaced.
        """
        wanted = self.device.type == "cuda" if self._wanted is None else self._wanted
        if not wanted or torch.is_grad_enabled():
            return None
        structure = self._weights.structure, self.config._attn_implementation
        if self._found is None or self._found[0] != structure:
            kinds = self.attention_types
            known = self.rope_boundary is None and not set(kinds) - {FULL, SLIDING}
            self._found = (
                structure,
                LlamaLayers.of(self.model, self.stack, kinds) if known else None,
            )
        return self._found[1]

    @property
    def rotary_parameters(self) -> list[dict[str, Any]]:
        """Return the parameters of all rotary embeddings, which may differ by layer type."""
        parameters = getattr(self.config, "rope_parameters", None) or {}
        return [parameters, *(p for p in parameters.values() if isinstance(p, dict))]

    @cached_property
    def changing_rope(self) -> dict[str, Any] | None:
        """Return the rotary parameters that depend on the length of the text, or None."""
        kinds = self.rotary_parameters
        return next((p for p in kinds if p.get("rope_type") in LENGTH_DEPENDENT_ROPE), None)

    @cached_property
    def rope_boundary(self) -> tuple[str, int] | None:
        """Return (type, length) of a rotary embedding that changes at a text length, or None."""
        rope = self.changing_rope
        if rope is None:
            return None
        key = "original_max_position_embeddings"
        known = self.config.max_position_embeddings  # where `dynamic` begins to stretch
        dynamic = rope["rope_type"] == "dynamic"
        return rope["rope_type"], int(known if dynamic else rope.get(key) or known)

    def _position_arguments(
        self, positions: Tensor, mask: Tensor | Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return positions and mask as arguments of the model, if it accepts any."""
        if "position_ids" not in self._takes:  # all its layers are recurrent
            return {}
        return {"position_ids": positions, "attention_mask": mask}

    def cache_arguments(self, cache: Cache) -> dict[str, Any]:
        """Return a cache as keyword arguments of the forward of the model or of its stack."""
        return {str(cache_argument(self._takes)): cache, "use_cache": True}

    def by_type(self, full: Tensor, sliding: Tensor | None = None) -> Tensor | Mapping[str, Tensor]:
        """Return a mask in the form that the model expects: a tensor, or a mapping by layer type.

        Args:
            full: the mask of layers with full attention.
            sliding: the mask of layers with a sliding window; `full` by default.
        """
        windowed = full if sliding is None else sliding
        if len(set(self.layer_types)) > 1 or set(self.layer_types) - {FULL, SLIDING}:
            return _Masks({FULL: full, "attention": full, SLIDING: windowed})
        return windowed if self.window is not None else full

    def mask(self, cache: SlotCache, batch: ForwardBatch) -> Tensor | Mapping[str, Tensor]:
        """Return the additive mask [R, 1, n, S] of a batch in the form that the model expects."""
        sliding = None if self.window is None else cache.mask(batch, self.window)
        return self.by_type(cache.mask(batch), sliding)

    def causal(self, ids: Tensor, cache: Cache | None = None) -> dict[str, Any]:
        """Return a dict of forward arguments for whole texts: positions, causal mask and cache.

        Args:
            ids: [B, T] the token ids of B texts.
            cache: the cache; None for a pass without one.
        """
        sequences, count = ids.shape
        at = torch.arange(count, device=ids.device)
        lowest = torch.finfo(self.model.dtype).min
        full = torch.zeros(count, count, dtype=self.model.dtype, device=ids.device)
        full = full.masked_fill(at[None, :] > at[:, None], lowest)
        sliding = full
        if self.window is not None:
            sliding = full.masked_fill(at[:, None] - at[None, :] >= self.window, lowest)
        mask = self.by_type(full[None, None], sliding[None, None])
        placed = self._position_arguments(at.expand(sequences, count), mask)
        return placed | ({} if cache is None else self.cache_arguments(cache))

    @override
    def forward(
        self,
        batch: ForwardBatch,
        cache: SlotCache,
        outputs: Outputs = Outputs(),
        capture: Capture = EagerCapture(),
    ) -> ModelOutput:
        keep: int | Tensor = 0
        wanted = outputs.tokens
        columns = None if wanted is None else np.unique(batch.places[1][wanted])
        if columns is not None:
            keep = torch.from_numpy(columns).to(self.device)
        padded, *hidden = self.run(cache, batch, keep, outputs.layers, capture=capture)
        if wanted is None or columns is None:
            logits = batch.unpad(padded)
        elif len(batch.counts) == 1:
            logits = padded[0]
        else:
            sequences, places = (each[wanted] for each in batch.places)
            at = sequences, np.searchsorted(columns, places)
            logits = padded[tuple(torch.from_numpy(i).to(padded.device) for i in at)]
        states = map(batch.unpad, hidden)
        return ModelOutput(logits, dict(zip(outputs.layers, states, strict=True)))

    def run(
        self,
        cache: SlotCache,
        batch: ForwardBatch | DeviceBatch,
        keep: int | Tensor = 0,
        layers: Sequence[int] = (),
        then: Epilogue = Epilogue(),
        capture: Capture = EagerCapture(),
    ) -> OutputTensors:
        """Run a padded pass, and return its logits and hidden states or the outputs of `then`.

        Args:
            cache: a cache of this model.
            batch: the tokens.
            keep: transformers' `logits_to_keep`: 0 for all columns, or a tensor of columns.
            layers: indices into transformers' `hidden_states`.
            then: the epilogue on the results, which is captured in the same recording.
            capture: how passes over trees are run.
        """
        captured = cache.ladder.few and not batch.whole and isinstance(keep, int)
        batch = batch.with_width(cache.ladder.width(batch.width)) if captured else batch
        at = None
        if cache.states is not None and isinstance(batch, ForwardBatch):
            at = cache.states.begin(batch, cache.lengths)

        layered = self.few_operations()
        entries = [self.hidden_index(layer) for layer in layers]

        def network(laid: InputTensors, past: Writer) -> OutputTensors:
            if layered is not None:
                masks = {FULL: laid["full"], SLIDING: laid.get("sliding", laid["full"])}
                logits, caught = layered(
                    laid["tokens"], laid["positions"], masks, past, keep, entries
                )
                return logits, *(caught[entry] for entry in entries)
            mask = self.by_type(laid["full"], laid.get("sliding"))
            placed = self._position_arguments(laid["positions"], mask) | self.cache_arguments(past)
            with self.collect_hidden_states(layers) as caught:
                own: Tensor = self.model(
                    input_ids=laid["tokens"], logits_to_keep=keep, **placed
                ).logits
            return move_to_device(own, self.device), *(
                move_to_device(caught[layer], self.device) for layer in layers
            )

        kind = None
        if captured:
            kind = self._weights.version, self.config._attn_implementation, tuple(layers), keep
        ours = nullcontext() if at is None else use_functions(PassFunctions(at))
        with self.rotate_separately(batch), ours:
            return run_pass(network, kind, cache, batch, capture, then, self.window, at)

    @contextmanager
    def rotate_separately(self, batch: ForwardBatch | DeviceBatch) -> Iterator[None]:
        """Compute each sequence's rotary embedding as if the sequence were alone.

        This matters where rotary frequencies change with the length of the text. transformers uses
        the frequencies of the longest sequence for all. With type `dynamic` it also keeps them
        until a short text comes.
        """
        if self.rope_boundary is None or isinstance(batch, DeviceBatch):
            yield
            return
        padded = batch.padded_positions
        reach = padded.max(axis=1) + 1 if batch.reach is None else batch.reach

        def apart(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any
        ) -> Rotation:
            call = inspect.signature(module.forward).bind(*args, **kwargs)

            def turn(positions: Sequence[int]) -> Rotation:
                given = torch.tensor([positions], device=self.device)
                call.arguments["position_ids"] = given
                turned: Rotation = module.forward(*call.args, **call.kwargs)
                return turned

            found = []
            for places, length in zip(padded.tolist(), reach.tolist(), strict=True):
                turn([0])  # resets `dynamic`
                found.append((turn([*places, length - 1]), len(places)))
            turn([0])
            return join_rotations(found, dim=0)

        with ExitStack() as stack:
            for module in self.stack.modules():
                if "rope_type" in vars(module):  # a rotary embedding
                    hook = module.register_forward_hook(apart, with_kwargs=True)
                    stack.callback(hook.remove)
            yield

    def hidden_index(self, layer: int) -> int:
        """Return an index into transformers' `hidden_states` as 0 … L; `UNNORMED` becomes L + 1.

        Index 0 is the embedding, and L is the output of the final norm.

        Raises:
            UserError: the index is out of range.
        """
        count = int(self.config.num_hidden_layers) + 1
        if layer == UNNORMED:
            return count
        if not -count <= layer < count:
            allowed = f"the target's are {-count} … {count - 1}"
            raise UserError(f"hidden state {layer} does not exist: {allowed}")
        return layer % count

    @contextmanager
    def collect_hidden_states(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Yield a dict which each pass in the context fills with hidden states, by layer index.

        The hidden states are [R, n, D], for n tokens of each of R sequences. A later pass replaces
        those of an earlier pass.

        Args:
            layers: indices into transformers' `hidden_states`; negative ones count from the end.
        """
        caught: dict[int, Tensor] = {}

        def note(layer: int, out: Any) -> None:
            caught[layer] = out if isinstance(out, Tensor) else out[0]

        with ExitStack() as stack:
            for layer in layers:
                index = self.hidden_index(layer)
                if layer == UNNORMED:
                    after = lambda _m, _i, out, layer=layer: note(layer, out)
                    hook = self.layers[-1].register_forward_hook(after)
                elif index == self.config.num_hidden_layers:
                    normed = lambda _m, _i, out, layer=layer: note(layer, out[0])
                    hook = self.stack.register_forward_hook(normed)
                else:  # the input of a layer, not the embeddings: some models scale them
                    before = lambda _m, args, layer=layer: note(layer, args[0])
                    hook = self.layers[index].register_forward_pre_hook(before)
                stack.callback(hook.remove)
            yield caught


def join_rotations(parts: Sequence[tuple[Rotation, int]], dim: int) -> Rotation:
    """Join outputs of a rotary embedding along a dimension; of each, the first n positions."""
    cut = [
        [t[..., :n, :] for t in ((out,) if isinstance(out, Tensor) else out)] for out, n in parts
    ]
    joined = tuple(torch.cat(each, dim) for each in zip(*cut, strict=True))
    return joined if isinstance(parts[0][0], tuple) else joined[0]


class _Masks(dict[str, Tensor]):
    """Hold masks by layer type; other types are recurrent layers, which get no mask."""

    def __missing__(self, key: str) -> None:
        return None
