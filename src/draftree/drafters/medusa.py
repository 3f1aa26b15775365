"""Medusa: heads on the target's last hidden state, each for a token further ahead (Cai et al. 2024).

Head i, counted from 0, predicts token t + 2 + i from the hidden state at position t; the LM head has predicted t + 1, the
root. What follows the root's children does not depend on which of them it was: all nodes of a depth share one list.

Shapes: R rows, F frontier nodes, B batch, T tokens, M learnt positions, D hidden size, V vocabulary, K heads.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from draftree.drafters.base import Batch, Stage, Trainable, TrainableMethod
from draftree.drafters.neural.heads import ResBlock, by_depth, lm_head, newest, offered, teacher
from draftree.drafters.neural.losses import before, kl
from draftree.errors import UserError
from draftree.formats.checkpoint import ABOUT, Stored, check_sizes, furnished, kept, note, write
from draftree.formats.medusa import FILE, PREFIX, counted, left_to_the_target, read, renamed, to_vllm
from draftree.models.target import LAST, Needs, Taps, Target
from draftree.sampling.drawing import Drawing
from draftree.tree import Candidates, Ints, Tree, Verdict


@final
@dataclass(frozen=True)
class Medusa(TrainableMethod):
    """Medusa heads, trained as Medusa-1: the target stays as it is.

    Attributes:
        heads: K; how deep a tree can be. A published checkpoint has as many as its file, whatever its config says.
        layers: residual blocks of a head. The official code, unlike this, repeats one block where there are several.
        decay: the loss of head i is weighted by decay^(i + 1) (section 2.2.1: λ_k = 0.8^k).
        distil: share of KL(p‖q) against the target's own distribution in each head's loss (self-distillation, section
            2.3.2); the rest is cross-entropy against the text.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=2, batch_size=64, lr=2e-3, schedule="cosine", floor=0, warmup=40, weight_decay=0, max_tokens=4096,
            loss="Σ 0.8^(i + 1) · cross-entropy with the text of head i",
            source="Medusa-1 in the paper's configuration for axolotl, its rate for the heads",
            ours=("betas", "clip"),
        ),
    )  # fmt: skip

    heads: int = 5
    layers: int = 1
    decay: float = 0.8
    distil: float = 0.0

    def __post_init__(self) -> None:
        if min(self.heads, self.layers) < 1:
            raise UserError(f"medusa: got heads={self.heads}, layers={self.layers}; allowed is at least 1")
        if not (0 < self.decay <= 1 and 0 <= self.distil <= 1):
            raise UserError(f"medusa: got decay={self.decay}, distil={self.distil}; allowed are (0, 1] and [0, 1]")

    @classmethod
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        beginnings = ("0.0.linear.weight", f"{PREFIX}0.0.linear.weight", "blocks.0.layers.0.weight")
        return any(name in keys for name in beginnings)

    def read(self, folder: Path, target: Target) -> "MedusaDrafter":
        published = read(folder)
        stored = published if "blocks.0.layers.0.weight" not in published.tensors else renamed(published)
        heads, layers = counted(stored.tensors, folder)
        sizes = {"hidden_size": stored.tensors["0.0.linear.weight"].shape[0]}
        last = stored.tensors.get(f"0.{layers}.weight")
        check_sizes(sizes | {"vocab_size": target.decoder.vocab if last is None else last.shape[0]}, folder, "medusa", target)
        model = furnished(lambda: made(target, heads, layers), stored, folder, left_to_the_target(stored, heads, layers))
        knobs = replace(self.resume(folder, target), heads=heads, layers=layers)
        return MedusaDrafter(knobs, model.to(target.decoder.device, target.decoder.dtype), target, published)

    def fresh(self, target: Target) -> "MedusaDrafter":
        model = made(target, self.heads, self.layers).to(target.decoder.device)
        return MedusaDrafter(self, model, target, Stored(FILE))

    def resume(self, folder: Path, target: Target) -> Self:
        return replace(self, checkpoint=str(folder), **kept(folder, type(self)))


def made(target: Target, heads: int, layers: int) -> nn.ModuleList:
    """Fresh float32 heads; parameters are named as in the official file.

    Blocks begin as the identity plus SiLU of a random bias, the linear layers behind them as the target's LM head.
    """
    last = [lm_head(target, bias=False) for _ in range(heads)]
    return nn.ModuleList(nn.Sequential(*(ResBlock(o.in_features) for _ in range(layers)), o) for o in last)


@dataclass(frozen=True)
class Heads:
    """Medusa's state.

    Attributes:
        hidden: [R, D] the target's at each row's last committed token, the one before its root.
        logits: of the first heads, [R, V] each; they are computed when a depth is first asked for, once a step.
    """

    hidden: Tensor
    logits: tuple[Tensor, ...] = ()


