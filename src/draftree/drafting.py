"""One step's drafting: between a policy that asks for candidates and the drafter that is asked.

Shapes: F frontier nodes, K candidates, V vocabulary.
"""

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from draftree.boundary.phases import in_phase, phase
from draftree.costs.curves import Costs
from draftree.costs.timings import DraftStep, StepTimes
from draftree.drafters.base import Drafter
from draftree.models.target import Probes, Target, Verified
from draftree.models.unseen import Layers, Unseen, verified
from draftree.policies._unseen import Told, grow
from draftree.policies.base import Plan, Policy, Search
from draftree.rows import Rows
from draftree.sampling.drawing import Drawing, allowed
from draftree.stats import Work
from draftree.tree import Below, Candidates, Ints, Room, Tree, Verdict


@dataclass
class Drafting(Search):
    """Expands tree nodes through a drafter during one step: carries its state, and skips nodes whose next token is forced.

    Attributes:
        drafter: that is driven.
        state: its state.
        rows: that are drafted for.
        vocab: V.
        drawing: how it is to draw.
        frontiers: how many nodes each draft step was fed; what an earlier pass of the step has told is no further one.
        passed: nodes after which only one token can come, so that the drafter was not asked.
        finds: how often it was asked for what takes no pass.
        told: what it found while the host was not looking, where that is how the tree has grown.
        steps: the timings of the draft steps.
        find_seconds: of all retrievals.
    """

    drafter: Drafter[Any]
    state: Any
    rows: Rows
    vocab: int
    drawing: Drawing
    frontiers: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    finds: int = 0
    told: Told | None = None
    steps: list[DraftStep] = field(default_factory=list)
    find_seconds: float = 0.0

    def grow(self, policy: Policy, roots: Tree, costs: Costs, room: Room, memory: Any) -> Tree | Unseen:
        """The tree that a policy drafts, or where it can grow without the host one that the host has yet to be told of."""
        drafted = partial(policy.draft, self, roots, costs, room, memory)
        if (plan := self._plan(policy, roots, room)) is None:
            return drafted()
        depth = np.full(len(room.depth), -1)
        depth[roots.row] = room.depth[roots.row]
        if (layers := self._layers(plan, roots, depth)) is None:
            return drafted()

        def told(found: Told) -> Tree:
            self.told = found
            with phase("grow"):
                tree = drafted()
            self.state = layers.state(found.fed)
            return tree

        with phase("draft"):
            return grow(plan, layers, self.rows.last, depth, self.rows.cache.lengths, told)

    def _plan(self, policy: Policy, roots: Tree, room: Room) -> Plan | None:
        """The shape of a step's trees, where it is known and passes are recorded, and only likeliest tokens are asked for."""
        if not (self.rows.cache.ladder.few and self.rows.unconditional):
            return None
        plan, deepest = policy.plan, int(room.depth[roots.row].max())
        if plan is None or deepest < 1:
            return None
        if plan.nodes is not None:
            return replace(plan, nodes=min(plan.nodes, room.nodes))
        return plan if plan.drafted(min(plan.depth, deepest)) <= room.nodes else None

    @in_phase("draft")
    def _layers(self, plan: Plan, roots: Tree, depth: Ints) -> Layers | None:
        return self.drafter.layers(self.state, roots, np.minimum(depth, plan.depth))

    def verify(self, target: Target, grown: Tree | Unseen, probes: Probes | None) -> tuple[Tree, Verified]:
        """The target's pass over a tree; if the host had not seen that, it is told of both at once."""
        if isinstance(grown, Tree):
            return grown, target.verify(self.rows.cache, grown, self.drafter.needs, probes)
        assert probes is None, "a drafter of layers sends no probes"
        return verified(target, self.rows.cache, grown, self.drafter.needs)

    @in_phase("draft")
    def find(self, tree: Tree, frontier: Ints, k: int) -> Candidates | None:
        if self.rows.forced(tree, frontier) is not None:
            return None
        drawing, self.finds = self._drawing(tree, frontier), self.finds + 1
        start = time.perf_counter()
        found, self.state = self.drafter.find(self.state, tree, frontier, k, drawing)
        self.find_seconds += time.perf_counter() - start
        return None if found is None else self._allowed(found, drawing)

    @in_phase("draft")
    def below(self, tree: Tree, frontier: Ints, k: int, deepest: Ints) -> Below | None:
        if self.rows.steered:  # node by node
            return None
        start = time.perf_counter()
        found, self.state = self.drafter.below(self.state, tree, frontier, k, self.drawing, deepest)
        seconds = time.perf_counter() - start
        if found is not None and found.alone:
            self.frontiers.append(len(frontier))
            self.steps.append(DraftStep(len(frontier), seconds))
        elif found is not None:
            self.finds += 1
            self.find_seconds += seconds
        return found

    @property
    def searches(self) -> bool:
        return self.drafter.searches

    def passes(self, tree: Tree, frontier: Ints) -> int:
        return self.drafter.passes(self.state, tree, frontier)

    @property
    def ahead(self) -> int:
        return self.drafter.ahead

    @in_phase("draft")
    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        if (forced := self.rows.forced(tree, frontier)) is not None:
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
        if fed := self.passes(tree, frontier):
            self.frontiers.append(fed)
        drawing = self._drawing(tree, frontier)
        if self.told is None:
            start = time.perf_counter()
            candidates, self.state = self.drafter.expand(self.state, tree, frontier, k, drawing)
            if fed:
                self.steps.append(DraftStep(fed, time.perf_counter() - start))
        else:
            candidates = self.told(frontier)
        if not candidates.finite:
            what = "NaN or ∞ count as nothing found; check its weights and dtype"
            self.rows.warn(f"the drafter's output is not finite: {what} ({self.drafter.described})")
        return self._allowed(candidates, drawing)

    def _drawing(self, tree: Tree, frontier: Ints) -> Drawing:
        shaped = self.rows.guided(tree, frontier)
        return self.drawing if shaped is None else replace(self.drawing, shaped=shaped)

    def _allowed(self, candidates: Candidates, drawing: Drawing) -> Candidates:
        # Whoever has a whole q has sent its logits through them; what others found beside it has not been.
        if drawing.shaped is None or (candidates.logs is not None and candidates.sources is None):
            return candidates
        return allowed(candidates, drawing.shaped, self.vocab, self.rows.cache.device)

    @in_phase("draft")
    def commit(self, tree: Tree, verdict: Verdict, verified: Verified) -> None:
        kept = np.concatenate([verdict.kept(root) for root in range(tree.roots)])
        self.state = self.drafter.commit(self.state, tree, verdict, verified.taps.take(kept))

    @in_phase("draft")
    def probes(self) -> Probes | None:
        return self.drafter.probes(self.state)

    def times(self, work: Work, verdict: Verdict, target: float, commit: float, seconds: float) -> StepTimes:
        """Return the timings of the step, once it is over.

        Args:
            work: what it asked of the models.
            verdict: what was accepted.
            target: seconds of the target's pass and of the acceptance.
            commit: seconds of the drafter's commit.
            seconds: of the whole step.
        """
        return StepTimes(
            context=work.context,
            sequences=work.rows,
            tokens=work.fed,
            target=target,
            drafts=tuple(self.steps),
            finds=self.finds,
            find=self.find_seconds,
            commit=commit,
            seconds=seconds,
            gained=sum(map(len, verdict.paths)) + work.rows,
            prompt_read=bool(self.frontiers) and self.rows.read_by_drafter(),
        )
