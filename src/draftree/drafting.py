"""One step's drafting, between a policy that asks for candidates and the drafter that is asked.

Shapes: F frontier nodes, K candidates, V vocabulary.
"""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from draftree.drafters.base import Drafter
from draftree.errors import DraftreeWarning
from draftree.models.target import Probes, Verified
from draftree.rows import Texts
from draftree.sampling.drawing import Drawing, allowed
from draftree.tree import Candidates, Draw, Ints, Tree, Verdict


@dataclass
class Drafting:
    """A drafter in the middle of a text: the one place where its state is carried from call to call.

    Attributes:
        drafter: that is driven.
        state: its state.
        texts: the rows that are drafted for.
        vocab: V.
        drawing: how it is to draw in this step.
        frontiers: how many nodes each of this step's draft steps was fed.
        passed: nodes of this step after which only one token can come, so that the drafter was not asked.
        told: whether it was said that the drafter's output is not finite.
    """

    drafter: Drafter[Any]
    state: Any
    texts: Texts
    vocab: int
    drawing: Drawing = field(default_factory=Drawing)
    frontiers: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    told: bool = False

    def begin(self, draw: Draw) -> None:
        self.drawing, self.frontiers, self.passed = self.texts.drawing(draw), [], []

    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        if (forced := self.texts.forced(tree, frontier)) is not None:
            self.passed += frontier.tolist()
            return Candidates(forced, np.zeros(forced.shape))
        above = np.array([n for n in self.passed if tree.ancestors[frontier, n].any()], np.int64)
        self.passed = [n for n in self.passed if n not in above]
        if self.drafter.expands_paths:  # what goes on below a forced token has to have read it
            return self._expand(tree, np.concatenate((above, frontier)), k).last(len(frontier))
        for depth in np.unique(tree.depth[above]):
            self._expand(tree, above[tree.depth[above] == depth], 1)
        return self._expand(tree, frontier, k)

    def _expand(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        self.frontiers.append(len(frontier))
        shaped = self.texts.guided(tree, frontier)
        drawing = self.drawing if shaped is None else replace(self.drawing, shaped=shaped)
        candidates, self.state = self.drafter.expand(self.state, tree, frontier, k, drawing)
        if not candidates.finite and not self.told:
            self.told = True
            what = "NaN or ∞ count as nothing found; check its weights and dtype"
            warnings.warn(
                f"the drafter's output is not finite: {what} ({self.drafter.described})", DraftreeWarning, stacklevel=1
            )
        # Whoever has a whole q has sent its logits through them; what others found beside it has not been.
        if shaped is None or (candidates.log_probs is not None and candidates.sources is None):
            return candidates
        return allowed(candidates, shaped, self.vocab, self.texts.cache.device)

    def commit(self, tree: Tree, verdict: Verdict, verified: Verified) -> None:
        kept = np.concatenate([verdict.kept(root) for root in range(tree.roots)])
        self.state = self.drafter.commit(self.state, tree, verdict, verified.taps.take(kept))

    def probes(self) -> Probes | None:
        return self.drafter.probes(self.state)
