"""Questions that a target makes up, their answers by a server, and what must not be learnt."""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree.cli import app
from draftree.data.decontamination import Excluded, extract_questions
from draftree.data.samples import read_samples
from draftree.engine import generate_plain
from draftree.errors import UserError
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.training.answer_source import Author, GeneratedText, Local, PendingPrompt
from draftree.training.distributed import Processes
from draftree.training.generation_run import GenerationRun
from draftree.training.openai_client import KEY_VARIABLE, Remote, Server, greedy_agreement
from draftree.training.regenerate import Regeneration, regenerate
from draftree.training.synthesize import (
    METADATA_FILE,
    PARTIAL_FILE,
    QUESTIONS_FILE,
    Opening,
    Synthesis,
    find_flaw,
    select_questions,
    synthesize,
)
from folders import byte_tokenizer, talking_folder, target_folder

HOW = Synthesis(count=12, tokens=16, rows=8, seed=2)
HERE = GenerationRun(Processes.on("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(str(folder), dtype="float64", device="cpu")


def made_up(
    target: Target, out: Path, how: Synthesis = HOW, beside: Sequence[Path] = (), **run: Any
) -> list[str]:
    path = synthesize(target, how, out, replace(HERE, **run), beside)
    chats = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert all(chat[1] == {"role": "assistant", "content": ""} for chat in chats)
    return [chat[0]["content"] for chat in chats]


def test_questions_are_drawn_behind_the_users_header_by_seed_and_number(
    target: Target, tmp_path: Path
) -> None:
    found = made_up(target, tmp_path)
    report = json.loads((tmp_path / METADATA_FILE).read_text())
    assert report["opening"] == "<|user|>"
    header, ends = [2], target.eos | {3}
    drawn = []
    for i in range(report["made_up"]):
        request = Request(
            header, HOW.tokens, ends, i, sampling=Sampling(1.0, top_p=0.99, seed=HOW.seed)
        )
        (tokens,) = generate_plain(target, [request]).tokens
        text = target.tokenizer.decode([t for t in tokens if t not in ends])
        drawn.append({"text": text, "ended": tokens[-1] in ends})
    kept, dropped = select_questions(drawn, HOW.count, target.tokenizer)
    assert found == kept
    assert report["dropped"] == dict(dropped)
    assert (report["kept"], report["made_up"]) == (12, 12 + dropped.total())
    assert dropped["without an end"]
    assert len(set(found)) == len(found)
    assert made_up(target, tmp_path / "other", replace(HOW, seed=6)) != found
    assert made_up(target, tmp_path / "rows", replace(HOW, rows=3)) == found


def test_making_up_goes_on_where_it_stopped(target: Target, tmp_path: Path) -> None:
    straight, calls = made_up(target, tmp_path / "straight"), list[int]()

    def interrupt(done: int, remark: str = "", of: int | None = None) -> None:
        assert remark == "generating questions"
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_up(target, tmp_path / "out", tell=interrupt)
    (part,) = (tmp_path / "out" / PARTIAL_FILE).rglob("0.jsonl")
    part.write_text(part.read_text() + '\n{"number": 9, "te')  # a line that was broken off
    assert (
        made_up(target, tmp_path / "out", tell=lambda done, remark="", of=0: calls.append(of))
        == straight
    )
    assert calls[0] == 12 - 4
    assert not list((tmp_path / "out").glob("*.partial"))
    again = list[int]()
    assert (
        made_up(target, tmp_path / "out", tell=lambda done, remark="", of=0: again.append(of))
        == straight
    )
    assert not again
    more = made_up(target, tmp_path / "out", replace(HOW, count=13))
    assert more[:12] == straight


def test_existing_and_excluded_questions_are_not_generated_again(
    target: Target, tmp_path: Path
) -> None:
    first = made_up(target, tmp_path / "first")
    beside, exclude = tmp_path / "beside.jsonl", tmp_path / "exclude.jsonl"
    beside.write_text(json.dumps({"question": f"  {first[0].upper()}?!", "answer": "x"}))
    exclude.write_text(json.dumps({"turns": ["something", first[1]]}))
    found = made_up(target, tmp_path / "out", beside=[beside], excluded=Excluded.of([exclude]))
    assert found[:10] == first[2:]
    report = json.loads((tmp_path / "out" / METADATA_FILE).read_text())["dropped"]
    assert (report["excluded"], report["duplicates"]) == (1, 2), (
        "one of them is a duplicate without the data beside it, too"
    )


class Scripted(Author):
    """Writes given texts, in turn."""

    def __init__(self, *texts: str) -> None:
        self._texts, self.asked = texts, list[PendingPrompt]()

    def write(self, waiting: deque[PendingPrompt]) -> Iterator[GeneratedText]:
        while waiting:
            self.asked.append(waiting.popleft())
            yield GeneratedText(
                self.asked[-1], self._texts[self.asked[-1].number % len(self._texts)], True
            )


def test_a_target_that_makes_up_nothing_usable_is_refused(target: Target, tmp_path: Path) -> None:
    author = Scripted("the same")
    with pytest.raises(
        UserError, match=r"of 64 questions that '.*' made up 1 can be used: 63 duplicates"
    ):
        made_up(target, tmp_path, replace(HOW, count=1000), author=author)
    assert len(author.asked) == 64
    assert not (tmp_path / QUESTIONS_FILE).exists()


FLAWS = {
    "What is two and two?": "",
    "Écris un poème sur la mer.\n\tS'il te plaît": "",
    "如何学习汉语？": "",
    "": "empty",
    "2 + 2": "no text",
    "a\ufffdb": "no text",
    "a\x00b": "no text",
    "why <|user|> not": "with special tokens",
    "again and again and again and again and again": "repetitive",
    "a" * 30: "repetitive",
    "no no no": "",
}


@pytest.mark.parametrize("text", FLAWS)
def test_broken_questions_are_told_by_reason(text: str) -> None:
    assert find_flaw(text, True, ["<|user|>"]) == FLAWS[text]
    assert find_flaw(text, False) == "without an end"


def test_a_question_that_came_before_is_known_by_its_words() -> None:
    drawn = [
        {"text": text, "ended": True} for text in (" Why not? ", "why, NOT", "Why?", "How?", "Who?")
    ]
    assert select_questions(drawn, 2, byte_tokenizer(), ["why"]) == (
        ["Why not?", "How?"],
        {"duplicates": 2},
    )


def test_the_opening_is_what_the_template_puts_before_a_user() -> None:
    header = "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|pad|>be good{% endif %}[{{ m['role'] }}] "
    words = byte_tokenizer(
        header
        + "{{ m['content'] }} [/]{% endfor %}{% if add_generation_prompt %} [assistant]{% endif %}"
    )
    opening = Opening.of(words)
    assert (opening.text, opening.stop) == ("<|pad|>be good[user] ", "[/] [assistant]")
    assert opening.ids == words(opening.text, add_special_tokens=False)["input_ids"]
    assert Opening.of(words, "about cats").text == "[system] about cats [/][user] "
    assert Opening.of(byte_tokenizer()).stop == "<|assistant|>"
    for template in (
        None,
        "{{ messages[0]['content'] }}<eos>",
        "<|user|>{{ messages[0]['content'] }}",
        "<|user|>hello<eos>",
    ):
        with pytest.raises(UserError, match=r"chat template.*: use --data"):
            Opening.of(byte_tokenizer(template))


def test_a_text_that_ends_a_question_is_no_part_of_it(target: Target) -> None:
    ids = [2]
    (free,) = Local(target, 2).write(deque([PendingPrompt(0, "", ids, 12)]))
    stop = free.text[4:6]
    (cut,) = Local(target, 2).write(deque([PendingPrompt(0, "", ids, 12, stops=(stop,))]))
    assert (cut.text, cut.ended) == (free.text[: free.text.index(stop)], True)


# What must not be learnt.

LONG = "A robe takes two bolts of blue fiber and half that much white fiber. How many bolts in total does it take?"


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"turns": ["a", "b"]}, ["a", "b"]),
        ({"question": "a"}, ["a"]),
        ({"question": "a", "answer": "b"}, ["a"]),
        ({"prompt": "a", "completion": "b"}, ["a"]),
        ({"text": "a"}, ["a"]),
        (
            {
                "prompt": "x",
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ],
            },
            ["a", "x"],
        ),
        ({"data": ["a", "b", "c"]}, ["a", "c"]),
        ({"turns": ["x"], "text": "a"}, ["a", "x"]),
        ({"question": "x", "chat": [{"role": "user", "content": "a"}]}, ["a", "x"]),
        ({"instruction": "x", "input": "a", "output": "b", "text": "raw"}, ["x\n\na"]),
        ({"instruction": "x"}, ["x"]),
    ],
)
def test_row_becomes_a_request(row: dict[str, Any], texts: list[str]) -> None:
    assert extract_questions(row, "here") == texts


