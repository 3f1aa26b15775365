"""GLIDE, the glimpse draft model: a small Llama that also attends to the target's key-value cache (GliDe + CaPE, 4.1).

Each draft layer has a cross-attention between its self-attention and its MLP. Its queries see the keys and values that a
layer of the target has cached for committed tokens; the token at position N and all that is drafted behind it see those
of positions 0 … N − 1. Weights lie on disk in the layout of the official code.

Shapes: R rows, B batch, T tokens, n tokens a row in one pass, S target slots, D hidden size, V vocabulary, H key-value
heads of the target.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    repeat_kv,
    rotate_half,
)

from draftree.boundary.files import Entries
from draftree.drafters.base import Batch, Stage, Trainable, TrainableMethod, every, put
from draftree.drafters.neural.language_model import NOTHING, SPARE, Decoding, keep_path, lay_out, no_candidates, rewind
from draftree.drafters.neural.llama import of_values
from draftree.drafters.neural.losses import before, draft_loss
from draftree.drafters.neural.masks import block_starts, earlier_blocks
from draftree.errors import UserError
from draftree.formats.checkpoint import ABOUT, CONFIG, Stored, about, furnished, kept, note, read_config, read_tensors, write
from draftree.models.architectures import LENGTH_DEPENDENT_ROPE
from draftree.models.attention import AUTO, Attending, attending
from draftree.models.cache import SlotCache
from draftree.models.decoder import Decoder
from draftree.models.feed import Feed
from draftree.models.target import CHUNK, Needs, Taps, Target
from draftree.sampling.drawing import Drawing, drawn
from draftree.tree import Candidates, Ints, Tree, Verdict

OFFICIAL = "smallLlamaForCausalLM"
"""What a published checkpoint's config calls the model."""
PREFIX = "small_model."
"""Before the names of tensors that were saved together with the target."""
OFFICIAL_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
"""How the official code rotates queries, whatever rotated the target's keys."""


PRETRAINING = Stage(
    name="pretraining", data="text", epochs=1, batch_size=64, lr=5e-4, schedule="cosine", floor=0, warmup=0.025,
    betas=(0.9, 0.95), weight_decay=0, max_tokens=2048, loss="cross-entropy with the text",
    source="GliDe + CaPE, appendix A; schedule, betas, weight decay and length the official code", ours=("clip",),
)  # fmt: skip


