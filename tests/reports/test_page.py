"""The page of reports is what its generator writes."""

import pytest

from reports import report
from reports.page import PAGE, entries, page


def test_the_page_is_written_from_the_tests() -> None:
    assert PAGE.read_text() == page(), "run: python tests/reports/page.py"


def test_at_least_a_hundred_tests_carry_a_report() -> None:
    found = list(entries())
    assert len({test for _, test in found}) >= 100
    assert len({report.reference for report, _ in found}) >= 100


@pytest.mark.parametrize(
    ("reference", "symptom"),
    [
        ("vllm#1", "A fault."),
        ("a/b", "A fault."),
        ("a/b#1", "A fault"),
        ("a/b#1", "A fault. Another."),
    ],
)
def test_what_is_no_report_is_refused(reference: str, symptom: str) -> None:
    with pytest.raises(ValueError, match="allowed is"):
        report(reference, "kind", symptom)
