"""Draft passes of heads (Medusa, Hydra) over trees that stay on the device.

Shapes: R slots, F frontier nodes, V′ (draft) vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from torch import Tensor
from typing_extensions import override

from draftree.models.graph_capture import Capture, InputTensors, OutputTensors, Weights
from draftree.target.device_tree import Choose, Layers, Nodes
from draftree.tree import DraftVocab, Ints

Read = Callable[[int, InputTensors, Nodes, Tensor], Tensor]
"""A function `read(depth, inputs, draft trees, frontier [R, F])` that returns logits [R, F, V′].

They are the logits after the frontier, whose nodes have the given depth.
"""


@final
class HeadLayers(Layers):
    """Layers of a draft tree that come from heads, one head for each layer.

    Args:
        read: computes the logits of a head.
        heads: the number of heads.
        capture: runs captured passes (CUDA graphs).
        weights: the weights that the heads read.
        given: inputs in addition to the draft trees, by name; the first dimension of the first one
            is R.
        drafted: the tokens that can be drafted; None for all.
        state: the drafter's state.
        each_node: see `Layers`.
    """

    def __init__(
        self,
        read: Read,
        heads: int,
        capture: Capture,
        weights: Weights,
        given: InputTensors,
        drafted: DraftVocab | None,
        state: Any,
        each_node: bool,
    ) -> None:
        self._read = read
        self._capture = capture
        self._weights = weights
        self._state = state
        self._given = given if drafted is None else {**given, "ids": drafted.ids}
        like = next(iter(given.values()))
        self.device, self.begin = like.device, np.zeros(len(like), np.int64)
        self.deepest = heads
        self.each_node = each_node
        self._depth = 0

    @override
    def first(self, nodes: Nodes, choose: Choose) -> Nodes:
        return self.below(nodes, 1, choose)

    @override
    def below(self, nodes: Nodes, count: int, choose: Choose) -> Nodes:
        depth, read = self._depth, self._read
        self._depth += 1

        def body(given: InputTensors) -> OutputTensors:
            nodes = Nodes.of(given)
            logits = read(depth, given, nodes, nodes.fed[:, -count:])
            return choose(logits, nodes, given.get("ids")).growing_tensors

        given = {**nodes.as_inputs, **self._given}
        shapes = tuple((name, t.shape, t.dtype) for name, t in given.items())
        kind = self._weights.version, depth, count, choose, shapes
        return nodes.after(self._capture.run(kind, given, body))

    @override
    def state(self, fed: Sequence[Ints]) -> Any:
        return self._state
