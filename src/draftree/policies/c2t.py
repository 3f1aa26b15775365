"""C2T: a small classifier decides, layer by layer, which candidates are worth verifying (C2T, section 4).

The joint probability of a node is no reliable estimate of its acceptance: at high entropy the likeliest token is accepted
more often than its probability says, at low entropy less often, and deep nodes less often than shallow ones. A net of two
layers reads all three (eq. 4). Candidates below a threshold never enter the tree, so that nothing is drafted behind them.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, final

import numpy as np

from draftree.costs import Costs
from draftree.errors import UserError
from draftree.policies._classifier import Classifier
from draftree.policies.base import Layered, added, append, path_log_q, top
from draftree.target import demo_folder
from draftree.tree import Candidates, Ints, Tree


@final
@dataclass(frozen=True)
class C2T(Layered):
    """Classifier-based tree (algorithm 1).

    Attributes:
        beta: a candidate of a smaller confidence is left out (0.2 to 0.9 in the paper, mostly 0.5). A confidence is no
            probability of acceptance: the classifier learnt from three rejected nodes for each accepted one, where whole
            trees have about 190 (the demo's), so 0.5 says 1.6 %. The paper does not tell its ratio: the same β is another.
        width: the likeliest candidates after each node that the classifier sees (the first TopK of section 4.2.2; 15).
        layer_top: at most so many nodes of a layer stay, the most confident (the second TopK; 15); none for all.
        depth: layers (10 in the paper).
        classifier: its folder, as `draftree train c2t` writes it; the shipped one by default.
        chain: only the likeliest candidate is looked at, and drafting ends at the first that is left out (section 5.5).
        raw: which features are those of q itself where it is conditioned on the target's noise (`match` above temperature
            0): P, H, both (P+H), or none. Candidates are chosen by the conditioned q, whatever the classifier reads.
    """

    beta: float = 0.5
    width: int = 15
    layer_top: int | None = 15
    depth: int = 10
    classifier: str = ""
    chain: bool = False
    raw: Literal["none", "P", "H", "P+H"] = "none"

    def __post_init__(self) -> None:
        least = {"width": self.width, "depth": self.depth, "layer_top": 1 if self.layer_top is None else self.layer_top}
        if min(least.values()) < 1:
            got = ", ".join(f"{name}={value}" for name, value in least.items())
            raise UserError(f"c2t: got {got}; allowed are at least 1, and none for layer_top")
        if not 0 <= self.beta <= 1:
            raise UserError(f"c2t: beta is {self.beta}, allowed is a number in [0, 1]")
        _ = self.net  # a folder that is wrong is told at once

    @cached_property
    def net(self) -> Classifier:
        """The classifier."""
        return Classifier.load(Path(self.classifier) if self.classifier else demo_folder("c2t"))

    @property
    def deepest(self) -> int:
        return self.depth

    @property
    def candidates(self) -> int:
        return 1 if self.chain else self.width

    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates, costs: Costs) -> tuple[Tree, Ints]:
        plain = candidates if self.raw == "none" else candidates.raw
        p, h = (plain if name in self.raw else candidates for name in ("P", "H"))
        score = path_log_q(tree, frontier, p)
        entropy = h.entropy(self.net.entropy_top) if self.net.reads_entropy else np.zeros(len(frontier))
        depth = tree.depth[frontier].astype(np.float64) + 1
        confidence = self.net.confidence(score, entropy[:, None], depth[:, None])
        keep = (confidence >= self.beta) & (candidates.log_q > -np.inf)
        if self.layer_top is not None:
            keep &= top(tree, frontier, np.where(keep, confidence, -np.inf), self.layer_top)
        grown = append(tree, frontier, candidates, keep, score, entropy)
        return grown, added(tree, grown, self.depth)
