"""What of a file is learnt."""

import json
from pathlib import Path

import numpy as np
import pytest

from draftree.errors import UserError
from draftree.training.data import chat_sample, messages, read, rows
from folders import byte_tokenizer

TOKENIZER = byte_tokenizer()


def saved(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def learnt(sample) -> str:
    return str(TOKENIZER.decode(sample.tokens[sample.learn].tolist()))


def test_a_chat_learns_its_responses_with_their_end() -> None:
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "bé"},
            {"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]  # fmt: skip
    sample = chat_sample(TOKENIZER, chat)
    assert TOKENIZER.decode(sample.tokens.tolist()) == "<|user|>a?<|assistant|>bé<eos><|user|>c?<|assistant|>d<eos>"
    assert learnt(sample) == "bé<eos>d<eos>"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "it is 2\n#### 2"}]},
        {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "it is 2\n#### 2"}]},
        {"question": " 1+1?", "answer": "it is <<1+1=2>>2\n#### 2"},
    ],
)
def test_the_formats_of_chats_are_one(row: dict[str, object]) -> None:
    said = messages(row, "here")
    assert said == [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "it is 2\n#### 2"}]


def test_text_is_cut_into_windows_and_a_chat_at_its_end(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "0123456789"}]}
    samples = read([saved(tmp_path / "a.jsonl", {"text": "abcdefghij"}, chat)], TOKENIZER, 4)
    assert [TOKENIZER.decode(s.tokens.tolist()) for s in samples] == ["abcd", "efgh", "ij", "<|user|>q<|assistant|>0"]
    assert [learnt(s) for s in samples] == ["bcd", "fgh", "j", "0"]


def test_a_sample_with_nothing_to_learn_is_left_out(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "long question"}, {"role": "assistant", "content": "x"}]}
    samples = read([saved(tmp_path / "a.jsonl", chat, {"text": "a"}, {"text": "ab"})], TOKENIZER, 5)
    assert [TOKENIZER.decode(s.tokens.tolist()) for s in samples] == ["ab"]


def test_folders_and_plain_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    saved(tmp_path / "deep" / "b.py", "print(1)")
    saved(tmp_path / "a.jsonl", {"text": "one"}, "", {"text": "two"})
    assert [row["text"] for row, _ in rows(tmp_path)] == ["one", "two", "print(1)"]


def test_a_row_ends_with_its_line_alone(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jsonl", json.dumps({"text": "one\u2028two"}, ensure_ascii=False) + "\r", {"text": "three"})
    assert [row["text"] for row, _ in rows(path)] == ["one\u2028two", "three"]


@pytest.mark.parametrize(
    ("line", "told"),
    [("{", "bad.jsonl:1 is not JSON"), ("[1]", "JSON list"), ({"title": "x"}, "keys title; allowed are text"),
     ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"), ({"messages": [{"role": "user"}]}, "'content'"),
     ("", "nothing to learn")],
)  # fmt: skip
def test_a_bad_row_is_told_with_its_place(tmp_path: Path, line: object, told: str) -> None:
    with pytest.raises(UserError, match=told.replace("[", r"\[")):
        read([saved(tmp_path / "bad.jsonl", line)], TOKENIZER, 16)


def test_missing_files_and_templates_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        list(rows(tmp_path / "none.jsonl"))
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(UserError, match="no chat template"):
        read([saved(tmp_path / "a.jsonl", chat)], byte_tokenizer(None), 16)


def test_the_first_token_is_never_learnt(tmp_path: Path) -> None:
    for sample in read([saved(tmp_path / "a.txt", "abcdefgh")], TOKENIZER, 3):
        assert not sample.learn[0]
        assert sample.tokens.dtype == np.int64
