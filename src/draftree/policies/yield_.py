"""draftree's own: the tree with the most tokens per second by measured costs (docs/explanation/cost-based-trees.md).

A step that drafts a tree is worth 1 + Σ value tokens and costs C seconds. Where λ is the rate at
which tokens come at present, maximising 1 + Σ value − λ · C in every step maximises tokens per
second over the whole run. So a node is verified if its value exceeds λ times what it adds to sₜ,
and another layer is drafted while the tokens that it may be expected to add are worth λ · sₐ and
more. Values are products of conditional acceptances, calibrated on what was accepted.

Shapes: R rows, N nodes, F frontier nodes, K candidates, M nodes learnt from, X features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.kernels.acceptance_calibration import (
    RetrievalNote,
    calibration_examples,
    outcomes,
    values,
)
from draftree.kernels.node_selection import (
    DraftPrice,
    DraftSuccess,
    PassPrice,
    promising,
    select_nodes,
    worth_expanding,
)
from draftree.metrics import Work
from draftree.online_logistic import Logistic
from draftree.policies._device_growth import DeviceGrowth, Outlook
from draftree.policies._device_yield import Prices, YieldPlan
from draftree.policies._pausing import Trials
from draftree.policies.base import ZEROS, Expand, Policy, RetrievalExpand, append, best, fit, top
from draftree.tree import AcceptResult, Bools, Candidates, Floats, Ints, Tree, TreeBudget
from draftree.utils.validated_dataclass import knob

RATE_DECAY = 1 / 128
"""Weight of one step in the running sums from which the rate is computed."""
PRIOR_PASSES = 8.0
"""Number of plain decoding passes by which the rate is initialised."""
SUCCESS_WEIGHT = 0.1
"""Weight of the newest step in the moving mean of recent success."""
INITIAL_SUCCESS = 0.6
"""Initial value of the moving mean of recent success.

Success is the fraction of accepted nodes after which some draft is accepted.
"""
MAX_FRONTIER_NODES = 32
"""Largest number of nodes of a sequence that are expanded in one layer."""
ONE_PASS_WIDTH_FACTOR = 4
"""Factor for the number of candidates per node if one pass predicts many layers.

More candidates then need no further pass.
"""
MAX_LOOKAHEAD_NODES = 64
"""Largest number of further nodes over which the cost of one node is averaged."""
INITIAL_REGRET_BUDGET, MAX_REGRET_BUDGET = 3.0, 12.0
"""Regret budget of a single sequence, in target passes: the initial and the largest value.

`MAX_REGRET_BUDGET` bounds the budget however much drafting has gained. A batch of R sequences begins with
`INITIAL_REGRET_BUDGET` / √R, because a pass over R sequences teaches R times as much, and the sequences of a batch
end after as few passes as one alone.
"""
UNREAD_ENTROPY = -1.0
"""Stands for the entropy of a q that has not been computed."""
MIN_DISTANCE = 1e-4
"""Smallest distance from 0 and 1 to which draft probabilities are clipped."""
SUCCESS_PRIOR_WEIGHT, RETRIEVAL_PRIOR_WEIGHT = 2.0, -2.5
"""Prior weights in the log-odds that the model's own draft is accepted.

`SUCCESS_PRIOR_WEIGHT` is the weight of recent success, half of the weight with which the estimate would be the
recent success itself. `RETRIEVAL_PRIOR_WEIGHT` is the weight of the share of a node's value that retrieval has
already found.
"""
NO_SOURCES = np.zeros((0, 0), np.int64)
"""Stands for the sources of candidates that all have the same source."""
NO_HITS = RetrievalNote(np.zeros(0, np.int64), np.zeros(0), NO_SOURCES)
"""Note of a tree in which no node with retrieval hits was expanded by a model."""
PRIOR_ACCEPTANCE = Logistic.around(0, 1, 1, 0, 0, prior=10.0)
"""Initial estimate of the acceptance of drafts: q itself."""
PRIOR_REACH = Logistic.around(
    np.log(INITIAL_SUCCESS / (1 - INITIAL_SUCCESS)),
    0,
    0,
    SUCCESS_PRIOR_WEIGHT,
    RETRIEVAL_PRIOR_WEIGHT,
    prior=3.0,
)
"""Initial estimate of the acceptance of a model's own drafts."""


