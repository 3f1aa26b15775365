"""How long does a new user wait for the first token? A first process beside later ones.

    python benchmarks/first_token.py [--target demo --target smollm2] [--batch 1 --batch 2 …] [--repeats 3]

Each figure is a process of its own. The first one begins with an empty cache folder; a GGUF file is
dequantised before. Printed are the seconds from the start of the process to its first token, and in
brackets those from the call, in the first process and in later ones (medians), and the ratio of the
former.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WAYS = ("complete", "stream", "hook")
CHILD = """
import json, sys, time, warnings
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
print(json.dumps([now - begun, now - start]))
"""


def first_token(target: str, way: str, batch: int, cache: Path) -> tuple[float, float]:
    """Return the seconds to the first tokens in a new process, from its start and from the call."""
    environment = os.environ | {"DRAFTREE_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CHILD, target, way, str(batch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{target} {way} {batch}: {done.stderr.strip().splitlines()[-1]}")
    process, call = json.loads(done.stdout.strip().splitlines()[-1])
    return process, call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared"
        for target in asked.target or ["demo", "smollm2"]:
            first_token(
                target, "complete", 1, prepared
            )  # dequantises a GGUF file, and compiles what is compiled once
            for way in asked.way or WAYS:
                for batch in [1] if way == "stream" else asked.batch or [1, 2, 3, 4, 8]:
                    new, later = list[tuple[float, float]](), list[tuple[float, float]]()
                    for i in range(asked.repeats):
                        cache = Path(folder) / f"{target}-{way}-{batch}-{i}"
                        if (prepared / "targets").is_dir():
                            shutil.copytree(
                                prepared / "targets", cache / "targets", copy_function=os.link
                            )
                        new.append(first_token(target, way, batch, cache))
                        later.append(first_token(target, way, batch, cache))
                    (one, call), (other, again) = (
                        map(statistics.median, zip(*each, strict=True)) for each in (new, later)
                    )
                    found.append(one / other)
                    figures = f"{one:6.2f} s ({call:.2f}), later {other:6.2f} s ({again:.2f}), ratio {one / other:.2f}"
                    print(f"{target:8} {way:9} batch {batch}: {figures}", flush=True)
    print(f"largest ratio {max(found):.2f}")


if __name__ == "__main__":
    main()
