"""Medusa: heads on the target's last hidden state, one for each depth (Cai et al. 2024).

Head i, counted from 0, predicts token t + 2 + i from the hidden state at position t; the LM head
has predicted t + 1, the root. What follows the root's children does not depend on which of them it
was: all nodes of a depth share one list.

Shapes: R slots, F frontier nodes, B batch, T tokens, M learnt positions, D hidden size, V′ (draft)
vocabulary, K heads.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from draftree.drafters.base import Batch, Stage, TrainableMethod
from draftree.drafters.neural.draft_vocabulary import check_map, check_size
from draftree.drafters.neural.head_drafter import (
    HeadsDrafter,
    HeadsNet,
    ResBlock,
    latest_by_sequence,
    lm_head,
    make_candidates,
)
from draftree.drafters.neural.head_drafter_on_device import HeadLayers
from draftree.formats import config_entries
from draftree.formats.checkpoint import Checkpoint, sizes
from draftree.formats.medusa import (
    HEADS_FILE,
    HEADS_FILES,
    HEADS_PREFIX,
    MERGED_MODEL_FILES,
    VLLM_ONLY_TENSOR,
    VOCABULARY_OFFSETS,
    convert_from_vllm,
    copy_target_head,
    count_heads,
    load_heads,
    to_vllm,
)
from draftree.models.graph_capture import InputTensors
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.device_tree import Nodes
from draftree.target.target import LAST, HiddenStates, Target
from draftree.tree import AcceptResult, Candidates, Ints, Tree
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class Medusa(TrainableMethod):
    """Medusa heads, trained as Medusa-1: the target stays as it is.

    Attributes:
        heads: K, the number of heads, which is the largest depth of a node. For a published
            checkpoint it is the number of heads in its file, even if its config has another number.
        layers: number of residual blocks of a head. In the official code several blocks share their
            weights; here they do not.
        decay: the loss of head i is weighted by decay^(i + 1) (section 2.2.1: λ_k = 0.8^k).
        distil: weight of KL(p‖q), with p from the target, in each head's loss (self-distillation,
            section 2.3.2). The rest is the cross-entropy with the text.
        draft_vocab: V′, the number of tokens that can be drafted, which are the most frequent ones
            in the training data; 0 for all.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=2,
            batch_size=64,
            lr=2e-3,
            schedule="cosine",
            floor=0,
            warmup=40,
            weight_decay=0,
            max_tokens=4096,
            loss="Σ 0.8^(i + 1) · cross-entropy with the text of head i",
            source="Medusa-1 in the paper's configuration for axolotl, its rate for the heads",
            ours=("betas", "clip"),
        ),
    )
    files = (*HEADS_FILES, *MERGED_MODEL_FILES)
    formats = ("vllm-medusa",)

    heads: int = knob(5, least=1)
    layers: int = knob(1, least=1)
    decay: float = knob(0.8, above=0, most=1)
    distil: float = knob(0.0, least=0, most=1)
    draft_vocab: int = knob(0, least=0)

    @classmethod
    @override
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        beginnings = ("0.0.linear.weight", f"{HEADS_PREFIX}0.0.linear.weight", VLLM_ONLY_TENSOR)
        return any(name in keys for name in beginnings)

    @override
    def read(self, stored: Checkpoint, target: Target) -> "MedusaDrafter":
        stored = load_heads(stored)
        config_entries.MEDUSA.check(stored.config, stored.folder, "medusa")
        official = convert_from_vllm(stored) if VLLM_ONLY_TENSOR in stored.tensors else stored
        heads, layers = count_heads(official.tensors, stored.folder)
        first, last = (
            official.tensors["0.0.linear.weight"],
            official.tensors.get(f"0.{layers}.weight"),
        )
        mapped = official.tensors.get(VOCABULARY_OFFSETS)
        vocab = target.decoder.vocab if last is None or mapped is not None else len(last)
        stored.check_sizes(
            "medusa", {"hidden_size": len(first), "vocab_size": vocab}, sizes(target)
        )
        found = replace(
            self, heads=heads, layers=layers, draft_vocab=0 if mapped is None else len(mapped)
        )
        model = official.network(
            lambda: MedusaNet(target, found), copy_target_head(official, heads, layers)
        )
        check_map(model.d2t, target, stored.folder)
        return MedusaDrafter(found, model, target, stored)

    @override
    def new(self, target: Target) -> "MedusaDrafter":
        check_size("medusa", self.draft_vocab, target)
        return MedusaDrafter(self, MedusaNet(target, self), target, Checkpoint(file=HEADS_FILE))


@final
class MedusaNet(HeadsNet, nn.ModuleList):
    """New float32 heads, with the parameter names of the official file.

    Each block is initialised as the identity plus SiLU of a random bias. The linear layers after
    the blocks are initialised with the target's LM head.
    """

    def __init__(self, target: Target, knobs: Medusa) -> None:
        last = [lm_head(target, False, knobs.draft_vocab) for _ in range(knobs.heads)]
        heads = (
            nn.Sequential(*(ResBlock(o.in_features) for _ in range(knobs.layers)), o) for o in last
        )
        nn.ModuleList.__init__(self, heads)
        self.map(knobs.draft_vocab)

    @property
    @override
    def last(self) -> Sequence[nn.Linear]:
        heads: list[Any] = list(self)
        return [head[-1] for head in heads]


