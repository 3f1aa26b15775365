"""The sequences being written: what is committed, how much may still come, where each one stops.

Shapes: R rows, N nodes, V vocabulary.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from draftree.cache import SlotCache
from draftree.errors import UserError, shown
from draftree.given import FLAG, Rule, optional, row_of_ids, several, whole
from draftree.given import check as check_rules
from draftree.policies.base import Room
from draftree.sampling import Chance, Distributions, Drawing, Keyed, Sampling, processed, top_k
from draftree.stats import Stats, Step, Work
from draftree.target import Probes, Target
from draftree.tree import Draw, Ints, Tree, Verdict

Origin = Literal["prefill", "drafted", "bonus"]
Ending = Literal["length", "eos", "stop", "context"]
"""Why a text ended: its limit, an EOS token, one of its criteria, or the target's context."""
Criterion = Callable[[Tensor, Any], Any]
"""criterion(ids [1, n], scores) → whether a text ends here, a bool or a tensor [1]; transformers' StoppingCriteria are such."""

CALLABLES: Rule = "a tuple of what can be called", lambda v: several(v, callable)
RULES: dict[str, Rule] = {
    "max_new_tokens": ("a whole number of at least 1", lambda v: whole(v, 1)),
    "number": ("a whole number in 0 … 2⁶³ − 1", lambda v: whole(v, 0, 2**63 - 1)),
    "processors": CALLABLES,
    "guides": CALLABLES,
    "stateless": CALLABLES,
    "forced": ("none, or what can be called", optional(callable)),
    "criteria": CALLABLES,
    "logprobs": ("none or a whole number of at least 0", optional(whole)),
    "keep_scores": FLAG,
}
"""What a request's values may be, beside its ids, in words and as a test."""
MAX_NODES = 512
"""Drafted nodes a row and step at most, whatever the policy."""


@dataclass(frozen=True)
class Request:
    """One text to be continued; ids may come in any row: a list, an array, a tensor.

    Attributes:
        prompt: token ids, at least one and at most the target's context.
        max_new_tokens: how many may come, at least one.
        eos: ids that end the text; they are emitted.
        number: the request's number; with a seed it decides the noise, so equal numbers get equal draws.
        processors: its own logits processors, applied before the sampling's, in greedy decoding too.
        guides: those of them that are applied to drafts too, so that no draft is wasted on what they forbid: they must be
            functions of the text alone. Output does not depend on them.
        stateless: processors beside the guides that are functions of the text alone, too; all others may keep count of their
            calls, and rules that look ahead refuse them.
        forced: the one token that can come after a text, if there is only one; it is drafted without asking the drafter.
        criteria: asked after every token; the first to say yes makes it the last.
        before: padding that processors and criteria are shown before the prompt, as transformers shows it.
        logprobs: how many of the likeliest tokens' log-probabilities are told beside each token's own; None tells none.
        keep_scores: whether the whole logits, raw and processed, are kept for each token.

    Raises:
        UserError: a value is none of these.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    eos: frozenset[int] = frozenset()
    number: int = 0
    processors: tuple[LogitsProcessor, ...] = ()
    guides: tuple[LogitsProcessor, ...] = ()
    stateless: tuple[LogitsProcessor, ...] = ()
    forced: Callable[[Sequence[int]], int | None] | None = None
    criteria: tuple[Criterion, ...] = ()
    before: Sequence[int] = ()
    logprobs: int | None = None
    keep_scores: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("prompt", tuple), ("before", tuple), ("eos", frozenset)):
            value = getattr(self, name)
            if (ids := row_of_ids([*value] if name == "eos" and isinstance(value, Set) else value)) is None:
                raise UserError(f"{name} is {shown(value)}, allowed are token ids in one row")
            object.__setattr__(self, name, kind(ids))
        check_rules(self, RULES)


@dataclass(frozen=True)
class Logprob:
    """How likely a token was: log p by the target's raw logits, before any processor, and the likeliest tokens' beside it."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Scores:
    """The logits [V] that a token was chosen by: those the request's processors were given, and what they made of them.

    A processor may write into what it is given, and transformers tells of the raw logits as they are then.
    """

    raw: Tensor
    processed: Tensor


