"""Passes of few sizes, recorded once and repeated: the same texts, few launches, few waits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from draftree.loop import Parts, State, admit, step
from draftree.models.capture import Graphs
from draftree.models.forward_batch import ForwardBatch
from draftree.models.ladder import Ladder
from draftree.registry import build, part
from draftree.request import Request
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
    """Counts what makes the host wait for a device, as if everything lay on one but what comes from numpy or was copied back.

    A tensor that was copied to the host is waited for once. Copies to the device are not counted.

    Args:
        models: whose weights are moved to where they lie already, as transformers does with rotary frequencies.
    """

    ASKING = ("item", "tolist", "numpy", "cpu", "equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__",
              "__complex__", "__index__", "__array__", "__contains__", "__repr__", "__format__")  # fmt: skip
    SIZED = ("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "repeat_interleave")
    """What makes tensors whose sizes depend on values."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self._weights = {id(t) for model in models for t in (*model.parameters(), *model.buffers())}
        self.count, self._here, self._patch = 0, list[Tensor](), pytest.MonkeyPatch()

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
            if "device" not in how:
                self._here.append(made)
            return made

        return noted

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), [*args, *(kwargs or {}).values()]
        tensors = [t for each in given for t in (each if isinstance(each, tuple | list) else (each,)) if isinstance(t, Tensor)]
        here = bool(tensors) and all(self._is_here(t) for t in tensors)
        moved = name == "to" and any(isinstance(each, torch.device | str) for each in given)
        moved = moved and id(args[0]) not in self._weights
        if not here and (moved or name in self.ASKING or self._sized(name, args)):
            self.count += 1
        made = func(*args, **(kwargs or {}))
        if moved and here:  # to the device; on a CPU it is the very same tensor
            self._here = [t for t in self._here if t is not made]
        elif isinstance(made, Tensor) and (here or moved or name == "cpu"):
            self._here.append(made)
        return made

    def _is_here(self, tensor: Tensor) -> bool:
        return any(tensor is t for t in self._here)

    def _sized(self, name: str, args: Any) -> bool:
        """Whether the size of what is made, or what is written to, depends on values."""
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(isinstance(each, Tensor) and each.dtype is torch.bool for each in index)
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
        lambda: np.asarray(x), lambda: f"{x[0]}", lambda: 1.0 in x, lambda: x.cpu().numpy().tolist(),
    ]  # fmt: skip
    for number, way in enumerate(ways):
        with Waits() as waits:
            way()
        assert waits.count == 1, number
    free: list[Callable[[], Any]] = [
        lambda: x.topk(2), lambda: torch.where(x > 0, x, 0), lambda: x[x.long().clamp(0)], lambda: x.masked_fill(x > 0, 1),
        lambda: torch.from_numpy(np.ones(3))[None].to("cpu"), lambda: torch.from_numpy(np.ones(3)).numpy(), lambda: x.double(),
    ]  # fmt: skip
    for number, way in enumerate(free):
        with Waits() as waits:
            way()
        assert waits.count == 0, number
    with Waits() as waits:
        torch.from_numpy(np.ones(3)).to("cpu").tolist()
    assert waits.count == 1, "there and back"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("policy", "layers"),
    [("chain:length=4", 4), ("beam:preset=fast,width=3,depth=4", 4), ("eagle2", 6), ("vct:width=2,depth=2", 2)],
)
def test_a_step_of_edd_is_few_launches(policy: str, layers: int, rows: int) -> None:
    """One pass for each layer of the tree and one of the target; the host waits once.

    Not counted: what is not recorded, as the encoding of what was accepted, and what fills the inputs of a pass; the host waits
    for none of it.
    """
    recorder = Recorder()
    target = tiny_target(context=96, capture=Graphs(recorder))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        drafter = part("drafter", "edd")().example(target)
    writing, rule = Rows(target.new_cache(rows, 96)), part("acceptor", "greedy")()
    parts = Parts(target, drafter, build("policy", policy), rule, COSTS)
    _, state = admit(parts, writing, [Request([7, 18, 29, 40, 51][: 5 - row], 60) for row in range(rows)], State())
    for _ in range(4):
        _, state = step(parts, writing, state)
        before = recorder.launched
        with Waits(target.decoder.model, drafter.model) as waits:
            _, state = step(parts, writing, state)
        assert len(writing.stats.work[-1].frontiers) == layers
        assert recorder.launched - before <= 1 + layers
        assert waits.count == 1


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
            feed = ForwardBatch.packed([np.array(ids)], [places], cache.lengths.copy(), [seen], [places], decoder.device)
            with torch.inference_mode():
                outs.append(decoder.forward(feed, cache).logits)
            cache.keep(0, cache.lengths[0] + np.array([0, 2]))
        assert torch.allclose(*outs, atol=1e-9)
    assert (recorder.recorded, recorder.launched) == (1, 3)
