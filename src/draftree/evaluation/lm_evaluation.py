"""lm-evaluation-harness with drafts: `python -m draftree.evaluation.lm_evaluation --model draftree --model_args …`.

That is the harness's own command line, with one model more: `draftree` is its `hf` whose `generate`
speculates, so that greedy generations are those of `--model hf`. Its further `--model_args` are
`drafter`, `policy` and `acceptor`, specs without commas. The harness (0.4.13) asks no entry points
for models; `DraftreeLM` can be handed to `lm_eval.simple_evaluate` as well.
"""

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from draftree.engine import speculate


@register_model("draftree")
class DraftreeLM(HFLM):  # type: ignore[misc]
    """Run the harness's `hf` model with speculative decoding for generated texts.

    Likelihoods are computed as by `hf`.

    Args:
        pretrained: model or its name, as for `hf`.
        drafter: spec of a drafter or folder of its checkpoint; by default the usual drafter of the
            target.
        policy: spec of a policy.
        acceptor: spec of an acceptor.
        how: other arguments of `hf`.
    """

    def __init__(
        self,
        pretrained: Any,
        drafter: str | None = None,
        policy: str | None = None,
        acceptor: str | None = None,
        **how: Any,
    ) -> None:
        super().__init__(pretrained, **how)
        self._hook = speculate(drafter, policy, acceptor, tokenizer=self.tokenizer)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **how: Any) -> Any:
        return super()._model_generate(context, max_length, stop, custom_generate=self._hook, **how)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
