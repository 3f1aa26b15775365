"""The network of block drafters (DFlash, DSpark, JetSpec): one pass drafts a block.

The root and a mask token in every other slot go through a few layers (of Qwen3's kind). Committed
tokens come in as keys and values alone, which each layer computes of the target's own hidden
states, fused; these are cached, and of a block nothing is kept. All candidates of a step follow
from that one pass, for any tree of drafts.

Shapes: R slots, n slots of a block, H key-value heads, D hidden size, D′ that of the target, V and
V′ (draft) vocabulary, S slots of the cache.
"""

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, rotate_half

from draftree.drafters.neural.draft_configs import of_values, stored_shape
from draftree.drafters.neural.draft_masks import additive
from draftree.drafters.neural.draft_vocabulary import vocabulary_from_offsets
from draftree.drafters.neural.layer_stack import apply_layers, initialise
from draftree.drafters.neural.rotary import Rotary
from draftree.drafters.neural.target_modules import TargetHead
from draftree.formats.block_drafters import EMBEDDING_WEIGHT, HEAD_WEIGHT, BlockDrafterConfig, Sight
from draftree.target.target import Target
from draftree.tree import DraftVocab

Init = Literal["target", "scratch"]


def select_fused_layers(target: Target, count: int) -> tuple[int, ...]:
    """Return the indices of the `hidden_states` of a target that are fused.

    They are spread evenly below the output of the last layer, as in published checkpoints. With 36
    layers they are the outputs of layers 1, 9, 17, 25 and 33, counted from 0.
    """
    layers = int(target.decoder.config.num_hidden_layers)
    low, high = (1, layers - 3) if layers >= count + 3 else (0, max(layers - 2, 0))
    return tuple(int(i) + 1 for i in np.unique(np.linspace(low, high, count).round()))


