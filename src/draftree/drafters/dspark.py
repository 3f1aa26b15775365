"""DSpark: draft a block in one pass; each draft depends on the previous one and has a confidence (arXiv 2607.05147).

The block's slots are DFlash's. A small Markov head adds to a slot's logits what the token before it
makes likely, so that the children of a node depend on the node, and a confidence head says how
probably the next draft will be accepted. Both need no pass. The root's slot drafts already: slot k
says what comes at depth k + 1.

Shapes: M nodes or blocks, n slots, r rank, D hidden size, V vocabulary, V′ draft vocabulary.
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from typing_extensions import override

from draftree.drafters.base import Batch, Stage
from draftree.drafters.neural.block_drafter import ParallelDrafter, ParallelMethod, open_checkpoint
from draftree.drafters.neural.block_loss import draw_anchors, target_logits_at, tokens_at
from draftree.drafters.neural.block_model import ParallelNet
from draftree.formats import block_drafters
from draftree.formats.block_drafters import BlockDrafterConfig, DrafterKind
from draftree.formats.checkpoint import Checkpoint
from draftree.target.target import Target
from draftree.tree import Floats, Ints, Tree
from draftree.utils.validated_dataclass import knob

CE, L1, CONFIDENCE = 0.1, 0.9, 1.0
"""Weights of the parts of the objective, from DeepSpec's config.

`CE` is the weight of the cross-entropy with the text, `L1` that of Σ|p − q| (twice the total
variation), and `CONFIDENCE` that of the confidence head's cross-entropy.
"""


@final
@dataclass(frozen=True)
class DSpark(ParallelMethod):
    """DSpark's block drafter (in the paper of 5 layers, blocks of 7, rank 256, 512 anchors).

    Attributes:
        rank: r, the rank of the Markov head.
        markov: the kind of Markov head. The bias that it adds depends on the preceding token
            (`vanilla`), also on a gate computed from the slot (`gated`), or on the whole path
            (`rnn`).
        confidence: whether there is a confidence head; the policy `yield` reads its result.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=10,
            batch_size=512,
            lr=6e-4,
            schedule="cosine",
            floor=0,
            warmup=0.04,
            weight_decay=0,
            clip=1.0,
            max_tokens=4096,
            loss="Σ exp(−k/γ) · (0.1 cross-entropy with the text + 0.9 Σ|p − q| + cross-entropy of the confidence)",
            source="DeepSpec's configuration",
            ours=("betas",),
        ),
    )

    rank: int = knob(64, least=1)
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: bool = True

    @classmethod
    @override
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        return block_drafters.kind_of(config, keys) == "dspark"

    @override
    def read(self, stored: Checkpoint, target: Target) -> "DSparkDrafter":
        stored, layout, net = open_checkpoint(stored, target, "dspark", DSparkNet)
        found = replace(
            self.with_layout(layout),
            rank=layout.rank,
            markov=layout.markov,
            confidence=layout.confidence[0],
        )
        return DSparkDrafter(found, net, target, stored)

    @override
    def new(self, target: Target) -> "DSparkDrafter":
        layout = self.layout(target, causal=False, shifted=True)
        layout = replace(
            layout,
            markov=self.markov,
            rank=self.rank,
            confidence=(self.confidence, self.confidence),
        )
        net = DSparkNet(layout, target, {})
        net.begin(self.init)
        return DSparkDrafter(self, net, target, Checkpoint(name=block_drafters.name))


