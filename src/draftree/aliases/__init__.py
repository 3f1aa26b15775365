"""Names that other tools use for options, commands and parts, mapped to draftree's names.

The tools are transformers, vLLM, the OpenAI API, ollama, llama.cpp, llama-cpp-python, mlx_lm and
lm_eval.

A name in `SAME` means what draftree's name means and is accepted for it. A word in `READERS` is an
attribute or a method of an object, and is read from draftree's own. A name in `INSTEAD` means
something else, or something that draftree does not have: the error says what to write. A value in
`NEUTRAL` is the one with which such an option asks for nothing, and is accepted. A name with a hint
in `IGNORED` is left out with a note: the text is the same without it. All are keyed by the kind of
name, as `UnknownName` is given it.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from draftree.aliases.attribute_aliases import (
    CONVERSATION_READERS,
    ENGINE_READERS,
    RESULT_READERS,
    STATS_READERS,
    TOKEN_READERS,
    Reader,
)
from draftree.aliases.conversions import replacement_with_value
from draftree.aliases.flag_hints import FLAG_IGNORED
from draftree.aliases.generation_options import OPTION_IGNORED, OPTION_NEUTRAL
from draftree.aliases.load_arguments import LOADING_IGNORED, LOADING_NEUTRAL
from draftree.aliases.name_kinds import (
    ACCEPTOR,
    CHAT,
    COMMAND,
    CONVERSATION,
    DEVICE,
    DRAFTER,
    DTYPE,
    ENGINE,
    FLAG,
    LIMIT,
    LOADING,
    MODULE,
    OPTION,
    POLICY,
    PROMPT,
    QUANTIZE,
    RESULT,
    STATS,
    TOKEN,
)
from draftree.aliases.suggestions import INSTEAD
from draftree.aliases.synonyms import SAME

__all__ = [
    "ACCEPTOR",
    "CHAT",
    "COMMAND",
    "CONVERSATION",
    "DEVICE",
    "DRAFTER",
    "DTYPE",
    "ENGINE",
    "FLAG",
    "INSTEAD",
    "LIMIT",
    "LOADING",
    "MODULE",
    "NEUTRAL",
    "OPTION",
    "POLICY",
    "PROMPT",
    "QUANTIZE",
    "READERS",
    "RESULT",
    "SAME",
    "STATS",
    "TOKEN",
    "asks_for_nothing",
    "canonical_name",
    "elsewhere",
    "ignorable_hint",
    "nearest",
    "replacement_with_value",
    "suggestion",
]

READERS: Mapping[str, Mapping[str, Reader]] = {
    ENGINE: ENGINE_READERS,
    RESULT: RESULT_READERS,
    TOKEN: TOKEN_READERS,
    CONVERSATION: CONVERSATION_READERS,
    STATS: STATS_READERS,
}
NEUTRAL: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    OPTION: OPTION_NEUTRAL,
    LOADING: LOADING_NEUTRAL,
}
IGNORED: Mapping[str, tuple[str, ...]] = {
    OPTION: OPTION_IGNORED,
    LOADING: LOADING_IGNORED,
    FLAG: FLAG_IGNORED,
}
SHORT, LONG = 3, 8
"""Least lengths of a name that may differ from a known name by one edit, and by two edits."""


@cache
def normalize_name(name: str) -> str:
    """Return a name in lower case without separators, such as `eagle3` for `EAGLE-3`."""
    return re.sub(r"[-_ .\[\]]", "", name.lower())


def canonical_name(kind: str, got: str, known: Iterable[str]) -> str:
    """Return draftree's name for another tool's name, or for a different spelling.

    Spellings may differ in case and separators. Other tools' names are looked up in `SAME`.

    Args:
        kind: kind of the name; see `name_kinds`.
        got: the given name.
        known: draftree's names of this kind.

    Returns:
        draftree's name, or the given name if none corresponds to it.
    """
    known = list(known)
    if got in known:
        return got
    word = normalize_name(got)
    own = (name for name in known if normalize_name(name) == word)
    same = (ours for ours in _same(kind).get(word, ()) if ours in known)
    return next(own, None) or next(same, got)


@cache
def _same(kind: str) -> dict[str, list[str]]:
    """Return draftree's names by other tools' names, which are written without separators."""
    found: dict[str, list[str]] = {}
    for word, ours in SAME.get(kind, {}).items():
        found.setdefault(normalize_name(word), []).append(ours)
    return found


def suggestion(kind: str, got: str) -> str | None:
    """Return the hint on how to replace another tool's name; None if there is no hint for it."""
    return INSTEAD.get(kind, {}).get(got) or _plain_hints(kind).get(normalize_name(got))


