"""Ways to run a pass again and again: as it is written, or recorded once and replayed on a GPU.

Both run the same function of the same tensors; the recorder alone differs between a GPU and the tests on a CPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftree.models.ladder import Ladder

Given = Mapping[str, Tensor]
"""What a pass reads beside weights and the cache, by name."""
Made = tuple[Tensor, ...]
"""What it gives: logits, and hidden states that were asked for."""
Pass = Callable[[Given], Made]
Record = Callable[[Callable[[], Made]], tuple[Callable[[], None], Made]]
"""Runs a function once and records its work; what repeats the work, and the tensors that it writes its results into."""
MOST = 64
"""Kinds of passes that are kept."""


@dataclass(frozen=True)
class Then:
    """What is done with the results of a pass, and recorded with it; nothing by default.

    Attributes:
        kind: what tells it from others.
        given: what it reads beside the results, by name.
        made: of results and of all that the pass was given, what comes of it; any other tensor that it reads must outlive it.
    """

    kind: Hashable = None
    given: Given = field(default_factory=dict)
    made: Callable[[Made, Given], Made] = lambda made, given: made


class Capture(ABC):
    """Runs the passes of a model over trees; prompts, and layers that fold the text into a state, are never captured.

    Attributes:
        ladder: the sizes that passes come in.
    """

    ladder: Ladder

    @abstractmethod
    def run(self, kind: Hashable, given: Given, body: Pass) -> Made:
        """The results of a pass.

        Args:
            kind: passes of one kind differ in nothing but what is given; the shapes of that are part of it.
            given: this pass's tensors.
            body: the pass.
        """

    @abstractmethod
    def of(self, model: PreTrainedModel) -> "Capture":
        """The same way for another model, as a drafter's."""


@final
class Eager(Capture):
    """As it is written, in whatever sizes come."""

    ladder = Ladder()

    def run(self, kind: Hashable, given: Given, body: Pass) -> Made:
        return body(given)

    def of(self, model: PreTrainedModel) -> Capture:
        return self


@final
class Graphs(Capture):
    """Recorded once for each kind of pass, and replayed: one launch, whatever the pass is made of.

    Args:
        record: how; by default as a CUDA graph.
    """

    ladder = Ladder(few=True)

    def __init__(self, record: Record | None = None) -> None:
        self._record = _as_cuda_graph if record is None else record
        self._known: dict[Hashable, tuple[dict[str, Tensor], Callable[[], None], Made]] = {}

    def run(self, kind: Hashable, given: Given, body: Pass) -> Made:
        if kind not in self._known:
            if len(self._known) >= MOST:  # of caches that have grown, or are gone
                self._known.clear()
            lying = {name: t.clone() for name, t in given.items()}
            self._known[kind] = lying, *self._record(lambda: body(lying))
        lying, replay, made = self._known[kind]
        for name, t in given.items():
            lying[name].copy_(t, non_blocking=True)
        replay()
        return tuple(t.clone() for t in made)  # a drafter keeps what it made of one node while it reads the next

    def of(self, model: PreTrainedModel) -> Capture:
        return Graphs(self._record)


def _as_cuda_graph(work: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
    """Records work as a CUDA graph, after it has run twice beside the main stream, as torch's manual asks."""
    cuda: Any = torch.cuda
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(2):
            work()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        made = work()
    return graph.replay, made
