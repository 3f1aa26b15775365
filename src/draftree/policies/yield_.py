"""Ours: the tree that gains the most tokens for its measured time (docs/methods/yield.md).

A step that drafts a tree is worth 1 + Σ value tokens and costs C seconds. Where λ is the rate at which tokens come at
present, maximising 1 + Σ value − λ · C in every step maximises tokens per second over the whole run. So a node is
verified if its value exceeds λ times what it adds to sₜ, and another layer is drafted while the tokens that it may be
expected to add are worth λ · sₐ and more. Values are products of conditional acceptances, calibrated on what was accepted.

Shapes: R rows, N nodes, F frontier nodes, K candidates, M nodes learnt from, X features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import numpy as np

from draftree.boundary.knobs import knob
from draftree.calibration import Logistic
from draftree.costs import Costs
from draftree.policies.base import Expand, Policy, Search, append, best, fit
from draftree.stats import Work
from draftree.tree import Bools, Candidates, Floats, Ints, Room, Tree, Verdict

MEMORY = 1 / 128
"""The share of a step in the running sums of the rate."""
BEGINNING = 8.0
"""The passes that the rate of plain decoding counts for, before anything was measured."""
RECENT = 0.3
"""The share of the last step in the running mean of recent success."""
LIKELY = 0.6
"""The expected success of the first steps: the share of accepted nodes behind which some draft is accepted."""
WIDEST = 32
"""Nodes of a row that are expanded in one layer at most."""
AHEAD = 64
"""Further nodes over which the price of one is averaged at most."""
FURTHER = np.arange(1, AHEAD + 1)
CREDIT, SAVINGS = 3.0, 12.0
"""The regret budget in passes: at the beginning, and at most, however much drafting has brought."""
UNREAD = -1.0
"""Stands for the entropy of a q that nobody computed."""
CERTAIN = 1e-4
"""No draft probability is taken to be closer to 1."""


@dataclass(frozen=True)
class Learned:
    """The run so far: tokens and time, the calibration of acceptances, and the regret budget.

    Attributes:
        gained: passes that plain decoding would have needed for the tokens written, recent ones counting more.
        spent: what they took, in the time of such passes.
        acceptance: by source of the drafts, P(accepted | its parent was) of a node, see `_features`.
        reach: P(some child accepted | accepted and expanded), see `_prospects`.
        recent: the share of recent steps in which some draft was accepted.
        regret_budget: target passes that drafting may still lose against plain decoding, so that whatever the drafter does,
            the whole run takes at most `CREDIT` passes and the share for probes more than plain decoding.
        idle: passes since something was drafted; they stay while probes succeed.
    """

    gained: float = 0.0
    spent: float = 0.0
    acceptance: Mapping[int, Logistic] = field(default_factory=dict)
    reach: Logistic = field(default_factory=lambda: Logistic.around(np.log(LIKELY / (1 - LIKELY)), 0, 0, 0, prior=3.0))
    recent: float = LIKELY
    regret_budget: float = CREDIT
    idle: float = 0.0

    def calibration(self, source: int) -> Logistic:
        """The acceptance of a source's drafts; at first, q itself is the estimate."""
        return self.acceptance.get(source) or Logistic.around(0, 1, 1, 0, 0, prior=10.0)

    def accepted(self, x: Floats, candidates: Candidates) -> Floats:
        """[F, K] the conditional acceptance of candidates with features x [F, K, X], each by its source's calibration."""
        if candidates.sources is None:
            return self.calibration(candidates.source)(x)
        found, source = np.zeros(candidates.tokens.shape), candidates.sources
        for one in np.unique(source).tolist():
            found[source == one] = self.calibration(one)(x[source == one])
        return found

    def rate(self, costs: Costs, rows: int) -> float:
        """λ, tokens per second: what plain decoding has, times the gain over it so far; never below it."""
        return max((self.gained + BEGINNING) / (self.spent + BEGINNING), 1.0) * rows / costs.target_seconds(1)


