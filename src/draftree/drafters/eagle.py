"""EAGLE and EAGLE-2's draft model: one layer that extrapolates hidden states (Li et al. 2024).

The feature is what the target's LM head reads. A linear layer fuses the embedding of token t + 1
with the feature of token t, a decoder layer without input norm makes the feature of token t + 1 of
it, and the target's own head turns that into a draft distribution. Embedding and head are the
target's and are not trained.

Shapes: R rows, n tokens a row, B batch, T tokens, M learnt positions, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from typing_extensions import override

from draftree.drafters.base import Batch, Stage, TrainableMethod
from draftree.drafters.neural.draft_configs import (
    export_config,
    make_one_layer_config,
    of_values,
    stored_shape,
)
from draftree.drafters.neural.draft_vocabulary import check_size
from draftree.drafters.neural.feature_drafter import PairDrafter
from draftree.drafters.neural.feature_model_interface import PairNet
from draftree.drafters.neural.layer_stack import apply_layers, initialise
from draftree.drafters.neural.losses import (
    predicting_positions,
    select_target_logits,
    soft_cross_entropy,
)
from draftree.drafters.neural.rotary import Rotary
from draftree.drafters.neural.target_modules import TargetHead
from draftree.formats import speculators
from draftree.formats.checkpoint import Checkpoint, sizes
from draftree.formats.speculators import EMBEDDING_WEIGHT
from draftree.target.target import LAST, HiddenStateSpec, Target
from draftree.tree import DraftVocab, Ints
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class EAGLE(TrainableMethod):
    """EAGLE's draft model; EAGLE-2 shares its weights.

    Attributes:
        feature_weight: weight of the smooth-L1 loss between drafted and true features.
        token_weight: weight of the soft cross-entropy with the target's distribution.
        noise: amplitude of uniform noise that is added to features in training. It is multiplied by
            512 / T for texts of T > 512 tokens.
        bias: whether the fusing layer has a bias, as in the paper's checkpoints. vLLM supports only
            checkpoints without it.
        steps: number of training passes, each of which reads the output of the pass before, as in
            HASS; 1 is the training of EAGLE.
        draft_vocab: V′, the number of tokens that can be drafted; 0 for all, as in the paper.
        top_k: K of HASS's top-K loss (arXiv 2408.15766, section 3.2), which is −Σ p log q over the
            K most likely tokens by the target. 0 omits the loss; HASS uses 10.
        top_weight: weight of the top-K loss.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=20,
            batch_size=4,
            lr=3e-5,
            schedule="linear",
            floor=0,
            warmup=0.0025,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            clip=0.5,
            clip_by="value",
            max_tokens=2048,
            loss="smooth L1 of features + 0.1 · cross-entropy with the target",
            source="the official code, whose rate falls over 800,000 steps; rate, betas and clipping also the paper",
        ),
    )
    formats = ("speculators", "eagle", "vllm-eagle")
    own_policy = "eagle2"

    feature_weight: float = knob(1.0, least=0)
    token_weight: float = knob(0.1, least=0)
    noise: float = knob(0.1, least=0)
    steps: int = knob(1, least=1)
    bias: bool = True
    draft_vocab: int = knob(0, least=0)
    top_k: int = knob(0, least=0)
    top_weight: float = knob(1.0, least=0)

    @classmethod
    @override
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        if speculators.KIND in config:
            return bool(config[speculators.KIND] == "eagle")
        others = {"hidden_norm.weight", "mask_hidden"}  # of drafters of blocks
        return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= keys and not others & keys

    @override
    def read(self, stored: Checkpoint, target: Target) -> "EAGLEDrafter":
        stored, config = speculators.load_checkpoint(stored, "eagle")
        stored.check_sizes("eagle", config, sizes(target))
        bias, embedding = config.get("bias", True), EMBEDDING_WEIGHT in stored.tensors
        net = stored.network(
            lambda: EAGLENet(of_values(config), target, bias, embedding, self.draft_vocab)
        )
        return EAGLEDrafter(replace(self, bias=bias), net, target, stored)

    @override
    def new(self, target: Target) -> "EAGLEDrafter":
        check_size("eagle", self.draft_vocab, target)
        config = make_one_layer_config(target.decoder.config)
        net = EAGLENet(config, target, self.bias, embedding=False, draft_vocab=self.draft_vocab)
        initialise(net, config)
        return EAGLEDrafter(
            self,
            net,
            target,
            Checkpoint(export_config(config, "LlamaForCausalLM") | {"bias": self.bias}),
        )