def test_an_excluded_prompt_is_known_by_its_words() -> None:
    excluded = Excluded([LONG, "What is 2 + 2?"])
    assert excluded.holds(LONG.upper().replace(" ", "  "))
    assert excluded.holds(f"Think hard. {LONG} Thanks!")
    assert excluded.holds("what is 2 2")
    assert not excluded.holds("What is 2 + 3?")
    assert not excluded.holds(
        "What is 2 + 2 and what is three and three and more than that in all?"
    )
    assert not excluded.holds(LONG[:60])
    assert not Excluded().holds("")


def test_no_excluded_prompt_is_learnt(target: Target, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [
        {"question": f"Hi! {LONG}", "answer": "3"},
        {"question": "another", "answer": "b"},
        {"text": f"so: {LONG}"},
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    (sample,) = read_samples([data], target.tokenizer, 160, Excluded([LONG]))
    assert "another" in target.tokenizer.decode(sample.tokens)
    path = regenerate(
        target,
        [data],
        tmp_path / "out",
        Regeneration(4, 2, 160),
        replace(HERE, excluded=Excluded([LONG])),
    )
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["messages"][0]["content"] == "another"


# A server.


class Serving:
    """An OpenAI-compatible server around a target, with faults of its own.

    Args:
        target: writes.
        fault: of the number of a request: a status and a text that are answered instead of a
            completion.
    """

    def __init__(
        self, target: Target, fault: Callable[[int], tuple[int, str] | None] = lambda number: None
    ) -> None:
        self.target = target
        self.fault = fault
        self.bodies = list[dict[str, Any]]()
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.bodies)
                    outer.bodies.append(
                        body | {"path": self.path, "key": self.headers.get("Authorization")}
                    )
                    status, said = outer.fault(number) or (
                        200,
                        json.dumps(outer.completion(self.path, body)),
                    )
                self.send_response(status)
                self.send_header("Content-Length", str(len(said.encode())))
                self.end_headers()
                self.wfile.write(said.encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def completion(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        chat, tokenizer = path.endswith("/chat/completions"), self.target.tokenizer
        said = "".join(
            f"<|{m['role']}|>{m['content']}{'<eos>' * (m['role'] == 'assistant')}"
            for m in body.get("messages", ())
        )
        ids = tokenizer(f"{said}<|assistant|>")["input_ids"] if chat else body["prompt"]
        sampling = Sampling(
            body["temperature"], top_p=body.get("top_p", 1.0), seed=body.get("seed", 0)
        )
        (tokens,) = generate_plain(
            self.target,
            [Request(ids, body["max_tokens"], self.target.eos | {3}, sampling=sampling)],
        ).tokens
        ended = tokens[-1] in self.target.eos | {3}
        text = tokenizer.decode(tokens[: len(tokens) - ended])
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {"choices": [choice | {"finish_reason": "stop" if ended else "length"}]}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*args: Any) -> Serving:
        started.append(Serving(*args))
        return started[-1]

    yield start
    for server in started:
        server.close()


CHATS = [
    {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "x"},
                  {"role": "user", "content": "two?"}, {"role": "assistant", "content": "y"}]},
    {"prompt": "go on", "completion": "x"},
    {"messages": [{"role": "user", "content": "three?"}, {"role": "assistant", "content": "z"}]},
]  # fmt: skip
ANSWERS = Regeneration(10, 2, 64)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, CHATS)))
    return path


