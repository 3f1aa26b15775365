"""Fields that carry their range: what is allowed is told in one wording, and texts are read by the field's type."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from draftree.errors import UnknownName, UserError
from draftree.utils.validated_dataclass import LARGEST, Knobs, Part, knob, parse_options


@dataclass(frozen=True)
class Shelf(Knobs):
    """One field of each kind."""

    boards: int = knob(3, least=1)
    books: int = knob(10, least=0, most=99)
    full: float = knob(0.5, above=0, most=1)
    bent: float = knob(0.0, least=0, below=1)
    load: float = knob(1.0, above=0)
    shift: float = 0.0
    top: int | None = knob(None, least=1)
    first: int | Literal["auto"] = knob("auto", least=0)
    wood: Literal["oak", "pine"] = "oak"
    painted: bool = False
    label: str = ""
    even: int = knob(2, rule=("an even number", lambda value: value % 2 == 0))
    other: object = None


@dataclass(frozen=True)
class Rack(Part):
    rows: int = knob(1, least=1)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"boards": 0}, "boards is 0, allowed is a whole number of at least 1"),
    ({"boards": True}, "boards is True, allowed is a whole number of at least 1"),
    ({"boards": 2.0}, "boards is 2.0, allowed is a whole number of at least 1"),
    ({"books": 100}, "books is 100, allowed is a whole number in 0 … 99"),
    ({"full": 0}, "full is 0, allowed is a number in (0, 1]"),
    ({"bent": 1}, "bent is 1, allowed is a number in [0, 1)"),
    ({"load": float("inf")}, "load is inf, allowed is a finite number above 0"),
    ({"shift": float("nan")}, "shift is nan, allowed is a finite number"),
    ({"shift": "1"}, "shift is '1', allowed is a finite number"),
    ({"top": 0}, "top is 0, allowed is none or a whole number of at least 1"),
    ({"first": "last"}, "first is 'last', allowed is a whole number of at least 0 or auto"),
    ({"wood": "ash"}, "wood is 'ash', allowed is oak or pine"),
    ({"painted": 1}, "painted is 1, allowed is true or false"),
    ({"label": "\ud800"}, "label is '\\ud800', allowed is a text"),
    ({"even": 3}, "even is 3, allowed is an even number"),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG)
def test_invalid_values_are_reported_in_one_wording(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        Shelf(**wrong)
    assert str(error.value) == told


def test_bounds_that_may_be_reached_are_allowed() -> None:
    Shelf(
        boards=1,
        books=99,
        full=1,
        bent=0,
        load=1e-300,
        shift=-5,
        top=None,
        first=0,
        painted=True,
        other=object(),
    )


def test_a_part_names_itself() -> None:
    with pytest.raises(
        UserError, match=r"^rack: rows is 0, allowed is a whole number of at least 1$"
    ):
        Rack(0)


def test_texts_are_read_by_the_fields_types() -> None:
    texts = ["boards=4", "full=1", "top=None", "first=7", "wood=pine", "painted=True", "label=3"]
    assert Shelf(**parse_options(texts, Shelf, "a shelf")) == Shelf(
        4, full=1.0, top=None, first=7, wood="pine", painted=True, label="3"
    )


@pytest.mark.parametrize(
    "text",
    ["boards=x", "boards=1.5", f"boards={LARGEST + 1}", "load=inf", "wood=ash", "painted=yes"],
)
def test_a_text_of_no_such_value_is_refused_by_the_dataclass(text: str) -> None:
    with pytest.raises(UserError, match=f"^{text.partition('=')[0]} is .*, allowed is"):
        Shelf(**parse_options([text], Shelf, "a shelf"))


def test_unknown_keys_are_reported_with_the_known_ones() -> None:
    with pytest.raises(
        UserError, match="'boards' is not key=value; keys of a shelf: boards, books"
    ):
        parse_options(["boards"], Shelf, "a shelf")
    with pytest.raises(
        UnknownName, match=r"unknown key of a shelf 'bords': known are .*did you mean 'boards'"
    ):
        parse_options(["bords=1"], Shelf, "a shelf")
