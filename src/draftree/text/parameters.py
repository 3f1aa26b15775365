"""The fields of `Options` with their ranges and help texts; free of torch, so that the command line has them at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from draftree.boundary.knobs import Knobs, knob, optional, real, several, text, unicode, whole
from draftree.sampling.choice import Choice

PENALTIES, SHAPE, END = "Penalties and bans", "What the answer must be", "Where it ends"
"""Parts of a command's help."""
UNKNOWN = "\ufffd"
"""What the first bytes of a character decode to until its last one is there."""


def _stop(value: Any) -> bool:
    return text(value) and UNKNOWN not in value  # a character that is incomplete would look like it


def _stops(value: Any) -> bool:
    return (isinstance(value, str) and not value) or _stop(value) or several(value, _stop)


def _bias(value: Any) -> bool:
    return real(value) or (isinstance(value, float) and value == -inf)


def _biases(value: Any) -> bool:
    return isinstance(value, Mapping) and all((text(k) or whole(k)) and _bias(v) for k, v in value.items())


@dataclass(frozen=True)
class Length(Knobs):
    """How long a text may be; a class of its own because it comes before all other fields."""

    max_new_tokens: int = knob(128, least=1, help="How many tokens may be written.", panel=END)


@dataclass(frozen=True)
class Parameters(Choice, Length):
    """What may be asked of a text, explained at `Options`: a field here is an option there and of `draftree generate`."""

    repetition_penalty: float = knob(
        1.0, above=0, help="Above 1, makes what stands in prompt or answer less likely.", panel=PENALTIES
    )
    frequency_penalty: float = knob(0.0, help="Taken from a token's logit each time it stands in the answer.", panel=PENALTIES)
    presence_penalty: float = knob(0.0, help="Taken from the logit of what stands in the answer.", panel=PENALTIES)
    no_repeat_ngram_size: int = knob(
        0, least=0, metavar="N", help="No N tokens in a row come twice; 0 allows it.", panel=PENALTIES
    )
    logit_bias: Mapping[int | str, float] | None = knob(
        None,
        rule=("ids or texts of one token, each with a finite number or -inf", optional(_biases)),
        kind=list[str],
        metavar="TOKEN=BIAS",
        help="Added to a token's logit; TOKEN is an id, or a text of one token (JSON where quoted). Repeat it.",
        panel=PENALTIES,
    )
    suppress: Sequence[int] = knob(
        (),
        rule=("ids of at least 0", lambda value: several(value, whole)),
        kind=list[int],
        metavar="ID",
        help="A token that is never written; repeat it.",
        panel=PENALTIES,
    )
    bad_words: str | Sequence[str] = knob(
        (),
        rule=("texts of at least one character", lambda value: unicode(value) or several(value, text)),
        kind=list[str],
        flag="--bad-word",
        metavar="TEXT",
        help="Never written; repeat it for several.",
        panel=PENALTIES,
    )
    json_schema: str | Mapping[str, Any] | None = knob(
        None,
        rule=("JSON text, or the object it stands for", optional(lambda v: unicode(v) or isinstance(v, Mapping))),
        kind=str | None,
        metavar="FILE|JSON",
        help="JSON that this schema allows.",
        panel=SHAPE,
    )
    regex: str | None = knob(
        None,
        rule=("a pattern of at least one character", optional(text)),
        metavar="PATTERN",
        help="What all of it must match.",
        panel=SHAPE,
    )
    # It is a `Grammar`, which needs torch.
    grammar: Any = knob(None, kind=Path | None, metavar="FILE", help="A Lark grammar that derives all of it.", panel=SHAPE)
    beginning: str | Sequence[int] = knob(
        "",
        rule=("a text, or ids of at least 0", lambda value: unicode(value) or several(value, whole)),
        kind=str,
        metavar="TEXT",
        help="What it begins with.",
        panel=SHAPE,
    )
    min_new_tokens: int = knob(0, least=0, help="How many are written before one may end it.", panel=END)
    stop: str | Sequence[str] = knob(
        (),
        rule=("texts of at least one character, U+FFFD none of them", _stops),
        kind=list[str],
        metavar="TEXT",
        help="Ends it, and is no part of it; repeat it.",
        panel=END,
    )
    max_time: float | None = knob(None, above=0, metavar="SECONDS", help="After which nothing more is written.", panel=END)
    ignore_eos: bool = knob(False, help="EOS ends nothing.", panel=END)
    logprobs: int | None = knob(
        None, least=0, metavar="N", help="With --json: each token's log-probability and the N likeliest's, by raw logits."
    )
