"""Completions, streams, chats and asyncio: all of them give plain decoding's text."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftree.data.prompts import encode, question
from draftree.engine import Engine, load
from draftree.errors import UnknownName, UserError
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.target.target import HiddenStateSpec, Target, VerificationResult
from draftree.testing.fakes import Always, Sometimes
from draftree.text.completion import Completion, Token
from draftree.text.options import Options
from draftree.text.stop_strings import StopStrings, decode_tokens
from folders import target_folder

PROMPT, LENGTH = "abcab", 30


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(str(target_folder(tmp_path_factory.mktemp("target"))), torch.float64)


@pytest.fixture
def engine(target: Target) -> Engine:
    """Drafts well behind `PROMPT`, so that whole paths are accepted."""
    return Engine(target, Always([plan(target)], 260), Chain(5))


def plan(target: Target, **options: Any) -> list[int]:
    """The prompt and what plain decoding writes behind it."""
    return [*encode(target.tokenizer, PROMPT), *plainly(target, PROMPT, **options)]


def plainly(target: Target, prompt: Any, **options: Any) -> list[int]:
    asked = Options(**{"max_new_tokens": LENGTH, "ignore_eos": True, **options})
    request = asked.request(target, encode(target.tokenizer, prompt))
    return Engine(target, Sometimes([[]], 260), Chain(1)).plain([request], asked.sampling).tokens[0]


def every(target: Target, options: dict[str, Any]) -> Iterator[Engine]:
    """Engines with drafters that are right always, or now and then."""
    right = [plan(target, **options)]
    yield Engine(target, Always(right, 260), Chain(5))
    yield Engine(target, Sometimes(right, 260), VCT(3))


SAMPLED: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 4}]


@pytest.mark.parametrize("options", SAMPLED, ids=str)
def test_a_completion_is_plain_decodings_text(target: Target, options: dict[str, Any]) -> None:
    expected = plainly(target, PROMPT, **options)
    for engine in every(target, options):
        found = engine.complete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, **options)
        assert found.tokens == expected
        assert found.text == decode_tokens(target.tokenizer, expected)
        assert (found.ending, found.stop, found.logprobs) == ("length", None, [])
        assert found.stats.acceptance_length > 1.3
        assert len(found.origins) == LENGTH
        assert found.origins[0] == "prefill"
        assert {"drafted", "bonus"} <= set(found.origins)
        ids = engine.complete(
            encode(target.tokenizer, PROMPT), max_new_tokens=LENGTH, ignore_eos=True, **options
        )
        assert replace(ids, stats=found.stats) == found, "ids are taken as they are"


@pytest.mark.parametrize("options", SAMPLED, ids=str)
def test_a_stop_text_ends_it_in_the_middle_of_an_accepted_path(
    target: Target, options: dict[str, Any]
) -> None:
    tokens = plainly(target, PROMPT, **options)
    for at in range(2, 20, 2):
        whole = decode_tokens(target.tokenizer, tokens[:at])
        stop = decode_tokens(target.tokenizer, tokens)[len(whole) - 2 : len(whole)]
        if "\ufffd" in stop:
            continue
        first = whole.find(stop)
        expected = plainly(target, PROMPT, stop=stop, **options)
        for engine in every(target, options):
            found = engine.complete(
                PROMPT, max_new_tokens=LENGTH, ignore_eos=True, stop=["never", stop], **options
            )
            assert found.tokens == expected == tokens[: len(expected)]
            assert found.text == whole[:first], "without the stop text"
            assert decode_tokens(target.tokenizer, found.tokens).endswith(stop), (
                "which its tokens hold"
            )
            assert (found.ending, found.stop) == ("stop", stop)


def test_stops_in_the_middle_of_a_path_are_really_met(engine: Engine, target: Target) -> None:
    """Without the cut, the step would have emitted more: some of these stops end a path that was accepted beyond them."""
    text = decode_tokens(target.tokenizer, plainly(target, PROMPT))
    beyond = 0
    for stop in {c for c in text[3:30] if c != "\ufffd"}:
        found = engine.complete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, stop=stop)
        beyond += sum(s.accepted + 1 for s in found.stats.steps) + 1 > len(found.tokens)
    assert beyond >= 3


@pytest.mark.parametrize("options", [*SAMPLED, {"stop": ["a", "e"]}, {"logprobs": 1}], ids=str)
def test_a_stream_is_the_completion_token_by_token(target: Target, options: dict[str, Any]) -> None:
    for engine in every(target, options):
        done = engine.complete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, **options)
        told = list(engine.stream(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, **options))
        assert "".join(t.text for t in told) == done.text
        assert [t.id for t in told] == done.tokens
        assert [t.origin for t in told] == done.origins
        assert [t.logprob for t in told if t.logprob] == done.logprobs
        assert [t.ending for t in told] == [None] * (len(told) - 1) + [done.ending]


def test_characters_of_several_tokens_come_whole(target: Target) -> None:
    text = "aé😀\u4e16 z"
    engine = Engine(target, Sometimes([[]], 260), Chain(3))
    told = list(engine.stream(PROMPT, beginning=text, max_new_tokens=len(text.encode())))
    assert [t.text for t in told if t.text] == list(text)
    assert [bool(t.text) for t in told] == [
        True,
        *[False, True],
        *[False] * 3,
        True,
        *[False] * 2,
        True,
        True,
        True,
    ]
    cut = list(engine.stream(PROMPT, beginning="aé", max_new_tokens=2))
    assert [t.text for t in cut] == ["a", "\ufffd"], "at its end a text shows what was held back"


@pytest.mark.parametrize("options", SAMPLED, ids=str)
def test_log_probabilities_are_plain_decodings(target: Target, options: dict[str, Any]) -> None:
    asked = {
        "max_new_tokens": 16,
        "ignore_eos": True,
        "logprobs": 3,
        "repetition_penalty": 1.3,
        **options,
    }
    told, known = list[Any](), Options(**asked)
    request = known.request(target, encode(target.tokenizer, PROMPT))
    plain = Engine(target, Sometimes([[]], 260), Chain(1))
    plain.plain([request], known.sampling, lambda events: told.extend(events[0].logprobs))
    text = np.array([*request.prompt, *(t.token for t in told)])
    last = target.prefill(target.new_cache(1, 60), [text[:-1]], HiddenStateSpec()).logits[0]
    assert told[-1].logprob == pytest.approx(float(torch.log_softmax(last, -1)[text[-1]]), abs=1e-9)
    for engine in every(target, asked):
        found = engine.complete(PROMPT, **asked)
        assert [f.token for f in found.logprobs] == found.tokens
        for ours, theirs in zip(found.logprobs, told, strict=True):
            assert ours.token == theirs.token
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
            assert [x for _, x in ours.top] == pytest.approx([x for _, x in theirs.top], abs=1e-9)


def test_an_eos_and_the_context_end_a_text(target: Target) -> None:
    engine = Engine(target, Sometimes([[]], 260), Chain(3))
    ended = engine.complete(PROMPT, beginning=[*encode(target.tokenizer, "hi"), 1, 9, 9])
    assert (ended.text, ended.tokens[-1], ended.ending) == ("hi", 1, "eos")
    both = engine.complete(PROMPT, beginning="hi<eos>", stop="<eos>")
    assert (both.text, both.ending, both.stop) == ("hi", "eos", None)
    full = engine.complete([9] * 150, ignore_eos=True)
    assert (full.ending, len(full.tokens)) == ("context", 11)
    stopped = engine.complete(PROMPT, beginning="hi<|user|>you", stop="<|user|>")
    assert (stopped.text, stopped.tokens[-1], stopped.ending, stopped.stop) == (
        "hi",
        2,
        "stop",
        "<|user|>",
    )


def test_messages_go_through_the_template(engine: Engine, target: Target) -> None:
    found = engine.complete(question(PROMPT), max_new_tokens=9, ignore_eos=True)
    assert found.tokens == plainly(target, question(PROMPT), max_new_tokens=9)


def test_chat_answers_a_question_messages_or_a_list_of_either(
    engine: Engine, target: Target
) -> None:
    system = {"role": "system", "content": "Be brief."}
    options: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
    expected = plainly(target, [system, *question(PROMPT)], **options)
    assert engine.chat(PROMPT, system="Be brief.", **options).tokens == expected
    assert engine.chat([system, *question(PROMPT)], **options).tokens == expected
    assert engine.chat(question(PROMPT)[0], **options).tokens == plainly(
        target, question(PROMPT), **options
    )
    assert [c.tokens for c in engine.chat([PROMPT, "b"], system="Be brief.", **options)] == [
        expected,
        plainly(target, [system, *question("b")], **options),
    ]
    assert [c.tokens for c in engine.chat([question(PROMPT)], system="Be brief.", **options)] == [
        expected
    ]
    assert asyncio.run(engine.achat(PROMPT, system="Be brief.", **options)).tokens == expected


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda e: e.complete(PROMPT, max_token=3), "unknown option 'max_token'"),
        (lambda e: e.stream(PROMPT, tempature=3), "did you mean 'temperature'"),
        (lambda e: e.stream(PROMPT, temperature=-3), "temperature is -3"),
        (lambda e: e.stream([999]), "token id 999"),
        (lambda e: e.complete([]), "empty"),
        (lambda e: e.chat("a", stops="x"), "did you mean 'stop'"),
        (lambda e: asyncio.run(e.acomplete(PROMPT, top_k=-2)), "top_k is -2"),
        (lambda e: asyncio.run(e.acomplete([9] * 200)), "200 tokens"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(
    engine: Engine, call: Callable[[Engine], object], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        call(engine)
    assert engine.complete(PROMPT, max_new_tokens=3).tokens, "and the engine is as before"


def test_a_stream_may_be_closed_early_and_others_begun(engine: Engine, target: Target) -> None:
    expected = plainly(target, PROMPT)
    first = engine.stream(PROMPT, max_new_tokens=LENGTH, ignore_eos=True)
    begun = [next(first).id for _ in range(7)]
    between = engine.stream(PROMPT, max_new_tokens=LENGTH, ignore_eos=True)
    assert [next(between).id for _ in range(9)] == expected[:9]
    assert [*begun, *(t.id for t in first)] == expected, "two streams take turns"
    between.close()  # type: ignore[attr-defined]
    with pytest.raises(StopIteration):
        next(between)
    assert engine.complete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True).tokens == expected


# asyncio.


def test_tasks_share_an_engine(engine: Engine, target: Target) -> None:
    prompts = [PROMPT, "xyz", "a longer prompt", "é"]
    expected = [plainly(target, p, seed=i, temperature=1.0) for i, p in enumerate(prompts)]

    async def streamed(i: int) -> list[int]:
        asked = {"max_new_tokens": LENGTH, "ignore_eos": True, "seed": i, "temperature": 1.0}
        return [t.id async for t in engine.astream(prompts[i], **asked)]

    async def completed(i: int) -> list[int]:
        asked = {"max_new_tokens": LENGTH, "ignore_eos": True, "seed": i, "temperature": 1.0}
        return (await engine.acomplete(prompts[i], **asked)).tokens

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*map(streamed, range(4)), *map(completed, range(4)))

    with alone(target) as widest:
        assert asyncio.run(all_of_them()) == expected * 2
        assert asyncio.run(all_of_them()) == expected * 2, "in another loop"
    assert widest() == 1, "one pass at a time"


class alone:
    """Counts how many threads are inside the target's passes at once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._inside = 0
        self._widest = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Callable[[], int]:
        forward = self._target.decoder.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._inside += 1
                self._widest = max(self._widest, self._inside)
            try:
                return forward(*args, **kwargs)
            finally:
                with self._lock:
                    self._inside -= 1

        self._target.decoder.forward = counted  # type: ignore[method-assign]
        return lambda: self._widest

    def __exit__(self, *_: object) -> None:
        del self._target.decoder.forward


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_task_ends_the_writing_after_the_step_at_hand(
    engine: Engine, target: Target, times: int
) -> None:
    reached = threading.Event()
    go_on = threading.Event()
    steps = []
    verify = target.verify

    def slow(*args: Any, **kwargs: Any) -> VerificationResult:
        steps.append(0)
        if len(steps) == 2:
            reached.set()
            assert go_on.wait(20)
        return verify(*args, **kwargs)

    async def cancelled() -> None:
        task = asyncio.create_task(engine.acomplete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True))
        await asyncio.to_thread(reached.wait, 20)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done(), "a step cannot be broken off"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    target.verify = slow  # type: ignore[method-assign]
    try:
        asyncio.run(cancelled())
        assert len(steps) == 2
    finally:
        del target.verify
    assert engine.complete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True).tokens == plainly(
        target, PROMPT
    )


