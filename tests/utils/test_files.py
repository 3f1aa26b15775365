"""What a file holds is taken by type, and told with file, entry, what was got and what is allowed."""

import math
from pathlib import Path
from typing import Any, Literal

import pytest

from draftree.errors import UserError
from draftree.utils.files import (
    Entries,
    as_user_error,
    check_value,
    read_object,
    replace_file,
    write_text,
)
from draftree.utils.validated_dataclass import LARGEST


@pytest.mark.parametrize(
    ("value", "hint", "least"),
    [
        (3, int, None), (0, int, 0), (LARGEST, int, None), (3, float, None), (0.5, float, None), (True, bool, None),
        ("x", str, None), (None, int | None, 1), (2, int | None, 1),
        ("kl", Literal["kl", "ce"], None), ([1, 2], list[int], 1), ([], list[int], 1),
        ({"a": 1.5}, dict[str, float], 0), ({"a": [None]}, dict, None), ([{"a": 1}], list[dict[str, Any]], None),
    ],
)  # fmt: skip
def test_values_of_the_hinted_type_are_taken_unchanged(
    value: object, hint: Any, least: float | None
) -> None:
    assert check_value(value, hint, "x", least) == value


@pytest.mark.parametrize(
    ("value", "hint", "least", "told"),
    [
        (True, int, None, "x is True, allowed is a whole number"), (1.0, int, None, "x is 1.0, allowed is a whole number"),
        ("3", int, 1, "x is '3', allowed is a whole number of at least 1"), (0, int, 1, "x is 0, allowed"),
        (LARGEST + 1, int, None, "a whole"), (math.nan, float, None, "x is nan, allowed is a finite number"),
        (-math.inf, float, None, "a finite number"), (10**400, float, None, "a finite number"),
        (1, bool, None, "true or false"),
        (None, str, None, "x is None, allowed is a text"), (-1, int | None, 0, "none or a whole number of at least 0"),
        ("l", Literal["kl", "ce"], None, "x is 'l', allowed is kl or ce"), (1, Literal[True], None, "allowed is True"),
        ([1, "x"], list[int], None, "a list of a whole number"), ([], dict, None, r"x is \[\], allowed is an object"),
        ({"a": {}}, dict[str, float], None, "allowed is an object of a finite number"),
    ],
)  # fmt: skip
def test_anything_else_is_told_with_what_is_allowed(
    value: object, hint: Any, least: float | None, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        check_value(value, hint, "x", least)


def test_an_entry_is_named_with_its_file() -> None:
    said = Entries({"layers": "3"}, Path("a/config.json"))
    assert said.get("heads", int, 4) == 4
    with pytest.raises(
        UserError,
        match=r"^'a/config.json': layers is '3', allowed is a whole number of at least 1$",
    ):
        said.get("layers", int, least=1)
    with pytest.raises(
        UserError, match=r"^'a/config.json': heads is missing, allowed is a whole number$"
    ):
        said.get("heads", int)


class Panic(BaseException):
    """As Rust's, which are no Exception."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("x"), "t: no 'x'"), (RecursionError("long"), "t: it is nested too deep"), (ValueError("one\ntwo"), "t: one"),
        (ValueError("wrong field:\n  is 5"), "t: wrong field: is 5"), (OSError(2, "No such file", "t"), "t: No such file"),
        (ZeroDivisionError(), "t: ZeroDivisionError"), (Panic("broken"), "t: broken"), (MemoryError("much"), "t: much"),
    ],
)  # fmt: skip
def test_errors_of_other_readers_become_one_line(error: BaseException, told: str) -> None:
    with pytest.raises(UserError) as raised, as_user_error("t"):
        raise error
    assert str(raised.value) == told


@pytest.mark.parametrize("error", [UserError("told already"), KeyboardInterrupt(), SystemExit(3)])
def test_user_errors_and_exits_pass_through(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, as_user_error("t"):
        raise error
    assert raised.value is error


def test_a_file_that_holds_no_object_is_told(tmp_path: Path) -> None:
    for text, told in (
        ("[1]", r"it holds \[1\], allowed is a JSON object"),
        ("{", "Expecting"),
        ("[" * 5000, "it is nested too deep"),
    ):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(UserError, match=rf"x\.json' is not a suite: {told}"):
            read_object(tmp_path / "x.json", "a suite")


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    def fails() -> None:
        with replace_file(tmp_path / "x") as partial:
            partial.write_text("half")
            raise OSError("full")

    write_text(tmp_path / "x", "before")
    with pytest.raises(OSError, match="full"):
        fails()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"x": "before"}
