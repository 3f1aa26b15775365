"""Drive a drafter along known texts and compare its drafts with the target's tokens.

Shapes: R texts, M places, N nodes, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftree.data import samples
from draftree.data.prompts import encode
from draftree.drafters.base import Drafter
from draftree.engine import generate_plain
from draftree.errors import NotANumber, UserError
from draftree.evaluation import suites
from draftree.evaluation.target_trace import TokenText
from draftree.models.kv_cache import SlotCache
from draftree.request import Request
from draftree.sampling.distributions import NOT_FINITE
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStateSpec, Probes, Target, VerificationResult
from draftree.tree import AcceptResult, Bools, Candidates, Floats, Ints, Tree

T = TypeVar("T")
COMPARED_DEPTH = 5
"""Depth to which drafts are compared with the target. It is also the number of tokens that one step
of `drive` commits."""
MIN_LOG_Q = -20.0
"""Lower limit for log q in cross-entropies, so that a token that the drafter cannot propose does
not make them infinite."""


@dataclass(frozen=True)
class ComparedDrafts:
    """Store a comparison of drafts with the target's greedy choices, position by position.

    A position is the place after one token of a text. All arrays have length M, the number of
    positions.

    Attributes:
        text: [M] index of the position's text.
        root: [M] index in its text of the token that is the root of the position's block.
        depth: [M] depth of the drafted token in its chain, 1 … `COMPARED_DEPTH`.
        drafted: [M] whether the drafter proposed a token.
        agree: [M] whether the drafter's likeliest token is the target's greedy choice; false where
            nothing was drafted.
        overlap: [M] Σ min(p, q) over the vocabulary, with the target's p at temperature 1. Where q
            is not known over the whole vocabulary, it is p of the drafted token. It is 0 where
            nothing was drafted.
        confidence: [M] q of the drafter's likeliest token; 0 where nothing was drafted.
        surprise: [M] cross-entropy −Σ p log q in nats, where log q of each token is at least
            `MIN_LOG_Q`; 0 where q is not known over the whole vocabulary.
        covered: [M] whether the target's greedy choice is in the draft vocabulary.
        followed: [M] whether the text's next token is the target's greedy choice.
    """

    text: Ints
    root: Ints
    depth: Ints
    drafted: Bools
    agree: Bools
    overlap: Floats
    confidence: Floats
    surprise: Floats
    covered: Bools
    followed: Bools

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return one object with the positions of several runs, in order."""
        return cls(
            *(np.concatenate([getattr(p, f) for p in parts]) for f in cls.__dataclass_fields__)
        )

    @property
    def rates(self) -> Floats:
        """Return [COMPARED_DEPTH] the acceptance rate of greedy drafts after an accepted path."""
        there, agree, alive = np.zeros((3, int(self.block.max()) + 1, 1 + COMPARED_DEPTH), np.bool_)
        at = self.block, self.depth
        there[at], agree[at], alive[at], alive[:, 0] = (
            True,
            self.agree,
            self.agree & self.followed,
            True,
        )
        reached = there[:, 1:] & np.logical_and.accumulate(alive, axis=1)[:, :-1]
        rates: Floats = (agree[:, 1:] & reached).sum(axis=0) / np.maximum(reached.sum(axis=0), 1)
        return rates

    @property
    def block(self) -> Ints:
        """Return [M] the index of each position's block.

        Positions with the same text and root are in the same block.
        """
        return np.unique(np.stack((self.text, self.root)), axis=1, return_inverse=True)[1].ravel()


