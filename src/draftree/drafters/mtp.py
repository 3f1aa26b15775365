"""A multi-token-prediction layer of the target (DeepSeek-V3, section 2.2; C2T, appendix F).

h'_t = M [RMSNorm(Emb(x_{t+1})); RMSNorm(h_t)], then a decoder layer, a norm of its own, and the
target's LM head. Checkpoints like DeepSeek-V3's store such a layer after the target's last one;
those of Qwen3-Next and Qwen3.5 store it separately. Where there are several layers, each reads the
output of the layer before for the pair before, and predicts one token further.

Shapes: R slots, n tokens a slot, M learnt positions, D hidden size, V vocabulary, L layers of the
target.
"""

import copy
import itertools
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache
from typing_extensions import override

from draftree.drafters.base import Batch, Stage, TrainableMethod
from draftree.drafters.neural.draft_vocabulary import check_size
from draftree.drafters.neural.feature_drafter import PairDrafter
from draftree.drafters.neural.feature_model_interface import PairNet
from draftree.drafters.neural.losses import draft_loss, predicting_positions
from draftree.drafters.neural.one_layer_of_target import check_attends
from draftree.drafters.neural.target_modules import TargetHead
from draftree.errors import UserError
from draftree.formats.checkpoint import WEIGHT_FILES, Checkpoint, sizes, tensor_names
from draftree.models.causal_lm import CausalLM
from draftree.models.hf_runner import UNNORMED
from draftree.target.model_construction import one_layer
from draftree.target.target import LAST, HiddenStateSpec, Target
from draftree.tree import DraftVocab, Ints
from draftree.utils.validated_dataclass import knob

PROJECTION = re.compile(r"(?P<begin>.*\.layers\.\d+\.)eh_proj\.weight$")
"""Name of the projection in a layer that is stored after the target's last layer.

DeepSeek-V3 and GLM-4 name it so.
"""
CHAINED = re.compile(r"(?P<begin>(?:model\.)?mtp\.)layers\.\d+\.input_proj\.weight$")
"""Name of the corresponding projection in Inkling."""
Where = Literal["normed", "raw"]
INPUT_VARIANTS: tuple[tuple[Where, Where], ...] = tuple(
    itertools.product(("normed", "raw"), ("raw", "normed"))
)
"""The possible pairs of (`first`, `fed`), see `MTP`; DeepSeek-V3's comes first.

If two pairs predict equally well, the earlier one is chosen.
"""
TRIAL_PROMPT = "The library is open on every day of the week but Monday, when it is"
TRIAL_TOKENS, TRIAL_BLOCK_TOKENS = 32, 3
"""Sizes of the test that chooses one of `INPUT_VARIANTS`.

The target generates `TRIAL_TOKENS` tokens after the text `TRIAL_PROMPT`, and the drafter predicts them in
blocks of `TRIAL_BLOCK_TOKENS` tokens.
"""
EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(?:gate|up|down)_proj\.weight$")


