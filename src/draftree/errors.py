"""The exceptions and warnings of draftree.

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

from typing_extensions import override

from draftree import aliases

LONGEST, SHOWN = 600, 60
"""Largest number of characters of a message, and of a value that it repeats."""


def cut(text: str, most: int = LONGEST) -> str:
    """Return the text on one line of at most `most` characters; a longer one loses its middle."""
    line = " ".join(text.split())
    return (
        line if len(line) <= most else f"{line[: most * 2 // 3]} … {line[len(line) - most // 3 :]}"
    )


def shown(value: Any, most: int = SHOWN) -> str:
    """Return a faulty value in the form that messages show."""
    try:
        text = repr(value)
    except (
        Exception
    ):  # a foreign object's own repr may fail; so does that of what is nested too deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}…"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; its type's name where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class DraftreeError(Exception):
    """Base of all errors that draftree raises on purpose; its text is one line, cut if long."""

    def __init__(self, text: str) -> None:
        super().__init__(cut(text))


class UserError(DraftreeError):
    """A mistake in what was given; the text says what was got and what is allowed."""


class UnknownName(UserError):
    """A name that is not known.

    The message says what to write instead of a name that other tools use (`aliases.py`). For any
    other name it lists the known ones, and suggests the nearest in spelling where one is near.
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
            hint = (
                aliases.filled(name, value)
                or aliases.suggestion(kind, name)
                or aliases.elsewhere(kind, name)
            )
            if hint is None:
                nearest = aliases.nearest(kind, name, names)
                shown_once = [] if any(listed in text for text in told) else [listed]
                hint = "; ".join(
                    [*shown_once, *([f"did you mean '{nearest}'?"] if nearest else [])]
                )
            told.append(f"unknown {kind} '{name}'{hint and f': {hint}'}")
        super().__init__("; ".join(told))


class UnknownAttribute(UserError, AttributeError):
    """An attribute that does not exist.

    The message says what to write instead of another tool's name for it.
    """

    def __init__(self, kind: str, name: str, of: Any, told: str | None = None) -> None:
        """Write the message.

        Args:
            kind: of the name (`draftree.aliases`).
            name: the name that does not exist.
            of: the object or module on which it was looked up.
            told: what to write instead; by default that of the table, or the nearest public name.
        """
        told = told or aliases.suggestion(kind, name) or aliases.elsewhere(kind, name)
        if told is None and not name.startswith("_"):
            nearest = aliases.nearest(
                kind, name, (known for known in dir(of) if not known.startswith("_"))
            )
            told = nearest and f"did you mean '{nearest}'?"
        super().__init__(f"unknown {kind} '{name}'{(told and f': {told}') or ''}")
        self.name = name  # Python adds no suggestion of its own to an error that has a name


class Hinting:
    """Base of classes that accept other tools' names of their attributes.

    Names with the same meaning are read; for others the error says what to write.

    Attributes:
        kind_of_name: kind of the attributes (`draftree.aliases`).
        no_items: the error message for an item that is no attribute name, and so for unpacking.
    """

    kind_of_name: ClassVar[str]
    no_items: ClassVar[str] = "its attributes are no items by number"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the attribute that another tool's name stands for.

            Raises:
                UnknownAttribute: it stands for nothing that an instance has.
            """
            if (read := aliases.READERS.get(self.kind_of_name, {}).get(name)) is not None:
                try:
                    return read(self)
                except AttributeError as error:  # what it is read from is not there
                    raise UnknownAttribute(
                        self.kind_of_name, name, self, first_line(error)
                    ) from error
            raise UnknownAttribute(
                self.kind_of_name,
                name,
                self,
                None if name.startswith("_") else self._held_by_a_part(name),
            )

        def __getitem__(self, key: Any) -> Any:
            """Return the attribute of that name, as other tools return dicts.

            Raises:
                UserError: the key is not a string.
            """
            if isinstance(key, str):
                return getattr(self, key)
            raise UserError(self.no_items)

    def _held_by_a_part(self, name: str) -> str | None:
        """Return what to write for an attribute that one of the parts has.

        Return None if a table names it or no part has it.
        """
        parts = {} if aliases.suggestion(self.kind_of_name, name) else self._parts()
        return next(
            (f"{where}.{name}" for where, part in parts.items() if hasattr(part, name)), None
        )

    def _parts(self) -> dict[str, Any]:
        """Return the parts in which attributes are looked for, by the expression to write."""
        return {}


class HintingText(Hinting):
    """Base of classes whose instances stand for a text, where other tools return a text.

    An instance has the methods of its text, and is its own only item.
    """

    if not TYPE_CHECKING:

        @override
        def __getattr__(self, name: str) -> Any:
            if name not in aliases.READERS[self.kind_of_name] and hasattr(str, name):
                return getattr(str(self), name)
            return super().__getattr__(name)

        @override
        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, int):
                if key in (0, -1):
                    return self
                raise IndexError(f"item {key} of a {type(self).__name__}, which is one text")
            return super().__getitem__(key)

    def __contains__(self, part: Any) -> bool:
        """Return whether a text is part of this one."""
        return isinstance(part, str) and part in str(self)

    def __add__(self, text: Any) -> Any:
        """Return this text followed by another."""
        return str(self) + str(text) if isinstance(text, str | HintingText) else NotImplemented

    def __radd__(self, text: Any) -> Any:
        """Return another text followed by this one."""
        return text + str(self) if isinstance(text, str) else NotImplemented


class NotANumber(DraftreeError):
    """The target's logits are NaN or infinite, so no token can be chosen by them."""


class DraftreeWarning(UserWarning):
    """A notice that does not concern the generated text; commands print it in one line."""
