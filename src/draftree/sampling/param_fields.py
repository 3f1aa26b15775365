"""Sampling fields that `Sampling`, `Options` and the command line share."""

from dataclasses import dataclass
from functools import partial

from draftree.utils.validated_dataclass import Knobs, knob

choice = partial(knob, panel="Sampling")
"""Define a field that command-line help lists in the panel "Sampling"."""


@dataclass(frozen=True)
class Choice(Knobs):
    """Declare the options that choose a token from the target's logits; see `Sampling`."""

    temperature: float = choice(0.0, least=0, panel=None, short="-t", help="0 for greedy decoding.")
    top_k: int = choice(0, least=0, help="Sample from the K likeliest tokens; 0 for all.")
    top_p: float = choice(
        1.0,
        above=0,
        most=1,
        help="Sample from the likeliest tokens whose probabilities add up to this.",
    )
    min_p: float = choice(
        0.0,
        least=0,
        most=1,
        help="Leave out tokens below this share of the likeliest token's probability.",
    )
    typical_p: float = choice(
        1.0,
        above=0,
        most=1,
        help="Sample from the most typical tokens whose probabilities add up to this.",
    )
    seed: int = choice(0, least=0, most=2**64 - 1, short="-s", help="Seed of all random choices.")
