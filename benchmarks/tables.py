"""Write the benchmark pages of the documentation, the picture and the table of the README from the saved results.

python benchmarks/tables.py            # writes docs/reference/benchmarks/*.md as pages.toml describes them,
                                       # docs/images/speed.svg and the table in README.md
python benchmarks/tables.py --check    # writes nothing; exit status 1 if a file differs
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from common.paper_recipes import CLAIMS
from draftree.errors import UnknownName, UserError
from draftree.evaluation import roofline
from draftree.evaluation.result_rows import NGRAM, read_result
from draftree.evaluation.text_tables import result_table
from papers import CONFOUNDED, ITEMS, STANDS_IN

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = Path(__file__).with_name("pages.toml")
FOLDER = Path("docs", "reference", "benchmarks")
PAPERS = Path("docs", "reference", "papers.md")
PICTURE = Path("docs", "images", "speed.svg")
COLUMNS = (
    "drafter",
    "policy",
    "τ [95 %]",
    "nodes/step",
    "depth/step",
    "speed-up [95 %]",
    "same output",
)
"""The columns of a benchmark's table by default; with one for the temperature where there are
several."""
SPEED = re.compile(r"(<!-- speed -->\n).*?(<!-- /speed -->)", re.DOTALL)
GENERATED = "<!-- Written by benchmarks/tables.py from benchmarks/results; edit benchmarks/pages.toml instead. -->"


def written(results: Path = RESULTS) -> dict[Path, str]:
    """Return the text of every generated file, by its path in the repository."""
    found = {
        FOLDER / page["file"]: rendered(page, results)
        for page in tomllib.loads(PAGES.read_text("utf-8"))["page"]
    }
    readme = SPEED.sub(
        lambda m: f"{m[1]}{speed(results)}\n{m[2]}", (ROOT / "README.md").read_text("utf-8")
    )
    return {
        **found,
        Path("docs", "reference", "papers.md"): papers(results),
        PICTURE: picture(results),
        Path("README.md"): readme,
    }


def rendered(page: Mapping[str, Any], results: Path) -> str:
    """Return a page of the documentation as Markdown."""
    parts = [GENERATED, f"# {page['title']}", page["intro"].strip()]
    for section in page["section"]:
        parts.append(f"## {section['heading']}")
        if "text" in section:
            parts.append(section["text"].strip())
        for table in section["table"]:
            parts += [table["note"]] if "note" in table else []
            parts.append(block(table, results))
    return "\n\n".join(parts) + "\n"


def block(table: Mapping[str, Any], results: Path) -> str:
    """Return a saved result as a table with a caption, as an entry of pages.toml describes it."""
    result = read_result(results / f"{table['result']}.json")
    left_out = tuple(table.get("without", ()))
    kept = [
        r
        for r in result["rows"]
        if not left_out or not str(r.get("way", r.get("policy"))).startswith(left_out)
    ]
    kept = [{k: reworded(v, table.get("words", {})) for k, v in row.items()} for row in kept]
    columns, names = table.get("columns", COLUMNS), table.get("names", {})
    source = f"Saved as `benchmarks/results/{table['result']}.json`."
    if (
        "prompts" in kept[0]
        and "suite" in result["provenance"]
        and not any("/" in c and c in names for c in columns)
    ):
        text, _, below = markdown(result | {"rows": kept}, columns).partition("\n\n")
        return f"{text}\n\n{below[:-1]} {source}*"
    return f"{plain({'rows': kept}, columns, names)}\n\n*{where(result)}{source}*"


def reworded(value: Any, words: Mapping[str, str]) -> Any:
    """Return a text with some of its words replaced, anything else as it is."""
    for old, new in words.items() if isinstance(value, str) else ():
        value = value.replace(old, new)
    return value


def where(result: Mapping[str, Any]) -> str:
    """Return the target and the machine of a result of a script, as far as they are known."""
    about = result["provenance"]
    hardware, target = about.get("hardware", about), about.get("target", {})
    named = [f"Target {target['name']}"] if target else []
    named += [f"({target['dtype']})"] if "dtype" in target else []
    machine = (
        [f"{hardware['device']}, threads: {hardware['threads']}"] if "device" in hardware else []
    )
    day = [about["date"][:10]] if "date" in about else []
    said = ", ".join(filter(None, [" ".join(named), *machine, *day]))
    return f"{said}. " if said else ""


def papers(results: Path) -> str:
    """Return the page of the papers' tables and figures, with their commands and verdicts."""
    saved = {
        (r["target"], r["paper"], r["table"], r["claim"]): r
        for r in read_rows(results / "papers.json")
    }
    text = [GENERATED, PAGES.with_name("papers.md").read_text("utf-8").strip()]
    text += ["## Nodes at equal τ", EQUAL_TAU, equal_tau(results)]
    for paper in dict.fromkeys(claim.paper for claim in CLAIMS):
        items = [i for i in ITEMS if i.paper == paper]
        commands = [
            [i.place, i.what, f"`{i.command}`" if i.command else f"none: {i.reason}"] for i in items
        ]
        text += [f"## {paper}", lines(["table", "shows", "command"], commands)]
        rows = []
        for claim in (c for c in CLAIMS if c.paper == paper):
            place = (paper, claim.table, claim.claim)
            here = [told(saved.get((target, *place))) for target in ("demo", "smollm2")]
            why = CONFOUNDED.get(place, STANDS_IN.get(place, ""))
            if not any(here):
                why = f"no verdict: it {claim.not_run}"
            rows.append([claim.claim, claim.table, claim.figures, *here, why])
        heads = ["claim", "table", "paper", "demo", "SmolLM2", "what stands in, or why not"]
        text.append(lines(heads, rows))
    return "\n\n".join(text) + "\n"


