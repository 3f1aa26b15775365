"""Runs the properties of `properties.py` on random batches for a time.

    python tests/helpers/soak.py --seconds 3600 --seed 0 --out build/soak

Each round has a seed of its own, which is printed; `--seed N --seconds 0` repeats round N alone. A
failure is shrunk, saved as a text file in the output folder, and does not end the run. The exit
status is 1 if there was one.
"""

import argparse
import gc
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("DRAFTREE_CACHE", tempfile.mkdtemp(prefix="draftree-soak-"))

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import properties
from strategies import Batch, Served, batches, served, suite

EXAMPLES = {
    "check_batch": 40,
    "check_engine": 20,
    "check_nothing_left": 5,
    "check_served": 25,
    "check_nothing_served_left": 3,
}
"""Properties, and the examples of each in a round."""
PHASES = (Phase.generate, Phase.shrink)


def resident() -> int:
    """Return the resident memory of this process in MB."""
    if not os.path.exists("/proc/self/statm"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def round_of(name: str, number: int, counts: Counter[str]) -> str | None:
    """Run a property on the examples of a seed; return the shrunk failure, if there is one."""
    check: Callable[[Batch | Served], None] = getattr(properties, name)

    @seed(number)
    @settings(
        max_examples=EXAMPLES[name],
        deadline=None,
        database=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
    )
    @given(served() if "served" in name else batches())
    def run(batch: Batch | Served) -> None:
        counts[name] += 1
        check(batch)

    try:
        run()
    except Exception:
        return traceback.format_exc()
    return None


def main(words: Sequence[str] | None = None) -> int:
    """Run rounds until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()),
        help="of the first round; the next has the next one",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/soak"), help="folder of the failures"
    )
    asked = parser.parse_args(words)
    asked.out.mkdir(parents=True, exist_ok=True)
    counts = Counter[str]()
    failures = 0
    number = asked.seed
    start = time.monotonic()
    memory: list[int] = []
    while True:
        for name in EXAMPLES:
            failure = round_of(name, number, counts)
            if failure is not None:
                failures += 1
                path = asked.out / f"failure-{name}-{number}.txt"
                path.write_text(f"{name}, seed {number}\n\n{failure}", "utf-8")
                print(f"{name} fails with seed {number}: {path}", flush=True)
        for model in ("tiny", "llama", "mistral-sliding", "gemma2", "qwen3"):
            suite(model)._references.clear()
        gc.collect()
        memory.append(resident())
        number += 1
        seconds = time.monotonic() - start
        status: dict[str, Any] = {
            "seed": number - 1,
            "seconds": round(seconds),
            "cases": dict(counts),
        }
        print(json.dumps(status | {"failures": failures, "resident_MB": memory[-1]}), flush=True)
        if seconds >= asked.seconds:
            return int(failures > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
