"""Fields of `Options` with ranges and help texts; free of torch, so that commands can import them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from draftree.sampling.param_fields import Choice
from draftree.utils.validated_dataclass import (
    Knobs,
    Rule,
    is_finite,
    is_list_of,
    is_whole,
    knob,
    optional,
    text,
    unicode,
)

FORM_PANEL, END_PANEL = "The form of the answer", "The end of the answer"
penalty, shape, end = (
    partial(knob, panel=panel) for panel in ("Penalties and bans", FORM_PANEL, END_PANEL)
)
"""Functions that define fields in the given panel of the command line's help."""
MORE_PANEL = "More output"
REPLACEMENT_CHARACTER = "\ufffd"
"""The character that stands for the first bytes of an incomplete character."""


def _stop(value: Any) -> bool:
    return (
        text(value) and REPLACEMENT_CHARACTER not in value
    )  # an incomplete character looks like it


def _stops(value: Any) -> bool:
    return (isinstance(value, str) and not value) or _stop(value) or is_list_of(value, _stop)


def _bias(value: Any) -> bool:
    return is_finite(value) or (isinstance(value, float) and value == -inf)


def _biases(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        (text(k) or is_whole(k)) and _bias(v) for k, v in value.items()
    )


BIASES: Rule = "ids or texts of one token, each with a finite number or -inf", optional(_biases)
IDS: Rule = "ids of at least 0", lambda value: is_list_of(value, is_whole)
TEXTS_RULE: Rule = (
    "texts of at least one character",
    lambda value: unicode(value) or is_list_of(value, text),
)
STOPS: Rule = "texts of at least one character, U+FFFD none of them", _stops
SCHEMA: Rule = (
    "JSON text, or the object it stands for",
    optional(lambda value: unicode(value) or isinstance(value, Mapping)),
)
PATTERN: Rule = "a pattern of at least one character", optional(text)
BEGINNING: Rule = (
    "a text, or ids of at least 0",
    lambda value: unicode(value) or is_list_of(value, is_whole),
)
BIAS_HELP = "Add BIAS to the logit of a token, given as id or text; may be repeated."
LOGPROBS_HELP = "With --json: log-probabilities of each token and of the N likeliest."


@dataclass(frozen=True)
class Length(Knobs):
    """Declare the limit of a text's length, in a class of its own so that its field comes first."""

    max_new_tokens: int = knob(128, least=1, short="-n", help="Maximum number of new tokens.")


@dataclass(frozen=True)
class Parameters(Choice, Length):
    """Declare the parameters of a completion, which are documented at `Options`.

    Each field here is an option of `Options` and of `draftree generate`.
    """

    repetition_penalty: float = penalty(
        1.0, above=0, help="Above 1, makes tokens of the prompt and the answer less likely."
    )
    frequency_penalty: float = penalty(
        0.0, help="Subtracted from a token's logit for each time it occurs in the answer."
    )
    presence_penalty: float = penalty(
        0.0, help="Subtracted from a token's logit once it occurs in the answer."
    )
    no_repeat_ngram_size: int = penalty(
        0, least=0, metavar="N", help="Never write the same N tokens in a row twice."
    )
    logit_bias: Mapping[int | str, float] | None = penalty(
        None, rule=BIASES, kind=list[str], metavar="TOKEN=BIAS", help=BIAS_HELP
    )
    suppress: Sequence[int] = penalty(
        (),
        rule=IDS,
        kind=list[int],
        metavar="ID",
        help="Never write the token of this id; may be repeated.",
    )
    bad_words: str | Sequence[str] = penalty(
        (),
        rule=TEXTS_RULE,
        kind=list[str],
        flag="--bad-word",
        metavar="TEXT",
        help="Never write this text; may be repeated.",
    )
    json_schema: str | Mapping[str, Any] | None = shape(
        None,
        rule=SCHEMA,
        kind=str | None,
        metavar="FILE|JSON",
        help="Write JSON that matches this JSON schema.",
    )
    regex: str | None = shape(
        None, rule=PATTERN, metavar="PATTERN", help="Write a text that matches this pattern."
    )
    # It is a `Grammar`, which needs torch.
    grammar: Any = knob(
        None,
        kind=Path | None,
        metavar="FILE",
        help="Write a text of this Lark grammar.",
        panel=FORM_PANEL,
    )
    beginning: str | Sequence[int] = shape(
        "", rule=BEGINNING, kind=str, metavar="TEXT", help="Begin the answer with this text."
    )
    min_new_tokens: int = end(0, least=0, help="Minimum number of new tokens.")
    stop: str | Sequence[str] = end(
        (),
        rule=STOPS,
        kind=list[str],
        metavar="TEXT",
        help="End the answer before this text; may be repeated.",
    )
    stop_ids: Sequence[int] = end(
        (),
        rule=IDS,
        kind=list[int],
        flag="--stop-id",
        metavar="ID",
        help="End the answer after this token id; may be repeated.",
    )
    max_time: float | None = end(
        None, above=0, metavar="SECONDS", help="End the answer after this time."
    )
    ignore_eos: bool = end(False, help="Continue after the end-of-text token.")
    logprobs: int | None = knob(None, least=0, metavar="N", help=LOGPROBS_HELP, panel=MORE_PANEL)
