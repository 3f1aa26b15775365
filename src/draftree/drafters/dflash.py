"""DFlash: draft a block in one pass over the target's hidden states (arXiv 2602.06036).

Its slots see each other in both directions, so that the number of masks changes what is drafted: it
is always fed the block size it was trained with. A slot predicts its token independently of the
drafts before it.

Shapes: R slots, n slots of a block, M nodes or blocks, D hidden size, V′ (draft) vocabulary.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from torch import Tensor
from typing_extensions import override

from draftree.drafters.base import Batch, Stage
from draftree.drafters.neural.block_drafter import ParallelDrafter, ParallelMethod, open_checkpoint
from draftree.drafters.neural.block_loss import draw_anchors, marginal_loss
from draftree.drafters.neural.block_model import ParallelNet
from draftree.formats import block_drafters
from draftree.formats.block_drafters import DrafterKind
from draftree.formats.checkpoint import Checkpoint
from draftree.target.target import Target
from draftree.tree import Ints, Tree


@final
@dataclass(frozen=True)
class DFlash(ParallelMethod):
    """DFlash's block drafter (in the paper of 5 layers, blocks of 16, 512 anchors, and γ 7, 5, 4 for blocks of 16, 10, 8).

    Attributes:
        loss: `ce`, the cross-entropy with the text (as in the paper), or `kl`, the KL divergence
            from the target.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=6,
            lr=6e-4,
            schedule="cosine",
            floor=0,
            warmup=0.04,
            clip=1.0,
            max_tokens=3072,
            loss="Σ exp(−k/γ) · cross-entropy with the text in slot k of a block, at random roots",
            source="the paper's recipe, as SpecForge has it",
            ours=("batch_size", "betas", "weight_decay"),
        ),
    )

    loss: Literal["ce", "kl"] = "ce"

    @classmethod
    @override
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        return block_drafters.kind_of(config, keys) == "dflash"

    @override
    def read(self, stored: Checkpoint, target: Target) -> "DFlashDrafter":
        stored, layout, net = open_checkpoint(stored, target, "dflash", ParallelNet)
        return DFlashDrafter(self.with_layout(layout), net, target, stored)

    @override
    def new(self, target: Target) -> "DFlashDrafter":
        net = ParallelNet(self.layout(target, causal=False, shifted=False), target, {})
        net.begin(self.init)
        return DFlashDrafter(self, net, target, Checkpoint(name=block_drafters.name))


@final
class DFlashDrafter(ParallelDrafter):
    """Drafts the token of every slot independently of the other drafts."""

    knobs: DFlash
    kind: ClassVar[DrafterKind] = "dflash"
    by_path = False

    @override
    def after(self, outputs: Tensor, tree: Tree, nodes: Ints) -> Tensor:
        return self.model.head(self.slots(outputs, tree, nodes))

    @override
    def training_logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        return self.model.head(states)

    @override
    def loss(self, batch: Batch) -> Tensor:
        places = draw_anchors(batch, self.drafts, self.knobs.anchors, self.knobs.gamma)
        return marginal_loss(
            self.knobs.loss,
            batch,
            self.blocks(batch, places.anchors),
            places,
            self.model.draft_vocabulary,
        )
