"""The running batch: request, committed tokens, limits and stop conditions of each sequence.

Shapes: R slots, N nodes, V vocabulary.
"""

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from draftree.errors import DraftreeWarning, UserError
from draftree.metrics import Stats, Step, Work
from draftree.models.kv_cache import SlotCache
from draftree.request import Emitted, Ending, Origin, Request, Scores, all_greedy, logprobs
from draftree.sampling import devices
from draftree.sampling.captured_sampling import LIKELIEST, TokenChoice
from draftree.sampling.distributions import Distributions, apply_guides
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.keyed_noise import Keyed, RandomSource
from draftree.sampling.params import Sampling
from draftree.sampling.warpers import WARPERS
from draftree.target.target import Probes, Target, VerificationResult
from draftree.tree import MAX_NODES, AcceptResult, Draw, Ints, Tree, TreeBudget
from draftree.utils.profiler import in_phase

IDLE = Request([0])
"""The request that is stored for a free slot."""


class SequenceBatch:
    """The slots of a batch, each with the request that is generated in it.

    Requests come and go between two steps.

    Args:
        cache: the target's KV cache, with a slot for each sequence. The tokens it holds in a slot
            must be a proper prefix of the prompt that is admitted to that slot.
        source: returns the randomness from which this batch's tokens are chosen, in place of the
            keyed noise. Tests use it to enumerate all outcomes.
        calls: the number of earlier calls with the same seeds, see `Keyed`.
        stats: collects the figures of all sequences.

    Attributes:
        requests: [R] the request in each slot; `IDLE` in a free one.
        committed: [R] the token ids that the target's cache holds for each sequence.
        last: [R] the root of each sequence, its newest token.
        written: [R] the output of each sequence.
        live: the slots that are still generating, in order.
        seated: the slots whose prompts are being read; the drafter has not read them yet.
        undrafted: the slots that are generated without drafts because the drafter raised an
            exception.
        growth: the largest depth of a tree that the free space of the cache allows; None for no
            bound.
    """

    def __init__(
        self,
        cache: SlotCache,
        source: Callable[["SequenceBatch"], RandomSource] | None = None,
        calls: int = 0,
        stats: Stats | None = None,
    ) -> None:
        self.cache = cache
        self.stats = Stats() if stats is None else stats
        self._source = source
        self._admitted = calls
        self.requests = [IDLE] * cache.rows
        self._warned = set[str]()
        self._unread = set[int]()
        self.committed = [np.zeros(0, np.int64) for _ in range(cache.rows)]
        self.written: list[list[int]] = [[] for _ in range(cache.rows)]
        self.last, self.live, self._calls = (
            np.zeros(n, np.int64) for n in (cache.rows, 0, cache.rows)
        )
        self._numbers, self._begun = (
            np.zeros(cache.rows, np.int64),
            0,
        )  # number of the sequence in each slot; number of sequences begun
        self.growth: int | None = None
        self.seated, self.undrafted = set[int](), set[int]()

    @property
    def free(self) -> Ints:
        """Return the slots without a request, in order."""
        return np.array(
            [row for row, request in enumerate(self.requests) if request is IDLE], np.int64
        )

    def admit(self, requests: Sequence[Request], own_noise: bool = False) -> Ints:
        """Give each request a free slot; the next step generates it with the other sequences.

        Args:
            requests: at most one for each free slot.
            own_noise: whether the draws must differ from those of earlier requests with the same
                seed and number.

        Returns:
            The slots, in the order of the requests.

        Raises:
            UserError: more requests than free slots are given.
        """
        rows = self.free[: len(requests)]
        if len(rows) < len(requests):
            raise UserError(
                f"{len(requests)} requests are given, allowed are at most as many as slots are free: {len(rows)}"
            )
        for row, request in zip(rows.tolist(), requests, strict=True):
            self.seat(row, request)
        self.begin(rows, own_noise)
        return rows

    def seat(self, row: int, request: Request) -> None:
        """Give a request a free slot in which its prompt is read; `begin` starts its output."""
        self.requests[row], self.written[row] = request, []
        self.seated.add(row)
        self.follow(row)

    def follow(self, row: int) -> None:
        """Set the committed tokens of a slot to the part of its prompt that the cache contains."""
        self.committed[row] = np.array(
            self.requests[row].prompt[: self.cache.lengths[row]], np.int64
        )

    def begin(self, rows: Ints, own_noise: bool = False) -> None:
        """Start the output of seated requests.

        Their prompts have been read, or are read by the prefill that follows.

        Args:
            rows: their slots.
            own_noise: as in `admit`.
        """
        for row in rows.tolist():
            prompt = self.requests[row].prompt
            # Until the prefill has spoken, a prompt's last token is its root: the token after it is
            # chosen as any bonus is.
            self.committed[row], self.last[row] = np.array(prompt[:-1], np.int64), prompt[-1]
        self._numbers[rows] = self._begun + np.arange(len(rows))
        self._begun += len(rows)
        self._calls[rows], self._admitted = own_noise and self._admitted, self._admitted + 1
        self.live = np.union1d(self.live, rows)
        self._unread.update(rows.tolist())
        for those in (self.seated, self.undrafted):
            those.difference_update(rows.tolist())

    @property
    def texts(self) -> list[Ints]:
        """Return R arrays: the committed tokens of each slot, empty while its prompt is read."""
        return [text[:0] if row in self.seated else text for row, text in enumerate(self.committed)]

    def mark_read_by_drafter(self) -> bool:
        """Mark all sequences as read by the drafter.

        Return whether any sequence was unread, which means that it began after the last call.
        """
        unread, self._unread = self._unread, set()
        return bool(unread)

    def mark_unread_by_drafter(self) -> None:
        """Note that the next draft step reads more tokens of each sequence than one step has."""
        self._unread.update(self.live.tolist())

    @property
    def num_admitted(self) -> int:
        """Return the number of calls of `admit`, including those of earlier batches."""
        return self._admitted

    def select(self, rows: Ints) -> "SequenceBatch":
        """Return a batch with the named sequences in new slots, and with a copy of the cache.

        `rows` [R'] gives the old slot of each new slot, −1 for a slot that is to be free.
        """
        new = SequenceBatch(
            self.cache.copy_sequences(rows, MAX_NODES), self._source, self._admitted, self.stats
        )
        moves = list(enumerate(rows.tolist()))
        for row, old in moves:
            for name in ("requests", "written", "committed", "last", "_calls") if old >= 0 else ():
                getattr(new, name)[row] = getattr(self, name)[old]
        new.live, new._warned = np.flatnonzero(np.isin(rows, self.live)), self._warned
        for name in ("_unread", "undrafted", "seated"):
            getattr(new, name).update(row for row, old in moves if old in getattr(self, name))
        return new

    def leave(self, row: int) -> list[int]:
        """Free a slot, even if its text has not ended, and return the tokens generated in it."""
        self.live = self.live[self.live != row]
        self.seated.discard(row)
        self.requests[row], self.committed[row] = IDLE, np.zeros(0, np.int64)
        self.cache.truncate(self.lengths)
        return self.written[row]

    @property
    def lengths(self) -> Ints:
        """Return the number of committed tokens of each slot, [R]."""
        return np.array([len(c) for c in self.committed], np.int64)

    @property
    def context(self) -> int:
        """Return the number of committed tokens of the longest running sequence."""
        return int(self.lengths[self.live].max())

    @property
    def noise(self) -> Keyed:
        """Return the keyed noise for the token after each sequence's root."""
        seeds = [r.sampling.seed for r in self.requests]
        return Keyed(
            seeds, np.array([r.number for r in self.requests], np.int64), self.lengths, self._calls
        )

    @property
    def chance(self) -> RandomSource:
        """Return the randomness from which the acceptor draws."""
        return self.noise if self._source is None else self._source(self)

    def drawing(self, kind: Draw) -> Drawing:
        """Return how the drafter draws its candidates from q in this step.

        If all sequences are greedy, it is the default `Drawing`, without settings or noise.

        Args:
            kind: the way to draw if any sequence samples. All but `POINT` get the keyed noise of
                this step.
        """
        if all_greedy(self.requests):
            return Drawing()
        settings = [request.sampling for request in self.requests]
        return Drawing(kind, settings, None if kind is Draw.POINT else self.noise)

    def captured_token_choice(self, kind: Draw, vocab: int) -> TokenChoice | None:
        """Return how captured passes (CUDA graphs) choose tokens, or None if they cannot.

        They cannot if no passes are captured, if the sequences have different settings, or if a
        choice depends on the text.

        Args:
            kind: the way in which drafts are drawn.
            vocab: V, the size of the vocabulary.
        """
        mine = [self.requests[row] for row in self.live.tolist()]
        if (
            not self.cache.ladder.few
            or self.is_constrained
            or any(request.processors for request in mine)
        ):
            return None
        if all_greedy(mine):
            return LIKELIEST
        setting = mine[0].sampling.knobs
        alike = all(
            request.sampling.warpers is None and request.sampling.knobs == setting
            for request in mine
        )
        known = all(type(step) in WARPERS for step in setting.processors)
        if not (alike and known) or kind.is_sampled or self._source is not None:
            return None
        return TokenChoice(setting, kind is Draw.COUPLED, vocab)

    @property
    def is_constrained(self) -> bool:
        """Return whether guides or forced tokens restrict the next token of a running sequence."""
        mine = [self.requests[row] for row in self.live.tolist()]
        return any(r.guides or r.forced for r in mine)

    def tokens_up_to(self, tree: Tree, node: int) -> list[int]:
        """Return the token ids from the start of a node's sequence to the node.

        They are passed to processors and criteria. They include padding before the prompt, and the
        last one is the node's own token.
        """
        row, path = int(tree.row[node]), tree.tokens[tree.path(node)].tolist()
        return [*self.requests[row].before, *self.committed[row].tolist(), *path]

    def forced_tokens(self, tree: Tree, frontier: Ints) -> Ints:
        """Return [F] the only token that may follow each frontier node; −1 if there are several."""
        found = np.full(len(frontier), -1)
        for place, node in enumerate(frontier.tolist()):
            rule = self.requests[int(tree.row[node])].forced
            token = None if rule is None else rule(self.tokens_up_to(tree, node))
            if token is not None:
                found[place] = token
        return found

    def draft_guide(self, tree: Tree, frontier: Ints) -> Callable[[Tensor], Tensor] | None:
        """Return a function that applies guides to draft logits [F, V] after the frontier.

        Return None if no sequence has guides.
        """
        guides = [self.requests[row].guides for row in tree.row[frontier].tolist()]
        if not any(guides):
            return None

        def apply(logits: Tensor) -> Tensor:
            rows = zip(logits, guides, frontier.tolist(), strict=True)
            return torch.stack(
                [apply_guides(one, own, self.tokens_up_to(tree, node)) for one, own, node in rows]
            )

        return apply

    def distributions(
        self,
        tree: Tree,
        verified: VerificationResult,
        drawn: bool = False,
    ) -> Distributions:
        """Return the target's distribution p after every node of a verified tree.

        Args:
            tree: the verified tree.
            verified: the results of the target's pass over the tree.
            drawn: whether the token after each node is sampled from p with keyed noise.
        """

        def processors(node: int) -> Sequence[LogitsProcessor]:
            request = self.requests[int(tree.row[node])]
            if request.processors and not request.eos.isdisjoint(
                tree.tokens[tree.path(node)[1:]].tolist()
            ):
                return (
                    request.sampling.processors
                )  # plain decoding chooses no token after an EOS, and what follows it is cut off
            return (*request.processors, *request.sampling.processors)

        greedy = lambda node: self.requests[int(tree.row[node])].sampling.greedy
        noise = (
            self._noise_after(tree, verified.packed) if drawn and verified.told is None else None
        )
        logits, at = (verified.packed, verified.at) if noise is None else (verified.logits, None)
        mine = [self.requests[row] for row in tree.row[: tree.roots].tolist()]
        likeliest = all_greedy(mine) and not any(
            r.processors or r.sampling.processors for r in mine
        )
        return Distributions(
            logits,
            processors,
            partial(self.tokens_up_to, tree),
            greedy,
            verified.told,
            noise,
            at,
            likeliest,
        )

    def _noise_after(self, tree: Tree, logits: Tensor) -> Callable[[Ints], Tensor] | None:
        """Return a function from nodes to the noise of their next tokens, on the logits' device.

        Return None if the next tokens are chosen on the host.
        """
        here = devices.on_host(logits.device) and not self.cache.ladder.few
        if (
            here
            or self._source is not None
            or all_greedy([self.requests[row] for row in tree.row[: tree.roots].tolist()])
        ):
            return None
        keyed, vocab = self.noise, logits.shape[-1]
        return lambda nodes: keyed.gumbel_of(
            tree.row[nodes], tree.depth[nodes], vocab, logits.device
        )

    def room(self, target: Target) -> TreeBudget:
        """Return bounds on the draft tree of each sequence.

        A tree's depth leaves at least one of the remaining new tokens for the bonus token.
        """
        depth = [
            min(r.max_new_tokens - len(w) - 1, target.depth_room(len(c)))
            for r, w, c in zip(self.requests, self.written, self.committed, strict=True)
        ]
        if self.growth is not None:
            depth = [min(each, self.growth) for each in depth]
        return TreeBudget(np.array(depth, np.int64), MAX_NODES)

    @in_phase("text")
    def emit(
        self,
        target: Target,
        tree: Tree,
        p: Distributions,
        verdict: AcceptResult,
        probes: Probes | None = None,
        step: bool = True,
    ) -> list[Emitted]:
        """Add the accepted tokens to the texts, and end each text where plain decoding ends it.

        Args:
            target: the model; its context bounds the texts.
            tree: the verified tree.
            p: the distributions by which tokens were accepted.
            verdict: the accept result.
            probes: extra tokens that were verified in the same pass; they are counted as nodes.
            step: True for a verification, False for the prefill.

        Returns:
            The new tokens of each sequence.
        """
        events, done = [], set[int]()
        self.stats.lossy |= verdict.lossy
        self.stats.state_bytes = max(self.stats.state_bytes, self.cache.state_bytes)
        nodes, deepest = np.bincount(tree.row), np.zeros(self.cache.rows, np.int64)
        np.maximum.at(deepest, tree.row, tree.depth)
        for root, path in enumerate(verdict.paths):
            row, kept = int(tree.row[root]), verdict.committed_nodes(root)
            request, written = self.requests[row], self.written[row]
            tokens = [*tree.tokens[path].tolist(), int(verdict.bonus[root])]
            if step:
                drafted = (
                    int(nodes[row]) - 1 + (0 if probes is None else int((probes.row == row).sum()))
                )
                self.stats.steps.append(
                    Step(len(path), drafted, int(deepest[row]), int(self._numbers[row]))
                )
            self.last[row] = tokens[-1]
            full = (
                len(self.committed[row]) + len(kept) >= target.decoder.context
            )  # no position is left for the root
            count, ending = self._find_ending(row, tokens, full)
            p.raise_if_invalid(kept[:count])
            origins = self._origins(tree, kept[:-1])
            origins.append("bonus" if step else "prefill")
            told = (
                []
                if request.logprobs is None
                else logprobs(p, kept, tokens[:count], request.logprobs)
            )
            chosen_at = kept[:count].tolist() if request.keep_scores else []
            scores = [Scores(*(each.clone() for each in p.scores(n))) for n in chosen_at]
            self.committed[row] = np.concatenate((self.committed[row], tree.tokens[kept]))
            written.extend(tokens[:count])
            self.stats.new_tokens += count
            events.append(
                Emitted(row, tokens[:count], origins[:count], tree, path, told, scores, ending)
            )
            if ending is not None:
                done.add(row)
        self.live = np.array([r for r in self.live if r not in done], np.int64)
        return events

    def _origins(self, tree: Tree, parents: Ints) -> list[Origin]:
        """Return for each accepted token whether it was drafted or forced.

        A token is forced if no other token was allowed after its parent. `parents` are the parents
        of the accepted nodes.
        """
        if not len(parents) or self.requests[int(tree.row[parents[0]])].forced is None:
            return ["drafted" for _ in parents]
        return [
            "forced" if token >= 0 else "drafted" for token in self.forced_tokens(tree, parents)
        ]

    def _find_ending(self, row: int, tokens: list[int], full: bool) -> tuple[int, Ending | None]:
        """Return how many of a step's tokens a sequence emits, and why it ends if it does.

        Args:
            row: the slot of the sequence.
            tokens: the accepted tokens and the bonus token.
            full: whether the target's context is full after them.
        """
        request, written = self.requests[row], self.written[row]
        before = [*request.before, *request.prompt, *written] if request.criteria else []
        shown = (
            torch.tensor([before + tokens], device=self.cache.device) if request.criteria else None
        )
        for i, token in enumerate(tokens):
            if token in request.eos:
                return i + 1, "eos"
            if shown is not None:
                text = shown[:, : len(before) + i + 1]
                said = [
                    bool(criterion(text, None)) for criterion in request.criteria
                ]  # all are called, as transformers does
                if any(said):
                    return i + 1, "stop"
            if len(written) + i + 1 >= request.max_new_tokens:
                return i + 1, "length"
        return len(tokens), "context" if full else None

    def work(
        self,
        frontiers: Sequence[int],
        tree: Tree,
        probes: Probes | None = None,
        finds: int = 0,
        paused: bool = False,
    ) -> Work:
        """Add a step's entry to `stats.work`, and return it: how many tokens the models read.

        Call this before the step's new tokens are emitted, because they change the context.

        Args:
            frontiers: number of nodes that each draft step read.
            tree: the tree that the target verified.
            probes: tokens that the drafter added to the target's pass.
            finds: number of retrievals without a model pass.
            paused: whether the step ran without the drafter; see `Work`.
        """
        fed = len(tree) + (0 if probes is None else len(probes.row))
        self.stats.work.append(Work(tuple(frontiers), fed, tree.roots, self.context, finds, paused))
        return self.stats.work[-1]

    def warn(self, told: str) -> None:
        """Give a warning once, even if many steps repeat it."""
        if told not in self._warned:
            self._warned.add(told)
            warnings.warn(told, DraftreeWarning, stacklevel=2)

    def clock(self, draft: float = 0.0, verify: float = 0.0) -> None:
        """Add the given seconds to the times of drafting and verifying."""
        self.stats.draft_seconds += draft
        self.stats.verify_seconds += verify


@dataclass(frozen=True)
class Generation:
    """The tokens generated for each request, and the figures of all requests together."""

    tokens: list[list[int]]
    stats: Stats


class EngineMethods(Protocol):
    """Declare the methods of an engine that other modules call to run requests."""

    @property
    def target(self) -> Target:
        """Return the target."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the target's tokenizer."""
        ...

    def begin(
        self, requests: Sequence[Request], sampling: Sampling | None = ..., reuse: bool = ...
    ) -> tuple[SequenceBatch, Iterator[list[Emitted]]]:
        """Return the batch and an iterator over its steps; see `Engine.begin`."""
        ...

    def time_steps(
        self, steps: Iterator[list[Emitted]], rows: SequenceBatch
    ) -> Generator[list[Emitted], None, None]:
        """Yield the steps of a batch and count their seconds."""
        ...

    def write(
        self,
        requests: Sequence[Request],
        sampling: Sampling | None = ...,
        on_tokens: Callable[[list[Emitted]], None] | None = ...,
        reuse: bool = ...,
    ) -> Generation:
        """Generate the outputs of all requests; see `Engine.write`."""
        ...

    def forget(self) -> None:
        """Drop the cached texts."""
        ...
