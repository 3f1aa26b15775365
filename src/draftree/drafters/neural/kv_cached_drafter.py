"""Base classes of drafters that are transformers with a KV cache of their own.

Shapes: F frontier nodes, M of them within the context, V′ draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from draftree.drafters.base import (
    Drafter,
    State,
    Trainable,
    TrainableMethod,
    replace_slots,
    slots_or_all,
)
from draftree.drafters.neural.decoding_state import (
    SPARE_SLOTS,
    Decoding,
    keep_path,
    rewind,
    select_sequences,
    truncate_unread,
)
from draftree.drafters.neural.frontier_layout import lay_out
from draftree.drafters.neural.kv_cached_drafter_on_device import DecoderLayers
from draftree.drafters.neural.low_rank_head import CandidateHead
from draftree.drafters.neural.one_layer_of_target import head_of, save_model
from draftree.drafters.neural.shared_vocabulary import Shared
from draftree.formats.checkpoint import Checkpoint
from draftree.models.causal_lm import CausalLM
from draftree.models.kv_cache import SlotCache
from draftree.models.model_runner import Outputs
from draftree.sampling.draft_sampling import Drawing, draw_candidates
from draftree.target.kernel_choice import choose_kernels
from draftree.target.target import HiddenStates, HiddenStateSpec, Target
from draftree.tree import AcceptResult, Bools, Candidates, DraftVocab, Ints, Tree, no_candidates
from draftree.utils.hardware import to_device


def candidates_within_context(
    logits: Tensor,
    known: Bools,
    k: int,
    drawing: Drawing,
    tree: Tree,
    frontier: Ints,
    drafted: DraftVocab | None,
) -> Candidates:
    """Return candidates after those nodes that are within a drafter's context, and none elsewhere.

    Args:
        logits: [M, V′] the logits after the M nodes that are within the context.
        known: [F] whether each frontier node is within the context; at least one is.
        k: the number of candidates of a node.
        drawing: how candidates are drawn.
        tree: the tree.
        frontier: [F] the nodes.
        drafted: the draft vocabulary of the logits.
    """
    rows, depths = tree.row[frontier], tree.depth[frontier]
    if known.all():
        return draw_candidates(logits, k, drawing, rows, depths, drafted)
    every = logits.new_zeros(len(frontier), logits.shape[1])
    every[torch.from_numpy(known).to(logits.device)] = logits
    found, there = draw_candidates(every, k, drawing, rows, depths, drafted), known[:, None]
    return replace(
        found, tokens=np.where(there, found.tokens, 0), log_q=np.where(there, found.log_q, -np.inf)
    )


class CachingDrafter(Drafter[Decoding]):
    """Drafts with a transformer that has its own KV cache.

    It drafts no tokens beyond the context length of the transformer.

    Attributes:
        decoder: the transformer.
    """

    decoder: CausalLM
    expands_paths = True

    @property
    def draft_vocabulary(self) -> DraftVocab | None:
        """Return the tokens that can be drafted; None, the default, for all."""
        return None

    @property
    def shared_vocabulary(self) -> Shared | None:
        """Return the tokens that the drafter's vocabulary shares with the target's.

        Return None if both have the same vocabulary, which is the default.
        """
        return None

    @torch.inference_mode()
    @override
    def expand(
        self, state: Decoding, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, Decoding]:
        state = self.flush(state)
        waiting = np.array([len(p) for p in state.pending])
        lengths = (state.cache.lengths + waiting)[tree.row[frontier]]
        known = lengths + tree.depth[frontier] < self.decoder.context  # each sequence by itself
        if not known.any():
            return no_candidates(len(frontier), k), state
        layout = lay_out(state, tree, frontier[known], self.decoder.device)
        feed = layout.feed
        if self.shared_vocabulary is not None:
            feed = replace(feed, tokens=self.shared_vocabulary.reads[feed.tokens])
        recorded = state.cache.ladder.few  # recorded passes compute the logits after all tokens
        asked = Outputs(tokens=None if recorded else layout.packed_places)
        logits = self.decoder.forward(feed, state.cache, asked).logits
        if recorded:
            logits = logits[to_device(layout.packed_places, logits.device)]
        if self.shared_vocabulary is not None:
            logits = logits[:, self.shared_vocabulary.columns]
        candidates = candidates_within_context(
            logits, known, k, drawing, tree, frontier, self.draft_vocabulary
        )
        return candidates, replace(state, fed=layout.fed)

    @torch.inference_mode()
    @override
    def layers(self, state: Decoding, roots: Tree, depth: Ints) -> DecoderLayers | None:
        if state.cache.states is not None or self.decoder.rope_boundary is not None:
            return None
        layers = DecoderLayers(
            self.decoder,
            self.shared_vocabulary,
            self.flush(state),
            roots,
            depth,
            self.draft_vocabulary,
        )
        return layers if layers.fit else None

    @override
    def truncate(self, state: Decoding, lengths: Ints, rows: Ints | None = None) -> Decoding:
        return replace(rewind(state, lengths, rows), unread=truncate_unread(state.unread, lengths))

    @override
    def select(self, state: Decoding, rows: Ints, cache: SlotCache) -> Decoding:
        return select_sequences(state, rows, cache)


class LanguageModelDrafter(CachingDrafter):
    """Drafts with a causal language model that reads only the text.

    Attributes:
        small: the language model. It is run as a `Target`, because it reads tokens in the same way.
    """

    small: Target

    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: Decoding | None = None,
        rows: Ints | None = None,
    ) -> Decoding:
        """Return the state after the uncached parts of the prompts that begin have been read."""
        state = state or Decoding.empty(
            self.small.new_cache(len(prompts), max(map(len, prompts)) + SPARE_SLOTS)
        )
        begun = slots_or_all(rows, len(prompts))
        mine = [prompts[row] for row in begun]
        fit = np.array([len(prompt) < self.decoder.context for prompt in mine])
        if not fit.all():  # no drafts are made for these sequences, see `expand`
            lengths = state.cache.lengths.tolist()
            rest = tuple(p[n:] for p, n in zip(prompts, lengths, strict=True))
            state = replace(state, pending=replace_slots(state.pending, begun[~fit], rest))
            begun, mine = begun[fit], [prompts[row] for row in begun[fit]]
        if any(len(p) > n for p, n in zip(mine, state.cache.lengths[begun].tolist(), strict=True)):
            if self.shared_vocabulary is not None:
                reads = self.shared_vocabulary.reads.cpu().numpy()
                mine = [reads[prompt] for prompt in mine]
            self.small.prefill(state.cache, mine, HiddenStateSpec(), begun)
        return state

    @override
    def commit(
        self, state: Decoding, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> Decoding:
        return keep_path(state, tree, verdict)


class BorrowingDrafter(Trainable[State]):
    """A drafter that is a Hugging Face model.

    The model has its own embedding and head, or uses those of the target.

    Attributes:
        decoder: the model.
    """

    model: PreTrainedModel

    def __init__(
        self, knobs: TrainableMethod, model: PreTrainedModel, target: Target, stored: Checkpoint
    ) -> None:
        super().__init__(knobs, model, target, stored)
        self.decoder, self._head = (
            CausalLM(model, capture=target.decoder.capture.of(model)),
            head_of(model),
        )

    @override
    def use_kernels(self, target: Target) -> None:
        choose_kernels(
            self.decoder, replace(target.loading, compile=bool(target.decoder.native_kinds))
        )

    @property
    def draft_vocabulary(self) -> DraftVocab | None:
        """Return the tokens that can be drafted; None for all."""
        return None if self._head is None else self._head.draft_vocabulary

    def find_candidates(self, rank: int, count: int) -> None:
        """Replace the head by a `CandidateHead` for all tokens.

        Raises:
            UserError: the rank is larger than the width of the head, or the head's rows cannot be
                read.
        """
        head: Any = self.model.get_output_embeddings()
        bias = getattr(
            self._target.decoder.hf.model.get_output_embeddings() if self._head else head,
            "bias",
            None,
        )
        self.model.set_output_embeddings(
            CandidateHead(head.weight, rank, count, self.knobs.kind(), bias)
        )
        self._head = None

    @override
    def fit_vocabulary(self, counts: Ints) -> None:
        if self._head is not None:
            self._head.fit_vocabulary(counts)


class OneLayerDrafter(BorrowingDrafter[Decoding], CachingDrafter):
    """A drafter that is a model of one layer of the target's architecture."""

    @override
    def write(self, folder: Path, about: dict[str, Any]) -> None:
        save_model(folder, self.model, self._stored, about)