@dataclass(frozen=True)
class Learned:
    """Store what the policy has learnt in a run: tokens and time, acceptance, and regret budget.

    Attributes:
        gained: number of passes that plain decoding would have needed for the generated tokens;
            recent steps count more.
        spent: time in which these tokens were generated, in units of one pass of plain decoding.
        acceptance: models of the probability that a node is accepted if its parent was, keyed by
            the source of the draft; see `calibration_examples`.
        reach: a model of the probability that expanding an accepted node yields an accepted child
            that retrieval had not found; see `outcomes`.
        recent: the fraction of recent steps with a draft pass in which a draft of the model was
            accepted.
        beyond: mean number of accepted nodes in a row that follow an accepted draft of the model
            without a further expansion by the model (they come from retrieval).
        regret_budget: number of target passes by which the run may still fall behind plain
            decoding; None before the first step. It begins with `INITIAL_REGRET_BUDGET` / √R. In
            addition, trial drafts (probes) may take the share `Yield.probe` of the time. By the
            costs, no run is slower than plain decoding by more than both together.
        idle: number of steps without a draft pass. A draft pass sets it to 0 if no draft of the
            model was accepted. Otherwise it is kept, so that a successful trial draft is followed
            by another.
        trials: whether drafting pays by batch size, all of the drafter's and the policy's work
            included. Where it does not, steps run without drafts for a while.
    """

    gained: float = 0.0
    spent: float = 0.0
    acceptance: Mapping[int, Logistic] = field(default_factory=dict)
    reach: Logistic = field(default_factory=lambda: PRIOR_REACH)
    recent: float = INITIAL_SUCCESS
    beyond: float = 0.0
    regret_budget: float | None = None
    idle: float = 0.0
    trials: Trials = field(default_factory=Trials)

    def remaining_regret(self, rows: int) -> float:
        """Return how many target passes drafting may still lose.

        Before the first step it is the initial credit, which depends on the number of sequences.
        """
        return (
            INITIAL_REGRET_BUDGET / rows**0.5 if self.regret_budget is None else self.regret_budget
        )

    def calibration(self, source: int) -> Logistic:
        """Return the model of acceptance for a source's drafts; initially the estimate is q."""
        return self.acceptance.get(source, PRIOR_ACCEPTANCE)

    @cached_property
    def success(self) -> DraftSuccess:
        """Return what is known of the success of draft steps."""
        return DraftSuccess(self.reach.weights, self.recent - INITIAL_SUCCESS, self.beyond)

    def weights(self, sources: int) -> Floats:
        """Return the weights [S, X] of the models of acceptance of sources 0, 1, …, S − 1."""
        return np.array([self.calibration(source).weights for source in range(sources)])

    def rate(self, costs: Costs, rows: int) -> float:
        """Return λ in tokens per second: the rate of plain decoding times the gain over it so far.

        It is at least the rate of plain decoding.
        """
        return (
            max((self.gained + PRIOR_PASSES) / (self.spent + PRIOR_PASSES), 1.0)
            * rows
            / costs.token
        )


