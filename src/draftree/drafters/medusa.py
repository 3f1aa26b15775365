"""Medusa: heads on the target's last hidden state, each for a token further ahead (Cai et al. 2024).

Head i, counted from 0, predicts token t + 2 + i from the hidden state at position t; the LM head has predicted t + 1, the
root. What follows the root's children does not depend on which of them it was: all nodes of a depth share one list.

Shapes: R rows, F frontier nodes, B batch, T tokens, M learnt positions, D hidden size, V vocabulary, K heads.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn

from draftree.boundary.knobs import knob
from draftree.drafters.base import Batch, Stage, TrainableMethod
from draftree.drafters.neural.heads import HeadsDrafter, ResBlock, lm_head, newest, offered
from draftree.formats.checkpoint import Checkpoint, sizes
from draftree.formats.medusa import FILE, FILES, MERGED, PREFIX, VLLM, counted, left_to_the_target, loaded, renamed, to_vllm
from draftree.models.target import LAST, Taps, Target
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
    files = (*FILES, *MERGED)
    formats = ("vllm-medusa",)

    heads: int = knob(5, least=1)
    layers: int = knob(1, least=1)
    decay: float = knob(0.8, above=0, most=1)
    distil: float = knob(0.0, least=0, most=1)

    @classmethod
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        beginnings = ("0.0.linear.weight", f"{PREFIX}0.0.linear.weight", VLLM)
        return any(name in keys for name in beginnings)

    def read(self, stored: Checkpoint, target: Target) -> "MedusaDrafter":
        stored = loaded(stored)
        official = renamed(stored) if VLLM in stored.tensors else stored
        heads, layers = counted(official.tensors, stored.folder)
        first, last = official.tensors["0.0.linear.weight"], official.tensors.get(f"0.{layers}.weight")
        found = {"hidden_size": len(first), "vocab_size": target.decoder.vocab if last is None else len(last)}
        stored.check_sizes("medusa", found, sizes(target))
        model = official.network(lambda: made(target, heads, layers), left_to_the_target(official, heads, layers))
        return MedusaDrafter(replace(self, heads=heads, layers=layers), model, target, stored)

    def new(self, target: Target) -> "MedusaDrafter":
        return MedusaDrafter(self, made(target, self.heads, self.layers), target, Checkpoint(file=FILE))


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
class MedusaDrafter(HeadsDrafter[Heads]):
    """Drafts all depths from one hidden state a row."""

    knobs: Medusa
    model: nn.ModuleList

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
        return offered(torch.stack(logits), heads, k, drawing, rows, depths).shared(which.ravel()), state

    def commit(self, state: Heads, tree: Tree, verdict: Verdict, taps: Taps) -> Heads:
        return Heads(newest(taps.rows, taps.hidden[LAST].to(self._like.dtype), state.hidden))

    def truncate(self, state: Heads, lengths: Ints, rows: Ints | None = None) -> Heads:
        return Heads(state.hidden)  # the next prompt's last token is always read anew

    def readers(self, batch: Batch) -> Sequence[Callable[[Any], Tensor]]:
        states = batch.hidden[LAST].to(self._like.dtype)

        def read(head: nn.Module, at: Any) -> Tensor:
            logits: Tensor = head(states[at])
            return logits

        return [partial(read, head) for head in self.model]

    def weights(self, head: int) -> tuple[float, float]:
        """Those of section 2.2.1, eq. 1, divided between text and target."""
        weight, share = self.knobs.decay ** (head + 1), self.knobs.distil
        return weight * (1 - share), weight * share

    def published(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The official layout, or vLLM's where it came in that; heads read from a merged model stand alone."""
        if VLLM in self._stored.tensors:
            tensors = to_vllm(config, tensors)[1]
        else:
            counts = {"medusa_num_heads": len(self.model), "medusa_num_layers": self.knobs.layers}
            config = {"base_model_name_or_path": self._target.name} | config | counts
        there = self._stored.tensors or tensors  # a published file gets no tensors that it did not have
        return config, {k: v for k, v in tensors.items() if k in there}
