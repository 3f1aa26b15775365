"""On a GPU: noise and choices with the host's bits, texts of plain decoding, recorded passes, and how often the host waits.

Skipped where torch finds no CUDA device. `make gpu` runs these first.
"""

import logging
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_device_sampling import SETTINGS, forest, of_tree, settings
from test_graph_capture import a_pass, attends_otherwise, replaced, wrapped, written_to

import draftree
from draftree.acceptors.match import Match
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.kernels.log_exp import exp, log
from draftree.kernels.philox import WORD, gumbel, gumbel_on_device
from draftree.loop import Components, State, admit, step
from draftree.models.graph_capture import EagerCapture, Graphs
from draftree.registry import part
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing, draw_candidates
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.params import Sampling
from draftree.testing import Case, Suite
from draftree.testing.fakes import tiny_target
from draftree.tree import Draw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

GPU, CPU = torch.device("cuda"), torch.device("cpu")
DRAFTERS = ("edd", "eagle", "eagle3", "mtp", "medusa", "hydra", "glide", "vdm", "suffix")
ON_DEVICE = ("edd", "eagle", "eagle3", "mtp", "medusa", "hydra")
"""Those whose trees grow there."""
POLICIES = (
    "chain:length=4",
    "eagle2:nodes=20,depth=4,width=4",
    "beam:width=3,depth=4",
    "static",
    "pct",
    "yield",
)
SAMPLINGS = (Sampling(), Sampling(1.0, seed=5), Sampling(0.8, top_p=0.9, top_k=40, seed=6))
CHEAP = Costs({1: 0.01}, {1: 1.0, 64: 1.1})
"""By which drafting pays."""
PROMPTS = ([7, 300, 12, 45, 45, 8], [900, 3], [5, 6, 7, 5, 6, 7, 5])


def test_noise_has_the_hosts_bits() -> None:
    draw = np.random.default_rng(0)
    places = draw.integers(0, 2**32, (6, 5))
    places[0], places[1] = 0, WORD
    for count in (1, 64, 49_152, 128_256):
        there = gumbel_on_device(torch.from_numpy(places).to(GPU), count).cpu().numpy()
        for place, found in zip(places, there, strict=True):
            assert found.tobytes() == gumbel(place.astype(np.uint32), count).tobytes()


def test_elementary_functions_have_the_hosts_bits() -> None:
    x = np.concatenate(
        [np.random.default_rng(1).uniform(1e-9, 700, 1_000_000), 2.0 ** np.arange(-500, 500)]
    )
    assert log(torch.from_numpy(x).to(GPU)).cpu().numpy().tobytes() == log(x).tobytes()
    x = np.random.default_rng(2).uniform(-700, 700, 1_000_000)
    assert exp(torch.from_numpy(x).to(GPU)).cpu().numpy().tobytes() == exp(x).tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 6])
def test_the_device_accepts_what_the_host_accepts(rows: int, dtype: torch.dtype) -> None:
    """With equal logits, −∞ and ties among them, and rows where processors leave nothing."""
    lengths = set[int]()
    for seed in range(12):
        draw = np.random.default_rng(seed)
        tree = forest(draw, rows, 31)
        made = draw.normal(0, 3, (len(tree), 31)).round(int(draw.integers(0, 4)))
        made[draw.random(made.shape) < 0.2] = -np.inf
        made[np.arange(len(tree)), draw.integers(0, 31, len(tree))] = 1.0
        keyed = Keyed(
            [settings(row).seed for row in range(rows)], np.arange(rows), draw.integers(0, 99, rows)
        )
        found = []
        for device in (CPU, GPU):
            logits = torch.from_numpy(made).to(dtype).to(device)
            verdict = Match().accept(tree, of_tree(tree, logits, keyed, device is GPU), keyed)
            found.append(([path.tolist() for path in verdict.paths], verdict.bonus.tolist()))
        assert found[0] == found[1], seed
        lengths |= set(map(len, found[0][0]))
    assert max(lengths) > 0


@pytest.mark.parametrize(
    "kind", [Draw.COUPLED, Draw.WITH_REPLACEMENT, Draw.WITHOUT_REPLACEMENT], ids=lambda k: k.value
)
def test_the_device_drafts_what_the_host_drafts(kind: Draw) -> None:
    """The same tokens; log q to the rounding of a float64 softmax over 40 tokens."""
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 2, (6, 40)).round(1)).float()
    rows, depths = np.array([0, 1, 2, 3, 0, 2]), np.array([0, 0, 0, 0, 1, 2])
    found = []
    for device in (CPU, GPU):
        made = draw_candidates(
            logits.to(device),
            3,
            Drawing(kind, SETTINGS, Keyed(4, np.arange(5), np.arange(5) + 7)),
            rows,
            depths,
        )
        found.append((made.tokens.tolist(), made.log_q))
    assert found[0][0] == found[1][0]
    assert np.allclose(found[0][1], found[1][1], rtol=0, atol=1e-12)


@pytest.fixture(scope="module", params=["graphs", "eager"])
def demo(request: pytest.FixtureRequest) -> Any:
    """The demo's target on the GPU in float64, where no two tokens are as good as equal."""
    target = draftree.load(
        "demo", "suffix", dtype="float64", device="cuda", compile=request.param == "graphs"
    ).target
    assert isinstance(target.decoder.capture, Graphs if request.param == "graphs" else EagerCapture)
    return target


