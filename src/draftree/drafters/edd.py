"""EDD, the effective draft decoder: one layer over the target's hidden states (EDD + PCT, section 3.1).

One layer of the target's architecture reads the target's own hidden states as a soft prompt: the
target encodes the committed text, EDD decodes on from there. In decoding, the soft prompt's keys
and values are computed once for each committed token and cached; root and nodes are fed as tokens
after them, and their own keys and values are kept for one step. h_i and t_i both have position i.
The paper does not specify this.

Shapes: R slots, T tokens, B batch, D hidden size, V vocabulary, H key-value heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from typing_extensions import override

from draftree.drafters.base import Batch, Stage, TrainableMethod
from draftree.drafters.neural.decoding_state import SPARE_SLOTS, Decoding
from draftree.drafters.neural.draft_masks import additive, dual_block
from draftree.drafters.neural.draft_vocabulary import expand_logits
from draftree.drafters.neural.kv_cached_drafter import OneLayerDrafter
from draftree.drafters.neural.losses import draft_loss, predicting_positions
from draftree.drafters.neural.one_layer_of_target import (
    check_attends,
    copy_target_layer,
    has_own,
    load_model,
    new_model,
)
from draftree.errors import UserError
from draftree.formats.checkpoint import Checkpoint
from draftree.models.causal_lm import CausalLM
from draftree.target.attention_strength import AUTO, Attending, measure_attention
from draftree.target.target import HiddenStates, HiddenStateSpec, Target
from draftree.tree import AcceptResult, Ints, Tree
from draftree.utils.hardware import to_device
from draftree.utils.validated_dataclass import Presets, knob


@final
@dataclass(frozen=True)
class EDD(TrainableMethod):
    """Effective draft decoder.

    Attributes:
        hidden_layer: index in transformers' `hidden_states` of the soft prompt. −4 is the output of
            layer L − 4, counted from 0, which is the fourth-to-last layer of the paper (section
            4.3.1). `auto` is decided when training begins: it selects the output of the highest
            layer, from L − 4 down, whose attention is not dead (`target.attention_strength`).
        loss: `kl`, the KL divergence from the target (eq. 4), or `ce`, the cross-entropy with the
            text (the ablation of Table 3).
        min_block: shortest block of the dual-block mask.
        max_block: longest block. In each training step one length is drawn for all samples (section
            3.1).
        phase: number of tokens by which the first block of a training text is shortened. With 0
            blocks begin at multiples of their length, as in the paper (eq. 3). `random` is drawn
            for each sample, because in decoding a block begins anywhere.
        shared: whether embedding and LM head are the target's own modules, which are neither
            trained nor stored. Otherwise they are copies that are trained, as in the paper (section
            3.1).
        init: the initial weights of the layer in training. `scratch` means random weights, as in
            the paper. `target` means copies of the target layer that reads the same entry of
            `hidden_states`, and of the target's final norm.
        draft_vocab: V′, the number of tokens that can be drafted, which are the most frequent ones
            in the training data; 0 for all. Other values require `shared`.
        head_rank: r, the rank of a factorised head for all tokens, which replaces the head of the
            draft vocabulary; 0 for no such head. The low-rank factors find candidates.
        head_candidates: m, the number of candidates that the factorised head finds and then scores
            exactly.

    The defaults are those of the paper. `preset=fast` learns faster, with a shared embedding, a
    copy of the target's layer, and random phases.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=1,
            batch_size=8,
            lr=1e-4,
            loss="KL(p‖q) to the target (eq. 4)",
            source="EDD + PCT, section 4.1",
            ours=("schedule", "warmup", "betas", "weight_decay", "clip", "max_tokens"),
        ),
    )

    chosen = ("head_rank", "head_candidates")
    presets: ClassVar[Presets] = {"fast": {"shared": True, "init": "target", "phase": "random"}}

    hidden_layer: int | Literal["auto"] = -4
    loss: Literal["kl", "ce"] = "kl"
    min_block: int = knob(5, least=1)
    max_block: int = 10
    phase: int | Literal["random"] = 0
    shared: bool = False
    init: Literal["target", "scratch"] = "scratch"
    draft_vocab: int = knob(0, least=0)
    head_rank: int = knob(0, least=0)
    head_candidates: int = knob(256, least=1)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_block > self.max_block:
            raise UserError(
                f"edd: min_block is {self.min_block}, allowed is at most max_block, {self.max_block}"
            )
        if self.phase != "random" and not 0 <= self.phase < self.min_block:
            raise UserError(
                f"edd: phase is {self.phase}, allowed are random and 0 … {self.min_block - 1} (min_block − 1)"
            )

    @override
    def read(self, stored: Checkpoint, target: Target) -> "EDDDrafter":
        self._check(target)
        model = load_model(stored, "edd", target, self.draft_vocab)
        return EDDDrafter(replace(self, shared=not has_own(stored)), model, target, stored)

    @override
    def new(self, target: Target) -> "EDDDrafter":
        self._check(target)
        drafter = EDDDrafter(
            self, new_model("edd", target, self.shared, self.draft_vocab), target, Checkpoint()
        )
        drafter.begin()
        return drafter

    def _check(self, target: Target) -> None:
        if self.hidden_layer != AUTO:
            target.decoder.hidden_index(self.hidden_layer)

    @staticmethod
    def living(layers: Sequence[Attending]) -> int:
        """Return the index in `hidden_states` that `auto` selects.

        It is that of the highest layer whose attention is not dead (see
        `target.attention_strength`). If the attention of all layers is dead, it is the index used
        in the paper.
        """
        top = max(len(layers) - 4, 0)
        return next((i for i in range(top, -1, -1) if not layers[i].dead), top) + 1


