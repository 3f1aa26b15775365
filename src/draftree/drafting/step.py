"""Drafting in one step: pass requests for candidates from the policy to the drafter.

Shapes: F frontier nodes, K candidates, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.costs.step_timings import DraftStep, StepTimes
from draftree.drafters.base import Drafter
from draftree.drafting.states import DrafterFault, raises, stop_drafting
from draftree.errors import UserError
from draftree.metrics import Work
from draftree.models.forward_batch import Chunk
from draftree.models.graph_capture import Capture, EagerCapture
from draftree.policies._device_growth import DeviceGrowth, Outlook, grow
from draftree.policies.base import Policy, RetrievalExpand
from draftree.sampling.draft_sampling import (
    Drawing,
    drop_forbidden,
    insert_empty_candidates,
    insert_forced_tokens,
)
from draftree.target.device_tree import DeviceReport, DeviceTree, Layers, verify_device_tree
from draftree.target.target import HiddenStates, Probes, Target, VerificationResult
from draftree.tree import (
    AcceptResult,
    Candidates,
    Ints,
    SubtreeCandidates,
    Tree,
    TreeBudget,
    of_rows,
)
from draftree.utils.device_clock import DeviceClock, clock_of
from draftree.utils.profiler import in_phase, phase

T = TypeVar("T")
RECENT, LATEST = 8, 2
"""Numbers of recent steps from which the next tree is planned.