def ignorable_hint(kind: str, got: str) -> str | None:
    """Return the hint for a name that can be ignored without changing the text; None for others."""
    hint = suggestion(kind, got)
    return hint if hint in IGNORED.get(kind, ()) else None


def elsewhere(kind: str, got: str) -> str | None:
    """Return a hint for a name that belongs to another kind; None if it does not.

    For example, an option of a call may be an option of loading.

    Args:
        kind: kind under which the name was looked up.
        got: the given name.
    """
    if kind == OPTION:
        ours = _same(LOADING).get(normalize_name(got))
        hint = f"{ours[0]}=…" if ours else suggestion(LOADING, got)
        return hint and f"of draftree.load: {hint}"
    if kind == LOADING:
        ours = _same(OPTION).get(normalize_name(got))
        hint = f"{ours[0]}=…" if ours else suggestion(OPTION, got)
        return hint and f"of each call, as engine.chat(…): {hint}"
    if kind == RESULT:
        hint = suggestion(STATS, got)
        return hint and re.sub(r"(?<![\w.])stats\b", "completion.stats", hint)
    return suggestion(ENGINE, got) or suggestion(COMMAND, got) if kind == MODULE else None


@cache
def _plain_hints(kind: str) -> dict[str, str]:
    """Return a dict from names in lower case and without separators to hints.

    If several names become equal, the first one's hint is used.
    """
    return {normalize_name(word): hint for word, hint in reversed([*INSTEAD.get(kind, {}).items()])}


def asks_for_nothing(kind: str, name: str, value: Any) -> bool:
    """Return whether an option of another tool has a value with which it has no effect.

    These values are None and those in `NEUTRAL`.
    """
    if value is None:
        return suggestion(kind, name) is not None
    if not isinstance(value, bool | int | float | str | list | tuple | dict):
        return False
    return any(value == neutral for neutral in NEUTRAL.get(kind, {}).get(name, ()))


def nearest(kind: str, got: str, known: Iterable[str]) -> str | None:
    """Return draftree's name for a misspelt name; other tools' names may be misspelt, too.

    Return None if no name is similar enough.

    The beginning of a name is accepted if only one name has it.

    Otherwise one letter may be wrong, missing, additional or swapped with its neighbour, and two
    letters in names of at least `LONG` letters.
    """
    known = sorted(known)
    if (
        len(got) >= SHORT
        and len(longer := [name for name in known if name.lower().startswith(got.lower())]) == 1
    ):
        return longer[0]
    same = {word: ours for word, ours in SAME.get(kind, {}).items() if ours in known}
    found = [(edits(got.lower(), word.lower()), word) for word in [*known, *same]]
    least, word = min(found, default=(LONG, ""))
    longest = max(len(got), len(word))
    if least > (longest >= SHORT) + (longest >= LONG):
        return None
    return same.get(word, word)


def edits(a: str, b: str) -> int:
    """Return the least number of edits that turn one text into another.

    An edit inserts, deletes or replaces a letter, or swaps two neighbours.

    This number is called the optimal string alignment distance.
    """
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        now = [i]
        for j, other in enumerate(b, 1):
            cost = min(last[j] + 1, now[j - 1] + 1, last[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and other == a[i - 2]:
                cost = min(cost, before[j - 2] + 1)
            now.append(cost)
        before, last = last, now
    return last[-1]