@final
class OwnHead(nn.Linear):
    """The LM head of a checkpoint, for all tokens or for a draft vocabulary.

    It is not trained.

    Args:
        width: D, the hidden size.
        size: V′, the number of tokens of the head.
        vocab: V, if the checkpoint has a map from V′ to V; otherwise None.
        target: the target.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, width: int, size: int, vocab: int | None, target: Target) -> None:
        super().__init__(width, size, bias=False)
        self.requires_grad_(False)
        self.register_buffer("d2t", None if vocab is None else torch.zeros(size, dtype=torch.long))
        self.register_buffer("t2d", None if vocab is None else torch.zeros(vocab, dtype=torch.bool))
        self._target = target

    @property
    def draft_vocabulary(self) -> DraftVocab | None:
        """Return the draft vocabulary; None if all tokens can be drafted."""
        return vocabulary_from_offsets(self.d2t, self._target)


class ParallelNet(nn.Module):
    """The layers between the target's embedding and LM head, with the tensor names of z-lab.

    Args:
        layout: the layout of the checkpoint.
        target: the target. Its embedding and head are used if the checkpoint contains none.
        own: the checkpoint's tensors by name, which may include an embedding and a head.

    Attributes:
        layout: the layout, in which the mask token is chosen when training begins.
    """

    def __init__(
        self, layout: BlockDrafterConfig, target: Target, own: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        config = of_values(layout.values, Qwen3Config)
        assert isinstance(config, Qwen3Config)
        size = int(config.hidden_size)
        self.config = config
        self.layout = layout
        self._target = target
        self.fc = nn.Linear(len(layout.reads) * target.decoder.hidden_size, size, bias=False)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(len(layout.sights)))
        self.hidden_norm, self.norm = (
            Qwen3RMSNorm(size, eps=config.rms_norm_eps) for _ in range(2)
        )
        self.rotary, self.shape = Rotary(config), stored_shape(config)
        self.embed_tokens = (
            nn.Embedding(target.decoder.vocab, size).requires_grad_(False)
            if EMBEDDING_WEIGHT in own
            else None
        )
        mapped = target.decoder.vocab if layout.draft_vocab else None
        head = (
            OwnHead(size, len(own[HEAD_WEIGHT]), mapped, target)
            if HEAD_WEIGHT in own
            else TargetHead(target, layout.draft_vocab)
        )
        self.lm_head: OwnHead | TargetHead = head

    @property
    def draft_vocabulary(self) -> DraftVocab | None:
        """Return the tokens that can be drafted; None for all."""
        return self.lm_head.draft_vocabulary

    def head(self, states: Tensor) -> Tensor:
        """Return the logits […, V′] for the final norm's output […, D]."""
        logits: Tensor = self.lm_head(states)
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [R, n, D] of tokens [R, n].

        Further computations that some targets apply to their embeddings are omitted.
        """
        outer: Any = self._target.decoder.model
        table = outer.get_input_embeddings() if self.embed_tokens is None else self.embed_tokens
        return nn.functional.embedding(tokens, table.weight).to(self.norm.weight.dtype)

    def context(
        self, hidden: Mapping[int, Tensor], positions: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return a list with the keys and values of committed tokens for each layer.

        Keys and values are [R, H, n, width], for n tokens of R sequences and H heads.

        Args:
            hidden: the target's hidden states [R, n, D′] of the tokens, by index of their entry.
            positions: the positions of the tokens.
        """
        fused = self.hidden_norm(
            self.fc(torch.cat([hidden[layer] for layer in self.layout.reads], dim=-1))
        )
        cos, sin = (t[:, None] for t in self.rotary(fused, positions))
        found = []
        for layer in self.layers:
            attention: Any = layer.self_attn
            heads = (*fused.shape[:-1], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(fused).view(heads)).transpose(1, 2)
            values = attention.v_proj(fused).view(heads).transpose(1, 2)
            found.append((keys * cos + rotate_half(keys) * sin, values))
        return found

    def forward(
        self, tokens: Tensor, positions: Tensor, keys: Tensor, there: Tensor, cache: Cache
    ) -> Tensor:
        """Return the final norm's output [R, n, D] in every slot.

        Args:
            tokens: [R, n] the tokens in the slots.
            positions: [R, n] the positions of the slots.
            keys: [R, S] the positions of all keys in the cache, including those of the slots.
            there: [R, n, S] whether a key belongs to the slot's text and block.
            cache: the cache of committed tokens; the keys and values of the slots are added.
        """
        x = self.embed(tokens)
        rotated = self.rotary(x, positions)
        masks = {
            sight: additive(_visible_keys(sight, positions, keys, there)[:, None], x.dtype)
            for sight in set(self.layout.sights)
        }
        layers = zip(self.layers, self.layout.sights, strict=True)
        for sight, same in groupby(layers, key=itemgetter(1)):
            x = apply_layers([layer for layer, _ in same], x, rotated, masks[sight], cache)
        out: Tensor = self.norm(x)
        return out

    def begin(self, init: Init) -> None:
        """Initialise the weights at random or, with `target`, from the target if the shapes fit.

        The final norm is copied from the target in either case, if its shape fits.

        With `target`, the layers are copies of successive layers of the target. The first of these
        is the layer whose input is the last of the fused hidden states. The fusion then passes on
        this hidden state alone, so that keys and values of the context equal the target's, except
        for the norm of each head.

        Args:
            init: `target` to copy the target's layers, or `scratch` for random weights.
        """
        initialise(self, self.config)
        theirs = [m for m in self._target.decoder.stack.children() if "Norm" in type(m).__name__]
        if len(theirs) == 1:
            _copy_weights(self.norm, theirs[0].state_dict())
        first, layers = self.layout.reads[-1], self._target.decoder.layers
        if (
            init == "target"
            and self.fc.in_features == len(self.layout.reads) * self.fc.out_features
        ):
            values = [
                layers[min(first + i, len(layers) - 1)].state_dict()
                for i in range(len(self.layers))
            ]
            if all(
                _copy_weights(layer, _add_head_norms(some, self.config.head_dim))
                for layer, some in zip(self.layers, values, strict=True)
            ):
                self.hidden_norm.load_state_dict(self.layers[0].input_layernorm.state_dict())  # type: ignore[union-attr]
                nn.init.zeros_(self.fc.weight)
                nn.init.eye_(self.fc.weight.data[:, -self.fc.out_features :])


def _copy_weights(part: nn.Module, values: Mapping[str, Tensor]) -> bool:
    """Copy weights if all names and shapes are equal, and return whether they were copied."""
    fits = {name: values[name].shape if name in values else None for name in part.state_dict()}
    same = all(fits[name] == own.shape for name, own in part.state_dict().items())
    if same and not any(values[name].is_meta for name in fits):
        part.load_state_dict({name: values[name].float() for name in fits})
        return True
    return False


def _add_head_norms(layer: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Return a layer's weights by name, with norms of queries and keys.

    If the layer has no such norms, their weights are chosen to keep the usual size of queries and
    keys. Without a norm, an entry of W(g ∘ x) has the variance Σⱼ (W g)ⱼ² if the entries of x are
    independent and of size 1.
    """
    found = dict(layer)
    for part in ("q", "k"):
        weight, gain = (
            layer.get(f"self_attn.{part}_proj.weight"),
            layer.get("input_layernorm.weight"),
        )
        if f"self_attn.{part}_norm.weight" not in found and weight is not None and gain is not None:
            size = (weight.float() * gain.float()).square().sum(1).mean().sqrt()
            found[f"self_attn.{part}_norm.weight"] = size.expand(width)
    return found


def _visible_keys(sight: Sight, positions: Tensor, keys: Tensor, there: Tensor) -> Tensor:
    """Return whether each position may attend to each key, [R, n, S]."""
    back = positions[:, :, None] - keys[:, None, :]
    seen = there & (back >= 0) if sight.causal else there
    return seen if sight.window is None else seen & (back.abs() < sight.window)