The trees of the last `RECENT` steps bound its size, and those of the last `LATEST` its depth.
"""


@dataclass
class Drafting(RetrievalExpand):
    """Expands tree nodes through a drafter during one step.

    It holds the drafter's state, and does not call the drafter for nodes whose next token is
    forced.

    If the drafter raises an exception for some sequences, these are generated without drafts to
    their end. The step's drafting starts again with the other sequences, which are not affected.

    Attributes:
        drafter: the drafter.
        state: the drafter's state.
        rows: the batch of sequences that are drafted for.
        vocab: V, the size of the vocabulary.
        drawing: how draft tokens are sampled.
        capture: runs captured passes (CUDA graphs) that are not passes of models.
        frontiers: the number of nodes that each draft step read. Layers that an earlier pass of the
            step has already computed are not counted.
        passed: nodes after which only one token is allowed, so that the drafter was not called.
        finds: the number of retrievals, which take no forward pass.
        layers: the drafter's passes, if the tree is grown on the device.
        steps: the timings of the draft steps.
        drafted: time by the host's clock at which the device finished all draft steps; None if the
            tree was grown on the host.
        find_seconds: total seconds of all retrievals.
    """

    drafter: Drafter[Any]
    state: Any
    rows: SequenceBatch
    vocab: int
    drawing: Drawing
    capture: Capture = field(default_factory=EagerCapture)
    frontiers: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    finds: int = 0
    layers: Layers | None = None
    steps: list[DraftStep] = field(default_factory=list)
    find_seconds: float = 0.0
    drafted: float | None = None

    def __post_init__(self) -> None:
        """Select the clock that measures work on the device."""
        self._clock: DeviceClock = clock_of(self.rows.cache.device)
        self._marks, self._recordings = list[Any](), self.capture.recordings

    def _mark(self) -> None:
        """Record an event on the device, after all work that has been queued so far."""
        self._marks.append(self._clock.mark())

    def grow(
        self, policy: Policy, roots: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree | DeviceTree:
        """Return the tree that a policy drafts.

        If the tree can grow without the host, it is still on the device (`DeviceTree`).
        """
        before, again = self.state, False
        while not self.rows.undrafted.issuperset(roots.row.tolist()):
            if self.rows.undrafted:
                depth = room.depth.copy()
                depth[list(self.rows.undrafted)] = 0
                room = replace(room, depth=depth)
            try:
                grown = self._grow(policy, roots, costs, room, memory)
                self._check(grown)
                return grown
            except DrafterFault as fault:
                new = [row for row in fault.rows if row not in self.rows.undrafted]
                fault.rows, again = new or roots.row.tolist() * again, True
                stop_drafting(self.rows, self.drafter, fault)
            self.state = before
            self.layers = None
            self.finds = 0
            self.find_seconds = 0.0
            for begun in (self.frontiers, self.passed, self.steps, self._marks):
                begun.clear()
        return roots

    def _grow(
        self, policy: Policy, roots: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree | DeviceTree:
        recorded = self.rows.captured_token_choice(self.drawing.kind, self.vocab)
        if (
            recorded is not None
            and (plan := self._plan(policy, roots, costs, room, memory)) is not None
        ):
            depth = np.full(len(room.depth), -1)
            depth[roots.row] = room.depth[roots.row]
            if plan.first is not None:
                depth[np.setdiff1d(roots.row, plan.first)] = 0
            self._mark()
            self.layers = self._layers(plan, roots, depth)
            if self.layers is not None:
                known = self.rows.cache.lengths, recorded, self.rows.noise
                with phase("draft"):
                    try:
                        return grow(plan, self.layers, self.rows.last, depth, *known, self._mark)
                    except Exception as error:
                        raise DrafterFault(roots.row.tolist(), error) from error
        return policy.draft(self, roots, costs, room, memory)

    def _plan(
        self, policy: Policy, roots: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> DeviceGrowth | None:
        """Return the plan by which the step's trees grow on the device, or None.

        It is None if the policy needs the host.
        """
        deepest = int(room.depth[roots.row].max())
        plan = (
            policy.plan_step(_outlook(self.rows, roots, costs, room, memory))
            if deepest > 0
            else None
        )
        if plan is None:
            return None
        if plan.nodes is not None:
            return replace(plan, nodes=min(plan.nodes, room.nodes))
        return plan if plan.max_drafted_nodes(min(plan.depth, deepest)) <= room.nodes else None

    @in_phase("draft")
    def _layers(self, plan: DeviceGrowth, roots: Tree, depth: Ints) -> Layers | None:
        try:
            return self.drafter.layers(self.state, roots, np.minimum(depth, plan.depth))
        except Exception:  # the host's calls determine the failing sequences
            return None

    def _check(self, grown: Tree | DeviceTree) -> None:
        """Raise `DrafterFault` if a token id of a tree on the host is outside of the vocabulary."""
        if (
            isinstance(grown, Tree)
            and not 0 <= grown.tokens.min() <= grown.tokens.max() < self.vocab
        ):
            wrong = np.flatnonzero((grown.tokens < 0) | (grown.tokens >= self.vocab))
            told = f"it drafted token id {grown.tokens[wrong[0]]}, allowed are 0 … {self.vocab - 1}"
            raise DrafterFault(np.unique(grown.row[wrong]).tolist(), UserError(told))

    def _ask(self, call: Callable[[Ints], T], tree: Tree, frontier: Ints) -> T:
        """Call the drafter for the nodes of a frontier, and return its result.

        If the call raises, it is repeated for each sequence alone, to find those that make it fail.

        Args:
            call: function from node indices [F] to the drafter's result.
            tree: the draft trees of the batch.
            frontier: [F] indices of the nodes.

        Raises:
            DrafterFault: the call for all nodes raised. The fault names the sequences for which the
                call alone raises too; there may be none.
        """
        try:
            return call(frontier)
        except Exception as error:
            owners = tree.row[frontier]
            rows = [
                row
                for row in np.unique(owners).tolist()
                if raises(partial(call, frontier[owners == row]))
            ]
            raise DrafterFault(rows, error) from error

    def verify(
        self,
        target: Target,
        grown: Tree | DeviceTree,
        probes: Probes | None,
        chunks: Sequence[Chunk] = (),
    ) -> tuple[Tree, VerificationResult]:
        """Return the tree and the results of the target's pass over it.

        If the tree is still on the device, the host reads the tree and the results together.

        Args:
            target: the target.
            grown: the tree.
            probes: extra tokens that the target reads in the same pass.
            chunks: parts of prompts that the target reads in the same pass.
        """
        if isinstance(grown, Tree):
            return grown, target.verify(self.rows.cache, grown, self.drafter.needs, probes, chunks)
        assert probes is None, "a drafter of layers sends no probes"
        assert not chunks, "passes that are recorded read no prompts"
        assert self.layers is not None
        told, found = verify_device_tree(
            target, self.rows.cache, grown, self.drafter.needs, self._mark
        )
        self._record_draft_seconds(told, self.layers.each_node)
        self.state = self.layers.state(told.fed)
        self._check_finite(told.finite)
        return told.tree, found

    def _record_draft_seconds(self, told: DeviceReport, each_node: bool) -> None:
        """Record the device time of each draft step, after the host has waited for the device.

        Layers that consist only of padding are not counted.
        """
        now, seconds = (
            time.perf_counter(),
            [self._clock.seconds(*pair) for pair in pairwise(self._marks)],
        )
        self.drafted = now - seconds[-1]
        for fed, took in zip(told.fed, seconds[:-1], strict=True):
            if count := int((fed >= 0).sum()):
                self.frontiers.append(count if each_node else told.tree.roots)
                self.steps.append(DraftStep(self.frontiers[-1], took))

    @in_phase("draft")
    @override
    def find(self, tree: Tree, frontier: Ints, k: int) -> Candidates | None:
        open_ = self.rows.forced_tokens(tree, frontier) < 0
        if not open_.any():
            return None
        asked, self.finds = frontier[open_], self.finds + 1
        drawing, start = self._drawing(tree, asked), time.perf_counter()
        call = lambda nodes: self.drafter.find(
            self.state, tree, nodes, k, self._drawing_of(tree, nodes, asked, drawing)
        )
        found, self.state = self._ask(call, tree, asked)
        self.find_seconds += time.perf_counter() - start
        if found is None:
            return None
        return insert_empty_candidates(self._drop_forbidden(found, drawing), open_)

    @in_phase("draft")
    @override
    def below(self, tree: Tree, frontier: Ints, k: int, deepest: Ints) -> SubtreeCandidates | None:
        if self.rows.is_constrained:  # node by node
            return None
        start = time.perf_counter()
        ask = lambda nodes: self.drafter.below(self.state, tree, nodes, k, self.drawing, deepest)
        found, self.state = self._ask(ask, tree, frontier)
        seconds = time.perf_counter() - start
        if found is not None and found.alone:
            self.frontiers.append(len(frontier))
            self.steps.append(DraftStep(len(frontier), seconds))
        elif found is not None:
            self.finds += 1
            self.find_seconds += seconds
        return found

    @property
    @override
    def searches(self) -> bool:
        return self.drafter.searches

    @override
    def passes(self, tree: Tree, frontier: Ints) -> int:
        return self._ask(partial(self.drafter.passes, self.state, tree), tree, frontier)

    @property
    @override
    def ahead(self) -> int:
        return self.drafter.ahead

    @in_phase("draft")
    @override
    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        forced = self.rows.forced_tokens(tree, frontier)
        open_ = forced < 0
        self.passed += frontier[~open_].tolist()
        if not open_.any():
            return Candidates(forced[:, None], np.zeros((len(frontier), 1)))
        found = self._request_candidates(tree, frontier[open_], k)
        return found if open_.all() else insert_forced_tokens(found, forced)

    def _request_candidates(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        """Return the drafter's candidates after each node of the frontier.

        Ancestors of the frontier that the grammar forced were added without the drafter, so the
        drafter reads them first.
        """
        above = np.array([n for n in self.passed if tree.ancestors[frontier, n].any()], np.int64)
        self.passed = [n for n in self.passed if n not in above]
        # The drafter must read a forced token before it drafts below that token.
        if self.drafter.expands_paths:
            return self._expand(tree, np.concatenate((above, frontier)), k).last(len(frontier))
        for depth in np.unique(tree.depth[above]) if above.size else ():
            self._expand(tree, above[tree.depth[above] == depth], 1)
        return self._expand(tree, frontier, k)

    def _expand(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        if fed := self.passes(tree, frontier):
            self.frontiers.append(fed)
        drawing = self._drawing(tree, frontier)
        start = time.perf_counter()
        call = lambda nodes: self.drafter.expand(
            self.state, tree, nodes, k, self._drawing_of(tree, nodes, frontier, drawing)
        )
        candidates, self.state = self._ask(call, tree, frontier)
        if fed:
            self.steps.append(DraftStep(fed, time.perf_counter() - start))
        self._check_finite(candidates.finite)
        return self._drop_forbidden(candidates, drawing)

    def _check_finite(self, finite: bool) -> None:
        if not finite:
            what = "NaN or ∞ count as nothing found; check its weights and dtype"
            self.rows.warn(
                f"the drafter's output is not finite: {what} ({self.drafter.description})"
            )

    def _drawing(self, tree: Tree, frontier: Ints) -> Drawing:
        shaped = self.rows.draft_guide(tree, frontier)
        return self.drawing if shaped is None else replace(self.drawing, shaped=shaped)

    def _drawing_of(self, tree: Tree, nodes: Ints, frontier: Ints, drawing: Drawing) -> Drawing:
        return drawing if nodes is frontier else self._drawing(tree, nodes)

    def _drop_forbidden(self, candidates: Candidates, drawing: Drawing) -> Candidates:
        # A whole q comes from logits that went through the processors; other candidates have
        # not been.
        if drawing.shaped is None or (candidates.logs is not None and candidates.sources is None):
            return candidates
        return drop_forbidden(candidates, drawing.shaped, self.vocab, self.rows.cache.device)

    @in_phase("draft")
    def commit(self, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates) -> None:
        """Pass the accept result to the drafter, for the sequences that it drafts for.

        Args:
            tree: the verified tree.
            verdict: the accept result.
            hidden_states: the target's hidden states of all nodes.
        """
        rows = [row for row in tree.row[: tree.roots].tolist() if row not in self.rows.undrafted]
        if not rows:
            return
        try:
            self.state = self._commit(tree, verdict, hidden_states, rows)
        except Exception as error:
            failed = list[int]()
            for row in rows:
                try:
                    self.state = self._commit(tree, verdict, hidden_states, [row])
                except Exception:
                    failed.append(row)
            stop_drafting(self.rows, self.drafter, DrafterFault(failed, error))

    def _commit(
        self, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates, rows: list[int]
    ) -> Any:
        kept = verdict.nodes
        if len(rows) < tree.roots:
            kept = kept[np.isin(tree.row[kept], rows)]
            hidden_states, (tree, verdict) = (
                hidden_states.of_rows(tree, rows),
                of_rows(tree, verdict, rows),
            )
        return self.drafter.commit(self.state, tree, verdict, hidden_states.take(kept))

    @in_phase("draft")
    def probes(self) -> Probes | None:
        """Return the drafter's extra tokens for the verification pass, if there are any."""
        rows = self.rows.live.tolist()
        if self.rows.undrafted.issuperset(rows):
            return None
        try:
            return self.drafter.probes(self.state)
        except Exception as error:
            stop_drafting(self.rows, self.drafter, DrafterFault(rows, error))
            return None

    def times(
        self,
        work: Work,
        verdict: AcceptResult,
        target: float,
        commit: float,
        seconds: float,
        beside: int = 0,
    ) -> StepTimes:
        """Return the timings of the step, after it has ended.

        Args:
            work: the work of the models in the step.
            verdict: the accept result.
            target: seconds of the target's pass and of the acceptance.
            commit: seconds of the drafter's commit.
            seconds: seconds of the whole step.
            beside: number of prompt tokens that the same target pass read.
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
            prompt_read=bool(self.frontiers) and self.rows.mark_read_by_drafter(),
            recorded=self.capture.recordings > self._recordings,
            beside=beside,
        )


def _outlook(
    rows: SequenceBatch, roots: Tree, costs: Costs, room: TreeBudget, memory: Any
) -> Outlook:
    """Return the information on a step that is known before it drafts.

    It consists of costs, bounds, the policy's memory, and the sizes of recent trees.
    """
    live = len(rows.live)
    steps, work = rows.stats.steps[-RECENT * live :], rows.stats.work[-RECENT:]
    fed = [-(-count // each.rows) for each in work for count in each.frontiers]
    depth = max(
        (s.depth for s in steps[-LATEST * live :]), default=0
    )  # one layer too many costs a pass
    nodes = max((s.nodes for s in steps), default=0)
    return Outlook(costs, roots, room, memory, depth, nodes, max(fed, default=0))
