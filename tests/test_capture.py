"""Passes of few sizes, recorded once and repeated: the same texts, few launches, few waits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from draftree.loop import Parts, State, admit, step
from draftree.models.capture import Graphs
from draftree.models.feed import Feed
from draftree.models.ladder import Ladder
from draftree.registry import part
from draftree.request import Request, under
from draftree.rows import Rows
from draftree.testing import Case, Suite
from draftree.testing.conformance import COSTS, cases
from draftree.testing.fakes import Recorder, tiny_target

NEURAL = ("edd", "glide", "lm", "vdm", "eagle", "always")


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def suite(recorder: Recorder) -> Suite:
    """The conformance suite with recorded passes; `python -m draftree.testing --captured` runs it whole, by hand."""
    return Suite(tiny_target(capture=Graphs(recorder)))


def some() -> list[Case]:
    """A case of each check for drafters that have passes of their own."""
    found = {(c.check, c.drafter): c for c in cases() if c.drafter in NEURAL and c.policy in ("eagle2", "yield")}
    return list(found.values())[::3]


@pytest.mark.parametrize("case", some(), ids=str)
def test_texts_are_plain_ones(suite: Suite, recorder: Recorder, case: Case) -> None:
    before = recorder.launched
    suite.run(case)
    assert recorder.launched > before or not suite.coverage.cases[case.check]


def test_sizes_are_few() -> None:
    few = Ladder(few=True)
    assert [few.width(n) for n in (1, 2, 3, 5, 8, 9, 64)] == [1, 2, 4, 8, 8, 16, 64]
    assert [few.capacity(n) for n in (1, 256, 257)] == [256, 256, 512]
    assert Ladder().width(9) == 9


class Waits(TorchFunctionMode):
    """Counts what makes the host wait for a device; a tensor that was copied to the host is waited for once."""

    ASKING = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu")

    def __init__(self) -> None:
        super().__init__()
        self.count, self._here = 0, list[Tensor]()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, made = getattr(func, "__name__", ""), func(*args, **(kwargs or {}))
        if name in self.ASKING and not any(args[0] is t for t in self._here):
            self.count += 1
        if name == "cpu":
            self._here.append(made)
        return made


def test_a_step_of_edd_is_few_launches() -> None:
    """One pass for each layer of the tree and one of the target; the host waits once for each.

    Not counted: the encoding of what was accepted, which is not recorded, and what fills the inputs of a pass.
    """
    recorder = Recorder()
    target = tiny_target(context=64, capture=Graphs(recorder))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        drafter = part("drafter", "edd")().example(target)
    rows, policy, rule = Rows(target.new_cache(1, 64)), part("policy", "vct")(width=2, depth=2), part("acceptor", "greedy")()
    parts = Parts(target, drafter, policy, rule, COSTS)
    requests = under([Request([7, 18, 29, 40, 51], 40)], None)
    _, state = admit(parts, rows, requests, State())
    for _ in range(4):
        _, state = step(parts, rows, state)
        before, layers = recorder.launched, 2
        with Waits() as waits:
            _, state = step(parts, rows, state)
        assert recorder.launched - before <= 1 + layers
        assert waits.count <= 1 + layers


def test_a_recorded_pass_reads_what_is_given_now() -> None:
    """The second pass of a kind repeats the first one's work, with its own tokens, positions, mask and slots."""
    recorder = Recorder()
    captured, plain = tiny_target(capture=Graphs(recorder)).decoder, tiny_target().decoder
    caches = captured.new_cache(1, 8), plain.new_cache(1, 8)
    for ids in ([3, 4, 5], [9, 8, 7], [1, 2, 6]):
        seen = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
        outs = []
        for decoder, cache in zip((captured, plain), caches, strict=True):
            places = cache.lengths[0] + np.array([0, 1, 1])
            feed = Feed.packed([np.array(ids)], [places], cache.lengths.copy(), [seen], [places], decoder.device)
            with torch.inference_mode():
                outs.append(decoder.forward(cache, feed))
            cache.keep(0, cache.lengths[0] + np.array([0, 2]))
        assert torch.allclose(*outs, atol=1e-9)
    assert (recorder.recorded, recorder.launched) == (1, 3)
