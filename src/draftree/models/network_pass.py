"""Run one pass of a network over the tokens of a batch, padded and captured where possible.

Shapes: R sequences, n tokens of each, S slots.
"""

from collections.abc import Callable, Hashable

import torch

from draftree.models.forward_batch import DeviceBatch, ForwardBatch
from draftree.models.graph_capture import (
    Capture,
    Epilogue,
    InputTensors,
    OutputTensors,
    run_eagerly,
)
from draftree.models.kv_cache import SlotCache, Writer
from draftree.models.recurrent.state_cache import Pass
from draftree.utils.hardware import to_device
from draftree.utils.profiler import phase

Network = Callable[[InputTensors, Writer], OutputTensors]
"""A function network(inputs, cache) that returns the results of a pass.

Its inputs by name are `tokens` and `positions` [R, n], the additive masks `full` [R, 1, n, S] and,
for layers with a window, `sliding`, and all other inputs of the pass.
"""


def run_pass(
    network: Network,
    kind: Hashable,
    cache: SlotCache,
    batch: ForwardBatch | DeviceBatch,
    capture: Capture,
    then: Epilogue = Epilogue(),
    window: int | None = None,
    at: Pass | None = None,
) -> OutputTensors:
    """Run a network over a batch, and return the results of the epilogue `then`.

    Args:
        network: a function that depends on tensors only.
        kind: a key; passes of one kind differ only in batch, cache and epilogue. None for a pass
            that is not recorded.
        cache: the cache of keys and values.
        batch: the tokens; for a recorded pass, in the width that `with_width` gives.
        capture: how recorded passes are run.
        then: the epilogue on the results, in the same recording.
        window: number of positions that sliding-window layers see; None if no layer has a window.
        at: the pass that stores recurrent states; None if no layer has one.
    """
    writer = cache.writer(batch.starts, batch.width, at)
    given = dict(batch.given) if isinstance(batch, DeviceBatch) else _inputs(cache, batch, window)
    if kind is not None and isinstance(batch, ForwardBatch):
        given["slots"] = writer.slots
    assert given.keys().isdisjoint(then.given), "two tensors of a pass have one name"
    given |= then.given

    def body(given: InputTensors) -> OutputTensors:
        laid = given
        if isinstance(batch, DeviceBatch):
            laid = {**given, **batch.inputs(given, writer.end, cache.dtype, window)}
        return then.made(
            network(laid, writer.at(laid["slots"]) if "slots" in laid else writer), given
        )

    with phase("model"):
        if kind is None:
            return run_eagerly(given, body)
        inputs = tuple((name, t.shape, t.dtype) for name, t in given.items())
        return capture.run(
            (cache.place, kind, batch.width, batch.kind, then.kind, inputs), given, body
        )


def _inputs(cache: SlotCache, batch: ForwardBatch, window: int | None) -> dict[str, torch.Tensor]:
    positions = to_device(batch.padded_positions, cache.device)
    given = {"tokens": batch.padded_tokens, "positions": positions, "full": cache.mask(batch)}
    return given if window is None else given | {"sliding": cache.mask(batch, window)}