def test_an_asynchronous_stream_may_be_left_early(engine: Engine, target: Target) -> None:
    async def some() -> list[Token]:
        found = []
        async for token in engine.astream(PROMPT, max_new_tokens=LENGTH, ignore_eos=True):
            found.append(token)
            if len(found) == 4:
                break
        return found

    assert [t.id for t in asyncio.run(some())] == plainly(target, PROMPT)[:4]
    assert (
        engine.complete(PROMPT, max_new_tokens=9, ignore_eos=True).tokens
        == plainly(target, PROMPT)[:9]
    )


# Chats.


class Fed:
    """How many tokens each prefill read, and of how many."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[tuple[int, int]] = []
        prefill = target.prefill

        def counted(cache: Any, prompts: Any, needs: Any, rows: Any) -> VerificationResult:
            self.reads.append((len(prompts[0]) - int(cache.lengths[0]), len(prompts[0])))
            return prefill(cache, prompts, needs, rows)

        monkeypatch.setattr(target, "prefill", counted)


def test_a_chat_keeps_its_messages_and_its_cache(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, fed = Engine(target, Sometimes([[]], 260), Chain(3)), Fed(target, monkeypatch)
    chat = engine.conversation("Be brief.", max_new_tokens=6)
    ascii_only = list(
        range(98, 260)
    )  # an answer that is not text would be rendered as other tokens than it was written in
    first = chat.say("hi", suppress=ascii_only)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert first.tokens == plainly(
        target, messages, max_new_tokens=6, suppress=ascii_only, ignore_eos=False
    )
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and?"}]
    second = chat.say("and?", max_new_tokens=4)
    assert len(second.tokens) <= 4, "a turn's own options"
    assert second.tokens == plainly(target, messages, max_new_tokens=4, ignore_eos=False)
    assert chat.messages == [*messages, {"role": "assistant", "content": second.text}]
    new = (
        len(encode(target.tokenizer, messages))
        - len(encode(target.tokenizer, messages[:2]))
        - len(first.tokens)
    )
    told = [read for read in fed.reads if read[1] == len(encode(target.tokenizer, messages))]
    assert told[0][0] <= new + 1, "the last token written was in no cache yet"


def test_a_chat_streams_and_forgets_what_failed(target: Target) -> None:
    engine = Engine(target, Sometimes([[]], 260), Chain(3))
    chat = engine.conversation(max_new_tokens=8, ignore_eos=True)
    told = "".join(t.text for t in chat.stream("hi"))
    assert chat.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": told},
    ]
    before = list(chat.messages)
    with pytest.raises(UserError, match="context"):
        chat.say("x" * 200)
    with pytest.raises(UnknownName):
        chat.stream("x", temprature=1)
    assert chat.messages == before
    with closing(chat.stream("more")) as stream:  # type: ignore[type-var]
        part = next(stream).text + next(stream).text
    assert chat.messages[:2] == before
    assert chat.messages[3]["content"].startswith(part)
    answer = asyncio.run(chat.asay("once more"))
    assert chat.messages[-1] == {"role": "assistant", "content": answer.text}
    assert len(chat.messages) == 6


def test_the_demos_second_turn_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load("demo", "edd", "chain:length=3")
    fed = Fed(engine.target, monkeypatch)
    chat = engine.conversation(max_new_tokens=24)
    answers = [
        chat.say("Tom has 3 apples and buys 5. How many has he?"),
        chat.say("And if he eats 2?"),
    ]
    (_, one), (read, two) = fed.reads
    assert two - read >= one + len(answers[0].tokens) - 1, (
        "the prompt and the answer, but for its last token, were there"
    )
    fresh = load(engine.target, "edd", "chain:length=3")
    assert fresh.complete(chat.messages[:-1], max_new_tokens=24).tokens == answers[1].tokens
    assert answers[0].stats.acceptance_length > 1.2


ASKED = {"role": "user", "content": "a"}
NO_PROMPTS = [
    None, 5, b"ab", [1.5], [True], [b"ab"], ["ab", None], [["ab"]], [[[1]]], torch.tensor(3), torch.ones(3), torch.ones(2, 3),
    torch.zeros(1, 1, 1), torch.empty(3, device="meta"), np.array([True]), ASKED, [{"role": "user"}],
    [{"rol": "user", "content": "a"}], [{"role": 5, "content": "a"}], [{"role": "user", "content": b"a"}], [1, ASKED],
]  # fmt: skip


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=str)
def test_invalid_prompts_are_refused_in_one_line(engine: Engine, prompt: Any) -> None:
    with pytest.raises(
        UserError, match=r"^the prompt is .*, allowed is a text, ids in one row, or messages that"
    ):
        engine.complete(prompt, max_new_tokens=2)


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, lambda ids: list(torch.tensor(ids))]
)
def test_ids_may_come_in_any_row(
    engine: Engine, target: Target, kind: Callable[[list[int]], Any]
) -> None:
    ids = encode(target.tokenizer, PROMPT)
    assert (
        engine.complete(kind(ids), max_new_tokens=5).tokens
        == engine.complete(PROMPT, max_new_tokens=5).tokens
    )


def test_a_completion_says_its_log_probabilities_in_json(engine: Engine, target: Target) -> None:
    found: Completion = engine.complete(PROMPT, max_new_tokens=3, logprobs=2)
    said = found.logprobs_as_json(target.tokenizer)
    assert [one["id"] for one in said] == found.tokens
    assert [set(one) for one in said] == [{"id", "text", "logprob", "top"}] * len(found.tokens)
    assert [set(best) for best in said[0]["top"]] == [{"id", "text", "logprob"}] * 2
    assert said[0]["top"][0]["logprob"] >= said[0]["logprob"]


def test_nothing_given_is_nothing_looked_for(target: Target) -> None:
    assert StopStrings.of(target.tokenizer, ()) == StopStrings()
