"""The errors and warnings of draftree.

Exception
└── DraftreeError           something draftree can put into one line
    ├── UserError           a mistake in what was given: exit status 2
    │   └── UnknownName     a name or key that does not exist, with the nearest that does
    └── NotANumber          the target produced NaN or infinite logits: exit status 2

UserWarning
└── DraftreeWarning         what does not change the text, but should be known
"""

from collections.abc import Iterable
from typing import Any

from draftree import aliases

LONGEST, SHOWN = 600, 60
"""Characters of a message, and of a value that it repeats."""


def cut(text: str, most: int = LONGEST) -> str:
    """The text on one line, of so many characters at most: its middle is left out where it is longer."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most * 2 // 3]} … {line[len(line) - most // 3 :]}"


def shown(value: Any, most: int = SHOWN) -> str:
    """A faulty value as a message repeats it."""
    try:
        text = repr(value)
    except Exception:  # a foreign object's own repr may fail; so does that of what is nested too deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}…"


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type's name where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class DraftreeError(Exception):
    """Base of all errors that draftree raises on purpose; its text is one line, and cut where it would be a long one."""

    def __init__(self, text: str) -> None:
        super().__init__(cut(text))


class UserError(DraftreeError):
    """A mistake in what was given; the text says what was got and what is allowed."""


class UnknownName(UserError):
    """A name that is not known.

    The message says what to write instead of a name that other tools use (`aliases.py`). For any other name it lists the known
    ones, and suggests the nearest in spelling where one is near.
    """

    def __init__(self, kind: str, got: str, known: Iterable[str]) -> None:
        if (told := aliases.instead(kind, got)) is not None:
            super().__init__(f"unknown {kind} '{got}': {told}")
            return
        names = sorted(known)
        nearest = aliases.nearest(kind, got, names)
        hint = f"; did you mean '{nearest}'?" if nearest else ""
        super().__init__(f"unknown {kind} '{got}': known are {', '.join(names) or 'none'}{hint}")


def unknown(kind: str, name: str, of: Any) -> str:
    """Return the message of an `AttributeError`: what to write instead, or the nearest public name.

    Args:
        kind: of the name (`aliases.py`).
        name: that does not exist.
        of: the object or module that was asked for it.
    """
    if name.startswith("_"):
        return f"no {kind}: {name!r}"
    if (told := aliases.instead(kind, name)) is not None:
        return f"no {kind}: '{name}'; write {told}"
    nearest = aliases.nearest(kind, name, (known for known in dir(of) if not known.startswith("_")))
    return f"no {kind}: '{name}'{f'; did you mean {nearest!r}?' if nearest else ''}"


class NotANumber(DraftreeError):
    """The target's logits are NaN or infinite, so no token can be chosen by them."""


class DraftreeWarning(UserWarning):
    """A notice that does not concern the text, but should be known; commands print it in a line."""
