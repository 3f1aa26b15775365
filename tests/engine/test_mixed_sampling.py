"""Greedy and sampled requests, each with its own seed and cuts, in one batch: every text is the one it is alone."""

import numpy as np
import pytest

from draftree.acceptors.rejection import Rejection
from draftree.batch import SequenceBatch
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.policies.chain import Chain
from draftree.policies.pct import PCT
from draftree.registry import part
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.testing import tiny_target

SAMPLINGS = (
    Sampling(),
    Sampling(1.0, seed=3),
    Sampling(0.7, top_k=9, seed=8),
    Sampling(),
    Sampling(1.3, top_p=0.9, seed=3),
)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    prompts = ([5, 6, 7, 5, 6], [8], [5, 6, 7, 5, 6], [1, 2, 1, 2, 1, 2], [9, 9, 3])
    return [
        Request(p, 9 + i, number=i, sampling=s)
        for i, (p, s) in enumerate(zip(prompts, SAMPLINGS, strict=True))
    ]


@pytest.mark.parametrize("drafter", ["edd", "pld", "medusa", "suffix", "eagle"])
def test_rows_of_all_temperatures_are_written_as_each_alone(
    drafter: str, requests: list[Request]
) -> None:
    target = tiny_target()
    engine = Engine(target, part("drafter", drafter)().example(target), PCT())
    alone = [engine.plain([request]).tokens[0] for request in requests]
    assert engine.write(requests).tokens == alone == engine.plain(requests).tokens
    assert engine.write(requests[::-1], reuse=False).tokens == alone[::-1]


def test_common_sampling_replaces_that_of_each_request(requests: list[Request]) -> None:
    target = tiny_target()
    engine = Engine(target, part("drafter", "pld")().example(target), PCT())
    greedy = [engine.plain([Request(r.prompt, r.max_new_tokens)]).tokens[0] for r in requests]
    assert engine.write(requests, Sampling()).tokens == greedy
    assert engine.write(requests).tokens != greedy


def test_a_rule_that_does_not_serve_a_row_is_refused(requests: list[Request]) -> None:
    target = tiny_target()
    engine = Engine(target, part("drafter", "pld")().example(target), Chain(), Rejection())
    with pytest.raises(UserError, match="acceptor 'rejection' does not serve temperature 0"):
        engine.write(requests)
    tokens = engine.write([r for r in requests if not r.sampling.greedy]).tokens
    assert [len(t) for t in tokens] == [10, 11, 13]
    assert all(np.unique(t).size > 1 for t in tokens)


def test_more_requests_than_free_rows_are_refused_before_anything_changes(
    requests: list[Request],
) -> None:
    rows = SequenceBatch(tiny_target().new_cache(3, 8))
    rows.admit(requests[:2])
    with pytest.raises(
        UserError, match="2 requests are given, allowed are at most as many as slots are free: 1"
    ):
        rows.admit(requests[2:4])
    assert rows.live.tolist() == [0, 1]
    assert rows.leave(0) == []
    assert rows.admit(requests[2:4]).tolist() == [0, 2]
