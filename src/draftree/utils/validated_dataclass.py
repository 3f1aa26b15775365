"""Dataclass fields with allowed ranges; parse them from `key=value` texts."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from math import inf, isfinite
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from draftree.aliases import asks_for_nothing, canonical_name, ignorable_hint
from draftree.errors import DraftreeWarning, UnknownName, UserError, format_value

LARGEST = 2**63 - 1
"""The largest integer that arrays and tensors can represent."""
Rule = tuple[str, Callable[[Any], bool]]
"""The allowed values, as a description and as a test."""


def is_whole(value: Any, least: float = 0, most: float = inf) -> bool:
    """Return whether a value is an integer in a range; True and False are not integers here."""
    return (
        isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most
    )


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number; True and False are not numbers here."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    with suppress(OverflowError):  # an integer beyond all floats
        return isfinite(value)
    return False


def unicode(value: Any) -> bool:
    """Return whether a text can be encoded in UTF-8; a single surrogate cannot."""
    with suppress(UnicodeEncodeError):
        return isinstance(value, str) and bool(value.encode() or True)
    return False


def text(value: Any) -> bool:
    """Return whether a value is a non-empty string."""
    return unicode(value) and bool(value)


def is_list_of(values: Any, fine: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list of valid items; strings and bytes are not lists here."""
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str | bytes | bytearray)
        and all(map(fine, values))
    )