@final
class MedusaDrafter(Trainable[Heads]):
    """Drafts all depths from one hidden state a row."""

    knobs: Medusa
    model: nn.ModuleList

    def __init__(self, knobs: Medusa, model: nn.ModuleList, target: Target, stored: Stored) -> None:
        self.knobs, self.model, self._target, self._stored = knobs, model, target, stored
        model.eval()

    @property
    def needs(self) -> Needs:
        return Needs(hidden=(LAST,))

    @property
    def _like(self) -> Tensor:
        return next(self.model.parameters())

    def start(
        self, prompts: Sequence[Ints], roots: Ints, taps: Taps, state: Heads | None = None, rows: Ints | None = None
    ) -> Heads:
        hidden = taps.hidden[LAST].to(self._like.dtype)
        before = hidden.new_zeros(len(prompts), hidden.shape[1]) if state is None else state.hidden
        return Heads(newest(taps.rows, hidden, before))

    @torch.inference_mode()
    def expand(self, state: Heads, tree: Tree, frontier: Ints, k: int, drawing: Drawing) -> tuple[Candidates, Heads]:
        """A node at depth d is followed by head d's list; beyond the last head q is unknown (uniform) and nothing comes."""
        (depths, rows), which = np.unique(np.stack((tree.depth[frontier], tree.row[frontier])), axis=1, return_inverse=True)
        known = len(state.logits)
        asked = self.model[known : max(known, int(depths.max()) + 1)]
        state = replace(state, logits=(*state.logits, *(head(state.hidden) for head in asked)))
        blank = self._like.new_zeros(self._target.decoder.vocab)
        heads = len(self.model)
        logits = [state.logits[d][r] if d < heads else blank for d, r in zip(depths.tolist(), rows.tolist(), strict=True)]
        if drawing.shaped is not None:  # the request's processors tell nodes of a list apart
            each = torch.stack([logits[i] for i in which.ravel()])
            return offered(each, heads, k, drawing, tree.row[frontier], tree.depth[frontier]), state
        found = offered(torch.stack(logits), heads, k, drawing, rows, depths)
        return _spread(found, which.ravel()), state

    def commit(self, state: Heads, tree: Tree, verdict: Verdict, taps: Taps) -> Heads:
        return Heads(newest(taps.rows, taps.hidden[LAST].to(self._like.dtype), state.hidden))

    def truncate(self, state: Heads, lengths: Ints, rows: Ints | None = None) -> Heads:
        return Heads(state.hidden)  # the next prompt's last token is always read anew

    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        """Logits [B, T, V]; zeros where there is no head: beyond the last one, and in a block that begins the text."""
        states = batch.hidden[LAST].to(self._like.dtype)
        logits = states.new_zeros(*batch.tokens.shape, self._target.decoder.vocab)
        for depth, starts in by_depth(batch.tokens.shape[1], block, phase, len(self.model)):
            logits[:, starts + depth] = self.model[depth](states[:, starts - 1]).to(logits.dtype)
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Σ decay^(i + 1) · (cross-entropy or KL of head i), over learnt tokens (section 2.2.1, eq. 1)."""
        states = batch.hidden[LAST].to(self._like.dtype)
        share, total = self.knobs.distil, states.new_zeros(())
        whole = batch.target(before(batch.learn)) if share else None
        for i, head in enumerate(self.model):
            distance = 2 + i
            at = before(batch.learn, distance)
            logits = head(states[at]).float()
            part = (1 - share) * cross_entropy(logits, batch.tokens.roll(-distance, 1)[at], reduction="sum")
            if whole is not None:
                part = part + share * kl(teacher(whole, batch, distance), logits)
            total = total + self.knobs.decay ** (i + 1) * part
        return total / batch.count

    def save(self, folder: Path) -> None:
        """Writes the official layout, or vLLM's where it came in that; heads read from a merged model are written alone."""
        stored, state = self._stored, self.model.state_dict()
        names = {"base_model_name_or_path": self._target.name}
        sizes = {"medusa_num_heads": len(self.model), "medusa_num_layers": self.knobs.layers}
        config = names | stored.config | sizes
        if "blocks.0.layers.0.weight" in stored.tensors:
            config, state = stored.config, to_vllm(stored.config, state)[1]
        if stored.tensors:  # a published file gets no tensors that it did not have
            state = {k: v for k, v in state.items() if k in stored.tensors}
        write(folder, stored, state, config | {ABOUT: note("medusa", self.knobs, self._target)})


def _spread(found: Candidates, which: Ints) -> Candidates:
    """Candidates [F, K] of lists that several nodes share; `which` [F] is each node's."""

    def spread(q: Tensor | None) -> Tensor | None:
        if q is None or len(q) == 1:  # one list for all costs no memory, and that is how layered policies ask
            return q if q is None else q.expand(len(which), -1)
        return q[torch.from_numpy(which).to(q.device)]

    q, before = spread(found.log_probs), spread(found.unconditioned)
    return replace(found, tokens=found.tokens[which], log_q=found.log_q[which], log_probs=q, unconditioned=before)
