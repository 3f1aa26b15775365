"""Trees that grow on the device have the host's bits in float32, where both run passes of the same shapes.

The host's form pads its passes as recorded ones are padded: sums of other shapes may be rounded
otherwise.
"""

import warnings
from typing import Any

import pytest
import torch

from draftree.batch import SequenceBatch
from draftree.drafters.base import Drafter
from draftree.drafters.lm import LMDrafter
from draftree.errors import DraftreeWarning
from draftree.loop import Components, decode
from draftree.models.causal_lm import CausalLM
from draftree.models.graph_capture import Graphs
from draftree.models.shape_buckets import ShapeBuckets
from draftree.registry import build
from draftree.request import Emitted, Request
from draftree.sampling import devices
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from draftree.testing.fakes import PassRecorder, tiny_target
from selection import one_in

WIDTH = 64
"""Tokens of each sequence in all passes."""
COLUMNS = ("tokens", "parents", "depth", "row", "number", "log_q", "score", "entropy")


def single() -> Target:
    """A target in float32 with ties: of each two tokens, the rows of the LM head are the same."""
    model: Any = tiny_target(context=96).decoder.model.float()
    head = model.get_output_embeddings().weight.data
    head[1::2] = head[: len(head) // 2 * 2 : 2]
    return Target(CausalLM(model, capture=Graphs(PassRecorder())), "tiny")


def drafter(name: str, target: Target, broken: bool) -> Drafter[Any]:
    """An example, or the target with weights a little off; a broken one reads NaN and ∞ for some tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if name != "lm":
            made: Drafter[Any] = build("drafter", name).example(target)
            return made
        model: Any = single().decoder.model
        for weight in model.parameters():
            weight.data += 0.01 * torch.randn_like(weight)
    head = model.get_output_embeddings().weight.data
    head[1::2] = head[: len(head) // 2 * 2 : 2]
    if broken:
        embedding = model.get_input_embeddings().weight.data
        embedding[52:57], embedding[2:6] = torch.nan, torch.inf
    return LMDrafter(Target(CausalLM(model, capture=Graphs(PassRecorder())), "off"))


def written(
    name: str, policy: str, sampling: Sampling, count: int, broken: bool
) -> tuple[list[list[int]], list[Emitted], bool]:
    """The texts of some requests, each step's part of them, and whether drafts were not finite."""
    target = single()
    rows = SequenceBatch(target.new_cache(count, 96))
    rule = build("acceptor", "greedy" if sampling.greedy else "match")
    parts = Components(target, drafter(name, target, broken), build("policy", policy), rule, COSTS)
    requests = [
        Request([7, 18, 29, 40, 51][: 5 - i], 16, number=i, sampling=sampling) for i in range(count)
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DraftreeWarning)
        events = [event for events, _ in decode(parts, rows, requests) for event in events]
    return rows.written, events, any("not finite" in str(each.message) for each in caught)


EAGLE2 = "eagle2:nodes=12,depth=4,width=4"
CASES = [
    *((name, EAGLE2, False) for name in ("eagle", "eagle3", "mtp", "edd", "medusa:heads=4", "hydra:heads=4")),
    *(("lm", policy, broken) for broken in (False, True) for policy in (
        EAGLE2, "chain:length=3", "vct:width=2,depth=3", "beam:width=4,depth=3",
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "sampling", "count"),
    one_in(3, CASES, [Sampling(), Sampling(1.0, top_p=0.95)], [1, 3]),
    ids=str,
)
def test_trees_have_the_hosts_bits(
    case: tuple[str, str, bool],
    sampling: Sampling,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ties, NaN and ∞ included; and the same nodes are accepted."""
    name, policy, broken = case
    width = ShapeBuckets.width
    monkeypatch.setattr(ShapeBuckets, "width", lambda self, n: width(self, max(n, WIDTH)))
    monkeypatch.setattr(devices, "on_host", lambda device: False)
    texts, events, odd = written(name, policy, sampling, count, broken)
    monkeypatch.setattr(SequenceBatch, "captured_token_choice", lambda *args: None)
    host_texts, host_events, host_odd = written(name, policy, sampling, count, broken)
    assert texts == host_texts
    assert odd == host_odd
    assert odd == broken or not sampling.greedy
    ties = 0
    for mine, its in zip(events, host_events, strict=True):
        assert mine.path.tolist() == its.path.tolist()
        pair = mine.tree, its.tree
        wholes = (each.whole or each for each in pair)
        for ours, theirs in (pair, wholes):
            ties += len(ours) - len(set(ours.log_q.tolist()))
            for column in COLUMNS:
                assert getattr(ours, column).tobytes() == getattr(theirs, column).tobytes(), column
    assert ties or broken or not sampling.greedy or policy.startswith("chain")
    assert any(event.tree.drafted for event in events)