def remote(serving: Serving, target: Target, **more: Any) -> Remote:
    return Remote(Server(serving.url, "it", **{"backoff": 0.01, **more}), target)


def test_a_server_writes_what_the_target_would(
    target: Target, chats: Path, tmp_path: Path, serve, monkeypatch
) -> None:
    # Its answers end at either end of turn, as those of the target at hand would.
    monkeypatch.setattr(target.decoder.model.generation_config, "eos_token_id", [1, 3])
    serving = serve(target, lambda number: (503, "busy") if number < 2 else None)
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    here = regenerate(target, [chats], tmp_path / "here", ANSWERS, HERE)
    there = regenerate(
        target, [chats], tmp_path / "there", ANSWERS, replace(HERE, author=remote(serving, target))
    )
    assert there.read_text() == here.read_text()
    assert len(serving.bodies) == 4 + 2
    assert {body["key"] for body in serving.bodies} == {"Bearer secret"}
    assert {body["path"] for body in serving.bodies} == {"/v1/chat/completions", "/v1/completions"}
    assert {(body["model"], body["temperature"]) for body in serving.bodies} == {("it", 0)}


def test_a_server_makes_up_questions(target: Target, tmp_path: Path, serve) -> None:
    serving = serve(target)
    author = remote(serving, target, check=4)
    found = made_up(target, tmp_path, replace(HOW, count=6), author=author)
    assert len(found) == 6
    drawn = [body for body in serving.bodies if body["temperature"]]
    assert len({body["seed"] for body in drawn}) == len(drawn)
    assert all(
        (b["prompt"], b["top_p"], b["stop"], b["max_tokens"]) == ([2], 0.99, ["<|assistant|>"], 16)
        for b in drawn
    )
    assert len(serving.bodies) - len(drawn) == 4, "answers by which it is judged"


