"""Report which layer kinds of a target are not batch invariant, and the cost of making them so."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from draftree.models.batch_invariant_model import LayerKind
from draftree.models.invariant_widths import Widths
from draftree.target.batch_invariance_choice import (
    MAX_DEFAULT_SLOWDOWN,
    PROBE_CONTEXT,
    price,
    probe_batch_invariance,
)
from draftree.target.target import Target
from draftree.utils.hardware import time_interleaved
from draftree.utils.progress_callback import Tell, ignore_progress

REPORTED_WIDTHS, REPORTED_CONTEXTS = (1, 16), (256, 2048, 8000)
"""Numbers of tokens in the passes whose costs are reported, and numbers of context tokens before
them."""
MAX_LAYER_SECONDS = 0.2
"""Time limit in seconds for timing one kind of layer."""


@dataclass(frozen=True)
class Layer:
    """Store the findings on one kind of layer.

    Attributes:
        name: class of the layer, size of its input, and shapes of its weights.
        count: number of layers of this kind in a pass.
        stable: description of the numbers of tokens in a pass for which each token's output is
            bitwise reproducible.
        done: description of what is done for other numbers of tokens.
        seconds: seconds that all layers of this kind take for one token in the unchanged model;
            None if they were not timed.
        more: additional seconds with the changes that make them reproducible.
    """

    name: str
    count: int
    stable: str
    done: str
    seconds: float | None
    more: float | None


@dataclass(frozen=True)
class Price:
    """Store the additional time of a bitwise reproducible pass as a share of the usual time.

    The pass reads `width` tokens after `context` tokens.
    """

    context: int
    width: int
    share: float


@dataclass(frozen=True)
class ExactReport:
    """Store the result of examining a target.

    Attributes:
        layers: findings by kind of layer.
        parting: description of the cases in which results still depend on how a text is divided
            into passes; None for no such case.
        prices: additional time of passes; empty if the target cannot be made bitwise reproducible.
        default: guarantee that weights in half precision get by default: `bits` or `ties`.
    """

    layers: Sequence[Layer]
    parting: str | None
    prices: Sequence[Price]
    default: str

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dictionary with its fields as keys."""
        return asdict(self)


@torch.inference_mode()
def examine(target: Target, tell: Tell = ignore_progress) -> ExactReport:
    """Examine whether a target's logits are bitwise reproducible, layer by layer.

    Args:
        target: the target, loaded with `exactness="ties"`, so that the model's own attention runs.
        tell: called with a description of the current work.
    """
    decoder = target.decoder
    tell(0, "comparing its layers at many widths")
    stable, found = probe_batch_invariance(decoder, priced=True)
    tell(0, "timing its layers")
    layers = [examine_layer(name, kind, decoder.device) for name, kind in stable.kinds.items()]
    prices = []
    if found.lacks is None:
        for context in (
            c for c in REPORTED_CONTEXTS if c + max(REPORTED_WIDTHS) <= decoder.context
        ):
            for width in REPORTED_WIDTHS:
                tell(0, f"timing a pass over {width} behind {context:,}")
                known = (
                    found.price if (context, width) == (PROBE_CONTEXT, 1) else None
                )  # which decides, and is not measured again
                prices.append(
                    Price(
                        context,
                        width,
                        price(decoder, stable, width, context) if known is None else known,
                    )
                )
    cheap = found.price is not None and found.price <= MAX_DEFAULT_SLOWDOWN
    return ExactReport(layers, found.parting, prices, "bits" if cheap else "ties")


def examine_layer(name: str, kind: LayerKind, device: torch.device) -> Layer:
    """Time one kind of layer, and return the findings on it."""
    words = describe_layer(kind.widths)
    if not kind.args:
        return Layer(name, kind.count, *words, None, None)
    own, ours = time_interleaved(
        [partial(kind.own, *kind.args), partial(kind.ours, *kind.args)], device, MAX_LAYER_SECONDS
    )
    changed = kind.ours is not kind.own
    return Layer(
        name, kind.count, *words, own * kind.count, (ours - own) * kind.count if changed else 0.0
    )


def describe_layer(widths: Widths | None) -> tuple[str, str]:
    """Describe the widths at which a layer is reproducible, and the handling of other widths.

    A width is the number of tokens in a pass.
    """
    if widths is None:
        return "at none that was tried", "nothing helps"
    if widths == Widths():
        return "at all", "nothing"
    if widths.most == widths.multiple:
        return f"in blocks of {widths.multiple}", f"cut into blocks of {widths.multiple}"
    least, most = widths.padded_width(1), widths.most
    told = [
        f"from {least} on" if least > 1 else "",
        f"multiples of {widths.multiple}" if widths.multiple > 1 else "",
    ]
    told += [f"up to {most}" if most else ""]
    done = [f"padded to {least}" if least > 1 else "", f"cut at {most}" if most else ""]
    return ", ".join(filter(None, told)), ", ".join(filter(None, done))