@final
@dataclass(frozen=True)
class Yield(Policy):
    """The tree that gains the most tokens for its time.

    Attributes:
        width: candidates after each expanded node.
        depth: deepest layer.
        probe: where drafting does not pay, the share of time that may be spent on finding out whether it does again.
    """

    reads_costs: ClassVar[bool] = True
    width: int = knob(8, least=1)
    depth: int = knob(12, least=1, deepest=True)
    probe: float = knob(0.01, least=0, most=1)

    def start(self) -> Learned:
        return Learned()

    def draft(self, expand: Expand, tree: Tree, costs: Costs, room: Room, memory: Any) -> Tree:
        rate, left = memory.rate(costs, tree.roots), memory.regret_budget * costs.target_seconds(1)
        budget = _Budget.of(costs, tree.roots, rate, left, self.width * self.depth)
        due = self.probe * memory.idle * costs.target_seconds(1) >= budget.probe
        frontier, read, probing = np.arange(tree.roots), np.ones(tree.roots, np.bool_), False
        while (frontier := room.expandable(tree, frontier, self.depth)).size:
            likely, least = best(tree, frontier, WIDEST), budget.further(_count(tree, budget))
            found = expand.find(tree, likely, self.width) if isinstance(expand, Search) else None
            below = np.zeros(len(tree)) if found is None else _worth_below(tree, likely, found, memory)
            able = likely[read[likely]]
            fed, ahead = (expand.passes(tree, able), expand.ahead) if isinstance(expand, Search) else (len(able), 1)
            if fed:
                chosen = _worth_expanding(tree, able, budget, memory, below, least, fed, ahead)
            else:  # told by a pass of this step: nothing is worth more than its parent, so the rest need not be looked at
                chosen = able[np.exp(tree.score[able]) > least]
            if not tree.drafted and not chosen.size and due and budget.probe <= budget.left:
                chosen, probing = frontier, True
            asked, before = np.zeros(len(tree), np.bool_), len(tree)
            asked[chosen] = True
            rest = np.flatnonzero((below[likely] > least) & ~asked[likely])
            if chosen.size:
                budget = budget.after(min(len(chosen), fed))
                tree = _grown(tree, chosen, expand(tree, chosen, self.width), memory)
            if found is not None and rest.size:
                tree = _grown(tree, likely[rest], found.shared(rest), memory, read=False)
            frontier = np.arange(before, len(tree))
            read = np.append(read, asked[tree.parents[frontier]])
        return fit(_worth_verifying(tree, budget, probing), room.nodes)

    def observe(self, memory: Any, tree: Tree, verdict: Verdict, work: Work, costs: Costs) -> Learned:
        accepted = np.zeros(len(tree), np.bool_)
        accepted[: tree.roots] = True
        accepted[np.concatenate(verdict.paths)] = True
        own = replace(work, fed=len(tree))  # probes ride along and commits are made whatever is drafted
        gained, spent = accepted.sum() / work.rows, (costs.step(own) - costs.commit) / costs.target_seconds(1)
        known: Learned = replace(
            memory,
            gained=(1 - MEMORY) * memory.gained + gained,
            spent=(1 - MEMORY) * memory.spent + spent,
            regret_budget=min(memory.regret_budget + gained - (1 - self.probe) * spent, SAVINGS),
        )
        if tree.drafted:
            return _learnt(known, tree, accepted)
        if not work.frontiers:
            return replace(known, idle=known.idle + 1)
        roots = np.arange(tree.roots)  # nothing was found, or nothing worth verifying: drafting did not pay
        reach = known.reach.learn(_prospects(tree, roots, known), np.zeros(len(roots), np.bool_))
        return replace(known, reach=reach, recent=(1 - RECENT) * known.recent, idle=0.0)


