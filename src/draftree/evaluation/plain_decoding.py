"""A drafter and a policy that draft nothing: plain decoding under the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from draftree.acceptors.base import Acceptor
from draftree.costs.step_costs import Costs
from draftree.drafters.base import Drafter
from draftree.engine import Engine
from draftree.models.kv_cache import SlotCache
from draftree.policies.base import Expand, Policy
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, Target
from draftree.tree import AcceptResult, Candidates, Ints, Tree, TreeBudget, no_candidates


def plain_engine(target: Target, acceptor: Acceptor | None = None) -> Engine:
    """Return an engine for plain decoding, one token of each sequence per step.

    It uses the same scheduler as any other engine.
    """
    return Engine(target, _NoDrafts(), _NoTrees(), acceptor)


@final
class _NoDrafts(Drafter[int]):
    """Propose no candidates; the state is always 0."""

    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: int | None = None,
        rows: Ints | None = None,
    ) -> int:
        return 0

    def expand(
        self, state: int, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, int]:
        return no_candidates(len(frontier), k), 0

    def commit(
        self, state: int, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> int:
        return 0

    def truncate(self, state: int, lengths: Ints, rows: Ints | None = None) -> int:
        return 0

    def select(self, state: int, rows: Ints, cache: SlotCache) -> int:
        return 0


@final
@dataclass(frozen=True)
class _NoTrees(Policy):
    """Draft nothing, so that a step verifies only the roots."""

    prunes_on_draws = False

    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        return tree