class Source(Protocol):
    """Define the methods that a drafter needs from a target or from a recorded one."""

    def new_cache(self, rows: int, slots: int) -> SlotCache:
        """Return an empty cache for `rows` sequences; see `Target.new_cache`."""
        ...

    def prefill(
        self, cache: SlotCache, prompts: Sequence[Ints], needs: HiddenStateSpec
    ) -> VerificationResult:
        """Run the prompts through the target; see `Target.prefill`."""
        ...

    def verify(
        self, cache: SlotCache, tree: Tree, needs: HiddenStateSpec, probes: Probes | None = None
    ) -> VerificationResult:
        """Run a draft tree through the target; see `Target.verify`."""
        ...

    def commit(self, cache: SlotCache, tree: Tree, verdict: AcceptResult) -> None:
        """Commit the accepted tokens to the cache; see `Target.commit`."""
        ...


@dataclass(frozen=True)
class ReplayStep:
    """Store one step of a replay, in which each unfinished text contributes a chain of its tokens.

    Attributes:
        tree: the chains, with one root for each unfinished text.
        asked: for each depth, the nodes after which the drafter was asked for candidates, and its
            candidates.
        logits: [N, V] the target's logits after each node.
        tokens: for each unfinished text, the tokens of its chain and the token after the chain.
        roots: [R] for each text, finished ones included, the position of its root in the text.
    """

    tree: Tree
    asked: list[tuple[Ints, Candidates]]
    logits: Tensor
    tokens: list[Ints]
    roots: Ints

    def following(self, nodes: Ints) -> Ints:
        """Return [F] the tokens that follow the given nodes in their texts."""
        chains = np.searchsorted(self.tree.row[: self.tree.roots], self.tree.row[nodes])
        return np.array(
            [self.tokens[i][d + 1] for i, d in zip(chains, self.tree.depth[nodes], strict=True)],
            np.int64,
        )


@torch.inference_mode()
def replay(
    target: Source,
    drafter: Drafter[Any],
    texts: Sequence[TokenText],
    k: int,
    length: int,
    step: int = 0,
) -> Iterator[ReplayStep]:
    """Decode given texts as if all their tokens were accepted, and yield each block.

    The drafter runs as in decoding: prefill and start, then expand, verify and commit for each
    block.

    Args:
        target: verifies every block, as in decoding.
        drafter: drafter that proposes candidates after every token.
        texts: the texts, all in one batch.
        k: number of candidates after each token.
        length: number of tokens in a block; the first is its root, the others are treated as
            drafts.
        step: number of tokens of each block that are committed; 0 commits all of them.

    Raises:
        NotANumber: the target's logits are not finite.
    """
    cache = target.new_cache(len(texts), max(len(t.tokens) for t in texts) + length)
    prompts = [t.tokens[: t.start] for t in texts]
    verified = target.prefill(cache, prompts, drafter.needs)
    state = drafter.start(
        prompts, np.array([t.tokens[t.start] for t in texts]), verified.hidden_states
    )
    last, at = np.array([len(t.tokens) - 1 for t in texts]), np.array([t.start for t in texts])
    while (live := np.flatnonzero(at < last)).size:
        tokens = [texts[r].tokens[at[r] : min(at[r] + length, last[r]) + 1] for r in live.tolist()]
        tree, asked, state = _draft_along_chains(drafter, state, live, [t[:-1] for t in tokens], k)
        verified = target.verify(cache, tree, drafter.needs, drafter.probes(state))
        if not bool(torch.isfinite(verified.logits.max(-1).values).all()):
            raise NotANumber(NOT_FINITE)
        yield ReplayStep(tree, asked, verified.logits, tokens, at.copy())
        kept = np.array([min(len(t) - 1, step or length) for t in tokens])
        paths = tuple(tree.of_row(r)[1:n] for r, n in zip(live.tolist(), kept, strict=True))
        verdict = AcceptResult(paths, np.array([t[n] for t, n in zip(tokens, kept, strict=True)]))
        target.commit(cache, tree, verdict)
        hidden_states = verified.hidden_states.take(
            np.concatenate([verdict.committed_nodes(root) for root in range(len(live))])
        )
        state = drafter.commit(state, tree, verdict, hidden_states)
        at[live] += kept


