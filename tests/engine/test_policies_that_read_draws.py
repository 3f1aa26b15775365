"""A policy that looks at everything changes nothing under `match`, and spoils rejection.

docs/explanation/sampling-and-acceptance.md has the proof.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from test_exactness import ASKED, FAR, Asking, distance, law, tabled, wanted

from draftree.acceptors.match import Match
from draftree.acceptors.multiround import MultiRound
from draftree.acceptors.rejection import Rejection
from draftree.costs.step_costs import Costs
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.metrics import Work
from draftree.policies.base import Expand, Policy, append
from draftree.registry import check_exact
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.testing.fakes import Always, tiny_target
from draftree.tree import AcceptResult, Candidates, Draw, Tree, TreeBudget
from selection import one_in


@dataclass(frozen=True)
class Looking(Policy):
    """Drafts all there is, looks at it, and decides by what it sees.

    Attributes:
        keeps: of the candidates of a node those that are `unlikely`, of even `parity`, `unlike` the
            token accepted last; or `half` of all, by token and place.
    """

    keeps: Literal["unlikely", "parity", "unlike", "half"]
    depth: int = 2

    def start(self) -> int:
        return -1

    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        frontier = np.arange(tree.roots)
        while (frontier := room.expandable(tree, frontier, self.depth)).size:
            found, before = expand(tree, frontier, 2), len(tree)
            tree = append(tree, frontier, found, self._kept(tree, frontier, found, memory))
            frontier = np.arange(before, len(tree))
        return tree

    def _kept(self, tree: Tree, frontier: Any, found: Candidates, memory: int) -> Any:
        tokens, sum_ = (
            found.tokens,
            found.tokens + tree.tokens[frontier][:, None] + tree.depth[frontier][:, None],
        )
        return {
            "unlikely": found.log_q < found.log_q.max(axis=1, keepdims=True),
            "parity": tokens % 2 == 0,
            "unlike": tokens != memory,
            "half": sum_ % 2 == 0,
        }[self.keeps]

    def observe(
        self, memory: Any, tree: Tree, verdict: AcceptResult, work: Work, costs: Costs
    ) -> int:
        return int(verdict.bonus[0])


KINDS = ("unlikely", "parity", "unlike", "half")


@pytest.mark.parametrize(
    ("keeps", "draw"), one_in(2, KINDS, [Draw.COUPLED, Draw.WITH_REPLACEMENT]), ids=str
)
def test_the_distribution_is_the_targets_whatever_it_looks_at(keeps: Any, draw: Draw) -> None:
    rule = Match() if draw is Draw.COUPLED else Asking(Match(), draw)
    asked, depth = ASKED["t=1"], 2 - draw.is_sampled  # of draws there are many more outcomes
    assert law(Looking(keeps, depth), rule, tabled(FAR), asked) == pytest.approx(
        wanted(asked), abs=1e-12
    )


@pytest.mark.parametrize("rule", [Rejection(), MultiRound()], ids=str)
def test_rejection_is_refused_and_would_be_off(rule: Any) -> None:
    with pytest.raises(UserError, match="prunes on what was drawn; allowed: match"):
        check_exact(Looking("half"), rule)
    asked = ASKED["t=1"]
    off = max(
        distance(law(Looking(keeps, 1), rule, tabled(FAR), asked), wanted(asked))
        for keeps in ("half", "parity")
    )
    assert off > 0.01


@pytest.mark.parametrize("keeps", KINDS)
def test_a_drafter_that_knows_the_targets_own_choices_is_no_different(keeps: Any) -> None:
    """The text is plain decoding's for the seed, though drafts are right always and kept by their looks."""
    target = tiny_target()
    request = Request([3, 1, 4, 1, 5], 24)
    sampling = Sampling(1.2, seed=5)
    blank = Engine(
        target,
        Always([[]], target.decoder.vocab),
        Looking(keeps),
        Match(),
        Costs({1: 0.1}, {1: 1.0}),
    )
    plain = blank.plain([request], sampling).tokens
    knowing = Always([[*request.prompt, *plain[0]]], target.decoder.vocab)
    written = Engine(target, knowing, Looking(keeps), Match(), Costs({1: 0.1}, {1: 1.0})).write(
        [request], sampling
    )
    assert written.tokens == plain
    if keeps != "unlikely":
        assert 1.2 < written.stats.acceptance_length < 3.0, (
            "some of the right drafts were kept, and some were not"
        )
