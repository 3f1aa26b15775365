"""Passes of few sizes, recorded once and repeated: the same texts, few launches, few waits."""

import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import draftree.engine
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.drafters.lm import LM, language_model
from draftree.drafters.mtp import MTPLayer
from draftree.engine import Engine
from draftree.loop import Components, State, admit, decode, step
from draftree.models.causal_lm import CausalLM
from draftree.models.forward_batch import ForwardBatch
from draftree.models.graph_capture import EagerCapture, Graphs, OutputTensors, _CUDAGraphs
from draftree.models.graph_runner import GraphRunner
from draftree.models.kv_cache import SlotCache
from draftree.models.rope_cache import RopeCache
from draftree.models.shape_buckets import ShapeBuckets
from draftree.registry import build, part
from draftree.request import Request
from draftree.sampling import devices as places
from draftree.sampling.params import Sampling
from draftree.target import target as target_module
from draftree.target.kernel_choice import select_capture
from draftree.target.target import Target
from draftree.testing import Case, Suite
from draftree.testing.conformance import COSTS, cases
from draftree.testing.fakes import PassRecorder, tiny_target
from draftree.utils.hardware import to_device
from folders import target_folder
from selection import one_in

NEURAL = ("edd", "glide", "lm", "vdm", "eagle", "eagle3", "medusa", "hydra", "mtp", "always")
EXACT = ("greedy", "match")
ENOUGH = 6
"""Trees of several layers, all of which a fault that waits for each layer would show."""


@pytest.fixture(scope="module")
def recorder() -> PassRecorder:
    return PassRecorder()


@pytest.fixture(scope="module")
def suite(recorder: PassRecorder) -> Suite:
    """The conformance suite with recorded passes; `python -m draftree.testing --captured` runs it whole, by hand."""
    return Suite(tiny_target(capture=Graphs(recorder)))


def some() -> list[Case]:
    """A case of each check for drafters that have passes of their own; of those that draft on the device, more of some."""
    mine = [
        c
        for c in cases()
        if c.drafter in NEURAL and c.policy in ("eagle2", "yield") and c.acceptor in EXACT
    ]
    found = {(c.check, c.drafter): c for c in mine}
    places = itertools.product(
        ("eagle3", "medusa", "hydra", "mtp"),
        ("eagle2", "yield"),
        ("ragged", "context", "eos", "joining"),
    )
    more = [
        Case(check, drafter, policy, EXACT[i % 2])
        for i, (drafter, policy, check) in enumerate(places)
    ]
    return [*list(found.values())[::3], *more[::2], *more[1::4]]


@pytest.mark.parametrize("case", some(), ids=str)
def test_texts_are_plain_ones(suite: Suite, recorder: PassRecorder, case: Case) -> None:
    before = recorder.launched
    suite.run(case)
    assert recorder.launched > before or not suite.coverage.cases[case.check]


def test_sizes_are_few() -> None:
    few = ShapeBuckets(few=True)
    assert [few.width(n) for n in (1, 2, 3, 5, 8, 9, 64)] == [1, 2, 4, 8, 8, 16, 64]
    assert [few.capacity(n) for n in (1, 256, 257)] == [256, 256, 512]
    assert ShapeBuckets().width(9) == 9