def _draft_along_chains(
    drafter: Drafter[Any], state: Any, live: Ints, blocks: Sequence[Ints], k: int
) -> tuple[Tree, list[tuple[Ints, Candidates]], Any]:
    """Draft after each token of given chains.

    Args:
        drafter: drafter that proposes the candidates.
        state: the drafter's state.
        live: the unfinished sequences.
        blocks: for each unfinished sequence, the tokens of its chain, beginning with the root.
        k: number of candidates after each token.

    Returns:
        The chains as a tree; for each depth, the nodes and the candidates after them; and the
        drafter's new state.
    """
    tree = Tree.from_roots(live, np.array([b[0] for b in blocks]))
    frontier, asked = np.arange(len(live)), []
    for depth in range(max(map(len, blocks))):
        candidates, state = drafter.expand(state, tree, frontier, k, Drawing())
        asked.append((frontier, candidates))
        which = np.searchsorted(live, tree.row[frontier])
        on = np.array([len(blocks[i]) > depth + 1 for i in which], np.bool_)
        if on.any():
            tokens, nothing = (
                np.array([blocks[i][depth + 1] for i in which[on]]),
                np.zeros(int(on.sum())),
            )
            forced = Candidates(tokens[:, None], nothing[:, None], draw=candidates.draw)
            tree = tree.append(frontier[on], tokens, nothing, nothing, forced)
        frontier = np.arange(len(tree) - int(on.sum()), len(tree))
    return tree, asked, state


def drive(target: Source, drafter: Drafter[Any], texts: Sequence[TokenText]) -> ComparedDrafts:
    """Decode given texts in blocks of `COMPARED_DEPTH` tokens, with one candidate after every token.

    Args:
        target: verifies every block, as in decoding.
        drafter: drafter that proposes the candidates.
        texts: the texts, all in one batch.

    Raises:
        NotANumber: the target's logits are not finite.
    """
    blocks = replay(target, drafter, texts, 1, COMPARED_DEPTH)
    return ComparedDrafts.concatenate(
        [
            _compare_candidates(block, nodes, found)
            for block in blocks
            for nodes, found in block.asked
        ]
    )


def _compare_candidates(block: ReplayStep, nodes: Ints, candidates: Candidates) -> ComparedDrafts:
    """Compare candidates with the target's choices after the nodes of one depth."""
    tree, logits = block.tree, block.logits[torch.from_numpy(nodes).to(block.logits.device)].float()
    p, choice = torch.softmax(logits, dim=-1), logits.argmax(-1)
    drafted, draft = np.isfinite(candidates.log_q[:, 0]), candidates.tokens[:, 0]
    overlap, surprise, covered = _beside(p, choice, candidates)
    chosen, rows = choice.cpu().numpy(), tree.row[nodes]
    return ComparedDrafts(
        rows,
        block.roots[rows],
        tree.depth[nodes] + 1,
        drafted,
        drafted & (draft == chosen),
        np.where(drafted, overlap, 0.0),
        np.exp(np.where(drafted, candidates.log_q[:, 0], -np.inf)),
        surprise,
        covered,
        chosen == block.following(nodes),
    )


def _beside(p: Tensor, choice: Tensor, candidates: Candidates) -> tuple[Floats, Floats, Bools]:
    """Return Σ min(p, q), the cross-entropy, and whether q includes the target's choice, all [F].

    `p` is [F, V], and `choice` is [F].
    """
    q = candidates.log_probs
    if q is None:
        token = torch.from_numpy(candidates.tokens[:, :1]).to(p.device)
        return (
            p.gather(-1, token)[:, 0].double().cpu().numpy(),
            np.zeros(len(p)),
            np.ones(len(p), np.bool_),
        )
    log_q = q.float()
    overlap, surprise = (
        torch.minimum(p, log_q.exp()).sum(-1),
        -(p * log_q.clamp(min=MIN_LOG_Q)).sum(-1),
    )
    covered = log_q.gather(-1, choice[:, None])[:, 0] > -torch.inf
    return overlap.double().cpu().numpy(), surprise.double().cpu().numpy(), covered.cpu().numpy()


