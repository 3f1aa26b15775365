"""Row formats of public benchmarks, and the prompt that each asks.

`--suite NAME:FILE` reads a file in the format NAME; `--suite NAME` alone the set on the hub, where
that is known and the package `datasets` is installed. A row of another format is refused, and that
one is named.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from draftree.errors import UserError

Row = Mapping[str, Any]
Wording = Literal["plain", "official"]
"""Wording of a benchmark's questions: `plain` is our own, `official` the one in the evaluations of
EAGLE-2 and GLIDE."""
MT_BENCH = [
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
]
SPEC_BENCH = ["translation", "summarization", "qa", "math_reasoning", "rag"]
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""Placeholder that SPEED-Bench stores for third-party texts until its own script has fetched
them."""


@dataclass(frozen=True)
class Format:
    """Describe the format of a benchmark's file, whose items are called rows.

    A row is a dictionary of fields.

    Attributes:
        page: address of the page that defines the format.
        fields: types of a row's fields by name.
        ask: function that returns a row's questions in order, or a template of one question with
            fields in braces.
        fine: function that checks further conditions on a row's values.
        without: names of fields that a row of this format never has.
        category: function that returns the category of a row.
        raw: whether the question is continued as raw text instead of being put into a chat.
        hub: name, configuration and split of the data set on the hub; None if it is not there.
        official: function that returns a row's question in the wording of the papers' evaluations;
            None if that equals `ask`.
    """

    page: str
    fields: Mapping[str, type]
    ask: str | Callable[[Row], list[str]]
    fine: Callable[[Row], bool] = lambda row: True
    without: tuple[str, ...] = ()
    category: Callable[[Row], str] = field(default=lambda row: "")
    raw: bool = False
    hub: tuple[str, str | None, str] | None = None
    official: Callable[[Row], str] | None = None

    def fault(self, row: Row) -> str:
        """Return the reason why a row does not have this format; empty if it has."""
        for name, kind in self.fields.items():
            if not isinstance(row.get(name), kind):
                return (
                    f"its '{name}' is {type(row[name]).__name__}, not {kind.__name__}"
                    if name in row
                    else f"it has no '{name}'"
                )
        if there := [name for name in self.without if name in row]:
            return f"it has a '{there[0]}'"
        return "" if self.fine(row) else "its values are others"

    def questions(self, row: Row) -> list[str]:
        """Return the questions of a row, in order."""
        return [self.ask.format_map(row).strip()] if isinstance(self.ask, str) else self.ask(row)


def _turns(row: Row) -> list[str]:
    return list(row["turns"])


def _has_turns(row: Row) -> bool:
    return bool(row["turns"]) and all(isinstance(t, str) and t for t in row["turns"])


def _task(row: Row) -> str:
    """Return the Spec-Bench task of a row; all categories of MT-bench form one task."""
    return "mt_bench" if row["category"] in MT_BENCH else str(row["category"])


def _deepspec(name: str) -> Format:
    """Return the format of the data sets on which DeepSpec and DFlash are evaluated.

    A row contains the turns of a conversation. The name of the data set serves as category.
    """
    page = "https://github.com/deepseek-ai/DeepSpec/blob/main/deepspec/eval/base_evaluator.py"
    return Format(page, {"turns": list}, _turns, _has_turns, ("question_id",), lambda row: name)