@final
@dataclass(frozen=True)
class MTP(TrainableMethod):
    """Multi-token-prediction layer.

    Attributes:
        loss: `kl`, the KL divergence from the target, or `ce`, the cross-entropy with the text
            (DeepSeek-V3's objective).
        steps: number of passes in training, at least one for each layer. Each pass reads the output
            of the pass before. DeepSeek-V3 trains with one pass for each layer.
        draft_vocab: V′, the number of tokens that can be drafted; 0 for all.
        layers: number of layers, one for each depth of a draft. The last layer serves all larger
            depths too. 0 means all layers of the checkpoint, or one layer for a new drafter.
        first: whether the hidden state that a layer reads is the output of the target's final norm
            (`normed`) or of its last layer (`raw`). Programs that run published layers disagree. By
            default both are tried when a checkpoint is opened, and the one that predicts most
            tokens of a short text by the target is chosen. New layers use `normed`.
        fed: whether the next draft step reads the layer's output (`raw`, DeepSeek-V3) or the output
            of the norm after it (`normed`, transformers' MTP). By default it is chosen in the same
            way as `first`, and new layers use `raw`.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            lr=2.2e-4,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            clip=1.0,
            max_tokens=4096,
            loss="KL(p‖q) to the target (the paper's: cross-entropy with the text)",
            source="DeepSeek-V3, section 4.2, where the layer is trained together with the model",
            ours=("epochs", "batch_size", "schedule", "warmup"),
        ),
    )

    loss: Literal["kl", "ce"] = "kl"
    steps: int = knob(1, least=1)
    draft_vocab: int = knob(0, least=0)
    layers: int = knob(0, least=0)
    first: Literal["", "normed", "raw"] = ""
    fed: Literal["", "raw", "normed"] = ""

    @classmethod
    @override
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        return any(
            CHAINED.match(k) or k.endswith(("mtp.fc.weight", ".eh_proj.weight")) for k in keys
        )

    @override
    def read(self, stored: Checkpoint, target: Target) -> "MTPDrafter":
        names = list_mtp_layers(tensor_names(stored.folder, WEIGHT_FILES)) or [
            names_after_last_layer(prefix(target))
        ]
        if self.layers > len(names):
            raise UserError(
                f"mtp: layers is {self.layers}, allowed is what '{stored.folder}' carries: up to {len(names)}"
            )
        names = names[: self.layers or None]
        begins, count = tuple(each["layer."] for each in names), len(names)
        of_layers = {
            k
            for k in tensor_names(stored.folder, WEIGHT_FILES)
            if k.startswith(("mtp.", "model.mtp.")) and _layer(k) < count
        }
        stored = stored.load_tensors(
            wanted=lambda key: key.startswith(begins) or key in of_layers or key == "head.d2t"
        )
        stored.check_sizes("mtp", stored.config.get("text_config") or stored.config, sizes(target))
        sparse = "mtp." not in begins[0] and any(EXPERT.match(k) for k in stored.tensors)
        net = MTPNet(target, sparse, self.draft_vocab, names)
        stored = replace(stored, name=net.name)
        copies = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's
        shared = frozenset(each["layer."] + copy for each in names for copy in copies)
        replace(stored, tensors=stack_experts(stored.tensors)).fill(net, shared)
        ways = [
            way for way in INPUT_VARIANTS if self.first in ("", way[0]) and self.fed in ("", way[1])
        ]
        return self._best(ways, net.to(target.decoder.device), target, stored)

    def _best(
        self, ways: list[tuple[Where, Where]], net: "MTPNet", target: Target, stored: Checkpoint
    ) -> "MTPDrafter":
        """Return the drafter that predicts most of the target's tokens.

        `ways` are the pairs of (`first`, `fed`) to try, see `INPUT_VARIANTS`.
        """
        drafters = [
            MTPDrafter(
                replace(self, first=f, fed=g, layers=net.levels), net.reading(f, g), target, stored
            )
            for f, g in ways
        ]
        if len(ways) == 1:
            return drafters[0]
        tokens, hidden, begin = generate_trial_text(target)
        return max(drafters, key=lambda drafter: drafter.score_text(tokens, hidden, begin))

    @override
    def new(self, target: Target) -> "MTPDrafter":
        check_size("mtp", self.draft_vocab, target)
        net = MTPNet(
            target,
            False,
            self.draft_vocab,
            [names_after_last_layer(prefix(target, k)) for k in range(max(self.layers, 1))],
        )
        config = target.decoder.config.to_diff_dict() | sizes(
            target
        )  # some configs have other names for the sizes
        way = replace(
            self,
            first=self.first or INPUT_VARIANTS[0][0],
            fed=self.fed or INPUT_VARIANTS[0][1],
            layers=net.levels,
        )
        return MTPDrafter(
            way, net.reading(way.first, way.fed), target, Checkpoint(config, name=net.name)
        )


def prefix(target: Target, level: int = 0) -> str:
    """Return the prefix of tensor names of a layer that is stored after the target's last layer.

    `level` is the number of the layer among these layers, from 0.
    """
    return f"model.layers.{int(target.decoder.config.num_hidden_layers) + level}."


def names_after_last_layer(begin: str) -> Mapping[str, str]:
    """Return the names of a layer's parts in checkpoints of DeepSeek-V3 and GLM-4.

    The result maps the prefix of a part's tensors in draftree to the prefix in the checkpoint. The
    layer is stored after the target's last layer. `begin` is the prefix of all names of the layer.
    """
    return {
        "enorm.": f"{begin}enorm.",
        "hnorm.": f"{begin}hnorm.",
        "eh_proj.": f"{begin}eh_proj.",
        "norm.": f"{begin}shared_head.norm.",
        "layer.": begin,
    }


def names_in_qwen3_next(level: int = 0) -> Mapping[str, str]:
    """Return the names of a layer's parts in checkpoints of Qwen3-Next, Qwen3.5 and Mellum.

    The result has the form of `names_after_last_layer`. `level` is the index of the layer. All
    parts except the layers themselves are stored once, for any number of layers.
    """
    return {
        "enorm.": "mtp.pre_fc_norm_embedding.",
        "hnorm.": "mtp.pre_fc_norm_hidden.",
        "eh_proj.": "mtp.fc.",
        "norm.": "mtp.norm.",
        "layer.": f"mtp.layers.{level}.",
    }


def names_in_inkling(begin: str, level: int = 0) -> Mapping[str, str]:
    """Return the names of an MTP layer's parts in checkpoints of Inkling.

    The result has the form of `names_after_last_layer`. All MTP layers have the same `norm.` entry,
    because the checkpoint stores this norm once.

    Args:
        begin: the prefix of all names.
        level: the index of the MTP layer, from 0.
    """
    each = f"{begin}layers.{level}."
    return {
        "enorm.": f"{each}embed_norm.",
        "hnorm.": f"{each}hidden_norm.",
        "eh_proj.": f"{each}input_proj.",
        "norm.": f"{begin}chain_norm.",
        "layer.": f"{each}transformer_block.",
    }


def list_mtp_layers(keys: Set[str]) -> list[Mapping[str, str]]:
    """Return for each MTP layer of a checkpoint the names of the layer's parts.

    `keys` are the names of the checkpoint's tensors.
    """
    if "mtp.fc.weight" in keys:
        return [
            names_in_qwen3_next(level)
            for level in range(max(_layer(key) for key in keys if key.startswith("mtp.")) + 1)
        ]
    if found := [match["begin"] for key in keys if (match := CHAINED.match(key))]:
        return [names_in_inkling(begin, level) for level, begin in enumerate(found)]
    begins = [match["begin"] for key in keys if (match := PROJECTION.match(key))]
    return [names_after_last_layer(begin) for begin in sorted(begins, key=_layer)]


def _layer(key: str) -> int:
    """Return the layer number in a tensor's name; −1 if the name contains none."""
    found = re.match(r".*?\blayers\.(\d+)\.", key)
    return int(found[1]) if found else -1