EQUAL_TAU = """
How many nodes a step each policy takes, divided by those that EAGLE-2 takes for the same τ, on the demo: below 1 it needs
fewer. EAGLE-2 is as published (depth 6, width 10), or as deep and wide as C2T's paper has it (10 and 15). Forty questions of
mathematics, or forty others. An interval stands for itself, without a correction. `benchmarks/equal_tau.py` takes any saved
result; `benchmarks/results/equal_tau.json` has each curve of all of them, and names what it leaves out.
""".strip()
CURVES = {"eagle2:nodes=…": "depth 6", "eagle2:depth=10,nodes=…,width=15": "depth 10"}
"""EAGLE-2's curves, by their specs in the saved comparison at equal τ."""
KINDS = {
    "curves_edd": "math",
    "curves_eagle": "math",
    "policies_other_edd": "others",
    "policies_other_eagle": "others",
}
"""The results on the page, and their questions."""


def equal_tau(results: Path) -> str:
    """Return the table of nodes at equal τ beside EAGLE-2's."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in read_rows(results / "equal_tau.json"):
        if row["result"] in KINDS and row["beside"] in CURVES and row["reached"] > 0.9:
            place = (row["drafter"], row["policy"], KINDS[row["result"]], f"{row['τ']:.2f}")
            cells = found.setdefault((*place, f"{row['nodes/step']:.0f}"), {})
            cells[CURVES[row["beside"]]] = "{:.2f} [{:.2f}, {:.2f}]".format(*row["share"])
    heads = ["drafter", "policy", "questions", "τ", "nodes/step", *CURVES.values()]
    return lines(
        heads,
        [[*key, *(cells.get(c, "") for c in CURVES.values())] for key, cells in found.items()],
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the saved verdicts."""
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["rows"]
    return rows


def told(row: Mapping[str, Any] | None) -> str:
    """Return a verdict with its figures; nothing where there is none."""
    if row is None:
        return ""
    figures = (
        "{:.2f} [{:.2f}, {:.2f}] of its {}".format(*row["ratio"], row["of"])
        if "ratio" in row
        else row["of"]
    )
    kept = (
        ", {:.2f} [{:.2f}, {:.2f}] of its passes".format(*row["passes"]) if "passes" in row else ""
    )
    costs = (
        "; {:.2f} [{:.2f}, {:.2f}] at the paper's costs".format(*row["paper costs"])
        if "paper costs" in row
        else ""
    )
    seeds = "".join(
        "; {:.2f} [{:.2f}, {:.2f}] with the other seed".format(*r)
        for r in row.get("other seeds", ())
    )
    return f"**{row['verdict']}** {figures}{kept}{costs}{seeds}"


