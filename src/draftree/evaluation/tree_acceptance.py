"""Acceptance length of a policy's trees along known texts.

Decoding goes along a text: after each root the policy grows its tree with the drafter, as it would,
and what of the text is in the tree is committed. With r_d the share of trees that hold the target's
greedy choice at depth d, among those that held it at all depths before and whose text went on with
it, the acceptance length to be expected is

    1 + Σ_d Π_{j ≤ d} r_j .

A tree is the one that decoding would grow if it went on behind the text's end, so nothing is taken
for independent but the depths. Decoding that stops at this end grows its last trees less deep, and
may take other nodes for them. Behind a token that the target would not have chosen nothing is
known, so such a text counts no further at that root. Of texts that the target wrote greedily
nothing is lost.

Shapes: R texts, T tokens, N nodes, F frontier nodes, K candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.drafters.base import Drafter
from draftree.evaluation.target_trace import Recording, TokenText
from draftree.metrics import Work
from draftree.policies.base import Policy, RetrievalExpand
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.tree import (
    MAX_NODES,
    AcceptResult,
    Candidates,
    Floats,
    Ints,
    SubtreeCandidates,
    Tree,
    TreeBudget,
)

MAX_DEPTH = 10
"""Largest depth of the draft trees, and number of depths that are counted."""
TEXTS_PER_BATCH = 4
"""Number of texts that are replayed in one batch."""


@dataclass
class DrafterAccess(RetrievalExpand):
    """Give a policy access to a drafter, and update the drafter's state after each call.

    Attributes:
        drafter: the drafter.
        state: state of the drafter.
        frontiers: number of frontier nodes in each draft step so far.
    """

    drafter: Drafter[Any]
    state: Any
    frontiers: list[int] = field(default_factory=list)

    @override
    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        if fed := self.passes(tree, frontier):
            self.frontiers.append(fed)
        candidates, self.state = self.drafter.expand(self.state, tree, frontier, k, Drawing())
        return candidates

    @override
    def find(self, tree: Tree, frontier: Ints, k: int) -> Candidates | None:
        found, self.state = self.drafter.find(self.state, tree, frontier, k, Drawing())
        return found

    @override
    def below(self, tree: Tree, frontier: Ints, k: int, deepest: Ints) -> SubtreeCandidates | None:
        found, self.state = self.drafter.below(self.state, tree, frontier, k, Drawing(), deepest)
        return found

    @property
    @override
    def searches(self) -> bool:
        return self.drafter.searches

    @override
    def passes(self, tree: Tree, frontier: Ints) -> int:
        return self.drafter.passes(self.state, tree, frontier)

    @property
    @override
    def ahead(self) -> int:
        return self.drafter.ahead


@torch.inference_mode()
def count_matches(
    target: Target,
    drafter: Drafter[Any],
    policy: Policy,
    texts: Sequence[TokenText],
    costs: Costs | CostTable,
) -> tuple[Floats, Floats]:
    """Count by depth the trees that contain the target's greedy choice, and those that could.

    Args:
        target: target that reads each text in one pass.
        drafter: drafter that runs as in decoding.
        policy: policy that grows the trees. A policy that reads costs runs on one text at a time,
            because its trees depend on the batch size.
        texts: given texts with at least 2 tokens after each prompt.
        costs: costs for a policy that reads them.

    Returns:
        Two arrays [DEPTHS]: the number of trees whose nodes at this depth include the target's
            choice, and the number of trees in which that was possible, because the text followed
            the target's choices up to this depth.
    """
    memory = policy.start()
    matched = np.zeros(MAX_DEPTH)
    reached = np.zeros(MAX_DEPTH)
    size = 1 if policy.reads_costs else TEXTS_PER_BATCH
    for i in range(0, len(texts), size):
        recording = Recording.of(target, texts[i : i + size], drafter.needs.hidden)
        memory = _along(recording, drafter, policy, costs, memory, matched, reached)
    return matched, reached


def expected_length(matched: Floats, reached: Floats) -> float:
    """Return the expected acceptance length 1 + Σ_d Π_{j ≤ d} r_j, with r_d = matched / reached.

    Both arguments are counts by depth, as `count_matches` returns them.
    """
    return float(1 + np.cumprod(matched / np.maximum(reached, 1)).sum())


def _along(
    source: Recording,
    drafter: Drafter[Any],
    policy: Policy,
    costs: Costs | CostTable,
    memory: Any,
    matched: Floats,
    reached: Floats,
) -> Any:
    """Replay texts, add to the counts in place, and return the policy's new memory."""
    texts, needs = source.texts, drafter.needs
    choices = [_choices(source, row) for row in range(len(texts))]
    cache = source.new_cache(len(texts), 0)
    prompts = [t.tokens[: t.start] for t in texts]
    at, last = np.array([t.start for t in texts]), np.array([len(t.tokens) - 1 for t in texts])
    roots = np.array([t.tokens[t.start] for t in texts])
    state = drafter.start(prompts, roots, source.prefill(cache, prompts, needs).hidden_states)
    while (live := np.flatnonzero(at < last)).size:
        asking = DrafterAccess(drafter, state)
        from_roots = Tree.from_roots(
            live, np.array([texts[r].tokens[at[r]] for r in live.tolist()])
        )
        room = TreeBudget(np.minimum(MAX_DEPTH, source.target.decoder.context - 1 - at), MAX_NODES)
        context = int(at[live].max())
        prices = costs.at(context, len(live))
        tree = policy.draft(asking, from_roots, prices, room, memory)
        paths = []
        for root, row in enumerate(live.tolist()):
            paths.append(
                _walk(
                    tree,
                    root,
                    texts[row].tokens[at[row] :],
                    choices[row][at[row] :],
                    matched,
                    reached,
                )
            )
        bonus = [
            texts[r].tokens[at[r] + len(path) + 1]
            for r, path in zip(live.tolist(), paths, strict=True)
        ]
        verdict = AcceptResult(tuple(paths), np.array(bonus, np.int64))
        kept = np.concatenate([verdict.committed_nodes(root) for root in range(len(live))])
        positions = at[tree.row[kept]] + tree.depth[kept]
        hidden_states = source.hidden_states(
            cache, tree.row[kept], positions, tree.tokens[kept], needs
        )
        source.commit(cache, tree, verdict)
        state = drafter.commit(asking.state, tree, verdict, hidden_states)
        work = Work(tuple(asking.frontiers), len(tree), len(live), context)
        memory = policy.observe(memory, tree, verdict, work, prices)
        at[live] += 1 + np.array([len(path) for path in paths])
    return memory


