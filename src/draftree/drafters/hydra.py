"""Hydra: heads that read the drafted path and the target's last hidden state (Ankner et al. 2024).

Head i, counted from 0, is asked after a node at depth i. It reads what a prefix layer made of the
committed text, and the embeddings of the root and of the node's path: unlike Medusa's, siblings
have different continuations. The prefix layer is a whole Llama layer over the target's hidden
states (Hydra++); without it the hidden state itself is read.

Shapes: R slots, F frontier nodes, B batch, T tokens, M learnt positions, D hidden size, V
vocabulary, S slots.
"""

import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from typing_extensions import override

from draftree.drafters.base import Batch, Stage, TrainableMethod, slots_or_all
from draftree.drafters.neural.decoding_state import SPARE_SLOTS
from draftree.drafters.neural.draft_configs import make_one_layer_config, stored_shape
from draftree.drafters.neural.draft_masks import additive
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
from draftree.drafters.neural.layer_stack import apply_layers, initialise
from draftree.drafters.neural.rotary import Rotary
from draftree.errors import UserError
from draftree.formats import config_entries
from draftree.formats.checkpoint import Checkpoint, sizes
from draftree.models.graph_capture import InputTensors
from draftree.models.kv_cache import LayerShape, SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.device_tree import Nodes
from draftree.target.target import CHUNK, LAST, HiddenStates, Target
from draftree.tree import AcceptResult, Candidates, Ints, Tree
from draftree.utils.hardware import to_device
from draftree.utils.validated_dataclass import knob

OFFICIAL_FILE = "hydra_lm_head.safetensors"
PREFIX_LAYER, INPUT_EMBEDDING = "prefix_embeding_layer.", "input_embed_fn.weight"  # sic
UNUSED = frozenset(
    {f"{PREFIX_LAYER}embed_tokens.weight", f"{PREFIX_LAYER}layers.0.self_attn.rotary_emb.inv_freq"}
)
"""Tensors of the prefix layer that the official file contains but does not use."""
Arch = Literal["prefix-mlp", "mlp"]