@final
@dataclass(frozen=True)
class GLIDE(TrainableMethod):
    """Glimpse draft model.

    Attributes:
        layers: of the draft model; the paper has 1, and 2 for its largest target.
        hidden: its hidden size; 0 is the target's.
        block: length of the blocks it is trained in (5 in the paper). A node at depth d looks past d of the target's tokens, so
            that below a depth of `block` it looks from farther away than it ever did in training; the paper drafts 5 deep.
        init: what embedding and LM head begin with: `target`, copies of the target's where the hidden sizes are equal (which
            is EDD's way, and narrows what is left for cross-attention to gain), or `scratch`, random numbers, as in the paper
            ("will be trained from scratch", section 4.1). In training only; all weights are learnt either way.
        loss: `ce` against the text, the paper's, or `kl` against the target.
        cross: whether it looks at the target at all; without, it is the paper's Vanilla Drafter (section 5.2).
        kv_layer: the target layer that the last draft layer reads, counted from 0, negative ones from the end; the layers
            before read those right below it. The paper's choice is the top (l = N_T − N_D + m); lower ones are its figure 7.
            `auto` is settled when training begins: of the upper third of the target's layers the one whose attention adds
            most to its residual stream (`draftree.attention`), for in some targets hardly anything is looked up at the top.
        variant: `paper`, in which every token keeps the view it was drafted with, and training blocks begin anywhere, as
            they do in decoding (the phase is drawn for each sample; the paper's grid has phase 0); or `official`, in which
            tokens committed in a step are read once more, seeing all the target has committed since, prompts see all of
            themselves, queries are rotated with base 10,000, and training blocks begin at multiples of their length.
            Published checkpoints are opened as `official`. In training a text's first block sees nothing of the target in
            both; the official code lets it see itself, and in the paper's formula it has nothing to attend to.
    """

    stages: ClassVar[tuple[Stage, ...]] = (PRETRAINING, replace(PRETRAINING, name="tuning", data="chats"))

    layers: int = 1
    hidden: int = 0
    block: int = 5
    loss: Literal["ce", "kl"] = "ce"
    cross: bool = True
    kv_layer: int | Literal["auto"] = -1
    variant: Literal["paper", "official"] = "paper"
    init: Literal["target", "scratch"] = "target"

    def __post_init__(self) -> None:
        if self.layers < 1 or self.hidden < 0 or self.block < 1:
            raise UserError(
                f"glide: got layers={self.layers}, hidden={self.hidden}, block={self.block}; "
                "allowed are layers ≥ 1, hidden ≥ 0, block ≥ 1"
            )

    def read(self, folder: Path, target: Target) -> "GLIDEDrafter":
        knobs, stored = self.resume(folder, target), read_tensors(folder)
        _check_sizes(stored.config, folder, target)
        views = knobs.views(target)
        if joint := {k: v for k, v in stored.tensors.items() if k.startswith(PREFIX)}:  # the target's are not ours to keep
            stored = replace(stored, tensors=joint)
        inner = {k.removeprefix(PREFIX): v for k, v in stored.tensors.items()}
        unused = frozenset(k for k in inner if k.endswith(".rotary_emb.inv_freq"))
        model = furnished(lambda: GlimpseModel(of_values(stored.config), views), replace(stored, tensors=inner), folder, unused)
        for parameter in model.parameters():  # not `to`, which would also round the rotary frequencies
            parameter.data = parameter.data.to(target.decoder.dtype)
        return GLIDEDrafter(knobs, cast(Any, model).to(target.decoder.device), target, stored)

    def fresh(self, target: Target) -> "GLIDEDrafter":
        views, config = self.views(target), _published(self, target)
        model = GlimpseModel(of_values(config), views)
        if self.init == "target" and config["hidden_size"] == target.decoder.hidden:
            whole: Any = target.decoder.model
            model.model.embed_tokens.weight.data.copy_(whole.get_input_embeddings().weight[: target.decoder.vocab])
            model.lm_head.weight.data.copy_(whole.get_output_embeddings().weight)
        return GLIDEDrafter(self, cast(Any, model).to(target.decoder.device), target, Stored(config=config))

    def resume(self, folder: Path, target: Target) -> Self:
        fixed = kept(folder, type(self))
        if not about(folder):
            said = Entries(read_config(folder), folder / CONFIG)
            sizes = {"layers": said.get("num_hidden_layers", int, 1), "hidden": said.get("hidden_size", int, 0)}
            fixed = {**sizes, "block": said.get("block_size", int, 5), "variant": "official"}
        return replace(self, checkpoint=str(folder), **fixed)

    @classmethod
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        return OFFICIAL in (config.get("architectures") or ()) or any(
            k.removeprefix(PREFIX) == "model.layers.0.cross_attn.q_proj.weight" for k in keys
        )

    def views(self, target: Target) -> tuple["View | None", ...]:
        """What each draft layer reads of the target; while `auto` is not settled, the paper's layers.

        Raises:
            UserError: the target has no such layers.
        """
        if not self.cross:
            return (None,) * self.layers
        count, top = int(target.decoder.config.num_hidden_layers), -1 if self.kv_layer == AUTO else self.kv_layer
        top = top + count if top < 0 else top
        if not self.layers - 1 <= top < count:
            low = self.layers - 1
            raise UserError(
                f"glide: got kv_layer={self.kv_layer} with layers={self.layers}; of the target's {count} layers allowed are "
                f"{low} … {count - 1} (or {low - count} … -1)"
            )
        return tuple(View.of(target, layer, self.variant) for layer in range(top - self.layers + 1, top + 1))

    def busiest(self, layers: Sequence[Attending]) -> int:
        """The layer that `auto` means; without the limit it would be the first one, which in many targets adds most of all."""
        lowest = max(2 * len(layers) // 3, self.layers - 1)
        return max(range(lowest, len(layers)), key=lambda i: layers[i].output)


@dataclass(frozen=True)
class View:
    """What a draft layer reads of the target.

    Attributes:
        layer: the target's, counted from 0.
        heads: its query heads.
        key: width of a key.
        value: width of a value.
        rope: how queries are rotated, as transformers' `rope_parameters`; None where the target's keys are not.
        turned: how much of a key's width is rotated.
        context: positions the target knows.
    """

    layer: int
    heads: int
    key: int
    value: int
    rope: dict[str, Any] | None
    turned: int
    context: int

    @classmethod
    def of(cls, target: Target, layer: int, variant: str) -> Self:
        """The view of a layer; queries are rotated as its keys are, as far as it can be told from the config."""
        config, shape = target.decoder.config, target.decoder.shapes[layer]
        rope = dict(OFFICIAL_ROPE) if variant == "official" else _rope(config, layer)
        share = 1.0 if rope is None else float(rope.pop("partial_rotary_factor", 1.0))
        turned = int(shape.key * share) // 2 * 2
        heads = int(config.num_attention_heads)
        return cls(layer, heads, shape.key, shape.value, rope, turned, min(target.decoder.context, 2**20))


def _rope(config: PreTrainedConfig, layer: int) -> dict[str, Any] | None:
    """A target layer's rope; of one whose frequencies change with the length of the text, those of a short text."""
    said = getattr(config, "rope_parameters", None) or {}
    types = getattr(config, "layer_types", None)
    rope = dict(said.get(types[layer], said) if types else said)
    if "rope_theta" not in rope:
        return None
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        return {k: rope[k] for k in ("rope_theta", "partial_rotary_factor") if k in rope} | {"rope_type": "default"}
    return rope


@dataclass(frozen=True)
class Glimpse:
    """The target's keys and values as one pass sees them.

    Attributes:
        kv: for each draft layer, keys and values [B, H, S, width].
        visible: [B or 1, 1, n, S] what each query sees.
    """

    kv: Sequence[tuple[Tensor, Tensor]]
    visible: Tensor


@final
class CrossAttention(nn.Module):
    """Attention of the draft's queries to a target layer's cached keys and values; it has none of its own."""

    def __init__(self, config: LlamaConfig, view: View) -> None:
        super().__init__()
        self.q_proj = nn.Linear(config.hidden_size, view.heads * view.key, bias=False)
        self.o_proj = nn.Linear(view.heads * view.value, config.hidden_size, bias=False)
        self.look_at(view)

    def look_at(self, view: View) -> None:
        """Reads another layer from now on, whose keys and values are as wide."""
        self.view = view
        self.rotary = None if view.rope is None or not view.turned else _rotary(view)

    def forward(self, states: Tensor, positions: Tensor, kv: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """[B, n, D]; zero for a query that sees nothing."""
        queries = self.q_proj(states).unflatten(-1, (self.view.heads, self.view.key)).transpose(1, 2)
        queries = self._turned(queries, positions)
        keys, values = (repeat_kv(t.to(queries.dtype), self.view.heads // t.shape[1]) for t in kv)
        some = visible.any(-1, keepdim=True)  # a softmax over nothing would be NaN, in the gradient too
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=visible | ~some) * some
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2).to(states.dtype))
        return out

    def _turned(self, queries: Tensor, positions: Tensor) -> Tensor:
        if self.rotary is None:
            return queries
        cos, sin = (t[:, None] for t in self.rotary(queries, positions))
        turned, rest = queries[..., : self.view.turned], queries[..., self.view.turned :]
        return torch.cat((turned * cos + rotate_half(turned) * sin, rest), dim=-1)


def _rotary(view: View) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=view.heads * view.turned,
        num_attention_heads=view.heads,
        head_dim=view.turned,
        max_position_embeddings=view.context,
        rope_parameters=cast(Any, view.rope),
    )
    return LlamaRotaryEmbedding(config)


