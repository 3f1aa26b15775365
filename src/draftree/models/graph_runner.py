"""Forward passes that are recorded once for each size, as CUDA graphs, and repeated."""

from typing import final

from draftree.models.cache import SlotCache
from draftree.models.capture import Capture
from draftree.models.forward_batch import ForwardBatch
from draftree.models.hf_runner import HFRunner
from draftree.models.runner import ModelOutput, ModelRunner, Outputs


@final
class GraphRunner(ModelRunner):
    """Records another runner's passes; prompts are run as they are.

    Args:
        inner: the runner.
        capture: records its passes.
    """

    def __init__(self, inner: HFRunner, capture: Capture) -> None:
        self._inner, self._capture = inner, capture

    def forward(self, batch: ForwardBatch, cache: SlotCache, outputs: Outputs = Outputs()) -> ModelOutput:
        if outputs.tokens is not None:
            return self._inner.forward(batch, cache, outputs)
        made = self._inner.run(cache, batch, 0, outputs.layers, capture=self._capture)
        logits, *hidden = map(batch.unpad, made)
        return ModelOutput(logits, dict(zip(outputs.layers, hidden, strict=True)))