@dataclass(frozen=True)
class MedusaState:
    """Medusa's state.

    Attributes:
        hidden: [R, D] the target's hidden state at each last committed token, before the root.
        logits: the logits of the first heads, [R, V′] each. Those of a head are computed when its
            depth is first requested in a step.
    """

    hidden: Tensor
    logits: tuple[Tensor, ...] = ()


@final
class MedusaDrafter(HeadsDrafter[MedusaState]):
    """Drafts all depths from one hidden state per sequence."""

    knobs: Medusa
    model: MedusaNet

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: MedusaState | None = None,
        rows: Ints | None = None,
    ) -> MedusaState:
        hidden = hidden_states.hidden[LAST].to(self._like.dtype)
        before = hidden.new_zeros(len(prompts), hidden.shape[1]) if state is None else state.hidden
        return MedusaState(latest_by_sequence(hidden_states.rows, hidden, before))

    def passes(self, state: MedusaState, tree: Tree, frontier: Ints) -> int:
        """Return the number of sequences if a head must run for the frontier's depth, otherwise 0.

        A head runs once in a step, for all sequences.
        """
        depth = int(tree.depth[frontier].max(initial=0))
        return tree.roots if len(state.logits) <= depth < len(self.model) else 0

    @torch.inference_mode()
    def expand(
        self, state: MedusaState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, MedusaState]:
        """Return the candidates after each node; for nodes at depth d they come from head d.

        There are no candidates below the last head, where q is taken to be uniform.
        """
        (depths, rows), which = np.unique(
            np.stack((tree.depth[frontier], tree.row[frontier])), axis=1, return_inverse=True
        )
        known = len(state.logits)
        asked = list(self.model)[known : max(known, int(depths.max()) + 1)]
        state = replace(state, logits=(*state.logits, *(head(state.hidden) for head in asked)))
        blank = self._like.new_zeros(self.knobs.draft_vocab or self._target.decoder.vocab)
        heads, drafted = len(self.model), self.draft_vocabulary
        logits = [
            state.logits[d][r] if d < heads else blank
            for d, r in zip(depths.tolist(), rows.tolist(), strict=True)
        ]
        if drawing.by_node:
            each = torch.stack([logits[i] for i in which.ravel()])
            return make_candidates(
                each, heads, k, drawing, tree.row[frontier], tree.depth[frontier], drafted
            ), state
        return make_candidates(
            torch.stack(logits), heads, k, drawing, rows, depths, drafted
        ).share_lists(which.ravel()), state

    @torch.inference_mode()
    @override
    def layers(self, state: MedusaState, roots: Tree, depth: Ints) -> HeadLayers:
        def read(depth: int, given: InputTensors, nodes: Nodes, frontier: Tensor) -> Tensor:
            logits: Tensor = self.model[depth](given["hidden"])
            return logits[:, None].expand(-1, frontier.shape[1], -1)

        given, heads = {"hidden": state.hidden}, len(self.model)
        return HeadLayers(
            read,
            heads,
            self.capture,
            self.recorded_weights,
            given,
            self.draft_vocabulary,
            state,
            each_node=False,
        )

    @override
    def commit(
        self, state: MedusaState, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> MedusaState:
        return MedusaState(
            latest_by_sequence(
                hidden_states.rows, hidden_states.hidden[LAST].to(self._like.dtype), state.hidden
            )
        )

    @override
    def truncate(self, state: MedusaState, lengths: Ints, rows: Ints | None = None) -> MedusaState:
        return MedusaState(state.hidden)  # the next prompt's last token is always read again

    @override
    def select(self, state: MedusaState, rows: Ints, cache: SlotCache) -> MedusaState:
        return MedusaState(state.hidden[np.maximum(rows, 0)])

    @override
    def readers(self, batch: Batch) -> Sequence[Callable[[Any], Tensor]]:
        states = batch.hidden[LAST].to(self._like.dtype)

        def read(head: nn.Module, at: Any) -> Tensor:
            logits: Tensor = head(states[at])
            return logits

        return [partial(read, head) for head in self.model]

    def weights(self, head: int) -> tuple[float, float]:
        """Return the weights of a head's losses against the text and against the target.

        The weights of section 2.2.1, eq. 1 are divided between the two losses.
        """
        weight, share = self.knobs.decay ** (head + 1), self.knobs.distil
        return weight * (1 - share), weight * share

    def to_published_layout(
        self, config: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors in the official layout, or in vLLM's if they were read from it.

        Heads that were read from a merged model are written without the model.
        """
        if VLLM_ONLY_TENSOR in self._stored.tensors:
            tensors = to_vllm(config, tensors, self._target.decoder.vocab)[1]
        else:
            counts = {"medusa_num_heads": len(self.model), "medusa_num_layers": self.knobs.layers}
            config = {"base_model_name_or_path": self._target.name} | config | counts
        there = (
            self._stored.tensors or tensors
        )  # a published file gets no tensors that it did not have
        return config, {k: v for k, v in tensors.items() if k in there}
