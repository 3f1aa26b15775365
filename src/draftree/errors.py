"""The errors and warnings of draftree.

Exception
└── DraftreeError           something draftree can put into one line
    ├── UserError           a mistake in what was given: exit status 2
    │   ├── UnknownName     a name or key that does not exist, with the nearest that does
    │   └── UnknownAttribute    an attribute that does not exist, likewise
    └── NotANumber          the target produced NaN or infinite logits: exit status 2

UserWarning
└── DraftreeWarning         what does not change the text, but should be known
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

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

    def __init__(self, kind: str, got: str | Mapping[str, Any], known: Iterable[str]) -> None:
        """Write the message.

        Args:
            kind: of the name (`draftree.aliases`).
            got: the name; or all that are not known, each with the value that was given for it.
            known: the names that exist.
        """
        names, told = sorted(known), list[str]()
        listed = f"known are {', '.join(names) or 'none'}"
        for name, value in {got: None}.items() if isinstance(got, str) else got.items():
            hint = aliases.filled(name, value) or aliases.instead(kind, name) or aliases.elsewhere(kind, name)
            if hint is None:
                nearest = aliases.nearest(kind, name, names)
                shown_once = [] if any(listed in text for text in told) else [listed]
                hint = "; ".join([*shown_once, *([f"did you mean '{nearest}'?"] if nearest else [])])
            told.append(f"unknown {kind} '{name}'{hint and f': {hint}'}")
        super().__init__("; ".join(told))


class UnknownAttribute(UserError, AttributeError):
    """An attribute that does not exist; the message says what to write instead of another tool's name for it."""

    def __init__(self, kind: str, name: str, of: Any, told: str | None = None) -> None:
        """Write the message.

        Args:
            kind: of the name (`draftree.aliases`).
            name: that does not exist.
            of: the object or module that was asked for it.
            told: what to write instead; by default that of the table, or the nearest public name.
        """
        told = told or aliases.instead(kind, name) or aliases.elsewhere(kind, name)
        if told is None and not name.startswith("_"):
            nearest = aliases.nearest(kind, name, (known for known in dir(of) if not known.startswith("_")))
            told = nearest and f"did you mean '{nearest}'?"
        super().__init__(f"unknown {kind} '{name}'{(told and f': {told}') or ''}")
        self.name = name  # Python adds no suggestion of its own to an error that has a name


class Hinting:
    """Base of classes whose unknown attributes say what to write instead of another tool's name.

    Attributes:
        kind_of_name: of the attributes (`draftree.aliases`).
        text_name: what to write for the text that an instance stands for, as another tool returns a text itself.
        no_items: what to say of an item by its number, and so of unpacking; by default what is said of `outputs`.
    """

    kind_of_name: ClassVar[str]
    text_name: ClassVar[str] = ""
    no_items: ClassVar[str] = ""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise the error of an attribute that does not exist."""
            if name.startswith("_"):
                raise UnknownAttribute(self.kind_of_name, name, self)
            of_text = f"{self.text_name}.{name}" if self.text_name and hasattr(str, name) else None
            raise UnknownAttribute(self.kind_of_name, name, self, of_text or self._held_by_a_part(name))

        def __getitem__(self, key: Any) -> Any:
            """Raise the error of an item: other tools return dicts, lists and tuples."""
            if self.no_items and isinstance(key, int | slice):
                raise UserError(self.no_items)
            name, owner = key if isinstance(key, str) else "outputs", type(self).__name__.lower()
            if not name.startswith("_") and name in dir(self):
                raise UserError(f"{type(self).__name__}[{key!r}]: a {type(self).__name__} is no dict, write {owner}.{name}")
            raise UnknownAttribute(self.kind_of_name, name, self, self._held_by_a_part(name))

    def _held_by_a_part(self, name: str) -> str | None:
        """Return what to write for an attribute that a part of it has, and no table names; None where none has it."""
        parts = {} if aliases.instead(self.kind_of_name, name) else self._parts()
        return next((f"{where}.{name}" for where, part in parts.items() if hasattr(part, name)), None)

    def _parts(self) -> dict[str, Any]:
        """Return the parts whose attributes may be looked for in it, by what is written for them."""
        return {}


class NotANumber(DraftreeError):
    """The target's logits are NaN or infinite, so no token can be chosen by them."""


class DraftreeWarning(UserWarning):
    """A notice that does not concern the text, but should be known; commands print it in a line."""
