"""Base class of block drafters: one pass drafts all tokens of a step.

Shapes: R slots, n slots of a block, A anchors, B batch, T tokens, F frontier nodes, M nodes or
blocks, D hidden size, V′ (draft) vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar, final

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from typing_extensions import override

from draftree.drafters.base import Batch, Trainable, TrainableMethod
from draftree.drafters.neural.block_model import Init, ParallelNet, select_fused_layers
from draftree.drafters.neural.block_slots import make_slot_group
from draftree.drafters.neural.decoding_state import SPARE_SLOTS, move_unread, truncate_unread
from draftree.drafters.neural.draft_configs import COPIED_ENTRIES, make_one_layer_config
from draftree.drafters.neural.draft_masks import block_starts
from draftree.drafters.neural.draft_vocabulary import check_map, check_size, expand_logits
from draftree.drafters.neural.head_drafter import group_by_depth, make_candidates
from draftree.drafters.neural.target_modules import TargetHead
from draftree.errors import UserError
from draftree.formats.block_drafters import (
    VOCABULARY_OFFSETS,
    BlockDrafterConfig,
    DrafterKind,
    Sight,
    load_checkpoint,
    make_config,
)
from draftree.formats.checkpoint import Checkpoint
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, HiddenStateSpec, Target
from draftree.tree import AcceptResult, Candidates, Floats, Ints, Tree
from draftree.utils.validated_dataclass import knob

Net = TypeVar("Net", bound="ParallelNet")


@dataclass(frozen=True)
class ParallelMethod(TrainableMethod):
    """The options that block drafters share.

    Attributes:
        layers: number of layers of the draft network (5 in the papers, 8 for a target of 30B).
        block: number of slots of a pass, including the root's slot.
        features: number of target layers that are read, spread evenly; the last layer is not among
            them.
        mask: the mask token in the slots to fill; by default the token that is rarest in the
            training data.
        gamma: γ of the weights exp(−k/γ) of slots k = 0, 1, … in the loss; with 0 all weights are
            equal.
        anchors: largest number of roots drawn in each training text (512 in the papers).
        draft_vocab: V′, the number of tokens that can be drafted; 0 for all.
        init: the initial weights. `target` means copies of the target's layers, from the highest
            layer that is read, if their shapes are equal. Otherwise, and with `scratch` (as in the
            official codes), weights are random.
    """

    formats: ClassVar[tuple[str, ...]] = ("speculators",)

    layers: int = knob(1, least=1)
    block: int = knob(8, least=2)
    features: int = knob(5, least=1)
    mask: int | None = knob(None, least=0)
    gamma: float = knob(4.0, least=0)
    anchors: int = knob(64, least=1)
    draft_vocab: int = knob(0, least=0)
    init: Init = "target"

    def layout(self, target: Target, causal: bool, shifted: bool) -> BlockDrafterConfig:
        """Return the layout of a new drafter.

        Raises:
            UserError: the mask token is not in the target's vocabulary, or the target's vocabulary
                is smaller than the draft vocabulary.
        """
        vocab = target.decoder.vocab
        check_size(self.kind(), self.draft_vocab, target)
        if self.mask is not None and self.mask >= vocab:
            raise UserError(f"{self.kind()}: mask is {self.mask}, allowed are 0 … {vocab - 1}")
        llama = make_one_layer_config(target.decoder.config)
        rope: Any = llama.rope_parameters
        values = {name: getattr(llama, name) for name in COPIED_ENTRIES} | {
            "vocab_size": vocab,
            "hidden_size": target.decoder.hidden_size,
            "model_type": "qwen3",
            "num_hidden_layers": self.layers,
            "layer_types": ["full_attention"] * self.layers,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": dict(rope),
            "rope_theta": rope["rope_theta"],
            "num_target_layers": int(target.decoder.config.num_hidden_layers),
        }
        reads = select_fused_layers(target, self.features)
        mask = vocab - 1 if self.mask is None else self.mask
        return BlockDrafterConfig(
            values,
            self.block,
            mask,
            reads,
            shifted,
            (Sight(causal),) * self.layers,
            self.draft_vocab,
        )

    def with_layout(self, layout: BlockDrafterConfig) -> Self:
        """Return these options, with the values that a checkpoint fixes."""
        return replace(
            self,
            layers=len(layout.sights),
            block=layout.block,
            features=len(layout.reads),
            mask=layout.mask,
            draft_vocab=layout.draft_vocab,
        )


def open_checkpoint(
    stored: Checkpoint,
    target: Target,
    method: str,
    make: Callable[[BlockDrafterConfig, Target, dict[str, Tensor]], Net],
) -> tuple[Checkpoint, BlockDrafterConfig, Net]:
    """Return a checkpoint with its tensors, its layout, and the network that contains the tensors.

    Raises:
        UserError: the checkpoint is broken, or does not fit the target.
    """
    stored, layout = load_checkpoint(stored)
    _check_target_fit(layout, target, stored, method)
    net = stored.network(lambda: make(layout, target, stored.tensors))
    check_map(stored.tensors.get(VOCABULARY_OFFSETS), target, stored.folder)
    return stored, layout, net


def _check_target_fit(
    layout: BlockDrafterConfig, target: Target, stored: Checkpoint, method: str
) -> None:
    """Check that a published layout fits the target.

    Raises:
        UserError: the sizes, the mask token or the layers to read do not fit, or a block has no
            slot to draft. The last layer's output cannot be read, because `hidden_states` contains
            it only after the final norm.
    """
    vocab, last = target.decoder.vocab, int(target.decoder.config.num_hidden_layers) - 1
    stored.check_sizes(
        method, layout.values, {"vocab_size": vocab, "hidden_size": target.decoder.hidden_size}
    )
    if layout.mask >= vocab:
        raise UserError(
            f"'{stored.folder}' has mask_token_id {layout.mask}, allowed are 0 … {vocab - 1}"
        )
    if not layout.reads or min(layout.reads) < 0 or max(layout.reads) > last:
        told = (
            f"reads entries {list(layout.reads)} of hidden_states, allowed are some of 0 … {last}"
        )
        raise UserError(f"'{stored.folder}' {told}")
    if not layout.drafts:
        raise UserError(
            f"'{stored.folder}' has block_size 1, which drafts nothing: allowed is at least 2"
        )


@dataclass(frozen=True)
class BlockState:
    """The state of a block drafter.

    Attributes:
        cache: keys and values of the committed tokens, token t in slot t.
        outputs: [R, n, D] the final norm's output in the slots of this step's blocks; None before
            they are computed.
        unread: the target's hidden states of committed tokens whose keys and values are not cached
            yet.
    """

    cache: SlotCache
    outputs: Tensor | None = None
    unread: tuple[HiddenStates, ...] = ()


class ParallelDrafter(Trainable[BlockState]):
    """Drafts all depths of a step in one pass over a block."""

    knobs: ParallelMethod
    model: ParallelNet
    kind: ClassVar[DrafterKind]
    by_path: ClassVar[bool]
    """Whether candidates after a node depend on the tokens of its path, or only on its depth."""
    expands_paths = True

    @property
    @override
    def needs(self) -> HiddenStateSpec:
        return HiddenStateSpec(hidden=self.model.layout.reads)

    @property
    def needs_pass_per_layer(self) -> bool:
        """Return whether every layer of the tree needs a pass, in which nodes see their paths.

        By default one pass over masks serves all nodes.
        """
        return False

    @property
    def drafts(self) -> int:
        """Return the largest depth that can be drafted."""
        return self.model.layout.drafts

    @property
    @override
    def ahead(self) -> int:  # type: ignore[override]
        return 1 if self.needs_pass_per_layer else self.drafts

    @final
    @torch.inference_mode()
    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: BlockState | None = None,
        rows: Ints | None = None,
    ) -> BlockState:
        if state is None:
            cache = SlotCache(
                (self.model.shape,) * len(self.model.layers),
                len(prompts),
                self._like.dtype,
                self._like.device,
            )
            cache.reserve(max(map(len, prompts)) + SPARE_SLOTS)
            state = BlockState(cache)
        return replace(state, unread=(*state.unread, hidden_states))

    @final
    @override
    def commit(
        self, state: BlockState, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> BlockState:
        return BlockState(state.cache, unread=(*state.unread, hidden_states))

    @final
    @torch.inference_mode()
    @override
    def flush(self, state: BlockState) -> BlockState:
        return self._read(state, HiddenStates.concatenate(state.unread)) if state.unread else state

    def _read(self, state: BlockState, hidden_states: HiddenStates) -> BlockState:
        """Cache the keys and values of newly committed tokens.

        The outputs of the last block are dropped.
        """
        hidden = {layer: h.to(self._like.dtype)[None] for layer, h in hidden_states.hidden.items()}
        positions = torch.from_numpy(hidden_states.positions).to(self._like.device)
        for layer, (keys, values) in enumerate(self.model.context(hidden, positions[None])):
            state.cache.insert(
                layer, hidden_states.rows, hidden_states.positions, keys[0], values[0]
            )
        return BlockState(state.cache)

    @final
    @override
    def truncate(self, state: BlockState, lengths: Ints, rows: Ints | None = None) -> BlockState:
        state.cache.truncate(lengths)
        return BlockState(state.cache, unread=truncate_unread(state.unread, lengths))

    @final
    @override
    def select(self, state: BlockState, rows: Ints, cache: SlotCache) -> BlockState:
        return BlockState(
            state.cache.copy_sequences(rows, SPARE_SLOTS),
            unread=move_unread(state.unread, rows, cache),
        )

    @final
    @override
    def passes(self, state: BlockState, tree: Tree, frontier: Ints) -> int:
        reached = int((tree.depth[frontier] < self.drafts).sum())
        if self.needs_pass_per_layer:
            return reached
        return tree.roots if state.outputs is None and reached else 0

    @final
    @torch.inference_mode()
    def expand(
        self, state: BlockState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, BlockState]:
        """Return the candidates of each node, from the output of the block at the node's depth.

        Nodes whose depth is `drafts` or larger get no candidates; their q is set to uniform.
        """
        state = self.flush(state)
        if self.needs_pass_per_layer:
            return self._along_paths(state, tree, frontier, k, drawing), state
        if self.passes(state, tree, frontier):
            state = replace(state, outputs=self._block(state.cache, tree))
        shared = not self.by_path and not drawing.by_node
        nodes, which = group_by_depth(tree, frontier) if shared else (frontier, None)
        outputs = (
            state.outputs
            if state.outputs is not None
            else self._like.new_zeros(
                state.cache.rows, self.model.layout.block, self.model.config.hidden_size
            )
        )
        found = self._candidates_after(self.after(outputs, tree, nodes), tree, nodes, k, drawing)
        found = replace(found, confidence=self.confidence(outputs, tree, nodes))
        return found if which is None else found.share_lists(which), state

    def _along_paths(
        self, state: BlockState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> Candidates:
        """Return the candidates after each node of the frontier, each predicted from its own path.

        One pass reads the paths to these nodes, and a mask token after each node. The mask token
        attends to its node's path and to the committed tokens. Nodes whose depth is `drafts` or
        larger have no candidates.
        """
        logits = self._like.new_zeros(len(frontier), self._width)
        near = np.flatnonzero(tree.depth[frontier] < self.drafts)
        if len(near):
            read = self.model.head(
                compute_mask_outputs(self.model, state.cache, tree, frontier[near])
            )
            logits[torch.from_numpy(near).to(logits.device)] = read
        return self._candidates_after(logits, tree, frontier, k, drawing)

    def _candidates_after(
        self, logits: Tensor, tree: Tree, nodes: Ints, k: int, drawing: Drawing
    ) -> Candidates:
        """Return the candidates that follow from logits [M, V′] after nodes.

        Nodes whose depth is `drafts` or larger get no candidates; their q is set to uniform.
        """
        depths = tree.depth[nodes]
        logits = logits.masked_fill(
            torch.from_numpy(depths >= self.drafts).to(logits.device)[:, None], 0.0
        )
        return make_candidates(
            logits, self.drafts, k, drawing, tree.row[nodes], depths, self.model.draft_vocabulary
        )

    @property
    def _width(self) -> int:
        """Return V′, or V if all tokens can be drafted."""
        drafted = self.model.draft_vocabulary
        return self._target.decoder.vocab if drafted is None else len(drafted.ids)

    def _block(self, cache: SlotCache, tree: Tree) -> Tensor:
        """Return the outputs [R, n, D] of a pass over each sequence's root, followed by masks.

        The root follows the committed tokens.
        """
        layout, device = self.model.layout, self._like.device
        tokens = np.full((cache.rows, layout.block), layout.mask)
        tokens[tree.row[: tree.roots], 0] = tree.tokens[: tree.roots]
        starts = cache.lengths.copy()
        writer = cache.writer(starts, layout.block)
        positions = torch.from_numpy(starts[:, None] + np.arange(layout.block)).to(device)
        keys = torch.arange(int(starts.max()) + layout.block, device=device).expand(cache.rows, -1)
        there = (keys <= positions[:, -1:])[:, None].expand(-1, layout.block, -1)
        out: Tensor = self.model(
            torch.from_numpy(tokens).to(device), positions, keys, there, writer
        )
        return out

    def slots(self, outputs: Tensor, tree: Tree, nodes: Ints) -> Tensor:
        """Select from outputs [R, n, D] the output of the slot for each node's depth, [M, D]."""
        first = 0 if self.model.layout.shifted else 1
        at = np.minimum(tree.depth[nodes], self.drafts - 1) + first
        return outputs[
            torch.from_numpy(tree.row[nodes]).to(outputs.device),
            torch.from_numpy(at).to(outputs.device),
        ]

    def marginals(self, outputs: Tensor, tree: Tree, nodes: Ints) -> Tensor:
        """Return the logits [M, V′] of the slot for each node's depth, without regard to the path.

        The head is computed once for nodes of the same depth and sequence.
        """
        some, which = group_by_depth(tree, nodes)
        logits = self.model.head(self.slots(outputs, tree, some))
        return logits[torch.from_numpy(which).to(logits.device)]

    @abstractmethod
    def after(self, outputs: Tensor, tree: Tree, nodes: Ints) -> Tensor:
        """Return draft logits [M, V′] after nodes, given the outputs [R, n, D] of the blocks."""

    def confidence(self, outputs: Tensor, tree: Tree, nodes: Ints) -> Floats | None:
        """Return the estimated probability [M] that a child of each node is accepted.

        Return None if no head estimates it.
        """
        return None

    @abstractmethod
    def training_logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return draft logits [M, drafts, V′] along given texts.

        Args:
            states: [M, drafts, D] the outputs of the slots.
            tokens: [M, drafts] the token before each slot.
        """

    def fit_vocabulary(self, counts: Ints) -> None:
        """Choose the draft vocabulary and the mask token.

        The mask is the token with the fewest occurrences as a label; of several, the last one.
        """
        if isinstance(self.model.lm_head, TargetHead):
            self.model.lm_head.fit_vocabulary(counts)
        if not self._stored.tensors and self.knobs.mask is None:
            rarest = int(np.flatnonzero(counts == counts.min())[-1])
            self.model.layout = replace(self.model.layout, mask=rarest)

    @property
    @override
    def resolved_knobs(self) -> ParallelMethod:
        return replace(
            self.knobs, mask=self.model.layout.mask, features=len(self.model.layout.reads)
        )

    @final
    def to_published_layout(
        self, config: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors; a new config has the choices made when training began."""
        return config if self._stored.tensors else make_config(
            self.model.layout, self.kind
        ), tensors

    @final
    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        """Return the draft logits [B, T, V] after each token; see `Trainable.forward`.

        The logits of all tokens that can be drafted are 0 in two places: in the block that begins
        at the start of a text, and after the first `drafts` tokens of any other block. Tokens
        outside the draft vocabulary always have −∞.
        """
        count, drafts = batch.tokens.shape[1], min(block, self.drafts)
        starts = block_starts(count, block, phase)
        anchors = starts[starts > 0].unique()
        logits = self._like.new_zeros(*batch.tokens.shape, self._width)
        if len(anchors):
            told = self.blocks(batch, anchors.to(batch.tokens.device).expand(len(batch.tokens), -1))
            for d in range(drafts):
                inside = anchors[
                    (anchors + d < count) & (starts[(anchors + d).clamp(max=count - 1)] == anchors)
                ]
                chosen = told[:, torch.isin(anchors, inside).to(told.device), d]
                logits[:, inside + d] = chosen.to(logits.dtype)
        return expand_logits(logits, self.model.draft_vocabulary)

    @final
    def blocks(self, batch: Batch, anchors: Tensor) -> Tensor:
        """Return the draft logits [B, A, drafts, V′] of blocks that begin at anchors [B, A].

        They equal those that decoding would compute with the anchors as roots.
        """
        logits: Tensor = self.training_logits(*self.along(batch, anchors)).unflatten(
            0, anchors.shape
        )
        return logits

    @final
    def along(self, batch: Batch, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [M, drafts, D] of the drafting slots, and the token before each slot.

        The blocks begin at anchors [B, A], so that M = B · A.
        """
        model, layout, (rows, count) = self.model, self.model.layout, batch.tokens.shape
        device = batch.tokens.device
        at = torch.arange(count, device=device)
        cache = DynamicCache()
        hidden = {layer: h.to(self._like.dtype) for layer, h in batch.hidden.items()}
        for layer, (keys, values) in enumerate(model.context(hidden, at.expand(rows, -1))):
            cache.update(keys, values, layer)
        sorts = make_slot_group(layout, self.needs_pass_per_layer).to(device)
        size = len(sorts.offsets)
        place = (anchors[:, :, None] + sorts.offsets).flatten(1)
        given = sorts.given.repeat(anchors.shape[1])
        tokens = torch.where(given, batch.tokens.gather(1, place.clamp(max=count - 1)), layout.mask)
        each = torch.eye(anchors.shape[1], dtype=torch.bool, device=device)
        known = (
            at < anchors.repeat_interleave(size, dim=1)[:, :, None]
        )  # the target has not computed the anchor's hidden state yet
        there = torch.cat((known, torch.kron(each, sorts.sees).expand(rows, -1, -1)), dim=2)
        out = model(tokens, place, torch.cat((at.expand(rows, -1), place), dim=1), there, cache)
        states = out.unflatten(1, (-1, size))[:, :, size - layout.drafts :].flatten(0, 1)
        path = (anchors[:, :, None] + torch.arange(layout.drafts, device=device)).clamp(
            max=count - 1
        )
        said = batch.tokens.gather(1, path.flatten(1)).view(-1, layout.drafts)
        return states, said


def compute_mask_outputs(net: ParallelNet, cache: SlotCache, tree: Tree, nodes: Ints) -> Tensor:
    """Return the outputs [F, D] of masks that follow nodes [F].

    A mask sees the tokens of its path and the committed tokens. Slots see only the slots before
    them, so later masks do not change their outputs. One pass therefore reads a whole tree: its
    tokens once, and a mask after each expanded node.

    Args:
        net: the network. Its slots must see only earlier slots, and each must predict the token at
            its own place.
        cache: the cache of the committed tokens; this pass adds no entries to it.
        tree: the tree of the nodes.
        nodes: [F] the nodes.
    """
    device, paths = cache.device, tree.ancestors[nodes]
    read = np.flatnonzero(paths.any(0))
    rows = np.concatenate((tree.row[read], tree.row[nodes]))
    slots = np.zeros(len(rows), np.int64)
    for row in np.unique(rows):
        slots[rows == row] = np.arange((rows == row).sum())
    n, starts = int(slots.max()) + 1, cache.lengths.copy()
    tokens = np.full((cache.rows, n), net.layout.mask)
    tokens[rows[: len(read)], slots[: len(read)]] = tree.tokens[read]
    places = np.repeat(starts[:, None], n, axis=1)
    places[rows, slots] += np.concatenate((tree.depth[read], tree.depth[nodes] + 1))
    sees = np.zeros((cache.rows, n, n), np.bool_)
    sees[:, np.arange(n), np.arange(n)] = True
    i, j = np.nonzero(np.concatenate((tree.ancestors[np.ix_(read, read)], paths[:, read])))
    sees[rows[i], slots[i], slots[j]] = True
    writer = cache.writer(starts, n)
    size = int(starts.max()) + n
    keys = np.tile(np.arange(size), (cache.rows, 1))
    there = np.repeat((keys < starts[:, None])[:, None], n, axis=1)
    for row, start in enumerate(starts.tolist()):
        keys[row, start : start + n] = places[row]
        there[row, :, start : start + n] = sees[row]
    out: Tensor = net(
        *(torch.from_numpy(each).to(device) for each in (tokens, places, keys, there)), writer
    )
    at = len(read)
    return out[torch.from_numpy(rows[at:]).to(device), torch.from_numpy(slots[at:]).to(device)]
