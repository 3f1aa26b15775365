"""Measure the costs of draft steps and target passes explicitly."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from draftree.cost_estimate import learnt_costs
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs, monotone
from draftree.drafters.base import Drafter
from draftree.models.kv_cache import SlotCache
from draftree.policies.base import append
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.tree import AcceptResult, Candidates, Ints, Tree
from draftree.utils.hardware import time_interleaved
from draftree.utils.progress_callback import Tell, announce, ignore_progress

TARGET_WIDTHS, GPU_TARGET_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128), (256, 512)
"""Numbers of tokens per sequence for which a target pass is timed.

`GPU_TARGET_WIDTHS` is added for accelerators, whose cost curve bends at more tokens.
"""
DRAFT_WIDTHS = (1, 2, 4, 8, 16, 32)
"""Numbers of frontier nodes per sequence for which a draft step is timed."""
MAX_TOTAL_TOKENS = 1024
"""Largest number of tokens in a timed pass over several sequences, except the smallest passes.

Costs are linear in larger numbers.
"""
MEASURED_CONTEXTS = (128, 1024)
"""Numbers of committed tokens per sequence at which costs are measured.

They are bounded by the target's context.
"""
CANDIDATES = 5
"""Number of candidates that a timed draft step proposes after each node."""
COMMITTED_TOKENS = 3
"""Number of tokens per sequence in a timed commit: a root and two accepted nodes."""
MAX_SECONDS = 4.0
"""Time budget in seconds for timing all draft steps and target passes."""


def reliable_costs(
    target: Target, drafter: Drafter[Any], tell: Tell = ignore_progress
) -> CostTable:
    """Return the learnt costs of a target and a drafter, for results that depend on them.

    If too few steps have run for reliable costs, the costs are measured once.

    Args:
        target: the target.
        drafter: the drafter.
        tell: called with a description of the current measurement.
    """
    costs = learnt_costs(target, drafter)
    if not costs.is_reliable:
        with announce("measuring what draft steps and target passes cost"):
            costs.teach(CostTable(measure(target, drafter, 1, tell)))
    return costs.table()


def widths(rows: int, device: str) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens per sequence for target passes, and of nodes for draft steps."""
    fed = TARGET_WIDTHS if device == "cpu" else TARGET_WIDTHS + GPU_TARGET_WIDTHS
    passes, steps = (
        [w for w in several if w * rows <= MAX_TOTAL_TOKENS or w <= 4]
        for several in (fed, DRAFT_WIDTHS)
    )
    return passes, steps


def measure(
    target: Target, drafter: Drafter[Any], rows: int = 1, tell: Tell = ignore_progress
) -> tuple[Costs, ...]:
    """Time target passes, draft steps and commits in turn, for sequences of several lengths.

    Commits are timed directly after a target pass, as in decoding, because a pass leaves other data
    in the processor's caches. The first draft step of a tree is timed in the same way. The time by
    which it exceeds a further step is counted as catching up.

    Args:
        target: the target.
        drafter: the drafter.
        rows: the number of sequences.
        tell: called with a description of the current measurement.

    Returns:
        The costs for each context length.
    """
    device, (passes, steps) = target.decoder.device, widths(rows, target.decoder.device.type)
    settings = _settings(target, drafter, rows, tell)
    behind = " and ".join(str(s.context) for s in settings)
    told = f"timing draft steps and passes over 1 to {max(passes)} tokens, behind {_check_row_count(rows)} of {behind} tokens"
    tell(0, told)
    works = [
        w for s in settings for w in (*map(s.target_pass, passes), *map(s.draft_step, (*steps, 1)))
    ]
    a_pass = settings[0].target_pass(1)
    before = [
        b
        for s in settings
        for b in (*[None] * len(passes), *[_both(a_pass, s.draft_step(1))] * len(steps), a_pass)
    ]
    seconds = iter(time_interleaved(works, device, MAX_SECONDS, before))
    finds = time_interleaved([s.find() for s in settings], device, 0.1, [a_pass] * len(settings))
    both = [_both(work, undo) for s in settings for work, undo in s.commit()]
    # Commits come last, because they change the caches.
    commits = time_interleaved(both, device, 0.4, [a_pass] * len(both))
    costs = []
    for setting, commit, catch_up, find in zip(
        settings, commits[::2], commits[1::2], finds, strict=True
    ):
        target_curve, draft = (
            dict(zip(at, monotone([next(seconds) for _ in at]), strict=True))
            for at in (passes, steps)
        )
        catch_up += max(next(seconds) - draft[1], 0.0)
        costs.append(Costs(draft, target_curve, commit, setting.context, rows, find, catch_up))
    return tuple(costs)


