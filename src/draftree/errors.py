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

MAX_MESSAGE_CHARACTERS, MAX_VALUE_CHARACTERS = 600, 60
"""Largest number of characters of a message (`MAX_MESSAGE_CHARACTERS`), and of a repeated value (`MAX_VALUE_CHARACTERS`)."""


def cut(text: str, most: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Return the text as one line of at most `most` characters; a longer line loses its middle."""
    line = " ".join(text.split())
    return (
        line if len(line) <= most else f"{line[: most * 2 // 3]} … {line[len(line) - most // 3 :]}"
    )


def format_value(value: Any, most: int = MAX_VALUE_CHARACTERS) -> str:
    """Return the text by which messages show a wrong value, at most `most` characters of it."""
    try:
        text = repr(value)
    except Exception:  # the repr of another library's object, or of a deeply nested one, may fail
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}…"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class DraftreeError(Exception):
    """Base class of all errors that draftree raises on purpose; the message is one line."""

    def __init__(self, text: str) -> None:
        super().__init__(cut(text))


class UserError(DraftreeError):
    """An error in the user's input; the message states the value and the allowed values."""


class UnknownName(UserError):
    """An unknown name.

    If other tools use the name (`draftree.aliases`), the message gives draftree's name. Otherwise
    it lists the known names, and suggests one with similar spelling if there is one.
    """

    def __init__(self, kind: str, got: str | Mapping[str, Any], known: Iterable[str]) -> None:
        """Compose the message.

        Args:
            kind: the kind of the name (`draftree.aliases`).
            got: the unknown name, or all unknown names with the values that were given for them.
            known: the names that exist.
        """
        names, told = sorted(known), list[str]()
        listed = f"known are {', '.join(names) or 'none'}"
        for name, value in {got: None}.items() if isinstance(got, str) else got.items():
            hint = (
                aliases.replacement_with_value(name, value)
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
    """An unknown attribute.

    If another tool uses the name, the message gives draftree's name.
    """

    def __init__(self, kind: str, name: str, of: Any, told: str | None = None) -> None:
        """Compose the message.

        Args:
            kind: the kind of the name (`draftree.aliases`).
            name: the name that does not exist.
            of: the object or module on which it was looked up.
            told: the text that says what to write instead. By default it comes from the table of
                names, or suggests the nearest public name.
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
    """Base of classes whose attributes can also be read under other tools' names.

    For a name with another meaning, an error says what to write instead.

    Attributes:
        kind_of_name: the kind of the attributes' names (`draftree.aliases`).
        no_items: the error message for an item that is not an attribute name, and for unpacking.
    """

    kind_of_name: ClassVar[str]
    no_items: ClassVar[str] = "its attributes are no items by number"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the attribute for which another tool uses this name.

            Raises:
                UnknownAttribute: the name does not correspond to an attribute of the instance.
            """
            if (read := aliases.READERS.get(self.kind_of_name, {}).get(name)) is not None:
                try:
                    return read(self)
                except AttributeError as error:  # the attribute that it is read from does not exist
                    raise UnknownAttribute(
                        self.kind_of_name, name, self, first_line(error)
                    ) from error
            raise UnknownAttribute(
                self.kind_of_name,
                name,
                self,
                None if name.startswith("_") else self._part_expression(name),
            )

        def __getitem__(self, key: Any) -> Any:
            """Return the attribute with the given name, because other tools return dictionaries.

            Raises:
                UserError: the key is not a string.
            """
            if isinstance(key, str):
                return getattr(self, key)
            raise UserError(self.no_items)

    def _part_expression(self, name: str) -> str | None:
        """Return the expression to write for an attribute that one of the parts has.

        Return None if the table of names contains the name, or if no part has the attribute.
        """
        parts = {} if aliases.suggestion(self.kind_of_name, name) else self._parts()
        return next(
            (f"{where}.{name}" for where, part in parts.items() if hasattr(part, name)), None
        )

    def _parts(self) -> dict[str, Any]:
        """Return the parts in which attributes are looked up, keyed by the expression to write."""
        return {}


class HintingText(Hinting):
    """Base of classes whose instances stand for a text, where other tools return a text.

    An instance has the methods of `str`, and `instance[0]` is the instance itself.
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
        """Return whether a text occurs in the text of this instance."""
        return isinstance(part, str) and part in str(self)

    def __add__(self, text: Any) -> Any:
        """Return the text of this instance followed by another text."""
        return str(self) + str(text) if isinstance(text, str | HintingText) else NotImplemented

    def __radd__(self, text: Any) -> Any:
        """Return another text followed by the text of this instance."""
        return text + str(self) if isinstance(text, str) else NotImplemented


class NotANumber(DraftreeError):
    """The target's logits are NaN or infinite, so that no token can be chosen."""


class DraftreeWarning(UserWarning):
    """A warning that does not concern the generated text; commands print it on one line."""