class Waits(TorchFunctionMode):
    """Counts what makes the host wait for a device, as if everything lay on one but what comes from numpy or was copied back.

    A tensor that was copied to the host is waited for once; so is a copy to the device that is not
    asked to be asynchronous.

    Args:
        models: whose weights are moved to where they lie already, as transformers does with rotary
            frequencies.
    """

    ASKING = ("item", "tolist", "numpy", "cpu", "equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__",
              "__complex__", "__index__", "__array__", "__contains__", "__repr__", "__format__")  # fmt: skip
    SIZED = (
        "nonzero",
        "argwhere",
        "unique",
        "unique_consecutive",
        "masked_select",
        "bincount",
        "repeat_interleave",
    )
    """What makes tensors whose sizes depend on values."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self._weights = {id(t) for model in models for t in (*model.parameters(), *model.buffers())}
        self._here = dict[
            int, Tensor
        ]()  # by identity, which no other tensor gets while they are kept
        self.count, self._patch = 0, pytest.MonkeyPatch()

    def __enter__(self) -> Any:
        for name in ("from_numpy", "tensor", "as_tensor"):  # torch tells no mode of these
            self._patch.setattr(torch, name, self._noted(getattr(torch, name)))
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._patch.undo()

    def _noted(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(*args: Any, **how: Any) -> Tensor:
            made = make(*args, **how)
            if "device" in how:
                self.count += 1
            else:
                self._here[id(made)] = made
            return made

        return noted

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), [*args, *(kwargs or {}).values()]
        tensors = [
            t
            for each in given
            for t in (each if isinstance(each, tuple | list) else (each,))
            if isinstance(t, Tensor)
        ]
        here = bool(tensors) and all(self._is_here(t) for t in tensors)
        moved = name == "to" and any(isinstance(each, torch.device | str) for each in given)
        moved = moved and id(args[0]) not in self._weights
        sent = moved and here and not (kwargs or {}).get("non_blocking")
        if sent or (not here and (moved or name in self.ASKING or self._sized(name, args))):
            self.count += 1
        made = func(*args, **(kwargs or {}))
        if moved and here:  # to the device; on a CPU it is the very same tensor
            self._here.pop(id(made), None)
        elif isinstance(made, Tensor) and (here or moved or name == "cpu"):
            self._here[id(made)] = made
        return made

    def _is_here(self, tensor: Tensor) -> bool:
        return id(tensor) in self._here

    def _sized(self, name: str, args: Any) -> bool:
        """Whether the size of what is made, or what is written to, depends on values."""
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            masks = any(isinstance(each, Tensor) and each.dtype is torch.bool for each in index)
            asked = any(
                isinstance(each, Tensor) and not each.dim() for each in index
            )  # for a number
            return (
                masks or asked or any(isinstance(each, list | np.ndarray) for each in index)
            )  # which are copied there
        return name in self.SIZED or (name == "where" and len(args) == 1)


def test_waits_are_noticed() -> None:
    """What counts them sees every way to ask, each once."""
    x = torch.arange(4.0) - 1
    ways: list[Callable[[], Any]] = [
        lambda: x[0].item(), lambda: x.tolist(), lambda: x.cpu(), lambda: x.numpy(), lambda: x.to("cpu"),
        lambda: x.to(torch.device("cpu")), lambda: x.to(device="cpu"), lambda: bool(x[0]), lambda: int(x[0]),
        lambda: float(x[0]), lambda: [0, 1][x[1].long()], lambda: x.nonzero(), lambda: torch.nonzero(x), lambda: x[x > 0],
        lambda: x[None, x > 0], lambda: x.unique(), lambda: torch.unique(x), lambda: x.masked_select(x > 0),
        lambda: torch.where(x > 0), lambda: torch.equal(x, x), lambda: x.clone().__setitem__(x > 0, x[:2]),
        lambda: torch.from_numpy(np.ones(3)).to("cpu"), lambda: torch.tensor([1.0], device="cpu"), lambda: x[[1, 2]],
        lambda: x[np.array([1, 2])], lambda: np.asarray(x), lambda: f"{x[0]}", lambda: 1.0 in x,
        lambda: x.cpu().numpy().tolist(), lambda: x[x[1].long()], lambda: x[None, x[1].long()],
    ]  # fmt: skip
    for number, way in enumerate(ways):
        with Waits() as waits:
            way()
        assert waits.count == 1, number
    free: list[Callable[[], Any]] = [
        lambda: x.topk(2), lambda: torch.where(x > 0, x, 0), lambda: x[x.long().clamp(0)], lambda: x.masked_fill(x > 0, 1),
        lambda: to_device(np.ones(3), torch.device("cpu")), lambda: torch.from_numpy(np.ones(3)).numpy(), lambda: x.double(),
    ]  # fmt: skip
    for number, way in enumerate(free):
        with Waits() as waits:
            way()
        assert waits.count == 0, number
    with Waits() as waits:
        to_device(np.ones(3), torch.device("cpu")).tolist()
    assert waits.count == 1, "there and back"


@pytest.fixture
def rotates_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotations are computed, and not looked up by positions that the host reads."""
    monkeypatch.setattr(
        RopeCache, "__call__", lambda self, like, positions: self._module(like, positions)
    )