def _both(work: Callable[[], Any], undo: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: (work(), undo())


def _check_row_count(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"


def _settings(target: Target, drafter: Drafter[Any], rows: int, tell: Tell) -> "list[_Setting]":
    """Return batches of sequences of each length at which costs are measured."""
    longest, settings = (
        max(1, target.decoder.context - 4),
        [],
    )  # target and drafter must have space for further tokens
    for context in sorted({min(c, longest) for c in MEASURED_CONTEXTS}):
        tell(0, f"reading {_check_row_count(rows)} of {context} tokens")
        settings.append(
            _Setting.read(
                target, drafter, rows, context, max(widths(rows, target.decoder.device.type)[0])
            )
        )
    return settings


@dataclass(frozen=True)
class _Setting:
    """Sequences of one length that target and drafter have read."""

    target: Target
    drafter: Drafter[Any]
    context: int
    cache: SlotCache
    from_roots: Tree
    begun: Any
    state: Any

    @classmethod
    def read(
        cls, target: Target, drafter: Drafter[Any], rows: int, context: int, widest: int
    ) -> Self:
        vocab = target.decoder.vocab
        prompts = [np.arange(context) % vocab] * rows
        every = np.arange(rows)
        one = np.ones(rows, np.int64)
        cache = target.new_cache(rows, context + widest + 1)
        hidden_states = target.prefill(cache, prompts, drafter.needs).hidden_states
        from_roots = Tree.from_roots(every, one)
        begun = drafter.flush(drafter.start(prompts, one, hidden_states))
        _, state = drafter.expand(begun, from_roots, every, CANDIDATES, Drawing())
        return cls(target, drafter, context, cache, from_roots, begun, state)

    def target_pass(self, n: int) -> Callable[[], Any]:
        """Return a function that runs a target pass over n tokens of each sequence."""
        return partial(self.target.verify, self.cache, self._star(n), self.drafter.needs)

    def draft_step(self, f: int) -> Callable[[], Any]:
        """Return a function that expands f nodes of each sequence and appends their candidates.

        The drafter has read the roots before the function is called. Some drafters compute the
        candidates of all nodes in the pass over the roots. For them the function runs that pass.
        """
        tree = self._star(f + 1)
        rows = self.from_roots.roots
        state = self.state
        frontier = np.arange(rows, rows * (f + 1))
        if not self.drafter.passes(state, tree, frontier):
            frontier, state = np.arange(rows), self.begun

        def step() -> Tree:
            candidates, _ = self.drafter.expand(state, tree, frontier, CANDIDATES, Drawing())
            return append(tree, frontier, candidates)

        return step

    def find(self) -> Callable[[], Any]:
        """Return a function that looks for retrieval hits after one node of each sequence."""
        tree, rows = self._star(2), self.from_roots.roots
        return partial(
            self.drafter.find, self.state, tree, np.arange(rows, 2 * rows), CANDIDATES, Drawing()
        )

    def commit(self) -> tuple[tuple[Callable[[], Any], Callable[[], Any]], ...]:
        """Return two pairs of functions; each pair runs work of the drafter and undoes it.

        The first pair commits a chain, which includes the root and which the target has committed.
        The second pair does the work that the drafter postpones after a commit.
        """
        rows = self.from_roots.roots
        tree = self.from_roots
        state = self.state
        for _ in range(COMMITTED_TOKENS - 1):
            tree = self._below(tree, len(tree) - rows + np.arange(rows))
            _, state = self.drafter.expand(
                state, tree, len(tree) - rows + np.arange(rows), CANDIDATES, Drawing()
            )
        paths = tuple(np.arange(row + rows, len(tree), rows) for row in range(rows))
        verdict, before = AcceptResult(paths, np.ones(rows, np.int64)), np.full(rows, self.context)
        hidden_states = self.target.verify(self.cache, tree, self.drafter.needs).hidden_states
        hidden_states = hidden_states.take(
            np.concatenate([verdict.committed_nodes(row) for row in range(rows)])
        )
        self.target.commit(self.cache, tree, verdict)
        undo = partial(self.drafter.truncate, state, before)
        commit = partial(self.drafter.commit, state, tree, verdict, hidden_states)
        committed, _ = commit(), undo()
        return (commit, undo), (partial(self.drafter.flush, committed), undo)

    def _star(self, nodes: int) -> Tree:
        """Return a tree in which every root has nodes − 1 children.

        The nodes are ordered by child, then by sequence.
        """
        return self._below(self.from_roots, np.tile(np.arange(self.from_roots.roots), nodes - 1))

    def _below(self, tree: Tree, parents: Ints) -> Tree:
        """Return the tree with one more node appended below each of the given parents."""
        tokens, zero = np.arange(len(parents)) % self.target.decoder.vocab, np.zeros(len(parents))
        return tree.append(parents, tokens, zero, zero, Candidates(tokens[None], zero[None]))