@final
class GlimpseLayer(nn.Module):
    """A Llama layer with cross-attention behind its self-attention, on the residual as it is (the official order)."""

    def __init__(self, config: LlamaConfig, index: int, view: View | None) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, index)
        self.cross_attn = None if view is None else CrossAttention(config, view)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.index = index

    def forward(
        self,
        states: Tensor,
        positions: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Tensor | None,
        past: Cache | None,
        glimpse: Glimpse | None,
    ) -> Tensor:
        """[B, n, D]."""
        own, _ = self.self_attn(
            self.input_layernorm(states), position_embeddings=turns, attention_mask=mask, past_key_values=past
        )
        states = states + own
        if self.cross_attn is not None and glimpse is not None:
            states = states + self.cross_attn(states, positions, glimpse.kv[self.index], glimpse.visible)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


@final
class GlimpseStack(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, config: LlamaConfig, views: Sequence[View | None]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([GlimpseLayer(config, i, view) for i, view in enumerate(views)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, past: Cache | None, glimpse: Glimpse | None
    ) -> Tensor:
        """What the head reads after each token, [B, n, D]."""
        states = self.embed_tokens(ids)
        turns = self.rotary(states, positions)
        for layer in self.layers:
            states = layer(states, positions, turns, mask, past, glimpse)
        out: Tensor = self.norm(states)
        return out


@final
class GlimpseModel(PreTrainedModel):
    """The network, under the tensor names of the official code, in the form of a transformers model with a cache."""

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: LlamaConfig, views: Sequence[View | None]) -> None:
        super().__init__(config)
        self.model = GlimpseStack(config, views)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        cast(Any, self).post_init()  # untyped, as much of transformers is

    def get_output_embeddings(self) -> nn.Linear:
        head: nn.Linear = self.lm_head
        return head

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
        glimpse: Glimpse | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits [B, n, V], or [B, kept, V]; without a mask every token sees those before it."""
        states = self.model(input_ids, position_ids, attention_mask, past_key_values, glimpse)
        at = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(states[:, at]))


@dataclass(frozen=True)
class Glimpsing:
    """The drafter's state.

    Attributes:
        own: its own cache, and the tokens that wait to be read.
        target: the target's cache.
        limits: for each row and token that waits, how many of the target's tokens it sees.
    """

    own: Decoding
    target: SlotCache
    limits: tuple[Ints, ...]

    @property
    def roots(self) -> Ints:
        """[R] the position of each row's root."""
        return self.own.cache.lengths + np.array([len(p) for p in self.own.pending], np.int64)

    def seen(self, positions: Ints) -> Ints:
        """[R, n] how many of the target's tokens those at positions see; root and nodes see all before the root."""
        rows = zip(self.limits, self.roots, self.own.cache.lengths, positions, strict=True)
        found = [np.append(early, root)[np.clip(at - first, 0, len(early))] for early, root, first, at in rows]
        return np.stack(found)  # padding lies at position 0 and sees whatever


@final
class GLIDEDrafter(Trainable[Glimpsing]):
    """The draft model, its own cache, and its view of the target's."""

    knobs: GLIDE
    model: GlimpseModel

    def __init__(self, knobs: GLIDE, model: GlimpseModel, target: Target, stored: Stored) -> None:
        self.knobs, self.model, self._target, self._stored = knobs, model, target, stored
        self.decoder = Decoder(model)
        self._settle(knobs)

    @property
    def needs(self) -> Needs:
        if self._layers and self._settled.kv_layer == AUTO:
            raise UserError("glide: kv_layer is 'auto', allowed is a number outside of training, which settles it")
        return Needs(kv=self._layers)

    def settle(self, texts: Sequence[Ints]) -> Mapping[str, Any]:
        if not self._layers or self.knobs.kv_layer != AUTO:
            return {}
        layer, shapes = self.knobs.busiest(attending(self._target.decoder, texts)), self._target.decoder.shapes
        self._settle(replace(self.knobs, kv_layer=layer))
        if len({shapes[i] for i in (*self._layers, -1)}) > 1:
            raise UserError(f"glide: kv_layer=auto finds layer {layer}, shaped unlike the top one: ask for kv_layer={layer}")
        return {"kv_layer": layer}

    def _settle(self, knobs: GLIDE) -> None:
        """Reads the layers that these knobs name, the drafter's own with `auto` put in numbers."""
        views = [view for view in knobs.views(self._target) if view is not None]
        self._settled, self._layers = knobs, tuple(view.layer for view in views)
        for layer, view in zip(self.model.model.layers, views, strict=False):  # none without cross-attention
            cast(Any, layer).cross_attn.look_at(view)

    @torch.inference_mode()
    def start(
        self, prompts: Sequence[Ints], roots: Ints, taps: Taps, state: Glimpsing | None = None, rows: Ints | None = None
    ) -> Glimpsing:
        if state is None:
            own = Decoding.empty(self.decoder.new_cache(len(prompts), max(map(len, prompts)) + SPARE))
            state = Glimpsing(own, taps.cache, own.pending)
        cache, nothing, begun = state.own.cache, (NOTHING,) * len(prompts), every(rows, len(prompts))
        known = cache.lengths.tolist()
        rest = put(nothing, begun, [p[n:] for p, n in zip(prompts, known, strict=True)])
        limits = put(nothing, begun, [self._reading(len(p))[n:] for p, n in zip(prompts, known, strict=True)])
        if max(len(prompts[row]) for row in begun) >= self.decoder.context:  # it never gets to draft
            pending = put(state.own.pending, begun, rest)
            return Glimpsing(replace(state.own, pending=pending), taps.cache, put(state.limits, begun, limits))
        for at in range(0, max(map(len, rest)), CHUNK):
            part, seen = [r[at : at + CHUNK] for r in rest], [n[at : at + CHUNK] for n in limits]
            feed = Feed.chains(part, cache.lengths.copy(), self.decoder.device)
            self._read(_waiting(cache, taps.cache, part, seen), feed)
            for r, ids in enumerate(part):
                cache.keep(r, cache.lengths[r] + np.arange(len(ids)))
        return replace(state, target=taps.cache)

    def _reading(self, length: int) -> Ints:
        """[T] how many of the target's tokens each token of a prompt sees."""
        if self.knobs.variant == "official":
            return np.full(length, length)
        starts: Ints = block_starts(length, self.knobs.block, 0).numpy()  # the blocks it would be trained in
        return starts

    def _read(self, state: Glimpsing, feed: Feed) -> Tensor:
        """What the head reads after the tokens fed [R, n, D]; their keys and values go into scratch slots."""
        cache = state.own.cache
        places = torch.from_numpy(feed.positions).to(self.decoder.device)
        past, mask = cache.writer(feed.starts, feed.tokens.shape[1]), self.decoder.mask(feed, cache.lengths)
        states: Tensor = self.model.model(feed.tokens, places, mask, past, self._glimpse(state, feed.positions))
        return states

    def _glimpse(self, state: Glimpsing, positions: Ints) -> Glimpse | None:
        if not self._layers:
            return None
        seen = state.seen(positions)
        slots = max(1, int(seen.max()))
        kv = [(keys[:, :, :slots], values[:, :, :slots]) for keys, values in map(state.target.layer, self._layers)]
        visible = torch.from_numpy(np.arange(slots) < seen[:, None, :, None])
        return Glimpse(kv, visible.to(self.decoder.device))

    @torch.inference_mode()
    def expand(self, state: Glimpsing, tree: Tree, frontier: Ints, k: int, drawing: Drawing) -> tuple[Candidates, Glimpsing]:
        if int((state.roots[tree.row[frontier]] + tree.depth[frontier]).max()) >= self.decoder.context:
            return no_candidates(len(frontier), k), state
        layout = lay_out(state.own, tree, frontier, self.decoder.device)
        logits = self.model.lm_head(layout.pick(self._read(state, layout.feed)))
        candidates = drawn(logits, k, drawing, tree.row[frontier], tree.depth[frontier])
        return candidates, replace(state, own=replace(state.own, fed=layout.fed))

    @torch.inference_mode()
    def commit(self, state: Glimpsing, tree: Tree, verdict: Verdict, taps: Taps) -> Glimpsing:
        official, roots = self.knobs.variant == "official", state.roots
        own = read_again(state.own, tree, verdict) if official else keep_path(state.own, tree, verdict)
        limits = [NOTHING if fed.size else early for fed, early in zip(state.own.fed, state.limits, strict=True)]
        for row in tree.row[: tree.roots].tolist():
            new = len(own.pending[row]) - len(limits[row])  # accepted, and not read yet
            bound = taps.cache.lengths[row] if official else roots[row]
            limits[row] = np.append(limits[row], np.full(new, bound))
        return Glimpsing(own, taps.cache, tuple(limits))

    def truncate(self, state: Glimpsing, lengths: Ints, rows: Ints | None = None) -> Glimpsing:
        limits = put(state.limits, every(rows, len(lengths)), (NOTHING,) * len(lengths))
        return Glimpsing(rewind(state.own, lengths, rows), state.target, limits)

    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        logits: Tensor = self.model.lm_head(self._states(batch, block, [phase] * len(batch.tokens)))
        return logits

    def _states(self, batch: Batch, block: int, phases: Sequence[int]) -> Tensor:
        """What the head reads after each token [B, T, D], for a phase of each sample."""
        rows, count = batch.tokens.shape
        positions = torch.arange(count, device=batch.tokens.device).expand(rows, count)
        glimpse = None
        if self._layers:
            visible = torch.stack([earlier_blocks(count, block, phase) for phase in phases])[:, None]
            glimpse = Glimpse([batch.kv[layer] for layer in self._layers], visible.to(batch.tokens.device))
        states: Tensor = self.model.model(batch.tokens, positions, None, None, glimpse)
        return states

    def loss(self, batch: Batch) -> Tensor:
        block = self.knobs.block
        fixed = self.knobs.variant == "official"
        phases = [0 if fixed else int(torch.randint(block, (), generator=g)) for g in batch.generators]
        states = self._states(batch, block, phases)[before(batch.learn)]
        return draft_loss(self.knobs.loss, batch, self.model.lm_head(states))

    def save(self, folder: Path) -> None:
        prefix = PREFIX if any(k.startswith(PREFIX) for k in self._stored.tensors) else ""
        state = {prefix + k: v for k, v in self.model.state_dict().items()}
        config = self._stored.config | {ABOUT: note("glide", self._settled, self._target)}
        write(folder, self._stored, state, config)


def _waiting(cache: SlotCache, target: SlotCache, tokens: Sequence[Ints], limits: Sequence[Ints]) -> Glimpsing:
    """The state in which tokens wait behind those in the cache."""
    return Glimpsing(replace(Decoding.empty(cache), pending=tuple(tokens)), target, tuple(limits))


def read_again(state: Decoding, tree: Tree, verdict: Verdict) -> Decoding:
    """Forgets all that was fed of a step's nodes: root and accepted nodes wait to be read with the next root."""
    cache, pending = state.cache, list(state.pending)
    for root in range(tree.roots):
        row = int(tree.row[root])
        if state.fed[row].size:
            cache.keep(row, cache.lengths[row] + np.arange(len(pending[row])))
            pending[row] = NOTHING
        pending[row] = np.concatenate((pending[row], tree.tokens[verdict.kept(root)]))
    return Decoding(cache, tuple(pending), (NOTHING,) * cache.rows)


def _published(knobs: GLIDE, target: Target) -> dict[str, Any]:
    """The config of a new draft model, with the fields of the official code.

    Raises:
        UserError: the hidden size cannot be cut into heads.
    """
    theirs, decoder = target.decoder.config, target.decoder
    hidden = knobs.hidden or decoder.hidden
    heads = math.gcd(hidden, int(theirs.num_attention_heads))
    if hidden // heads % 2:
        raise UserError(f"glide: got hidden={hidden}, {heads} heads of odd width; allowed is a multiple of {2 * heads}")
    wide = getattr(theirs, "intermediate_size", None) or 4 * decoder.hidden
    return {
        "architectures": [OFFICIAL],
        "model_type": "llama",
        "vocab_size": decoder.vocab,
        "hidden_size": hidden,
        "intermediate_size": max(1, round(wide * hidden / decoder.hidden)),
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
        **_large(target),
        "block_size": knobs.block,
        "use_remap": False,
    }


def _large(target: Target) -> dict[str, int]:
    """What the config says of the target."""
    config, shapes = target.decoder.config, target.decoder.shapes
    heads = int(config.num_attention_heads)
    return {"large_hidden_size": target.decoder.hidden, "large_num_attention_heads": heads, "large_head_dim": shapes[-1].key}


def _check_sizes(config: dict[str, Any], folder: Path, target: Target) -> None:
    """Refuses a checkpoint that was made for a target of other sizes.

    Raises:
        UserError: it names what was got and what is allowed.
    """
    for key, wanted in ({"vocab_size": target.decoder.vocab} | _large(target)).items():
        if config.get(key) != wanted:
            raise UserError(f"'glide' in '{folder}' has {key} {config.get(key)}, allowed is the target's: {wanted}")
