"""The sequences being written: what is committed, how much may still come, where each one stops.

Shapes: R rows, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from draftree.cache import SlotCache
from draftree.errors import UserError
from draftree.policies.base import Room
from draftree.sampling import Chance, Distributions, Drawing, Keyed, Sampling
from draftree.stats import Stats, Step, Work
from draftree.target import Probes, Target
from draftree.tree import Draw, Ints, Tree, Verdict

Origin = Literal["prefill", "drafted", "bonus"]

MAX_NODES = 512
"""Drafted nodes a row and step at most, whatever the policy."""


@dataclass(frozen=True)
class Request:
    """One text to be continued.

    Attributes:
        prompt: token ids, at least one and at most the target's context.
        max_new_tokens: how many may come, at least one.
        eos: ids that end the text; they are emitted.
        number: the request's number; with a seed it decides the noise, so equal numbers get equal draws.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    eos: frozenset[int] = frozenset()
    number: int = 0


@dataclass(frozen=True)
class Emitted:
    """New tokens of a row.

    Attributes:
        row: which.
        tokens: after every cut.
        origins: how each came: from the prefill, drafted and accepted, or chosen by the target.
        tree: the verified forest, of all rows.
        path: the row's accepted nodes there.
    """

    row: int
    tokens: list[int]
    origins: list[Origin]
    tree: Tree
    path: Ints


@dataclass
class Texts:
    """All rows of a call, with the target's cache and the drafter's state for them.

    Attributes:
        requests: [R].
        sampling: how tokens are chosen.
        cache: the target's; what it holds already must be a proper beginning of each prompt.
        drafter_state: the drafter's for the same beginning, if there is one.
        memory: what the policy has learnt, if it learns.
        branches: what the target's tokens are drawn from instead of the keyed noise; a test enumerates it.
        committed: each row's tokens in the target's cache, or to be there once the prefill is done.
        last: [R] each row's root, the newest token chosen.
        written: each row's output.
        live: the rows that still write.
        stats: of all rows together.
    """

    requests: Sequence[Request]
    sampling: Sampling
    cache: SlotCache
    drafter_state: Any = None
    memory: Any = None
    branches: Chance | None = None
    committed: list[Ints] = field(init=False)
    last: Ints = field(init=False)
    written: list[list[int]] = field(init=False)
    live: Ints = field(init=False)
    stats: Stats = field(init=False, default_factory=Stats)

    def __post_init__(self) -> None:
        # Until the prefill has spoken, a prompt's last token is its root: the token after it is chosen as any bonus is.
        self.committed = [np.array(r.prompt[:-1], np.int64) for r in self.requests]
        self.last = np.array([r.prompt[-1] for r in self.requests], np.int64)
        self.written = [[] for _ in self.requests]
        self.live = self.rows

    @property
    def rows(self) -> Ints:
        """[R] all row numbers."""
        return np.arange(len(self.requests))

    @property
    def prompts(self) -> list[Ints]:
        """Each row's prompt."""
        return [np.array(r.prompt, np.int64) for r in self.requests]

    @property
    def context(self) -> int:
        """How many committed tokens the longest row that still writes has."""
        return max(len(self.committed[row]) for row in self.live)

    @property
    def noise(self) -> Keyed:
        """The keyed randomness for the rows' present roots."""
        numbers = np.array([r.number for r in self.requests], np.int64)
        return Keyed(self.sampling.seed, numbers, np.array([len(c) for c in self.committed], np.int64))

    @property
    def chance(self) -> Chance:
        """What the acceptor draws from."""
        return self.noise if self.branches is None else self.branches

    def drawing(self, kind: Draw) -> Drawing:
        """How the drafter is to draw in this step."""
        return Drawing(kind, self.sampling.temperature, None if kind is Draw.POINT else self.noise)

    def distributions(self, tree: Tree, logits: Tensor) -> Distributions:
        """p after every node of a verified tree."""

        def text(node: int) -> list[int]:
            return [*self.committed[int(tree.row[node])].tolist(), *tree.tokens[tree.path(node)].tolist()]

        return Distributions(logits, self.sampling.processors, text, self.sampling.greedy)

    def room(self, target: Target) -> Room:
        """How deep each row's tree may be: no deeper than the tokens it still may write before the bonus."""
        depth = [
            min(r.max_new_tokens - len(w) - 1, target.depth_room(len(c)))
            for r, w, c in zip(self.requests, self.written, self.committed, strict=True)
        ]
        return Room(np.array(depth, np.int64), MAX_NODES)

    def emit(
        self, target: Target, tree: Tree, verdict: Verdict, probes: Probes | None = None, step: bool = True
    ) -> list[Emitted]:
        """Writes down what was accepted, cut exactly where plain decoding stops.

        Args:
            target: decides where a row's context ends.
            tree: the verified tree.
            verdict: what of it was accepted.
            probes: rows that rode along, counted with the nodes.
            step: whether this was a verification, and not the prefill.
        """
        events, done = [], set[int]()
        for root, path in enumerate(verdict.paths):
            row = int(tree.row[root])
            request, written = self.requests[row], self.written[row]
            tokens = [*tree.tokens[path].tolist(), int(verdict.bonus[root])]
            if step:
                mine = tree.of_row(row)
                extra = 0 if probes is None else int((probes.row == row).sum())
                self.stats.steps.append(Step(len(path), len(mine) - 1 + extra, int(tree.depth[mine].max())))
            self.committed[row] = np.concatenate((self.committed[row], tree.tokens[verdict.kept(root)]))
            self.last[row] = tokens[-1]
            ends = [i + 1 for i, t in enumerate(tokens) if t in request.eos]
            count = min([len(tokens), request.max_new_tokens - len(written), *ends])
            origins: list[Origin] = ["drafted" for _ in path]
            origins.append("bonus" if step else "prefill")
            written.extend(tokens[:count])
            self.stats.new_tokens += count
            events.append(Emitted(row, tokens[:count], origins[:count], tree, path))
            full = len(self.committed[row]) >= target.decoder.context  # the root has no position left to be read at
            if full or len(written) >= request.max_new_tokens or (ends and ends[0] <= count):
                done.add(row)
        self.live = np.array([r for r in self.live if r not in done], np.int64)
        return events

    def work(self, frontiers: Sequence[int], tree: Tree, probes: Probes | None = None) -> Work:
        """Writes down what a step asked of the models, before it is emitted."""
        done = Work(tuple(frontiers), len(tree) + (0 if probes is None else len(probes.row)), tree.roots, self.context)
        self.stats.work.append(done)
        return done

    def clock(self, draft: float = 0.0, verify: float = 0.0) -> None:
        """Adds to the seconds spent drafting and verifying."""
        self.stats.draft_seconds += draft
        self.stats.verify_seconds += verify


def check(requests: Sequence[Request], target: Target) -> None:
    """Raises a `UserError` for a request that cannot be served."""
    context, vocab = target.decoder.context, target.decoder.vocab
    if not requests:
        raise UserError("no prompt was given, at least one is needed")
    for request in requests:
        n = len(request.prompt)
        if n == 0:
            raise UserError("the prompt is empty: it has 0 tokens, at least 1 is needed")
        if n > context:
            raise UserError(f"the prompt has {n} tokens, allowed are at most the target's context of {context}")
        if request.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {request.max_new_tokens}, allowed is a whole number of at least 1")
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
            raise UserError(f"the prompt has token id {max(request.prompt, key=abs)}, allowed are 0 … {vocab - 1}")