@torch.inference_mode()
def generate_trial_text(target: Target) -> tuple[Tensor, dict[int, Tensor], int]:
    """Let the target generate a short text.

    Returns:
        The tokens [1, T], their hidden states [1, T, D] keyed by layer, and the index of the first
        generated token.
    """
    text = np.random.default_rng(0).integers(0, target.decoder.vocab, 8)
    with suppress(UserError):  # some have no tokenizer
        opening = np.array(target.tokenizer(TRIAL_PROMPT)["input_ids"], np.int64)
        text = opening if opening.size else text
    cache = target.new_cache(1, len(text) + TRIAL_TOKENS)
    needs = HiddenStateSpec(hidden=(LAST, UNNORMED))
    begin = len(text)
    hidden: dict[int, list[Tensor]] = {layer: [] for layer in needs.hidden}
    for _ in range(TRIAL_TOKENS):
        read = target.prefill(cache, [text], needs)
        text = np.append(text, int(read.logits[0].argmax()))
        for layer, states in hidden.items():
            states.append(read.hidden_states.hidden[layer])
    tokens = torch.from_numpy(text[:-1]).to(target.decoder.device)
    return tokens[None], {layer: torch.cat(states)[None] for layer, states in hidden.items()}, begin


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the weights of all experts stacked, as transformers' modules expect.

    The stacked shapes are gate and up [E, 2 I, D] and down [E, D, I], with E experts of inner size
    I.
    """
    experts = sorted({int(m[2]) for k in tensors if (m := EXPERT.match(k))})
    out = {k: v for k, v in tensors.items() if not EXPERT.match(k)}
    for begin in sorted({m[1] for k in tensors if (m := EXPERT.match(k))}):
        gate, up, down = (
            [tensors[f"{begin}{e}.{part}_proj.weight"] for e in experts]
            for part in ("gate", "up", "down")
        )
        out[f"{begin}gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        )
        out[f"{begin}down_proj"] = torch.stack(down)
    return out


def unstack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `stack_experts`: return the tensors with one set of weights for each expert."""
    out: dict[str, Tensor] = {}
    for key, value in tensors.items():
        for e, expert in (
            enumerate(value) if key.endswith(("experts.gate_up_proj", "experts.down_proj")) else ()
        ):
            begin = key.rsplit(".", 1)[0]
            if key.endswith("down_proj"):
                out[f"{begin}.{e}.down_proj.weight"] = expert
            else:
                out[f"{begin}.{e}.gate_proj.weight"], out[f"{begin}.{e}.up_proj.weight"] = (
                    expert.chunk(2)
                )
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[key] = value
    return out


