"""What of a file is learnt."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from draftree.data.readers import messages, read_rows
from draftree.data.samples import Sample, chat_samples, read_samples
from draftree.errors import UserError
from folders import TEMPLATE, byte_tokenizer

TOKENIZER = byte_tokenizer()


def saved(path: Path, *lines: object) -> Path:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def learnt(sample) -> str:
    return str(TOKENIZER.decode(sample.tokens[sample.learn].tolist()))


def test_a_chat_learns_its_responses_with_their_end() -> None:
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "bé"},
            {"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]  # fmt: skip
    (sample,) = chat_samples(TOKENIZER, chat)
    assert (
        TOKENIZER.decode(sample.tokens.tolist())
        == "<|user|>a?<|assistant|>bé<eos><|user|>c?<|assistant|>d<eos>"
    )
    assert learnt(sample) == "bé<eos>d<eos>"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "it is 2\n#### 2"}]},
        {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "it is 2\n#### 2"}]},
        {"question": " 1+1?", "answer": "it is <<1+1=2>>2\n#### 2"},
        {"conversations": [{"from": "gpt", "value": "cut"}, {"from": "human", "value": "1+1?"},
                           {"from": "chatgpt", "value": "it is 2\n#### 2"}]},
        {"messages": [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "1+1?"},
                      {"role": "assistant", "content": "it is 2\n#### 2"}]},
        {"id": "0", "data": ["1+1?", "it is 2\n#### 2"]},
        {"prompt": "1+1?", "data": ["1+1?", "it is 2\n#### 2"]},
        {"prompt": "1+1?", "prompt_id": "0", "messages": [{"role": "user", "content": "1+1?"},
                                                          {"role": "assistant", "content": "it is 2\n#### 2"}]},
        {"text": "", "instruction": "1+1?", "input": "", "output": "it is 2\n#### 2"},
        {"text": "raw", "instruction": "1+1?", "input": "", "output": "it is 2\n#### 2"},
        {"text": "raw", "data": ["1+1?", "it is 2\n#### 2"]},
    ],
)  # fmt: skip
def test_the_formats_of_chats_are_one(row: dict[str, object]) -> None:
    said = messages(row, "here")
    assert said == [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "it is 2\n#### 2"},
    ]


def test_text_is_cut_into_windows_and_a_chat_at_its_end(tmp_path: Path) -> None:
    chat = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "0123456789"},
        ]
    }
    samples = read_samples(
        [saved(tmp_path / "a.jsonl", {"text": "abcdefghij"}, chat)], TOKENIZER, 4
    )
    assert [TOKENIZER.decode(s.tokens.tolist()) for s in samples] == [
        "abcd",
        "efgh",
        "ij",
        "<|user|>q<|assistant|>0",
    ]
    assert [learnt(s) for s in samples] == ["bcd", "fgh", "j", "0"]


def test_a_sample_with_nothing_to_learn_is_left_out(tmp_path: Path) -> None:
    chat = {
        "messages": [
            {"role": "user", "content": "long question"},
            {"role": "assistant", "content": "x"},
        ]
    }
    samples = read_samples(
        [saved(tmp_path / "a.jsonl", chat, {"text": "a"}, {"text": "ab"})], TOKENIZER, 5
    )
    assert [TOKENIZER.decode(s.tokens.tolist()) for s in samples] == ["ab"]


def test_folders_and_plain_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    saved(tmp_path / "deep" / "b.py", "print(1)")
    saved(tmp_path / "a.jsonl", {"text": "one"}, "", {"text": "two"})
    saved(tmp_path / "deep" / "c.json", "[1, 2]")
    saved(tmp_path / "deep" / "empty.py", "\n")
    (tmp_path / "deep" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".git").mkdir()
    saved(tmp_path / ".git" / "HEAD", "ref: refs/heads/main")
    assert [row["text"] for row, _ in read_rows(tmp_path)] == ["one", "two", "print(1)", "[1, 2]"]


def test_a_binary_file_that_is_named_is_told(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(UserError, match="is binary"):
        list(read_rows(tmp_path / "picture.png"))


def test_json_is_a_list_of_rows_or_lines(tmp_path: Path) -> None:
    saved(tmp_path / "a.json", ' [{"text": "one"},\n{"text": "two"}]')
    saved(tmp_path / "b.json", {"text": "one"}, {"text": "two"})
    for name in ("a.json", "b.json"):
        assert [row["text"] for row, _ in read_rows(tmp_path / name)] == ["one", "two"]
    with pytest.raises(UserError, match="row 2 is a JSON int"):
        list(read_rows(saved(tmp_path / "c.json", '[{"text": "one"}, 2]')))


def test_parquet_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="needs the package 'datasets': pip install"):
        list(read_rows(tmp_path))


def test_parquet_goes_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(kind: str, **how: object) -> list[dict[str, object]]:
        asked.append((kind, how))
        return [
            {"text": None, "messages": CHAT},
            {"text": "one", "messages": None},
        ]  # columns are the same in all rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    found = [(row, where) for row, where in read_rows(tmp_path / "a.parquet")]
    assert found == [
        ({"messages": CHAT}, f"{tmp_path}/a.parquet, row 1"),
        ({"text": "one"}, f"{tmp_path}/a.parquet, row 2"),
    ]
    assert asked == [
        ("parquet", {"data_files": f"{tmp_path}/a.parquet", "split": "train", "streaming": True})
    ]


def test_real_parquet_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(
        [{"text": None, "messages": CHAT}, {"text": "one", "messages": None}]
    ).to_parquet(path)
    assert [messages(row, where) for row, where in read_rows(path)] == [CHAT, None]
    path.write_bytes(b"no parquet at all")
    with pytest.raises(UserError, match="cannot read"):
        list(read_rows(path))


def test_a_row_ends_with_its_line_alone(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "a.jsonl",
        json.dumps({"text": "one\u2028two"}, ensure_ascii=False) + "\r",
        {"text": "three"},
    )
    assert [row["text"] for row, _ in read_rows(path)] == ["one\u2028two", "three"]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a", "meta": {"redpajama_set_name": "C4"}},
        {"text": "a", "data": "x"},
        {"text": "a", "messages": [], "instruction": "x", "output": None},
        {"text": "a", "question": "x"},
        {"text": ""},
        {"prompt": "a", "completion": "b"},
    ],
)
def test_the_formats_of_text_are_no_chats(row: dict[str, object]) -> None:
    assert messages(row, "here") is None


def test_completion_of_a_prompt_is_learnt(tmp_path: Path) -> None:
    (sample,) = read_samples(
        [saved(tmp_path / "a.jsonl", {"prompt": "begin", "completion": "ning é"})], TOKENIZER, 64
    )
    assert TOKENIZER.decode(sample.tokens.tolist()) == "beginning é"
    assert learnt(sample) == "ning é"


MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{{ eos_token }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that says itself what the model writes: the response, but not what ends it."""
CHAT = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "bé"},
        {"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "shown"),
    [(TEMPLATE, "<|user|>a?<|assistant|>[bé<eos>]<|user|>c?<|assistant|>[d<eos>]"),
     (MARKED, "<|user|>a?<|assistant|>[bé]<eos><|user|>c?<|assistant|>[d]<eos>")],
)  # fmt: skip
def test_the_mask_of_a_rendered_chat(template: str, shown: str) -> None:
    (sample,) = chat_samples(byte_tokenizer(template), CHAT)
    assert masked(sample) == shown


