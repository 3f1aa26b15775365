"""Writes the tables of README.md and of docs (results, smollm2, performance) from the saved results beside this file.

python benchmarks/tables.py            # between <!-- table:NAME --> and <!-- /table -->, from results/NAME.json;
                                       # <!-- table:NAME columns: A, B --> names the columns
                                       # <!-- table:NAME without: P, Q columns: A, B --> leaves the rows of policies out
                                       # <!-- figures:NAME columns: A, B --> for results of other scripts, by their keys
python benchmarks/tables.py --check    # writes nothing; exit status 1 if a document differs
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftree.errors import UnknownName, UserError
from draftree.evaluation import machines
from draftree.evaluation.report import NGRAM, read
from draftree.evaluation.tables import shown

HERE = Path(__file__).parent
COLUMNS = ("drafter", "policy", "τ [95 %]", "nodes/step", "depth/step", "speed-up [95 %]", "same output")
"""Of a table in a document; with one for the temperature where there are several."""
TABLE = re.compile(r"(<!-- table:(\S+)(?: without: ([^>]*?))?(?: columns: ([^>]*))? -->\n).*?(<!-- /table -->)", re.DOTALL)
FIGURES = re.compile(r"(<!-- figures:(\S+) columns: ([^>]*) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def refreshed(text: str, results: Path) -> str:
    """A document with its tables written anew; one that has no result yet stays as it is."""

    def table(found: re.Match[str]) -> str:
        saved = results / f"{found[2]}.json"
        if not saved.is_file():
            return found[0]
        left_out, columns = ([c.strip() for c in part.split(",")] if part else [] for part in (found[3], found[4]))
        result = read(saved)
        rows = [row for row in result["rows"] if (row["policy"] or "").partition(":")[0] not in left_out]
        return f"{found[1]}{markdown(result | {'rows': rows}, columns or COLUMNS)}\n{found[5]}"

    def figures(found: re.Match[str]) -> str:
        saved = results / f"{found[2]}.json"
        return f"{found[1]}{plain(read(saved), found[3].split(', '))}\n{found[4]}" if saved.is_file() else found[0]

    return FIGURES.sub(figures, TABLE.sub(table, text))


def markdown(result: Mapping[str, Any], columns: Sequence[str] = COLUMNS) -> str:
    """A saved result as a table, under it what was run where.

    Raises:
        UserError: there is no such column.
    """
    rows = shown(result["rows"], result.get("oracle", ()))
    for column in columns:
        if column not in rows[0]:
            raise UnknownName("column", column, rows[0])
    heads = [name for name in rows[0] if name in (*columns, "T")]
    shown_as = [h.replace("counted", "simulated") if result.get("simulated") else h for h in heads]
    return f"{lines(shown_as, [[r[h] for h in heads] for r in rows])}\n\n{caption(result)}"


def caption(result: Mapping[str, Any]) -> str:
    """What a table's figures are of."""
    said, first = result["provenance"], result["rows"][0]
    suite, hardware, target = said["suite"], said["hardware"], said["target"]
    threads = f", threads: {hardware['threads']}" if hardware["kind"] == "cpu" else ""
    how = "replayed along them, so by no clock" if said.get("replayed") else f"times each was written: {said['repeats']}"
    mean_repetition = np.mean([r["repeated_ngrams"] for r in result["rows"]])
    simulated = f"Simulated: counted on the cost curves of {elsewhere(result)}. " if result.get("simulated") else ""
    return (
        f"*{simulated}Target {target['name']} ({target['dtype']}), {first['prompts']} prompts of suite {suite['name']}"
        f"{' (' + ', '.join(suite['categories']) + ')' if suite['categories'] else ''}, at most {said['max_new_tokens']} "
        f"new tokens, {how}, {hardware['device']}{threads}, {said['date'][:10]}; "
        f"repeated {NGRAM}-grams {mean_repetition:.0%}.*"
    )


def elsewhere(result: Mapping[str, Any]) -> str:
    """The machines whose costs a simulated result was counted by."""
    said = result["provenance"]
    tables = said.get("machines") or {c["about"]["machine"]: c["about"] for c in said["costs"].values()}
    return "; ".join(dict.fromkeys(about["device"] for about in tables.values()))


SIMULATED = re.compile("simulat", re.IGNORECASE)


def unlabelled(text: str, results: Path) -> list[str]:
    """The simulated results, and the machines that are not here, which a document names in a block without the word."""
    found = [
        b[2]
        for b in (*TABLE.finditer(text), *FIGURES.finditer(text))
        if not SIMULATED.search(b[0]) and _simulated(results, b[2])
    ]
    names = [*machines.names(), *(n.partition("-")[0] for n in machines.names())]
    blocks = [b for b in re.split(r"\n\s*\n", text) if not SIMULATED.search(b) and re.search(r"\d[.,]?\d*\s*×|speed", b)]
    return found + [n for n in dict.fromkeys(names) for b in blocks if re.search(rf"\b{n}\b", b, re.IGNORECASE)]


def _simulated(results: Path, name: str) -> bool:
    saved = results / f"{name}.json"
    return saved.is_file() and bool(read(saved).get("simulated"))


def plain(result: dict[str, Any], columns: list[str]) -> str:
    """A result's rows as a table of some of their entries; `a/b` is entry b of entry a.

    Raises:
        UserError: a row has no such entry.
    """

    def entry(row: Any, path: str) -> str:
        for key in [path] if path in row else path.split("/"):
            if key not in row:
                raise UnknownName("column", path, row)
            row = row[key]
        return f"{row:.2f}" if isinstance(row, float) else "" if row is None else str(row)

    return lines(columns, [[entry(row, column) for column in columns] for row in result["rows"]])


def lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *rows))


def main() -> int:
    """Refreshes or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, tell whether the README is up to date")
    parser.add_argument("--document", type=Path, action="append", help="instead of these; repeat it")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    shown = ("README.md", "docs/results.md", "docs/smollm2.md", "docs/performance.md")
    documents = args.document or [HERE.parent / name for name in shown]
    try:
        texts = {path: path.read_text() for path in documents}
        fresh = {path: refreshed(text, args.results) for path, text in texts.items()}
    except (OSError, UserError) as error:
        print(f"tables: {error}", file=sys.stderr)
        return 2
    for path in documents:
        if names := unlabelled(fresh[path], args.results):
            print(f"{path} shows figures of {', '.join(names)} without the word 'simulated'", file=sys.stderr)
            return 1
    stale = [path for path in documents if texts[path] != fresh[path]]
    for path in stale:
        if args.check:
            print(f"{path} is not what the saved results say: run python benchmarks/tables.py", file=sys.stderr)
        else:
            path.write_text(fresh[path])
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