STOCK, PLAIN = "transformers: generate, stock kernels", "plain decoding"
OURS, FOUR = "draftree: eagle3+suffix yield", "draftree, 4 bits: eagle3+suffix yield"
WARMED_UP = {"smollm2_peers_compiled": "math", "smollm2_peers_tasks": "tasks"}
"""Results whose warm-up had two of the timed questions, with the suite of `warm_up.py` for each."""
SPEEDS = (
    ("20 math questions", "AVX-512, bfloat16 †", "smollm2_peers_compiled", STOCK, PLAIN, OURS),
    ("18 questions of six tasks", "AVX-512, bfloat16 †", "smollm2_peers_tasks", STOCK, PLAIN, OURS),
    (
        "20 math questions",
        "AVX-512, 4 bits †",
        "smollm2_peers_compiled",
        "",
        "draftree, 4 bits: plain",
        FOUR,
    ),
    (
        "120 questions of six tasks",
        "AVX2 only, bfloat16",
        "smollm2_peers_avx2_only",
        "",
        PLAIN,
        OURS,
    ),
    (
        "120 questions of six tasks",
        "AVX2 only, 4 bits",
        "smollm2_peers_avx2_only",
        "",
        "draftree, 4 bits: plain",
        FOUR,
    ),
)
"""The rows of the README's table: prompts, machine, result, and the compared ways."""


def speed(results: Path) -> str:
    """Return the table of the README."""
    rows = []
    for prompts, machine, name, *ways in SPEEDS:
        known = fair_rates(results, name)
        theirs, plainly, drafted = (known.get(way) for way in ways)
        assert plainly is not None
        assert drafted is not None
        rows.append(
            [
                prompts,
                machine,
                "–" if theirs is None else f"{theirs:.0f}",
                f"{plainly:.0f}",
                f"**{drafted:.0f}**",
                f"{drafted / plainly:.2f} ×",
            ]
        )
    return lines(
        ["prompts", "CPU, precision", "transformers", "plain", "default", "drafting brings"], rows
    )


def fair_rates(results: Path, name: str) -> dict[str, float]:
    """Return the tokens per second of a result by way; of our default without known questions.

    Where the warm-up had timed questions, the default's speed is multiplied by the ratio of the
    tokens per pass that `warm_up.py` has counted without and with them.
    """
    known = rates(read_result(results / f"{name}.json"))
    if name in WARMED_UP:
        counts = {
            row["warm-up"]: row["tokens/pass"]
            for row in read_result(results / "smollm2_warm_up.json")["rows"]
            if row["suite"] == WARMED_UP[name]
        }
        ratio = counts["other questions"] / counts["timed questions"]
        known |= {way: known[way] * ratio for way in (OURS, FOUR) if way in known}
    return known


def rates(result: Mapping[str, Any]) -> dict[str, float]:
    """Return tokens per second at batch size 1, by way.

    Where a result has several precisions, they are by way and precision.
    """
    rows = [
        row
        for row in result["rows"]
        if row.get("batch", 1) == 1 and "a batch" not in str(row.get("prompts"))
    ]
    return {
        row["way"] + (f"/{row['precision']}" if "precision" in row else ""): row["tokens/s"]
        for row in rows
    }


BARS = {
    STOCK: "transformers, generate",
    "transformers: prompt lookup, stock kernels": "transformers, prompt lookup",
    "OpenVINO GenAI: prompt lookup": "OpenVINO, prompt lookup, 4 bits",
    OURS: "draftree",
    FOUR: "draftree, 4 bits",
}


def picture(results: Path) -> str:
    """Return the README's bar chart as SVG."""
    known = fair_rates(results, "smollm2_peers_tasks")
    longest = max(known[way] for way in BARS)
    step = 30
    left = 236
    width = 400
    height = step * len(BARS) + 34
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="sans-serif" font-size="14">',
        f'<rect width="720" height="{height}" fill="#ffffff"/>',
    ]
    for i, (way, name) in enumerate(BARS.items()):
        top, length = 10 + step * i, width * known[way] / longest
        colour = "#0f766e" if name.startswith("draftree") else "#94a3b8"
        drawn += [
            f'<text x="{left - 10}" y="{top + 15}" text-anchor="end" fill="#1e293b">{escape(name)}</text>',
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="20" fill="{colour}"/>',
            f'<text x="{left + length + 8:.1f}" y="{top + 15}" fill="#1e293b">{known[way]:.0f}</text>',
        ]
    label = "tokens per second, bfloat16 unless 4 bits are named; SmolLM2-135M, two CPU cores"
    drawn.append(f'<text x="{left}" y="{height - 8}" font-size="12" fill="#475569">{label}</text>')
    return "\n".join([*drawn, "</svg>"]) + "\n"


