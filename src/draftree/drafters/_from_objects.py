"""Drafters given as Python objects: a loaded language model or an open drafter."""

from dataclasses import dataclass, field
from typing import Any, final

from transformers import PreTrainedModel

from draftree.drafters.base import Drafter, Method
from draftree.drafters.lm import LMDrafter, language_model
from draftree.errors import UserError
from draftree.target.target import Target


@final
@dataclass(frozen=True)
class LoadedModel(Method):
    """A loaded language model as drafter, like the model that `lm` loads.

    Attributes:
        model: a loaded model of transformers, or a loaded target. It must be on the device of the
            target for which it drafts.
    """

    model: PreTrainedModel | Target = field(repr=False)

    def open(self, target: Target) -> LMDrafter:
        small = self.model if isinstance(self.model, Target) else Target.of(self.model)
        if small.decoder.device != target.decoder.device:
            raise UserError(
                f"the drafter is on {small.decoder.device}, allowed is the target's device, {target.decoder.device}"
            )
        return language_model(small, target)

    def example(self, target: Target) -> LMDrafter:
        return self.open(target)


@final
@dataclass(frozen=True)
class OpenDrafter(Method):
    """A drafter that is already open, for example that of another engine.

    Attributes:
        drafter: a drafter that was opened for a target with the same shapes.
    """

    drafter: Drafter[Any]

    def open(self, target: Target) -> Drafter[Any]:
        return self.drafter

    def example(self, target: Target) -> Drafter[Any]:
        return self.drafter
