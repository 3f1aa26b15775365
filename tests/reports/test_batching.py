"""Batches: sequences of all kinds beside one another, that come, end and go at different steps."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from architectures import model
from draftree import speculate
from draftree.batch import SequenceBatch
from draftree.drafters._from_objects import LoadedModel
from draftree.drafters.retrieval.text_drafter import Texts
from draftree.engine import Engine, generate_plain, load
from draftree.errors import DraftreeWarning
from draftree.loop import Components, State, admit, release, step
from draftree.models.causal_lm import CausalLM
from draftree.policies.chain import Chain
from draftree.policies.eagle2 import EAGLE2
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from draftree.testing.fakes import Scripted, tiny_target
from draftree.tree import Ints
from generating import EOS, PAD, TEXTS, padded
from hybrids import OneByOne, hybrid
from reports import report

KIND = "Batching and scheduling"


def prompts(count: int) -> list[list[int]]:
    """Return prompts of many lengths; every second repeats itself, so that retrieval drafts much for it."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(3, 61, 3 + 2 * i % 11).tolist() for i in range(count)]
    return [t if i % 2 else (t * 4)[:14] for i, t in enumerate(texts)]


def write(
    target: Target, drafter: str, requests: list[Request], policy: str = "chain:length=5"
) -> Any:
    """Return the texts and figures of a batch, by a new engine."""
    return load(target, drafter, policy, costs=COSTS).write(requests)


@report(
    "NVIDIA/TensorRT-LLM#3456",
    KIND,
    "Sequences that left a batch out of order spoiled the texts of the others.",
)
@pytest.mark.parametrize("drafter", ["pld", "suffix", "lookahead", "token_recycling"])
def test_sequences_leave_in_any_order(drafter: str) -> None:
    target = tiny_target(context=64)
    base = generate_plain(target, [Request([7, 5, 9, 7, 5], 20)]).tokens[0]
    requests = [
        Request([7, 5, 9, 7, 5], 3),
        Request([7, 5, 9, 7, 5], 20, frozenset({base[7]})),
        Request([i % 60 for i in range(60)], 20),
        Request([3, 4, 3, 4], 15),
        Request([9], 9, criteria=(lambda ids, _: ids.shape[1] == 5,)),
    ]
    alone = [generate_plain(target, [r]).tokens[0] for r in requests]
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 29):
        assert write(target, drafter, [requests[i] for i in order]).tokens == [
            alone[i] for i in order
        ]


@report(
    "vllm-project/vllm#14645",
    KIND,
    "Draft lengths were read in another order than the batch's, and tokens leaked into other answers.",
)
@report(
    "huggingface/text-generation-inference#1411",
    KIND,
    "In larger batches a token of another text appeared now and then.",
)
def test_tokens_of_unequal_drafts_stay_with_their_sequence() -> None:
    target = tiny_target(context=64)
    requests = [Request(p, 16, number=i) for i, p in enumerate(prompts(12))]
    alone = [generate_plain(target, [r]).tokens[0] for r in requests]
    for drafter in ("pld", "suffix"):
        found = write(target, drafter, requests, "chain:length=5")
        assert found.tokens == alone
        assert {s.nodes for s in found.stats.steps} >= {0, 1, 5}, "full drafts stand beside none"


class Halved(Scripted):
    """Is right in even rows, and never in odd ones."""

    def place(self, row: int, position: int) -> int | None:
        return None if row % 2 else 0


@report(
    "HabanaAI/vllm-fork#823",
    KIND,
    "Sequences with and without drafts were put together in the wrong order.",
)
@report(
    "ggml-org/llama.cpp#10513", KIND, "Slots that decoded in parallel spoiled one another's drafts."
)
def test_sequences_with_and_without_accepted_drafts_do_not_mix() -> None:
    target = tiny_target(context=64)
    requests = [Request(p, 14) for p in prompts(5)]
    alone = [generate_plain(target, [r]).tokens[0] for r in requests]
    texts = [[*r.prompt, *t] for r, t in zip(requests, alone, strict=True)]
    found = Engine(target, Halved(texts, 61), Chain(4), costs=COSTS).write(requests)
    assert found.tokens == alone
    accepted = {s.accepted for s in found.stats.steps}
    assert {0, 4} <= accepted