def optional(fine: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a test that accepts None and all values that the given test accepts."""
    return lambda value: value is None or fine(value)


@dataclass(frozen=True)
class Range:
    """Store the bounds of a number: inclusive `least` and `most`, exclusive `above` and `below`."""

    least: float = -inf
    most: float = inf
    above: float = -inf
    below: float = inf

    def holds(self, number: Any) -> bool:
        """Return whether a number is within the bounds."""
        return bool(self.least <= number <= self.most and self.above < number < self.below)

    def describe(self, number: str) -> str:
        """Return a description of the allowed numbers."""
        low, high = max(self.least, self.above), min(self.most, self.below)
        if high < inf and number == WHOLE:
            return f"{number} in {low} … {high}"
        if high < inf:
            return f"a number in {'(' if self.above == low else '['}{low}, {high}{')' if self.below == high else ']'}"
        return (
            number
            if low == -inf
            else f"{number} {'above' if self.above == low else 'of at least'} {low}"
        )


WHOLE = "a whole number"


def knob(
    default: Any = MISSING,
    *,
    least: float = -inf,
    most: float = inf,
    above: float = -inf,
    below: float = inf,
    rule: Rule | None = None,
    **more: Any,
) -> Any:
    """Return a field of a dataclass, with the range of its number.

    Args:
        default: the default value.
        least: inclusive lower bound.
        most: inclusive upper bound.
        above: exclusive lower bound.
        below: exclusive upper bound.
        rule: the allowed values, if type and bounds do not suffice.
        more: other metadata of the field, by name.
    """
    return field(
        default=default, metadata={"range": Range(least, most, above, below), "rule": rule, **more}
    )


def rule_of(hint: Any, bounds: Range = Range()) -> Rule | None:
    """Return the rule for the values that a type and a range allow.

    The range also applies to numbers in a list or dict. The result is None for types that are not
    checked.
    """
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(str, options)), lambda value: any(
            type(value) is type(o) and value == o for o in options
        )
    if origin in (Union, UnionType):
        several = [
            rule_of(option, bounds)
            for option in sorted(options, key=lambda option: option is not NoneType)
        ]
        rules = [rule for rule in several if rule]
        if len(rules) < len(options):
            return None
        return " or ".join(words for words, _ in rules), lambda value: any(
            fine(value) for _, fine in rules
        )
    if origin in (list, dict):
        words, fine = rule_of(options[-1], bounds) or ("anything", lambda _: True)
        parts = dict.values if origin is dict else list.__iter__
        told = f"{'an object' if origin is dict else 'a list'} of {words}"
        return told, lambda value: isinstance(value, origin) and all(map(fine, parts(value)))
    most = LARGEST if bounds.most == inf else inf
    rules_of_types: dict[Any, Rule] = {
        NoneType: ("none", lambda value: value is None),
        bool: ("true or false", lambda value: isinstance(value, bool)),
        int: (
            bounds.describe(WHOLE),
            lambda value: is_whole(value, -most, most) and bounds.holds(value),
        ),
        float: (
            bounds.describe("a finite number"),
            lambda value: is_finite(value) and bounds.holds(value),
        ),
        str: ("a text", lambda value: unicode(value)),
        dict: ("an object", lambda value: isinstance(value, dict)),
        list: ("a list", lambda value: isinstance(value, list)),
    }
    return rules_of_types.get(hint)


@cache
def rules(of: type) -> tuple[tuple[str, Rule], ...]:
    """Return the fields of a dataclass that have a rule, each with its rule."""
    hints, data = get_type_hints(of), {f.name: f.metadata for f in fields(of) if f.init}
    found = {
        name: more.get("rule") or rule_of(hints[name], more.get("range", Range()))
        for name, more in data.items()
    }
    return tuple((name, rule) for name, rule in found.items() if rule)


def check_fields(of: Any, place: str = "") -> None:
    """Refuse a dataclass instance with invalid values, in a single message.

    Args:
        of: the instance.
        place: the start of the message.

    Raises:
        UserError: a value is not allowed; the message gives all such values and the allowed ones.
    """
    kind: type = type(of)
    values = [
        (name, words, value)
        for name, (words, fine) in rules(kind)
        if not fine(value := getattr(of, name))
    ]
    if values:
        raise UserError(
            "; ".join(
                f"{place}{name} is {format_value(value)}, allowed is {words}"
                for name, words, value in values
            )
        )


class Knobs:
    """Check the field values of a derived dataclass."""

    def __post_init__(self) -> None:
        """Refuse values that are not allowed."""
        check_fields(self)


Presets = Mapping[str, Mapping[str, Any]]
"""The options that each preset sets, by the preset's name."""
PRESET = "preset"
"""The key in a spec that selects a preset."""


class Part:
    """Check the field values of a derived dataclass, and name the part in error messages.

    Attributes:
        presets: named sets of options that depart from the published method; `name:preset=fast`
            selects one.
        spec_name: the part's name in specs, if it is not the class's name in lower case.
    """

    presets: ClassVar[Presets] = {}
    spec_name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Refuse values that are not allowed."""
        check_fields(
            self, f"{self.spec_name or type(self).__name__.lower()}: "
        )  # a part may have an option `kind`

    @classmethod
    def kind(cls) -> str:
        """Return the name of the part in specs."""
        return cls.spec_name or cls.__name__.lower()


def parse_options(items: Iterable[str], of: type, what: str) -> dict[str, Any]:
    """Return the values that key=value texts set, each in its field's type.

    The dataclass itself refuses invalid values. A preset sets only options that no other text sets;
    the order of the texts does not matter.

    Args:
        items: the texts.
        of: the dataclass.
        what: the part to which the texts belong, for the message.

    Raises:
        UserError: a text is not key=value, or a key or preset is unknown.
    """
    hints = get_type_hints(of)
    values = dict[str, Any]()
    preset = dict[str, Any]()
    presets: Presets = getattr(of, "presets", {})
    known = [
        *([PRESET] if presets else []),
        *(f.name for f in fields(of) if f.compare),
    ]  # fields without comparison are not options
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(
                f"'{item}' is not key=value; keys of {what}: {', '.join(known) or 'none'}"
            )
        if key not in known:
            raise UnknownName(f"key of {what}", key, known)
        if key == PRESET and presets:
            if value not in presets:
                raise UnknownName(f"preset of {what}", value, presets)
            preset |= presets[value]
        else:
            values[key] = parse_value(value, hints[key])
    return {**preset, **values}


def translate_names(kind: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Rename arguments from other tools' names to draftree's names.

    The other names are in `draftree.aliases`. Options of other tools whose value has no effect are
    dropped. Options that do not change the text are dropped with a warning.

    Args:
        kind: the kind of the names, as for `UnknownName`.
        given: the arguments.
        known: draftree's names.

    Raises:
        UnknownName: names are unknown.
        UserError: one argument is given under two names.
    """
    found = dict[str, Any]()
    names = dict[str, str]()
    unknown = dict[str, Any]()
    notes = list[str]()
    for name, value in given.items():
        ours = canonical_name(kind, name, known)
        if ours not in known:
            if asks_for_nothing(kind, name, value):
                continue
            if (told := ignorable_hint(kind, name)) is None:
                unknown[name] = value
            else:
                notes.append(f"{name} is not used: {told}")
            continue
        if ours in found:
            raise UserError(f"{names[ours]} and {name} are given, allowed is one of them")
        found[ours], names[ours] = value, name
    if unknown:
        raise UnknownName(kind, unknown, known)
    for note in notes:
        warnings.warn(note, DraftreeWarning, stacklevel=3)
    return found


def parse_value(given: str, hint: Any) -> Any:
    """Convert a text to the number or other value that it represents, or else return the text."""
    kinds = get_args(hint) or (hint,)
    if NoneType in kinds and given.lower() == "none":
        return None
    if bool in kinds and given.lower() in ("true", "false"):
        return given.lower() == "true"
    for kind in (kind for kind in (int, float) if kind in kinds):
        with suppress(ValueError):
            return kind(given)
    return given