@final
class MTPNet(PairNet):
    """The MTP layers between the target's embedding and head, one for each depth of a draft.

    Args:
        target: the target; its embedding, LM head and architecture are used.
        sparse: whether the MLPs are mixtures of experts although that of the target's first layer
            is not.
        draft_vocab: V′; 0 for all tokens.
        names: for each layer, the published names of its parts; by default those of one layer after
            the target's last layer. Parts with the same name are shared.

    Raises:
        UserError: the architecture does not have exactly one norm after its layers, or it has other
            weights.
    """

    def __init__(
        self,
        target: Target,
        sparse: bool = False,
        draft_vocab: int = 0,
        names: Sequence[Mapping[str, str]] = (),
    ) -> None:
        super().__init__()
        self._names, made = (
            tuple(names or [names_after_last_layer(prefix(target))]),
            dict[str, nn.Module](),
        )
        self.tap = LAST
        self._normed = False
        self._level = 0
        self._target = target
        self.width, self.levels = target.decoder.hidden_size, len(self._names)
        self.head, layers = TargetHead(target, draft_vocab), []
        for each in self._names:
            layer = MTPLayer(target, sparse)
            for part, name in each.items():
                setattr(layer, part[:-1], made.setdefault(name, getattr(layer, part[:-1])))
            layers.append(layer)
        self.layers, self.shape = nn.ModuleList(layers), layers[0].shape

    def name(self, key: str) -> str:
        """Return the published name of one of this module's tensors."""
        if not key.startswith("layers."):
            return key
        _, level, key = key.split(".", 2)
        names = self._names[int(level)]
        part = next(part for part in names if key.startswith(part))
        return names[part] + key.removeprefix(part)

    def reading(self, first: str, fed: str) -> "MTPNet":
        """Return a shallow copy that shares the weights and reads other hidden states.

        Args:
            first: `raw` for the output of the target's last layer, `normed` for the output of its
                final norm.
            fed: `raw` if the next draft step reads this layer's output, `normed` if it reads the
                output of the norm after it.
        """
        other = copy.copy(self)
        other.tap, other._normed = UNNORMED if first == "raw" else LAST, fed == "normed"
        return other

    @override
    def at(self, level: int) -> "MTPNet":
        if level == self._level:
            return self
        other = copy.copy(self)
        other._level = level
        return other

    @property
    def layer(self) -> "MTPLayer":
        """Return the layer for the current depth."""
        found: Any = self.layers[self._level]
        layer: MTPLayer = found
        return layer

    @override
    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: Cache
    ) -> Tensor:
        embeds = self._target.decoder.embed(tokens).to(features.dtype)
        out: Tensor = self.layer(embeds, features, positions, mask, cache)
        made: Tensor = self.layer.norm(out) if self._normed else out
        return made

    @override
    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        return hidden[self.tap]

    @override
    def logits(self, out: Tensor) -> Tensor:
        logits: Tensor = self.head(out if self._normed else self.layer.norm(out))
        return logits

    @property
    @override
    def draft_vocabulary(self) -> DraftVocab | None:
        return self.head.draft_vocabulary