@dataclass(frozen=True)
class _Budget:
    """The price of a step's seconds in tokens, and the seconds that the regret budget leaves for it.

    Attributes:
        adds: [M] seconds that 0, 1, … drafted nodes of all rows add to a pass over the roots.
        drafts: seconds of a draft step over 0, 1, … nodes.
        rows: R.
        rate: λ.
        left: seconds that the step may still cost, beside a pass over the roots.
    """

    adds: Floats
    drafts: Floats
    rows: int
    rate: float
    left: float

    @classmethod
    def of(cls, costs: Costs, rows: int, rate: float, left: float, layers: int) -> "_Budget":
        """Before anything is drafted; a row's tree has `layers` nodes for each that may stand side by side, at most."""
        adds = costs.targets(1 + np.arange(rows * WIDEST * layers + AHEAD + 1) / rows) - costs.target_seconds(1)
        return cls(adds, costs.drafts(np.arange(rows * WIDEST + 1) / rows), rows, rate, left)

    @property
    def probe(self) -> float:
        """Seconds that one node a row takes, drafted and verified."""
        return float(self.adds[self.rows] + self.drafts[self.rows])

    def after(self, nodes: int) -> "_Budget":
        """The budget after a draft step over a frontier."""
        return replace(self, left=self.left - float(self.drafts[nodes]))

    def drafting(self, nodes: int, fed: int) -> Floats:
        """λ · sₐ of frontiers of 1, 2, … nodes, at most `fed` of them fed; ∞ where not affordable together with a node."""
        seconds = self.drafts[np.minimum(np.arange(1, nodes + 1), fed)]
        return np.where(seconds + self.adds[1] <= self.left, self.rate * seconds, np.inf)

    def verifying(self, nodes: int) -> Floats:
        """λ · what 0, 1, … drafted nodes add to a pass; ∞ where it cannot be afforded."""
        seconds = self.adds[: nodes + 1]
        return np.where(seconds <= max(self.left, 0.0), self.rate * seconds, np.inf)

    def further(self, nodes: int) -> float:
        """The least that a node can cost beside some others, itself one of many or alone."""
        return self.rate * float(((self.adds[nodes + 1 : nodes + AHEAD + 1] - self.adds[nodes]) / FURTHER).min())


def _worth_expanding(
    tree: Tree, frontier: Ints, budget: _Budget, memory: Learned, below: Floats, least: float, fed: int, ahead: int
) -> Ints:
    """The nodes of the frontier that are worth a draft step together, best first; none if no number of them is.

    Behind a node of value v an accepted child is found with probability v · reach; it has to pay for its verification too. What
    is found there without a draft step is had anyway.

    Args:
        tree: so far.
        frontier: nodes that the drafter has read.
        budget: what is left.
        memory: of the run.
        below: [N] the worth of what is found after each node without a draft step.
        least: what a further node's verification costs.
        fed: how many nodes the draft step is fed at most.
        ahead: layers that it tells: behind an accepted child, another is found as probably again.
    """
    worth, reach = np.exp(tree.score[frontier]), memory.reach(_prospects(tree, frontier, memory))
    layers = sum(np.maximum(worth * reach**j - least, 0) for j in range(1, ahead + 1))
    net = layers - np.maximum(below[frontier] - least, 0)
    order = np.argsort(-net, kind="stable")
    gain = np.cumsum(np.maximum(net[order], 0)) - budget.drafting(len(order), fed)
    most = int(np.argmax(gain)) if len(gain) else 0
    return frontier[order[: most + 1]] if len(gain) and gain[most] > 0 else frontier[:0]


def _worth_below(tree: Tree, frontier: Ints, found: Candidates, memory: Learned) -> Floats:
    """[N] the sum of the values of what was found after each node without a draft step."""
    grown, before = _grown(tree, frontier, found, memory, read=False), len(tree)
    return np.asarray(np.bincount(grown.parents[before:], np.exp(grown.score[before:]), before), np.float64)


def _grown(tree: Tree, frontier: Ints, candidates: Candidates, memory: Learned, read: bool = True) -> Tree:
    """The tree with all candidates; those not worth their verification are dropped at the end, when the whole tree is known.

    After nodes that the drafter has not read, the entropy of its q is noted as `UNREAD`.
    """
    entropy = np.full(len(frontier), UNREAD)
    if read:
        entropy = np.zeros(len(frontier)) if candidates.log_probs is None else _entropy(candidates.log_q)
        if candidates.confidence is not None:  # a head that was trained to tell acceptance says more, in its place
            entropy = -np.log(np.maximum(candidates.confidence, CERTAIN))
    x = _features(candidates.log_q, entropy[:, None], tree.depth[frontier][:, None] + 1)
    found = memory.accepted(x, candidates) * (candidates.log_q > -np.inf)
    found /= np.maximum(found.sum(axis=1, keepdims=True), 1)  # at most one of them is accepted
    with np.errstate(divide="ignore"):
        score = tree.score[frontier][:, None] + np.log(found)
    return append(tree, frontier, candidates, None, score, entropy)


