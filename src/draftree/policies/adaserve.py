"""AdaServe's selection: beams of all sequences under one node budget (arXiv 2501.12162).

Beam search drafts a tree for each sequence. Of each tree the nodes of the highest path probability
are taken until the sequence is expected to get the tokens that its deadline asks for. What is left
of the batch's budget goes to the nodes of the highest path probability of all sequences. The budget
is fixed for a machine; no cost model is used.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.kernels.score_ranking import rank_scores
from draftree.policies.base import Expand, Policy, append, fit, path_log_q, top
from draftree.tree import Tree, TreeBudget
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class AdaServe(Policy):
    """Choose the nodes to verify in two stages, as AdaServe does.

    First, each sequence gets its likeliest nodes until it expects `owed` tokens from the step. Then
    the likeliest remaining nodes of the whole batch fill the budget.

    In the paper the number of running sequences determines depth and width of the beam search, and
    a sequence's deadline determines `owed`. Here they are options that are equal for all sequences,
    because requests have no deadlines.

    Attributes:
        budget: largest number of drafted nodes that one pass verifies, over all sequences.
        owed: expected number of tokens per step that each sequence gets in the first stage. A step
            without drafts gives 1.
        most: largest number of nodes that a sequence gets in the first stage.
        depth: number of layers of the beam search.
        width: number of beams of each sequence.
    """

    budget: int = knob(64, least=1)
    owed: float = knob(1.0, least=1)
    most: int = knob(8, least=0)
    depth: int = knob(5, least=1, deepest=True)
    width: int = knob(4, least=1)

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        frontier = np.arange(tree.roots)
        while (frontier := room.expandable(tree, frontier, self.depth)).size:
            before, candidates = len(tree), expand(tree, frontier, self.width)
            score = path_log_q(tree, frontier, candidates)
            tree = append(tree, frontier, candidates, top(tree, frontier, score, self.width), score)
            frontier = np.arange(before, len(tree))
        tree = fit(tree, room.nodes)
        order, place = rank_scores(tree.row[tree.roots :], tree.score[tree.roots :])
        value = np.exp(tree.score[tree.roots :][order])
        first = place == 0
        ahead = (
            value.cumsum() - value
        )  # Σ value of the nodes before each one, first of all sequences, then of its own
        ahead = 1 + (ahead - ahead[first][first.cumsum() - 1]) if len(order) else ahead
        due = (ahead < self.owed) & (place < self.most)
        # What sequences are owed comes first, the best of each in turn; then the best of all.
        ranks = np.lexsort((order, -value, np.where(due, place, self.most + 1)))
        keep = np.zeros(len(tree), np.bool_)
        keep[: tree.roots] = True
        keep[tree.roots + order[ranks[: self.budget]]] = True
        return tree.select(keep)
