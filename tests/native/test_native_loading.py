"""How the native kernels are built, chosen and reported, and what happens without them."""

import ast
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftree import native

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "draftree" / "native"
TOOLS = ("sh", "cmake", "ninja", "uname", "cat")
"""Programs of a build that are no compilers."""


def run(value: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, native.VARIABLE: value}
    return subprocess.run(
        [sys.executable, *args], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("variant", [*native.available(), native.OFF])
def test_a_variant_is_forced(variant: str) -> None:
    assert (
        run(variant, "-c", "from draftree import native; print(native.variant())").stdout.strip()
        == variant
    )


def test_an_unknown_variant_is_one_line_and_status_2() -> None:
    ended = run("avx3", "-m", "draftree", "list", "drafters")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "avx3" in ended.stderr
    assert all(name in ended.stderr for name in (*native.available(), native.OFF))


def test_a_variant_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "requested_variant", "avx512_bf16")
    monkeypatch.setattr(native, "available", lambda: ("generic",))
    with pytest.raises(native.UserError, match=r"'avx512_bf16'.*allowed are generic, off"):
        native.check_variable()


def test_the_absence_of_native_kernels_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_core", None)
    monkeypatch.setattr(native, "requested_variant", "")
    native.report_absence.cache_clear()
    with caplog.at_level(logging.WARNING):
        native.report_absence()
        native.report_absence()
    assert [record.message for record in caplog.records] == [
        native.ABSENCE_REMARK.format(native._missing)
    ]


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the extension module by one of an older build, which lacks loops."""
    loops = SimpleNamespace(present=lambda: "C++")
    digest = native.sources_digest(SOURCES)
    monkeypatch.setattr(native, "core", SimpleNamespace(loops=loops, sources_digest=digest))
    monkeypatch.setattr(native, "_core", native.core)
    monkeypatch.setattr(native, "requested_variant", "")
    monkeypatch.setattr(native, "missing_loops", [])
    monkeypatch.setattr(native, "REFERENCES", {})
    native.report_absence.cache_clear()
    yield
    native.report_absence.cache_clear()


@pytest.mark.usefixtures("older")
def test_loops_that_an_older_extension_lacks_are_named_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert native.native_as("present")(lambda: "Python")() == "C++"
    for name in ("second", "first"):
        assert native.native_as(name)(lambda: "Python")() == "Python"
    with caplog.at_level(logging.WARNING):
        assert not caplog.records
        native.report_absence()
        native.report_absence()
    assert [record.message for record in caplog.records] == [
        native.MISSING_REMARK.format("first, second")
    ]
    assert "pip install" in native.MISSING_REMARK
    native.native_as("third")(lambda: None)  # of a module that is imported later
    assert caplog.records[-1].message == native.MISSING_REMARK.format("third")


@pytest.mark.usefixtures("older")
def test_an_extension_with_all_loops_is_not_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    native.native_as("present")(lambda: None)
    with caplog.at_level(logging.WARNING):
        native.report_absence()
    assert not caplog.records


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("built_from", ["0" * 64, None])
def test_an_extension_of_other_sources_is_remarked_on(
    built_from: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one of a version that did not store the digest of its sources."""
    if built_from is None:
        del native.core.sources_digest
    else:
        native.core.sources_digest = built_from
    with caplog.at_level(logging.WARNING):
        native.report_absence()
        native.report_absence()
    assert [record.message for record in caplog.records] == [native.OUTDATED_REMARK]


@pytest.mark.skipif(native._core is None, reason="the extension module is not built")
def test_the_extension_was_built_from_these_sources() -> None:
    """So CMake and Python compute the same digest."""
    assert native._core.sources_digest == native.sources_digest(SOURCES)


def test_the_digest_depends_on_names_and_contents_of_sources_alone(tmp_path: Path) -> None:
    assert native.sources_digest(tmp_path) == ""
    (tmp_path / "loops").mkdir()
    (tmp_path / "loops" / "a.h").write_text("int a;")
    first = native.sources_digest(tmp_path)
    (tmp_path / "other.py").write_text("")
    assert native.sources_digest(tmp_path) == first
    (tmp_path / "loops" / "a.h").write_text("int b;")
    second = native.sources_digest(tmp_path)
    (tmp_path / "loops" / "a.h").rename(tmp_path / "a.h")
    assert len({first, second, native.sources_digest(tmp_path)}) == 3


