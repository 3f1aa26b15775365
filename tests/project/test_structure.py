"""The source's own order: imports run downward, files and functions are short, few files lie at the root."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "draftree"
FILES = sorted(SOURCE.rglob("*.py"))


@pytest.fixture(scope="module")
def structure() -> ModuleType:
    """The script that holds the levels and draws them."""
    spec = importlib.util.spec_from_file_location("structure", ROOT / "benchmarks" / "structure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def imports(structure: ModuleType) -> Any:
    """What every file imports."""
    return structure.imports()


def test_imports_run_downward_and_in_no_circle(structure: ModuleType, imports: Any) -> None:
    assert structure.faults(imports) == []
    assert set(structure.parts(imports)) == {
        name for names in structure.LEVELS.values() for name in names
    }


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        (
            "tree.py",
            "from draftree.engine import Engine",
            "draftree.tree imports draftree.engine: 'engine' is not below 'tree'",
        ),
        (
            "tree.py",
            "def f():\n    import draftree.metrics",
            "draftree.tree imports draftree.metrics: 'metrics' is not below 'tree'",
        ),
        ("policies/pct.py", "from draftree import engine", "'engine' is not below 'policies'"),
        (
            "policies/pct.py",
            "from draftree.policies import base",
            "imports run in a circle: draftree.policies.",
        ),
        ("odd/thing.py", "", "'odd' stands in no level"),
    ],
)
def test_wrong_imports_are_named(
    structure: ModuleType, tmp_path: Path, file: str, text: str, told: str
) -> None:
    source = tmp_path / "draftree"
    others = {
        "tree.py": "",
        "metrics.py": "",
        "engine.py": "",
        "policies/pct.py": "",
        "policies/base.py": "import draftree.policies.pct",
    }
    for name, body in {**others, file: text}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(body)
    assert told in structure.faults(structure.imports(source))[0]
    (source / file).unlink()
    assert structure.faults(structure.imports(source)) == []


def test_the_package_imports_nothing_of_the_benchmarks() -> None:
    scripts = {p.stem for p in (ROOT / "benchmarks").glob("*.py")} | {"common", "benchmarks"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not scripts & {name.partition(".")[0] for name in named}, path


def test_the_picture_is_up_to_date(structure: ModuleType, imports: Any) -> None:
    told = "run python benchmarks/structure.py"
    assert structure.PICTURE.read_text("utf-8") == structure.drawn(imports), told


def test_few_files_lie_at_the_root() -> None:
    assert (
        len([p for p in SOURCE.glob("*.py") if p.name not in ("__init__.py", "__main__.py")]) <= 13
    )


def test_few_files_are_long() -> None:
    """A goal, not a reason to write denser: more long files than today are too many."""
    lengths = {p.relative_to(SOURCE): len(p.read_text("utf-8").splitlines()) for p in FILES}
    long = {str(path): n for path, n in lengths.items() if n > 400}
    assert len(long) <= 38, long


def test_few_functions_are_long() -> None:
    """Likewise."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, kinds):
                lines = int(node.end_lineno or 0) - node.lineno + 1
                lengths[f"{path.relative_to(SOURCE)}:{node.name}"] = lines
    long = {name: n for name, n in lengths.items() if n > 60}
    assert len(long) <= 34, long
    assert max(lengths.values()) <= 90, long


def test_lines_of_cpp_have_at_most_a_hundred_columns() -> None:
    """`clang-format -i` with `.clang-format` lays them out so."""
    native = SOURCE / "native"
    files = sorted((*native.rglob("*.cpp"), *native.rglob("*.h")))
    assert len(files) > 20
    long = [
        f"{path.name}:{number}"
        for path in files
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(line) > 100
    ]
    assert not long, long
