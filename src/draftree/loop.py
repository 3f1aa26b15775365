"""The loop: draft → grow → verify → accept → commit, and the plain baseline it is compared with.

Shapes: R rows, N nodes.
"""

import time
from collections.abc import Iterator
from typing import Any

from draftree.acceptors.base import Acceptor
from draftree.costs import Costs, CostTable
from draftree.drafters.base import Drafter
from draftree.drafting import Drafting
from draftree.models.target import Needs, Target, Verified
from draftree.policies.base import Policy
from draftree.request import Emitted
from draftree.rows import Texts
from draftree.sampling.distributions import Distributions
from draftree.tree import Tree, Verdict


def decode(
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
    roots, p, first, verified = prefill(target, acceptor, drafter.needs, texts)
    texts.drafter_state = drafter.start(texts.prompts, first.bonus, verified.taps, texts.drafter_state)
    draft = Drafting(drafter, texts.drafter_state, texts, target.decoder.vocab)
    texts.memory = policy.start() if texts.memory is None else texts.memory
    yield texts.emit(target, roots, p, first, step=False)
    while texts.live.size:
        start = time.perf_counter()
        draft.begin(acceptor.draw)
        roots, prices = Tree.planted(texts.live, texts.last[texts.live]), costs.at(texts.context, texts.live.size)
        tree = policy.draft(draft, roots, prices, texts.room(target), texts.memory)
        drafted = time.perf_counter()
        probes = draft.probes()
        verified = target.verify(texts.cache, tree, drafter.needs, probes)
        p = texts.distributions(tree, verified.logits)
        verdict = acceptor.accept(tree, p, texts.chance)
        target.commit(texts.cache, tree, verdict)
        checked = time.perf_counter()
        draft.commit(tree, verdict, verified)
        work = texts.work(draft.frontiers, tree, probes)
        texts.memory = policy.observe(texts.memory, tree, verdict, work, prices)
        texts.drafter_state = draft.state
        texts.clock(draft=time.perf_counter() - checked + drafted - start, verify=checked - drafted)
        yield texts.emit(target, tree, p, verdict, probes)


def plain(target: Target, acceptor: Acceptor, texts: Texts) -> Iterator[list[Emitted]]:
    """The baseline: one token a pass, with the same target, cache and choice of tokens."""
    roots, p, first, _ = prefill(target, acceptor, Needs(), texts)
    yield texts.emit(target, roots, p, first, step=False)
    while texts.live.size:
        start = time.perf_counter()
        tree = Tree.planted(texts.live, texts.last[texts.live])
        verified = target.verify(texts.cache, tree, Needs())
        p = texts.distributions(tree, verified.logits)
        verdict = acceptor.accept(tree, p, texts.chance)
        target.commit(texts.cache, tree, verdict)
        texts.clock(verify=time.perf_counter() - start)
        texts.work((), tree)
        yield texts.emit(target, tree, p, verdict)


def prefill(target: Target, acceptor: Acceptor, needs: Needs, texts: Texts) -> tuple[Tree, Distributions, Verdict, Verified]:
    """Reads the prompts and chooses the token after each, as if its last token were a tree without drafts."""
    roots = Tree.planted(texts.rows, texts.last.copy())
    verified = target.prefill(texts.cache, texts.prompts, needs)
    p = texts.distributions(roots, verified.logits)
    return roots, p, acceptor.accept(roots, p, texts.chance), verified
