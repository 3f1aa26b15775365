"""Base class of drafters that are transformers with a KV cache of their own.

Shapes: R slots, n tokens a slot, V vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging
from typing_extensions import override

from draftree.drafters.base import (
    Drafter,
    State,
    Trainable,
    TrainableMethod,
    replace_slots,
    slots_or_all,
)
from draftree.drafters.neural.candidate_head import CandidateHead
from draftree.drafters.neural.decoding_state import (
    SPARE_SLOTS,
    Decoding,
    keep_path,
    lay_out,
    no_candidates,
    rewind,
    select_sequences,
    truncate_unread,
)
from draftree.drafters.neural.draft_vocabulary import check_size
from draftree.drafters.neural.kv_cached_drafter_on_device import DecoderLayers
from draftree.drafters.neural.shared_vocabulary import Shared
from draftree.drafters.neural.target_embedding import TargetEmbedding, TargetHead
from draftree.errors import UserError
from draftree.formats.checkpoint import CONFIG, WEIGHTS, Checkpoint, sizes
from draftree.models.causal_lm import CausalLM
from draftree.models.kv_cache import SlotCache
from draftree.models.model_runner import Outputs
from draftree.sampling.draft_sampling import Drawing, draw_candidates
from draftree.target.kernel_choice import choose_kernels
from draftree.target.model_construction import load_pretrained, one_layer
from draftree.target.target import HiddenStates, HiddenStateSpec, Target
from draftree.tree import AcceptResult, Bools, Candidates, DraftVocab, Ints, Tree
from draftree.utils.files import as_user_error, fill_folder
from draftree.utils.hardware import to_device


def copy_one_layer(target: Target) -> PreTrainedModel:
    """Return a float32 model for training.

    It is one new layer of the target's architecture between copies of the target's embedding and LM
    head, as in the paper (EDD + PCT, section 3.1). The copies are tied if the target's are.
    """
    _ = target.decoder.head_weight  # raises an error if the head is quantised
    model, whole = one_layer(target.decoder.config), target.decoder.model
    for ours, theirs in (
        (model.get_input_embeddings(), whole.get_input_embeddings()),
        (model.get_output_embeddings(), whole.get_output_embeddings()),
    ):
        ours.load_state_dict({k: v.float() for k, v in theirs.state_dict().items()})
    return model


def make_borrowing_model(
    config: PreTrainedConfig, target: Target, draft_vocab: int
) -> PreTrainedModel:
    """Return a float32 model of one new layer between the target's own embedding and LM head.

    The embedding and the head are neither trained nor stored.

    Args:
        config: the config of the layer.
        target: the target.
        draft_vocab: V′, the number of tokens of the head; 0 for all.
    """
    model: Any = one_layer(config)
    norm = next(p for p in model.parameters() if p.dim() == 1)
    model.set_input_embeddings(TargetEmbedding(target, lambda: norm))
    model.set_output_embeddings(TargetHead(target, draft_vocab, raw=True))
    borrowed: PreTrainedModel = model
    return borrowed


def copy_target_layer(model: PreTrainedModel, target: Target, layer: int) -> None:
    """Copy one of the target's layers and its final norm into a one-layer model.

    Each is copied only if the shapes are equal. The norm is needed because the LM head expects its
    output. The layer is useful because hidden states have a few very large entries, which the
    layers of the target have learnt to scale down.
    """
    ours, theirs = CausalLM(model), target.decoder
    norms = [[m for m in d.stack.children() if "Norm" in type(m).__name__] for d in (ours, theirs)]
    for mine, its in ((ours.layers[0], theirs.layers[layer]), *zip(*norms, strict=True)):
        values = {name: value.float() for name, value in its.state_dict().items()}
        if {n: v.shape for n, v in mine.state_dict().items()} == {
            n: v.shape for n, v in values.items()
        }:
            mine.load_state_dict(values)


def head_of(model: PreTrainedModel) -> TargetHead | None:
    """Return the target's head if a model uses it; otherwise None."""
    head: Any = model.get_output_embeddings()
    return head if isinstance(head, TargetHead) else None


