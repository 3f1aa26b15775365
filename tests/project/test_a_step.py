"""The page that walks one decoding step: its names stand in the source, and there are few of them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "draftree"
PAGE = ROOT / "docs" / "explanation" / "a-step.md"
MOST = 15


def walk() -> list[str]:
    """Return the sections of the walk, the numbered ones."""
    sections = PAGE.read_text("utf-8").split("\n## ")
    return [section for section in sections if re.match(r"\d", section)]


def code(text: str) -> list[str]:
    """Return what stands in code font, in the order of the text."""
    return re.findall(r"`([^`]+)`", text)


def is_file(name: str) -> bool:
    return name.endswith((".py", "/"))


def defined(path: Path) -> set[str]:
    """Return the functions, classes and methods of a file; methods as `Class.method`."""
    found = set[str]()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
    return found


def test_every_name_stands_in_the_source() -> None:
    known = set[str]().union(*map(defined, SOURCE.rglob("*.py")))
    files = {str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.py")} | {"recurrent/", "models/"}
    for name in (name for section in walk() for name in code(section)):
        assert name in known or any(file.endswith(name) for file in files), name


def test_a_reader_meets_few_names_and_returns_to_no_file() -> None:
    names = {name for section in walk() for name in code(section) if not is_file(name)}
    assert len(names) <= MOST, sorted(names)
    headings = [code(section.partition("\n")[0]) for section in walk()]
    files = [name for heading in headings for name in heading if is_file(name)]
    assert len(files) == len(set(files)) >= 5, files
