"""How long a command takes to refuse a wrong value of an option: the median of some runs, for each option of each command.

python benchmarks/wrong_values.py                        # all commands, five runs each
python benchmarks/wrong_values.py --only bench --repeats 1

Exit status 1 where a median is above the limit, or a wrong value was not refused. A run before the
first fills the page cache. Free text has no wrong value, so that options of text are left out
unless a name is expected.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import typer

from draftree.cli.app import app
from draftree.cli.unknown_options import commands

LIMIT = 1.5
"""Seconds."""
NAMED = {
    "target": "./nowhere",
    "drafter": "nosuch",
    "policy": "nosuch",
    "acceptor": "nosuch",
    "pair": "nosuch pct",
    "suite": "nosuch",
    "machine": "nosuch",
    "costs": "./nowhere",
    "result": "./nowhere",
    "init_from": "./nowhere",
    "exclude": "./nowhere",
    "grammar": "./nowhere",
    "json_schema": "./nowhere",
    "logit_bias": "nosuch",
    "knobs": "nosuch",
    "settings": "nosuch",
    "trees": "pictures.doc",
    "profile": "picture.doc",
    "plot": "picture.doc",
    "attn_implementation": "flash_attention_2",
}
"""Values that are wrong where a text or a path is expected; `data` differs from command to command.
"""
KEYS = {"drafter": "edd:nosuch=1", "policy": "pct:nosuch=1", "acceptor": "match:nosuch=1"}
"""Specs with a wrong key."""
UNBOUNDED = ("logit_bias", "betas", "frequency_penalty", "presence_penalty")
"""Options that take any number, or take numbers with something else."""
FIRST = {
    "generate": ["hi"],
    "report": ["{result}"],
    "export": ["demo"],
    "push": [".", "owner/name"],
    "train": ["edd", "--data", "{text}", "--out", "{new}"],
    "build": ["--kind", "rest", "--data", "{text}", "--out", "{new}"],
    "show": ["."],
}
"""Arguments that a command needs besides."""


def cases() -> Iterator[tuple[list[str], str, str]]:
    """Yield each command with an option and a wrong value of it."""
    group: Any = typer.main.get_command(app)
    for words, command in commands(group):
        path = words.split()
        for option in command.params:
            flags = [flag for flag in getattr(option, "opts", ()) if flag.startswith("--")]
            if not flags or option.is_flag:
                continue
            shown = option.display_type(typer.Context(command)).strip("<>")
            if option.name in NAMED:
                yield path, flags[0], NAMED[option.name]
                if option.name in KEYS:
                    yield path, flags[0], KEYS[option.name]
            elif any(word in shown for word in ("int", "float")) or "|" in shown:
                yield path, flags[0], "nosuch"
                if any(word in shown for word in ("int", "float")) and option.name not in UNBOUNDED:
                    yield path, flags[0], "-7777"


def clock(cpu: bool) -> float:
    """Return seconds of the clock, or those that ended subprocesses have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime if cpu else time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one command")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="only each N-th wrong value, for a short look",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="judge by processor time, where other work shares the machine",
    )
    asked = parser.parse_args()
    folder = Path("build/wrong_values")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("a text\n" * 99)
    (folder / "result.json").write_text("{}")
    places = {"text": folder / "text.txt", "result": folder / "result.json", "new": folder / "new"}
    draftree = Path(sys.executable).parent / "draftree"
    slow = accepted = 0
    medians = list[float]()
    subprocess.run([draftree, "generate", "hi", "--policy", "nosuch"], capture_output=True)
    for path, flag, value in islice(cases(), 0, None, asked.every):
        if asked.only and asked.only not in path:
            continue
        if path[-1] == "generate" and flag == "--target":
            first = ["-p", "hi"]
        else:
            first = [word.format(**places) for word in FIRST.get(path[-1], ())]
        if flag in first:
            first = [
                w for i, w in enumerate(first) if w != flag and (i == 0 or first[i - 1] != flag)
            ]
        seconds = []
        status = 0
        told = ""
        for _ in range(asked.repeats):
            start = clock(asked.cpu)
            try:
                ended = subprocess.run(
                    [draftree, *path, *first, flag, value],
                    capture_output=True,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    timeout=20,
                )
                status, told = ended.returncode, ended.stderr.strip()
            except subprocess.TimeoutExpired:
                status, told = 0, "it began to work"
            seconds.append(clock(asked.cpu) - start)
            if status != 2:
                break
        medians.append(taken := median(seconds))
        if status != 2 or taken > LIMIT:
            slow, accepted = slow + (taken > LIMIT), accepted + (status != 2)
            print(
                f"{' '.join(path)} {flag} {value}: {taken:.2f} s, exit status {status}: {told.splitlines()[-1:]}"[
                    :200
                ]
            )
    kind = "processor" if asked.cpu else "clock"
    print(
        f"{len(medians)} wrong values, {kind} time; {slow} refused in more than {LIMIT} s, {accepted} not refused"
    )
    print(f"median {median(medians or [0]):.2f} s, longest {max(medians, default=0):.2f} s")
    return int(slow + accepted > 0)


if __name__ == "__main__":
    sys.exit(main())