@report(
    "sgl-project/sglang#18984",
    KIND,
    "Lengths of accepted drafts were not filtered with the batch, and no longer fitted it.",
)
@report(
    "sgl-project/sglang#10090",
    KIND,
    "Merging a new request into a running batch failed on states of other sizes.",
)
@pytest.mark.parametrize("name", ["eagle", "edd", "medusa", "lm", "pld"])
def test_requests_join_and_leave_a_running_batch(name: str) -> None:
    target = tiny_target(context=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = build("drafter", name).example(target)
    rows = SequenceBatch(target.new_cache(3, 64))
    rule = build("acceptor", "greedy")
    state = State()
    parts = Components(target, drafter, EAGLE2(nodes=6, depth=3, width=2), rule, COSTS)
    requests = [Request(p, 4 + 3 * i) for i, p in enumerate(prompts(6))]
    waiting = list(enumerate(requests))
    owners = dict[int, int]()
    done = dict[int, list[int]]()
    turn = 0
    while waiting or owners:
        if waiting and len(rows.free) and turn % 2 == 0:
            number, request = waiting.pop(0)
            events, state = admit(parts, rows, [request], state)
            owners[events[0].row] = number
        if rows.live.size:
            _, state = step(parts, rows, state)
        for row in [r for r in owners if r not in rows.live]:
            done[owners.pop(row)] = list(rows.written[row])
            state = release(parts, rows, row, state)
        turn += 1
    assert done == {i: generate_plain(target, [r]).tokens[0] for i, r in enumerate(requests)}


@report(
    "vllm-project/vllm#28558",
    KIND,
    "A request that was pushed out of the batch kept the drafts that were scheduled for it.",
)
@report(
    "sgl-project/sglang#2711",
    KIND,
    "A request that was taken back for lack of memory failed with drafts.",
)
@pytest.mark.parametrize("name", ["eagle", "edd", "pld", "suffix"])
def test_a_request_that_was_pushed_out_goes_on_as_before(name: str) -> None:
    """It is released in mid-text, others run in its place, and it is admitted again with what was written as its prompt."""
    target = tiny_target(context=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = build("drafter", name).example(target)
    rows, rule = SequenceBatch(target.new_cache(2, 64)), build("acceptor", "greedy")
    parts = Components(target, drafter, Chain(3), rule, COSTS)
    first, other = Request([7, 5, 9, 7, 5, 9, 7], 20), Request([3, 4, 3, 4, 3], 12)
    _, state = admit(parts, rows, [first, other], State())
    for _ in range(2):
        _, state = step(parts, rows, state)
    written = list(rows.written[0])
    state = release(parts, rows, 0, state)
    _, state = admit(parts, rows, [Request([8, 8, 9], 2)], state)
    while 0 in rows.live:
        _, state = step(parts, rows, state)
    state = release(parts, rows, 0, state)
    _, state = admit(parts, rows, [Request([*first.prompt, *written], 20 - len(written))], state)
    while rows.live.size:
        _, state = step(parts, rows, state)
    assert [*written, *rows.written[0]] == generate_plain(target, [first]).tokens[0]
    assert rows.written[1] == generate_plain(target, [other]).tokens[0]


@report(
    "ggml-org/llama.cpp#23269",
    KIND,
    "Recurrent states of several sequences were rolled back wrongly when they decoded in parallel.",
)
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_recurrent_states_of_a_batch_are_rolled_back_apart(family: str) -> None:
    target = Target(CausalLM(hybrid(family)), family)
    texts = [[5, 9, 7, 11, 5, 9, 7, 11, 5], [3, 3, 8], [40, 41, 42, 40, 41, 42, 40]]
    wanted = [OneByOne(target.decoder.model, p).write(8) for p in texts]
    engine = Engine(
        target,
        Halved([[*p, *w] for p, w in zip(texts, wanted, strict=True)], target.decoder.vocab),
        Chain(3),
    )
    assert engine.write([Request(p, 8) for p in texts]).tokens == wanted


@report(
    "huggingface/transformers#29769",
    KIND,
    "Assisted decoding refused batches of more than one prompt.",
)
@report(
    "huggingface/transformers#32165",
    KIND,
    "Sequences of a batch would have been rolled back to the first rejection in any of them.",
)
@report(
    "huggingface/transformers#26892",
    KIND,
    "The assistant was not given the attention mask, and read the padding of shorter prompts.",
)
@pytest.mark.parametrize("drafter", ["pld", "model"])
def test_padded_batches_are_drafted_for_by_the_hook(drafter: str) -> None:
    served = model("llama")
    hook = speculate(
        LoadedModel(served) if drafter == "model" else drafter, "chain:length=4", costs=COSTS
    )
    given: dict[str, Any] = {
        **padded(TEXTS),
        "max_new_tokens": 14,
        "do_sample": False,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
    }
    assert torch.equal(served.generate(custom_generate=hook, **given), served.generate(**given))


class Wrong(Scripted):
    """Proposes ids that do not exist."""

    bad = -1

    def place(self, row: int, position: int) -> int | None:
        return None

    def expand(self, state: Texts, tree: Any, frontier: Ints, k: int, drawing: Any) -> Any:
        candidates, state = super().expand(state, tree, frontier, k, drawing)
        candidates.tokens[:] = self.bad
        return candidates, state


@report(
    "vllm-project/vllm#46574",
    KIND,
    "Drafts with the id -1 reached the batch, and its shapes and ids were wrong.",
)
@pytest.mark.parametrize("bad", [-1, 61, 10**6])
def test_drafts_that_do_not_exist_are_named(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(context=64)
    monkeypatch.setattr(Wrong, "bad", bad)
    request = Request([7, 5, 9], 10)
    with pytest.warns(
        DraftreeWarning, match=rf"drafted token id {bad}, allowed are 0 … 60 \(Wrong\)$"
    ):
        found = Engine(target, Wrong([[]], 61), Chain(3), costs=COSTS).write([request])
    assert found.tokens == generate_plain(target, [request]).tokens


@report("vllm-project/vllm#26027", KIND, "Tokens of a step were lost on their way to the stream.")
def test_every_token_of_a_step_reaches_the_listener() -> None:
    target = tiny_target(context=64)
    requests = [
        Request(p, 15, sampling=Sampling(float(i % 2), seed=i)) for i, p in enumerate(prompts(4))
    ]
    streamed: list[list[int]] = [[] for _ in requests]

    def listen(events: list[Any]) -> None:
        for event in events:
            assert len(event.tokens) == len(event.origins) > 0
            streamed[event.row] += event.tokens

    found = load(target, "suffix", "chain:length=5", costs=COSTS).write(requests, on_tokens=listen)
    assert streamed == found.tokens == [generate_plain(target, [r]).tokens[0] for r in requests]
