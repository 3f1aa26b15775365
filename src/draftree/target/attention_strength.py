"""Measure how much each layer's attention contributes to its output.

Shapes: B batch (1 here), T tokens, D hidden size, L layers.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.models.model_config import SLIDING
from draftree.tree import Ints
from draftree.utils.hardware import has_float64

AUTO: Literal["auto"] = "auto"
"""The value of a drafter's option that lets this measurement choose the layer to read."""
MIN_OUTPUT_NORM = 0.1
"""Share of the residual stream's norm below which attention has almost no effect."""
READ_TEXTS, TOKENS_PER_TEXT = 8, 512
"""Number of texts that are read; `TOKENS_PER_TEXT` is the number of tokens of each."""


@dataclass(frozen=True)
class Attending:
    """The strength of a layer's attention, a mean over the second half of several texts.

    Attributes:
        output: the norm of the attention's contribution to the residual stream, divided by the norm
            of that stream before it.
        entropy: the entropy of the attention weights divided by log n, where n is the number of
            visible keys; 1 for uniform weights, 0 for a single key.
    """

    output: float
    entropy: float

    @property
    def dead(self) -> bool:
        """Return whether the attention has almost no effect; False if the measurement is NaN."""
        return self.output < MIN_OUTPUT_NORM


@torch.inference_mode()
def measure_attention(decoder: CausalLM, texts: Sequence[Ints]) -> tuple[Attending, ...]:
    """Return the strength of attention in each of the L layers.

    It is measured on several of the texts, chosen at even intervals.

    Args:
        decoder: a model whose layers consist of one attention and a feed-forward part.
        texts: token ids of each text; a text is cut to `TOKENS_PER_TEXT` tokens.

    Raises:
        UserError: no text has two tokens, or the attention cannot be separated from the rest of a
            layer.
    """
    most = min(TOKENS_PER_TEXT, decoder.context)
    fit = [t[:most] for t in texts if len(t) > 1]
    if not fit:
        raise UserError(
            "the attention of the target's layers is measured on texts of at least 2 tokens, and none is given"
        )
    count = min(READ_TEXTS, len(fit))
    watches = [_Watch(decoder, i) for i in range(len(decoder.layers))]
    with ExitStack() as stack:
        stack.callback(
            setattr, decoder.config, "_attn_implementation", decoder.config._attn_implementation
        )
        decoder.config._attn_implementation = "eager"  # returns attention weights
        for watch in watches:
            stack.callback(
                watch.layer.register_forward_hook(watch.measure, with_kwargs=True).remove
            )
        for text in (fit[i * len(fit) // count] for i in range(count)):
            ids = torch.from_numpy(np.asarray(text, np.int64))[None].to(decoder.device)
            cast(Any, decoder.stack)(input_ids=ids, use_cache=False, **decoder.hf.causal(ids))
    return tuple(watch.mean for watch in watches)


class _Watch:
    """Measure a layer's attention in every pass.

    The layer is run a second time with a feed-forward part that returns zeros. The difference
    between its output and input is then the contribution of attention. This holds wherever the
    architecture has its norms and scales, and whether or not both parts read the same input.
    """

    def __init__(self, decoder: CausalLM, index: int) -> None:
        self.layer = decoder.layers[index]
        mixing = [
            m for m in self.layer.children() if any(p.dim() > 1 for p in m.parameters())
        ]  # all others are norms
        attention = [m for m in mixing if type(m).__name__.endswith("Attention")]
        if len(attention) != 1:
            name = type(decoder.model).__name__
            raise UserError(
                f"how much the layers of {name} attend cannot be measured: {len(attention)} attentions in one"
            )
        self._attention = attention[0]
        self._others = [m for m in mixing if m is not self._attention]
        sliding = not decoder.hf.layer_types or decoder.hf.layer_types[index] == SLIDING
        self._window = decoder.hf.window if sliding and decoder.hf.window is not None else math.inf
        self._outputs: list[Tensor] = []
        self._entropies: list[Tensor] = []

    def measure(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any
    ) -> None:
        """Measure attention's contribution and the entropy of its weights, as a forward hook."""
        weights: list[Tensor] = []
        with ExitStack() as stack:
            stack.callback(
                self._attention.register_forward_hook(
                    lambda _m, _i, out: weights.append(out[1])
                ).remove
            )
            for other in self._others:
                stack.callback(
                    other.register_forward_hook(lambda _m, _i, out: _nothing(out)).remove
                )
            # Neither a call, which would come back here, nor a compiled forward, which runs no
            # attention module.
            out = type(layer).forward(layer, *args, **kwargs)
        before, after = map(_precise, (args[0], out[0] if isinstance(out, tuple) else out))
        half = before.shape[1] // 2
        self._outputs.append(((after - before).norm(dim=-1) / before.norm(dim=-1))[0, half:])
        self._entropies.append(self._entropy(weights[0], half))

    def _entropy(self, weights: Tensor, half: int) -> Tensor:
        """Return the entropy [T − half] of weights [1, heads, T, T], divided by its maximum."""
        seen = np.minimum(np.arange(half, weights.shape[2]) + 1, self._window)
        found: Tensor = torch.special.entr(_precise(weights[0, :, half:])).sum(-1).mean(0)
        return found / torch.from_numpy(np.log(seen)).to(found)

    @property
    def mean(self) -> Attending:
        """Return the means over all measured tokens."""
        return Attending(
            *(float(torch.cat(each).mean()) for each in (self._outputs, self._entropies))
        )


def _precise(values: Tensor) -> Tensor:
    """Convert values to float64, or to float32 on devices without float64."""
    return values.double() if has_float64(values.device) else values.float()


def _nothing(out: Any) -> Any:
    """Return a module's output with zeros in place of its tensor, or of the first of a tuple."""
    return (torch.zeros_like(out[0]), *out[1:]) if isinstance(out, tuple) else torch.zeros_like(out)