@dataclass(frozen=True)
class Emitted:
    """New tokens of a row.

    Attributes:
        row: which.
        tokens: after every cut.
        origins: how each came: from the prefill, drafted and accepted, or chosen by the target.
        tree: the verified forest, of all rows.
        path: the row's accepted nodes there.
        logprobs: one for each token, where the request wants them.
        scores: one for each token, where the request keeps them.
        ending: why the text ends with these tokens, if it does.
    """

    row: int
    tokens: list[int]
    origins: list[Origin]
    tree: Tree
    path: Ints
    logprobs: list[Logprob] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    ending: Ending | None = None


@dataclass
class Texts:
    """All rows of a call, with the target's cache and the drafter's state for them.

    Attributes:
        requests: [R].
        sampling: how tokens are chosen.
        cache: the target's; what it holds already must be a proper beginning of each prompt.
        drafter_state: the drafter's for the same beginning, if there is one.
        memory: what the policy has learnt, if it learns.
        call: tells apart calls of one seed whose noise must differ, see `Keyed`.
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
    call: int = 0
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
        return Keyed(self.sampling.seed, numbers, np.array([len(c) for c in self.committed], np.int64), self.call)

    @property
    def chance(self) -> Chance:
        """What the acceptor draws from."""
        return self.noise if self.branches is None else self.branches

    def drawing(self, kind: Draw) -> Drawing:
        """How the drafter is to draw in this step; in greedy decoding there is nothing to draw."""
        noise = None if kind is Draw.POINT or self.sampling.greedy else self.noise
        return Drawing(Draw.POINT if noise is None else kind, self.sampling, noise)

    def shown(self, tree: Tree, node: int) -> list[int]:
        """The ids of a node's text up to and including it, as processors and criteria see them."""
        row = int(tree.row[node])
        path = tree.tokens[tree.path(node)].tolist()
        return [*self.requests[row].before, *self.committed[row].tolist(), *path]

    def forced(self, tree: Tree, frontier: Ints) -> Ints | None:
        """[F, 1] the only token that can come after each node of a frontier; None where some node leaves a choice."""
        found = []
        for node in frontier.tolist():
            rule = self.requests[int(tree.row[node])].forced
            token = None if rule is None else rule(self.shown(tree, node))
            if token is None:
                return None
            found.append([token])
        return np.array(found, np.int64)

    def guided(self, tree: Tree, frontier: Ints) -> Callable[[Tensor], Tensor] | None:
        """What the rows' guides make of draft logits [F, V] after a frontier; None where there are none."""
        guides = [self.requests[row].guides for row in tree.row[frontier].tolist()]
        if not any(guides):
            return None

        def shaped(logits: Tensor) -> Tensor:
            rows = zip(logits, guides, frontier.tolist(), strict=True)
            return torch.stack([_guided(one, own, self.shown(tree, node)) for one, own, node in rows])

        return shaped

    def distributions(self, tree: Tree, logits: Tensor) -> Distributions:
        """p after every node of a verified tree."""

        def own(node: int) -> Sequence[LogitsProcessor]:
            request = self.requests[int(tree.row[node])]
            if request.processors and not request.eos.isdisjoint(tree.tokens[tree.path(node)[1:]].tolist()):
                return ()  # plain decoding asks nobody what follows an EOS, and what follows it is cut off
            return request.processors

        text, greedy = partial(self.shown, tree), self.sampling.greedy
        return Distributions(logits, self.sampling.processors, text, greedy, own)

    def room(self, target: Target) -> Room:
        """How deep each row's tree may be: no deeper than the tokens it still may write before the bonus."""
        depth = [
            min(r.max_new_tokens - len(w) - 1, target.depth_room(len(c)))
            for r, w, c in zip(self.requests, self.written, self.committed, strict=True)
        ]
        return Room(np.array(depth, np.int64), MAX_NODES)

    def emit(
        self, target: Target, tree: Tree, p: Distributions, verdict: Verdict, probes: Probes | None = None, step: bool = True
    ) -> list[Emitted]:
        """Writes down what was accepted, cut exactly where plain decoding stops.

        Args:
            target: decides where a row's context ends.
            tree: the verified tree.
            p: what was accepted by.
            verdict: what of it was accepted.
            probes: rows that rode along, counted with the nodes.
            step: whether this was a verification, and not the prefill.
        """
        events, done = [], set[int]()
        self.stats.lossy |= verdict.lossy
        for root, path in enumerate(verdict.paths):
            row, kept = int(tree.row[root]), verdict.kept(root)
            request, written = self.requests[row], self.written[row]
            tokens = [*tree.tokens[path].tolist(), int(verdict.bonus[root])]
            if step:
                mine = tree.of_row(row)
                extra = 0 if probes is None else int((probes.row == row).sum())
                self.stats.steps.append(Step(len(path), len(mine) - 1 + extra, int(tree.depth[mine].max())))
            self.last[row] = tokens[-1]
            full = len(self.committed[row]) + len(kept) >= target.decoder.context  # the root has no position left to be read at
            count, ending = self._cut(row, tokens, full)
            p.vouch(kept[:count])
            origins: list[Origin] = ["drafted" for _ in path]
            origins.append("bonus" if step else "prefill")
            told = [] if request.logprobs is None else _logprobs(p, kept, tokens[:count], request.logprobs)
            chosen_at = kept[:count].tolist() if request.keep_scores else []
            scores = [Scores(*(each.clone() for each in p.scores(n))) for n in chosen_at]
            self.committed[row] = np.concatenate((self.committed[row], tree.tokens[kept]))
            written.extend(tokens[:count])
            self.stats.new_tokens += count
            events.append(Emitted(row, tokens[:count], origins[:count], tree, path, told, scores, ending))
            if ending is not None:
                done.add(row)
        self.live = np.array([r for r in self.live if r not in done], np.int64)
        return events

    def _cut(self, row: int, tokens: list[int], full: bool) -> tuple[int, Ending | None]:
        """How many of a step's tokens a row emits, and why it ends with them if it does.

        Args:
            row: which.
            tokens: accepted ones and the bonus.
            full: whether the context has no room behind them.
        """
        request, written = self.requests[row], self.written[row]
        before = [*request.before, *request.prompt, *written] if request.criteria else []
        shown = torch.tensor([before + tokens], device=self.cache.device) if request.criteria else None
        for i, token in enumerate(tokens):
            if token in request.eos:
                return i + 1, "eos"
            if shown is not None:
                text = shown[:, : len(before) + i + 1]
                said = [bool(criterion(text, None)) for criterion in request.criteria]  # all are asked, as transformers does
                if any(said):
                    return i + 1, "stop"
            if len(written) + i + 1 >= request.max_new_tokens:
                return i + 1, "length"
        return len(tokens), "context" if full else None

    def work(self, frontiers: Sequence[int], tree: Tree, probes: Probes | None = None) -> Work:
        """Writes down what a step asked of the models, before it is emitted."""
        done = Work(tuple(frontiers), len(tree) + (0 if probes is None else len(probes.row)), tree.roots, self.context)
        self.stats.work.append(done)
        return done

    def clock(self, draft: float = 0.0, verify: float = 0.0) -> None:
        """Adds to the seconds spent drafting and verifying."""
        self.stats.draft_seconds += draft
        self.stats.verify_seconds += verify


