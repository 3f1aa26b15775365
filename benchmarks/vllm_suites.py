"""Write the suites of `vllm_proposer.py`: mathematics, code and copying, 40 prompts each.

    python benchmarks/vllm_suites.py --spec-bench spec_bench.jsonl --out FOLDER

Mathematics are questions of Spec-Bench's task, code are heads of functions of Python's standard
library that are to be completed (`code_suite.py`) and that share no 13 words in a row with the
prompts of the datastore's answers (`recipes/smollm2_prompts.jsonl.gz`), and copying asks for a
passage of Spec-Bench's summaries word for word.
"""

import argparse
import gzip
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from code_suite import drawn_heads
from draftree.data.decontamination import Excluded

ANSWERED = Path(__file__).resolve().parents[1] / "recipes" / "smollm2_prompts.jsonl.gz"
"""The prompts of the answers in the datastore."""
COPIED = 600
"""Characters of a passage that is to be copied, at most."""
CODE = "Complete this Python function. Write code only.\n\n```python\n{}```"
COPY = "Repeat this text word for word.\n\n{}"


def write_suite(path: Path, texts: Sequence[str]) -> None:
    """Write prompts as JSON lines."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def answered_prompts(path: Path) -> Excluded:
    """Return the prompts in a compressed file of JSON lines with `turns`."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return Excluded(text for row in rows for text in row.get("turns", ()))


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--spec-bench", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prompts", type=int, default=40)
    asked = parser.parse_args()
    rows = [json.loads(line) for line in asked.spec_bench.read_text().splitlines()]

    def questions(category: str) -> list[str]:
        found = (row["turns"][0] for row in rows if row["category"] == category)
        return list(islice(found, asked.prompts))

    passages = [text.partition(": ")[2][:COPIED] for text in questions("summarization")]
    asked.out.mkdir(parents=True, exist_ok=True)
    write_suite(asked.out / "math.jsonl", questions("math_reasoning"))
    write_suite(asked.out / "copying.jsonl", [COPY.format(text) for text in passages])
    heads = drawn_heads(asked.prompts, answered_prompts(ANSWERED))
    write_suite(asked.out / "code.jsonl", [CODE.format(head) for _, head in heads])


if __name__ == "__main__":
    main()
