"""Run Llama-like models on a CPU: one native call from embedding to LM head.

Shapes: R sequences, N tokens of all, n tokens of each where they are padded, S slots, D hidden
size, V vocabulary, L layers.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.models.cpu_linear import KernelLinear
from draftree.models.forward_batch import ForwardBatch
from draftree.models.hf_runner import HFRunner
from draftree.models.kv_cache import KVView, SlotCache
from draftree.models.llama_structure import STACK, module_kind
from draftree.models.model_config import FULL, SLIDING
from draftree.models.model_runner import ModelOutput, ModelRunner, Outputs
from draftree.models.native_layers import (
    FIRST_PART,
    Angles,
    Head,
    NativeLayer,
    PackedMask,
    PassOutputs,
    agrees,
    fits,
    norm_record,
    run_layers,
)
from draftree.models.native_linear import NativeLinear
from draftree.models.numeric_agreement import median_distance
from draftree.models.rope_cache import RopeCache
from draftree.native import transformer_kernels
from draftree.tree import Ints
from draftree.utils.profiler import phase

TRIAL_TOKENS = 5
"""Number of tokens of the pass by which the native runner is compared with the model."""
MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.02}
"""Largest allowed difference from the model's results, relative to their norm, by dtype.

It bounds the median over the tokens.
"""


@final
class NativeRunner(ModelRunner):
    """Run a model by native kernels, which must support all of its layers.

    Args:
        hf: the transformers runner of the same model.
        layers: the model's layers by native kernels.
        after_head: the function that the model applies to the output of its LM head.
    """

    packs = True

    def __init__(
        self, hf: HFRunner, layers: Sequence[NativeLayer], after_head: Callable[[Tensor], Tensor]
    ) -> None:
        self._hf = hf
        self._layers = list(layers)
        self._after_head = after_head
        self._stack: Any = hf.stack
        self._norm = norm_record(self._stack.norm)
        self._rope = RopeCache(self._stack.get_submodule("rotary_emb"))
        rotates = (layer.rotates for layer in layers)
        kinds = zip(hf.attention_types, rotates, strict=True)
        self._runs = [(*kind, len(list(same))) for kind, same in groupby(kinds)]

    @classmethod
    def of(cls, hf: HFRunner, after_head: Callable[[Tensor], Tensor] | None) -> Self | None:
        """Return the native runner of a model, or None if the kernels do not support it.

        The runner's results are compared with the model's: one layer of each kind, and then a pass
        over a few tokens.

        Args:
            hf: the transformers runner of the model.
            after_head: the function that the model applies to the output of its LM head; None if
                unknown.
        """
        stack: Any = hf.stack
        if (
            transformer_kernels.core is None
            or after_head is None
            or set(hf.layer_types) - {FULL, SLIDING}
        ):
            return None
        parts = {name for name, _ in stack.named_children()}
        if parts != STACK or not all(map(fits, stack.layers)):
            return None
        layers, kinds = [], set[str]()
        for module in stack.layers:
            native = NativeLayer(module)
            kind = module_kind(module)
            if kind not in kinds and not agrees(module, native):
                return None
            kinds.add(kind)
            layers.append(native)
        frequencies = stack.rotary_emb._buffers.get("inv_freq")
        whole = frequencies is not None and 2 * len(frequencies) == layers[0].sizes.head_dim
        if not whole or any(layer.sizes != layers[0].sizes for layer in layers):
            return None
        runner = cls(hf, layers, after_head)
        agreed = runner._agrees()
        for layer in layers:
            layer.release()
        return runner if agreed else None

    @torch.inference_mode()
    def _agrees(self) -> bool:
        """Return whether a pass agrees with the model's own pass up to rounding."""
        vocab = int(self._head.weight.shape[0])
        ids = np.arange(TRIAL_TOKENS) % vocab
        entries = (0, len(self._layers))
        found = []
        for runner in (self._hf, self):
            cache = SlotCache(self._hf.stored_shapes.shapes, 1, self._dtype, torch.device("cpu"))
            cache.reserve(TRIAL_TOKENS)
            batch = ForwardBatch.chains([ids], cache.lengths.copy(), torch.device("cpu"))
            out = runner.forward(batch, cache, Outputs(entries))
            found.append((*(out.hidden[i] for i in entries), out.logits))
        apart = (median_distance(ours, own) for own, ours in zip(*found, strict=True))
        return all(each <= MAX_RELATIVE_ERROR[self._dtype] for each in apart)

    @property
    def kinds(self) -> list[str]:
        """Return the class names of the layers that it runs, for the record of a run."""
        return sorted({type(module).__name__ for module in self._stack.layers})

    @property
    def bytes(self) -> int:
        """Return the bytes of the packed weights."""
        head = self._native_head
        return sum(layer.bytes for layer in self._layers) + (0 if head is None else head.bytes)

    @property
    def _dtype(self) -> torch.dtype:
        return self._layers[0].sizes.dtype

    @property
    def _head(self) -> Any:
        model: Any = self._hf.model
        return model.get_output_embeddings()

    @property
    def _native_head(self) -> NativeLinear | None:
        kernel = self._head.kernel if isinstance(self._head, KernelLinear) else None
        return kernel if isinstance(kernel, NativeLinear) else None

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [N, D] of tokens [N]."""
        embedded: Tensor = self._stack.embed_tokens(tokens)
        return embedded

    @override
    def forward(
        self, batch: ForwardBatch, cache: SlotCache, outputs: Outputs = Outputs()
    ) -> ModelOutput:
        with phase("model"):
            return self._forward(batch, cache, outputs)

    def _forward(self, batch: ForwardBatch, cache: SlotCache, outputs: Outputs) -> ModelOutput:
        x = self.embed(batch.tokens)[None]
        count = len(self._layers)
        entries = {layer: self._hf.hidden_index(layer) for layer in outputs.layers}
        caught = {0: x}
        for entry in entries.values():
            if 0 < entry < count:
                caught[entry] = torch.empty_like(x)
        # After the attention of the last layer, only the requested tokens are computed, unless a
        # hidden state after it is requested.
        selects = outputs.tokens is not None and max(entries.values(), default=0) < count
        selected = outputs.tokens if selects else None
        kept = x.shape[1] if selected is None else len(selected)
        native = self._native_head if selects or outputs.tokens is None else None
        normed = x.new_empty(kept, x.shape[2])
        logits = None if native is None else x.new_empty(kept, native.wide)
        head = Head(self._norm, None if native is None else native.record, normed, logits)
        masks = {kind: self._mask(kind, batch, cache) for kind in {kind for kind, *_ in self._runs}}
        angles = self._angles(batch, x)
        first = 0
        for kind, _, length in self._runs:
            end = first + length
            within = cache.writer(batch.starts, batch.width).within(first)
            assert within is not None, "passes that are recorded have a runner of their own"
            wanted = {i - 1 - first: out for i, out in caught.items() if first < i <= end}
            also = PassOutputs(wanted, head, selected) if end == count else PassOutputs(wanted)
            layers = self._layers[first:end]
            x = run_layers(layers, x, angles, within, masks[kind], outputs=also)
            if end in caught and end < count:
                caught[end] = x
            first = end
        caught |= {count: normed[None], count + 1: x}
        hidden = {layer: caught[entry][0] for layer, entry in entries.items()}
        if logits is None:
            asked = outputs.tokens is not None and not selects
            logits = self._head(normed[torch.from_numpy(outputs.tokens)] if asked else normed)
        return ModelOutput(self._after_head(logits), hidden)

    def _mask(self, kind: str, batch: ForwardBatch, cache: SlotCache) -> Tensor | PackedMask:
        window = self._hf.window if kind == SLIDING else None
        if window is None and len(batch.counts) == 1:
            return cache.mask(batch)
        windowed = window is not None
        depths = batch.positions - np.repeat(batch.starts, batch.counts) if windowed else None
        return PackedMask(cache.packed_masks(batch, window), _table(batch), depths)

    def _angles(self, batch: ForwardBatch, x: Tensor) -> Angles:
        if self._hf.rope_boundary is None:
            known = self._rope.cos_sin(x, int(batch.positions.max(initial=0)))
            return Angles(*known, np.ascontiguousarray(batch.positions))
        with self._hf.rotate_separately(batch):
            turned = self._stack.rotary_emb(x, torch.from_numpy(batch.padded_positions))
        cosines, sines = (batch.unpad(t).contiguous() for t in turned)
        return Angles(cosines, sines, np.arange(len(batch.positions)))

    def first_layer_kv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first layer's keys and values [R, G, n, width].

        Args:
            x: [R, n, D] the layer's inputs.
            positions: [R, n] the positions of the tokens.
        """
        sizes, (rows, n, _) = self._layers[0].sizes, x.shape
        k, v = (x.new_empty(rows, sizes.kv_heads, n, sizes.head_dim) for _ in range(2))
        places = np.ascontiguousarray(positions.numpy()).reshape(-1)
        angles = Angles(*self._rope.cos_sin(x, int(places.max())), places)
        run_layers(self._layers[:1], x, angles, KVView(k, v, None, n), None, FIRST_PART)
        return k, v


def _table(batch: ForwardBatch) -> Ints:
    """Return [R + 1, 5] where each of a batch's R packed sequences and its mask begin and end.

    `PackedMask.table` says what the columns are.
    """
    table = np.zeros((len(batch.counts) + 1, 5), np.int64)
    table[:, 0] = batch.firsts
    table[:-1, 1], table[:-1, 2], table[:-1, 4] = batch.starts, batch.ends, batch.ends
    table[1:, 3] = (batch.counts * batch.ends).cumsum()
    return table
