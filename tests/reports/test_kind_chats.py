"""Chats in any usual form are read alike, and rows that cannot be read are named and counted.

https://github.com/sgl-project/SpecForge/pull/429: chats with tool calls, which have no text.
https://github.com/sgl-project/SpecForge/pull/482: empty chats, and chats that an answer begins.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftree.data.corpus import texts
from draftree.data.readers import CHATS, CONTENT_NAMES, ROLE_NAMES, Skipped, messages, read_rows
from draftree.data.samples import read_samples
from draftree.errors import UserError
from draftree.training.regenerate import read_prompts
from folders import byte_tokenizer, talking_folder, target_folder

pytestmark = pytest.mark.usefixtures("quick")
Command = Callable[..., tuple[int, str, str]]
PLAIN = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize("container", CHATS)
@pytest.mark.parametrize("sender", ROLE_NAMES)
@pytest.mark.parametrize("text", CONTENT_NAMES)
def test_any_container_has_any_names_of_fields(container: str, sender: str, text: str) -> None:
    chat = [{sender: "human", text: "q"}, {sender: "gpt", text: "a"}]
    assert messages({container: chat, "id": 7}, "x") == PLAIN


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"instruction": "q", "output": "a"}, PLAIN),
        ({"instruction": "q", "input": "", "output": "a"}, PLAIN),
        ({"instruction": "q", "input": "i", "output": "a"}, [{"role": "user", "content": "q\n\ni"}, PLAIN[1]]),
        ({"query": "q", "response": "a"}, PLAIN),
        ({"problem": "q", "solution": "a"}, PLAIN),
        ({"prompt": "q", "response": "a"}, PLAIN),
        ({"prompt": PLAIN[:1], "completion": PLAIN[1:]}, PLAIN),
        ({"prompt": "q", "completion": "a"}, None),
        ({"question": "q", "answer": "<<1+1=2>>a"}, PLAIN),
        ({"instruction": "q", "output": "x << y >> z"}, [PLAIN[0], {"role": "assistant", "content": "x << y >> z"}]),
        ({"system": "s", "messages": PLAIN}, [SYSTEM, *PLAIN]),
        ({"system_prompt": "s", "conversations": [{"from": "human", "value": "q"}]}, [SYSTEM, PLAIN[0]]),
        ({"system": "s", "messages": [{"role": "system", "content": "t"}, *PLAIN]}, [{**SYSTEM, "content": "t"}, *PLAIN]),
        ({"system": "", "messages": PLAIN}, PLAIN),
        ({"system": "s", "instruction": "q", "output": "a"}, [SYSTEM, *PLAIN]),
        ({"messages": [PLAIN[1], *PLAIN]}, PLAIN),
        ({"messages": []}, []),
        ({"data": ["q", "a"]}, PLAIN),
        ({"messages": [{"role": "developer", "content": "s"}, *PLAIN]}, [SYSTEM, *PLAIN]),
        ({"messages": [{"role": "User", "content": "q"}, PLAIN[1]]}, PLAIN),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, PLAIN[1]]}, PLAIN),
        ({"messages": [{"role": "user", "content": ["q", {"text": "r"}]}]}, [{"role": "user", "content": "qr"}]),
        ({"conversations": [PLAIN[0], {"from": "observation", "value": "o"}]}, [PLAIN[0], {"role": "tool", "content": "o"}]),
    ],
    ids=str,
)  # fmt: skip
def test_rows_of_any_form(row: dict[str, Any], wanted: object) -> None:
    assert messages(row, "x") == wanted


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_a_call_needs_no_text_and_reaches_the_template(content: dict[str, Any]) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    row = {
        "messages": [
            PLAIN[0],
            {"role": "assistant", **content, "tool_calls": calls},
            {"role": "tool", "content": "2"},
        ]
    }
    assert messages(row, "x") == [
        PLAIN[0], {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "2"}
    ]  # fmt: skip
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}call {{ c.function.name }}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert texts(row, "x", byte_tokenizer(template)) == ["<|user|>q<|assistant|>call add<|tool|>2"]


@pytest.mark.parametrize("calls", [[{"function": {"name": "add", "arguments": {}}}], None])
def test_answers_that_call_are_learnt(calls: object, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}call {{ c.function.name }}"
        "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    answer = {"role": "assistant", "content": None, "tool_calls": calls} if calls else PLAIN[1]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [PLAIN[0], answer]}))
    tokenizer = byte_tokenizer(template)
    (sample,) = read_samples([tmp_path / "a.jsonl"], tokenizer, 100)
    assert tokenizer.decode(sample.tokens[sample.learn]) == ("call add<eos>" if calls else "a<eos>")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [{"role": "user", "content": None}]}, "a message holds NoneType, allowed is text"),
        ({"messages": [{"role": "user"}]}, "a message lacks a text, allowed names are content, value"),
        ({"messages": [{"content": "q"}]}, "a message lacks a sender"),
        ({"messages": [{"role": "wizard", "content": "q"}]}, "a message has an unknown 'wizard'; roles are "),
        ({"messages": [{"role": 3, "content": "q"}]}, "has an unknown 3"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "u"}]}]}, "a part of type 'image'"),
        ({"messages": "q"}, "'messages' is 'q', allowed is a list of messages"),
        ({"conversations": ["q"]}, "'conversations' is .* allowed is a list of messages"),
        ({"instruction": "q"}, "has the keys instruction; allowed are text, messages, conversations"),
        ({"instruction": "q", "output": 3}, "a message holds int, allowed is text"),
        ({"text": 3}, "'text' is 3, allowed is text"),
        ({}, "has the keys"),
    ],
    ids=str,
)  # fmt: skip
def test_a_row_that_cannot_be_read_is_named_by_file_and_line(
    row: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": PLAIN}) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=rf"a\.jsonl:3.*{told}"):
        read_samples([path], byte_tokenizer(), 100)
    skipped = Skipped()
    assert len(read_samples([path], byte_tokenizer(), 100, skipped=skipped)) == 1
    assert skipped.count == 1
    assert "a.jsonl:3" in str(skipped)


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_bare_lists_of_messages(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    chat = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    path.write_text(
        "\n".join(json.dumps(chat) for _ in range(2))
        if ending == "jsonl"
        else json.dumps([chat, chat])
    )
    assert [messages(row, where) for row, where in read_rows(path)] == [PLAIN, PLAIN]
    path.write_text(json.dumps(chat))
    assert [messages(row, where) for row, where in read_rows(path)] == [PLAIN]


def test_rows_that_are_left_out_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = ["{broken", "3", '{"messages": 3}', "[1]", '{"no": 1}']
    path.write_text(
        "\n".join([json.dumps({"messages": PLAIN}), *bad, json.dumps({"messages": PLAIN})])
    )
    skipped = Skipped()
    assert len(read_samples([path], byte_tokenizer(), 100, skipped=skipped)) == 2
    assert skipped.count == len(bad)
    told = str(skipped)
    assert told.startswith("5 rows cannot be read and are left out: ")
    assert told.endswith("; and 2 more")
    assert all(f"a.jsonl:{line}" in told for line in (2, 3, 4))


def test_nothing_but_bad_rows_is_nothing_to_learn(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{broken")
    with pytest.raises(UserError, match="nothing to learn"):
        read_samples([tmp_path / "a.jsonl"], byte_tokenizer(), 100, skipped=Skipped())


def test_a_datastore_leaves_bad_rows_out_where_the_user_asks(
    tmp_path: Path, draftree: Command
) -> None:
    target = target_folder(tmp_path / "t")
    data = tmp_path / "a.jsonl"
    data.write_text("\n".join([json.dumps({"messages": PLAIN}), "{broken", '{"no": 1}']))
    command = (
        "datastore",
        "build",
        "--kind",
        "rest",
        "--target",
        target,
        "--data",
        data,
        "--out",
        tmp_path / "d",
    )
    status, out, err = draftree(*command)
    assert (status, out) == (2, "")
    assert f"{data}:2 is not JSON" in err
    assert not (tmp_path / "d").exists()
    status, out, err = draftree(*command, "--skip-bad-rows", "--json")
    assert status == 0, err
    assert json.loads(out)["skipped"] == 2
    assert "2 rows cannot be read and are left out" in err


BAD = [json.dumps({"messages": PLAIN}), "{broken", '{"no": 1}', json.dumps({"messages": [{"role": "user", "content": "\ud800"},
       {"role": "assistant", "content": "a"}]}), json.dumps({"messages": [*PLAIN, *PLAIN]})]  # fmt: skip


@pytest.mark.parametrize(
    "words", [("--regenerate",), ("--synthesize", "2"), ("--exclude", "EVALUATION"), ()], ids=str
)
def test_whatever_reads_the_data_leaves_bad_rows_out_where_the_user_asks(
    words: tuple[str, ...], tmp_path: Path, draftree: Command, caplog: pytest.LogCaptureFixture
) -> None:
    target = talking_folder(tmp_path / "t")
    (tmp_path / "EVALUATION").with_suffix(".jsonl").write_text(
        '{"question": "another", "answer": "one"}'
    )
    data = tmp_path / "a.jsonl"
    data.write_text("\n".join([*BAD, *BAD[:1] * 8]))
    more = [w.replace("EVALUATION", str(tmp_path / "EVALUATION.jsonl")) for w in words]
    command = ["train", "vdm", "--target", target, "--data", data, *more, "--epochs", "0.3", "--batch-size", "2",
               "--held-out", "0", "--out", tmp_path / "d"]  # fmt: skip
    if "--exclude" not in words and words:
        command += ["--regenerate-tokens", "4"]
    status, out, err = draftree(*command)
    assert (status, out) == (2, "")
    assert f"{data}:2 is not JSON" in err
    status, out, err = draftree(*command, "--skip-bad-rows")
    assert status == 0, err
    assert err.count("3 rows cannot be read and are left out: ") == 1
    assert all(
        f"{data.name}:{line}" in "".join(caplog.text.split()) for line in (2, 3, 4)
    )  # the line itself is cut


def test_a_chat_that_cannot_be_answered_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([BAD[0], BAD[3]]))
    with pytest.raises(UserError, match=rf"{path}:2: the prompt is not valid Unicode text"):
        list(read_prompts([path], byte_tokenizer(), 8))
    with pytest.raises(UserError, match=rf"{path}:1 has token .* allowed are ids below the 3 rows"):
        list(read_prompts([path], byte_tokenizer(), 8, vocab=3))
