"""Run forward passes as CUDA graphs, one for each size."""

from typing import final

import numpy as np
import torch
from typing_extensions import override

from draftree.models.forward_batch import ForwardBatch
from draftree.models.graph_capture import Capture, EagerCapture
from draftree.models.hf_runner import HFRunner
from draftree.models.kv_cache import SlotCache
from draftree.models.model_runner import ModelOutput, ModelRunner, Outputs

TRIAL_TOKENS = 3
"""Number of tokens of the passes that are compared."""


@final
class GraphRunner(ModelRunner):
    """Run another runner's passes as CUDA graphs.

    Prompts are run without recording, and so are passes that need logits after some tokens alone.

    Args:
        inner: the runner whose passes are recorded.
        capture: records and replays the passes.
    """

    def __init__(self, inner: HFRunner, capture: Capture) -> None:
        self._inner, self._capture = inner, capture

    @override
    def forward(
        self, batch: ForwardBatch, cache: SlotCache, outputs: Outputs = Outputs()
    ) -> ModelOutput:
        return self._inner.forward(batch, cache, outputs, self._capture)


@torch.inference_mode()
def check_recording(runner: HFRunner, capture: Capture, cache: SlotCache) -> bool:
    """Return whether recorded passes give the same results as eager ones.

    A pass is recorded, and replayed with other tokens.

    Args:
        runner: the runner of the model.
        capture: records and replays the passes.
        cache: an empty cache of one sequence.
    """
    place = np.arange(TRIAL_TOKENS)
    for first in range(2):
        seen = np.tri(TRIAL_TOKENS, dtype=np.bool_)
        ids = (first + place) % int(runner.config.vocab_size)
        batch = ForwardBatch.from_sequences(
            [ids], [place], cache.lengths.copy(), [seen], [place], cache.device
        )
        (own, *_), (ours, *_) = (
            runner.run(cache, batch, capture=each) for each in (EagerCapture(), capture)
        )
        near = torch.finfo(own.dtype).eps ** 0.5 * float(own.abs().amax())
        if not torch.allclose(own, ours, rtol=0, atol=near, equal_nan=True):
            return False
    return True
