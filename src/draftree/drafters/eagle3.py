"""EAGLE-3's draft model: reads three layers of the target; trained on its own outputs (Li et al. 2025).

Its decoder layer attends over the embedding of token t + 1 and the fused features of token t;
its output is fed back in their place. It has a head of its own over a draft vocabulary, the tokens
most frequent in the training data.

Shapes: B batch, T tokens, M learnt positions, D hidden size, V vocabulary, V′ draft vocabulary, L
layers of the target.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from typing_extensions import override

from draftree.drafters.base import Batch, Stage, TrainableMethod
from draftree.drafters.neural.draft_configs import (
    export_config,
    make_one_layer_config,
    of_values,
    stored_shape,
)
from draftree.drafters.neural.draft_vocabulary import (
    check_map,
    check_size,
    most_frequent_tokens,
    offsets,
    vocabulary_from_offsets,
)
from draftree.drafters.neural.feature_drafter import PairDrafter
from draftree.drafters.neural.feature_model_interface import PairNet, select_pairs
from draftree.drafters.neural.layer_stack import CACHE, initialise
from draftree.drafters.neural.losses import predicting_positions, soft_cross_entropy
from draftree.drafters.neural.low_rank_head import CandidateHead
from draftree.drafters.neural.native_drafter_layers import native_head, run_native, usable
from draftree.drafters.neural.rotary import Rotary
from draftree.errors import UserError
from draftree.formats import speculators
from draftree.formats.checkpoint import Checkpoint, sizes
from draftree.formats.speculators import EMBEDDING_WEIGHT, LAYER_IDS
from draftree.models.native_layers import LAST_LAYER, PassOutputs
from draftree.models.pair_layer import PairLayer, Pairs
from draftree.target.target import HiddenStateSpec, Target
from draftree.tree import DraftVocab, Ints
from draftree.utils.validated_dataclass import Presets, knob

DEFAULT_LAYERS = (2, None, None)


@final
@dataclass(frozen=True)
class EAGLE3(TrainableMethod):
    """EAGLE-3's draft model.

    Attributes:
        low: index of the first of the three entries of transformers' `hidden_states` that are
            fused.
        middle: index of the second entry; by default L // 2.
        high: index of the third entry; by default L − 3. In a small target, where the defaults
            would coincide, the three entries are spread over its layers.
        draft_vocab: V′, the number of tokens that can be drafted; 0 for all.
        steps: number of passes of the training-time test.
        decay: factor by which the loss of each further pass is multiplied.
        init: the initial weights. `scratch` means random weights, as in the official code. `target`
            means copies of the target layer that reads the highest of the three entries, and of the
            final norm; the new network then predicts as that layer would. If the shapes differ,
            random weights are used. `preset=fast` selects `target`.
        head_rank: r, the rank of a factorised head for all tokens, which replaces the head of the
            draft vocabulary; 0 for no such head. The low-rank factors find candidates.
        head_candidates: m, the number of candidates that the factorised head finds and then scores
            exactly.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=40,
            batch_size=16,
            lr=5e-5,
            schedule="linear",
            floor=0,
            warmup=0.015,
            betas=(0.9, 0.95),
            weight_decay=0,
            clip=0.5,
            max_tokens=2048,
            loss="Σ 0.8^i · cross-entropy with the target in pass i",
            source="the official code: 2 samples on each GPU, taken as 8; its rate falls over 800,000 steps",
            ours=("batch_size",),
        ),
    )
    formats = ("speculators", "eagle")
    own_policy = "eagle2"
    chosen = ("head_rank", "head_candidates")

    presets: ClassVar[Presets] = {"fast": {"init": "target"}}

    low: int = 2
    middle: int | None = None
    high: int | None = None
    draft_vocab: int = knob(0, least=0)
    steps: int = knob(7, least=1)
    decay: float = knob(0.8, above=0, most=1)
    init: Literal["target", "scratch"] = "scratch"
    head_rank: int = knob(0, least=0)
    head_candidates: int = knob(256, least=1)

    @classmethod
    @override
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        if speculators.KIND in config:
            return bool(config[speculators.KIND] == "eagle3")
        return {"fc.weight", "midlayer.hidden_norm.weight"} <= keys

    def layers(self, target: Target) -> tuple[int, int, int]:
        """Return the indices of the three entries of `hidden_states` for a target.

        Raises:
            UserError: the target does not have these entries, or they are not three different ones.
        """
        count = int(target.decoder.config.num_hidden_layers)
        wanted = (
            self.low,
            count // 2 if self.middle is None else self.middle,
            count - 3 if self.high is None else self.high,
        )
        found = tuple(target.decoder.hidden_index(layer) for layer in wanted)
        if len(set(found)) == 3 and list(found) == sorted(found):
            return found[0], found[1], found[2]
        if (self.low, self.middle, self.high) == DEFAULT_LAYERS and count >= 2:
            low, middle, high = np.linspace(min(1, count - 2), count, 3).astype(int).tolist()
            return low, middle, high
        raise UserError(
            f"eagle3: the layers are {wanted}, allowed are three different ones of 0 … {count} in ascending order"
        )

    @override
    def read(self, stored: Checkpoint, target: Target) -> "EAGLE3Drafter":
        stored, config = speculators.load_checkpoint(stored, "eagle3")
        read = config.get("target_hidden_size") or config.get("hidden_size")
        stored.check_sizes("eagle3", config | {"hidden_size": read}, sizes(target))
        own = EMBEDDING_WEIGHT in stored.tensors or read != config.get(
            "hidden_size"
        )  # the target's embedding has another width
        knobs, folder = self, stored.folder
        if (drafted := config.get("draft_vocab_size") or target.decoder.vocab) != (
            self.draft_vocab or target.decoder.vocab
        ):
            knobs = replace(knobs, draft_vocab=drafted)
        if ids := config.get(LAYER_IDS):
            knobs = replace(knobs, low=ids[0], middle=ids[1], high=ids[2])
        elif (self.low, self.middle, self.high) == DEFAULT_LAYERS and (ids := _nested_ids(config)):
            raise UserError(
                f"'{folder}' names its layers {ids} in eagle_config, which codes count from 0 or from 1: say which entries of "
                f"hidden_states they are, eagle3:checkpoint={folder},low=…,middle=…,high=…"
            )
        layers = knobs.layers(target)
        net = stored.network(
            lambda: EAGLE3Net(config, target, layers, own, "d2t" in stored.tensors)
        )
        check_map(stored.tensors.get("d2t"), target, folder)
        return EAGLE3Drafter(knobs, net, target, stored)

    @override
    def new(self, target: Target) -> "EAGLE3Drafter":
        vocab = target.decoder.vocab
        check_size("eagle3", self.draft_vocab, target)
        llama = make_one_layer_config(target.decoder.config)
        config = export_config(llama, "LlamaForCausalLMEagle3")
        layers = self.layers(target)
        config |= {"draft_vocab_size": self.draft_vocab or vocab, LAYER_IDS: list(layers)}
        net = EAGLE3Net(config, target, layers, embedding=False)
        initialise(net, llama)
        net.choose(np.arange(self.draft_vocab or vocab))
        if self.init == "target" and layers[-1] < len(target.decoder.layers):
            net.begin_as(target, layers[-1], net.midlayer)
        return EAGLE3Drafter(self, net, target, Checkpoint(config))