def asked() -> list[list[Request]]:
    """Batches of three and of one, greedy and sampled."""
    every = [
        [Request(list(ids), 16, number=i, sampling=s) for i, ids in enumerate(PROMPTS)]
        for s in SAMPLINGS
    ]
    return [*every, every[0][:1], every[1][:1]]


WRITTEN: dict[Any, list[list[int]]] = {}


def plain(target: Any, requests: list[Request]) -> list[list[int]]:
    """What plain decoding writes, once for each target and batch."""
    key = (id(target), len(requests), requests[0].sampling)
    if key not in WRITTEN:
        WRITTEN[key] = draftree.load(target, "suffix").plain(requests).tokens
    return WRITTEN[key]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_are_plain_ones(
    demo: Any, drafter: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Trained drafters, alone and three at once, greedy and sampled."""
    if isinstance(demo.decoder.capture, EagerCapture) and policy not in ("yield", POLICIES[1]):
        pytest.skip("eager passes are slow, and differ in nothing that a policy sees")
    engine, accepted = draftree.load(demo, drafter, policy, costs=CHEAP), list[float]()
    with caplog.at_level(logging.WARNING, "draftree"):
        for requests in asked():
            found = engine.write(requests, reuse=False)
            assert found.tokens == plain(demo, requests), requests[0].sampling
            accepted.append(found.stats.acceptance_length)
    assert max(accepted) > (1.0 if drafter in ("suffix", "medusa") else 1.1), "drafts are accepted"
    assert not [r.message for r in caplog.records if "without CUDA graphs" in r.message]


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", ["eagle2:nodes=20,depth=4,width=4", "chain:length=4", "yield"])
@pytest.mark.parametrize("drafter", ON_DEVICE)
def test_a_step_waits_once(demo: Any, drafter: str, policy: str, sampling: Sampling) -> None:
    """By torch's own count of synchronising calls, after a few steps that record what is to be recorded."""
    if not isinstance(demo.decoder.capture, Graphs):
        pytest.skip("of recorded passes")
    engine = draftree.load(demo, drafter, policy, costs=CHEAP)
    rule = part("acceptor", "greedy" if sampling.greedy else "match")()
    parts, rows = (
        Components(demo, engine.drafter, engine.policy, rule, engine.step_costs),
        SequenceBatch(demo.new_cache(1, 256)),
    )
    _, state = admit(parts, rows, [Request(list(PROMPTS[0]), 120, sampling=sampling)], State())
    for _ in range(12):
        _, state = step(parts, rows, state)
    waits = list[int]()
    for _ in range(6):
        with Synchronisations() as seen:
            _, state = step(parts, rows, state)
        waits.append(len(seen))
    assert np.median(waits) <= 1, f"{waits}: {seen.where}"


class Synchronisations:
    """Records where torch makes the host wait for the GPU."""

    def __init__(self) -> None:
        self.where = list[str]()

    def __len__(self) -> int:
        return len(self.where)

    def __enter__(self) -> "Synchronisations":
        def shown(message: Any, *_: Any, **__: Any) -> None:
            if "synchroniz" in str(message):
                frames = [
                    f
                    for f in traceback.extract_stack()
                    if "draftree" in f.filename and "test_" not in f.filename
                ]
                self.where.append(
                    f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
                    if frames
                    else "?"
                )

        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = shown
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(*error)


@pytest.mark.parametrize("change", [replaced, written_to, wrapped, attends_otherwise])
def test_a_recording_of_another_network_is_not_replayed(change: Any) -> None:
    """Also where the caching allocator gives the memory of a weight out again."""
    decoder = tiny_target(capture=Graphs(), device=GPU).decoder
    cache = decoder.new_cache(1, 8)
    first = a_pass(decoder, cache)
    assert torch.equal(first, a_pass(decoder, cache))
    change(decoder)
    ours = a_pass(decoder, cache)
    decoder.use_capture(EagerCapture())
    assert torch.allclose(ours, a_pass(decoder, cache), atol=1e-9)
    assert not torch.allclose(ours, first, atol=1e-9) or change is attends_otherwise


def test_a_recording_reads_what_is_given_now() -> None:
    recorded, plain = (
        tiny_target(capture=way, device=GPU).decoder for way in (Graphs(), EagerCapture())
    )
    caches = recorded.new_cache(1, 8), plain.new_cache(1, 8)
    for first in (3, 9, 1, 30):
        ours, theirs = (a_pass(d, c, first) for d, c in zip((recorded, plain), caches, strict=True))
        assert torch.allclose(ours, theirs, atol=1e-9)
        with torch.inference_mode():
            for cache in caches:
                cache.keep(0, cache.lengths[0] + np.array([0, 2]))


def cases() -> Sequence[Case]:
    """A few of the conformance suite; `python -m draftree.testing --device cuda` runs all."""
    pairs = [
        ("ragged", "edd", "eagle2", "match"),
        ("joining", "eagle3", "yield", "greedy"),
        ("eos", "glide", "pct", "greedy"),
    ]
    pairs += [("processed", "dflash", "ddtree", "match"), ("scheduled", "mtp", "chain", "greedy")]
    return [Case(*each) for each in pairs]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_conformance(case: Case) -> None:
    Suite(tiny_target(device=GPU)).run(case)