@final
@dataclass(frozen=True)
class Yield(Policy):
    """The tree that gains the most tokens for its time.

    Attributes:
        width: number of candidates after each expanded node; four times as many if one pass
            predicts many layers.
        depth: largest depth of a node.
        probe: when drafting does not pay, the fraction of time that may be spent on measuring
            whether it pays again.
    """

    reads_costs: ClassVar[bool] = True
    width: int = knob(8, least=1)
    depth: int = knob(12, least=1, deepest=True)
    probe: float = knob(0.01, least=0, most=1)

    @override
    def start(self) -> Learned:
        return Learned()

    @override
    def pauses(self, memory: Any, rows: int) -> bool:
        return bool(memory.trials.paused(rows))

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        if self.pauses(memory, tree.roots):
            return tree
        budget, search = (
            _Budget.of(costs, tree.roots, memory),
            expand if isinstance(expand, RetrievalExpand) else None,
        )
        searches = search is not None and search.searches
        due = budget.due(memory, self.probe)
        ahead = 1 if search is None else search.ahead
        start = 0
        probing = False
        waiting, deepest = (
            costs.catch_up,
            np.minimum(room.depth, self.depth),
        )  # seconds before the first draft step
        width, notes = (
            self.width if ahead == 1 else self.width * ONE_PASS_WIDTH_FACTOR,
            list[RetrievalNote](),
        )
        while True:
            likely, able, least, worst = budget.promising(tree, start, room, self.depth)
            if not likely.size:
                break
            fed, spent = 0, 0.0
            if able.size:
                fed = len(able) if search is None else search.passes(tree, able)
            step = DraftPrice(costs.draft_curve, fed, ahead, waiting)
            if (
                search is not None
                and not searches
                and fed
                and not due
                and not budget.may_pay(tree, able, memory, least, step)
            ):  # retrieval alone remains, which can find all layers at once
                able, fed = able[:0], 0
            if (
                not able.size
                and (whole := _append_all_hits(search, tree, likely, self.width, deepest, memory))
                is not None
            ):
                tree = whole
                break
            found = None if search is None else search.find(tree, likely, self.width)
            guesses, below = (
                (None, ZEROS) if found is None else _value_hits(tree, likely, found, memory)
            )
            if fed:
                had = below[tree.entropy[likely] != UNREAD_ENTROPY] if below.size else below
                chosen, spent = budget.worth_expanding(tree, able, had, memory, least, step)
            else:  # predicted by a pass of this step: no node is worth more than its parent, so the rest is skipped
                chosen = able[
                    np.exp(tree.score[able]) > min(least, worst)
                ]  # a child may take the worst one's place
            if due and not tree.drafted and not chosen.size:
                chosen = likely
                spent = costs.draft_seconds(fed / tree.roots) + waiting
                probing = True
            start = len(tree)
            if chosen.size:
                budget, waiting = (
                    replace(budget, left=budget.left - spent),
                    0.0 if spent else waiting,
                )
                if found is not None:
                    notes.append(_note_hits(tree, chosen, likely, found, below))
                elif (
                    searches
                    and (whole := _append_all_hits(search, tree, chosen, width, deepest, memory))
                    is not None
                ):
                    tree = whole
                    break
                after = _guesses(tree, chosen, expand(tree, chosen, width), memory)
                tree = after.append_candidates(
                    tree,
                    chosen,
                    keep=None if width == self.width else self._likeliest(tree, chosen, after),
                )
            if guesses is not None:
                tree = guesses.beside(tree, likely, chosen, below > least)
        return fit(
            replace(budget.select_worthwhile(tree, probing), notes=_join_notes(notes)), room.nodes
        )

    def plan_step(self, outlook: Outlook) -> DeviceGrowth | None:
        """Return a plan by which the trees of `draft` grow on the device.

        The size of the trees is bounded by the sizes in `outlook`. Return None if nothing is to be
        drafted. If drafting does not pay at present, the plan may be a probe of one layer, which
        measures whether it pays again.
        """
        costs = outlook.costs
        tree = outlook.roots
        memory = outlook.memory
        if self.pauses(memory, tree.roots):
            return None
        budget = _Budget.of(costs, tree.roots, memory)
        _, able, least, _ = budget.promising(tree, 0, outlook.room, self.depth)
        step = DraftPrice(costs.draft_curve, len(able), 1, costs.catch_up)
        chosen, spent = budget.worth_expanding(tree, able, ZEROS, memory, least, step)
        if probing := able.size > chosen.size == 0 and budget.due(memory, self.probe):
            chosen, spent = able, costs.draft_seconds(len(able) / tree.roots) + costs.catch_up
        if not chosen.size:
            return None
        weights, recent, beyond = memory.success
        learnt = (*memory.calibration(0).weights, *weights, recent, beyond)
        numbers = np.array([*learnt, budget.rate, budget.left - spent])
        prices = Prices(numbers, costs.draft_curve, costs.target_curve, tree.roots)
        return YieldPlan(
            1 if probing else min(self.depth, outlook.layers),
            self.width,
            frontier=min(outlook.wide, MAX_FRONTIER_NODES),
            nodes=outlook.large,
            first=tree.row[chosen],
            ahead=MAX_LOOKAHEAD_NODES,
            certain=MIN_DISTANCE,
            probing=probing,
            prices=prices,
        )

    def _likeliest(self, tree: Tree, chosen: Ints, after: "_Guesses") -> Bools:
        """Return [F, K] whether a candidate of a layer without a pass is considered.

        As many candidates are considered as in a layer with a pass.
        """
        return top(tree, chosen, after.score, MAX_FRONTIER_NODES * self.width)

    @override
    def observe(
        self, memory: Any, tree: Tree, verdict: AcceptResult, work: Work, costs: Costs
    ) -> Learned:
        if self.pauses(memory, work.rows):
            waiting: Learned = replace(memory, trials=memory.trials.after(work.rows, 0.0))
            return waiting
        accepted = np.zeros(len(tree), np.bool_)
        accepted[: tree.roots] = True
        accepted[np.concatenate(verdict.paths)] = True
        own = replace(
            work, fed=len(tree), finds=0
        )  # without probes, commits and searches, which do not depend on the drafts
        gained = accepted.sum() / work.rows
        spent = (costs.step(own) - costs.commit - costs.overhead) / costs.token
        always = work.finds * costs.find + costs.commit + costs.overhead
        profit = gained - spent - always / costs.token
        recent = memory.recent
        beyond = memory.beyond
        idle = memory.idle
        reach = memory.reach
        if tree.drafted:
            x, reached, behind = outcomes(
                tree.nodes, accepted, _note_of(tree), UNREAD_ENTROPY, recent - INITIAL_SUCCESS
            )
        elif work.frontiers:  # nothing was found, or nothing worth verifying: drafting did not pay
            x = _of_roots(tree, recent)
            reached = np.zeros(tree.roots, np.bool_)
            behind = np.zeros(0, np.int64)
        else:
            x = np.zeros((0, 5))
            reached = np.zeros(0, np.bool_)
            behind = np.zeros(0, np.int64)
        if (roots := x[:, 1] > 0).any():
            success = bool(reached[roots].any())
            recent += SUCCESS_WEIGHT * (success - recent)
            idle = idle if success else 0.0  # a successful probe is followed by another
        else:
            idle += 1
        if reached.any():
            beyond += SUCCESS_WEIGHT * (behind[reached].mean() - beyond)
        return Learned(
            gained=(1 - RATE_DECAY) * memory.gained + gained,
            spent=(1 - RATE_DECAY) * memory.spent + spent,
            acceptance=_update_acceptance(memory, tree, verdict, accepted),
            reach=reach.learn(x, reached) if len(x) else reach,
            recent=recent,
            beyond=beyond,
            regret_budget=min(
                memory.remaining_regret(work.rows) + gained - (1 - self.probe) * spent,
                MAX_REGRET_BUDGET,
            ),
            idle=idle,
            trials=memory.trials.after(work.rows, profit),
        )