def _guided(logits: Tensor, guides: Sequence[LogitsProcessor], ids: Sequence[int]) -> Tensor:
    """[V] draft logits after a row's guides; nothing is left where one cannot follow a draft: the target may never write it."""
    try:
        return processed(logits, guides, ids)
    except UserError:
        return torch.full_like(logits, -torch.inf, dtype=torch.float64 if logits.dtype is torch.float64 else torch.float32)


def _logprobs(p: Distributions, kept: Ints, tokens: Sequence[int], top: int) -> list[Logprob]:
    """How likely each token was after the node before it, and the likeliest ones there."""
    found = []
    for node, token in zip(kept.tolist(), tokens, strict=False):
        log_p = torch.log_softmax(p.raw(node).double().cpu(), dim=-1)
        best = () if not top else tuple(zip(*(x[0].tolist() for x in top_k(log_p[None], min(top, len(log_p)))), strict=True))
        found.append(Logprob(token, float(log_p[token]), best))
    return found


def check(requests: Sequence[Request], target: Target) -> None:
    """Raises a `UserError` for a request that cannot be served."""
    context, vocab = target.decoder.context, target.decoder.vocab
    if not several(requests, lambda r: isinstance(r, Request)):
        raise UserError(f"the requests are {shown(requests)}, allowed is a list of Request; texts are for `complete`")
    if not requests:
        raise UserError("no prompt was given, at least one is needed")
    for request in requests:
        n = len(request.prompt)
        if n == 0:
            raise UserError("the prompt is empty: it has 0 tokens, at least 1 is needed")
        if n > context:
            raise UserError(f"the prompt has {n} tokens, allowed are at most the target's context of {context}")
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
            raise UserError(f"the prompt has token id {max(request.prompt, key=abs)}, allowed are 0 … {vocab - 1}")
