"""What draftree raises.

Exception
└── DraftreeError           something draftree can put into one line
    ├── UserError           a mistake in what was given: exit status 2
    │   └── UnknownName     a name or key that does not exist, with the nearest that does
    └── NotANumber          the target produced NaN or infinite logits: exit status 2
"""

import difflib
from collections.abc import Iterable


class DraftreeError(Exception):
    """Base of all errors that draftree raises on purpose; its text is one line."""


class UserError(DraftreeError):
    """What was given cannot be used; the text says what was got and what is allowed."""


class UnknownName(UserError):
    """A name that is not known, told together with the known ones and the nearest of them."""

    def __init__(self, kind: str, got: str, known: Iterable[str]) -> None:
        names = sorted(known)
        nearest = difflib.get_close_matches(got, names, n=1, cutoff=0.4)
        hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
        super().__init__(f"unknown {kind} '{got}': known are {', '.join(names) or 'none'}{hint}")


class NotANumber(DraftreeError):
    """The target's logits are not numbers, so nothing it says can be trusted."""