@dataclass(frozen=True)
class _Budget:
    """Hold the price of time in a step, and the time that the step may still cost.

    The time is limited by the regret budget. This is the time by which a run may still fall behind
    plain decoding.

    Attributes:
        costs: the costs of the step.
        rows: R, the number of sequences.
        rate: λ in tokens per second, the value of a second.
        left: seconds that the step may still cost in addition to a pass over the roots.
    """

    costs: Costs
    rows: int
    rate: float
    left: float

    @classmethod
    def of(cls, costs: Costs, rows: int, memory: Learned) -> "_Budget":
        """Return the price of time at the beginning of a step, and the time that it may still cost.

        Args:
            costs: the costs of the step.
            rows: R, the number of sequences.
            memory: the policy's memory, which has the rate λ and how far a run may still fall
                behind plain decoding.
        """
        return cls(
            costs, rows, memory.rate(costs, rows), memory.remaining_regret(rows) * costs.token
        )

    @property
    def probe(self) -> float:
        """Return the seconds that drafting and verifying one node per sequence takes."""
        more = self.costs.target_seconds(2) - self.costs.token
        return more + self.costs.draft_seconds(1) + self.costs.catch_up

    @cached_property
    def price(self) -> PassPrice:
        """Return the price of verification."""
        return PassPrice(self.costs.target_curve, self.rows, self.rate, self.left)

    def due(self, memory: Learned, share: float) -> bool:
        """Return whether a probe may run now.

        A probe measures whether drafting has become worthwhile. Probes may take the fraction
        `share` of the time that was spent without drafts.
        """
        return memory.idle > 0 and self.probe <= min(
            share * memory.idle * self.costs.token, self.left
        )

    def promising(
        self, tree: Tree, start: int, room: TreeBudget, depth: int
    ) -> tuple[Ints, Ints, float, float]:
        """Return the best nodes that may have children, and figures of their verification.

        See `kernels.node_selection.promising`.

        Args:
            tree: the tree.
            start: the lowest node number that is considered.
            room: bounds on the tree.
            depth: the largest depth that the policy drafts.

        Returns:
            The nodes; the nodes whose parent the drafter has read; the cost of verifying one more
                node, in tokens; and the value of the worst node that is worth its verification.
        """
        return promising(
            tree.nodes,
            start,
            room.depth,
            depth,
            MAX_FRONTIER_NODES,
            UNREAD_ENTROPY,
            self.price,
            MAX_LOOKAHEAD_NODES,
        )

    def worth_expanding(
        self,
        tree: Tree,
        frontier: Ints,
        below: Floats,
        memory: Learned,
        least: float,
        step: DraftPrice,
    ) -> tuple[Ints, float]:
        """Return the frontier nodes for which one more draft step pays, and the step's seconds.

        The best nodes come first. None are returned if the step does not pay for any number of
        nodes.

        Args:
            tree: the tree so far.
            frontier: [F] nodes whose parents the drafter has read.
            below: [F] the value of the retrieval hits after each node; [0] for no hits.
            memory: the policy's memory.
            least: the cost of verifying one more node, in tokens.
            step: the price of the step.
        """
        return worth_expanding(tree.nodes, frontier, below, memory.success, least, step, self.price)

    def may_pay(
        self, tree: Tree, frontier: Ints, memory: Learned, least: float, step: DraftPrice
    ) -> bool:
        """Return whether a draft step may pay, whatever retrieval finds after its nodes.

        The share of a node's value that retrieval finds is between 0 and 1, and the estimate of
        success is monotonic in it.

        Args:
            tree: the tree so far.
            frontier: [F] nodes that the step can expand.
            memory: the policy's memory.
            least: the cost of verifying one more node, in tokens.
            step: the price of the step.
        """
        found = ZEROS, np.exp(tree.score[frontier])
        return any(
            self.worth_expanding(tree, frontier, below, memory, least, step)[0].size
            for below in found
        )

    def select_worthwhile(self, tree: Tree, probing: bool) -> Tree:
        """Return the tree with the roots and the nodes that are worth their verification.

        The nodes are chosen in one scan from the best to the worst.
        """
        keep = select_nodes(tree.score, self.price)
        if probing and not keep[tree.roots :].any():  # the best child of every root
            keep[best(tree, np.flatnonzero(tree.depth == 1), 1)] = True
        return tree.select(keep)


