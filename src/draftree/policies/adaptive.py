"""vLLM's adaptive verification: chains, cut so that the batch gains the most tokens per second.

The survival of a token is the product of the estimated acceptances along its chain. All tokens of
the batch are ranked by survival, and the first of them are verified, as many as maximise the
expected tokens per second (vllm-project/vllm#47808). Acceptance is estimated by a logistic
regression on the log-odds of q that learns from every verification, in place of a confidence head
(vllm-project/vllm#52228).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.metrics import Work
from draftree.online_logistic import Logistic
from draftree.policies.base import Expand, Policy, append, fit
from draftree.tree import AcceptResult, Floats, Ints, Tree, TreeBudget
from draftree.utils.validated_dataclass import knob

MIN_DISTANCE = 1e-4
"""Smallest distance from 0 and 1 to which q is clipped."""
PRIOR_ACCEPTANCE = Logistic.around(0, 1, prior=10.0)
"""Estimate of acceptance before the first verification: q itself."""


@final
@dataclass(frozen=True)
class Adaptive(Policy):
    """Draft a chain for every sequence, and verify the most promising tokens of the whole batch.

    As many tokens are verified as maximise the expected tokens per second. vLLM estimates
    acceptance from earlier steps, so that it knows the size of a pass before it drafts. Here
    acceptance is estimated from q of the step's own drafts.

    Attributes:
        length: number of tokens drafted for each sequence before the cut (7 in vLLM's examples).
    """

    reads_costs: ClassVar[bool] = True
    length: int = knob(7, least=1, deepest=True)

    @override
    def start(self) -> Logistic:
        return PRIOR_ACCEPTANCE

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        frontier, seconds = np.arange(tree.roots), costs.catch_up
        while (frontier := room.expandable(tree, frontier, self.length)).size:
            before, candidates = len(tree), expand(tree, frontier, 1)
            survival = tree.score[frontier][:, None] + np.log(memory(_features(candidates.log_q)))
            tree = append(tree, frontier, candidates, score=survival)
            seconds += costs.draft_seconds(len(frontier) / tree.roots)
            frontier = np.arange(before, len(tree))
        tree = fit(tree, room.nodes)
        order = tree.roots + np.argsort(-tree.score[tree.roots :], kind="stable")
        expected = tree.roots + np.concatenate(([0.0], np.exp(tree.score[order]).cumsum()))
        passes = costs.targets(1 + np.arange(len(order) + 1) / tree.roots)
        count = int(np.argmax(expected / (seconds + passes)))
        keep = np.zeros(len(tree), np.bool_)
        keep[: tree.roots] = True
        keep[order[:count]] = True
        return tree.select(keep)

    @override
    def observe(
        self, memory: Any, tree: Tree, verdict: AcceptResult, work: Work, costs: Costs
    ) -> Logistic:
        accepted = np.zeros(len(tree), np.bool_)
        accepted[: tree.roots] = True
        accepted[np.concatenate(verdict.paths)] = True
        judged: Ints = np.flatnonzero((tree.parents >= 0) & accepted[tree.parents])
        learnt: Logistic = (
            memory.learn(_features(tree.log_q[judged]), accepted[judged]) if judged.size else memory
        )
        return learnt


def _features(log_q: Floats) -> Floats:
    """Return the features […, 2] of q […]: 1 and the log-odds of q."""
    q = np.clip(np.exp(log_q), MIN_DISTANCE, 1 - MIN_DISTANCE)
    return np.stack((np.ones_like(q), np.log(q / (1 - q))), axis=-1)
