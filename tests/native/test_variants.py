"""`make test-variants`: its parts cover the product, a part that passed is not repeated, a failure fails."""

from pathlib import Path

import pytest

import variants
from draftree import native
from variants import Part, fingerprint, line_of, main, parts_of, run


def cases_of(part: Part, count: int) -> range:
    start, every = (
        int(part.command[part.command.index(word) + 1]) for word in ("--start", "--every")
    )
    return range(start, count, every)


@pytest.mark.parametrize("share", [1, 2, 3])
def test_shares_of_neighbouring_variants_cover_the_product(share: int) -> None:
    count = 2926 * 12
    met = sorted(
        i
        for first in range(share)
        for part in parts_of("avx2", first, share)[1:]
        for i in cases_of(part, count)
    )
    assert met == list(range(count))


def test_every_pairing_is_in_a_share() -> None:
    pairings = {i % 2926 for part in parts_of("avx2", 1, 3)[1:] for i in cases_of(part, 2926 * 12)}
    assert len(pairings) == 2926


def test_a_part_runs_the_variant_and_is_repeated_for_other_sources_alone(tmp_path: Path) -> None:
    code = f"import os; print(len(os.environ['{native.VARIABLE}']), 'passed')"
    part = Part("off", "kernels", ("-c", code))
    first = run(part, "a", tmp_path)
    assert (first["status"], first["passed"]) == (0, 3)
    assert run(part, "a", tmp_path) == first
    assert run(part, "b", tmp_path)["seconds"] != first["seconds"]


def test_a_failure_is_named_repeated_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    fails = f"import sys; open({str(runs)!r}, 'a').write('x'); print('2 passed'); sys.exit(1)"
    made = [
        Part("off", "kernels", ("-c", "print('5 passed')")),
        Part("off", "conformance", ("-c", fails)),
    ]
    monkeypatch.setattr(variants, "parts_of", lambda *_: made)
    for times in (1, 2):
        assert main(["--variant", "off", "--out", str(tmp_path)]) == 1
        assert capsys.readouterr().out == f"off: FAILED: {tmp_path / 'off.conformance.log'}\n"
        assert runs.read_text() == "x" * times
    found = [
        {"part": name, "status": 0, "passed": n, "seconds": 2.0}
        for name, n in (("kernels", 5), ("conformance", 1200))
    ]
    assert line_of("off", found, tmp_path) == "off: 5 tests and 1,200 cases passed, 4 s"


def test_the_digest_depends_on_sources_and_tests(tmp_path: Path) -> None:
    seen = set()
    for name in ("src/a.py", "src/b.cpp", "tests/c.py", "src/core.so"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("1")
        seen.add(fingerprint(tmp_path))
    (tmp_path / "src" / "notes.txt").write_text("1")
    assert len(seen | {fingerprint(tmp_path)}) == 4
