"""Names that other tools use for options, commands and parts, each with draftree's own.

The tools are transformers, vLLM, the OpenAI API, ollama, llama.cpp, llama-cpp-python, mlx_lm and lm_eval.

A name in `SAME` means what draftree's name means and is accepted for it. A name in `INSTEAD` means something else, or something
that draftree does not have: the error says what to write. Both are keyed by the kind of name, as `UnknownName` is given it.
"""

import difflib
import re
from collections.abc import Iterable

from draftree.aliases.instead import INSTEAD
from draftree.aliases.kinds import ACCEPTOR, COMMAND, DRAFTER, DTYPE, ENGINE, FLAG, LOADING, MODULE, OPTION, POLICY, RESULT
from draftree.aliases.same import SAME

__all__ = [
    "ACCEPTOR",
    "COMMAND",
    "DRAFTER",
    "DTYPE",
    "ENGINE",
    "FLAG",
    "INSTEAD",
    "LOADING",
    "MODULE",
    "OPTION",
    "POLICY",
    "RESULT",
    "SAME",
    "accepted",
    "instead",
    "nearest",
]

NEAR = 0.65
"""The least similarity (difflib) of a name that is suggested."""


def plain(name: str) -> str:
    """Return a name in lower case and without separators, as `eagle3` for `EAGLE-3`."""
    return re.sub(r"[-_ .]", "", name.lower())


def accepted(kind: str, got: str, known: Iterable[str]) -> str:
    """Return draftree's name for a name: that of `SAME`, or the known one that differs in case and separators alone.

    Args:
        kind: of the name.
        got: the name.
        known: draftree's own names.

    Returns:
        draftree's name; the given one where it stands for none.
    """
    known = list(known)
    if got in known:
        return got
    same = {plain(word): ours for word, ours in SAME.get(kind, {}).items() if ours in known}
    own = {plain(name): name for name in known}
    return own.get(plain(got)) or same.get(plain(got)) or got


def instead(kind: str, got: str) -> str | None:
    """Return what to write instead of a name of another tool, None where it is not in the table."""
    return next((told for word, told in INSTEAD.get(kind, {}).items() if plain(word) == plain(got)), None)


def nearest(kind: str, got: str, known: Iterable[str]) -> str | None:
    """Return draftree's name nearest in spelling to a name, by way of other tools' names too; None where nothing is near."""
    known = sorted(known)
    same = {word: ours for word, ours in SAME.get(kind, {}).items() if ours in known}
    near = difflib.get_close_matches(got, [*known, *same], n=1, cutoff=NEAR)
    return same.get(near[0], near[0]) if near else None