def test_a_run_by_a_server_goes_on_where_it_stopped(
    target: Target, chats: Path, tmp_path: Path, serve
) -> None:
    serving = serve(target)

    def interrupt(done: int, remark: str = "", of: int | None = None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(
            target,
            [chats],
            tmp_path / "out",
            ANSWERS,
            replace(HERE, tell=interrupt, author=remote(serving, target, check=2)),
        )
    before = len(serving.bodies)
    regenerate(
        target,
        [chats],
        tmp_path / "out",
        ANSWERS,
        replace(HERE, author=remote(serving, target, check=2)),
    )
    assert len(serving.bodies) - before < 4
    broken = serve(target, lambda number: (500, "broken"))
    regenerate(
        target, [chats], tmp_path / "out", ANSWERS, replace(HERE, author=remote(broken, target))
    )
    assert not broken.bodies, "what is finished is not asked for again"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ((503, "busy\nnow"), "was asked 3 times without success, status 503: busy now"),
        (
            (200, "<html>"),
            "was asked 3 times without success, it answers '<html>', allowed is a completion as OpenAI's API has it",
        ),
        ((200, '{"choices": []}'), "was asked 3 times without success, it answers"),
        (
            (200, '{"choices": [{"message": {"content": 5}, "text": 5}]}'),
            "was asked 3 times without success, it answers",
        ),
        ((404, "no model 'it'"), "refuses the request, status 404: no model 'it'"),
    ],
)
def test_a_server_that_fails_is_told_in_a_line(
    fault: tuple[int, str], told: str, target: Target, chats: Path, tmp_path: Path, serve
) -> None:
    serving = serve(target, lambda number: fault)
    with pytest.raises(UserError) as error:
        regenerate(
            target,
            [chats],
            tmp_path / "out",
            ANSWERS,
            replace(HERE, author=remote(serving, target, tries=3, parallel=1)),
        )
    assert str(error.value).startswith(f"server '{serving.url}' {told}")
    assert len(serving.bodies) == (1 if fault[0] == 404 else 3)
    serving.close()
    with pytest.raises(UserError, match=r"was asked 2 times without success, .*"):
        regenerate(
            target,
            [chats],
            tmp_path / "out",
            ANSWERS,
            replace(HERE, author=remote(serving, target, tries=2)),
        )


