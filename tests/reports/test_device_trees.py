"""Passes that are recorded once and repeated, as CUDA graphs are: on a CPU, with a recorder in the graphs' place."""

from typing import Any

import numpy as np
import pytest
import torch

from draftree.engine import Engine, generate_plain
from draftree.models.forward_batch import ForwardBatch
from draftree.models.graph_capture import Graphs
from draftree.models.shape_buckets import SLOTS, ShapeBuckets
from draftree.policies.base import Policy
from draftree.policies.chain import Chain
from draftree.registry import build
from draftree.request import Request
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from draftree.testing.fakes import Always, PassRecorder, tiny_target
from reports import report

KIND = "CUDA graphs and device trees"


def captured(context: int = 96) -> tuple[Target, PassRecorder]:
    """Return a target whose passes are recorded, and what records them."""
    recorder = PassRecorder()
    return tiny_target(context=context, capture=Graphs(recorder)), recorder


def engine(target: Target, name: str, policy: str | Policy) -> Engine:
    """Return an engine with a drafter of random weights."""
    torch.manual_seed(3)
    made = build("drafter", name).example(target)
    return Engine(
        target, made, build("policy", policy) if isinstance(policy, str) else policy, costs=COSTS
    )


def requests(count: int, length: int = 5) -> list[Request]:
    """Return requests of different lengths."""
    return [Request([(7 * i + j) % 61 for j in range(length + i)], 7 + i) for i in range(count)]


@report(
    "sgl-project/sglang#10892",
    KIND,
    "Positions of an earlier, larger batch stayed in the buffers of a smaller one.",
)
@report(
    "sgl-project/sglang#18984",
    KIND,
    "Slots that pad a batch held tokens of an earlier one, out of the vocabulary's range.",
)
@pytest.mark.parametrize("name", ["edd", "eagle", "glide", "lm"])
def test_batches_that_shrink_and_grow_read_their_own_inputs(name: str) -> None:
    target, recorder = captured()
    eager = tiny_target(context=96)
    made = engine(target, name, "eagle2:nodes=7,depth=3,width=2")
    for count in (3, 1, 2):
        asked = requests(count, 3 + count)
        before = recorder.launched
        assert made.write(asked).tokens == [generate_plain(eager, [r]).tokens[0] for r in asked]
        assert recorder.launched > before


@report(
    "sgl-project/sglang#27338",
    KIND,
    "A buffer for drafts with several branches had the size of one branch.",
)
@pytest.mark.parametrize(
    "policy",
    ["vct:width=4,depth=3", "beam:preset=fast,width=8,depth=4", "eagle2:nodes=40,depth=5,width=8"],
)
def test_wide_trees_fit_their_buffers(policy: str) -> None:
    target, recorder = captured()
    asked = requests(2)
    found = engine(target, "edd", policy).write(asked)
    assert found.tokens == [generate_plain(tiny_target(context=96), [r]).tokens[0] for r in asked]
    assert max(s.nodes for s in found.stats.steps) > 16
    assert recorder.launched > recorder.recorded


@report(
    "sgl-project/sglang#23037",
    KIND,
    "Results of a graph were kept as views, and the next replay wrote over them.",
)
def test_results_of_a_pass_outlive_the_next_one() -> None:
    target, _ = captured()
    decoder = target.decoder
    cache = decoder.new_cache(1, 16)
    outs = []
    copies = []
    for ids in ([3, 4, 5], [9, 8, 7], [1, 2, 6]):
        places = cache.lengths[0] + np.arange(3)
        feed = ForwardBatch.from_sequences(
            [np.array(ids)],
            [places],
            cache.lengths.copy(),
            [np.tril(np.ones((3, 3), np.bool_))],
            [places],
            decoder.device,
        )
        with torch.inference_mode():
            outs.append(decoder.forward(feed, cache).logits)
            copies.append(outs[-1].clone())
        cache.keep(0, places)
    assert all(torch.equal(a, b) for a, b in zip(outs, copies, strict=True))
    assert not torch.equal(outs[0], outs[1])


@report(
    "vllm-project/vllm#32591",
    KIND,
    "One token more than was scheduled reached a graph, which was not recorded for so many.",
)
@report(
    "vllm-project/vllm-ascend#7148",
    KIND,
    "A full step failed where drafts plus one was no recorded size.",
)
@report("vllm-project/vllm#30330", KIND, "Not all sizes that drafts lead to were recorded.")
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 15, 16])
def test_every_number_of_drafts_has_a_size(length: int) -> None:
    target, recorder = captured()
    eager = tiny_target(context=96)
    asked = requests(2)
    texts = [[*r.prompt, *generate_plain(eager, [r]).tokens[0]] for r in asked]
    found = Engine(target, Always(texts, 61), Chain(length), costs=COSTS).write(asked)
    assert [[*r.prompt, *t] for r, t in zip(asked, found.tokens, strict=True)] == texts
    widths = {1 << n.bit_length() for n in range(length + 1)}
    assert recorder.recorded <= 2 * len(widths) + 2, "sizes are powers of two"
    ladder = ShapeBuckets(few=True)
    assert all(n <= ladder.width(n) < 2 * n for n in range(1, 200))


@report(
    "NVIDIA/TensorRT-LLM#18242",
    KIND,
    "The dummy request for a recording was one token larger than the cache, and graphs were skipped.",
)
def test_a_cache_that_grows_is_recorded_anew() -> None:
    target, recorder = captured(context=3 * SLOTS)
    length = SLOTS - 6
    request = Request([i % 60 for i in range(length)], 24)
    found = engine(target, "lm", "chain:length=3").write([request])
    eager = tiny_target(context=3 * SLOTS)
    assert found.tokens == generate_plain(eager, [request]).tokens
    assert length + 24 > SLOTS, "the text outgrows the first capacity"
    assert recorder.launched > 10


@report(
    "lightseekorg/tokenspeed#298",
    KIND,
    "A sequence without accepted drafts gave an index of -1 while a graph was recorded.",
)
@report(
    "vllm-project/vllm#43114",
    KIND,
    "Drafts of unequal lengths left the recorded sizes, and passes were run without a graph.",
)
def test_sequences_without_drafts_stand_in_a_recorded_pass() -> None:
    target, recorder = captured()
    eager = tiny_target(context=96)
    asked = requests(3)
    texts: list[Any] = [[*r.prompt, *generate_plain(eager, [r]).tokens[0]] for r in asked]
    texts[1] = []
    made = Engine(target, Always(texts, 61), Chain(4), costs=COSTS)
    found = made.write(asked)
    assert found.tokens == [generate_plain(eager, [r]).tokens[0] for r in asked]
    assert {0, 4} <= {s.accepted for s in found.stats.steps}
    passes = recorder.launched
    assert passes >= len(found.stats.work)
