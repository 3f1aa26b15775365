"""How long does a new user wait for the first token? A first process beside later ones.

    python benchmarks/first_token.py [--target demo --target smollm2] [--batch 1 --batch 2 …] [--repeats 3]
    python benchmarks/first_token.py --fresh --target smollm2 --way complete --repeats 5

Each figure is a process of its own. The first one begins with an empty cache folder; a GGUF file is
dequantised before, with `--fresh` in that process. Printed are medians: the seconds from the start
of the process to its first token, and in brackets those from the call, in the first process and in
later ones, the ratio of the former, the processor's seconds, which another load on the machine
changes less, and the largest memory of a process. The last line is the time of `import draftree`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

WAYS = ("complete", "stream", "hook")
CHILD = """
import json, resource, sys, time, warnings
begun = time.perf_counter()
import draftree
target, way, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
warnings.simplefilter("ignore")
prompts = [f"def main({i}" for i in range(batch)]
if way == "hook":
    model = draftree.Target.load(target).decoder.model
    tokenizer = draftree.load(target).tokenizer
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.pad_token or tokenizer.eos_token, "left"
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    start = time.perf_counter()
    model.generate(**inputs, max_new_tokens=2, do_sample=False, custom_generate=draftree.speculate(policy="yield"))
else:
    engine = draftree.load(target, policy="yield")
    start = time.perf_counter()
    if way == "stream":
        next(engine.stream(prompts[0], max_new_tokens=2))
    else:
        engine.complete(prompts, max_new_tokens=2)
now = time.perf_counter()
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(json.dumps([now - begun, now - start, time.process_time(), memory]))
"""
IMPORT = """
import json, time
begun, used = time.perf_counter(), time.process_time()
import draftree
print(json.dumps([time.perf_counter() - begun, time.process_time() - used]))
"""
Figures = tuple[float, ...]


def process(code: str, *words: str, **variables: str) -> Figures:
    """Return the figures that a new process prints.

    Raises:
        SystemExit: it failed.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | variables
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip().splitlines()[-1]}")
    return tuple(json.loads(done.stdout.strip().splitlines()[-1]))


def first_token(target: str, way: str, batch: int, cache: Path) -> Figures:
    """Return figures of a new process, up to its first tokens.

    They are the seconds from its start and from the call, those of the processor, and the memory in
    GB.
    """
    return process(CHILD, target, way, str(batch), DRAFTREE_CACHE=str(cache))


def medians(found: Sequence[Figures]) -> Figures:
    """Return the medians of figures of several processes."""
    return tuple(map(statistics.median, zip(*found, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="dequantise in the first process")
    asked = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared"
        for target in asked.target or ["demo", "smollm2"]:
            if not asked.fresh:  # dequantises a GGUF file
                first_token(target, "complete", 1, prepared)
            for way in asked.way or WAYS:
                for batch in [1] if way == "stream" else asked.batch or [1, 2, 3, 4, 8]:
                    new, later = list[Figures](), list[Figures]()
                    for i in range(asked.repeats):
                        cache = Path(folder) / f"{target}-{way}-{batch}-{i}"
                        if (prepared / "targets").is_dir():
                            shutil.copytree(
                                prepared / "targets", cache / "targets", copy_function=os.link
                            )
                        new.append(first_token(target, way, batch, cache))
                        later.append(first_token(target, way, batch, cache))
                    (one, call, work, memory), (other, again, rework, size) = map(
                        medians, (new, later)
                    )
                    found.append(one / other)
                    figures = (
                        f"{one:6.2f} s ({call:.2f}), later {other:6.2f} s ({again:.2f}), "
                        f"ratio {one / other:.2f}, processor {work:.2f} s, later {rework:.2f} s, "
                        f"memory {memory:.2f} GB, later {size:.2f} GB"
                    )
                    print(f"{target:8} {way:9} batch {batch}: {figures}", flush=True)
    print(f"largest ratio {max(found):.2f}")
    seconds, work = medians([process(IMPORT) for _ in range(asked.repeats)])
    print(f"import draftree {seconds:.3f} s, processor {work:.3f} s")


if __name__ == "__main__":
    main()