@pytest.mark.usefixtures("rotates_as_a_gpu")
@pytest.mark.parametrize(("growth", "rows", "sampling"), one_in(3, [
    *((drafter, "eagle2", 6) for drafter in ("edd", "eagle", "eagle3", "mtp", "medusa:heads=6", "hydra:heads=6")),
    *(("eagle3", policy, layers) for policy, layers in (
        ("chain:length=4", 4), ("beam:preset=fast,width=3,depth=4", 4), ("beam:width=3,depth=4", 4),
        ("vct:width=2,depth=2", 2), ("static", 5),
    )),
], [1, 3], [Sampling(), Sampling(1.0, top_p=0.95)]), ids=str)  # fmt: skip
def test_a_step_is_few_launches(
    growth: tuple[str, str, int],
    sampling: Sampling,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One pass for each layer of the tree and one of the target, recorded once; the host waits once.

    Not counted: what is not recorded, as the encoding of what was accepted, and what fills the
    inputs of a pass; the host waits for none of it.
    """
    drafter, policy, layers = growth
    monkeypatch.setattr(places, "on_host", lambda device: False)
    recorder = PassRecorder()
    target = tiny_target(context=96, capture=Graphs(recorder))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        drafts: Any = build("drafter", drafter).example(target)
    stacks = [
        layer._run[0]
        for layer in getattr(drafts.model, "layers", ())
        if isinstance(layer, MTPLayer)
    ]
    writing, rule = (
        SequenceBatch(target.new_cache(rows, 96)),
        part("acceptor", "greedy" if sampling.greedy else "match")(),
    )
    parts = Components(target, drafts, build("policy", policy), rule, COSTS)
    requests = [
        Request([7, 18, 29, 40, 51][: 5 - row], 60, sampling=sampling) for row in range(rows)
    ]
    _, state = admit(parts, writing, requests, State())
    for _ in range(4):
        _, state = step(parts, writing, state)
        before = recorder.launched
        with Waits(target.decoder.model, drafts.model, *stacks) as waits:
            _, state = step(parts, writing, state)
        assert len(writing.stats.work[-1].frontiers) == layers
        assert recorder.launched - before <= 1 + layers, (
            "the noise is computed with the first layer, for all of them"
        )
        assert waits.count == 1
    assert recorder.recorded <= 5 + layers, (
        "the first pass of a step comes in a few widths, the others are recorded once"
    )


@pytest.mark.usefixtures("rotates_as_a_gpu")
@pytest.mark.parametrize(
    ("policy", "sampling", "drafter", "rows"),
    one_in(
        4,
        ["yield", "pct:ratio=0.02"],
        [Sampling(), Sampling(0.3)],
        ["lm", "eagle3", "medusa:heads=6", "hydra:heads=6"],
        [1, 3],
    ),
    ids=str,
)
def test_a_step_of_a_tree_that_depends_on_values_waits_once(
    policy: str, sampling: Sampling, drafter: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "on_host", lambda device: False)
    recorder = PassRecorder()
    target = tiny_target(context=96, capture=Graphs(recorder))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        drafts: Any = build("drafter", drafter).example(target)
    if drafter == "lm":
        drafts = language_model(target, target)
    model = drafts.decoder.model if drafter == "lm" else drafts.model
    writing, grown = SequenceBatch(target.new_cache(rows, 768)), 0
    costs = Costs({1: 0.01}, {1: 1.0, 64: 1.1})
    rule = part("acceptor", "greedy" if sampling.greedy else "match")()
    parts = Components(target, drafts, build("policy", policy), rule, costs)
    requests = [
        Request([7, 18, 29, 40, 51][: 5 - row], 90, sampling=sampling) for row in range(rows)
    ]
    _, state = admit(parts, writing, requests, State())
    while len(writing.live) == rows and writing.context < 80 and grown < ENOUGH:
        before, recent = (
            recorder.launched,
            max((s.depth for s in writing.stats.steps[-2 * rows :]), default=2),
        )
        with Waits(target.decoder.model, model) as waits:
            _, state = step(parts, writing, state)
        depth, passes = writing.stats.steps[-1].depth, len(writing.stats.work[-1].frontiers)
        if passes:
            grown += depth > 1
            assert waits.count == 1
            assert recorder.launched - before <= 3 + recent
    assert grown > 2


def agreeing(target: Target) -> Any:
    """Make the logits of a target depend on the last token alone; return an `eagle3` that knows them nearly."""
    for layer in target.decoder.layers:
        part_of: Any = layer
        part_of.self_attn.o_proj.weight.data.zero_()
        part_of.mlp.down_proj.weight.data.zero_()
    target.decoder.model.get_output_embeddings().weight.data *= 1.3
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(3)
        table = target.decoder.model(torch.arange(61)[:, None]).logits[:, 0]
        table += 0.2 * torch.randn_like(table)
        drafts: Any = build("drafter", "eagle3").example(target)
    own = drafts.model.with_logits
    drafts.model.with_logits = lambda tokens, *given: (own(tokens, *given)[0], table[tokens])
    return drafts


@pytest.mark.usefixtures("rotates_as_a_gpu")
@pytest.mark.parametrize(
    ("policy", "temperature", "rows"), one_in(2, ["eagle2", "yield"], [0.0, 1.0], [1, 3])
)
def test_a_step_is_three_launches_and_one_for_each_layer(
    policy: str, temperature: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts that are accepted, so that trees grow at temperature 1, too."""
    monkeypatch.setattr(places, "on_host", lambda device: False)
    recorder = PassRecorder()
    target = tiny_target(context=96, capture=Graphs(recorder))
    drafts, writing = agreeing(target), SequenceBatch(target.new_cache(rows, 768))
    costs, rule = (
        Costs({1: 0.05}, {1: 1.0, 64: 1.3}),
        part("acceptor", "match" if temperature else "greedy")(),
    )
    parts = Components(target, drafts, build("policy", policy), rule, costs)
    requests = [
        Request([7, 18, 29, 40, 51][: 5 - row], 80, sampling=Sampling(temperature))
        for row in range(rows)
    ]
    _, state = admit(parts, writing, requests, State())
    depths, most = list[int](), 0
    while len(writing.live) == rows and writing.context < 70:
        before = recorder.launched
        with Waits(target.decoder.model, drafts.model) as waits:
            _, state = step(parts, writing, state)
        depths.append(max(s.depth for s in writing.stats.steps[-rows:]))
        if writing.stats.work[-1].frontiers:
            assert waits.count == 1
            of_late = depths[-1:] if policy == "eagle2" else depths[-3:]
            assert recorder.launched - before <= 3 + max(of_late), (
                "of this tree, or with yield of the last two"
            )
            most = max(most, recorder.launched - before)
    assert writing.stats.acceptance_length > 2.5
    assert max(depths) >= 4
    assert most >= 5


def test_a_recorded_pass_reads_what_is_given_now() -> None:
    """The second pass of a kind repeats the first one's work, with its own tokens, positions, mask and slots."""
    recorder = PassRecorder()
    captured, plain = tiny_target(capture=Graphs(recorder)).decoder, tiny_target().decoder
    caches = captured.new_cache(1, 8), plain.new_cache(1, 8)
    for ids in ([3, 4, 5], [9, 8, 7], [1, 2, 6]):
        seen = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
        outs = []
        for decoder, cache in zip((captured, plain), caches, strict=True):
            places = cache.lengths[0] + np.array([0, 1, 1])
            feed = ForwardBatch.from_sequences(
                [np.array(ids)], [places], cache.lengths.copy(), [seen], [places], decoder.device
            )
            with torch.inference_mode():
                outs.append(decoder.forward(feed, cache).logits)
            cache.keep(0, cache.lengths[0] + np.array([0, 2]))
        assert torch.allclose(*outs, atol=1e-9)
    assert (recorder.recorded, recorder.launched) == (1, 3)


def a_pass(decoder: CausalLM, cache: SlotCache, first: int = 3) -> Tensor:
    """Logits of three tokens of a tree."""
    places, seen = (
        cache.lengths[0] + np.array([0, 1, 1]),
        np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_),
    )
    ids = first + np.arange(3)
    feed = ForwardBatch.from_sequences(
        [ids], [places], cache.lengths.copy(), [seen], [places], decoder.device
    )
    with torch.inference_mode():
        return decoder.forward(feed, cache).logits


