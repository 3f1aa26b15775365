"""Run a function of tensors eagerly, or as a CUDA graph that is captured once and replayed.

Both run the same function of the same tensors; the recorder alone differs between a GPU and the
tests on a CPU.
"""

import itertools
import logging
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from draftree.errors import first_line
from draftree.models.sdpa_backends import unplanned_attention
from draftree.models.shape_buckets import ShapeBuckets

LOG = logging.getLogger("draftree")

InputTensors = Mapping[str, Tensor]
"""The inputs of a pass by name; weights and cache are not among them."""
OutputTensors = tuple[Tensor, ...]
"""The outputs of a pass: logits, followed by the requested hidden states."""
Pass = Callable[[InputTensors], OutputTensors]
RecordFunction = Callable[[Callable[[], OutputTensors]], tuple[Callable[[], None], OutputTensors]]
"""A function that runs another function once and records it.

It returns a function that replays the recording, and the tensors that receive the results.
"""
MAX_RECORDED_GRAPHS = 64
"""Largest number of recorded passes that are kept at a time."""


@dataclass(frozen=True)
class Epilogue:
    """An optional epilogue of a pass, captured in the same CUDA graph.

    Attributes:
        kind: a key that distinguishes epilogues.
        given: further input tensors of the epilogue, by name.
        made: a function of the pass's results and of all its inputs; it returns the new results.
            Any other tensor that it reads must live as long as the recording.
    """

    kind: Hashable = None
    given: InputTensors = field(default_factory=dict)
    made: Callable[[OutputTensors, InputTensors], OutputTensors] = lambda made, given: made


class Capture(ABC):
    """Run the passes of a model over draft trees, either eagerly or recorded.

    Passes over prompts and passes of models with recurrent states are never recorded.

    Attributes:
        ladder: the sizes to which passes are padded.
        recordings: number of passes recorded so far, including the recordings of objects that `of`
            returned.
    """

    ladder: ShapeBuckets

    @property
    def recordings(self) -> int:
        """Return the number of passes recorded so far."""
        return 0

    @abstractmethod
    def run(self, kind: Hashable, given: InputTensors, body: Pass) -> OutputTensors:
        """Run a pass and return its results.

        Args:
            kind: a key; passes of one kind differ only in the values of `given`, not in its shapes.
            given: the input tensors of this pass, by name.
            body: the pass as a function of the inputs.
        """

    @abstractmethod
    def of(self, network: nn.Module) -> "Capture":
        """Return an object of the same kind for another network, such as that of a drafter."""


@final
class EagerCapture(Capture):
    """Run each pass eagerly, without padding."""

    ladder = ShapeBuckets()

    @override
    def run(self, kind: Hashable, given: InputTensors, body: Pass) -> OutputTensors:
        return run_eagerly(given, body)

    @override
    def of(self, network: nn.Module) -> Capture:
        return self


@final
@dataclass
class RecordingCounter:
    """Count recordings for several objects."""

    count: int = 0