@final
class Markov(nn.Module):
    """A module that computes a bias of a slot's logits from the token before the slot.

    The token is mapped to a vector of r numbers, and the vector to the bias.

    Args:
        kind: see `DSpark.markov`.
        rank: r, the size of the vectors.
        width: D, the hidden size.
        vocab: V, the size of the target's vocabulary.
        drafted: V′, the size of the draft vocabulary.
    """

    def __init__(self, kind: str, rank: int, width: int, vocab: int, drafted: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if kind == "rnn" else None

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the vectors [M, n, r] of slots along paths.

        Args:
            states: [M, n, D] the outputs of the slots.
            tokens: [M, n] the token before each slot.
        """
        x: Tensor = self.markov_w1(tokens)
        if self.gate_proj is not None:
            gated: Tensor = torch.sigmoid(self.gate_proj(torch.cat((states, x), dim=-1))) * x
            return gated
        if self.joint_proj is None:
            return x
        memory, found = torch.zeros_like(x[:, 0]), []
        for k in range(x.shape[1]):
            gate, new, out = self.joint_proj(
                torch.cat((memory, x[:, k], states[:, k]), dim=-1)
            ).chunk(3, dim=-1)
            found.append(torch.tanh(out))
            memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(new)
        return torch.stack(found, dim=1)

    def bias(self, x: Tensor) -> Tensor:
        """Return the biases […, V′] for vectors […, r]."""
        found: Tensor = self.markov_w2(x)
        return found


@final
class Confidence(nn.Module):
    """Computes the log-odds that a slot's draft is accepted if all drafts before it were."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-odds […] for inputs […, width]."""
        found: Tensor = self.proj(x)[..., 0]
        return found


@final
class DSparkNet(ParallelNet):
    """The layers and the two heads, with the tensor names of DeepSpec's checkpoints."""

    def __init__(self, layout: BlockDrafterConfig, target: Target, own: dict[str, Tensor]) -> None:
        super().__init__(layout, target, own)
        size, vocab, (confident, with_markov) = (
            int(self.config.hidden_size),
            target.decoder.vocab,
            layout.confidence,
        )
        self.markov_head = Markov(
            layout.markov, layout.rank, size, vocab, layout.draft_vocab or vocab
        )
        self.confidence_head = Confidence(size + layout.rank * with_markov) if confident else None

    def certainty(self, states: Tensor, tokens: Tensor) -> Tensor | None:
        """Return the log-odds […] that a slot's draft is accepted; None without a confidence head.

        Args:
            states: […, D] the outputs of the slots.
            tokens: […] the token before each slot.
        """
        if self.confidence_head is None:
            return None
        with_markov = self.layout.confidence[1]
        x = (
            torch.cat((states, self.markov_head.markov_w1(tokens)), dim=-1)
            if with_markov
            else states
        )
        found: Tensor = self.confidence_head(x)
        return found


@final
class DSparkDrafter(ParallelDrafter):
    """Drafts tokens that are likely by the slot of a node's depth and by the node's own token."""

    knobs: DSpark
    model: DSparkNet
    kind: ClassVar[DrafterKind] = "dspark"
    by_path = True

    @override
    def after(self, outputs: Tensor, tree: Tree, nodes: Ints) -> Tensor:
        states, markov = self.slots(outputs, tree, nodes), self.model.markov_head
        found = states.new_zeros(len(nodes), markov.markov_w1.embedding_dim)
        depths = np.minimum(tree.depth[nodes], self.drafts - 1)
        for depth in np.unique(depths).tolist():
            mine = np.flatnonzero(depths == depth)
            path = [nodes[mine]]
            while (
                len(path) <= depth and self.knobs.markov == "rnn"
            ):  # the other kinds depend only on the last token
                path.insert(0, tree.parents[path[0]])
            ways = np.stack(path, axis=1)
            along = self.slots(outputs, tree, ways.ravel()).view(*ways.shape, -1)
            tokens = torch.from_numpy(tree.tokens[ways]).to(states.device)
            found[torch.from_numpy(mine).to(states.device)] = markov(along, tokens)[:, -1]
        return self.marginals(outputs, tree, nodes) + markov.bias(found)

    @override
    def confidence(self, outputs: Tensor, tree: Tree, nodes: Ints) -> Floats | None:
        tokens = torch.from_numpy(tree.tokens[nodes]).to(outputs.device)
        odds = self.model.certainty(self.slots(outputs, tree, nodes), tokens)
        return None if odds is None else odds.sigmoid().cpu().double().numpy()

    @override
    def training_logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        return self.model.head(states) + self.model.markov_head.bias(
            self.model.markov_head(states, tokens)
        )

    @override
    def loss(self, batch: Batch) -> Tensor:
        places = draw_anchors(batch, self.drafts, self.knobs.anchors, self.knobs.gamma)
        states, before = self.along(batch, places.anchors)
        states, before = (each.unflatten(0, places.anchors.shape) for each in (states, before))
        logits = self.training_logits(states.flatten(0, 1), before.flatten(0, 1)).unflatten(
            0, places.anchors.shape
        )
        logits = logits[places.valid].float()
        weight = places.weight[places.valid]
        drafted = self.model.draft_vocabulary
        far = (
            (
                torch.softmax(target_logits_at(batch, places, drafted).float(), -1)
                - torch.softmax(logits, -1)
            )
            .abs()
            .sum(-1)
        )
        wanted = tokens_at(batch, places)
        total = L1 * (weight * far).sum()
        odds = self.model.certainty(states[places.valid], before[places.valid])
        if odds is not None:
            sure = binary_cross_entropy_with_logits(
                odds.float(), 1 - far.detach() / 2, reduction="none"
            )
            total = total + CONFIDENCE * (weight * sure).sum()
        if drafted is not None:
            (columns, logits), (_, weight) = (
                drafted.columns(wanted, logits),
                drafted.columns(wanted, weight),
            )
            wanted = columns
        return (
            total + CE * (weight * cross_entropy(logits, wanted, reduction="none")).sum()
        ) / batch.count