@final
class MTPLayer(nn.Module):
    """A decoder layer of the target's architecture after a projection of its inputs; see `MTPNet`.

    The projection combines embeddings and hidden states.
    """

    def __init__(self, target: Target, sparse: bool) -> None:
        super().__init__()
        config = target.decoder.config
        inner = CausalLM(one_layer(config, **({"first_k_dense_replace": 0} if sparse else {})))
        check_attends("mtp", inner)
        self.shape, self._hidden_first = (
            inner.shapes[0],
            bool(getattr(config, "mtp_hidden_states_first", False)),
        )
        norms = [m for m in inner.stack.children() if "Norm" in type(m).__name__]
        if len(norms) != 1:
            raise UserError(
                f"mtp: {type(inner.model).__name__} is not supported: it has {len(norms)} norms after its layers, not 1"
            )
        self.enorm = copy.deepcopy(norms[0])
        self.hnorm = copy.deepcopy(norms[0])
        self.norm = norms[0]
        self.eh_proj = nn.Linear(2 * inner.hidden_size, inner.hidden_size, bias=False)
        nn.init.normal_(
            self.eh_proj.weight, std=float(getattr(inner.config, "initializer_range", 0.02))
        )
        stripped: Any = inner.stack
        stripped.set_input_embeddings(nn.Identity())  # the target's is used
        self.layer = inner.layers[0]
        own = {id(p) for part in (self.layer, self.norm) for p in part.parameters()}
        if stray := [name for name, p in stripped.named_parameters() if id(p) not in own]:
            kind = type(inner.model).__name__
            raise UserError(
                f"mtp: {kind} is not supported: beside its layers it has {', '.join(stray)}, allowed is nothing"
            )
        stripped.to(
            target.decoder.device
        )  # including its rotary frequencies, which are not part of this module
        self._by_type, self._cached = inner.hf.by_type, inner.hf.cache_arguments
        self._run = [inner.stack]  # in a list: its weights are `layer` and `norm`

    def forward(
        self, embeds: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: Cache
    ) -> Tensor:
        """Return the layer's output [R, n, D] before the norm after it; see `PairNet.forward`.

        The embeddings and the hidden states (`features`) have the shape [R, n, D].
        """
        pair = self.enorm(embeds), self.hnorm(features)
        x, out = (
            self.eh_proj(torch.cat(pair[::-1] if self._hidden_first else pair, dim=-1)),
            list[Tensor](),
        )
        hook = self.layer.register_forward_hook(
            lambda _m, _i, o: out.append(o if isinstance(o, Tensor) else o[0])
        )
        # It may have been replaced by a native one.
        self._run[0].get_submodule("layers").register_module("0", self.layer)
        try:
            self._run[0](
                inputs_embeds=x,
                position_ids=positions,
                attention_mask=self._by_type(mask),
                **self._cached(cache),
            )
        finally:
            hook.remove()
        return out[0]


@final
class MTPDrafter(PairDrafter):
    """Drafts with the MTP layers.

    A layer reads its own output in place of hidden states of the target that are not known yet.
    """

    knobs: MTP
    model: MTPNet

    @property
    @override
    def needs(self) -> HiddenStateSpec:
        return HiddenStateSpec(hidden=(self.model.tap,))

    @override
    def fit_vocabulary(self, counts: Ints) -> None:
        self.model.head.fit_vocabulary(counts)

    @override
    def loss(self, batch: Batch) -> Tensor:
        at, total = predicting_positions(batch.learn), torch.zeros((), device=batch.tokens.device)
        levels, drafted = self.model.levels, self.model.draft_vocabulary
        steps = max(self.knobs.steps, levels)
        for j, (out, known) in enumerate(
            self.training_time_test(batch, self._features(batch), steps)
        ):
            chosen = at & known
            logits = self.model.at(min(j, levels - 1)).logits(out[chosen])
            total = total + draft_loss(self.knobs.loss, batch, logits, chosen, drafted)
        return total / steps

    @torch.inference_mode()
    def score_text(
        self, tokens: Tensor, hidden: dict[int, Tensor], begin: int
    ) -> tuple[int, float]:
        """Return how many tokens of a text the drafter predicts, and the sum of their log q.

        A token is predicted if it is the most likely one. Only tokens from index `begin` on count.

        Args:
            tokens: [1, T] the text.
            hidden: [1, T, D] the target's hidden states, keyed by layer.
            begin: index of the first token that counts.
        """
        batch = Batch(
            tokens,
            torch.zeros_like(tokens, dtype=torch.bool),
            hidden,
            {},
            lambda at, ids=None: at,
            (),
            1.0,
        )
        log_q = (
            self.forward(batch, TRIAL_BLOCK_TOKENS, 0)[0, begin - 1 : -1].float().log_softmax(-1)
        )
        true = tokens[0, begin:, None]
        return int((log_q.argmax(-1, keepdim=True) == true).sum()), float(
            log_q.gather(1, true).sum()
        )

    @override
    def to_published_layout(
        self, config: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return config, unstack_experts(tensors)
