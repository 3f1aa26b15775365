"""A causal language model of transformers, run with explicit tokens, positions, mask and cache.

The target is one, and so are the drafters that are transformers; no modeling file is forked.

Shapes: R rows, n tokens a row in one pass (padded), S slots, D hidden size, V vocabulary, L layers.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftree.errors import UserError
from draftree.models.accelerate_dispatch import input_device, move_to_device
from draftree.models.architecture_checks import refuse_unsupported
from draftree.models.backend_names import ATTENTION
from draftree.models.cpu_linear import make_row_product
from draftree.models.forward_batch import DeviceBatch, ForwardBatch
from draftree.models.graph_capture import LOG, Capture, EagerCapture, Epilogue, OutputTensors
from draftree.models.graph_runner import TRIAL_TOKENS, GraphRunner, check_recording
from draftree.models.grouped_attention import register_grouped
from draftree.models.hf_runner import HFRunner
from draftree.models.invariant_attention import register
from draftree.models.kv_cache import LayerShape, SlotCache
from draftree.models.model_runner import ModelOutput, ModelRunner, Outputs
from draftree.models.native_runner import NativeRunner
from draftree.models.one_pass_caches import capture_first_kv
from draftree.models.recurrent.cache_probe import StoredShapes
from draftree.models.recurrent.state_cache import States
from draftree.models.shape_buckets import ShapeBuckets

register()
register_grouped()

HEAD_FACTORS = ("logit_scale", "lm_head_multiplier", "logits_scaling")
"""Config entries by which models multiply their logits: Cohere, Falcon-H1 and HyperCLOVA X."""


class CausalLM:
    """Run a causal language model of transformers over draft trees.

    Args:
        model: a causal language model of transformers 5.
        capture: how passes over trees are run; by default eagerly.

    Attributes:
        hf: the runner that calls the model's own modules.
        runner: the runner of the forward passes.

    Raises:
        UserError: the architecture cannot verify a tree; the message names it and the reason.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capture: Capture = EagerCapture(),
    ) -> None:
        refuse_unsupported(model.config, type(model))
        refuse_attention(model)
        self.model = model
        model.train(False)
        self.hf = HFRunner(model)
        self.use_capture(capture)

    @property
    def config(self) -> PreTrainedConfig:
        """Return the config of the model's text part."""
        return self.hf.config

    def use_runner(self, runner: HFRunner) -> None:
        """Run passes by another runner, whose model has the same weights."""
        self.hf = runner
        self.use_capture(self.capture)

    def use_capture(self, capture: Capture) -> None:
        """Change how passes over trees are run: eagerly, or recorded as CUDA graphs."""
        self.capture = capture
        self.runner: ModelRunner = GraphRunner(self.hf, capture) if capture.ladder.few else self.hf

    def check_capture(self) -> None:
        """Stop using CUDA graphs, with a warning, if a recorded pass gives other logits."""
        if not self.capture.ladder.few or self.context < TRIAL_TOKENS:
            return
        cache = self.new_cache(1, TRIAL_TOKENS)
        if cache.ladder.few and not check_recording(self.hf, self.capture, cache):
            LOG.warning(
                "passes of the target run without CUDA graphs, as a recorded one gives other logits"
            )
            self.use_capture(EagerCapture())

    def use_native_kernels(self) -> bool:
        """Use the native runner if it supports this model; return whether passes use it."""
        if not self.capture.ladder.few and not isinstance(self.runner, NativeRunner):
            with torch.inference_mode():
                self.runner = NativeRunner.of(self.hf, self._behind_head) or self.hf
        return isinstance(self.runner, NativeRunner)

    @property
    def native_kinds(self) -> list[str]:
        """Return the class names of the layers that native kernels run, for the record of a run."""
        return self.runner.kinds if isinstance(self.runner, NativeRunner) else []

    @cached_property
    def device(self) -> torch.device:
        """Return the device of tokens and logits, which is cached because it is read often."""
        return input_device(self.model)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def vocab(self) -> int:
        """Return V, the width of the logits."""
        weight = getattr(self._head, "weight", None)
        if weight is None or not weight.is_floating_point():  # quantised
            return int(self._head.out_features)
        return int(weight.shape[0])

    @property
    def head_weight(self) -> Tensor:
        """Return the weight [V, D] of the LM head.

        Raises:
            UserError: the head is quantised or offloaded, so that its weight cannot be read.
        """
        weight: Tensor | None = getattr(self._head, "weight", None)
        name = type(self.model).__name__
        if weight is None or not weight.is_floating_point():
            told = "allowed for a drafter that reads its rows is one that is not"
            raise UserError(f"the LM head of the {name} is quantised, {told}")
        if weight.is_meta and hasattr(self._head, "_hf_hook"):
            told = "allowed for a drafter that reads its rows is one that stays on a device"
            raise UserError(f"the LM head of the {name} is offloaded, {told}")
        return weight

    @property
    def hidden_size(self) -> int:
        """Return D, the width of the hidden states."""
        return int(self.config.hidden_size)

    @cached_property
    def context(self) -> int:
        """Return the number of positions that the model supports."""
        known = int(getattr(self.config, "max_position_embeddings", None) or 2**31)
        lengths = [known]
        for rope in self.hf.rotary_parameters:
            original = rope.get("original_max_position_embeddings") or 0
            unscaled = {"dynamic": known, "yarn": original}.get(rope.get("rope_type", ""), 0)
            lengths.append(int(unscaled * (rope.get("factor") or 1)))
        return max(lengths)

    @property
    def stack(self) -> PreTrainedModel:
        """Return the transformer without its LM head and without encoders of images or audio."""
        return self.hf.stack

    @property
    def layers(self) -> nn.ModuleList:
        """Return the transformer layers."""
        return self.hf.layers

    @property
    def rope_boundary(self) -> tuple[str, int] | None:
        """Return (type, length) of a rotary embedding that changes at a text length, or None."""
        return self.hf.rope_boundary

    @property
    def stored_shapes(self) -> StoredShapes:
        """Return the shapes of keys, values and recurrent states that the layers store."""
        return self.hf.stored_shapes

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Return the shape of each layer's keys and values."""
        return self.stored_shapes.shapes

    @property
    def keyed_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers that store keys and values."""
        return tuple(i for i, shape in enumerate(self.shapes) if shape.heads)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Return the indices of layers with keys and values but without a recurrent state."""
        states = {layer for layer, _ in self.stored_shapes.states}
        return tuple(i for i in self.keyed_layers if i not in states)

    def new_cache(self, rows: int, slots: int) -> SlotCache:
        """Return an empty cache for `rows` sequences, with `slots` slots each at first."""
        kept, states = self.stored_shapes, None
        if kept.states:
            states = States(kept.states, rows, self.dtype, self.device, kept.clamped)
        changing = states is not None or self.rope_boundary is not None
        ladder = ShapeBuckets() if changing else self.capture.ladder
        cache = SlotCache(kept.shapes, rows, self.dtype, self.device, states, ladder)
        cache.reserve(slots)
        return cache

    def forward(
        self, batch: ForwardBatch, cache: SlotCache, outputs: Outputs = Outputs()
    ) -> ModelOutput:
        """Run a forward pass; see `ModelRunner.forward`."""
        return self.runner.forward(batch, cache, outputs)

    def forward_on_device(
        self,
        batch: DeviceBatch | ForwardBatch,
        cache: SlotCache,
        layers: tuple[int, ...],
        then: Epilogue,
    ) -> OutputTensors:
        """Run a pass and its epilogue over tokens whose ids may be known only on the device.

        Args:
            batch: the tokens.
            cache: a cache of this model.
            layers: indices into transformers' `hidden_states`.
            then: the epilogue, which gets padded logits and hidden states; it is captured in the
                same CUDA graph.

        Returns:
            The outputs of the epilogue.
        """
        return self.hf.run(cache, batch, 0, layers, then, self.capture)

    def hidden_index(self, layer: int) -> int:
        """Return an index into `hidden_states` as 0 … L; see `HFRunner.hidden_index`."""
        return self.hf.hidden_index(layer)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [R, n, D] of tokens [R, n], by the model's own embedding module."""
        if isinstance(self.runner, NativeRunner):
            return self.runner.embed(tokens.flatten()).view(*tokens.shape, -1)
        outer: Any = self.hf.model
        embedded: Tensor = outer.get_input_embeddings()(tokens)
        return embedded

    def head(self, states: Tensor) -> Tensor:
        """Return logits […, V] of the final norm's output […, D].

        The stock LM head computes them. The model's own cap or scale of the logits is applied
        afterwards.
        """
        if self._behind_head is None:
            return self._through_model(states)
        return self._behind_head(self._raw_logits(states))

    def head_for(
        self, ids: Tensor | None, raw: bool = False, for_drafts: bool = False
    ) -> Callable[[Tensor], Tensor]:
        """Return a function from final-norm outputs […, D] to logits […, V′] of some tokens.

        Args:
            ids: [V′] the tokens; None for all of them.
            raw: whether to leave out the model's cap or scale of the logits, because a model of the
                same kind will apply it.
            for_drafts: whether the logits of some tokens may be computed less exactly.
        """
        behind = (lambda x: x) if raw else self._behind_head
        if behind is None:
            return lambda states: (
                self._through_model(states).index_select(-1, ids)
                if ids is not None
                else self.head(states)
            )
        if ids is None:
            return lambda states: behind(self._raw_logits(states))
        bias = getattr(self._head, "bias", None)
        with torch.inference_mode(False), torch.no_grad():  # training may use these tensors
            at = ids.to(self.head_weight.device)
            rows, biases = (
                None if w is None else move_to_device(w[at], self.device)
                for w in (self.head_weight, bias)
            )
            assert rows is not None
        multiplied = make_row_product(self._head, rows, biases, for_drafts)
        return lambda states: behind(multiplied(states))

    def _raw_logits(self, states: Tensor) -> Tensor:
        """Return the output of the LM head before any cap or scale, on the device of the states."""
        return move_to_device(self._head(states), states.device)

    @property
    def _head(self) -> Any:  # transformers gives it no type
        return self.hf.model.get_output_embeddings()

    @cached_property
    def _behind_head(self) -> Callable[[Tensor], Tensor] | None:
        """Return the function that the model applies to the output of its LM head.

        The known functions are the identity, a soft cap and scales. They are compared with the
        model on a probe, and the first one that matches is returned. Return None if no known
        function matches.
        """
        cap = getattr(self.config, "final_logit_softcapping", None) or 1.0  # Gemma 2
        factors = [getattr(self.config, name, None) or 1.0 for name in HEAD_FACTORS]
        over = (
            getattr(self.config, "logits_scaling", None) or 1.0
        )  # Granite divides by it, HyperCLOVA X multiplies
        known: list[Callable[[Tensor], Tensor]] = [
            lambda x: x,
            lambda x: torch.tanh(x / cap) * cap,
            lambda x: x / over,
            *(partial(torch.mul, other=factor) for factor in factors),
        ]
        with torch.no_grad():
            # The head of OPT-350m reads fewer numbers than a layer writes.
            width = int(getattr(self._head, "in_features", self.hidden_size))
            probe = torch.linspace(-3, 3, width, device=self.device, dtype=self.dtype)[None]
            wanted, raw = self._through_model(probe).float(), self._raw_logits(probe)
            same = raw.float()
            fitted = float((wanted * same).sum() / same.square().sum().clamp(min=1e-12))
            known.append(lambda x: x * fitted)  # MiniCPM3 scales the head's input
            matches = (
                f for f in known if torch.allclose(f(raw).float(), wanted, rtol=1e-4, atol=1e-5)
            )
            return next(matches, None)

    def _through_model(self, states: Tensor) -> Tensor:
        """Return logits [n, V] for stack outputs [n, D], computed by a call of the whole model.

        A hook replaces the stack's output during a pass over one token.
        """

        def replace_states(_module: nn.Module, _inputs: Any, out: Any) -> Any:
            out.last_hidden_state = states[None]
            return out

        hook = self.stack.register_forward_hook(replace_states)
        try:
            one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            logits: Tensor = self.hf.model(input_ids=one, use_cache=False).logits
        finally:
            hook.remove()
        return move_to_device(logits[0], self.device)

    def keys_and_values(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first layer's keys and values for inputs [R, n, D] at positions [R, n].

        Keys and values are [R, H, n, width] each. The pass is stopped as soon as the layer hands
        them to its cache.
        """
        runner, learning = self.runner, torch.is_grad_enabled() and embeds.requires_grad
        plain = self.rope_boundary is None and embeds.dtype is self.dtype
        if isinstance(runner, NativeRunner) and plain and not learning:
            return runner.first_layer_kv(embeds, positions)
        mask = self.hf.by_type(embeds.new_zeros(1, 1, 1, 1))
        given = {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": mask}
        return capture_first_kv(
            lambda cache: self.hf.model.base_model(**given, **self.hf.cache_arguments(cache))
        )


def refuse_attention(model: PreTrainedModel) -> None:
    """Refuse a loaded model whose attention implementation accepts no tree mask.

    Raises:
        UserError: the message names the implementation.
    """
    chosen = model.config.get_text_config(decoder=True)._attn_implementation
    if chosen not in (None, *ATTENTION):
        name, allowed = type(model).__name__, " or ".join(ATTENTION)
        raise UserError(
            f"{name} has attn_implementation '{chosen}', which supports no tree mask: allowed is {allowed}"
        )
