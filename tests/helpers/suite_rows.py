"""Rows in the formats of public benchmarks."""

from typing import Any

TURNS: dict[str, Any] = {"turns": ["Add 2 and 3.", "And 4?"]}


ROWS: dict[str, dict[str, Any]] = {
    "mt_bench": {"question_id": 81, "category": "writing", **TURNS},
    "spec_bench": {"question_id": 201, "category": "rag", "turns": ["Who wrote it?"]},
    "speed_bench": {"question_id": "a-1", "category": "coding", "sub_category": "c", "source": "s", "src_id": "1",
                    "difficulty": "", "multiturn": True, **TURNS},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "entry_point": "add", "canonical_solution": "",
                  "test": "assert"},
    "gsm8k": {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    "natural_questions": {"question": "who wrote it", "answer": ["he"]},
    "alpaca": {"instruction": "Name a colour.", "input": "", "output": "Red"},
    "finance_alpaca": {"instruction": "Name a bond.", "input": "Long", "output": "A", "text": ""},
    "cnn_dm": {"article": "It rained.", "highlights": "Rain", "id": "1"},
    "spider": {"db_id": "shop", "query": "SELECT 1", "question": "How many?", "question_toks": ["How", "many"]},
    "codesearchnet_python": {"repo": "a/b", "path": "a.py", "func_name": "add", "language": "python", "code": "def add(): pass",
                             "docstring": "Adds."},
    **dict.fromkeys(("math500", "aime", "mbpp", "livecodebench", "arena_hard"), TURNS),
}  # fmt: skip
