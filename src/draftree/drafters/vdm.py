"""The vanilla draft model: one transformer layer of the target's shape, trained alone (EDD + PCT, section 4.1)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self, final

from torch import Tensor
from transformers import PreTrainedModel

from draftree.drafters.base import Batch, Stage, Trainable, TrainableMethod
from draftree.drafters.neural.language_model import (
    Decoding,
    beginning,
    keep_path,
    load_model,
    propose,
    read,
    rewind,
    save_model,
)
from draftree.drafters.neural.losses import before, draft_loss
from draftree.formats.checkpoint import kept
from draftree.models.decoder import Decoder
from draftree.models.target import Taps, Target
from draftree.sampling.drawing import Drawing
from draftree.tree import Candidates, Ints, Tree, Verdict


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

    def read(self, folder: Path, target: Target) -> "VDMDrafter":
        return VDMDrafter(self.resume(folder, target), load_model(folder, "vdm", target), target)

    def fresh(self, target: Target) -> "VDMDrafter":
        return VDMDrafter(self, beginning(target), target)

    def resume(self, folder: Path, target: Target) -> Self:
        return replace(self, checkpoint=str(folder), **kept(folder, type(self)))


@final
class VDMDrafter(Trainable[Decoding]):
    """Drafts with a small language model of its own, as `lm` does; reads nothing of the target."""

    knobs: VDM
    model: PreTrainedModel

    def __init__(self, knobs: VDM, model: PreTrainedModel, target: Target) -> None:
        self.knobs, self.model, self._target = knobs, model, target
        self.small = Target(Decoder(model), "vdm")

    def start(
        self, prompts: Sequence[Ints], roots: Ints, taps: Taps, state: Decoding | None = None, rows: Ints | None = None
    ) -> Decoding:
        return read(self.small, prompts, state, rows)

    @property
    def expands_paths(self) -> bool:
        return True

    def expand(self, state: Decoding, tree: Tree, frontier: Ints, k: int, drawing: Drawing) -> tuple[Candidates, Decoding]:
        return propose(self.small.decoder, state, tree, frontier, k, drawing)

    def commit(self, state: Decoding, tree: Tree, verdict: Verdict, taps: Taps) -> Decoding:
        return keep_path(state, tree, verdict)

    def truncate(self, state: Decoding, lengths: Ints, rows: Ints | None = None) -> Decoding:
        return rewind(state, lengths, rows)

    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        return self.small.decoder.head(self._states(batch))  # every token sees all before it, wherever a block begins

    def _states(self, batch: Batch) -> Tensor:
        states: Tensor = self.small.decoder.stack(input_ids=batch.tokens, use_cache=False).last_hidden_state
        return states

    def loss(self, batch: Batch) -> Tensor:
        return draft_loss(self.knobs.loss, batch, self.small.decoder.head(self._states(batch)[before(batch.learn)]))

    def save(self, folder: Path) -> None:
        save_model(folder, "vdm", self.model, self.knobs, self._target)