def test_a_recording_of_another_cache_is_not_replayed() -> None:
    """As where the memory of a cache that is gone is given out again: the same keys, other values."""
    recorder = PassRecorder()
    decoder = tiny_target(capture=Graphs(recorder)).decoder
    first, second = decoder.new_cache(1, 8), decoder.new_cache(1, 8)
    wanted = a_pass(decoder, first)
    second._groups = [(keys, values.clone().zero_()) for keys, (_, values) in zip(
        (pair[0] for pair in first._groups), second._groups, strict=True
    )]  # fmt: skip
    assert torch.equal(a_pass(decoder, second), wanted)
    assert recorder.recorded == 2
    assert second.layer(0)[1].abs().sum() > 0, "the pass has written to the other cache's values"


def replaced(decoder: CausalLM) -> None:
    layer: Any = decoder.layers[0]
    layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight + 0.5, requires_grad=False)


def written_to(decoder: CausalLM) -> None:
    layer: Any = decoder.layers[0]
    layer.mlp.up_proj.weight.data.add_(0.5)
    layer.mlp.up_proj.weight.add_(0.5)


def wrapped(decoder: CausalLM) -> None:
    layer: Any = decoder.layers[0]
    layer.mlp.up_proj = nn.Sequential(layer.mlp.up_proj, nn.ReLU())


