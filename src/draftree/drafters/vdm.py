"""VDM, the vanilla draft model: one transformer layer of the target's shape, trained alone (EDD + PCT, section 4.1)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from draftree.drafters.base import Batch, Stage, TrainableMethod
from draftree.drafters.neural.draft_vocabulary import expand_logits
from draftree.drafters.neural.kv_cached_drafter import LanguageModelDrafter, OneLayerDrafter
from draftree.drafters.neural.losses import draft_loss, predicting_positions
from draftree.drafters.neural.one_layer_of_target import (
    copy_target_layer,
    has_own,
    load_model,
    new_model,
)
from draftree.formats.checkpoint import Checkpoint
from draftree.target.target import Target
from draftree.utils.validated_dataclass import Presets, knob


@final
@dataclass(frozen=True)
class VDM(TrainableMethod):
    """Vanilla draft model.

    Attributes:
        loss: `kl`, the KL divergence from the target, or `ce`, the cross-entropy with the text.
        shared: whether embedding and LM head are the target's own modules, which are neither
            trained nor stored. Otherwise they are copies that are trained, like those of EDD in the
            same paper.
        init: the initial weights of the layer in training. `scratch` means random weights. `target`
            means copies of the target's first layer, which has the same input, and of its final
            norm.
        draft_vocab: V′, the number of tokens that can be drafted, which are the most frequent ones
            in the training data; 0 for all. Other values require `shared`.

    The defaults come from the paper of EDD. `preset=fast` corresponds to `preset=fast` of `edd`.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=1,
            batch_size=8,
            lr=1e-4,
            loss="KL(p‖q) to the target",
            source="EDD + PCT, section 4.1, as EDD",
            ours=("schedule", "warmup", "betas", "weight_decay", "clip", "max_tokens"),
        ),
    )

    presets: ClassVar[Presets] = {"fast": {"shared": True, "init": "target"}}

    loss: Literal["kl", "ce"] = "kl"
    shared: bool = False
    init: Literal["target", "scratch"] = "scratch"
    draft_vocab: int = knob(0, least=0)

    @override
    def read(self, stored: Checkpoint, target: Target) -> "VDMDrafter":
        model = load_model(stored, "vdm", target, self.draft_vocab)
        return VDMDrafter(replace(self, shared=not has_own(stored)), model, target, stored)

    @override
    def new(self, target: Target) -> "VDMDrafter":
        model = new_model("vdm", target, self.shared, self.draft_vocab)
        if self.init == "target":
            copy_target_layer(model, target, 0)
        return VDMDrafter(self, model, target, Checkpoint())


@final
class VDMDrafter(OneLayerDrafter, LanguageModelDrafter):
    """Drafts with a small language model that shares the target's vocabulary, as `lm` does."""

    knobs: VDM

    def __init__(
        self, knobs: VDM, model: PreTrainedModel, target: Target, stored: Checkpoint
    ) -> None:
        super().__init__(knobs, model, target, stored)
        self.small = Target(self.decoder, "vdm")

    @override
    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        logits = self.decoder.head(
            self._states(batch)
        )  # every token sees all before it, wherever a block begins
        return expand_logits(logits, self.draft_vocabulary)

    def _states(self, batch: Batch) -> Tensor:
        states: Tensor = self.decoder.stack(
            input_ids=batch.tokens, use_cache=False
        ).last_hidden_state
        return states

    @override
    def loss(self, batch: Batch) -> Tensor:
        logits = self.decoder.head(self._states(batch)[predicting_positions(batch.learn)])
        return draft_loss(self.knobs.loss, batch, logits, drafted=self.draft_vocabulary)
