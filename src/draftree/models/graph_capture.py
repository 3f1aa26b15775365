"""Run a function of tensors eagerly, or as a CUDA graph that is captured once and replayed.

Both run the same function of the same tensors; the recorder alone differs between a GPU and the
tests on a CPU.
"""

import itertools
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from draftree.errors import first_line
from draftree.models.shape_buckets import Ladder

LOG = logging.getLogger("draftree")

Given = Mapping[str, Tensor]
"""The inputs of a pass other than weights and the cache, by name."""
Made = tuple[Tensor, ...]
"""The outputs of a pass: logits, and the requested hidden states."""
Pass = Callable[[Given], Made]
Record = Callable[[Callable[[], Made]], tuple[Callable[[], None], Made]]
"""Runs a function once and records it.

It returns a function that replays the recording, and the tensors that hold the results.
"""
UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention kernels that take any size without planning."""
MOST = 64
"""Largest number of recorded passes that are kept."""


@dataclass(frozen=True)
class Then:
    """An optional epilogue of a pass, captured in the same CUDA graph.

    Attributes:
        kind: a key that distinguishes epilogues.
        given: its inputs other than the results, by name.
        made: function of the results and of everything that the pass was given; returns the new
            results. Any other tensor that it reads must outlive it.
    """

    kind: Hashable = None
    given: Given = field(default_factory=dict)
    made: Callable[[Made, Given], Made] = lambda made, given: made


class Capture(ABC):
    """Runs the passes of a model over trees, eagerly or recorded.

    Prompts and layers with a recurrent state are never captured.

    Attributes:
        ladder: the sizes to which passes are padded.
        recordings: number of passes recorded so far, by this object and all that `of` made from it.
    """

    ladder: Ladder

    @property
    def recordings(self) -> int:
        """Return how many passes were recorded so far."""
        return 0

    @abstractmethod
    def run(self, kind: Hashable, given: Given, body: Pass) -> Made:
        """Return the results of a pass.

        Args:
            kind: passes of one kind differ only in what is given, whose shapes are part of the
                kind.
            given: the tensors of this pass.
            body: the pass.
        """

    @abstractmethod
    def of(self, network: nn.Module) -> "Capture":
        """Return the same way to run passes, for another network such as a drafter's."""


@final
class Eager(Capture):
    """Runs each pass eagerly, without padding."""

    ladder = Ladder()

    @override
    def run(self, kind: Hashable, given: Given, body: Pass) -> Made:
        return unrecorded(given, body)

    @override
    def of(self, network: nn.Module) -> Capture:
        return self


@final
@dataclass
class Tally:
    """A counter that several objects share."""

    count: int = 0


@final
class Graphs(Capture):
    """Records each kind of pass once and replays it with a single launch.

    If a pass cannot be recorded, this and all later ones run eagerly.

    Args:
        record: how to record; by default as a CUDA graph.
        name: the network's name, for the log.
        tally: counts the recordings.
    """

    ladder = Ladder(few=True)

    def __init__(
        self, record: Record | None = None, name: str = "the target", tally: Tally | None = None
    ) -> None:
        self._record = _CUDAGraphs() if record is None else record
        self._tally = Tally() if tally is None else tally
        self._name, self._failed = name, False
        self._known: dict[Hashable, tuple[dict[str, Tensor], Callable[[], None], Made]] = {}

    @override
    def run(self, kind: Hashable, given: Given, body: Pass) -> Made:
        if not self._failed and kind not in self._known:
            if len(self._known) >= MOST:  # of caches that have grown, or are gone
                self._known.clear()
            lying = {name: t.clone() for name, t in given.items()}
            self._tally.count += 1
            try:
                self._known[kind] = lying, *self._record(lambda: body(lying))
            except Exception as error:
                made = body(given)  # raises again what has nothing to do with the recording
                self._give_up(error)
                return made
        if self._failed:
            return unrecorded(given, body)
        lying, replay, made = self._known[kind]
        _copy([(lying[name], t) for name, t in given.items()])
        replay()
        kept = tuple(
            torch.empty_like(t) for t in made
        )  # a drafter keeps what it made of one node while it reads the next
        _copy(list(zip(kept, made, strict=True)))
        return kept

    @property
    @override
    def recordings(self) -> int:
        return self._tally.count

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        self._known.clear()
        why = f"{type(error).__name__}: {first_line(error)}"
        LOG.warning(
            "passes of %s run without CUDA graphs, as one cannot be recorded: %s", self._name, why
        )

    @override
    def of(self, network: nn.Module) -> Capture:
        return Graphs(self._record, type(network).__name__, self._tally)


def unrecorded(given: Given, body: Pass) -> Made:
    """Run a pass whose size may not occur again.

    On a GPU, attention does not use cuDNN then: cuDNN plans each new size for some 50 ms (an H100,
    torch 2.11), which is several passes.
    """
    if all(t.device.type != "cuda" for t in given.values()):
        return body(given)
    with sdpa_kernel(UNPLANNED):
        return body(given)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor to the first, those of one dtype at once."""
    by_dtype = defaultdict[torch.dtype, list[tuple[Tensor, Tensor]]](list)
    for pair in pairs:
        by_dtype[pair[0].dtype].append(pair)
    for some in by_dtype.values():
        to, source = map(list, zip(*some, strict=True))
        torch._foreach_copy_(to, source, non_blocking=True)


def usual_capture(model: nn.Module, asked: bool | None) -> Capture:
    """Return how to run passes of a loaded model: recorded on one GPU, else eagerly.

    Args:
        model: the model, on its devices.
        asked: False to run eagerly; True and None record on a single GPU.
    """
    devices = {p.device for p in model.parameters()}
    one_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
    return Graphs() if one_gpu and asked is not False else Eager()


@final
class Weights:
    """Detects whether the weights of networks still are those that a pass was recorded with.

    Args:
        networks: the networks whose weights the pass reads.
    """

    def __init__(self, *networks: nn.Module) -> None:
        modules = list(
            dict.fromkeys(module for network in networks for module in network.modules())
        )
        self._parts = [module._modules for module in modules if module._modules]
        every = (held for module in modules for held in (module._parameters, module._buffers))
        self._tensors = [held for held in every if held]

    @property
    def structure(self) -> Hashable:
        """Return a key that changes when a module is replaced."""
        return tuple(map(id, itertools.chain.from_iterable(held.values() for held in self._parts)))

    @property
    def version(self) -> Hashable:
        """Return a key that changes when a tensor or module is replaced or a tensor is modified."""
        parts = self.structure
        tensors = [t for held in self._tensors for t in held.values() if t is not None]
        try:
            return parts, tuple(map(Tensor.data_ptr, tensors)), tuple(map(_VERSION, tensors))
        except RuntimeError:  # of tensors that were made in inference mode, or are several in one
            return parts, tuple(
                (_address(t), 0 if t.is_inference() else t._version) for t in tensors
            )


_VERSION = attrgetter("_version")


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of quantised weights that are several tensors in one
        return id(tensor)


@final
class _CUDAGraphs:
    """Records work as CUDA graphs that share one memory pool, as they are replayed in turn."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
        """Record work after it has run twice on another stream, as torch's manual asks."""
        cuda: Any = torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            for _ in range(2):
                work()
        cuda.current_stream().wait_stream(side)
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        # Threads of a server may allocate meanwhile.
        with cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            made = work()
        return graph.replay, made
