"""The loop: draft → grow → verify → accept → commit, and the plain baseline it is compared with.

Shapes: R rows, N nodes.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftree.acceptors.base import Acceptor
from draftree.costs import Costs, CostTable
from draftree.drafters.base import Drafter
from draftree.policies.base import Policy
from draftree.sampling import Drawing
from draftree.target import Needs, Probes, Target, Verified
from draftree.text import Emitted, Texts
from draftree.tree import Candidates, Ints, Tree, Verdict


@dataclass
class Drafting:
    """A drafter in the middle of a text: the one place where its state is carried from call to call.

    Attributes:
        drafter: that is driven.
        state: its state.
        drawing: how it is to draw in this step.
        frontiers: how many nodes each of this step's draft steps was fed.
    """

    drafter: Drafter[Any]
    state: Any
    drawing: Drawing = field(default_factory=Drawing)
    frontiers: list[int] = field(default_factory=list)

    def begin(self, drawing: Drawing) -> None:
        self.drawing, self.frontiers = drawing, []

    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        self.frontiers.append(len(frontier))
        candidates, self.state = self.drafter.expand(self.state, tree, frontier, k, self.drawing)
        return candidates

    def commit(self, tree: Tree, verdict: Verdict, verified: Verified) -> None:
        kept = np.concatenate([verdict.kept(root) for root in range(tree.roots)])
        self.state = self.drafter.commit(self.state, tree, verdict, verified.taps.take(kept))

    def probes(self) -> Probes | None:
        return self.drafter.probes(self.state)


def speculate(
    target: Target, drafter: Drafter[Any], policy: Policy, acceptor: Acceptor, costs: Costs | CostTable, texts: Texts
) -> Iterator[list[Emitted]]:
    """Writes what the target would write, several tokens a pass; yields each step's new tokens.

    Args:
        target: the model whose output is wanted.
        drafter: proposes tokens.
        policy: grows them into trees.
        acceptor: keeps what the target itself would have produced.
        costs: seconds of a draft step and of a target pass on this machine.
        texts: prompts, limits and caches of all rows; holds the output at the end.
    """
    roots, first, verified = prefill(target, acceptor, drafter.needs, texts)
    texts.drafter_state = drafter.start(texts.prompts, first.bonus, verified.taps, texts.drafter_state)
    draft = Drafting(drafter, texts.drafter_state)
    texts.memory = policy.start() if texts.memory is None else texts.memory
    yield texts.emit(target, roots, first, step=False)
    while texts.live.size:
        start = time.perf_counter()
        draft.begin(texts.drawing(policy.draw))
        roots, prices = Tree.planted(texts.live, texts.last[texts.live]), costs.at(texts.context, texts.live.size)
        tree = policy.draft(draft, roots, prices, texts.room(target), texts.memory)
        drafted = time.perf_counter()
        probes = draft.probes()
        verified = target.verify(texts.cache, tree, drafter.needs, probes)
        verdict = acceptor.accept(tree, texts.distributions(tree, verified.logits), texts.chance)
        target.commit(texts.cache, tree, verdict)
        checked = time.perf_counter()
        draft.commit(tree, verdict, verified)
        work = texts.work(draft.frontiers, tree, probes)
        texts.memory = policy.observe(texts.memory, tree, verdict, work, prices)
        texts.drafter_state = draft.state
        texts.clock(draft=time.perf_counter() - checked + drafted - start, verify=checked - drafted)
        yield texts.emit(target, tree, verdict, probes)


def plain(target: Target, acceptor: Acceptor, texts: Texts) -> Iterator[list[Emitted]]:
    """The baseline: one token a pass, with the same target, cache and choice of tokens."""
    roots, first, _ = prefill(target, acceptor, Needs(), texts)
    yield texts.emit(target, roots, first, step=False)
    while texts.live.size:
        start = time.perf_counter()
        tree = Tree.planted(texts.live, texts.last[texts.live])
        verified = target.verify(texts.cache, tree, Needs())
        verdict = acceptor.accept(tree, texts.distributions(tree, verified.logits), texts.chance)
        target.commit(texts.cache, tree, verdict)
        texts.clock(verify=time.perf_counter() - start)
        texts.work((), tree)
        yield texts.emit(target, tree, verdict)


def prefill(target: Target, acceptor: Acceptor, needs: Needs, texts: Texts) -> tuple[Tree, Verdict, Verified]:
    """Reads the prompts and chooses the token after each, as if its last token were a tree without drafts."""
    roots = Tree.planted(texts.rows, texts.last.copy())
    verified = target.prefill(texts.cache, texts.prompts, needs)
    return roots, acceptor.accept(roots, texts.distributions(roots, verified.logits), texts.chance), verified
