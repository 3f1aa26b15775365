"""A text that is replayed is decoded in the same steps, by trees of the same work, as when the target writes it."""

from dataclasses import replace

import numpy as np
import pytest

from draftree import Request, Sampling, Target, UserError
from draftree.data.prompts import encode
from draftree.engine import Engine
from draftree.evaluation import suites
from draftree.evaluation.driven import Text
from draftree.evaluation.replayed import Replayed
from draftree.registry import build


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("demo", dtype="float64")


def engine(target: Target, drafter: str, policy: str) -> Engine:
    return Engine(target, build("drafter", drafter).open(target), build("policy", policy))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("drafter", "policy"),
    [("edd", "pct"), ("eagle", "eagle2"), ("glide", "cape"), ("mtp", "chain"), ("suffix", "trie"), ("edd+suffix", "opttree")],
)
def test_a_replay_takes_the_steps_of_the_live_run(target: Target, drafter: str, policy: str, temperature: float) -> None:
    live, prompts = engine(target, drafter, policy), suites.load("demo").prompts
    for i, prompt in enumerate(prompts[:2]):
        sampling = Sampling(temperature=temperature, seed=3)
        request = Request(encode(target.tokenizer, prompt.content), 40, target.eos, i, sampling=sampling)
        wanted = replace(live).write([request], reuse=False)
        text = Text(np.array([*request.prompt, *wanted.tokens[0]], np.int64), len(request.prompt))
        source = Replayed.along(target, text, live.drafter.needs.hidden)
        for _ in range(2):  # the second finds the caches as the first has left them
            replayed = replace(live, target=source)
            found = replayed.write([request], reuse=False)
            assert found.tokens == wanted.tokens
            assert found.stats.steps == wanted.stats.steps
            assert found.stats.work == wanted.stats.work
        assert replayed.plain([request]).tokens == wanted.tokens


def test_what_needs_passes_of_the_target_is_refused(target: Target) -> None:
    request = Request([5, 6, 7], 8)
    text = Text(np.array([5, 6, 7, 8, 9, 10]), 3)
    with pytest.raises(UserError, match="probes"):
        replace(engine(target, "lookahead", "trie"), target=Replayed.along(target, text, ())).write([request])
