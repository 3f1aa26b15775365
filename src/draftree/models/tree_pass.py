"""Run one pass of a network over the tokens of a batch, padded and captured where possible.

Shapes: R sequences, n tokens of each, S slots.
"""

from collections.abc import Callable, Hashable

import torch

from draftree.models.forward_batch import DeviceFeed, ForwardBatch
from draftree.models.graph_capture import Capture, Given, Made, Then, unrecorded
from draftree.models.kv_cache import SlotCache, Writer
from draftree.models.recurrent.state_cache import Pass
from draftree.utils.hardware import to_device
from draftree.utils.profiler import phase

Network = Callable[[Given, Writer], Made]
"""network(inputs, cache) → results. Inputs are `tokens` and `positions` [R, n], the additive masks
`full` [R, 1, n, S] and, where layers have a window, `sliding`, and all other inputs of the pass, by
name.
"""


def run_pass(
    network: Network,
    kind: Hashable,
    cache: SlotCache,
    batch: ForwardBatch | DeviceFeed,
    capture: Capture,
    then: Then = Then(),
    window: int | None = None,
    at: Pass | None = None,
) -> Made:
    """Run a network over a batch, and return what `then` makes of its results.

    Args:
        network: a function of tensors alone.
        kind: passes of one kind differ in nothing but the batch, the cache and what is done then;
            None for one that is not recorded.
        cache: of its keys and values.
        batch: the tokens; for a recorded pass, in the width that `widened` gives.
        capture: how recorded passes are run.
        then: what is done with the results, in the same recording.
        window: of layers that do not see all positions.
        at: the states of layers that have them.
    """
    writer = cache.writer(batch.starts, batch.width, at)
    given = dict(batch.given) if isinstance(batch, DeviceFeed) else _inputs(cache, batch, window)
    if kind is not None and isinstance(batch, ForwardBatch):
        given["slots"] = writer.slots
    assert given.keys().isdisjoint(then.given), "two tensors of a pass have one name"
    given |= then.given

    def body(given: Given) -> Made:
        laid = given
        if isinstance(batch, DeviceFeed):
            laid = {**given, **batch.laid(given, writer.end, cache.dtype, window)}
        return then.made(
            network(laid, writer.at(laid["slots"]) if "slots" in laid else writer), given
        )

    with phase("model"):
        if kind is None:
            return unrecorded(given, body)
        inputs = tuple((name, t.shape, t.dtype) for name, t in given.items())
        return capture.run(
            (cache.place, kind, batch.width, batch.kind, then.kind, inputs), given, body
        )


def _inputs(cache: SlotCache, batch: ForwardBatch, window: int | None) -> dict[str, torch.Tensor]:
    positions = to_device(batch.padded_positions, cache.device)
    given = {"tokens": batch.padded_tokens, "positions": positions, "full": cache.mask(batch)}
    return given if window is None else given | {"sliding": cache.mask(batch, window)}
