"""Exported drafters inside vLLM: whether they load, and whether they are accepted as often as in draftree.

    build/engines/bin/python benchmarks/exports.py --out benchmarks/results/exports-vllm.json

It needs vLLM beside draftree (`make build/engines/ready`). Both programs write the same number of
tokens after the same prompts, greedily, in float32 and with chains of three. Each runs in a process
of its own.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LENGTH, TOKENS, PROMPTS, BATCH = 3, 64, 72, 12
"""Tokens of a chain and of an answer, how many answers, and how many at a time. They take at least
1,500 steps."""
SHIPPED = (
    ("demo/eagle", "speculators", "eagle"),
    ("demo/eagle", "vllm-eagle", "eagle"),
    ("demo/eagle3", "speculators", "eagle3"),
    ("demo/eagle3", "eagle", "eagle3"),
    ("demo/medusa", "vllm-medusa", "medusa"),
)
"""A drafter, the format of its export, and vLLM's method for it."""
SUBJECTS = ("Tom", "Anna", "The farmer", "A train", "Each child", "The baker", "Mr. Lee", "A class")
THINGS = ("apples", "books", "dollars", "miles", "cards", "eggs", "hours", "boxes", "coins")


def questions() -> list[str]:
    """Return prompts of one kind, all different."""
    return [
        f"<|bos|>{who} has {7 + 3 * i} {what} and gets {5 + 2 * j} more every day for {2 + i} days. How many {what} now?\n"
        for i, who in enumerate(SUBJECTS)
        for j, what in enumerate(THINGS)
    ][:PROMPTS]


def summary(accepted: Counter[int]) -> dict[str, float]:
    """Return acceptance length, half of its 95 % interval, and the number of steps.

    The argument holds the number of steps by accepted tokens.
    """
    steps = sum(accepted.values())
    mean = sum(n * count for n, count in accepted.items()) / steps
    variance = sum((n - mean) ** 2 * count for n, count in accepted.items()) / steps
    return {"tau": 1 + mean, "interval": 1.96 * math.sqrt(variance / steps), "steps": steps}


def here(target: str, drafter: str, prompts: Sequence[str]) -> dict[str, Any]:
    """Run a drafter in draftree."""
    import draftree

    engine = draftree.load(
        target, drafter=drafter, policy=f"chain:length={LENGTH}", dtype="float32"
    )
    accepted, texts = Counter[int](), []
    for i in range(0, len(prompts), BATCH):
        done = engine.complete(prompts[i : i + BATCH], max_new_tokens=TOKENS, ignore_eos=True)
        accepted.update(step.accepted for step in done[0].stats.steps)
        texts += [list(each.tokens) for each in done]
    return summary(accepted) | {"texts": texts}


def there(target: str, folder: str, method: str, prompts: Sequence[str]) -> dict[str, Any]:
    """Run an exported drafter in vLLM."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    import vllm
    from transformers import AutoTokenizer

    from draftree.target.target_names import location

    place = location(target)
    tokenizer = AutoTokenizer.from_pretrained(place)
    ids = [
        {"prompt_token_ids": tokenizer(p, add_special_tokens=False)["input_ids"]} for p in prompts
    ]
    spec = {"method": method, "model": folder, "num_speculative_tokens": LENGTH}
    llm: Any = vllm.LLM(
        model=place,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=16,
        disable_log_stats=False,
        speculative_config=spec,
    )
    asked = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    answers = llm.generate(ids, asked, use_tqdm=False)
    found = {m.name: getattr(m, "values", getattr(m, "value", None)) for m in llm.get_metrics()}
    steps, reached = (
        found["vllm:spec_decode_num_drafts"],
        [*found["vllm:spec_decode_num_accepted_tokens_per_pos"], 0],
    )
    accepted = Counter({n + 1: reached[n] - reached[n + 1] for n in range(LENGTH)}) + Counter(
        {0: steps - reached[0]}
    )
    return summary(accepted) | {
        "texts": [list(a.outputs[0].token_ids) for a in answers],
        "version": vllm.__version__,
    }


def apart(work: Sequence[str]) -> dict[str, Any]:
    """Run a part of this script in a process of its own; an error is its last line."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        done = subprocess.run(
            [sys.executable, __file__, *work, "--out", str(out)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if not out.is_file():
            lines = (
                [line for line in done.stderr.splitlines() if "Error" in line]
                or done.stderr.splitlines()[-1:]
                or ["none"]
            )
            return {"error": lines[-1].strip()[-300:]}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def compared(drafter: str, form: str, method: str, folder: Path) -> dict[str, Any]:
    """Export a drafter and run it in both programs."""
    target = drafter.partition("/")[0] if not Path(drafter).is_dir() else "demo"
    own = drafter.partition("/")[2] if not Path(drafter).is_dir() else drafter
    exported = folder / f"{drafter}-{form}".replace("/", "-").strip("-")
    command = [
        sys.executable,
        "-m",
        "draftree",
        "export",
        drafter,
        "--format",
        form,
        "--out",
        str(exported),
        "--force",
    ]
    subprocess.run(command, check=True, capture_output=True)
    row: dict[str, Any] = {
        "drafter": own if own == method else f"{Path(own).name}",
        "target": target,
        "format": form,
    }
    row |= {"method": method, "engine": "vLLM"}
    a, b = apart(["here", target, own]), apart(["there", target, str(exported), method])
    if "error" in a or "error" in b:
        return row | {"loads": "error" not in b, "here": _told(a), "there": _told(b)}
    same = sum(x == y for x, y in zip(a["texts"], b["texts"], strict=True))
    row |= {"version": b["version"], "loads": True, "here": _told(a), "there": _told(b)}
    within = abs(a["tau"] - b["tau"]) <= math.hypot(a["interval"], b["interval"])
    return row | {"texts": len(a["texts"]), "equal_texts": same, "within": within}


def _told(found: dict[str, Any]) -> dict[str, Any]:
    return {
        k: round(v, 4) if isinstance(v, float) else v
        for k, v in found.items()
        if k in ("tau", "interval", "steps", "error")
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", nargs="*", help="for the processes that it starts")
    parser.add_argument(
        "--case",
        action="append",
        metavar="DRAFTER:FORMAT:METHOD",
        help="by default the demo's drafters",
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.work:
        run = here if given.work[0] == "here" else there
        given.out.write_text(json.dumps(run(*given.work[1:], questions())))
        return
    rows = json.loads(given.out.read_text())["rows"] if given.out.is_file() else []
    cases = [tuple(case.split(":")) for case in given.case or ()] or SHIPPED
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            row = compared(*case, Path(folder))
            print(json.dumps(row), flush=True)
            key = ("drafter", "format", "target")
            rows = [r for r in rows if any(r[k] != row[k] for k in key)] + [row]
            given.out.write_text(
                json.dumps({"length": LENGTH, "tokens": TOKENS, "rows": rows}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
