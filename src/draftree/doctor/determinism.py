"""Report which layer kinds of a target are not batch invariant, and the cost of making them so."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from draftree.models.batch_invariant import Kind
from draftree.models.invariant_widths import Widths
from draftree.target.exactness import CHEAP, CONTEXT, looked_into, price
from draftree.target.target import Target
from draftree.utils.hardware import interleaved
from draftree.utils.progress import Tell, silent

WIDTHS, CONTEXTS = (1, 16), (256, 2048, 8000)
"""Tokens of a pass whose cost is reported, and tokens of the context before it."""
LONGEST = 0.2
"""Seconds in which a kind of layer is timed."""


@dataclass(frozen=True)
class Layer:
    """Describe a kind of layer.

    Attributes:
        name: its class, the entries of a row, and the shapes of its weights.
        count: number of such layers in a pass.
        stable: widths of a pass at which a row is bitwise reproducible, in words.
        done: how other widths are handled.
        seconds: seconds of all of them in a step over one token, unchanged.
        more: additional seconds of that handling.
    """

    name: str
    count: int
    stable: str
    done: str
    seconds: float | None
    more: float | None


@dataclass(frozen=True)
class Price:
    """Store how much longer a bitwise reproducible pass takes, as a share of the model's own."""

    context: int
    width: int
    share: float


@dataclass(frozen=True)
class ExactReport:
    """Store the result for a target.

    Attributes:
        layers: findings by kind of layer.
        parting: where a text's bits still depend on how it is divided into passes.
        prices: additional cost of passes; empty where they cannot be bitwise reproducible.
        default: guarantee for weights in half precision where none is requested.
    """

    layers: Sequence[Layer]
    parting: str | None
    prices: Sequence[Price]
    default: str

    def as_json(self) -> dict[str, Any]:
        """Return the report by the names of its parts."""
        return asdict(self)


@torch.inference_mode()
def examine(target: Target, tell: Tell = silent) -> ExactReport:
    """Examine whether a target's logits are bitwise reproducible, layer by layer.

    Args:
        target: loaded with its own attention.
        tell: called with the current work.
    """
    decoder = target.decoder
    tell(0, "trying its layers at many widths")
    stable, found = looked_into(decoder, priced=True)
    tell(0, "timing its layers")
    layers = [layer(name, kind, decoder.device) for name, kind in stable.kinds.items()]
    prices = []
    if found.lacks is None:
        for context in (c for c in CONTEXTS if c + max(WIDTHS) <= decoder.context):
            for width in WIDTHS:
                tell(0, f"timing a pass over {width} behind {context:,}")
                known = (
                    found.price if (context, width) == (CONTEXT, 1) else None
                )  # which decides, and is not measured again
                prices.append(
                    Price(
                        context,
                        width,
                        price(decoder, stable, width, context) if known is None else known,
                    )
                )
    cheap = found.price is not None and found.price <= CHEAP
    return ExactReport(layers, found.parting, prices, "bits" if cheap else "ties")


def layer(name: str, kind: Kind, device: torch.device) -> Layer:
    """Return the timed findings on one kind of layer."""
    words = described(kind.widths)
    if not kind.args:
        return Layer(name, kind.count, *words, None, None)
    own, ours = interleaved(
        [partial(kind.own, *kind.args), partial(kind.ours, *kind.args)], device, LONGEST
    )
    changed = kind.ours is not kind.own
    return Layer(
        name, kind.count, *words, own * kind.count, (ours - own) * kind.count if changed else 0.0
    )


def described(widths: Widths | None) -> tuple[str, str]:
    """Return the widths at which rows keep their bits, and what is done about others, in words."""
    if widths is None:
        return "at none that was tried", "nothing helps"
    if widths == Widths():
        return "at all", "nothing"
    if widths.most == widths.multiple:
        return f"in blocks of {widths.multiple}", f"cut into blocks of {widths.multiple}"
    least, most = widths.padded(1), widths.most
    told = [
        f"from {least} on" if least > 1 else "",
        f"multiples of {widths.multiple}" if widths.multiple > 1 else "",
    ]
    told += [f"up to {most}" if most else ""]
    done = [f"padded to {least}" if least > 1 else "", f"cut at {most}" if most else ""]
    return ", ".join(filter(None, told)), ", ".join(filter(None, done))