@final
class EAGLENet(PairNet):
    """The draft model, with the parameter names of published checkpoints.

    Args:
        config: the config of the decoder layer.
        target: the target, whose embedding and LM head are used.
        bias: whether the fusing layer has a bias.
        embedding: whether the checkpoint contains an embedding.
        draft_vocab: V′, the number of tokens that can be drafted; 0 for all.
    """

    def __init__(
        self, config: LlamaConfig, target: Target, bias: bool, embedding: bool, draft_vocab: int = 0
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=bias)
        first: Any = LlamaDecoderLayer(config, 0)
        first.input_layernorm = nn.Identity()
        if getattr(
            config, "qkv_bias", False
        ):  # as in Qwen2; transformers' Llama would also give the output a bias
            attention = first.self_attn
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(attention, name)
                setattr(attention, name, nn.Linear(old.in_features, old.out_features))
        self.layers = nn.ModuleList([first])
        self.rotary = Rotary(config)
        self.shape = stored_shape(config)
        self.width = size
        self._target = target
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, size).requires_grad_(False) if embedding else None
        )
        self.head = TargetHead(target, draft_vocab)

    @override
    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: Cache
    ) -> Tensor:
        embed: Callable[[Tensor], Tensor] = self.embed_tokens or self._target.decoder.embed
        x = self.fc(torch.cat((embed(tokens).to(features.dtype), features), dim=-1))
        return apply_layers(self.layers, x, self.rotary(x, positions), mask, cache)

    @override
    def logits(self, out: Tensor) -> Tensor:
        logits: Tensor = self.head(out)
        return logits

    @property
    @override
    def draft_vocabulary(self) -> DraftVocab | None:
        return self.head.draft_vocabulary


@final
class EAGLEDrafter(PairDrafter):
    """Drafts features, and computes tokens from them."""

    knobs: EAGLE
    model: EAGLENet
    needs = HiddenStateSpec(hidden=(LAST,))

    @override
    def fit_vocabulary(self, counts: Ints) -> None:
        self.model.head.fit_vocabulary(counts)

    @override
    def loss(self, batch: Batch) -> Tensor:
        true = self._features(batch)
        at, total = predicting_positions(batch.learn), torch.zeros((), device=true.device)
        wanted = select_target_logits(batch, at, self.model.draft_vocabulary)
        for out, known in self.training_time_test(
            batch, true + self._noise(batch), self.knobs.steps
        ):
            chosen = at & known
            feature = (
                smooth_l1_loss(out[chosen].float(), true[chosen].float(), reduction="sum")
                / out.shape[-1]
            )
            logits, theirs = self.model.logits(out[chosen]), wanted[chosen[at]]
            total = (
                total
                + self.knobs.feature_weight * feature
                + self.knobs.token_weight * soft_cross_entropy(theirs, logits)
            )
            if self.knobs.top_k:
                total = total + self.knobs.top_weight * soft_cross_entropy(
                    theirs, logits, self.knobs.top_k
                )
        return total / (batch.count * self.knobs.steps)

    def _noise(self, batch: Batch) -> Tensor:
        """Return uniform noise [B, T, D], as in the paper; it is weaker in long texts.

        The official code scales the noise by 512 / T for any T, and trains with texts of up to
        2,048 tokens. On short texts the noise would then be far stronger than U(−0.1, 0.1) in the
        paper.
        """
        true, noise = batch.hidden[LAST], torch.zeros(batch.hidden[LAST].shape)
        for row, generator in enumerate(batch.generators):
            length = int(batch.learn[row].nonzero().max()) + 1 if batch.learn[row].any() else 1
            drawn = torch.rand(length, true.shape[-1], generator=generator) - 0.5
            noise[row, :length] = 2 * self.knobs.noise * drawn * min(1, 512 / length)
        return noise.to(true)