def new_model(method: str, target: Target, shared: bool, draft_vocab: int) -> PreTrainedModel:
    """Return a float32 model of one layer for training.

    Args:
        method: name of the method, for error messages.
        target: the target, whose architecture is used.
        shared: whether to use the target's embedding and LM head. Otherwise the model has copies,
            which are trained.
        draft_vocab: V′, the number of tokens that can be drafted; 0 for all.

    Raises:
        UserError: a draft vocabulary is requested without `shared`, or it is larger than the
            target's vocabulary.
    """
    if shared:
        check_size(method, draft_vocab, target)
        return make_borrowing_model(target.decoder.config, target, draft_vocab)
    if draft_vocab:
        told = "a head of its own is whole, shared=true borrows the target's"
        raise UserError(
            f"{method}: draft_vocab is {draft_vocab}, allowed with shared=false is 0: {told}"
        )
    return copy_one_layer(target)


def check_attends(method: str, decoder: CausalLM) -> None:
    """Check that the layer of a one-layer model has attention, and no recurrent state.

    Methods that add keys and values before the text need attention.

    Raises:
        UserError: the layer has no attention; the message names the architecture.
    """
    if not decoder.attention_layers:
        name, told = (
            type(decoder.model).__name__,
            "no layer of its kind has attention and keeps no state",
        )
        raise UserError(
            f"{method}: {name} is not supported: {told}; medusa, hydra, eagle and eagle3 draft for any target"
        )


def has_own(stored: Checkpoint) -> bool:
    """Return whether a checkpoint contains its own embedding and head.

    Checkpoints from before the option `shared` lack the entry; they contain both.
    """
    return not stored.about.get("shared", False)


def load_model(
    stored: Checkpoint, method: str, target: Target, draft_vocab: int = 0
) -> PreTrainedModel:
    """Return the one-layer Hugging Face model of a checkpoint.

    The model is complete, fits the target, and has the target's dtype.

    Args:
        stored: the checkpoint.
        method: name of the method, for error messages.
        target: the target; its embedding and head are used if the checkpoint has none.
        draft_vocab: V′, the number of tokens that can be drafted, as stored in the checkpoint.

    Raises:
        UserError: the file of weights or some tensors are missing, there are unexpected tensors, or
            vocabulary or hidden size do not fit.
    """
    folder = stored.folder
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"'{folder}' has no weights: a file {WEIGHTS} was expected")
    stored.check_sizes(method, stored.config, sizes(target))
    if not has_own(stored):
        with as_user_error(f"cannot load drafter '{folder}'"):
            config = AutoConfig.from_pretrained(folder)
            return stored.load_tensors().network(
                lambda: make_borrowing_model(config, target, draft_vocab)
            )
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the checks below replace the warnings of transformers
    try:
        with as_user_error(f"cannot load drafter '{folder}'"):
            model, info = load_pretrained(
                str(folder), AutoConfig.from_pretrained(folder), target.decoder.dtype
            )
    finally:
        logging.set_verbosity(level)
    for kind in ("missing_keys", "unexpected_keys"):
        if names := sorted(map(str, info[kind])):
            raise UserError(
                f"'{folder}' does not hold exactly a '{method}': {kind.replace('_', ' ')}: {', '.join(names[:4])}"
            )
    loaded: PreTrainedModel = model
    return loaded


def save_model(
    folder: Path, model: PreTrainedModel, stored: Checkpoint, about: dict[str, Any]
) -> None:
    """Write a one-layer model in float16, and its config with further entries.

    Modules that belong to the target are left out.

    Args:
        folder: the folder, which is created.
        model: the model, with its own embedding and head or with those of the target.
        stored: the checkpoint from which it was read.
        about: the further entries.
    """
    if head_of(model) is not None:
        config = json.loads(model.config.to_json_string(use_diff=True)) | {"dtype": "float16"}
        stored.write(folder, config | about, model.state_dict())
        return
    halves: dict[int, Tensor] = {}  # tied tensors are converted and written once
    state = model.state_dict()
    for value in state.values():
        halves.setdefault(value.data_ptr(), value.detach().to("cpu", torch.float16))
    with fill_folder(folder, last=CONFIG) as beside:
        model.save_pretrained(
            beside, state_dict={k: halves[v.data_ptr()] for k, v in state.items()}
        )
        config = Checkpoint.at(beside).config | {"dtype": "float16"} | about
        (beside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


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