@final
class Graphs(Capture):
    """Record each kind of pass once and replay it with a single launch.

    If a pass cannot be recorded, this pass and all later ones run eagerly.

    Args:
        record: the function that records a pass; by default it makes a CUDA graph.
        name: the network's name, for the log.
        tally: the counter of recordings.
    """

    ladder = ShapeBuckets(few=True)

    def __init__(
        self,
        record: RecordFunction | None = None,
        name: str = "the target",
        tally: RecordingCounter | None = None,
    ) -> None:
        self._record = _CUDAGraphs() if record is None else record
        self._tally = RecordingCounter() if tally is None else tally
        self._name, self._failed = name, False
        self._known: dict[
            Hashable, tuple[dict[str, Tensor], Callable[[], None], OutputTensors]
        ] = {}

    @override
    def run(self, kind: Hashable, given: InputTensors, body: Pass) -> OutputTensors:
        if not self._failed and kind not in self._known:
            if (
                len(self._known) >= MAX_RECORDED_GRAPHS
            ):  # old ones belong to grown or deleted caches
                self._known.clear()
            self._tally.count += 1
            try:
                self._known[kind] = self._record_pass(given, body)
            except Exception as error:
                made = body(given)  # raises errors that are not due to recording
                self._give_up(error)
                return made
        if self._failed:
            return run_eagerly(given, body)
        lying, replay, made = self._known[kind]
        _copy([(lying[name], t) for name, t in given.items()])
        replay()
        kept = tuple(
            torch.empty_like(t) for t in made
        )  # a drafter keeps what it made of one node while it reads the next
        _copy(list(zip(kept, made, strict=True)))
        return kept

    def _record_pass(
        self, given: InputTensors, body: Pass
    ) -> tuple[dict[str, Tensor], Callable[[], None], OutputTensors]:
        """Record a pass, on the device of its inputs; return its inputs, replay and results.

        If there is no memory for it, recordings of grown or deleted caches are dropped first.
        """
        try:
            return self._record_once(given, body)
        except torch.OutOfMemoryError:
            if not self._known:
                raise
        self._known.clear()
        torch.cuda.empty_cache()
        return self._record_once(given, body)

    def _record_once(
        self, given: InputTensors, body: Pass
    ) -> tuple[dict[str, Tensor], Callable[[], None], OutputTensors]:
        lying = {name: t.clone() for name, t in given.items()}
        with on_device_of(lying):
            return lying, *self._record(partial(body, lying))

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


def on_device_of(tensors: InputTensors) -> AbstractContextManager[Any]:
    """Return a context in which the GPU of some tensors is torch's current device."""
    device = next(iter(tensors.values())).device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def run_eagerly(given: InputTensors, body: Pass) -> OutputTensors:
    """Run a pass eagerly; its size may not occur again."""
    with unplanned_attention(next(iter(given.values())).device):
        return body(given)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first, with one operation for each dtype."""
    by_dtype = defaultdict[torch.dtype, list[tuple[Tensor, Tensor]]](list)
    for pair in pairs:
        by_dtype[pair[0].dtype].append(pair)
    for some in by_dtype.values():
        to, source = map(list, zip(*some, strict=True))
        torch._foreach_copy_(to, source, non_blocking=True)


@final
class Weights:
    """Detect whether networks still have the weights with which a pass was recorded.

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
        """Return a key that changes when a module of the networks is replaced."""
        return tuple(map(id, itertools.chain.from_iterable(held.values() for held in self._parts)))

    @property
    def version(self) -> Hashable:
        """Return a key that changes when a module or tensor is replaced or a tensor is modified."""
        parts = self.structure
        tensors = [t for held in self._tensors for t in held.values() if t is not None]
        try:
            return parts, tuple(map(Tensor.data_ptr, tensors)), tuple(map(_VERSION, tensors))
        except RuntimeError:  # tensors made in inference mode, or tensor subclasses
            return parts, tuple(
                (_address(t), 0 if t.is_inference() else t._version) for t in tensors
            )


_VERSION = attrgetter("_version")


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # quantised weights of several tensors
        return id(tensor)


@final
class _CUDAGraphs:
    """Record functions as CUDA graphs that share one memory pool, as they run in turn.

    All are recorded on one stream, because CUDA's libraries keep memory for each stream.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None
        self._graphs = weakref.WeakSet[Any]()

    def __call__(
        self, work: Callable[[], OutputTensors]
    ) -> tuple[Callable[[], None], OutputTensors]:
        """Record a function after two runs on another stream, as torch's manual recommends."""
        cuda: Any = torch.cuda
        before = cuda.current_stream()
        if self._stream is None:
            self._stream = cuda.Stream()
        self._stream.wait_stream(before)
        with cuda.stream(self._stream):
            for _ in range(2):
                work()
        before.wait_stream(self._stream)
        if not self._graphs:  # torch frees a pool with the last graph that uses it
            self._pool = cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        # Other threads of a server may allocate memory meanwhile.
        mode = {"stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with cuda.graph(graph, pool=self._pool, **mode):
                made = work()
        except BaseException:
            cuda.set_stream(before)  # torch leaves the stream of the recording
            raise
        self._graphs.add(graph)
        return graph.replay, made
