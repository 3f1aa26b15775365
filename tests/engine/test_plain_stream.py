"""Plain decoding of more texts than there are rows: each is the text that its request gets alone."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from draftree.engine import generate_plain, plain_stream
from draftree.errors import UserError
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing.fakes import tiny_target

SAMPLINGS = [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=3)]


def requests(target: Target, count: int = 21) -> list[Request]:
    """Prompts and answers of all lengths, some of which end early, greedy ones beside sampled ones."""
    draws = np.random.default_rng(0)
    return [
        Request(
            draws.integers(0, target.decoder.vocab, draws.integers(1, 12)).tolist(),
            int(draws.integers(1, 15)),
            frozenset(draws.integers(0, target.decoder.vocab, 4).tolist()),
            number=i,
            sampling=SAMPLINGS[i % 2],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("rows", [1, 3, 17, 40])
def test_every_text_of_a_stream_is_the_one_it_is_alone(rows: int) -> None:
    target = tiny_target()
    asked = requests(target)
    found = {request.number: tokens for request, tokens in plain_stream(target, iter(asked), rows)}
    assert found == {r.number: generate_plain(target, [r]).tokens[0] for r in asked}


def test_texts_end_in_the_order_of_their_lengths_and_rows_are_taken_anew(monkeypatch) -> None:
    target, passes = tiny_target(), []
    verify = target.verify
    monkeypatch.setattr(
        target, "verify", lambda *args: passes.append(args[1].roots) or verify(*args)
    )
    lengths = [9, 2, 2, 2, 2, 2]
    ended = [
        len(tokens) for _, tokens in plain_stream(target, [Request([1, 2], n) for n in lengths], 2)
    ]
    assert ended == [2, 2, 2, 2, 2, 9]
    assert passes == [2] * 5 + [1] * 3, (
        "a batch that waits for its longest text needs 8 + 1 + 1 passes"
    )


def test_rows_begin_an_eighth_at_a_time(monkeypatch) -> None:
    target, begun = tiny_target(), []
    prefill = target.prefill
    monkeypatch.setattr(
        target, "prefill", lambda *args: begun.append(len(args[1])) or prefill(*args)
    )
    lengths = [5, 6, 7, 8, 9] * 8
    list(plain_stream(target, [Request([1, 2], n) for n in lengths], 16))
    assert begun == [2] * 20


def test_a_request_may_come_of_a_text_before_it() -> None:
    target = tiny_target()
    first = Request([5, 6, 7], 6)
    then, asked = list[Request](), iter([first])

    def coming() -> Iterator[Request | None]:
        yield from asked
        while True:
            yield then.pop() if then else None

    found = []
    for request, tokens in itertools.islice(plain_stream(target, coming(), 3), 3):
        found.append((request.prompt, tokens))
        then.append(Request([*request.prompt, *tokens, 1], 6))
    for prompt, tokens in found:
        assert generate_plain(target, [Request(prompt, 6)]).tokens == [tokens]
    assert [len(prompt) for prompt, _ in found] == [3, 10, 17]
    assert list(plain_stream(target, iter([None, first]), 3)) == [], (
        "nothing waits, and nothing is written"
    )


def test_unservable_requests_are_refused() -> None:
    target = tiny_target()
    with pytest.raises(UserError, match="the prompt is empty"):
        list(plain_stream(target, [Request([], 3)]))
    with pytest.raises(UserError, match="rows is 0, allowed is a whole number of at least 1"):
        list(plain_stream(target, [Request([1], 3)], rows=0))