@dataclass(frozen=True)
class _Guesses:
    """Candidates after a frontier, and their values.

    Attributes:
        candidates: [F, K] the candidates.
        score: [F, K] the log value of each candidate.
        entropy: [F] entropy of q in nats; `UNREAD_ENTROPY` after nodes that the drafter has not
            read.
    """

    candidates: Candidates
    score: Floats
    entropy: Floats

    def append_candidates(self, tree: Tree, frontier: Ints, keep: Bools | None = None) -> Tree:
        """Return the tree with all candidates appended, or with those marked in `keep` [F, K].

        Nodes that are not worth their verification are dropped at the end, when the whole tree is
        known.
        """
        return append(tree, frontier, self.candidates, keep, self.score, self.entropy)

    def beside(self, tree: Tree, frontier: Ints, chosen: Ints, pays: Bools) -> Tree:
        """Return the tree with the candidates appended after those nodes [F] where they pay.

        Nodes that were chosen for a draft step are skipped.
        """
        if chosen.size:
            pays = pays & ~np.isin(frontier, chosen)
        if not pays.any():
            return tree
        return self.append_candidates(
            tree, frontier, np.repeat(pays, self.score.shape[1]).reshape(self.score.shape)
        )


def _note_hits(
    tree: Tree, asked: Ints, searched: Ints, found: Candidates, worth: Floats
) -> RetrievalNote:
    """Return the note of the nodes `asked` [A], which are among the nodes `searched` [F].

    `found` holds the candidates [F, K] after the searched nodes, and `worth` [F] the sum of their
    values. The note is read again when the accept result is known.
    """
    at = (asked[:, None] == searched).argmax(axis=1)
    tokens = np.where(found.log_q > -np.inf, found.tokens, -1)[at]
    return RetrievalNote(tree.number[asked], worth[at] / np.exp(tree.score[asked]), tokens)


