"""GLIDE: a small Llama with cross-attention to the target's KV cache (GliDe + CaPE, section 4.1).

Each draft layer has a cross-attention between its self-attention and its MLP. Its queries see the
keys and values that a layer of the target has cached for committed tokens; the token at position N
and all that is drafted after it see those of positions 0 … N − 1. Weights are stored in the layout
of the official code.

Shapes: R slots, B batch, T tokens, n tokens a slot in one pass, S target slots, D hidden size, V
vocabulary, H key-value heads of the target.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, cast, final

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from typing_extensions import override

from draftree.drafters.base import (
    Batch,
    Stage,
    TrainableMethod,
    replace_slots,
    select_slots,
    slots_or_all,
)
from draftree.drafters.neural.decoding_state import (
    NO_TOKENS,
    SPARE_SLOTS,
    Decoding,
    keep_path,
    rewind,
    select_sequences,
)
from draftree.drafters.neural.draft_configs import of_values
from draftree.drafters.neural.draft_masks import block_starts, earlier_blocks
from draftree.drafters.neural.draft_vocabulary import check_size, expand_logits
from draftree.drafters.neural.frontier_layout import lay_out
from draftree.drafters.neural.glide_model import Glimpse, GlimpseModel, View
from draftree.drafters.neural.kv_cached_drafter import BorrowingDrafter, candidates_within_context
from draftree.drafters.neural.losses import draft_loss, predicting_positions
from draftree.drafters.neural.target_modules import TargetEmbedding, TargetHead
from draftree.errors import UserError
from draftree.formats import config_entries
from draftree.formats.checkpoint import CONFIG, Checkpoint
from draftree.models.forward_batch import ForwardBatch
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.attention_strength import AUTO, Attending, measure_attention
from draftree.target.target import CHUNK, HiddenStates, HiddenStateSpec, Target
from draftree.tree import AcceptResult, Candidates, Ints, Tree, no_candidates
from draftree.utils.files import Entries
from draftree.utils.validated_dataclass import Presets, knob

WIDTH = 4096
"""Hidden size of the draft model in the paper, for every target (section 5.1)."""
OFFICIAL = "smallLlamaForCausalLM"
"""Name of the architecture in the config of a published checkpoint."""
DRAFT_MODEL_PREFIX = "small_model."
"""Prefix of the draft model's tensors in a file that also contains the target's tensors."""

PRETRAINING = Stage(
    name="pretraining",
    data="text",
    epochs=1,
    batch_size=64,
    lr=5e-4,
    schedule="cosine",
    floor=0,
    warmup=0.025,
    betas=(0.9, 0.95),
    weight_decay=0,
    max_tokens=2048,
    loss="cross-entropy with the text",
    source="GliDe + CaPE, appendix A; schedule, betas, weight decay and length the official code",
    ours=("clip",),
)


@final
@dataclass(frozen=True)
class GLIDE(TrainableMethod):
    """Glimpse draft model.

    Attributes:
        layers: number of layers of the draft model. The paper has 1, and 2 for its largest target.
        hidden: the hidden size. 0 means that of the target (`--keep_same` in the official code).
            `paper` means 4,096 (section 5.1), or that of the target if it is smaller. The "47M"
            parameters in the paper and the 768 in its script contradict 4,096.
        block: number of tokens in a training block (5 in the paper). A node at depth d cannot see
            the target's last d tokens. Below depth `block` it is farther from the visible tokens
            than in training. The paper drafts to depth 5.
        init: the initial embedding and LM head. `scratch` means random weights, as in the paper
            ("will be trained from scratch", section 4.1). `target` means copies of the target's
            weights, as in EDD, if the hidden sizes are equal; cross-attention then has less to
            gain. `shared` means the target's own modules, which are neither trained nor stored.
        draft_vocab: V′, the number of tokens that can be drafted, which are the most frequent ones
            in the training data; 0 for all. Other values require `init=shared`.
        loss: `ce`, the cross-entropy with the text (the paper's loss), or `kl`, the KL divergence
            from the target.
        cross: whether the draft model attends to the target's cache. Without cross-attention it is
            the Vanilla Drafter of the paper (section 5.2).
        kv_layer: the target layer that the last draft layer reads, counted from 0, or from the end
            if negative. Earlier draft layers read the target layers directly below. The paper reads
            the top layers (l = N_T − N_D + m), and lower ones in its figure 7. `auto` is decided
            when training begins: it selects, in the upper third of the target, the layer whose
            attention adds most to the residual stream (`target.attention_strength`), because in
            some targets the top layers attend to hardly anything.
        phase: number of tokens by which the first block of a training text is shortened. With 0
            blocks begin at multiples of their length, as in the paper (section 4.1). `random` is
            drawn for each sample, because in decoding a block begins anywhere.
        variant: `paper`: a token keeps the visible target tokens that it was drafted with.
            `official`: accepted tokens are read again and see all tokens that the target has
            committed, prompt tokens see the whole prompt, and queries are rotated with base 10,000.
            Published checkpoints need `official`. In both variants the first block of a training
            text sees no target token. In the official code it sees itself, and in the paper's
            formula it has no token to attend to.

    The defaults are the paper's; `preset=fast` learns faster.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        PRETRAINING,
        replace(PRETRAINING, name="tuning", data="chats"),
    )
    presets: ClassVar[Presets] = {
        "fast": {"hidden": 0, "init": "target", "phase": "random", "kv_layer": AUTO}
    }

    layers: int = knob(1, least=1)
    hidden: int | Literal["paper"] = knob("paper", least=0)
    block: int = knob(5, least=1)
    loss: Literal["ce", "kl"] = "ce"
    cross: bool = True
    kv_layer: int | Literal["auto"] = -1
    variant: Literal["paper", "official"] = "paper"
    init: Literal["target", "scratch", "shared"] = "scratch"
    draft_vocab: int = knob(0, least=0)
    phase: int | Literal["random"] = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.phase != "random" and not 0 <= self.phase < self.block:
            raise UserError(
                f"glide: phase is {self.phase}, allowed are random and 0 … {self.block - 1}"
            )
        if self.draft_vocab and self.init != "shared":
            told = f"allowed with init={self.init} is 0: its own head is whole"
            raise UserError(f"glide: draft_vocab is {self.draft_vocab}, {told}")

    @override
    def read(self, stored: Checkpoint, target: Target) -> "GLIDEDrafter":
        config_entries.FLAT_GLIDE.check_layer(stored.config, stored.folder, "glide")
        knobs, stored = self._of(stored), stored.load_tensors()
        stored.check_sizes(
            "glide", stored.config, {"vocab_size": target.decoder.vocab} | _target_entries(target)
        )
        views = knobs.views(target)
        if joint := {
            k: v for k, v in stored.tensors.items() if k.startswith(DRAFT_MODEL_PREFIX)
        }:  # the target's tensors are not stored
            stored = replace(stored, tensors=joint, name=lambda key: DRAFT_MODEL_PREFIX + key)
        unused = frozenset(k for k in stored.tensors if k.endswith(".rotary_emb.inv_freq"))
        model = stored.network(lambda: knobs.network(stored.config, views, target), unused)
        return GLIDEDrafter(knobs, model, target, stored)

    @override
    def new(self, target: Target) -> "GLIDEDrafter":
        views, config = self.views(target), _new_official_config(self, target)
        if self.init == "shared" and config["hidden_size"] != target.decoder.hidden_size:
            got = f"hidden={self.hidden} with init=shared"
            raise UserError(
                f"glide: got {got}, allowed is the target's hidden size {target.decoder.hidden_size}, or init=scratch"
            )
        check_size("glide", self.draft_vocab, target)
        model = self.network(config, views, target)
        if self.init == "target" and config["hidden_size"] == target.decoder.hidden_size:
            whole: Any = target.decoder.model
            model.model.embed_tokens.weight.data.copy_(
                whole.get_input_embeddings().weight[: target.decoder.vocab]
            )
            model.lm_head.weight.data.copy_(target.decoder.head_weight)
        return GLIDEDrafter(self, model, target, Checkpoint(config))

    def network(
        self, config: dict[str, Any], views: Sequence[View | None], target: Target
    ) -> GlimpseModel:
        """Return a new draft network with the sizes in a checkpoint's config.

        With `init=shared`, the network uses the target's embedding and head.

        Args:
            config: the config of the draft layers.
            views: for each draft layer the target layer that it attends to; None if there is none.
            target: the target model.
        """
        model = GlimpseModel(of_values(config), views)
        if self.init == "shared":
            norm = model.model.norm.weight
            model.set_input_embeddings(TargetEmbedding(target, lambda: norm))
            model.lm_head = TargetHead(target, self.draft_vocab)
        return model

    def _of(self, stored: Checkpoint) -> Self:
        """Return these options, with the values that a published config fixes."""
        if stored.about:
            return self
        said = Entries(stored.config, stored.folder / CONFIG)
        layers, hidden = said.get("num_hidden_layers", int, 1), said.get("hidden_size", int, 0)
        return replace(
            self,
            layers=layers,
            hidden=hidden,
            block=said.get("block_size", int, 5),
            variant="official",
        )

    @classmethod
    @override
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        return OFFICIAL in (config.get("architectures") or ()) or any(
            k.removeprefix(DRAFT_MODEL_PREFIX) == "model.layers.0.cross_attn.q_proj.weight"
            for k in keys
        )

    def views(self, target: Target) -> tuple[View | None, ...]:
        """Return for each draft layer the target layer that it reads.

        As long as `auto` is not decided, these are the layers of the paper.

        Raises:
            UserError: the target has no such layers.
        """
        if not self.cross:
            return (None,) * self.layers
        having, top = target.decoder.keyed_layers, -1 if self.kv_layer == AUTO else self.kv_layer
        if not having:
            name = type(target.decoder.model).__name__
            raise UserError(f"glide: {name} is not supported: its layers have no keys to attend to")
        at = top + len(having) if top < 0 else having.index(top) if top in having else -1
        if not self.layers - 1 <= at < len(having):
            low, count = self.layers - 1, len(having)
            plain = having == tuple(range(count))
            named = f"{low} … {count - 1}" if plain else ", ".join(map(str, having[low:])) or "none"
            raise UserError(
                f"glide: got kv_layer={self.kv_layer} with layers={self.layers}; of the target's {count} layers allowed "
                f"are {named} (or {low - count} … -1)"
            )
        return tuple(
            View.of(target, layer, self.variant) for layer in having[at - self.layers + 1 : at + 1]
        )

    def busiest(self, layers: Sequence[Attending]) -> int:
        """Return the layer that `auto` selects, whose attention adds most to the layer's input.

        Only the last third of the target's layers is searched, because in many targets the first
        layer adds most of all.
        """
        lowest = max(2 * len(layers) // 3, self.layers - 1)
        return max(range(lowest, len(layers)), key=lambda i: layers[i].output)


@dataclass(frozen=True)
class GLIDEState:
    """The drafter's state.

    Attributes:
        own: the drafter's own cache, and the tokens that it has not read yet.
        target: the target's cache.
        limits: for each slot and each token that is not read yet, the number of target tokens that
            it sees.
    """

    own: Decoding
    target: SlotCache
    limits: tuple[Ints, ...]

    @property
    def roots(self) -> Ints:
        """Return the position [R] of each sequence's root."""
        return self.own.cache.lengths + np.array([len(p) for p in self.own.pending], np.int64)

    def num_visible_tokens(self, positions: Ints) -> Ints:
        """Return the number of target tokens that each position sees, [R, n].

        The root and all nodes see the tokens before the root.
        """
        rows = zip(self.limits, self.roots, self.own.cache.lengths, positions, strict=True)
        found = [
            np.append(early, root)[np.clip(at - first, 0, len(early))]
            for early, root, first, at in rows
        ]
        return np.stack(found)  # padding has position 0 and may see any token


@final
class GLIDEDrafter(BorrowingDrafter[GLIDEState]):
    """Drafts with a small model that has a KV cache and also attends to the target's KV cache."""

    knobs: GLIDE
    model: GlimpseModel

    def __init__(
        self, knobs: GLIDE, model: GlimpseModel, target: Target, stored: Checkpoint
    ) -> None:
        super().__init__(knobs, model, target, stored)
        self._settle(knobs)

    @property
    @override
    def resolved_knobs(self) -> GLIDE:
        return self._settled

    @property
    @override
    def needs(self) -> HiddenStateSpec:
        if self._layers and self._settled.kv_layer == AUTO:
            raise UserError(
                "glide: kv_layer is 'auto', allowed is a number; only training chooses it"
            )
        return HiddenStateSpec(kv=self._layers)

    @property
    @override
    def decodes_otherwise(self) -> str:
        return (
            "GLIDE's official code decodes otherwise than it trains"
            if self.knobs.variant == "official"
            else ""
        )

    @override
    def resolve_auto(self, texts: Sequence[Ints]) -> Mapping[str, Any]:
        if not self._layers or self.knobs.kv_layer != AUTO:
            return {}
        layer, shapes = (
            self.knobs.busiest(measure_attention(self._target.decoder, texts)),
            self._target.decoder.shapes,
        )
        self._settle(replace(self.knobs, kv_layer=layer))
        if len({shapes[i] for i in (*self._layers, -1)}) > 1:
            raise UserError(
                f"glide: kv_layer=auto finds layer {layer}, shaped unlike the top one: ask for kv_layer={layer}"
            )
        return {"kv_layer": layer}

    def _settle(self, knobs: GLIDE) -> None:
        """Select the target layers that the options name; `auto` must have been replaced before."""
        views = [view for view in knobs.views(self._target) if view is not None]
        self._settled, self._layers = knobs, tuple(view.layer for view in views)
        for layer, view in zip(
            self.model.model.layers, views, strict=False
        ):  # none without cross-attention
            cast(Any, layer).cross_attn.look_at(view)

    @torch.inference_mode()
    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: GLIDEState | None = None,
        rows: Ints | None = None,
    ) -> GLIDEState:
        if state is None:
            own = Decoding.empty(
                self.decoder.new_cache(len(prompts), max(map(len, prompts)) + SPARE_SLOTS)
            )
            state = GLIDEState(own, hidden_states.cache, own.pending)
        cache = state.own.cache
        nothing = (NO_TOKENS,) * len(prompts)
        begun = slots_or_all(rows, len(prompts))
        known = cache.lengths.tolist()
        rest = replace_slots(nothing, begun, [p[n:] for p, n in zip(prompts, known, strict=True)])
        limits = replace_slots(
            nothing, begun, [self._reading(len(p))[n:] for p, n in zip(prompts, known, strict=True)]
        )
        fit = np.array([len(prompts[row]) < self.decoder.context for row in begun])
        if not fit.all():  # no drafts are made for these sequences
            late = begun[~fit]
            waiting = replace(state.own, pending=replace_slots(state.own.pending, late, rest))
            state = GLIDEState(
                waiting, hidden_states.cache, replace_slots(state.limits, late, limits)
            )
            rest, limits = (
                replace_slots(nothing, begun[fit], rest),
                replace_slots(nothing, begun[fit], limits),
            )
        for at in range(0, max(map(len, rest)), CHUNK):
            part, seen = [r[at : at + CHUNK] for r in rest], [n[at : at + CHUNK] for n in limits]
            feed = ForwardBatch.chains(part, cache.lengths.copy(), self.decoder.device)
            self._read(_make_pending_state(cache, hidden_states.cache, part, seen), feed)
            for r, ids in enumerate(part):
                cache.keep(r, cache.lengths[r] + np.arange(len(ids)))
        return replace(state, target=hidden_states.cache)

    def _reading(self, length: int) -> Ints:
        """Return the number of target tokens that each token of a prompt sees, [T]."""
        if self.knobs.variant == "official":
            return np.full(length, length)
        starts: Ints = block_starts(length, self.knobs.block, 0).numpy()  # the blocks of training
        return starts

    def _read(self, state: GLIDEState, feed: ForwardBatch) -> Tensor:
        """Return the final norm's output [R, n, D] after the tokens of a forward batch.

        The keys and values of the tokens are written to scratch slots.
        """
        cache = state.own.cache
        places = torch.from_numpy(feed.padded_positions).to(self.decoder.device)
        past, mask = cache.writer(feed.starts, feed.width), self.decoder.hf.mask(cache, feed)
        return self._states(
            feed.padded_tokens, places, mask, past, self._glimpse(state, feed.padded_positions)
        )

    def _states(
        self, ids: Tensor, places: Tensor, mask: Any, past: Cache | None, glimpse: Glimpse | None
    ) -> Tensor:
        """Return the final norm's output [R, n, D] after each token.

        Without a mask the attention is causal.
        """
        out = self.model.model(ids, mask, places, past, use_cache=past is not None, glimpse=glimpse)
        states: Tensor = out.last_hidden_state
        return states

    def _glimpse(self, state: GLIDEState, positions: Ints) -> Glimpse | None:
        if not self._layers:
            return None
        seen = state.num_visible_tokens(positions)
        slots = max(1, int(seen.max()))
        kv = [
            (keys[:, :, :slots], values[:, :, :slots])
            for keys, values in map(state.target.layer, self._layers)
        ]
        visible = torch.from_numpy(np.arange(slots) < seen[:, None, :, None])
        return Glimpse(kv, visible.to(self.decoder.device))

    @torch.inference_mode()
    @override
    def expand(
        self, state: GLIDEState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, GLIDEState]:
        known = (
            state.roots[tree.row[frontier]] + tree.depth[frontier] < self.decoder.context
        )  # each sequence by itself
        if not known.any():
            return no_candidates(len(frontier), k), state
        layout = lay_out(state.own, tree, frontier[known], self.decoder.device)
        logits = self.model.lm_head(layout.pick(self._read(state, layout.feed)))
        candidates = candidates_within_context(
            logits, known, k, drawing, tree, frontier, self.draft_vocabulary
        )
        return candidates, replace(state, own=replace(state.own, fed=layout.fed))

    @torch.inference_mode()
    @override
    def commit(
        self, state: GLIDEState, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> GLIDEState:
        official, roots = self.knobs.variant == "official", state.roots
        own = keep_path(state.own, tree, verdict, again=official)
        limits = [
            NO_TOKENS if fed.size else early
            for fed, early in zip(state.own.fed, state.limits, strict=True)
        ]
        for row in tree.row[: tree.roots].tolist():
            new = len(own.pending[row]) - len(limits[row])  # accepted, and not read yet
            bound = hidden_states.cache.lengths[row] if official else roots[row]
            limits[row] = np.append(limits[row], np.full(new, bound))
        return GLIDEState(own, hidden_states.cache, tuple(limits))

    @override
    def truncate(self, state: GLIDEState, lengths: Ints, rows: Ints | None = None) -> GLIDEState:
        limits = replace_slots(state.limits, rows, (NO_TOKENS,) * len(lengths))
        return GLIDEState(rewind(state.own, lengths, rows), state.target, limits)

    @override
    def select(self, state: GLIDEState, rows: Ints, cache: SlotCache) -> GLIDEState:
        return GLIDEState(
            select_sequences(state.own, rows, cache),
            cache,
            select_slots(state.limits, rows, NO_TOKENS),
        )

    @override
    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        logits: Tensor = self.model.lm_head(
            self._training_outputs(batch, block, [phase] * len(batch.tokens))
        )
        return expand_logits(logits, self.draft_vocabulary)

    def _training_outputs(self, batch: Batch, block: int, phases: Sequence[int]) -> Tensor:
        """Return the final norm's output [B, T, D] after each token.

        Each sample has its own phase.
        """
        rows, count = batch.tokens.shape
        positions = torch.arange(count, device=batch.tokens.device).expand(rows, count)
        glimpse = None
        if self._layers:
            visible = torch.stack([earlier_blocks(count, block, phase) for phase in phases])[
                :, None
            ]
            glimpse = Glimpse(
                [batch.kv[layer] for layer in self._layers], visible.to(batch.tokens.device)
            )
        return self._states(batch.tokens, positions, None, None, glimpse)

    @override
    def loss(self, batch: Batch) -> Tensor:
        block, fixed = self.knobs.block, self.knobs.phase
        phases = [
            int(torch.randint(block, (), generator=g)) if fixed == "random" else fixed
            for g in batch.generators
        ]
        states = self._training_outputs(batch, block, phases)[predicting_positions(batch.learn)]
        return draft_loss(
            self.knobs.loss, batch, self.model.lm_head(states), drafted=self.draft_vocabulary
        )


def _make_pending_state(
    cache: SlotCache, target: SlotCache, tokens: Sequence[Ints], limits: Sequence[Ints]
) -> GLIDEState:
    """Return the state of a drafter that has read what is in its cache, but not yet `tokens`.

    Args:
        cache: the drafter's own cache.
        target: the target's cache, which the drafter attends to.
        tokens: for each sequence, the tokens that the drafter has still to read.
        limits: for each of these tokens, how many of the target's keys it may attend to.
    """
    return GLIDEState(replace(Decoding.empty(cache), pending=tuple(tokens)), target, tuple(limits))


def _new_official_config(knobs: GLIDE, target: Target) -> dict[str, Any]:
    """Return the config of a new draft model, with the fields that the official code reads.

    Raises:
        UserError: the hidden size cannot be divided into heads.
    """
    theirs, decoder = target.decoder.config, target.decoder
    hidden = (
        min(WIDTH, decoder.hidden_size)
        if knobs.hidden == "paper"
        else knobs.hidden or decoder.hidden_size
    )
    heads = math.gcd(hidden, int(theirs.num_attention_heads))
    if hidden // heads % 2:
        raise UserError(
            f"glide: got hidden={hidden}, {heads} heads of odd width; allowed is a multiple of {2 * heads}"
        )
    wide = getattr(theirs, "intermediate_size", None) or 4 * decoder.hidden_size
    return {
        "architectures": [OFFICIAL],
        "model_type": "llama",
        "vocab_size": decoder.vocab,
        "hidden_size": hidden,
        "intermediate_size": max(1, round(wide * hidden / decoder.hidden_size)),
        "num_hidden_layers": knobs.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        "max_position_embeddings": decoder.context,
        "initializer_range": getattr(theirs, "initializer_range", 0.02),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        **_target_entries(target),
        "block_size": knobs.block,
        "use_remap": False,
    }


def _target_entries(target: Target) -> dict[str, int]:
    """Return the entries of the config that describe the target."""
    config, shapes = target.decoder.config, target.decoder.shapes
    heads = int(config.num_attention_heads)
    return {
        "large_hidden_size": target.decoder.hidden_size,
        "large_num_attention_heads": heads,
        "large_head_dim": shapes[-1].key,
    }