DEFAULT_TEXTS, DEFAULT_TOKENS, DEFAULT_PROMPT_TOKENS = 12, 48, 16
"""Number of texts to measure on, number of tokens to draft in each, and number of first tokens of a
plain text that serve as its prompt."""


def suite_answers(
    target: Target, count: int = DEFAULT_TEXTS, tokens: int = DEFAULT_TOKENS
) -> list[TokenText]:
    """Return the target's greedy answers to `count` prompts, spread evenly over the shipped suite.

    Raises:
        UserError: no prompt fits the target's context, or every answer is shorter than 2 tokens.
    """
    if texts := greedy_answers(target, read_prompts(target, None, count, tokens), tokens):
        return texts
    raise UserError(
        "the target answers every prompt with fewer than 2 tokens; give texts to measure on with --data FILE"
    )


def read_prompts(
    target: Target, path: Path | None, count: int = DEFAULT_TEXTS, tokens: int = DEFAULT_TOKENS
) -> list[list[int]]:
    """Return the prompts of a file, see `read_texts`, or of the shipped suite, evenly spread.

    Raises:
        UserError: the file cannot be read, or no prompt leaves space for `tokens` new tokens.
    """
    if path is None:
        found = [encode(target.tokenizer, p.content) for p in suites.load("demo").prompts]
    else:
        found = [t.tokens[: t.start].tolist() for t in read_texts(target, path, count, tokens)]
    return take_evenly(prompts_that_fit(found, target, tokens), count)


def prompts_that_fit(prompts: Sequence[list[int]], target: Target, tokens: int) -> list[list[int]]:
    """Return the prompts after which the target's context has space for `tokens` new tokens.

    Raises:
        UserError: every prompt is too long.
    """
    context = target.decoder.context
    if fit := [ids for ids in prompts if len(ids) + tokens <= context]:
        return fit
    told = f"with {tokens} new tokens the shortest has {min(map(len, prompts)) + tokens}, allowed is the target's context of"
    raise UserError(f"all {len(prompts)} prompts are too long: {told} {context}")


def greedy_answers(
    target: Target, prompts: Sequence[Sequence[int]], tokens: int = DEFAULT_TOKENS
) -> list[TokenText]:
    """Return the target's greedy answers of at least 2 tokens to prompts of token ids.

    All answers are generated in one batch.
    """
    written = generate_plain(target, [Request(list(p), tokens, target.eos) for p in prompts]).tokens
    return [
        TokenText(np.array([*p, *w], np.int64), len(p))
        for p, w in zip(prompts, written, strict=True)
        if len(w) > 1
    ]


def take_evenly(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` items, at even distances in the sequence."""
    n = min(count, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def read_texts(
    target: Target, path: Path, count: int = DEFAULT_TEXTS, tokens: int = DEFAULT_TOKENS
) -> list[TokenText]:
    """Read texts from a file in a format that `train --data` accepts.

    The prompt of a text is a chat up to its first learnt response, or the first tokens of a plain
    text. The text has at most `tokens` tokens after the prompt.

    Raises:
        UserError: the file contains no readable text that is long enough.
    """
    found = []
    for sample in samples.read_samples([path], target.tokenizer, min(512, target.decoder.context)):
        first = int(np.flatnonzero(sample.learn)[0])
        start = first if first > 1 else min(DEFAULT_PROMPT_TOKENS, len(sample.tokens) // 2)
        text = TokenText(sample.tokens[: start + tokens], start)
        if start and len(text.tokens) - start > 1:
            found.append(text)
    if not found:
        raise UserError(f"'{path}' holds no text of at least 4 tokens, or response of at least 2")
    return take_evenly(found, count)
