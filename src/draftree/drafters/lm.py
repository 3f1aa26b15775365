"""A small causal language model as drafter (Leviathan et al. 2022; EDD + PCT, section 4.1, calls a trained one VDM)."""

from dataclasses import dataclass
from typing import Any, final

from draftree.drafters.base import Method
from draftree.drafters.neural.language_model import LanguageModelDrafter
from draftree.errors import UserError
from draftree.models.decoder import one_layer
from draftree.models.target import Target


@final
@dataclass(frozen=True)
class LM(Method):
    """Any causal language model with the target's vocabulary.

    Attributes:
        model: a Hugging Face folder or hub id.
    """

    model: str = ""

    def open(self, target: Target) -> "LMDrafter":
        if not self.model:
            raise UserError("drafter 'lm' needs a model: lm:model=FOLDER or lm:model=HUB-ID")
        small = Target.load(self.model, target.decoder.dtype, str(target.decoder.device))
        if small.decoder.vocab != target.decoder.vocab:
            raise UserError(
                f"drafter '{self.model}' has a vocabulary of {small.decoder.vocab}, "
                f"allowed is the target's: {target.decoder.vocab}"
            )
        return LMDrafter(small)

    def example(self, target: Target) -> "LMDrafter":
        model: Any = one_layer(target.decoder.config)
        model.to(target.decoder.dtype)
        return LMDrafter(Target(type(target.decoder)(model), "example"))


@final
class LMDrafter(LanguageModelDrafter):
    """Drafts with a whole language model."""

    def __init__(self, model: Target) -> None:
        self.small, self.decoder = model, model.decoder

    @property
    def described(self) -> str:
        return f"lm {self.small.name}"

    @property
    def language_model(self) -> Target | None:
        return self.small
