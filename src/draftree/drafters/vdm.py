"""The vanilla draft model: one transformer layer of the target's shape, trained alone (EDD + PCT, section 4.1)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

from torch import Tensor
from transformers import PreTrainedModel

from draftree.drafters.base import Batch, Stage, Trainable, TrainableMethod
from draftree.drafters.neural.language_model import Decoding, LanguageModelDrafter, copied, load_model, save_model
from draftree.drafters.neural.losses import before, draft_loss
from draftree.formats.checkpoint import Checkpoint
from draftree.models.decoder import Decoder
from draftree.models.target import Target


@final
@dataclass(frozen=True)
class VDM(TrainableMethod):
    """Vanilla draft model.

    Attributes:
        loss: `kl` against the target, or `ce` against the text.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=1, batch_size=8, lr=1e-4, loss="KL(p‖q) to the target",
            source="EDD + PCT, section 4.1, as EDD",
            ours=("schedule", "warmup", "betas", "weight_decay", "clip", "max_tokens"),
        ),
    )  # fmt: skip

    loss: Literal["kl", "ce"] = "kl"

    def read(self, stored: Checkpoint, target: Target) -> "VDMDrafter":
        return VDMDrafter(self, load_model(stored, "vdm", target), target, stored)

    def new(self, target: Target) -> "VDMDrafter":
        return VDMDrafter(self, copied(target), target, Checkpoint())


@final
class VDMDrafter(Trainable[Decoding], LanguageModelDrafter):
    """Drafts with a small language model of its own, as `lm` does."""

    knobs: VDM
    model: PreTrainedModel

    def __init__(self, knobs: VDM, model: PreTrainedModel, target: Target, stored: Checkpoint) -> None:
        super().__init__(knobs, model, target, stored)
        self.decoder = Decoder(model)
        self.small = Target(self.decoder, "vdm")

    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        return self.decoder.head(self._states(batch))  # every token sees all before it, wherever a block begins

    def _states(self, batch: Batch) -> Tensor:
        states: Tensor = self.decoder.stack(input_ids=batch.tokens, use_cache=False).last_hidden_state
        return states

    def loss(self, batch: Batch) -> Tensor:
        return draft_loss(self.knobs.loss, batch, self.decoder.head(self._states(batch)[before(batch.learn)]))

    def write(self, folder: Path, about: dict[str, Any]) -> None:
        save_model(folder, self.model, about)