def _entropy(log_q: Floats) -> Floats:
    """[F] entropy in nats of q [F, K] with all other tokens taken for one: that of all V takes a pass over as many numbers."""
    q = np.exp(log_q)
    rest = np.maximum(1 - q.sum(axis=1), CERTAIN)
    return -np.asarray((q * np.maximum(log_q, np.log(CERTAIN))).sum(axis=1) + rest * np.log(rest))


def _worth_verifying(tree: Tree, budget: _Budget, probing: bool) -> Tree:
    """The tree's nodes of which each is worth its verification, found in one scan from the best to the worst."""
    count = _count(tree, budget)
    keep = np.zeros(len(tree), np.bool_)
    keep[: tree.roots] = True
    keep[_ranked(tree)[:count]] = True
    if probing and count == 0:  # the best child of every root
        keep[best(tree, np.flatnonzero(tree.depth == 1), 1)] = True
    return tree.select(keep)


def _ranked(tree: Tree) -> Ints:
    """Drafted nodes from the most to the least valuable; no child is worth more than its parent, whose number is lower."""
    nodes = np.arange(tree.roots, len(tree))
    return nodes[np.argsort(-tree.score[nodes], kind="stable")]


def _count(tree: Tree, budget: _Budget) -> int:
    """The number of best nodes to verify: as many as gain the most over their cost."""
    values = np.exp(tree.score[_ranked(tree)])
    gain = np.append(0.0, np.cumsum(values)) - budget.verifying(len(values))
    return int(np.argmax(gain))


def _learnt(memory: Learned, tree: Tree, accepted: Bools) -> Learned:
    """Learns from a verified tree: of accepted nodes' children, and of which accepted nodes had an accepted one."""
    nodes = tree.roots + np.flatnonzero(accepted[tree.parents[tree.roots :]])
    x = _features(tree.log_q[nodes], tree.entropy[nodes], tree.depth[nodes])
    calibrated = dict(memory.acceptance)
    for source in np.unique(tree.source[nodes]).tolist():
        mine = tree.source[nodes] == source
        calibrated[source] = memory.calibration(source).learn(x[mine], accepted[nodes[mine]])
    expanded = np.unique(tree.parents[nodes[tree.entropy[nodes] != UNREAD]])
    reached = np.zeros(len(tree), np.bool_)
    reached[tree.parents[nodes[accepted[nodes]]]] = True
    success = bool(reached.any())
    return replace(
        memory,
        acceptance=calibrated,
        reach=memory.reach.learn(_prospects(tree, expanded, memory), reached[expanded]) if expanded.size else memory.reach,
        recent=(1 - RECENT) * memory.recent + RECENT * success,
        idle=memory.idle if success else 0.0,  # a probe that succeeds is followed by another
    )


def _features(log_q: Floats, entropy: Floats, depth: Floats | Ints) -> Floats:
    """[…, X] features that predict the acceptance of nodes: 1, log q, −log(1 − q), entropy, depth (after C2T, section 4.1).

    With weights 0, 1, 1, 0, 0 the estimate is q itself.
    """
    q = np.minimum(np.exp(log_q), 1 - CERTAIN)
    bounded = np.maximum(log_q, np.log(CERTAIN))
    return np.stack(np.broadcast_arrays(np.ones_like(q), bounded, -np.log1p(-q), entropy, depth), axis=-1)


def _prospects(tree: Tree, nodes: Ints, memory: Learned) -> Floats:
    """[M, X] features that predict the acceptance of nodes' children to come: 1, is a root, log value, recent success."""
    root = tree.depth[nodes] == 0
    return np.stack((np.ones(len(nodes)), root, tree.score[nodes], np.full(len(nodes), memory.recent - LIKELY)), axis=-1)
