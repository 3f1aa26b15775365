"""The page of reports: `python tests/reports/page.py` writes it from the tests."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "reports.md"
INTRODUCTION = """# Bug reports as tests

Faults that were reported against other engines show what can go wrong in speculative decoding. Each report below was turned
into a small input for draftree, and a test holds that draftree handles it. The sentences say what went wrong in the engine of
the report. The tests are in `tests/reports/`; `python tests/reports/page.py` writes this page from them.
"""

if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

from reports import Report, reports_of  # noqa: E402


def entries() -> Iterator[tuple[Report, str]]:
    """Yield each report with the test that names it, file by file."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"reports.{file.stem}")
        for name, test in vars(module).items():
            if name.startswith("test"):
                yield from ((report, f"{file.stem}::{name}") for report in reports_of(test))


def page() -> str:
    """Return the page: a table for each kind."""
    kinds: dict[str, list[tuple[Report, str]]] = {}
    for report, test in entries():
        kinds.setdefault(report.kind, []).append((report, test))
    tests = {test for found in kinds.values() for _, test in found}
    count = sum(map(len, kinds.values()))
    parts = [INTRODUCTION, f"{count} reports, {len(tests)} tests.\n"]
    for kind in sorted(kinds):
        rows = [
            f"| [{r.reference}]({r.link}) | {r.symptom} | `{test}` |" for r, test in kinds[kind]
        ]
        parts.append(
            "\n".join((f"## {kind}\n", "| report | fault | test |", "|---|---|---|", *rows, ""))
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
