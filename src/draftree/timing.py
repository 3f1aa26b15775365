"""Draft steps and target passes timed on this machine, and kept on disk."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from draftree.boundary.machine import interleaved, kept, machine, timed
from draftree.boundary.progress import Tell, silent
from draftree.costs import Costs, CostTable, bracket
from draftree.drafters.base import Drafter
from draftree.errors import UserError
from draftree.models.between import shortened
from draftree.models.cache import SlotCache
from draftree.models.compiling import compiled_kinds
from draftree.models.linears import packed_shapes
from draftree.models.target import Target
from draftree.policies.base import append
from draftree.sampling.drawing import Drawing
from draftree.tree import Candidates, Ints, Tree, Verdict

FED, FED_WIDE = (1, 2, 4, 8, 16, 32, 64, 128), (256, 512)
"""Tokens of a row at which a target pass is timed; the second ones on accelerators alone, where the cost bends late."""
DRAFTED = (1, 2, 4, 8, 16, 32)
"""Frontier nodes of a row at which a draft step is timed."""
TOGETHER = 1024
"""Tokens of all rows in a timed pass at most, the narrowest aside; beyond them costs are linear."""
CONTEXTS = (128, 1024)
"""Committed tokens of a row at which both are timed, as far as the target's context allows."""
CANDIDATES = 5
"""Candidates that a timed draft step proposes after each node."""
COMMITTED = 3
"""Tokens of each row in a timed commit: a root and two accepted nodes."""
LONGEST = 4.0
"""Seconds in which draft steps and passes are timed, all of them together."""
FEWEST = 4
"""Rounds between other work from which on costs are told."""


def monotone(seconds: Sequence[float]) -> list[float]:
    """The nearest nondecreasing figures: neighbours that fall share their mean (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in seconds:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [mean for mean, count in pools for _ in range(count)]


@cache
def _code() -> str:
    """Stands for the code that passes are computed by: what was timed before it changed says nothing any more."""
    files = (file for folder in ("kernels", "models") for file in sorted(Path(__file__).with_name(folder).glob("*.py")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def identity(target: Target, drafter: Drafter[Any]) -> dict[str, str]:
    """The machine and models that the costs of a pairing depend on; the key of its file."""
    decoder = target.decoder
    shape = {k: str(getattr(decoder.config, k, "")) for k in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")}
    shape["parameters"] = str(sum(p.numel() for p in decoder.model.parameters()))
    attention = str(decoder.config._attn_implementation)
    dtype = str(decoder.dtype).removeprefix("torch.")
    return {
        **machine(decoder.device), **shape, "dtype": dtype, "attention": attention, "target": target.name,
        "drafter": drafter.described, "packed": " ".join(packed_shapes(decoder.model)),
        "between": " ".join(shortened(decoder.model)), "compiled": " ".join(compiled_kinds(decoder.model)), "code": _code(),
    }  # fmt: skip


def store(target: Target, drafter: Drafter[Any]) -> Path:
    """The file of a pairing's costs on this machine."""
    return kept("costs", identity(target, drafter))


def measured(target: Target, drafter: Drafter[Any], rows: int = 1, refresh: bool = False, tell: Tell = silent) -> CostTable:
    """The costs of a pairing on this machine: read from disk, or timed once and kept.

    Args:
        target: and
        drafter: the pairing.
        rows: of the batch, see `bracket`.
        refresh: measure again what is on disk for so many rows.
        tell: told what is being measured.
    """
    path, rows = store(target, drafter), bracket(rows)
    stored = _stored(path)
    if stored is not None and stored.has(rows) and not refresh:
        return stored
    new = measure(target, drafter, rows, tell)
    others = [] if stored is None else [entry for entry in stored.entries if entry.rows != rows]
    table = CostTable((*others, *new), identity(target, drafter) | {"date": time.strftime("%Y-%m-%d %H:%M")})
    with suppress(OSError):  # a home that cannot be written to: measured again the next time
        table.save(path)
    return table


def _stored(path: Path) -> CostTable | None:
    """The table on disk, if it can be read: an earlier version may have written it otherwise."""
    try:
        return CostTable.load(path) if path.is_file() else None
    except UserError:
        return None


def widths(rows: int, device: str) -> tuple[list[int], list[int]]:
    """Tokens of each row at which a target pass is timed, and frontier nodes at which a draft step is."""
    fed = FED if device == "cpu" else FED + FED_WIDE
    passes, steps = ([w for w in several if w * rows <= TOGETHER or w <= 4] for several in (fed, DRAFTED))
    return passes, steps