def attends_otherwise(decoder: CausalLM) -> None:
    decoder.model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [replaced, written_to, wrapped, attends_otherwise])
def test_a_recording_of_another_network_is_not_replayed(change: Callable[[CausalLM], None]) -> None:
    recorder = PassRecorder()
    decoder = tiny_target(capture=Graphs(recorder)).decoder
    cache = decoder.new_cache(1, 8)
    a_pass(decoder, cache)
    a_pass(decoder, cache)
    assert recorder.recorded == 1
    change(decoder)
    ours = a_pass(decoder, cache)
    assert recorder.recorded == 2
    decoder.use_capture(EagerCapture())
    assert torch.allclose(ours, a_pass(decoder, cache), atol=1e-9)


def test_a_new_text_takes_the_memory_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its caches lie elsewhere, and what was recorded of the last ones is of no use."""
    target = tiny_target()
    engine = Engine(
        target, part("drafter", "eagle3")().example(target), build("policy", "eagle2"), costs=COSTS
    )
    request = Request([7, 18, 29], 6)
    engine.write([request])
    assert engine.held is not None
    last = weakref.ref(engine.held.cache)
    free = list[bool]()
    made = draftree.engine.cache_of

    def noted(*given: Any) -> SlotCache:
        free.append(last() is None)
        return made(*given)

    monkeypatch.setattr(draftree.engine, "cache_of", noted)
    engine.write([request], reuse=False)
    assert free == [True]


class OnGPU:
    """Tells that it lies on a GPU."""

    device = torch.device("cuda")


@pytest.mark.parametrize("there", [False, True])
def test_attention_of_an_unrecorded_pass_is_not_planned_on_a_gpu(there: bool) -> None:
    given: Any = {"tokens": OnGPU() if there else torch.zeros(1)}
    seen = list[bool]()

    def body(_: Any) -> OutputTensors:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return ()

    before = torch.backends.cuda.cudnn_sdp_enabled()
    EagerCapture().run(None, given, body)
    assert seen == [before and not there]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


class Failing:
    """A recorder that raises, from one recording on."""

    def __init__(self, begin: int = 0) -> None:
        self._left = begin
        self._record = PassRecorder()

    def __call__(
        self, work: Callable[[], OutputTensors]
    ) -> tuple[Callable[[], None], OutputTensors]:
        if not self._left:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        self._left -= 1
        return self._record(work)


@pytest.mark.parametrize("begin", [0, 2])
def test_passes_that_cannot_be_recorded_run_as_they_are(
    begin: int, caplog: pytest.LogCaptureFixture
) -> None:
    texts = []
    for capture in (Graphs(Failing(begin)), EagerCapture()):
        target = tiny_target(capture=capture)
        rows, rule = SequenceBatch(target.new_cache(1, 8)), part("acceptor", "greedy")()
        drafter = part("drafter", "pld")().open(target)
        with caplog.at_level(logging.WARNING, "draftree"):
            for _ in decode(Components(target, drafter, part("policy", "chain")(), rule, COSTS), rows, [
                Request([7, 18, 29, 40, 51, 7, 18], 20)
            ]):  # fmt: skip
                pass
        texts.append(rows.written)
    assert texts[0] == texts[1]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1, told
    assert "without CUDA graphs" in told[0]
    assert "not permitted when stream is capturing" in told[0]
    assert "\n" not in told[0]


def test_an_error_of_the_pass_itself_is_no_failed_recording(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = tiny_target(capture=Graphs(PassRecorder())).decoder
    with pytest.raises(IndexError):
        a_pass(decoder, decoder.new_cache(1, 8), first=1000)
    assert not caplog.records
    assert isinstance(decoder.capture, Graphs)
    assert a_pass(decoder, decoder.new_cache(1, 8)).isfinite().all()


class Wrong(PassRecorder):
    """A recorder whose repetitions forget the inputs, or scale the results."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def __call__(
        self, work: Callable[[], OutputTensors]
    ) -> tuple[Callable[[], None], OutputTensors]:
        replay, made = super().__call__(work)
        done = False

        def wrong() -> None:
            nonlocal done
            if self._factor != 1 or not done:
                replay()
            done = True
            for t in made:
                t.mul_(self._factor)

        return wrong, made


