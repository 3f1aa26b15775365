"""The numbers by which tokens are chosen: the fields that `Sampling`, `Options` and the command line have in common."""

from dataclasses import dataclass

from draftree.boundary.knobs import Knobs, knob

PANEL = "How tokens are chosen"
"""The part of a command's help that explains them."""


@dataclass(frozen=True)
class Choice(Knobs):
    """How a token is chosen by the target's logits; explained at `Sampling`."""

    temperature: float = knob(0.0, least=0, help="0 for greedy decoding.", panel=PANEL)
    top_k: int = knob(0, least=0, help="How many of the likeliest tokens are kept; 0 keeps all.", panel=PANEL)
    top_p: float = knob(1.0, above=0, most=1, help="The least mass of likeliest tokens that is kept.", panel=PANEL)
    min_p: float = knob(
        0.0, least=0, most=1, help="The least probability kept, relative to the likeliest token's.", panel=PANEL
    )
    typical_p: float = knob(1.0, above=0, most=1, help="The least mass of the most typical tokens that is kept.", panel=PANEL)
    seed: int = knob(0, least=0, most=2**64 - 1, help="Of everything that is drawn.", panel=PANEL)
