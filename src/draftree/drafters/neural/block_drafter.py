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
from draftree.drafters.neural.block_model import Init, ParallelNet, spread
from draftree.drafters.neural.block_slots import behind, grouped
from draftree.drafters.neural.draft_state import SPARE, left, moved
from draftree.drafters.neural.draft_vocabulary import TargetHead, check_map, check_size, whole
from draftree.drafters.neural.heads import by_depth, offered
from draftree.drafters.neural.llama_modules import SIZES, like
from draftree.drafters.neural.training_masks import block_starts
from draftree.errors import UserError
from draftree.formats.block_drafters import MAP, Kind, Layout, Sight, loaded, written
from draftree.formats.checkpoint import Checkpoint
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Needs, Taps, Target
from draftree.tree import Candidates, Floats, Ints, Tree, Verdict
from draftree.utils.validated_dataclass import knob

Net = TypeVar("Net", bound="ParallelNet")


@dataclass(frozen=True)
class ParallelMethod(TrainableMethod):
    """The options that block drafters share.

    Attributes:
        layers: of the drafter (5 in the papers, 8 for a target of 30B).
        block: slots of a pass, the root's among them.
        features: how many of the target's layers are read, evenly spread; the last is none of them.
        mask: the token in the slots that are to be filled; by default that which training never
            meets, or most seldom.
        gamma: γ of the slots' weights exp(−k/γ), k = 0, 1, …; 0 weighs all alike.
        anchors: roots drawn in each text at most (512 in the papers).
        draft_vocab: V′, how many tokens can be drafted; 0 for all of them.
        init: what it begins with: `target`, the target's own layers from the highest that is read,
            where these are of the same shapes; else, and with `scratch`, the official codes' way,
            random weights.
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

    def layout(self, target: Target, causal: bool, shifted: bool) -> Layout:
        """Return that of a new drafter.

        Raises:
            UserError: the target's vocabulary does not hold the mask, or is smaller than the draft
                vocabulary.
        """
        vocab = target.decoder.vocab
        check_size(self.kind(), self.draft_vocab, target)
        if self.mask is not None and self.mask >= vocab:
            raise UserError(f"{self.kind()}: mask is {self.mask}, allowed are 0 … {vocab - 1}")
        llama = like(target.decoder.config)
        rope: Any = llama.rope_parameters
        values = {name: getattr(llama, name) for name in SIZES} | {
            "vocab_size": vocab,
            "hidden_size": target.decoder.hidden,
            "model_type": "qwen3",
            "num_hidden_layers": self.layers,
            "layer_types": ["full_attention"] * self.layers,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": dict(rope),
            "rope_theta": rope["rope_theta"],
            "num_target_layers": int(target.decoder.config.num_hidden_layers),
        }
        reads = spread(target, self.features)
        mask = vocab - 1 if self.mask is None else self.mask
        return Layout(
            values,
            self.block,
            mask,
            reads,
            shifted,
            (Sight(causal),) * self.layers,
            self.draft_vocab,
        )

    def known(self, layout: Layout) -> Self:
        """Return these options, with those that a checkpoint fixes."""
        return replace(
            self,
            layers=len(layout.sights),
            block=layout.block,
            features=len(layout.reads),
            mask=layout.mask,
            draft_vocab=layout.draft_vocab,
        )


def opened(
    stored: Checkpoint,
    target: Target,
    method: str,
    make: Callable[[Layout, Target, dict[str, Tensor]], Net],
) -> tuple[Checkpoint, Layout, Net]:
    """Return a checkpoint with its tensors, its layout, and the network filled with them.

    Raises:
        UserError: it is broken, or does not fit the target.
    """
    stored, layout = loaded(stored)
    _check(layout, target, stored, method)
    net = stored.network(lambda: make(layout, target, stored.tensors))
    check_map(stored.tensors.get(MAP), target, stored.folder)
    return stored, layout, net


def _check(layout: Layout, target: Target, stored: Checkpoint, method: str) -> None:
    """Refuse a published layout that the target does not fit.

    Raises:
        UserError: of its sizes, its mask token or the layers that it reads; the last layer's output
            is none of them, as `hidden_states` holds it after the last norm.
    """
    vocab, last = target.decoder.vocab, int(target.decoder.config.num_hidden_layers) - 1
    stored.check_sizes(
        method, layout.values, {"vocab_size": vocab, "hidden_size": target.decoder.hidden}
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
class Blocks:
    """The state of a drafter of blocks.

    Attributes:
        cache: keys and values of the committed tokens, token t in slot t.
        outputs: [R, n, D] the last norm's output in the slots of this step's blocks; none before
            they are asked for.
        unread: what the target made of committed tokens, whose keys and values are not cached yet.
    """

    cache: SlotCache
    outputs: Tensor | None = None
    unread: tuple[Taps, ...] = ()


class ParallelDrafter(Trainable[Blocks]):
    """Drafts all depths of a step in one pass."""

    knobs: ParallelMethod
    model: ParallelNet
    kind: ClassVar[Kind]
    by_path: ClassVar[bool]
    """Whether what comes after a node depends on the tokens of its path, and not on its depth
    alone."""
    expands_paths = True

    @property
    @override
    def needs(self) -> Needs:
        return Needs(hidden=self.model.layout.reads)

    @property
    def conditioned(self) -> bool:
        """Return whether every node is read along its path, in a pass of its layer.

        By default one pass over masks serves all nodes.
        """
        return False

    @property
    def drafts(self) -> int:
        """Return the deepest layer that can be drafted."""
        return self.model.layout.drafts

    @property
    @override
    def ahead(self) -> int:  # type: ignore[override]
        return 1 if self.conditioned else self.drafts

    @final
    @torch.inference_mode()
    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        taps: Taps,
        state: Blocks | None = None,
        rows: Ints | None = None,
    ) -> Blocks:
        if state is None:
            cache = SlotCache(
                (self.model.shape,) * len(self.model.layers),
                len(prompts),
                self._like.dtype,
                self._like.device,
            )
            cache.reserve(max(map(len, prompts)) + SPARE)
            state = Blocks(cache)
        return replace(state, unread=(*state.unread, taps))

    @final
    @override
    def commit(self, state: Blocks, tree: Tree, verdict: Verdict, taps: Taps) -> Blocks:
        return Blocks(state.cache, unread=(*state.unread, taps))

    @final
    @torch.inference_mode()
    @override
    def caught_up(self, state: Blocks) -> Blocks:
        return self._read(state, Taps.joined(state.unread)) if state.unread else state

    def _read(self, state: Blocks, taps: Taps) -> Blocks:
        """Keep newly committed tokens; of the last block nothing stays."""
        hidden = {layer: h.to(self._like.dtype)[None] for layer, h in taps.hidden.items()}
        positions = torch.from_numpy(taps.positions).to(self._like.device)
        for layer, (keys, values) in enumerate(self.model.context(hidden, positions[None])):
            state.cache.insert(layer, taps.rows, taps.positions, keys[0], values[0])
        return Blocks(state.cache)

    @final
    @override
    def truncate(self, state: Blocks, lengths: Ints, rows: Ints | None = None) -> Blocks:
        state.cache.truncate(lengths)
        return Blocks(state.cache, unread=left(state.unread, lengths))

    @final
    @override
    def select(self, state: Blocks, rows: Ints, cache: SlotCache) -> Blocks:
        return Blocks(state.cache.taken(rows, SPARE), unread=moved(state.unread, rows, cache))

    @final
    @override
    def passes(self, state: Blocks, tree: Tree, frontier: Ints) -> int:
        reached = int((tree.depth[frontier] < self.drafts).sum())
        if self.conditioned:
            return reached
        return tree.roots if state.outputs is None and reached else 0

    @final
    @torch.inference_mode()
    def expand(
        self, state: Blocks, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, Blocks]:
        """Return a node's candidates come from the slot of its depth.

        Beyond the block q is unknown (uniform) and nothing comes.
        """
        state = self.caught_up(state)
        if self.conditioned:
            return self._along_paths(state, tree, frontier, k, drawing), state
        if self.passes(state, tree, frontier):
            state = replace(state, outputs=self._block(state.cache, tree))
        shared = not self.by_path and drawing.shaped is None  # nodes of a depth share their list
        nodes, which = by_depth(tree, frontier) if shared else (frontier, None)
        outputs = (
            state.outputs
            if state.outputs is not None
            else self._like.new_zeros(
                state.cache.rows, self.model.layout.block, self.model.config.hidden_size
            )
        )
        found = self._offered(self.after(outputs, tree, nodes), tree, nodes, k, drawing)
        found = replace(found, confidence=self.confidence(outputs, tree, nodes))
        return found if which is None else found.shared(which), state

    def _along_paths(
        self, state: Blocks, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> Candidates:
        """Return the candidates of each node, from a mask after it that reads its path."""
        logits = self._like.new_zeros(len(frontier), self._width)
        near = np.flatnonzero(tree.depth[frontier] < self.drafts)
        if len(near):
            read = self.model.head(behind(self.model, state.cache, tree, frontier[near]))
            logits[torch.from_numpy(near).to(logits.device)] = read
        return self._offered(logits, tree, frontier, k, drawing)

    def _offered(
        self, logits: Tensor, tree: Tree, nodes: Ints, k: int, drawing: Drawing
    ) -> Candidates:
        """Return candidates of logits [M, V′] after nodes.

        Where a node is too deep, q is uniform and there are no candidates.
        """
        depths = tree.depth[nodes]
        logits = logits.masked_fill(
            torch.from_numpy(depths >= self.drafts).to(logits.device)[:, None], 0.0
        )
        return offered(logits, self.drafts, k, drawing, tree.row[nodes], depths, self.model.drafted)

    @property
    def _width(self) -> int:
        """Return V′, or V where all tokens can be drafted."""
        drafted = self.model.drafted
        return self._target.decoder.vocab if drafted is None else len(drafted.ids)

    def _block(self, cache: SlotCache, tree: Tree) -> Tensor:
        """Return the outputs [R, n, D] of a pass over the root and masks of each sequence.

        They come after the committed tokens.
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
        """Return, of outputs [R, n, D], the one [M, D] of each node's depth."""
        first = 0 if self.model.layout.shifted else 1
        at = np.minimum(tree.depth[nodes], self.drafts - 1) + first
        return outputs[
            torch.from_numpy(tree.row[nodes]).to(outputs.device),
            torch.from_numpy(at).to(outputs.device),
        ]

    def marginals(self, outputs: Tensor, tree: Tree, nodes: Ints) -> Tensor:
        """Return the logits [M, V′] of each node's slot alone.

        Nodes of one depth share one pass of the head.
        """
        some, which = by_depth(tree, nodes)
        logits = self.model.head(self.slots(outputs, tree, some))
        return logits[torch.from_numpy(which).to(logits.device)]

    @abstractmethod
    def after(self, outputs: Tensor, tree: Tree, nodes: Ints) -> Tensor:
        """Draft logits [M, V′] after nodes, of the blocks' outputs [R, n, D]."""

    def confidence(self, outputs: Tensor, tree: Tree, nodes: Ints) -> Floats | None:
        """Return the probability [M] that a child of each node is accepted.

        Return None without a head that estimates it.
        """
        return None

    @abstractmethod
    def taught(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return draft logits [M, drafts, V′] along given texts.

        They are computed from the outputs [M, drafts, D] and the token [M, drafts] before each.
        """

    def study(self, counts: Ints) -> None:
        """Choose the draft vocabulary and the mask token.

        The mask is the token that is learnt least often, and of several the last.
        """
        if isinstance(self.model.lm_head, TargetHead):
            self.model.lm_head.study(counts)
        if not self._stored.tensors and self.knobs.mask is None:
            rarest = int(np.flatnonzero(counts == counts.min())[-1])
            self.model.layout = replace(self.model.layout, mask=rarest)

    @property
    @override
    def settled(self) -> ParallelMethod:
        return replace(
            self.knobs, mask=self.model.layout.mask, features=len(self.model.layout.reads)
        )

    @final
    def published(
        self, config: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors; a new config has the choices made when training began."""
        return config if self._stored.tensors else written(self.model.layout, self.kind), tensors

    @final
    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        """Return logits [B, T, V], with zeros where there are none.

        There are none beyond a block, and in the block that begins the text.
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
        return whole(logits, self.model.drafted)

    @final
    def blocks(self, batch: Batch, anchors: Tensor) -> Tensor:
        """Return the draft logits [B, A, drafts, V′] of blocks along the text.

        The blocks begin at anchors [B, A]. The logits are those that decoding would have there.
        """
        logits: Tensor = self.taught(*self.along(batch, anchors)).unflatten(0, anchors.shape)
        return logits

    @final
    def along(self, batch: Batch, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [M, drafts, D] of the slots that draft, and the token before each.

        The blocks begin at anchors [B, A].
        """
        model, layout, (rows, count) = self.model, self.model.layout, batch.tokens.shape
        device = batch.tokens.device
        at = torch.arange(count, device=device)
        cache = DynamicCache()
        hidden = {layer: h.to(self._like.dtype) for layer, h in batch.hidden.items()}
        for layer, (keys, values) in enumerate(model.context(hidden, at.expand(rows, -1))):
            cache.update(keys, values, layer)
        sorts = grouped(layout, self.conditioned).to(device)
        size = len(sorts.offsets)
        place = (anchors[:, :, None] + sorts.offsets).flatten(1)
        given = sorts.given.repeat(anchors.shape[1])
        tokens = torch.where(given, batch.tokens.gather(1, place.clamp(max=count - 1)), layout.mask)
        each = torch.eye(anchors.shape[1], dtype=torch.bool, device=device)
        known = (
            at < anchors.repeat_interleave(size, dim=1)[:, :, None]
        )  # the anchor's own hidden state is not there yet
        there = torch.cat((known, torch.kron(each, sorts.sees).expand(rows, -1, -1)), dim=2)
        out = model(tokens, place, torch.cat((at.expand(rows, -1), place), dim=1), there, cache)
        states = out.unflatten(1, (-1, size))[:, :, size - layout.drafts :].flatten(0, 1)
        path = (anchors[:, :, None] + torch.arange(layout.drafts, device=device)).clamp(
            max=count - 1
        )
        said = batch.tokens.gather(1, path.flatten(1)).view(-1, layout.drafts)
        return states, said