THOUGHTFUL = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' and loop.last %}(hm){% endif %}{{ m['content'] }}",
)
"""A template that leaves the thoughts of earlier responses out, as that of Qwen3."""


def test_behind_a_response_that_was_cut_no_end_is_learnt(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c?"}, {"role": "assistant", "content": "b"}]  # fmt: skip
    for cut, said in (
        ([1], "bb<eos>"),
        ([3], "b<eos>b"),
        ([1, 3], "bb"),
        ([], "b<eos>b<eos>"),
        ("odd", "b<eos>b<eos>"),
    ):
        (sample,) = read_samples(
            [saved(tmp_path / "chats.jsonl", {"messages": chat, "cut": cut})], TOKENIZER, 99
        )
        assert (
            TOKENIZER.decode(sample.tokens.tolist())
            == "<|user|>a?<|assistant|>b<eos><|user|>c?<|assistant|>b<eos>"
        )
        assert learnt(sample) == said


def test_a_response_that_was_cut_is_found_where_the_template_trims_it() -> None:
    template = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    chat = [{"role": "user", "content": "b c"}, {"role": "assistant", "content": " b "}]
    (sample,) = chat_samples(byte_tokenizer(template), chat, [1])
    assert masked(sample) == "<|user|>b c<|assistant|>[b]<eos>"


def test_samples_know_their_row(tmp_path: Path) -> None:
    data = saved(tmp_path / "a.jsonl", {"text": "x" * 100}, {"messages": CHAT}, {"text": "ab"})
    samples = read_samples([data], byte_tokenizer(THOUGHTFUL), 64)
    assert [sample.row for sample in samples] == [0, 0, 1, 1, 2]


def test_responses_that_are_rendered_otherwise_later_on_are_samples_of_their_own() -> None:
    found = [masked(s) for s in chat_samples(byte_tokenizer(THOUGHTFUL), CHAT)]
    assert found == [
        "<|user|>a?<|assistant|>[(hm)bé<eos>]",
        "<|user|>a?<|assistant|>bé<eos><|user|>c?<|assistant|>[(hm)d<eos>]",
    ]


@pytest.mark.parametrize(
    ("template", "told"),
    [("{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}", "after its prompt"),
     ("{{ raise_exception('roles must alternate') }}", "refuses this chat: roles must alternate")],
)  # fmt: skip
def test_a_template_that_cannot_be_masked_is_told(tmp_path: Path, template: str, told: str) -> None:
    with pytest.raises(UserError, match=rf"a.jsonl:1: .*{told}"):
        read_samples(
            [saved(tmp_path / "a.jsonl", {"messages": CHAT})], byte_tokenizer(template), 64
        )


def masked(sample: Sample) -> str:
    """A sample's text, with what is learnt in brackets."""
    edges = np.flatnonzero(np.diff(sample.learn.astype(int), prepend=0, append=0)).tolist()
    parts = [TOKENIZER.decode(part.tolist()) for part in np.split(sample.tokens, edges)]
    return "".join(f"[{part}]" if i % 2 else part for i, part in enumerate(parts))


@pytest.mark.parametrize(
    ("line", "told"),
    [("{", "bad.jsonl:1 is not JSON"), ("[1]", "JSON list"), ({"title": "x"}, "keys title; allowed are text"),
     ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"), ({"messages": [{"role": "user"}]}, "lacks a text"),
     ({"messages": [{"role": "user", "content": [3]}]}, "holds int, allowed is text"),
     ({"data": {}}, "'data' is {}, allowed is a list of"), ({"question": "x"}, "keys question; allowed"),
     ({"question": None, "answer": "x"}, "holds NoneType"), ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing"),
     ("", "nothing to learn")],
)  # fmt: skip
def test_a_bad_row_is_told_with_its_place(tmp_path: Path, line: object, told: str) -> None:
    with pytest.raises(UserError, match=told.replace("[", r"\[")):
        read_samples([saved(tmp_path / "bad.jsonl", line)], TOKENIZER, 16)


def test_missing_files_and_templates_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        list(read_rows(tmp_path / "none.jsonl"))
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(UserError, match="no chat template"):
        read_samples([saved(tmp_path / "a.jsonl", chat)], byte_tokenizer(None), 16)


def test_the_first_token_is_never_learnt(tmp_path: Path) -> None:
    for sample in read_samples([saved(tmp_path / "a.txt", "abcdefgh")], TOKENIZER, 3):
        assert not sample.learn[0]
        assert sample.tokens.dtype == np.int64