def markdown(result: Mapping[str, Any], columns: Sequence[str] = COLUMNS) -> str:
    """Return a saved benchmark as a table, and under it what was run where.

    Raises:
        UserError: there is no such column.
    """
    rows = result_table(result["rows"], result.get("oracle", ()))
    for column in columns:
        if column not in rows[0]:
            raise UnknownName("column", column, rows[0])
    heads = [*columns, *(["T"] if "T" in rows[0] else [])]
    shown_as = [h.replace("counted", "simulated") if result.get("simulated") else h for h in heads]
    return f"{lines(shown_as, [[r[h] for h in heads] for r in rows])}\n\n{caption(result)}"


def caption(result: Mapping[str, Any]) -> str:
    """Return a sentence that says what was measured where."""
    said, first = result["provenance"], result["rows"][0]
    suite = said["suite"]
    hardware = said["hardware"]
    target = said["target"]
    threads = f", threads: {hardware['threads']}" if hardware["kind"] == "cpu" else ""
    how = (
        "replayed along them, so by no clock"
        if said.get("replayed")
        else f"times each was written: {said['repeats']}"
    )
    mean_repetition = np.mean([r["repeated_ngrams"] for r in result["rows"]])
    simulated = (
        f"Simulated: counted on the cost curves of {elsewhere(result)}. "
        if result.get("simulated")
        else ""
    )
    return (
        f"*{simulated}Target {target['name']} ({target['dtype']}), {first['prompts']} prompts of suite {suite['name']}"
        f"{' (' + ', '.join(suite['categories']) + ')' if suite['categories'] else ''}, at most {said['max_new_tokens']} "
        f"new tokens, {how}, {hardware['device']}{threads}, {said['date'][:10]}; "
        f"repeated {NGRAM}-grams {mean_repetition:.0%}.*"
    )


def elsewhere(result: Mapping[str, Any]) -> str:
    """Return the machines whose costs a simulated result was counted with."""
    said = result["provenance"]
    tables = said.get("machines") or {
        c["about"]["machine"]: c["about"] for c in said["costs"].values()
    }
    return "; ".join(dict.fromkeys(about["device"] for about in tables.values()))


SIMULATED = re.compile("simulat", re.IGNORECASE)
SAVED = re.compile(r"benchmarks/results/(\w+)\.json")


def unlabelled(text: str, results: Path) -> list[str]:
    """Return simulated results and machines that a document shows without the word "simulated"."""
    sections = re.split(r"\n(?=#+ )", text)
    named = [(s, name) for s in sections if not SIMULATED.search(s) for name in SAVED.findall(s)]
    found = [name for _, name in named if _simulated(results, name)]
    names = [*roofline.machine_names(), *(n.partition("-")[0] for n in roofline.machine_names())]
    blocks = [
        b
        for b in re.split(r"\n\s*\n", text)
        if not SIMULATED.search(b) and re.search(r"\d[.,]?\d*\s*×|speed", b)
    ]
    return found + [
        n for n in dict.fromkeys(names) for b in blocks if re.search(rf"\b{n}\b", b, re.IGNORECASE)
    ]


def _simulated(results: Path, name: str) -> bool:
    saved = results / f"{name}.json"
    return saved.is_file() and bool(json.loads(saved.read_text("utf-8")).get("simulated"))


def plain(
    result: Mapping[str, Any], columns: Sequence[str], names: Mapping[str, str] | None = None
) -> str:
    """Return a result's rows as a table of some of their entries; `a/b` is entry b of entry a.

    Raises:
        UserError: a row has no such entry.
    """

    def entry(row: Any, path: str) -> str:
        for key in [path] if path in row else path.split("/"):
            if key not in row:
                raise UnknownName("column", path, row)
            row = row[key]
        return f"{row:.2f}" if isinstance(row, float) else "" if row is None else str(row)

    heads = [(names or {}).get(column, column) for column in columns]
    return lines(heads, [[entry(row, column) for column in columns] for row in result["rows"]])


def lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *rows)
    )


def main() -> int:
    """Write the files, or check them; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit status 1 if a file is not up to date",
    )
    args = parser.parse_args()
    try:
        files = written()
    except (OSError, UserError) as error:
        print(f"tables: {error}", file=sys.stderr)
        return 2
    for path, text in files.items():
        if names := unlabelled(text, RESULTS):
            print(
                f"{path} shows figures of {', '.join(names)} without the word 'simulated'",
                file=sys.stderr,
            )
            return 1
    stale = [
        path
        for path, text in files.items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text("utf-8") != text
    ]
    for path in stale:
        if args.check:
            print(
                f"{path} is not what the saved results say: run python benchmarks/tables.py",
                file=sys.stderr,
            )
        else:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(files[path], "utf-8")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