@pytest.mark.parametrize(
    ("recorder", "good"), [(PassRecorder(), True), (Wrong(1.01), False), (Wrong(1), False)]
)
@pytest.mark.parametrize("way", ["loaded", "handed in"])
def test_recordings_are_tried_at_load(
    recorder: PassRecorder,
    good: bool,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder.recorded = recorder.launched = 0
    monkeypatch.setattr(target_module, "select_capture", lambda model, asked: Graphs(recorder))
    given: Any = "demo" if way == "loaded" else tiny_target(context=64).decoder.model.float()
    with caplog.at_level(logging.WARNING, "draftree"):
        engine = draftree.load(given, "pld")
    assert isinstance(engine.target.decoder.capture, Graphs if good else EagerCapture)
    told = [
        record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()
    ]
    assert len(told) == (not good)
    before = recorder.launched
    assert engine.write([Request([5, 6, 7, 5, 6, 7], 6)]).tokens[0]
    assert (recorder.launched > before) == good


def test_on_a_cpu_nothing_is_recorded() -> None:
    model = tiny_target().decoder.model
    assert isinstance(select_capture(model, None), EagerCapture)
    assert isinstance(select_capture(model, True), EagerCapture)


def test_a_gpu_records_unless_that_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU(nn.Module):
        def __init__(self, *devices: str) -> None:
            super().__init__()
            self.devices = devices

        def parameters(self, recurse: bool = True) -> Any:
            class Weight:
                def __init__(self, device: str) -> None:
                    self.device = torch.device(device)

            return map(Weight, self.devices)

    for devices, asked, recorded in (
        (("cuda:0", "cuda:0"), None, True), (("cuda:0",), True, True), (("cuda:0",), False, False),
        (("cuda:0", "cuda:1"), None, False), (("cuda:0", "meta"), None, False), (("mps",), None, False),
    ):  # fmt: skip
        assert isinstance(select_capture(OnGPU(*devices), asked), Graphs) == recorded, devices


def test_a_language_model_drafts_with_recorded_passes(tmp_path: Any) -> None:
    folder = str(target_folder(tmp_path))
    target, eager, small = (Target.load(folder) for _ in range(3))
    assert isinstance(LM(folder).open(target).decoder.capture, EagerCapture)
    target.decoder.use_capture(Graphs(PassRecorder()))
    assert isinstance(language_model(eager, target).decoder.capture, EagerCapture), (
        "its recordings may have been wrong when it was loaded"
    )
    small.decoder.use_capture(Graphs(PassRecorder()))
    drafter = language_model(small, target)
    assert isinstance(drafter.decoder.runner, GraphRunner)
    before = target.decoder.capture.recordings
    a_pass(drafter.decoder, drafter.decoder.new_cache(1, 8))
    assert target.decoder.capture.recordings == before + 1, "counted together"


class OutOfMemory(PassRecorder):
    """A recorder that has memory for so many recordings at a time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._held = most, weakref.WeakSet[Any]()

    def __call__(
        self, work: Callable[[], OutputTensors]
    ) -> tuple[Callable[[], None], OutputTensors]:
        if len(self._held) >= self._most:
            raise torch.OutOfMemoryError("out of memory")
        replay, made = super().__call__(work)
        self._held.add(replay)
        return replay, made


def test_without_memory_old_recordings_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    capture = Graphs(OutOfMemory(2))
    for kind in range(5):
        (made,) = capture.run(kind, {"x": torch.full((1,), kind)}, lambda given: (given["x"] + 1,))
        assert made.item() == kind + 1
    assert not caplog.records
    assert Graphs(OutOfMemory(0)).run(0, {"x": torch.ones(1)}, lambda g: (g["x"],))[0] == 1
    assert "without CUDA graphs" in caplog.text


class FakeCUDA:
    """What is called of `torch.cuda` when a graph is recorded."""

    def __init__(self) -> None:
        self.stream_of_thread, self.pools, self.fails = "default", 0, False

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda _: None)

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda _: None, name=self.stream_of_thread)

    def set_stream(self, stream: Any) -> None:
        self.stream_of_thread = stream.name

    def stream(self, _: Any) -> Any:
        return nullcontext()

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    class CUDAGraph:
        def replay(self) -> None:
            pass

    @contextmanager
    def graph(self, graph: Any, pool: int, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert pool == self.pools
        self.stream_of_thread = "recording"
        yield
        self.stream_of_thread = "default"


def test_a_pool_whose_graphs_are_gone_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", cuda := FakeCUDA())
    record = _CUDAGraphs()
    first, _ = record(lambda: ())
    second, _ = record(lambda: ())
    assert cuda.pools == 1
    del first, second
    third, _ = record(lambda: ())
    assert cuda.pools == 2
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        record(raises)
    assert cuda.stream_of_thread == "default"
    assert third is not None


def raises() -> OutputTensors:
    """Fail in the recording, which is the third call."""
    if torch.cuda.stream_of_thread == "recording":  # type: ignore[attr-defined]
        raise RuntimeError("cannot be recorded")
    return ()
