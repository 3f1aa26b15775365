"""A policy that pauses at fixed steps, to test steps that run without the drafter."""

from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.metrics import Work
from draftree.policies.base import Expand, Policy
from draftree.tree import AcceptResult, Tree, TreeBudget

PERIOD, PAUSE = 7, 4
"""Of every `PERIOD` steps the last `PAUSE` run without the drafter."""


@final
@dataclass(frozen=True)
class Pausing(Policy):
    """Grows the trees of another policy, and pauses for some steps again and again.

    Its memory is the number of steps, and the memory of the other policy.

    Attributes:
        policy: the other policy.
    """

    policy: Policy

    @property
    @override
    def prunes_on_draws(self) -> bool:
        return self.policy.prunes_on_draws

    @override
    def start(self) -> tuple[int, Any]:
        return 0, self.policy.start()

    @override
    def pauses(self, memory: Any, rows: int) -> bool:
        return bool(memory[0] % PERIOD >= PERIOD - PAUSE)

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        if self.pauses(memory, tree.roots):
            return tree
        return self.policy.draft(expand, tree, costs, room, memory[1])

    @override
    def observe(
        self, memory: Any, tree: Tree, verdict: AcceptResult, work: Work, costs: Costs
    ) -> tuple[int, Any]:
        steps, inner = memory
        if not self.pauses(memory, work.rows):
            inner = self.policy.observe(inner, tree, verdict, work, costs)
        return steps + 1, inner