def measure(target: Target, drafter: Drafter[Any], rows: int = 1, tell: Tell = silent) -> tuple[Costs, ...]:
    """Times target passes, draft steps and commits behind rows of several lengths, all of them in turns.

    Commits are timed right behind a pass, as they are done when a text is written: it leaves other things in the caches. So is
    the first draft step of a tree, and what it takes more than a further one, behind another, is part of the catching up.
    """
    device, (passes, steps) = target.decoder.device, widths(rows, target.decoder.device.type)
    settings = _settings(target, drafter, rows, tell)
    behind = " and ".join(str(s.context) for s in settings)
    told = f"timing draft steps and passes over 1 to {max(passes)} tokens, behind {_rows(rows)} of {behind} tokens"
    tell(0, told)
    works = [w for s in settings for w in (*map(s.target_pass, passes), *map(s.draft_step, (*steps, 1)))]
    a_pass = settings[0].target_pass(1)
    before = [b for s in settings for b in (*[None] * len(passes), *[_both(a_pass, s.draft_step(1))] * len(steps), a_pass)]
    seconds = iter(interleaved(works, device, LONGEST, before))
    finds = interleaved([s.find() for s in settings], device, 0.1, [a_pass] * len(settings))
    both = [_both(work, undo) for s in settings for work, undo in s.commit()]
    commits = interleaved(both, device, 0.4, [a_pass] * len(both))  # last: it moves the caches on
    costs = []
    for setting, commit, catch_up, find in zip(settings, commits[::2], commits[1::2], finds, strict=True):
        target_curve, draft = (dict(zip(at, monotone([next(seconds) for _ in at]), strict=True)) for at in (passes, steps))
        catch_up += max(next(seconds) - draft[1], 0.0)
        costs.append(Costs(draft, target_curve, commit, setting.context, rows, find, catch_up))
    return tuple(costs)


def agreed(tables: Mapping[str, CostTable]) -> dict[str, CostTable]:
    """The tables of some drafters with one target's curves: medians of what was timed beside each."""
    found: dict[tuple[int, int], dict[int, list[float]]] = {}
    for table in tables.values():
        for e in table.entries:
            curve = found.setdefault((e.rows, e.context), {})
            for width, seconds in e.target.items():
                curve.setdefault(width, []).append(seconds)

    def entry(e: Costs) -> Costs:
        curve = found[e.rows, e.context]
        at = sorted(curve)
        return replace(e, target=dict(zip(at, monotone([float(np.median(curve[w])) for w in at]), strict=True)))

    return {name: replace(t, entries=tuple(map(entry, t.entries))) for name, t in tables.items()}


class Rounds:
    """Passes over one row and draft steps that are timed once in a while, beside what they are to be compared with.

    A machine whose speed changes by the minute is slower and faster in them as often as in what runs between.

    Args:
        target: and
        drafters: those of one run, by name.
        tell: told what is read.
    """

    def __init__(self, target: Target, drafters: Mapping[str, Drafter[Any]], tell: Tell = silent) -> None:
        self._device, (self._passes, self._steps) = target.decoder.device, widths(1, target.decoder.device.type)
        read, every = partial(_settings, target, rows=1, tell=tell), drafters.items()
        self._settings = {name: read(drafter) for name, drafter in every}
        self._commits = {
            (name, s.context, put_off): both
            for name, drafter in every
            for s in read(drafter)
            for put_off, both in enumerate(s.commit())  # which moves caches on
        }
        self._target: dict[tuple[int, int], list[float]] = {}
        self._draft: dict[tuple[str, int, int], list[float]] = {}
        self._first: dict[tuple[str, int], list[float]] = {(name, context): [] for name, context, _ in self._commits}
        self._commit: dict[tuple[str, int, int], list[float]] = {at: [] for at in self._commits}
        self._find: dict[tuple[str, int], list[float]] = {(name, context): [] for name, context, _ in self._commits}
        self._order = np.random.default_rng(0)

    def once(self) -> None:
        """Times every draft step and commit, and every pass, for one of the drafters in turns."""
        names, of_target = list(self._settings), len(next(iter(self._target.values()), ()))
        of_passes = names[of_target % len(names)]
        a_pass = self._settings[of_passes][0].target_pass(1)
        works = [(a_pass, self._commit[at], *both) for at, both in self._commits.items()]
        for name, setting in ((n, s) for n in names for s in self._settings[n]):
            at, step = setting.context, setting.draft_step
            works.append((a_pass, self._first[name, at], step(1), _nothing))
            works.append((a_pass, self._find[name, at], setting.find(), _nothing))
            warm = _both(a_pass, step(1))
            works += [(warm, self._draft.setdefault((name, at, f), []), step(f), _nothing) for f in self._steps]
            if name == of_passes:
                passes = ((self._target.setdefault((at, n), []), setting.target_pass(n)) for n in self._passes)
                works += [(_nothing, seconds, work, _nothing) for seconds, work in passes]
        for i in self._order.permutation(len(works)):
            before, seconds, work, undo = works[i]
            before()
            seconds.append(timed(work, self._device))
            undo()

    def tables(self, before: Mapping[str, Costs | CostTable]) -> dict[str, Costs | CostTable]:
        """The costs of every drafter by means of the middle half of its rounds, and of the target's over all of them.

        Args:
            before: what was measured before; returned as it is where there were few rounds.
        """
        if len(next(iter(self._target.values()), ())) < FEWEST:
            return dict(before)
        found = dict[str, Costs | CostTable]()
        for name, settings in self._settings.items():
            entries, known = [], before[name]
            for at in (s.context for s in settings):
                target, draft = [self._target[at, n] for n in self._passes], [self._draft[name, at, f] for f in self._steps]
                of_draft, of_target = (
                    dict(zip(each, monotone(list(map(_middle, seconds))), strict=True))
                    for each, seconds in ((self._steps, draft), (self._passes, target))
                )
                commit, catch_up = (_middle(self._commit[name, at, put_off]) for put_off in range(2))
                find = _middle(self._find[name, at])
                catch_up += max(_middle(self._first[name, at]) - of_draft[1], 0.0)
                entries.append(Costs(of_draft, of_target, commit, at, find=find, catch_up=catch_up))
            about = dict(known.about) if isinstance(known, CostTable) else {}
            found[name] = CostTable(tuple(entries), about | {"rounds": str(len(target[0]))})
        return found