def _join_notes(notes: Sequence[RetrievalNote]) -> RetrievalNote | None:
    """Return the notes of all layers as one note; None if there are none."""
    if not notes:
        return None
    width = max(n.found.shape[1] for n in notes)
    found = [
        np.pad(n.found, ((0, 0), (0, width - n.found.shape[1])), constant_values=-1) for n in notes
    ]
    return RetrievalNote(
        np.concatenate([n.asked for n in notes]),
        np.concatenate([n.share for n in notes]),
        np.concatenate(found),
    )


def _note_of(tree: Tree) -> RetrievalNote:
    """Return the note of a tree, empty if it has none."""
    return tree.notes if isinstance(tree.notes, RetrievalNote) else NO_HITS


def _guesses(
    tree: Tree, frontier: Ints, candidates: Candidates, memory: Learned, read: bool = True
) -> _Guesses:
    """Return candidates after nodes, and their values.

    `read` is True if the drafter has read the nodes.
    """
    count, sources = len(frontier), candidates.sources
    known = 0.0 if candidates.logs is None else np.nan  # which is computed
    entropy = np.full(count, known if read else UNREAD_ENTROPY)
    if (
        read and candidates.confidence is not None
    ):  # a head that was trained to predict acceptance is more informative
        entropy = -np.log(np.maximum(candidates.confidence, MIN_DISTANCE))
    weights = memory.calibration(candidates.source).weights[None]
    if sources is None:
        sources = NO_SOURCES
    else:
        weights = memory.weights(int(sources.max(initial=0)) + 1)
    log_q = np.ascontiguousarray(candidates.log_q)  # the kernel needs this layout
    return _Guesses(
        candidates,
        *values(log_q, sources, weights, entropy, frontier, tree.depth, tree.score, MIN_DISTANCE),
    )


def _value_hits(
    tree: Tree, frontier: Ints, candidates: Candidates, memory: Learned
) -> "tuple[_Guesses, Floats]":
    """Return the retrieval hits after nodes, and for each node the sum [F] of their values.

    A candidate's value is the estimated probability that it is accepted. The drafter's network
    has not read the F frontier nodes.
    """
    guesses = _guesses(tree, frontier, candidates, memory, read=False)
    return guesses, np.exp(guesses.score).sum(axis=1)


def _append_all_hits(
    search: RetrievalExpand | None,
    tree: Tree,
    frontier: Ints,
    k: int,
    deepest: Ints,
    memory: Learned,
) -> Tree | None:
    """Return the tree with all retrieval hits below the given nodes, of all layers at once.

    Return None if the drafter can only search one layer at a time.
    """
    found = None if search is None else search.below(tree, frontier, k, deepest)
    if found is None:
        return None
    return _guesses(tree, found.nodes, found.candidates, memory, found.alone).append_candidates(
        tree, found.nodes
    )


def _update_acceptance(
    memory: Learned, tree: Tree, verdict: AcceptResult, accepted: Bools
) -> Mapping[int, Logistic]:
    """Return the models of acceptance after an accept result, by source.

    The accept result decides about the drafts after every accepted node. The models learn from the
    verified children of accepted nodes. If no child of a node was verified, they learn from all its
    drafted children. Otherwise drafts that were once considered worthless would never be verified,
    and nothing would be learnt about them again.
    """
    whole = tree.whole or tree
    nodes, x, right = calibration_examples(
        tree.nodes, accepted, verdict.bonus, whole.nodes, MIN_DISTANCE
    )
    calibrated, source = dict(memory.acceptance), whole.source[nodes]
    for each in set(source.tolist()):
        mine = source == each
        calibrated[each] = memory.calibration(each).learn(x[mine], right[mine])
    return calibrated


def _of_roots(tree: Tree, recent: float) -> Floats:
    """Return the features [R, 5] of accepted roots, in the order of `outcomes`.

    They are 1, whether the node is a root, log value, recent success, and the share of the node's
    value that retrieval found.
    """
    one, share, note = np.ones(tree.roots), np.zeros(tree.roots), _note_of(tree)
    share[note.asked[note.asked < tree.roots]] = note.share[note.asked < tree.roots]
    return np.stack(
        (one, one, tree.score[: tree.roots], (recent - INITIAL_SUCCESS) * one, share), axis=-1
    )
