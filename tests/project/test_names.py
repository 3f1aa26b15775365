"""Names at module level: one that several modules define means the same in each of them."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "draftree"
SHARED = {
    "LOG": "the module's logger",
    "METADATA_FILE": "name of the JSON file that says how the data beside it were made",
    "T": "a type variable",
    "TEXTS_PER_BATCH": "number of texts that are generated or replayed in one batch",
    "TRIAL_TOKENS": "number of tokens of the passes by which variants of a computation are compared",
    "_NOT_NEEDED": "the hint that an option of another tool is not needed",
    "__all__": "the public names of a package",
    "examine": "makes one of the reports of `draftree doctor`",
    "log": "natural logarithm",
    "main": "entry point of a program",
    "to_speculators": "converts a drafter to the layout of the library speculators",
}
"""Names that three or more modules may define, with the one meaning that they have."""


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those in `if`, `try` and `with` among them."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(statement, part, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from statements(handler.body)


def defined(source: str) -> set[str]:
    """Return the names of the classes, functions and constants that a module defines."""
    found = set[str]()
    for statement in statements(ast.parse(source).body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = (node for target in targets for node in ast.walk(target))
            found |= {
                node.id
                for node in names
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
    return found


def shared(modules: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names that three or more modules define, with these modules."""
    found = defaultdict[str, list[str]](list)
    for module, source in modules.items():
        for name in defined(source):
            found[name].append(module)
    return {name: where for name, where in found.items() if len(where) >= 3}


def test_a_name_of_three_modules_has_one_meaning() -> None:
    """A new name in this list needs another name, or a meaning that fits all its modules."""
    modules = {
        str(p.relative_to(SOURCE)): p.read_text("utf-8") for p in sorted(SOURCE.rglob("*.py"))
    }
    found = shared(modules)
    assert {name: where for name, where in found.items() if name not in SHARED} == {}
    assert set(SHARED) == set(found), "a name is shared no longer"


@pytest.mark.parametrize(
    "source",
    [
        "def rows(): ...",
        "async def rows(): ...",
        "class rows: ...",
        "rows = 1",
        "rows: int = 1",
        "a, (rows, b) = 1, (2, 3)",
        "if True:\n    rows = 1",
        "try:\n    import a\nexcept ImportError:\n    rows = None",
    ],
)
def test_a_shared_name_is_found(source: str) -> None:
    """Planted: a third module that defines a name."""
    two = {"a.py": "rows = 1", "b.py": "def rows(): ..."}
    assert shared(two) == {}
    assert shared({**two, "c.py": source}) == {"rows": ["a.py", "b.py", "c.py"]}
    for local in ("def f():\n    rows = 1", "from a import rows", "a.rows = 1", "a[rows] = 1"):
        assert shared({**two, "c.py": local}) == {}