SPIDER = (
    "Could you translate the following question into SQL. "
    "Please only generate SQL, don't include explanation in the answer."
)
"""Instruction that GLIDE's evaluation puts before a question of Spider."""
_ALPACA = {"instruction": str, "input": str, "output": str}
_QUESTIONS = {"question_id": int, "category": str, "turns": list}
DATASET_FORMATS: Mapping[str, Format] = {
    "mt_bench": Format(
        "https://github.com/lm-sys/FastChat/blob/main/fastchat/llm_judge/data/mt_bench/question.jsonl",
        _QUESTIONS,
        _turns,
        lambda r: _has_turns(r) and r["category"] in MT_BENCH,
        (),
        lambda r: r["category"],
    ),
    "spec_bench": Format(
        "https://github.com/hemingkx/Spec-Bench/blob/main/data/spec_bench/question.jsonl",
        _QUESTIONS,
        _turns,
        lambda r: _has_turns(r) and r["category"] in MT_BENCH + SPEC_BENCH,
        (),
        _task,
    ),
    "speed_bench": Format(
        "https://huggingface.co/datasets/nvidia/SPEED-Bench",
        {
            "question_id": str,
            "category": str,
            "sub_category": str,
            "turns": list,
            "source": str,
            "multiturn": bool,
        },
        _turns,
        _has_turns,
        (),
        lambda r: r["category"],
    ),
    "humaneval": Format(
        "https://github.com/openai/human-eval",
        {"task_id": str, "prompt": str, "entry_point": str, "test": str},
        lambda r: [r["prompt"]],
        raw=True,
        hub=("openai/openai_humaneval", None, "test"),
        official=lambda r: f"Complete the code I provided.\n\n{r['prompt'].strip()}\n",
    ),
    "gsm8k": Format(
        "https://github.com/openai/grade-school-math",
        {"question": str, "answer": str},
        "{question}",
        lambda r: "####" in r["answer"],
        hub=("openai/gsm8k", "main", "test"),
    ),
    "natural_questions": Format(
        "https://github.com/google-research-datasets/natural-questions/tree/master/nq_open",
        {"question": str, "answer": list},
        "{question}?",
        hub=("google-research-datasets/nq_open", None, "validation"),
        official=lambda r: f"{r['question'][:1].upper()}{r['question'][1:]}?",
    ),
    "alpaca": Format(
        "https://github.com/tatsu-lab/stanford_alpaca#data-release",
        _ALPACA,
        "{instruction}\n\n{input}",
        lambda r: str(r.get("text", "Below")).startswith("Below"),
        hub=("tatsu-lab/alpaca", None, "train"),
    ),
    "finance_alpaca": Format(
        "https://huggingface.co/datasets/gbharti/finance-alpaca",
        _ALPACA | {"text": str},
        "{instruction}\n\n{input}",
        lambda r: not r["text"],
        hub=("gbharti/finance-alpaca", None, "train"),
    ),
    "cnn_dm": Format(
        "https://huggingface.co/datasets/abisee/cnn_dailymail",
        {"article": str, "highlights": str, "id": str},
        "Summarize the following article.\n\n{article}",
        hub=("abisee/cnn_dailymail", "3.0.0", "test"),
        official=lambda r: f"Summarize: {r['article']}",
    ),
    "spider": Format(
        "https://github.com/taoyds/spider",
        {"db_id": str, "query": str, "question": str, "question_toks": list},
        "Write a SQL query for the database '{db_id}': {question}",
        category=lambda r: r["db_id"],
        hub=("xlangai/spider", None, "validation"),
        official=lambda r: f"{SPIDER} {r['question']}",
    ),
    "codesearchnet_python": Format(
        "https://github.com/github/CodeSearchNet#data-details",
        {
            "repo": str,
            "path": str,
            "func_name": str,
            "language": str,
            "code": str,
            "docstring": str,
        },
        "Write the Python function `{func_name}`, whose docstring is:\n\n{docstring}",
        lambda r: r["language"] == "python",
        official=lambda r: f"Please generate code based on the following doc:\n{r['docstring']}",
    ),
    **{
        name: _deepspec(name) for name in ("math500", "aime", "mbpp", "livecodebench", "arena_hard")
    },
}


@dataclass(frozen=True)
class Questions:
    """Store the questions of a row in order, their category, and whether they are raw text."""

    questions: list[str]
    category: str
    raw: bool


def read_row(name: str, row: Row, where: str, wording: Wording = "plain") -> Questions:
    """Check the format of a benchmark's row, and return its questions.

    Args:
        name: name of the format.
        row: dictionary of the row's fields.
        where: place of the row in its file, for error messages.
        wording: wording of the question, `plain` or `official`.

    Raises:
        UserError: the row has another format, or no question. The message names the other format if
            it is known.
    """
    known = DATASET_FORMATS[name]
    if fault := known.fault(row):
        others = [other for other, its in DATASET_FORMATS.items() if not its.fault(row)]
        reads = f"; it reads as {' or '.join(others)}" if others else ""
        raise UserError(f"{where} is not in the format of {name}: {fault} ({known.page}){reads}")
    official = known.official if wording == "official" else None
    questions = known.questions(row) if official is None else [official(row)]
    if WITHHELD in "".join(questions):
        raise UserError(
            f"{where} holds no text yet: fetch it with the benchmark's own script ({known.page})"
        )
    if not all(questions):
        raise UserError(f"{where}: the question is empty")
    return Questions(questions, known.category(row), known.raw and official is None)
