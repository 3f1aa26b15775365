"""The recipes that write data and train on a GPU, on a CPU and the demo model: answers are the model's, prompts are clean."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from test_recipes import recipe

from draftree.data.decontamination import Excluded
from draftree.engine import target_of
from draftree.target.target import HiddenStateSpec, Target
from draftree.training import feature_cache, teacher

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("demo", device="cpu", dtype="float32", compile=False, kernels="stock")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RECIPES))
    return recipe("gpu_answers")


def test_greedy_answers_are_those_of_generate(target: Target, answers: ModuleType) -> None:
    model = target.decoder.model
    prompts, ends = (
        [target.tokenizer("Tom has two apples" + " and" * i)["input_ids"] for i in range(7)],
        sorted(target.eos),
    )
    writer = answers.Writer(model, 3, 96, ends)
    found = {
        q.number: ids
        for q, ids in writer.write([answers.Question(i, p, 9 + i) for i, p in enumerate(prompts)])
    }
    assert sorted(found) == list(range(7))
    for i, prompt in enumerate(prompts):
        given = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(
                given, max_new_tokens=9 + i, do_sample=False, eos_token_id=ends, pad_token_id=0
            )
        assert found[i] == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("top_p", [pytest.param(1.0, marks=pytest.mark.long), 0.9])
def test_sampled_answers_depend_on_seed_and_number_alone(
    target: Target, answers: ModuleType, top_p: float
) -> None:
    prompt = target.tokenizer("Tom has")["input_ids"]

    def drawn(rows: int, slots: int, seed: int, temperature: float = 1.0) -> dict[int, list[int]]:
        writer = answers.Writer(target.decoder.model, rows, slots, sorted(target.eos), seed, top_p)
        return {
            q.number: ids
            for q, ids in writer.write(
                [answers.Question(i, prompt, 12, temperature) for i in range(9)]
            )
        }

    assert drawn(2, 64, 0) == drawn(5, 96, 0) != drawn(5, 96, 1)
    assert len({tuple(ids) for ids in drawn(4, 64, 0).values()}) > 5
    assert len({tuple(ids) for ids in drawn(4, 64, 0, temperature=0.0).values()}) == 1


def test_draws_have_the_models_distribution(target: Target, answers: ModuleType) -> None:
    """First tokens of 2,000 answers: the share of each likely one is within four standard deviations of its probability."""
    prompt, count = target.tokenizer("Tom has")["input_ids"], 2000
    writer = answers.Writer(target.decoder.model, 128, 32, sorted(target.eos))
    firsts = [
        ids[0]
        for _, ids in writer.write([answers.Question(i, prompt, 1, 0.7) for i in range(count)])
    ]
    with torch.inference_mode():
        p = torch.softmax(
            target.decoder.model(torch.tensor([prompt])).logits[0, -1].double() / 0.7, -1
        ).numpy()
    share = np.bincount(firsts, minlength=len(p)) / count
    likely = p > 0.01
    assert likely.sum() > 3
    assert np.all(np.abs(share - p)[likely] < 4 * np.sqrt(p * (1 - p) / count)[likely])


def test_batches_read_by_few_operations_are_the_targets(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr(teacher, "read_features", teacher.read_features)  # put back afterwards
    ours = recipe("smollm2_training")
    ids = torch.randint(0, 4000, (3, 40))
    needs = HiddenStateSpec(hidden=(1, 2, -4))
    ours.SLOTS = 64
    ours.read_fast(target)
    theirs, found = (
        feature_cache.read_features(target, ids, needs),
        teacher.read_features(target, ids, needs),
    )
    assert found.hidden.keys() == theirs.hidden.keys()
    for layer, states in theirs.hidden.items():
        torch.testing.assert_close(found.hidden[layer], states, rtol=1e-4, atol=1e-4)


def test_prompts_are_of_every_kind_and_none_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    ours = recipe("smollm2_prompts")
    monkeypatch.setattr(ours, "PACKAGES", {"PSF-2.0": "statistics textwrap fractions decimal"})
    questions = [
        f"{name} has {n} apples and eats {n - 2} of them. How many remain?"
        for n in range(3, 9)
        for name in ("Tom", "Ann")
    ]
    rows = ours.prompts(questions, Excluded(["What is gravity?"]), share=0.02)
    assert rows == ours.prompts(questions, Excluded(["What is gravity?"]), share=0.02)
    kinds = {row["kind"] for row in rows}
    assert kinds == {*ours.COUNTS, "math"}
    assert all(any(row.get("held") for row in rows if row["kind"] == kind) for kind in kinds)
    own = {row["id"]: bool(row.get("held")) for row in rows if row["kind"] == "passage"}
    for row in rows:
        assert all(own[number] == bool(row.get("held")) for number in row.get("passages", ()))
        texts = row.get("turns", [])
        assert all(texts)
        assert not any(
            "{topic" in text or "{place" in text or text == "What is gravity?" for text in texts
        )
    chosen = next(row["turns"] for row in rows if row["kind"] == "question")
    left = ours.prompts(questions, Excluded(chosen), share=0.02)
    assert chosen not in [row.get("turns") for row in left]


def test_engine_writes_the_same_greedy_answers(
    target: Target, answers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = recipe("engine_answers")
    questions = [
        answers.Question(i, target.tokenizer("Tom has two" + " and" * i)["input_ids"], 8 + i)
        for i in range(7)
    ]
    by_gpu_recipe = answers.Writer(target.decoder.model, 3, 96, sorted(target.eos))
    by_engine = ours.EngineWriter(target, 3, 96)
    assert {q.number: ids for q, ids in by_engine.write(questions)} == {
        q.number: ids for q, ids in by_gpu_recipe.write(questions)
    }
    assert not list(by_engine.write(questions, stop=lambda: True))


class CountingWriter:
    """A writer whose answers are the numbers of the questions, and which remembers what it wrote."""

    top_p = 1.0

    def __init__(self) -> None:
        self.wrote = list[int]()

    def write(self, questions, stop=lambda: False):  # type: ignore[no-untyped-def]
        for question in questions:
            self.wrote.append(question.number)
            yield question, [question.number]


def test_journal_writes_no_answer_twice_and_shares_shards(
    answers: ModuleType, tmp_path: Path
) -> None:
    ours = recipe("engine_answers")
    questions = [answers.Question(i, [1], 4) for i in range(6)]
    first = ours.Journal(CountingWriter(), tmp_path)
    answered = first.write(questions)
    assert [next(answered)[1] for _ in range(2)] == [[0], [1]]
    answered.close()
    with (tmp_path / "journal-0.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"number": 2, "ids": [')  # the process was killed while it wrote this line
    second = ours.Journal(CountingWriter(), tmp_path, shard=1, shards=2)
    assert sorted(q.number for q, _ in second.write(questions)) == [0, 1, 3, 5]
    assert second.writer.wrote == [3, 5]
    third = ours.Journal(CountingWriter(), tmp_path)
    assert {q.number: ids for q, ids in third.write(questions)} == {i: [i] for i in range(6)}
    assert third.writer.wrote == [2, 4]
    fourth = ours.Journal(CountingWriter(), tmp_path)
    assert len(list(fourth.write(questions))) == 6
    assert not fourth.writer.wrote


def test_written_answers_become_chats_with_their_prompts(
    target: Target, answers: ModuleType, tmp_path: Path
) -> None:
    """Two turns, a passage in its place, a made-up question, and a held-out prompt."""
    ours = recipe("smollm2_training")
    rows = [
        {"kind": "passage", "id": 7, "turns": ["Write about bees."]},
        {"kind": "rag", "turns": ["Passage: {0} What is it about?"], "passages": [7]},
        {"kind": "chat", "turns": ["Hello.", "And now?"], "held": True},
        {"kind": "math", "gsm8k": 0},
    ]
    writing = ours.Writing(target, 4, float("inf"))
    talks = ours.write(writing, rows, ["One and one?"], Excluded(), 2, tell=lambda _: None)
    ours.keep(talks, tmp_path)
    written = list(ours.lines(tmp_path / "answers.jsonl.gz"))
    found = list(ours.chats(rows, ["One and one?"], written))
    assert [chat["held"] for chat in found] == [bool(t.row.get("held")) for t in talks]
    turns = {talk.number: talk.turns for talk in talks}
    for chat, row in zip(found, written, strict=True):
        said = [message["content"] for message in chat["messages"]]
        assert said[1::2] == row["answers"]
        assert said[::2] == turns[row["prompt"]][: len(row["answers"])]
        assert chat["cut"] == row.get("cut", [])
    by_kind = {chat["kind"]: chat["messages"][0]["content"] for chat in found}
    assert by_kind["math"] == "One and one?"
    assert "{0}" not in by_kind["rag"]