@final
@dataclass(frozen=True)
class Hydra(TrainableMethod):
    """Hydra heads; the target stays as it is. The official training's dropout of 0.2 is left out.

    Attributes:
        heads: number of heads, which is the largest depth of a node.
        layers: number of residual blocks of a head. All blocks after the first share their weights,
            as in the official code.
        arch: whether there is a prefix layer (`prefix-mlp`) or not (`mlp`).
        loss: `kl`, the KL divergence from the target (the soft cross-entropy of the official code,
            without a constant), or `ce`, the cross-entropy with the text.
        draft_vocab: V′, the number of tokens that can be drafted, which are the most frequent ones
            in the training data; 0 for all.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=10,
            batch_size=32,
            lr=5e-4,
            schedule="cosine",
            floor=0.33,
            warmup=100,
            weight_decay=0.1,
            max_tokens=2048,
            loss="Σ KL(p‖q) to the target over heads",
            source="the official code's command",
            ours=("betas", "clip"),
        ),
    )
    files = (OFFICIAL_FILE, "hydra_lm_head.pt")

    heads: int = knob(4, least=1)
    layers: int = knob(4, least=1)
    arch: Arch = "prefix-mlp"
    loss: Literal["kl", "ce"] = "kl"
    draft_vocab: int = knob(0, least=0)

    @classmethod
    @override
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        return any(key.startswith("hydra_lm_head.") for key in keys)

    @override
    def read(self, stored: Checkpoint, target: Target) -> "HydraDrafter":
        stored = stored.load_tensors(self.files)
        config_entries.HYDRA.check(stored.config, stored.folder, "hydra")
        found = replace(self, **infer_options(stored.tensors, stored.folder))
        first, last = (
            f"hydra_mlp.0.{_places(found)[0]}.linear.weight",
            _lm_head(0, found.arch) + "weight",
        )
        vocab = target.decoder.vocab if "d2t" in stored.tensors else len(stored.tensors[last])
        widths = {"hidden_size": len(stored.tensors[first]), "vocab_size": vocab}
        stored.check_sizes("hydra", widths, sizes(target))
        check_aliases(stored.tensors, found, stored.folder)
        net = stored.network(
            lambda: HydraNet(found, target, INPUT_EMBEDDING in stored.tensors), UNUSED
        )
        check_map(net.d2t, target, stored.folder)
        return HydraDrafter(found, net, target, stored)

    @override
    def new(self, target: Target) -> "HydraDrafter":
        embedding: Any = target.decoder.model.get_input_embeddings()
        if (width := embedding.weight.shape[1]) != target.decoder.hidden_size:
            raise UserError(
                f"hydra: the target's embeddings have width {width}, allowed is its hidden size {target.decoder.hidden_size}"
            )
        check_size("hydra", self.draft_vocab, target)
        return HydraDrafter(
            self, HydraNet(self, target, embedding=False), target, Checkpoint(file=OFFICIAL_FILE)
        )


def infer_options(tensors: dict[str, Tensor], where: Path) -> dict[str, Any]:
    """Return the options that follow from the tensors of a file.

    Raises:
        UserError: the file contains no heads.
    """
    arch: Arch = (
        "prefix-mlp"
        if any(name.startswith(f"{PREFIX_LAYER}layers.") for name in tensors)
        else "mlp"
    )
    blocks = [name for name in tensors if re.fullmatch(r"hydra_mlp\.0\.\d+\.linear\.weight", name)]
    heads = {
        int(m[1])
        for name in tensors
        if (m := re.fullmatch(r"hydra_lm_head\.(\d+)\.(1\.)?weight", name))
    }
    first = f"hydra_mlp.0.{'1' if arch == 'prefix-mlp' else '0'}.linear.weight"
    for name in (first, _lm_head(0, arch) + "weight"):
        if name not in tensors:
            raise UserError(
                f"'{where}' holds no Hydra heads of kind '{arch}': a tensor {name} was expected"
            )
    if max(heads) >= len(heads):
        raise UserError(
            f"'{where}' has Hydra heads with gaps: of {max(heads) + 1} there are {len(heads)}"
        )
    return {"arch": arch, "heads": len(heads), "layers": len(blocks)}


def _places(knobs: Hydra) -> list[int]:
    """Return the indices of a head's blocks in the official code's list of modules.

    They depend on whether the list also contains dropout modules.
    """
    return [2 * i + 1 if knobs.arch == "prefix-mlp" else i for i in range(knobs.layers)]


def _lm_head(head: int, arch: Arch) -> str:
    return f"hydra_lm_head.{head}." + ("1." if arch == "prefix-mlp" else "")


def check_aliases(tensors: dict[str, Tensor], knobs: Hydra, where: Path) -> None:
    """Check that a file has the same tensors under all names of a shared block.

    Raises:
        UserError: the tensors under two of the names differ.
    """
    for head in range(knobs.heads):
        for part in ("weight", "bias"):
            names = [f"hydra_mlp.{head}.{place}.linear.{part}" for place in _places(knobs)[1:]]
            for one, other in pairwise([n for n in names if n in tensors]):
                if not torch.equal(tensors[one], tensors[other]):
                    raise UserError(
                        f"'{where}' has different tensors {one} and {other}; allowed is one block under both names"
                    )


class Prefix(nn.Module):
    """A Llama layer and a norm; parameters have the names of a one-layer Llama model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.norm: nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        initialise(self, config)

    def forward(
        self, states: Tensor, rotated: tuple[Tensor, Tensor], mask: Tensor, cache: Cache | None
    ) -> Tensor:
        """Return the output [R, n, D] for hidden states [R, n, D].

        The additive mask has the shape [R, 1, n, S].
        """
        out: Tensor = self.norm(apply_layers(self.layers, states, rotated, mask, cache))
        return out


