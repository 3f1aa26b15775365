"""DyMax: a chain that stops at a token of low confidence (baseline of C2T's Table 3).

C2T names the criterion and the threshold, no more (section 5.5, Table 3). As in its own chain mode
(algorithm 1), the token below the threshold is not verified: it was drafted, and is dropped.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from draftree.policies.base import Layered, append, log
from draftree.tree import Candidates, Ints, Tree
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class DyMax(Layered):
    """The likeliest tokens in a row, while each is likely enough after the one before it.

    Attributes:
        threshold: the smallest q of a token (0.3 in the paper). The first token below it ends the
            chain and is not verified.
        length: largest number of tokens (10 in the paper).
    """

    candidates: ClassVar[int] = 1
    threshold: float = knob(0.3, least=0, most=1)
    length: int = knob(10, least=1, deepest=True)

    @override
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        return append(tree, frontier, candidates, candidates.log_q >= log(self.threshold))
