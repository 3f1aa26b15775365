"""Write a target's answers with draftree's own batches, on any device, and keep them in a file as they end.

`EngineWriter` has the interface of `gpu_answers.Writer`, which is faster on a GPU. `Journal` makes
a writer resumable: answers that its file holds are not written again.
"""

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from gpu_answers import Question

from draftree.engine import plain_stream
from draftree.request import Request
from draftree.sampling.params import GREEDY, Sampling
from draftree.target.target import Target


class AnswerWriter(Protocol):
    """Write answers to prompts in batches.

    Attributes:
        top_p: probability mass of the most likely tokens from which sampled tokens are drawn.
    """

    top_p: float

    def write(
        self, questions: Sequence[Question], stop: Callable[[], bool] = ...
    ) -> Iterator[tuple[Question, list[int]]]:
        """Yield each question with the token ids of its answer, as soon as the answer ends."""
        ...

    def forget(self) -> None:
        """Drop what was prepared for the present value of `top_p`."""
        ...


class EngineWriter:
    """Write answers with `plain_stream`.

    Args:
        target: the target.
        rows: number of sequences at a time.
        slots: largest number of tokens of a prompt with its answer.
        seed: seed of sampled answers.
    """

    def __init__(self, target: Target, rows: int, slots: int, seed: int = 0) -> None:
        self.target = target
        self.rows = rows
        self.slots = slots
        self.seed = seed
        self.top_p = 1.0

    def write(
        self, questions: Sequence[Question], stop: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Question, list[int]]]:
        """Yield each question with the token ids of its answer, as soon as the answer ends.

        Args:
            questions: questions in the order of their lengths, so that the prompts of one pass have
                similar lengths.
            stop: called before each question; once it returns true, no further answer begins.
        """
        by_number = {question.number: question for question in questions}

        def requests() -> Iterator[Request]:
            for question in questions:
                if stop():
                    return
                yield self._request(question)

        for request, ids in plain_stream(self.target, requests(), self.rows):
            yield by_number[request.number], ids

    def forget(self) -> None:
        """Do nothing: no steps are recorded."""

    def _request(self, question: Question) -> Request:
        """Return the request of a question."""
        sampling = GREEDY
        if question.temperature:
            sampling = Sampling(question.temperature, top_p=self.top_p, seed=self.seed)
        return Request(
            question.ids,
            max_new_tokens=min(question.most, self.slots - len(question.ids)),
            eos=frozenset(self.target.eos),
            number=question.number,
            sampling=sampling,
        )


class Journal:
    """Keep the answers of a writer in a file, and read them from it after an interruption.

    Several processes may share a folder. Each writes the answers of one shard to its own file, and
    reads the files of all when it starts.

    Args:
        writer: the writer.
        folder: folder of the files `journal-SHARD.jsonl`, whose lines are `{"number", "ids"}`. An
            incomplete last line is ignored.
        shard: index of the shard.
        shards: number of shards. A question belongs to the shard `number % shards`.
    """

    def __init__(
        self, writer: AnswerWriter, folder: pathlib.Path, shard: int = 0, shards: int = 1
    ) -> None:
        self.writer = writer
        self._path = folder / f"journal-{shard}.jsonl"
        self._shard = shard
        self._shards = shards
        self._known = dict[int, list[int]]()
        for path in sorted(folder.glob("journal-*.jsonl")):
            text = path.read_bytes()
            complete = text[: text.rfind(b"\n") + 1]
            if path == self._path and complete != text:
                path.write_bytes(complete)
            rows: list[Any] = [json.loads(line) for line in complete.splitlines()]
            self._known |= {row["number"]: row["ids"] for row in rows}

    @property
    def top_p(self) -> float:
        """Return the probability mass from which the writer draws."""
        return self.writer.top_p

    @top_p.setter
    def top_p(self, value: float) -> None:
        """Set the probability mass from which the writer draws."""
        self.writer.top_p = value

    def forget(self) -> None:
        """Drop what the writer has prepared."""
        self.writer.forget()

    def write(
        self, questions: Sequence[Question], stop: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Question, list[int]]]:
        """Yield the answers that the files hold, then those of this shard that the writer writes."""
        missing = []
        for question in questions:
            if question.number in self._known:
                yield question, self._known[question.number]
            elif question.number % self._shards == self._shard:
                missing.append(question)
        with self._path.open("a", encoding="utf-8") as file:
            for question, ids in self.writer.write(missing, stop):
                file.write(json.dumps({"number": question.number, "ids": ids}) + "\n")
                file.flush()
                yield question, ids