@pytest.fixture
def other(folder: Path) -> Target:
    """Return a target of the same name and other weights."""
    found = Target.load(str(folder), dtype="float64", device="cpu")
    with torch.no_grad():
        found.decoder.model.model.layers[0].mlp.down_proj.weight.mul_(-8)
    return found


def test_answers_and_questions_of_other_weights_are_not_kept(
    target: Target, other: Target, chats: Path, tmp_path: Path
) -> None:
    def answers(of: Target) -> str:
        return regenerate(of, [chats], tmp_path, ANSWERS, HERE).read_text()

    made_up(target, tmp_path)
    with pytest.raises(UserError, match="made up 0 can be used"):
        made_up(other, tmp_path)
    first = answers(target)
    assert answers(other) != first
    assert answers(target) == first
    about = json.loads((tmp_path / "regenerated.json").read_text())
    del about["weights"], about["tokenizer"]
    (tmp_path / "regenerated.json").write_text(json.dumps(about))
    assert answers(other) == first, "earlier versions did not store what tells them apart"


@pytest.mark.parametrize(
    "answers", [ANSWERS, replace(ANSWERS, temperature=1.0)], ids=["greedy", "sampled"]
)
def test_a_server_of_another_model_is_refused_and_nothing_of_it_is_kept(
    answers: Regeneration, target: Target, other: Target, chats: Path, tmp_path: Path, serve
) -> None:
    serving = serve(other)
    with pytest.raises(
        UserError,
        match=r"of the tokens of 3 answers \d+% are the likeliest of '.*', allowed are 90% or more",
    ):
        regenerate(
            target,
            [chats],
            tmp_path / "out",
            answers,
            replace(HERE, author=remote(serving, target, check=3)),
        )
    assert not list((tmp_path / "out").rglob("*.jsonl"))
    how = Synthesis(count=4, tokens=16, seed=2)
    with pytest.raises(UserError, match="it serves another model or another chat template"):
        made_up(target, tmp_path / "questions", how, author=remote(serving, target, check=3))
    trusting = remote(serving, target, agreement=0.0)
    assert regenerate(
        target, [chats], tmp_path / "out", answers, replace(HERE, author=trusting)
    ).is_file()


def test_agreement_is_the_share_of_the_targets_own_tokens(target: Target) -> None:
    ids = target.tokenizer("<|user|>hello<|assistant|>")["input_ids"]
    (tokens,) = generate_plain(target, [Request(ids, 10)]).tokens
    text = target.tokenizer.decode(tokens)
    assert target.tokenizer(text)["input_ids"] == tokens
    asks = PendingPrompt(0, "", ids, 10)
    assert greedy_agreement(target, [GeneratedText(asks, text, True)]) == 1
    other = "z" if text[-1] != "z" else "y"
    assert (
        greedy_agreement(
            target, [GeneratedText(asks, text[:-1] + other, True), GeneratedText(asks, "", True)]
        )
        == 0.9
    )
    assert greedy_agreement(target, [GeneratedText(asks, "", True)]) == 0


