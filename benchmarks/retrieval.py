"""What drafting without training costs: building, opening and holding a datastore, and the time of a step.

    python benchmarks/retrieval.py build --work FOLDER [--megabytes 10 --megabytes 100]
    python benchmarks/retrieval.py steps --work FOLDER --suite FILE [--category NAME] [--limit N] [--pair DRAFTER POLICY]

`build` takes so many megabytes of distinct source text from the Python packages of this
environment, builds a datastore of each kind from it, and tells seconds, bytes, how long it takes to
open, and what stays resident while it drafts. `steps` tells the seconds of drafting in a step, with
all that the drafter does behind it, beside one target pass of one token.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from draftree import Engine, Request, Sampling, load
from draftree.cli.terminal import table
from draftree.evaluation import suites
from draftree.evaluation.grid import choose_requests
from draftree.evaluation.provenance import provenance
from draftree.measure_costs import reliable_costs

KINDS = ("aded", "rest")
PAIRS = (
    ("pld", "trie"),
    ("suffix", "trie"),
    ("lookahead", "trie"),
    ("aded", "mcts"),
    ("edd", "pct"),
)
HELD = """
import dataclasses, sys, time
from pathlib import Path
import numpy as np
from draftree import Request, load
from draftree.registry import build
kind, folder, ids = sys.argv[1], sys.argv[2], Path(sys.argv[3])
def resident():
    return {k: int(v.split()[0]) for k, _, v in (l.partition(":") for l in open("/proc/self/status")) if k.startswith("Rss")}
engine = load("demo", drafter="pld", policy="mcts" if kind == "aded" else "trie")
tokens = np.load(ids)
engine.write([Request(tokens[-192:].tolist(), 32)], reuse=False)
before = resident()
begun = time.perf_counter()
drafter = build("drafter", folder).open(engine.target)
opened = time.perf_counter() - begun
engine = dataclasses.replace(engine, drafter=drafter)
for start in range(0, len(tokens) - 256, max(1, len(tokens) // 40)):
    engine.write([Request(tokens[start : start + 192].tolist(), 32)], reuse=False)
after = resident()
import json
print(json.dumps({"open_seconds": opened, **{k: (after[k] - before[k]) * 1024 for k in ("RssAnon", "RssFile")}}))
"""
"""Opens a datastore in a process of its own, drafts from it along 40 texts, and reports the memory
that it added to the process."""


def corpus(folder: Path, size: int) -> int:
    """Copy distinct source files of installed packages up to a size; return their bytes."""
    copied, seen = 0, set[str]()
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        if copied >= size:
            break
        text = path.read_bytes()
        digest = hashlib.sha256(text).hexdigest()
        if digest not in seen and text.strip():
            seen.add(digest)
            copied += len(text)
            copy = folder / f"{digest[:2]}" / f"{digest[2:18]}.py"
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(text)
    return copied


def folder_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def built(kind: str, source: Path, out: Path) -> dict[str, Any]:
    """Build one datastore; return its cost, and the contents of its own record."""
    shutil.rmtree(out, ignore_errors=True)
    begun = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "draftree",
        "datastore",
        "build",
        "--kind",
        kind,
        "--data",
        str(source),
        "--out",
        str(out),
    ]
    said = subprocess.run(
        [*command, "--json"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return {
        "kind": kind,
        "build_seconds": time.perf_counter() - begun,
        "bytes": folder_bytes(out),
        "note": json.loads(said),
    }


def build(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Build every kind for every size."""
    rows = []
    tokenizer = load("demo", drafter="pld", policy="trie").tokenizer
    for megabytes in args.megabytes or [10, 100]:
        source = args.work / f"source-{megabytes}"
        size = (
            corpus(source, megabytes * 1_000_000) if not source.is_dir() else folder_bytes(source)
        )
        sample = args.work / "sample.npy"
        texts = (path.read_text(errors="ignore") for path in sorted(source.rglob("*.py"))[::50])
        np.save(
            sample,
            np.concatenate(
                [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            ),
        )
        for kind in KINDS:
            out = args.work / f"{kind}-{megabytes}"
            row = {"source_bytes": size} | built(kind, source, out)
            held = subprocess.run(
                [sys.executable, "-c", HELD, kind, str(out), str(sample)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
            rows.append(row | json.loads(held))
    return rows


def step_seconds(engine: Engine, request: Request) -> list[float]:
    """Return the seconds of each step for growing the tree and the drafter's commit after it."""
    texts, steps = engine.begin([request], Sampling(), reuse=False)
    spent = [texts.stats.draft_seconds for _ in steps]  # after the prefill and each step
    return np.diff(spent).tolist()


def steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the seconds of steps as a row for each pair of drafter and policy."""
    for drafter, policy in args.pair or PAIRS:
        engine = load("demo", drafter=drafter, policy=policy)
        costs = reliable_costs(engine.target, engine.drafter)
        prompts = suites.load(str(args.suite)).select(args.category)
        requests = choose_requests(prompts, engine, 128, args.limit)[0]
        replace(engine, costs=costs).write(requests[:1], Sampling(), reuse=False)
        engine = replace(engine, costs=costs)
        seconds = [s for request in requests for s in step_seconds(engine, request)]
        forward = costs.at(128, 1).target_seconds(1)
        yield {
            "drafter": drafter,
            "policy": policy,
            "steps": len(seconds),
            "target_seconds": forward,
            "median_seconds": float(np.median(seconds)),
            "p99_seconds": float(np.quantile(seconds, 0.99)),
        }


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Return a row as text."""
    milli = lambda s: f"{1e3 * s:.2f}"
    if "kind" in row:
        return {
            "kind": row["kind"],
            "source MB": f"{row['source_bytes'] / 1e6:.0f}",
            "build s": f"{row['build_seconds']:.1f}",
            "MB": f"{row['bytes'] / 1e6:.1f}",
            "open ms": milli(row["open_seconds"]),
            "resident MB, private": f"{row['RssAnon'] / 1e6:.1f}",
            "mapped": f"{row['RssFile'] / 1e6:.1f}",
        }
    return {
        "drafter": row["drafter"],
        "policy": row["policy"],
        "steps": str(row["steps"]),
        "median ms": milli(row["median_seconds"]),
        "p99 ms": milli(row["p99_seconds"]),
        "target pass ms": milli(row["target_seconds"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("build", "steps"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, action="append")
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument(
        "--pair",
        nargs=2,
        action="append",
        metavar=("DRAFTER", "POLICY"),
        help="instead of all without a store",
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = build(args) if args.what == "build" else list(steps(args))
    Console().print(table(f"retrieval: {args.what}", [shown(r) for r in rows]))
    if args.out:
        target = load("demo", drafter="pld", policy="trie").target
        args.out.write_text(
            json.dumps({"provenance": provenance(target, 0), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
