"""The loop: draft → grow → verify → accept → commit, and the plain baseline it is compared with.

Shapes: R rows, N nodes.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftree.acceptors.base import Acceptor
from draftree.costs import Costs
from draftree.drafters.base import Drafter
from draftree.policies.base import Policy
from draftree.sampling import Drawing
from draftree.target import Needs, Probes, Target, Verified
from draftree.text import Emitted, Texts
from draftree.tree import Candidates, Ints, Tree, Verdict


@dataclass
class Drafting:
    """A drafter in the middle of a text: the one place where its state is carried from call to call."""

    drafter: Drafter[Any]
    state: Any
    drawing: Drawing = field(default_factory=Drawing)

    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        candidates, self.state = self.drafter.expand(self.state, tree, frontier, k, self.drawing)
        return candidates

    def commit(self, tree: Tree, verdict: Verdict, verified: Verified) -> None:
        kept = np.concatenate([verdict.kept(root) for root in range(tree.roots)])
        self.state = self.drafter.commit(self.state, tree, verdict, verified.taps.take(kept))

    def probes(self) -> Probes | None:
        return self.drafter.probes(self.state)


def speculate(
    target: Target, drafter: Drafter[Any], policy: Policy, acceptor: Acceptor, costs: Costs, texts: Texts
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
    draft, memory = Drafting(drafter, texts.drafter_state), policy.start()
    yield texts.emit(target, roots, first, step=False)
    while texts.live.size:
        start = time.perf_counter()
        draft.drawing = texts.drawing(policy.draw)
        tree = policy.draft(draft, Tree.planted(texts.live, texts.last[texts.live]), costs, texts.room(target), memory)
        drafted = time.perf_counter()
        probes = draft.probes()
        verified = target.verify(texts.cache, tree, drafter.needs, probes)
        verdict = acceptor.accept(tree, texts.distributions(tree, verified.logits), texts.chance)
        target.commit(texts.cache, tree, verdict)
        checked = time.perf_counter()
        draft.commit(tree, verdict, verified)
        memory = policy.observe(memory, tree, verdict)
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
        yield texts.emit(target, tree, verdict)


def prefill(target: Target, acceptor: Acceptor, needs: Needs, texts: Texts) -> tuple[Tree, Verdict, Verified]:
    """Reads the prompts and chooses the token after each, as if its last token were a tree without drafts."""
    roots = Tree.planted(texts.rows, texts.last.copy())
    verified = target.prefill(texts.cache, texts.prompts, needs)
    return roots, acceptor.accept(roots, texts.distributions(roots, verified.logits), texts.chance), verified
