"""A small causal language model as drafter (Leviathan et al. 2022; EDD + PCT, section 4.1, calls a trained one VDM)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from draftree.drafters.base import Drafter, Method
from draftree.drafters.neural.language_model import Decoding, keep_path, propose, read, rewind
from draftree.errors import UserError
from draftree.models.decoder import one_layer
from draftree.models.target import Taps, Target
from draftree.sampling.drawing import Drawing
from draftree.tree import Candidates, Ints, Tree, Verdict


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
class LMDrafter(Drafter[Decoding]):
    """Drafts with a whole language model, which keeps a cache of its own.

    Args:
        model: driven as a target is, because it is fed just like one.
    """

    def __init__(self, model: Target) -> None:
        self.small = model

    @property
    def described(self) -> str:
        return f"lm {self.small.name}"

    def start(
        self, prompts: Sequence[Ints], roots: Ints, taps: Taps, state: Decoding | None = None, rows: Ints | None = None
    ) -> Decoding:
        return read(self.small, prompts, state, rows)

    @property
    def expands_paths(self) -> bool:
        return True

    def expand(self, state: Decoding, tree: Tree, frontier: Ints, k: int, drawing: Drawing) -> tuple[Candidates, Decoding]:
        return propose(self.small.decoder, state, tree, frontier, k, drawing)

    def commit(self, state: Decoding, tree: Tree, verdict: Verdict, taps: Taps) -> Decoding:
        return keep_path(state, tree, verdict)

    def truncate(self, state: Decoding, lengths: Ints, rows: Ints | None = None) -> Decoding:
        return rewind(state, lengths, rows)
