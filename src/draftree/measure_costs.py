"""Measure the costs of draft steps and target passes explicitly."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from draftree.cost_estimate import learnt_costs
from draftree.costs.curves import Costs, CostTable, monotone
from draftree.drafters.base import Drafter
from draftree.models.kv_cache import SlotCache
from draftree.policies.base import append
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.tree import Candidates, Ints, Tree, Verdict
from draftree.utils.hardware import interleaved
from draftree.utils.progress import Tell, announced, silent

FED, FED_WIDE = (1, 2, 4, 8, 16, 32, 64, 128), (256, 512)
"""Tokens of a row at which a target pass is timed. The second tuple is for accelerators, whose cost
curve bends at more tokens.
"""
DRAFTED = (1, 2, 4, 8, 16, 32)
"""Frontier nodes of a row at which a draft step is timed."""
TOGETHER = 1024
"""The most tokens of all rows in a timed pass, except the narrowest passes; beyond them costs are
linear.
"""
CONTEXTS = (128, 1024)
"""Committed tokens of a row at which both are timed, as far as the target's context allows."""
CANDIDATES = 5
"""Candidates that a timed draft step proposes after each node."""
COMMITTED = 3
"""Tokens of each row in a timed commit: a root and two accepted nodes."""
LONGEST = 4.0
"""Seconds in which all draft steps and passes are timed."""


def settled_costs(target: Target, drafter: Drafter[Any], tell: Tell = silent) -> CostTable:
    """Return the learnt costs of a target and a drafter, for results that are computed from them.

    If too few steps have run to trust the costs, they are measured now, once.

    Args:
        target: the verified model.
        drafter: the proposing one.
        tell: called with a description of what is being measured.
    """
    costs = learnt_costs(target, drafter)
    if not costs.settled:
        with announced("measuring what draft steps and target passes cost"):
            costs.teach(CostTable(measure(target, drafter, 1, tell)))
    return costs.table()


def widths(rows: int, device: str) -> tuple[list[int], list[int]]:
    """Return the tokens per row at which a target pass is timed, and the nodes for a draft step."""
    fed = FED if device == "cpu" else FED + FED_WIDE
    passes, steps = (
        [w for w in several if w * rows <= TOGETHER or w <= 4] for several in (fed, DRAFTED)
    )
    return passes, steps


def measure(
    target: Target, drafter: Drafter[Any], rows: int = 1, tell: Tell = silent
) -> tuple[Costs, ...]:
    """Time target passes, draft steps and commits, interleaved, after rows of several lengths.

    Commits are timed directly after a pass, as they are done during decoding: a pass leaves other
    data in the processor's caches. The first draft step of a tree is timed in the same way. The
    time that it takes more than a further step is part of the catching up.
    """
    device, (passes, steps) = target.decoder.device, widths(rows, target.decoder.device.type)
    settings = _settings(target, drafter, rows, tell)
    behind = " and ".join(str(s.context) for s in settings)
    told = f"timing draft steps and passes over 1 to {max(passes)} tokens, behind {_rows(rows)} of {behind} tokens"
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
    seconds = iter(interleaved(works, device, LONGEST, before))
    finds = interleaved([s.find() for s in settings], device, 0.1, [a_pass] * len(settings))
    both = [_both(work, undo) for s in settings for work, undo in s.commit()]
    commits = interleaved(both, device, 0.4, [a_pass] * len(both))  # last: it moves the caches on
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


def _rows(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"


def _settings(target: Target, drafter: Drafter[Any], rows: int, tell: Tell) -> "list[_Setting]":
    """Return rows of the lengths at which costs are measured."""
    longest, settings = (
        max(1, target.decoder.context - 4),
        [],
    )  # it and a drafter of the same context have to read on
    for context in sorted({min(c, longest) for c in CONTEXTS}):
        tell(0, f"reading {_rows(rows)} of {context} tokens")
        settings.append(
            _Setting.read(
                target, drafter, rows, context, max(widths(rows, target.decoder.device.type)[0])
            )
        )
    return settings


@dataclass(frozen=True)
class _Setting:
    """Hold rows of one length that target and drafter have read."""

    target: Target
    drafter: Drafter[Any]
    context: int
    cache: SlotCache
    planted: Tree
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
        taps = target.prefill(cache, prompts, drafter.needs).taps
        planted = Tree.planted(every, one)
        begun = drafter.caught_up(drafter.start(prompts, one, taps))
        _, state = drafter.expand(begun, planted, every, CANDIDATES, Drawing())
        return cls(target, drafter, context, cache, planted, begun, state)

    def target_pass(self, n: int) -> Callable[[], Any]:
        """Return a pass over n tokens of each row."""
        return partial(self.target.verify, self.cache, self._star(n), self.drafter.needs)

    def draft_step(self, f: int) -> Callable[[], Any]:
        """Return a draft step over f nodes of each row, which adds its candidates to the tree.

        The roots have been fed before it. If the drafter's pass over the roots also predicts what
        comes after those nodes, that pass is returned.
        """
        tree = self._star(f + 1)
        rows = self.planted.roots
        state = self.state
        frontier = np.arange(rows, rows * (f + 1))
        if not self.drafter.passes(state, tree, frontier):
            frontier, state = np.arange(rows), self.begun

        def step() -> Tree:
            candidates, _ = self.drafter.expand(state, tree, frontier, CANDIDATES, Drawing())
            return append(tree, frontier, candidates)

        return step

    def find(self) -> Callable[[], Any]:
        """Return a search for the drafter's retrieval hits after a node of each row."""
        tree, rows = self._star(2), self.planted.roots
        return partial(
            self.drafter.find, self.state, tree, np.arange(rows, 2 * rows), CANDIDATES, Drawing()
        )

    def commit(self) -> tuple[tuple[Callable[[], Any], Callable[[], Any]], ...]:
        """Return the drafter's commit of an accepted chain in each row, and its postponed work.

        Each comes with a function that undoes it. The chain includes the root. The target's commit
        is done first.
        """
        rows = self.planted.roots
        tree = self.planted
        state = self.state
        for _ in range(COMMITTED - 1):
            tree = self._below(tree, len(tree) - rows + np.arange(rows))
            _, state = self.drafter.expand(
                state, tree, len(tree) - rows + np.arange(rows), CANDIDATES, Drawing()
            )
        paths = tuple(np.arange(row + rows, len(tree), rows) for row in range(rows))
        verdict, before = Verdict(paths, np.ones(rows, np.int64)), np.full(rows, self.context)
        taps = self.target.verify(self.cache, tree, self.drafter.needs).taps
        taps = taps.take(np.concatenate([verdict.kept(row) for row in range(rows)]))
        self.target.commit(self.cache, tree, verdict)
        undo = partial(self.drafter.truncate, state, before)
        commit = partial(self.drafter.commit, state, tree, verdict, taps)
        committed, _ = commit(), undo()
        return (commit, undo), (partial(self.drafter.caught_up, committed), undo)

    def _star(self, nodes: int) -> Tree:
        """Return a tree in which every root has nodes − 1 children, child by child."""
        return self._below(self.planted, np.tile(np.arange(self.planted.roots), nodes - 1))

    def _below(self, tree: Tree, parents: Ints) -> Tree:
        """Return a tree with one more node after each of some nodes."""
        tokens, zero = np.arange(len(parents)) % self.target.decoder.vocab, np.zeros(len(parents))
        return tree.append(parents, tokens, zero, zero, Candidates(tokens[None], zero[None]))
