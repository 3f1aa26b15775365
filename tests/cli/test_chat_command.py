"""`draftree chat` and the options of `draftree serve`, by the command line."""

import io
import json
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import draftree as library
from draftree.text.completion import Writing

Command = Callable[..., tuple[int, str, str]]
PARTS = ("--drafter", "edd", "--policy", "chain:length=2", "-n", "12")


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, draftree: Command) -> Command:
    """Run the command with lines on standard input."""

    def run(*lines: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return draftree("chat", "demo", *PARTS, *options)

    return run


def test_a_conversation_goes_on(say: Command) -> None:
    status, out, _ = say("How many legs do 3 dogs have?", "", "And 4 cats?")
    talk = library.load("demo", "edd", "chain:length=2").conversation(max_new_tokens=12)
    answers = [talk.say(text).text for text in ("How many legs do 3 dogs have?", "And 4 cats?")]
    assert (status, out) == (0, "".join(f"{answer}\n" for answer in answers))


def test_commands(say: Command, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    status, out, err = say(
        "/help",
        "/system Be brief.",
        "/system",
        "/seed 3",
        "Hello \\",
        "there",
        f"/save {file}",
        "/reset",
        "/frob",
        "/quit",
        "x",
    )
    assert status == 0
    assert "/reset" in out
    assert "Be brief." in out
    messages = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == "Hello \nthere"
    assert "unknown command '/frob'" in err


def test_a_conversation_is_saved_below_the_home_folder(
    say: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _, _, err = say("/save ~/talk.json", "/save ~/talk.json")
    assert json.loads((tmp_path / "talk.json").read_text()) == {"messages": []}
    assert f"the messages are in '{tmp_path / 'talk.json'}'" in err
    assert f"'{tmp_path / 'talk.json'}' exists already" in err


@pytest.mark.parametrize("command", ["/save", "/seed x", "/seed", "/save {old}"])
def test_a_mistake_ends_nothing(say: Command, tmp_path: Path, command: str) -> None:
    old = tmp_path / "old.json"
    old.write_text("kept")
    status, out, err = say(command.format(old=old), "Hello")
    assert (status, err.count("\n"), old.read_text()) == (0, 1, "kept")
    assert out.strip()


def test_a_context_that_is_full_is_named(say: Command) -> None:
    status, _, err = say("word " * 2000)
    assert status == 0
    assert "allowed are at most" in err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--host", "0.0.0.0"), "give an --api-key"),
        (("--api-key", "short"), "at least 8"),
        (("--port", "99999"), "99999"),
        (("--max-sequences", "0"), "max-sequences"),
        (("--drafter", "nosuch"), "nosuch"),
    ],
)
def test_a_server_that_cannot_be_is_refused(
    draftree: Command, options: tuple[str, ...], told: str
) -> None:
    status, out, err = draftree("serve", "demo", *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_a_port_that_is_taken(draftree: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, _, err = draftree("serve", "demo", "--port", other.getsockname()[1])
    assert status == 2
    assert "another program listens there" in err


def test_a_message_in_another_encoding_is_named(
    monkeypatch: pytest.MonkeyPatch, draftree: Command
) -> None:
    bytes_in = io.TextIOWrapper(io.BytesIO("café\n".encode("latin-1")), "utf-8")
    monkeypatch.setattr(sys, "stdin", bytes_in)
    status, out, err = draftree("chat", "demo", *PARTS)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "the message is not valid utf-8" in err


def test_an_interrupted_answer_belongs_to_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = library.load("demo", "edd", "chain:length=2").conversation(max_new_tokens=12)
    stream = talk.stream("How many legs do 3 dogs have?")
    shown = next(stream).text

    def interrupt(_: Writing) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Writing, "step", interrupt)
    with suppress(KeyboardInterrupt):
        for token in stream:
            shown += token.text
    assert [message["content"] for message in talk.messages[1:]] == [shown]