def _nothing() -> None:
    """Undoes what leaves no trace."""


def _middle(seconds: Sequence[float]) -> float:
    """The mean of the middle half."""
    few = len(seconds) // 4
    return float(np.mean(np.sort(seconds)[few : len(seconds) - few]))


def _both(work: Callable[[], Any], undo: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: (work(), undo())


def _rows(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"


def _settings(target: Target, drafter: Drafter[Any], rows: int, tell: Tell) -> "list[_Setting]":
    """Rows of the lengths behind which costs are measured."""
    longest, settings = max(1, target.decoder.context - 4), []  # it and a drafter of the same context have to read on
    for context in sorted({min(c, longest) for c in CONTEXTS}):
        tell(0, f"reading {_rows(rows)} of {context} tokens")
        settings.append(_Setting.read(target, drafter, rows, context, max(widths(rows, target.decoder.device.type)[0])))
    return settings


@dataclass(frozen=True)
class _Setting:
    """Rows of one length that target and drafter have read."""

    target: Target
    drafter: Drafter[Any]
    context: int
    cache: SlotCache
    planted: Tree
    begun: Any
    state: Any

    @classmethod
    def read(cls, target: Target, drafter: Drafter[Any], rows: int, context: int, widest: int) -> Self:
        vocab = target.decoder.vocab
        prompts, every, one = [np.arange(context) % vocab] * rows, np.arange(rows), np.ones(rows, np.int64)
        cache = target.new_cache(rows, context + widest + 1)
        taps = target.prefill(cache, prompts, drafter.needs).taps
        planted = Tree.planted(every, one)
        begun = drafter.caught_up(drafter.start(prompts, one, taps))
        _, state = drafter.expand(begun, planted, every, CANDIDATES, Drawing())
        return cls(target, drafter, context, cache, planted, begun, state)

    def target_pass(self, n: int) -> Callable[[], Any]:
        """A pass over n tokens of each row."""
        return partial(self.target.verify, self.cache, self._star(n), self.drafter.needs)

    def draft_step(self, f: int) -> Callable[[], Any]:
        """A draft step over f nodes of each row, behind roots already fed; its candidates become nodes.

        Of a drafter whose pass over the roots tells what comes after those nodes too, it is that pass.
        """
        tree, rows, state = self._star(f + 1), self.planted.roots, self.state
        frontier = np.arange(rows, rows * (f + 1))
        if not self.drafter.passes(state, tree, frontier):
            frontier, state = np.arange(rows), self.begun

        def step() -> Tree:
            candidates, _ = self.drafter.expand(state, tree, frontier, CANDIDATES, Drawing())
            return append(tree, frontier, candidates)

        return step

    def find(self) -> Callable[[], Any]:
        """A look for what the drafter finds behind a node of each row without a pass."""
        tree, rows = self._star(2), self.planted.roots
        return partial(self.drafter.find, self.state, tree, np.arange(rows, 2 * rows), CANDIDATES, Drawing())

    def commit(self) -> tuple[tuple[Callable[[], Any], Callable[[], Any]], ...]:
        """The drafter's commit of a root and a chain accepted below it in each row, after the target's, and what it puts off.

        Each with what undoes it.
        """
        rows, tree, state = self.planted.roots, self.planted, self.state
        for _ in range(COMMITTED - 1):
            tree = self._below(tree, len(tree) - rows + np.arange(rows))
            _, state = self.drafter.expand(state, tree, len(tree) - rows + np.arange(rows), CANDIDATES, Drawing())
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
        """Every root with nodes − 1 children, child by child."""
        return self._below(self.planted, np.tile(np.arange(self.planted.roots), nodes - 1))

    def _below(self, tree: Tree, parents: Ints) -> Tree:
        """A tree with a further node behind each of some."""
        tokens, zero = np.arange(len(parents)) % self.target.decoder.vocab, np.zeros(len(parents))
        return tree.append(parents, tokens, zero, zero, Candidates(tokens[None], zero[None]))
