"""Any small causal language model with the target's tokenizer (Leviathan et al. 2022).

One with another vocabulary drafts the tokens that both have (Timor et al., arXiv 2502.05202, their
algorithm TLI).
"""

from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from draftree.drafters.base import Method
from draftree.drafters.neural.kv_cached_drafter import LanguageModelDrafter
from draftree.drafters.neural.shared_vocabulary import Shared
from draftree.errors import UserError
from draftree.target.model_construction import one_layer
from draftree.target.target import Target
from draftree.tree import DraftVocab


@final
@dataclass(frozen=True)
class LM(Method):
    """Draft with any causal language model.

    A model with another vocabulary drafts only the tokens that occur in both vocabularies.

    Attributes:
        model: a Hugging Face folder or hub id.
    """

    model: str = ""

    @override
    def open(self, target: Target) -> "LMDrafter":
        if not self.model:
            raise UserError("drafter 'lm' needs a model: lm:model=FOLDER or lm:model=HUB-ID")
        # Drafts need not be bitwise reproducible; kernels are those of the target.
        how = {"exactness": "ties", "compile": False if target.loading.compile is False else None}
        return language_model(
            Target.load(self.model, target.decoder.dtype, str(target.decoder.device), **how), target
        )

    @override
    def example(self, target: Target) -> "LMDrafter":
        model: Any = one_layer(target.decoder.config)
        model.to(target.decoder.dtype)
        return LMDrafter(Target(type(target.decoder)(model), "example"))


def language_model(small: Target, target: Target) -> "LMDrafter":
    """Return a drafter that uses a loaded language model for a target.

    Raises:
        UserError: the vocabularies differ and share no tokens, or one of the models has no
            tokenizer.
    """
    capture = target.decoder.capture.of(small.decoder.model)
    # A model that runs eagerly goes on so: its recorded passes may have given other results.
    if capture.ladder.few and small.decoder.capture.ladder.few:
        small.decoder.use_capture(capture)
    return LMDrafter(small, None if _same_tokens(small, target) else Shared.of(target, small))


def _same_tokens(small: Target, target: Target) -> bool:
    """Return whether every id means the same token in both models.

    Models with vocabularies of equal size may number the tokens differently. If there are no
    tokenizers, only the sizes are compared.
    """
    if small.decoder.vocab != target.decoder.vocab:
        return False
    try:
        ours, theirs = (model.tokenizer.get_vocab() for model in (small, target))
    except UserError:
        return True
    size = target.decoder.vocab
    named = [
        {token: number for token, number in one.items() if number < size} for one in (ours, theirs)
    ]
    return named[0] == named[1]


@final
class LMDrafter(LanguageModelDrafter):
    """Drafts with a whole language model."""

    def __init__(self, model: Target, shared: Shared | None = None) -> None:
        self.small = model
        self.decoder = model.decoder
        self._shared = shared

    @property
    @override
    def draft_vocabulary(self) -> DraftVocab | None:
        return None if self._shared is None else self._shared.drafted

    @property
    @override
    def shared_vocabulary(self) -> Shared | None:
        return self._shared

    @property
    @override
    def description(self) -> str:
        some = (
            ""
            if self._shared is None
            else f", {len(self._shared.columns)} of {self._shared.drafted.vocab} tokens shared"
        )
        return f"lm {self.small.name}{some}"

    @property
    @override
    def language_model(self) -> Target | None:
        return self.small
