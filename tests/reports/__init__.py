"""Faults that were reported in public against other engines, each tried on draftree by a small test.

A test names its report: `@report("owner/repository#number", KIND, "What went wrong there.")`. The
page `docs/reference/reports.md` lists them; `python tests/reports/page.py` writes it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


@dataclass(frozen=True)
class Report:
    """A public report of a fault.

    Attributes:
        reference: the thread, as GitHub abbreviates it: owner/repository#number.
        kind: the part of an engine that was at fault.
        symptom: one sentence about what went wrong.

    Raises:
        ValueError: the reference is no thread, or the symptom is no single sentence.
    """

    reference: str
    kind: str
    symptom: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", self.reference):
            raise ValueError(f"reference is {self.reference!r}, allowed is owner/repository#number")
        if not self.symptom.endswith(".") or ". " in self.symptom or "|" in self.symptom:
            raise ValueError(f"symptom is {self.symptom!r}, allowed is one sentence")

    @property
    def link(self) -> str:
        """The address of the thread; GitHub redirects from it where the thread is a pull request."""
        repository, _, number = self.reference.partition("#")
        return f"https://github.com/{repository}/issues/{number}"


def report(reference: str, kind: str, symptom: str) -> Callable[[Test], Test]:
    """Return a decorator that names the report a test was made of; a test may have several."""
    named = Report(reference, kind, symptom)

    def mark(test: Test) -> Test:
        test.reports = (named, *reports_of(test))  # type: ignore[attr-defined]
        return test

    return mark


def reports_of(test: object) -> tuple[Report, ...]:
    """Return the reports that a test names."""
    found: tuple[Report, ...] = getattr(test, "reports", ())
    return found