# The command.


def command(*args: Any) -> int:
    try:
        app.main(list(map(str, args)))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


TRAIN = ("train", "vdm", "--epochs", 0.2, "--batch-size", 4, "--json")


def test_a_command_trains_without_data(folder: Path, chats: Path, tmp_path: Path, capfd) -> None:
    ask = (
        *TRAIN,
        "--target",
        folder,
        "--synthesize",
        12,
        "--synthesize-tokens",
        24,
        "--regenerate-tokens",
        8,
        "--seed",
        5,
    )
    assert command(*ask, "--out", tmp_path / "alone") == 0
    assert "generated" in capfd.readouterr().err
    said = json.loads((tmp_path / "alone" / "training.json").read_text())
    assert (said["synthesized"], said["regenerated_tokens"]) == (12, 8)
    rows = [
        json.loads(line)["messages"]
        for line in (tmp_path / "alone" / "regenerated.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 12
    assert any(chat[1]["content"] for chat in rows)
    assert command(*ask, "--data", chats, "--regenerate", "--out", tmp_path / "both") == 0
    assert len((tmp_path / "both" / "regenerated.jsonl").read_text().splitlines()) == 12 + len(
        CHATS
    )


def test_a_command_learns_from_a_server(
    folder: Path, chats: Path, tmp_path: Path, serve, capfd
) -> None:
    serving = serve(Target.load(str(folder), device="cpu"))
    exclude = tmp_path / "exclude.jsonl"
    exclude.write_text('{"prompt": "Go on!"}')
    ask = (
        *TRAIN,
        "--target",
        folder,
        "--data",
        chats,
        "--regenerate",
        "--regenerate-tokens",
        8,
        "--exclude",
        exclude,
    )
    assert (
        command(
            *ask,
            "--server",
            serving.url,
            "--server-model",
            "it",
            "--server-check",
            2,
            "--out",
            tmp_path / "out",
        )
        == 0
    )
    told = capfd.readouterr().err
    assert "1 rows of the data are left out, because their prompts are excluded" in told
    assert "of the tokens of 2 answers 100% are the likeliest" in told
    assert len((tmp_path / "out" / "regenerated.jsonl").read_text().splitlines()) == len(CHATS) - 1
    assert json.loads((tmp_path / "out" / "training.json").read_text())["server_model"] == "it"


REFUSED = {
    "train vdm needs --data: files or folders to learn from, or --synthesize N: the target makes up the questions": (),
    "--server and --server-model were not both given, allowed are both or none": (
        "--synthesize", 4, "--server", "http://localhost",
    ),
    "--server was given, allowed only with --regenerate or --synthesize": (
        "--data", __file__, "--server", "http://localhost", "--server-model", "it",
    ),
    "server url is 'localhost', allowed is a text that begins with http:// or https://": (
        "--synthesize", 4, "--server", "localhost", "--server-model", "it",
    ),
    "--synthesize is 0, allowed is a whole number of at least 1": ("--synthesize", 0),
}  # fmt: skip


@pytest.mark.parametrize("told", REFUSED)
def test_invalid_options_of_generated_data_are_refused_in_a_line(
    told: str, tmp_path: Path, capfd
) -> None:
    assert command(*TRAIN, "--out", tmp_path / "out", *REFUSED[told]) == 2
    assert capfd.readouterr().err == f"draftree: {told}\n"


def test_a_target_without_a_chat_template_is_refused(tmp_path: Path, capfd) -> None:
    plain_text = target_folder(tmp_path / "target", None)
    assert (
        command(*TRAIN, "--target", plain_text, "--synthesize", 4, "--out", tmp_path / "out") == 2
    )
    told = (
        "the target's tokenizer has no chat template, so it cannot generate questions: use --data"
    )
    assert capfd.readouterr().err == f"draftree: {told}\n"
