"""Completions of standard-library functions, and the library without them, for a datastore of code.

    python benchmarks/code_suite.py --out FOLDER [--prompts 40]

Writes FOLDER/stdlib.jsonl, a suite whose prompts end behind a function's head, and FOLDER/corpus, a
copy of all other files. A file with a prompt is left out of the corpus whole. Which files are taken
follows from their names alone.
"""

import argparse
import ast
import hashlib
import json
import shutil
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from draftree.data.decontamination import Excluded

LIBRARY = Path(sysconfig.get_path("stdlib"))
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "ensurepip",
}
LINES = 12
"""Lines of the shortest function that is used."""
BEFORE = 25
"""Lines before the function's body that make a prompt, at most."""


def sources() -> list[Path]:
    """Return the library's own modules, without its tests."""
    found = LIBRARY.rglob("*.py")
    return sorted(p for p in found if not LEFT_OUT & set(p.relative_to(LIBRARY).parts))


def heads(path: Path) -> Iterator[str]:
    """Yield the lines before the body of each long function of a file, with its docstring."""
    text = path.read_text(encoding="utf-8", errors="strict")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.FunctionDef)
            and node.end_lineno
            and node.end_lineno - node.lineno >= LINES
        ):
            described = ast.get_docstring(node) is not None and len(node.body) > 1
            begin = node.body[1 if described else 0].lineno - 1
            yield "".join(lines[max(0, begin - BEFORE) : begin])


def drawn_heads(count: int, excluded: Excluded = Excluded()) -> Iterator[tuple[Path, str]]:
    """Yield files, ordered by a hash of their names, each with its first long function's head.

    Heads with an excluded prompt are left out.
    """
    by_hash = lambda path: hashlib.sha256(str(path.relative_to(LIBRARY)).encode()).hexdigest()
    found = ((path, next(heads(path), None)) for path in sorted(sources(), key=by_hash))
    kept = ((path, head) for path, head in found if head is not None and not excluded.holds(head))
    yield from islice(kept, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=40)
    args = parser.parse_args()
    drawn = list(drawn_heads(args.prompts))
    held_out = {path for path, _ in drawn}
    suite = [
        {"prompt": head, "category": "stdlib", "file": str(path.relative_to(LIBRARY))}
        for path, head in drawn
    ]
    corpus = args.out / "corpus"
    shutil.rmtree(corpus, ignore_errors=True)  # of a run with other prompts
    for path in sources():
        if path not in held_out:
            copy = corpus / path.relative_to(LIBRARY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    (args.out / "stdlib.jsonl").write_text("".join(json.dumps(row) + "\n" for row in suite))
    print(f"{args.out}: {len(suite)} prompts, {len(sources()) - len(held_out)} files in the corpus")


if __name__ == "__main__":
    main()