@final
class HydraNet(HeadsNet):
    """Prefix layer and heads in float32, with the parameter names of the official file.

    Args:
        knobs: the options; they give the number of heads and blocks.
        target: the target. The prefix layer has its sizes, the heads' linear layers are initialised
            with its LM head, and its embedding is used.
        embedding: whether the checkpoint contains an embedding.
    """

    def __init__(self, knobs: Hydra, target: Target, embedding: bool) -> None:
        super().__init__()
        self.config = config = make_one_layer_config(target.decoder.config)
        self.rotary = Rotary(config)
        prefix = knobs.arch == "prefix-mlp"
        self.prefix_embeding_layer = Prefix(config) if prefix else None
        self.hydra_mlp = nn.ModuleList(
            self._mlp(i, config.hidden_size, knobs) for i in range(knobs.heads)
        )
        heads = [lm_head(target, True, knobs.draft_vocab) for _ in range(knobs.heads)]
        self.map(knobs.draft_vocab)
        self.hydra_lm_head = nn.ModuleList(
            nn.Sequential(nn.Identity(), h) if prefix else h for h in heads
        )
        embed = nn.Embedding(target.decoder.vocab, config.hidden_size) if embedding else None
        self.input_embed_fn = embed and embed.requires_grad_(False)
        self._target = target

    @property
    @override
    def last(self) -> Sequence[nn.Linear]:
        heads: list[Any] = list(self.hydra_lm_head)
        return [head if isinstance(head, nn.Linear) else head[-1] for head in heads]

    @staticmethod
    def _mlp(head: int, width: int, knobs: Hydra) -> nn.Sequential:
        blocks = [ResBlock(width, head + 1), *[ResBlock(width)] * (knobs.layers - 1)]
        if knobs.arch == "mlp":
            return nn.Sequential(*blocks)
        return nn.Sequential(
            *(part for block in blocks for part in (nn.Identity(), block))
        )  # dropout's place

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings […, D] of tokens […], in the dtype of the heads."""
        embed: Callable[[Tensor], Tensor] = self.input_embed_fn or self._target.decoder.embed
        return embed(tokens).to(next(self.parameters()).dtype)

    def logits(self, head: int, prefix: Tensor, path: Tensor) -> Tensor:
        """Return the logits […, V′] of a head.

        Args:
            head: the number of the head, from 0.
            prefix: […, D] the states that the prefix layer computed.
            path: […, head + 1, D] the embeddings of the root and the drafted path.
        """
        read = torch.cat((prefix, path.flatten(-2)), dim=-1)
        logits: Tensor = self.hydra_lm_head[head](self.hydra_mlp[head](read))
        return logits


@dataclass(frozen=True)
class HydraState:
    """Hydra's state.

    Attributes:
        cache: the prefix layer's KV cache of committed tokens; empty without a prefix layer.
        hidden: the target's hidden states of all committed tokens, stored as the keys of a cache
            with one head; empty without a prefix layer.
        read: [R] the number of hidden states that the prefix layer has read. The keys and values
            that it computed in this step are in scratch slots of `cache`.
        prefix: [R, D] the vector that the heads read, which belongs to the last of these hidden
            states.
    """

    cache: SlotCache
    hidden: SlotCache
    read: Ints
    prefix: Tensor


@final
class HydraDrafter(HeadsDrafter[HydraState]):
    """Draft each depth with a head that reads the prefix state and the path's embeddings."""

    knobs: Hydra
    model: HydraNet

    @torch.inference_mode()
    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: HydraState | None = None,
        rows: Ints | None = None,
    ) -> HydraState:
        state = self._remember(
            state or self._empty(len(prompts), max(map(len, prompts)) + SPARE_SLOTS), hidden_states
        )
        state = self._read(state, slots_or_all(rows, len(prompts)))
        _commit_prefix(state)
        return state

    def _empty(self, rows: int, slots: int) -> HydraState:
        width, layers = self.model.config.hidden_size, self.knobs.arch == "prefix-mlp"
        shapes = stored_shape(self.model.config), LayerShape(1, width, 0)
        cache, hidden = (
            SlotCache((shape,) * layers, rows, self._like.dtype, self._like.device)
            for shape in shapes
        )
        if layers:
            cache.reserve(slots)
            hidden.reserve(slots)
        return HydraState(
            cache, hidden, np.zeros(rows, np.int64), self._like.new_zeros(rows, width)
        )

    def _remember(self, state: HydraState, hidden_states: HiddenStates) -> HydraState:
        """Store the hidden states [T, D] of newly committed tokens, and return the new state.

        The prefix layer, if there is one, reads them later.
        """
        new = hidden_states.hidden[LAST].to(self._like.dtype)
        if self.model.prefix_embeding_layer is None:
            return replace(state, prefix=latest_by_sequence(hidden_states.rows, new, state.prefix))
        state.hidden.insert(
            0, hidden_states.rows, hidden_states.positions, new[None], new.new_zeros(1, len(new), 0)
        )
        return state

    def _read(self, state: HydraState, rows: Ints) -> HydraState:
        """Let the prefix layer read all committed tokens of some sequences; return the new state.

        Their keys and values are written to scratch slots.
        """
        waiting = np.zeros(state.cache.rows, np.bool_)
        waiting[rows] = state.read[rows] < state.hidden.lengths[rows]
        if not waiting.any():
            return state
        ends, prefix = np.where(waiting, state.hidden.lengths, state.read), state.prefix.clone()
        for at in range(0, int((ends - state.read).max()), CHUNK):
            starts = np.minimum(state.read + at, ends)
            out = self._prefix_pass(state, starts, min(CHUNK, int((ends - starts).max())))
            ended = np.flatnonzero((starts < ends) & (ends <= starts + out.shape[1]))
            mine, last = (to_device(i, out.device) for i in (ended, (ends - starts)[ended] - 1))
            prefix[mine] = out[mine, last]
        return replace(state, read=ends, prefix=prefix)

    def _prefix_pass(self, state: HydraState, starts: Ints, count: int) -> Tensor:
        """Run the prefix layer over hidden states, and return its output [R, n, D].

        The layer's keys and values are stored in scratch slots of its cache. Sequences with fewer
        hidden states are padded. A later pass overwrites keys and values of the padding.

        Args:
            state: the drafter's state.
            starts: [R] the position of each sequence's first hidden state in the pass.
            count: n, the number of hidden states of each sequence.
        """
        assert self.model.prefix_embeding_layer is not None
        given, places = state.hidden.layer(0)[0][:, 0], starts[:, None] + np.arange(count)
        slots = np.minimum(places, given.shape[1] - 1)  # padding may be beyond the last
        at, known = (to_device(i, given.device) for i in (places, slots))
        states = given[torch.arange(len(given), device=given.device)[:, None], known]
        visible = torch.arange(int(places.max()) + 1, device=given.device) <= at[:, :, None]
        mask, writer = additive(visible[:, None], states.dtype), state.cache.writer(starts, count)
        out: Tensor = self.model.prefix_embeding_layer(
            states, self.model.rotary(states, at), mask, writer
        )
        return out

    def passes(self, state: HydraState, tree: Tree, frontier: Ints) -> int:
        """Return the number of frontier nodes that a head must read.

        Nodes below the last head need no pass.
        """
        return int((tree.depth[frontier] < self.knobs.heads).sum())

    @torch.inference_mode()
    @override
    def layers(self, state: HydraState, roots: Tree, depth: Ints) -> HeadLayers:
        rows = roots.row[depth[roots.row] > 0]
        state = self._read(state, rows) if state.cache.shapes else state

        def read(depth: int, given: InputTensors, nodes: Nodes, frontier: Tensor) -> Tensor:
            path = [frontier]
            for _ in range(depth):
                path.append(nodes.parents.gather(1, path[-1]))
            embedded = self.model.embed(
                torch.stack([nodes.tokens.gather(1, each) for each in path[::-1]], dim=2)
            )
            return self.model.logits(
                depth, given["prefix"][:, None].expand(-1, frontier.shape[1], -1), embedded
            )

        given, heads = {"prefix": state.prefix}, self.knobs.heads
        return HeadLayers(
            read,
            heads,
            self.capture,
            self.recorded_weights,
            given,
            self.draft_vocabulary,
            state,
            each_node=True,
        )

    @torch.inference_mode()
    def expand(
        self, state: HydraState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, HydraState]:
        """Return the candidates after each node; head d computes those of nodes at depth d.

        There are no candidates below the last head, where q is taken to be uniform.
        """
        depths, rows = tree.depth[frontier], tree.row[frontier]
        state = self._read(state, rows) if state.cache.shapes else state
        logits = self._like.new_zeros(
            len(frontier), self.knobs.draft_vocab or self._target.decoder.vocab
        )
        for depth in np.unique(depths[depths < self.knobs.heads]).tolist():
            at = np.flatnonzero(depths == depth)
            path = [frontier[at]]
            for _ in range(depth):
                path.append(tree.parents[path[-1]])
            embedded = self.model.embed(
                to_device(tree.tokens[np.stack(path[::-1], axis=1)], logits.device)
            )
            prefix = state.prefix[to_device(rows[at], logits.device)]
            logits[to_device(at, logits.device)] = self.model.logits(depth, prefix, embedded)
        return make_candidates(
            logits, self.knobs.heads, k, drawing, rows, depths, self.draft_vocabulary
        ), state

    @torch.inference_mode()
    def commit(
        self, state: HydraState, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> HydraState:
        """Store the hidden states of the accepted tokens.

        The prefix layer reads them only when the sequence is drafted for again.
        """
        _commit_prefix(state)
        return self._remember(state, hidden_states)

    @override
    def truncate(self, state: HydraState, lengths: Ints, rows: Ints | None = None) -> HydraState:
        state.cache.truncate(lengths)
        state.hidden.truncate(
            lengths
        )  # the next prompt's last token is always read again, which updates the prefix
        return replace(state, read=state.cache.lengths.copy())

    @override
    def select(self, state: HydraState, rows: Ints, cache: SlotCache) -> HydraState:
        own, hidden = (
            state.cache.copy_sequences(rows, SPARE_SLOTS),
            state.hidden.copy_sequences(rows, SPARE_SLOTS),
        )
        return HydraState(own, hidden, own.lengths.copy(), state.prefix[np.maximum(rows, 0)])

    @override
    def readers(self, batch: Batch) -> Sequence[Callable[[Any], Tensor]]:
        prefix, embedded = batch.hidden[LAST].to(self._like.dtype), self.model.embed(batch.tokens)
        if self.model.prefix_embeding_layer is not None:
            at = torch.arange(prefix.shape[1], device=prefix.device)
            mask = additive((at[None, :] <= at[:, None])[None, None], prefix.dtype)
            prefix = self.model.prefix_embeding_layer(
                prefix, self.model.rotary(prefix, at[None]), mask, None
            )

        def read(head: int, at: Any) -> Tensor:
            path = torch.stack([embedded.roll(-1 - i, 1)[at] for i in range(head + 1)], dim=-2)
            return self.model.logits(head, prefix[at], path)

        return [partial(read, head) for head in range(self.knobs.heads)]

    @override
    def weights(self, head: int) -> tuple[float, float]:
        return (0.0, 1.0) if self.knobs.loss == "kl" else (1.0, 0.0)

    def to_published_layout(
        self, config: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors in the official layout.

        The target's embedding and unused tensors are included only if the file that was read has
        them.
        """
        names = {
            "base_model_name_or_path": self._target.name,
            "grounded_heads": True,
            "hidden_state_offset": 0,
        }
        knobs = self.knobs
        counts = {
            "hydra_head_arch": knobs.arch,
            "hydra_num_heads": knobs.heads,
            "hydra_num_layers": knobs.layers,
        }
        return names | config | counts, tensors


def _commit_prefix(state: HydraState) -> None:
    """Commit the keys and values that the prefix layer has written to scratch slots."""
    for row in np.flatnonzero(state.read > state.cache.lengths).tolist():
        state.cache.keep(row, np.arange(state.cache.lengths[row], state.read[row]))
