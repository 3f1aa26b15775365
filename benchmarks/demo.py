"""Show what draftree does in six lines: `make demo`.

Run `draftree generate --baseline --json` on one prompt and print the text, whether plain decoding
writes the same text, the acceptance length and both speeds. The prompt is an editing task, which a
model of 135 million parameters solves.
"""

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROMPT = (
    "Correct the capital letters: the train left the station at noon. it stopped in the village for an hour. "
    "it reached the city in the evening. the passengers slept in a small hotel."
)
COMMAND = ("generate", PROMPT, "--target", "smollm2", "--baseline", "--json")
WAIT = "loading SmolLM2-135M, then writing a text with and without drafts (20 s, longer the first time)"
WIDTH = 100


def report(result: Mapping[str, Any]) -> list[str]:
    """Return the lines to print for the JSON object of `draftree generate --baseline --json`."""
    stats, plain = result["stats"], result["baseline"]
    passes = stats["steps"] + 1
    same = "identical, bit for bit" if plain.get("same_bits") else "identical"
    return [
        *textwrap.wrap(result["text"], WIDTH),
        f"output of plain decoding: {same if plain['same_output'] else 'DIFFERENT'}",
        f"tokens per verification (τ): {stats['acceptance_length']:.2f}; plain decoding: 1.00",
        f"forward passes of the target: {passes}, prompt included; plain decoding: {stats['new_tokens']}",
        f"tokens per second: {stats['tokens_per_second']:.0f}; plain decoding: {plain['tokens_per_second']:.0f}; "
        f"{result['speedup']:.2f} times as fast",
    ]


def main() -> int:
    """Run the command of this virtual environment and print its figures; return the exit status."""
    program = shutil.which("draftree", path=str(Path(sys.executable).parent)) or "draftree"
    shown = sys.stderr.isatty()
    if shown:
        print(WAIT, end="", file=sys.stderr, flush=True)
    done = subprocess.run([program, *COMMAND], capture_output=True, text=True, check=False)
    if shown:
        print("\r\033[2K", end="", file=sys.stderr, flush=True)
    if done.returncode:
        print(done.stderr.strip(), file=sys.stderr)
        return done.returncode
    print(*report(json.loads(done.stdout)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