def bound(*signatures: str) -> Any:
    """Return a C++ function with these signatures, as nanobind stores them."""
    function = lambda *_: "C++"
    function.__nb_signature__ = [(text, None) for text in signatures]
    return function


@pytest.mark.usefixtures("older")
def test_loops_of_an_older_extension_that_take_other_arguments_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = "def loop(arg0: numpy.ndarray, arg1: int, /) -> tuple[numpy.ndarray, int]"
    native.core.loops.same, native.core.loops.changed = bound(two, two), bound(two)
    native.core.loops.one, native.core.loops.none = (
        bound("def loop(arg: int, /) -> int"),
        bound(two),
    )
    assert native.native_as("same")(lambda x, n: "Python")(1, 2) == "C++"
    assert native.native_as("same")(lambda x, n, scale=1.0: "Python")(1, 2) == "C++"
    assert native.native_as("one")(lambda x: "Python")(1) == "C++"
    assert native.native_as("changed")(lambda x, n, scale: "Python")(1, 2, 3) == "Python"
    assert native.native_as("none")(lambda: "Python")() == "Python"
    with caplog.at_level(logging.WARNING):
        native.report_absence()
    assert [record.message for record in caplog.records] == [
        native.MISSING_REMARK.format("changed, none")
    ]


def names_of_loops(source: str) -> set[str]:
    """Return the names under which functions of a module look for their C++ loops."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Name("native") | ast.Attribute(attr="native"):
                        names.add(node.name)
                    case ast.Call(
                        ast.Name("native_as") | ast.Attribute(attr="native_as"),
                        [ast.Constant(str(name))],
                    ):
                        names.add(name)
    return names


@pytest.mark.skipif(native.core is None, reason="there are no native kernels")
def test_every_native_function_has_its_loop_in_the_extension() -> None:
    sources = [path.read_text() for path in (ROOT / "src" / "draftree").rglob("*.py")]
    names = set[str]().union(*map(names_of_loops, sources))
    assert len(names) > 40
    assert names >= native.REFERENCES.keys()
    lacking = {name for name in names if not hasattr(native.core.loops, name)}
    assert not lacking
    assert names_of_loops("@native_as('grow')\ndef f(): ...\n@native\ndef g(): ...") == {
        "grow",
        "g",
    }


def without_native(code: str) -> subprocess.CompletedProcess[str]:
    return run(native.OFF, "-c", code)


@pytest.mark.long
def test_text_is_the_same_without_native_kernels() -> None:
    code = "import draftree; print(draftree.load(drafter='edd+suffix', policy='yield').complete('Lena reads 12 pages').text)"
    expected = run("", "-c", code)
    assert expected.returncode == 0, expected.stderr
    assert without_native(code).stdout == expected.stdout


def build(tmp_path: Path, path: str) -> tuple[list[str], str]:
    """Build a wheel with programs of some folder alone; return its files, and what was printed."""
    source, folder = tmp_path / "source", tmp_path / "wheel"
    ignored = shutil.ignore_patterns(".*", "build", "__pycache__", "*.so")
    source.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "build_backend"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    env = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")} | {
        "PATH": path
    }
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "-v",
        "-w",
        str(folder),
        str(source),
    ]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist(), ended.stdout + ended.stderr


def tools(tmp_path: Path) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        if (found := shutil.which(name)) is not None:
            (folder / name).symlink_to(found)
    return folder


@pytest.mark.long
def test_a_wheel_is_built_with_the_compiler_at_hand(tmp_path: Path) -> None:
    files, _ = build(tmp_path, os.environ["PATH"])
    assert any(name.startswith("draftree/native/_core.") for name in files)
    assert not any(name.endswith((".cpp", ".h")) for name in files)


@pytest.mark.long
def test_without_a_compiler_ziglang_builds_the_kernels(tmp_path: Path) -> None:
    files, _ = build(tmp_path, str(tools(tmp_path)))
    assert any(name.startswith("draftree/native/_core.") for name in files)


@pytest.mark.long
def test_if_no_compiler_works_the_package_is_built_without_kernels(tmp_path: Path) -> None:
    folder = tools(tmp_path)
    (folder / "c++").write_text("#!/bin/sh\nexit 1\n")
    (folder / "c++").chmod(0o755)
    files, printed = build(tmp_path, str(folder))
    assert "draftree/native/__init__.py" in files
    assert not any(name.startswith("draftree/native/_core.") for name in files)
    assert "without them" in printed