def _nested_ids(config: dict[str, Any]) -> list[int] | None:
    nested = config.get("eagle_config")
    return nested.get(LAYER_IDS) if isinstance(nested, dict) else None


@final
@dataclass(frozen=True)
class Readout:
    """Set how logits are computed from a layer's output, and for which pairs.

    Attributes:
        norm: the norm before the head.
        head: the head.
        selected: [M] indices, from 0 to R n − 1, of the pairs for which outputs and logits are
            returned; None for all.
    """

    norm: nn.Module
    head: nn.Module
    selected: Ints | None

    def outputs(self, like: Tensor) -> PassOutputs:
        """Return the memory for the results of a native pass over pairs with features [R, n, D]."""
        count = like.shape[0] * like.shape[1] if self.selected is None else len(self.selected)
        head = native_head(self.norm, self.head, like, count)
        return PassOutputs(head=head, selected=self.selected)


class EAGLE3Layer(PairLayer):
    """The decoder layer, whose attention reads the concatenation of embedding and feature.

    Args:
        config: the config of the layer.
        normed_residual: whether the residual is the output of the norm over the feature, as in some
            speculators checkpoints.
    """

    def __init__(self, config: LlamaConfig, normed_residual: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(
                self.self_attn,
                name,
                nn.Linear(2 * size, old.out_features, bias=old.bias is not None),
            )
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self._normed_residual = normed_residual

    def forward(
        self,
        embeds: Tensor,
        features: Tensor,
        rotary: Rotary,
        positions: Tensor,
        mask: Tensor,
        cache: Cache,
        readout: Readout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output [R, n, D] for embeddings and features [R, n, D], and its logits.

        They are [M, D] and [M, V′] if `readout` selects pairs. Without it the output is returned
        twice.
        """
        residual = self.hidden_norm(features) if self._normed_residual else features
        pairs = Pairs(embeds.contiguous(), features.contiguous())
        if self.native is None or not usable(self.native, mask, embeds, features):
            turned = rotary(features, positions)
            out = self.run_modules(pairs, residual, turned, mask, {CACHE: cache})
            if readout is None:
                return out, out
            return select_pairs(out, readout.head(readout.norm(out)), readout.selected)
        angles = rotary.tables(features, positions) or rotary(features, positions)
        outputs = LAST_LAYER if readout is None else readout.outputs(features)
        out = run_native([self.native], 0, residual, angles, mask, cache, pairs, outputs)
        if readout is None:
            return out, out
        if outputs.head is None or outputs.head.logits is None:
            return out, readout.head(readout.norm(out))
        return out, outputs.head.logits.view(*out.shape[:-1], -1)


class FusingNet(PairNet):
    """A draft network that fuses several hidden states of the target.

    It has its own head and its own draft vocabulary.

    Attributes:
        fc: the linear layer that fuses the hidden states.
        norm: the norm before the head.
        lm_head: the head for the tokens that can be drafted, a linear layer or a `CandidateHead`.
        d2t: [V′] offsets that are added to 0 … V′ − 1 to get the target's ids; None for the whole
            vocabulary.
        t2d: [V] whether a token of the target can be drafted; None for the whole vocabulary.
        reads: indices of the entries of the target's `hidden_states` that are fused.
    """

    fc: nn.Linear
    norm: nn.Module
    lm_head: Any
    d2t: Tensor | None
    t2d: Tensor | None
    reads: tuple[int, ...]
    _target: Target

    def choose(self, tokens: Ints) -> None:
        """Set the draft vocabulary to token ids in ascending order.

        The head is initialised with the rows of the target's LM head for these tokens.
        """
        ids = torch.from_numpy(np.asarray(tokens, np.int64))
        if self.d2t is not None and self.t2d is not None:
            self.d2t.copy_(offsets(ids))
            self.t2d.zero_()[ids.to(self.t2d.device)] = True
        head = self._target.decoder.head_weight
        if head.shape[1] == self.width:
            self.lm_head.weight.data.copy_(head[ids.to(head.device)])

    @property
    @override
    def draft_vocabulary(self) -> DraftVocab | None:
        return vocabulary_from_offsets(self.d2t, self._target)

    def find_candidates(self, rank: int, count: int) -> None:
        """Replace the head by a `CandidateHead` for all tokens.

        For tokens outside the draft vocabulary, the target's head rows are used.

        Raises:
            UserError: the rank is larger than the width of the head, or the target's rows have
                another width.
        """
        rows = self.lm_head.weight.detach()
        if (part := self.draft_vocabulary) is not None:
            whole = self._target.decoder.head_weight.detach()
            if whole.shape[1] != rows.shape[1]:
                told = f"its draft vocabulary lacks rows, and the target's are {whole.shape[1]} wide, not {rows.shape[1]}"
                raise UserError(f"eagle3: head_rank is {rank}, allowed is 0: {told}")
            rows = whole.to(rows).index_copy(0, part.ids, rows)
        self.lm_head = CandidateHead(rows, rank, count, "eagle3")
        self.d2t = self.t2d = None

    @override
    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        fused: Tensor = self.fc(torch.cat([hidden[layer] for layer in self.reads], dim=-1))
        return fused

    @override
    def logits(self, out: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(out))
        return logits

    def begin_as(self, target: Target, layer: int, first: nn.Module) -> None:
        """Copy the weights of one target layer and of the target's final norm.

        They are copied only if `first`, the network's first layer, has the same shapes.
        """
        values = {
            name: value.float() for name, value in target.decoder.layers[layer].state_dict().items()
        }
        ours, wide = first.state_dict(), [f"self_attn.{part}_proj.weight" for part in "qkv"]
        theirs = {name: values.get(name) for name in ours if "hidden_norm" not in name}
        theirs["hidden_norm.weight"] = theirs.pop("input_layernorm.weight")
        for name in wide:  # the half that reads embeddings is initialised with zeros
            if (half := theirs[name]) is not None:
                theirs[name] = torch.cat((torch.zeros_like(half), half), dim=1)
        last = [m for m in target.decoder.stack.children() if "Norm" in type(m).__name__]
        same = all(t is not None and t.shape == ours[name].shape for name, t in theirs.items())
        if (
            same
            and len(values) == len(theirs)
            and len(last) == 1
            and self.fc.in_features == 3 * self.width
        ):
            first.load_state_dict(theirs, strict=False)
            self.norm.load_state_dict(
                {name: value.float() for name, value in last[0].state_dict().items()}
            )
            nn.init.zeros_(self.fc.weight)
            nn.init.eye_(self.fc.weight.data[:, -self.width :])


@final
class EAGLE3Net(FusingNet):
    """The draft model, with the parameter names of published checkpoints.

    Args:
        values: the published config.
        target: the target, whose embedding is used.
        layers: indices of the entries of its `hidden_states` that are fused.
        embedding: whether the checkpoint contains an embedding.
        maps: whether the maps `d2t` and `t2d` exist even if all tokens can be drafted.
    """

    def __init__(
        self,
        values: dict[str, Any],
        target: Target,
        layers: Sequence[int],
        embedding: bool,
        maps: bool = False,
    ) -> None:
        super().__init__()
        config = of_values(values)
        size, vocab = config.hidden_size, config.vocab_size
        draft = values.get("draft_vocab_size") or vocab
        self.fc = nn.Linear(3 * (values.get("target_hidden_size") or size), size, bias=False)
        self.midlayer = EAGLE3Layer(config, bool(values.get("norm_before_residual", False)))
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, draft, bias=False)
        self.rotary = Rotary(config)
        whole = draft == vocab and not maps  # published checkpoints then mostly have no maps
        self.register_buffer("d2t", None if whole else torch.zeros(draft, dtype=torch.long))
        self.register_buffer("t2d", None if whole else torch.zeros(vocab, dtype=torch.bool))
        self.shape = stored_shape(config)
        self.width = size
        self._vocab = vocab
        self._target = target
        self.embed_tokens = nn.Embedding(vocab, size).requires_grad_(False) if embedding else None
        self.reads = tuple(layers)

    @override
    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: Cache
    ) -> Tensor:
        return self._through(tokens, features, positions, mask, cache)[0]

    @override
    def with_logits(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: Cache,
        selected: Ints | None = None,
    ) -> tuple[Tensor, Tensor]:
        readout = Readout(self.norm, self.lm_head, selected)
        return self._through(tokens, features, positions, mask, cache, readout)

    def _through(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: Cache,
        readout: Readout | None = None,
    ) -> tuple[Tensor, Tensor]:
        embed: Callable[[Tensor], Tensor] = self.embed_tokens or self._target.decoder.embed
        x = embed(tokens).to(features.dtype)
        out, logits = self.midlayer(x, features, self.rotary, positions, mask, cache, readout)
        return out, logits


@final
class EAGLE3Drafter(PairDrafter):
    """Drafts with one decoder layer that reads three of the target's hidden states."""

    knobs: EAGLE3
    model: EAGLE3Net

    @property
    @override
    def needs(self) -> HiddenStateSpec:
        return HiddenStateSpec(hidden=self.model.reads)

    @override
    def use_kernels(self, target: Target) -> None:
        if self.knobs.head_rank:
            self.model.find_candidates(self.knobs.head_rank, self.knobs.head_candidates)
        super().use_kernels(target)

    @override
    def fit_vocabulary(self, counts: Ints) -> None:
        if self.model.d2t is not None:
            self.model.choose(most_frequent_tokens(counts, len(self.model.d2t)))

    @override
    def loss(self, batch: Batch) -> Tensor:
        features = self._features(batch)
        at, total = predicting_positions(batch.learn), features.new_zeros(())
        said, drafted = batch.target(at), self.model.draft_vocabulary
        possible = torch.ones(len(said), dtype=torch.bool, device=said.device)
        if self.model.t2d is not None and drafted is not None:
            highest, said = said.amax(-1), said[:, drafted.ids]
            # Elsewhere the target's token cannot be drafted.
            possible = said.amax(-1) == highest
        for j, (out, known) in enumerate(
            self.training_time_test(batch, features, self.knobs.steps)
        ):
            there = (at & known)[at] & possible
            chosen = at.masked_scatter(at, there)
            total = total + self.knobs.decay**j * soft_cross_entropy(
                said[there], self.model.logits(out[chosen])
            )
        return total / batch.count