def _choices(source: Recording, row: int) -> Ints:
    """Return [T] the target's likeliest token after each token; −1 within the prompt."""
    text = source.texts[row]
    positions = np.arange(text.start, len(text.tokens))
    chosen = source.after(np.full(len(positions), row), positions).argmax(-1).cpu().numpy()
    return np.concatenate((np.full(text.start, -1), chosen))


def _walk(
    tree: Tree, root: int, tokens: Ints, choices: Ints, matched: Floats, reached: Floats
) -> Ints:
    """Return the path of nodes that match the text, and add to the counts by depth.

    Counting stops at the depth after which the text differs from the target's choice.

    Args:
        tree: the draft tree.
        root: index of the tree's root.
        tokens: [T] the text's tokens from the root on. A node for the last token is not part of the
            path, because the token after it is not known.
        choices: [T] the target's choice after each token of the text.
        matched: number of trees by depth that contain the target's choice; changed in place.
        reached: number of trees by depth that could contain the target's choice; changed in place.
    """
    node = root
    path = []
    chosen = True
    for depth, (choice, token) in enumerate(
        zip(choices[:MAX_DEPTH].tolist(), tokens[1 : 1 + MAX_DEPTH].tolist(), strict=False)
    ):
        children = tree.children(node)
        if chosen:
            reached[depth] += 1
            matched[depth] += choice in tree.tokens[children]
        chosen &= choice == token
        on = children[tree.tokens[children] == token]
        if not on.size or depth + 2 >= len(tokens):
            break
        node = int(on[0])
        path.append(node)
    return np.array(path, np.int64)