@final
class EDDDrafter(OneLayerDrafter):
    """The decoder of EDD as a drafter.

    Its cache contains the soft prompt at positions 0 … root − 1, followed by the nodes of the step.
    """

    knobs: EDD

    def __init__(
        self, knobs: EDD, model: PreTrainedModel, target: Target, stored: Checkpoint
    ) -> None:
        super().__init__(knobs, model, target, stored)
        check_attends(
            "edd", CausalLM(model)
        )  # a separate one, because the drafter's dtype and device are not known yet
        self._layer = knobs.hidden_layer

    @property
    @override
    def resolved_knobs(self) -> EDD:
        return replace(self.knobs, hidden_layer=self._layer)

    @property
    @override
    def needs(self) -> HiddenStateSpec:
        if self._layer == AUTO:
            raise UserError(
                "edd: hidden_layer is 'auto', allowed is a number; only training chooses it"
            )
        return HiddenStateSpec(hidden=(self._layer,))

    @override
    def use_kernels(self, target: Target) -> None:
        super().use_kernels(target)
        if (
            self.knobs.head_rank
        ):  # the kernels are chosen by comparing logits, which a few candidates do not allow
            self.find_candidates(self.knobs.head_rank, self.knobs.head_candidates)

    @override
    def resolve_auto(self, texts: Sequence[Ints]) -> Mapping[str, Any]:
        if self.knobs.hidden_layer != AUTO:
            return {}
        self._layer = EDD.living(measure_attention(self._target.decoder, texts))
        self.begin()
        return {"hidden_layer": self._layer}

    def begin(self) -> None:
        """Set the initial weights of a new drafter.

        It must be called after the target layer that the drafter reads has been chosen.
        """
        if self.knobs.init == "target" and self._layer != AUTO:
            count = int(self._target.decoder.config.num_hidden_layers)
            top, layers = (
                min(self._target.decoder.hidden_index(self._layer), count - 1),
                self._target.decoder.attention_layers,
            )
            copy_target_layer(
                self.model, self._target, max((i for i in layers if i <= top), default=top)
            )

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: Decoding | None = None,
        rows: Ints | None = None,
    ) -> Decoding:
        state = state or Decoding.empty(
            self.decoder.new_cache(len(prompts), max(map(len, prompts)) + SPARE_SLOTS)
        )
        return replace(state, unread=(*state.unread, hidden_states))

    def commit(
        self, state: Decoding, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> Decoding:
        """Forget the step's drafted nodes, and queue the true hidden states of the accepted tokens.

        When the drafter drafts again, their keys and values are computed and stored in the cache.
        """
        return replace(Decoding.empty(state.cache), unread=(*state.unread, hidden_states))

    @override
    def flush(self, state: Decoding) -> Decoding:
        return (
            replace(self._encode(state, HiddenStates.concatenate(state.unread)), unread=())
            if state.unread
            else state
        )

    @torch.inference_mode()
    def _encode(self, state: Decoding, hidden_states: HiddenStates) -> Decoding:
        """Cache the keys and values of the hidden states [T, D] of newly committed tokens."""
        (layer,) = self.needs.hidden
        soft = hidden_states.hidden[layer].to(self.decoder.dtype)
        positions = to_device(hidden_states.positions, soft.device)
        keys, values = self.decoder.keys_and_values(soft[None], positions[None])
        state.cache.insert(0, hidden_states.rows, hidden_states.positions, keys[0], values[0])
        return state

    @override
    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        return expand_logits(
            self.decoder.head(self._states(batch, block, [phase] * len(batch.tokens))),
            self.draft_vocabulary,
        )

    def _states(self, batch: Batch, block: int, phases: Sequence[int]) -> Tensor:
        """Return the final norm's output [B, T, D] after each token.

        All samples have the same block length, and each has its own phase.
        """
        rows, count = batch.tokens.shape
        positions = torch.arange(count, device=batch.tokens.device).expand(rows, count)
        (layer,) = self.needs.hidden
        soft = DynamicCache()
        soft.update(
            *self.decoder.keys_and_values(batch.hidden[layer].to(self.decoder.dtype), positions), 0
        )
        with batch.tokens.device:  # masks are made where they are read: on a GPU's host they would take longer than the step
            visible = torch.stack(
                [dual_block(count, block, phase, self.decoder.hf.window) for phase in phases]
            )
        mask = additive(visible[:, None].to(batch.tokens.device), self.decoder.dtype)
        states: Tensor = self.decoder.stack(
            input_ids=batch.tokens,
            position_ids=positions,
            attention_mask=self.decoder.hf.by_type(mask),
            **self.decoder.hf.cache_arguments(soft),
        ).last_hidden_state
        return states

    @override
    def loss(self, batch: Batch) -> Tensor:
        block, fixed = (
            _random_int(self.knobs.min_block, self.knobs.max_block, batch.shared),
            self.knobs.phase,
        )
        phases = [
            _random_int(0, block - 1, g) if fixed == "random" else fixed for g in batch.generators
        ]
        states = self._states(batch, block, phases)[predicting_positions(batch.learn)]
        return draft_loss(
            self.knobs.loss, batch, self.decoder.head(states), drafted=self.draft_vocabulary
        )


def _random_int(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))
