"""JetSpec: a block drafter with causal slots; a longer block does not change its first drafts (arXiv 2606.18394).

It drafts as published: one pass with masks gives each depth's list, which all nodes of the depth
share, and trees are made of these. If asked it reads the tokens of each path, too, as slots that
see those before them alone can: a pass for every layer.

Shapes: R slots, n slots of a block, M nodes or blocks, D hidden size, V′ (draft) vocabulary.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor
from typing_extensions import override

from draftree.drafters.base import Batch, Stage
from draftree.drafters.neural.block_drafter import ParallelDrafter, ParallelMethod, open_checkpoint
from draftree.drafters.neural.block_loss import draw_anchors, marginal_loss
from draftree.drafters.neural.block_model import ParallelNet
from draftree.errors import UserError
from draftree.formats import block_drafters
from draftree.formats.block_drafters import DrafterKind
from draftree.formats.checkpoint import Checkpoint
from draftree.target.target import Target
from draftree.tree import Ints, Tree
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class JetSpec(ParallelMethod):
    """JetSpec's causal block drafter (in the paper blocks of 16 and 512 anchors).

    Attributes:
        conditioned: whether the candidates after a node depend on its whole path, and not only on
            its depth. Every layer then needs a pass over its nodes, and training reads the tokens
            of the text instead of masks. The paper has only masks.
    """

    chosen: ClassVar[tuple[str, ...]] = ("conditioned",)
    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=6,
            lr=6e-4,
            schedule="cosine",
            floor=0,
            warmup=0.04,
            clip=1.0,
            max_tokens=3072,
            loss="KL(p‖q) to the target in every slot of a block alike, at random roots",
            source="JetSpec, section 4; what it leaves open as in DFlash's recipe",
            ours=(
                "epochs",
                "lr",
                "schedule",
                "warmup",
                "batch_size",
                "betas",
                "weight_decay",
                "max_tokens",
            ),
        ),
    )
    gamma: float = knob(0.0, least=0)
    conditioned: bool = False

    @classmethod
    @override
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        return block_drafters.kind_of(config, keys) == "jetspec"

    @override
    def read(self, stored: Checkpoint, target: Target) -> "JetSpecDrafter":
        stored, layout, net = open_checkpoint(stored, target, "jetspec", ParallelNet)
        if self.conditioned and (
            layout.shifted or not all(sight.causal for sight in layout.sights)
        ):
            told = f"'{stored.folder}' has slots that do not stand for their own place, or see those behind them"
            raise UserError(f"jetspec: conditioned is True, allowed is False: {told}")
        return JetSpecDrafter(self.with_layout(layout), net, target, stored)

    @override
    def new(self, target: Target) -> "JetSpecDrafter":
        net = ParallelNet(self.layout(target, causal=True, shifted=False), target, {})
        net.begin(self.init)
        return JetSpecDrafter(self, net, target, Checkpoint(name=block_drafters.name))


@final
class JetSpecDrafter(ParallelDrafter):
    """Drafts a distribution for every slot in one causal pass."""

    knobs: JetSpec
    kind: ClassVar[DrafterKind] = "jetspec"
    by_path = False

    @property
    @override
    def needs_pass_per_layer(self) -> bool:
        return self.knobs.conditioned

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
            "kl", batch, self.blocks(batch, places.anchors), places, self.model.draft_vocabulary
        )
