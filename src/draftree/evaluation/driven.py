"""A drafter driven along texts that are known: what it would have drafted everywhere, beside what the target says there.

Shapes: R texts, M places, N nodes, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from draftree.acceptors.greedy import Greedy
from draftree.data import samples
from draftree.data.prompts import encode
from draftree.drafters.base import Drafter
from draftree.errors import NotANumber, UserError
from draftree.evaluation import suites
from draftree.loop import plain
from draftree.models.cache import SlotCache
from draftree.models.target import Needs, Probes, Taps, Target, Verified
from draftree.request import Request
from draftree.rows import Rows
from draftree.sampling.drawing import Drawing
from draftree.tree import Bools, Candidates, Floats, Ints, Tree, Verdict

DEPTHS = 5
"""How deep drafts are looked at, and how many tokens one step of the drive commits."""
LAST = -1
"""What the target's LM head reads."""
FLOOR = -20.0
"""Lowest log q that counts: a token that cannot be drafted is not infinitely surprising."""


@dataclass(frozen=True)
class Text:
    """One text: its token ids, and how many of them are the prompt (at least 1)."""

    tokens: Ints
    start: int


@dataclass(frozen=True)
class Places:
    """What was drafted and what the target says, place by place; a place is what follows a token of a text.

    Attributes:
        text: [M] which text.
        root: [M] the position of the token that is the root of the block.
        depth: [M] how deep the draft is, 1 … `DEPTHS`.
        drafted: [M] whether anything was.
        agree: [M] whether the likeliest draft is the target's choice; false where nothing was drafted.
        overlap: [M] Σ min(p, q) with the target's p at temperature 1; p of the draft where there is no whole q; 0 without.
        confidence: [M] q of the likeliest draft; 0 without.
        surprise: [M] cross-entropy of q against p in nats, no token's log q taken below `FLOOR`; 0 without a whole q.
        covered: [M] whether the target's choice is a token that can be drafted at all.
        followed: [M] whether the text goes on with the target's choice.
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
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All places of several drives."""
        return cls(*(np.concatenate([getattr(p, f) for p in parts]) for f in cls.__dataclass_fields__))

    @property
    def rates(self) -> Floats:
        """[depths] how often a greedy draft is accepted at a depth, where all before it were."""
        rates = np.zeros(DEPTHS)
        alive = dict.fromkeys(zip(self.text.tolist(), self.root.tolist(), strict=True), True)
        for depth in range(1, DEPTHS + 1):
            reached = matched = 0
            for i in np.flatnonzero(self.depth == depth):
                block = int(self.text[i]), int(self.root[i])
                if alive[block]:
                    reached, matched = reached + 1, matched + int(self.agree[i])
                    alive[block] = bool(self.agree[i] and self.followed[i])
            rates[depth - 1] = matched / reached if reached else 0.0
        return rates


class Source(Protocol):
    """What a drafter is driven with: a target, or something that stands in for one."""

    def new_cache(self, rows: int, slots: int) -> SlotCache: ...
    def prefill(self, cache: SlotCache, prompts: Sequence[Ints], needs: Needs) -> Verified: ...
    def verify(self, cache: SlotCache, tree: Tree, needs: Needs, probes: Probes | None = None) -> Verified: ...
    def commit(self, cache: SlotCache, tree: Tree, verdict: Verdict) -> None: ...


@dataclass(frozen=True)
class Recording:
    """What a target said along texts, so that a drafter can be driven again without it, and be told something else.

    Drafters that read keys and values, or send probes, need the target itself.

    Attributes:
        target: that was recorded.
        begins: [R] where each text begins in the packed tensors.
        hidden: for each entry 0 … L of `hidden_states` recorded, [T, D] of all tokens, text by text.
        given: which entry is handed out for another one.
        later: how many tokens later the state stands that is handed out for a token's own, never beyond those that the
            target has read by then.
    """

    target: Target
    begins: Ints
    hidden: Mapping[int, Tensor]
    given: Mapping[int, int] = field(default_factory=dict)
    later: int = 0

    @classmethod
    @torch.inference_mode()
    def of(cls, target: Target, texts: Sequence[Text], layers: Sequence[int] = ()) -> Self:
        """Reads all texts in one pass; layers are entries of `hidden_states`, and the last one is always among them."""
        needs = Needs(hidden=tuple(dict.fromkeys(target.decoder.hidden_index(layer) for layer in (*layers, LAST))))
        cache = target.new_cache(len(texts), max(len(t.tokens) for t in texts))
        taps = target.prefill(cache, [t.tokens for t in texts], needs).taps
        return cls(target, np.cumsum([0, *(len(t.tokens) for t in texts[:-1])]), taps.hidden)

    def told(self, given: Mapping[int, int] | None = None, later: int = 0) -> Self:
        """The recording as told otherwise."""
        return replace(self, given=given or {}, later=later)

    def after(self, rows: Ints, positions: Ints) -> Tensor:
        """[M, V] logits after some tokens."""
        decoder = self.target.decoder
        at = torch.from_numpy(self.begins[rows] + positions).to(decoder.device)
        return decoder.head(self.hidden[decoder.hidden_index(LAST)][at])

    def new_cache(self, rows: int, slots: int) -> SlotCache:
        return self.target.new_cache(rows, 1)  # only its lengths are used

    def prefill(self, cache: SlotCache, prompts: Sequence[Ints], needs: Needs) -> Verified:
        rows = np.concatenate([np.full(len(p), r) for r, p in enumerate(prompts)])
        positions = np.concatenate([np.arange(len(p)) for p in prompts])
        cache.lengths[:] = [len(p) for p in prompts]
        return Verified(torch.empty(0), self._taps(cache, rows, positions, np.concatenate(list(prompts)), needs))

    def verify(self, cache: SlotCache, tree: Tree, needs: Needs, probes: Probes | None = None) -> Verified:
        positions = cache.lengths[tree.row] + tree.depth
        return Verified(self.after(tree.row, positions), self._taps(cache, tree.row, positions, tree.tokens, needs))

    def commit(self, cache: SlotCache, tree: Tree, verdict: Verdict) -> None:
        for root in range(tree.roots):
            cache.lengths[tree.row[root]] += len(verdict.kept(root))

    def _taps(self, cache: SlotCache, rows: Ints, positions: Ints, tokens: Ints, needs: Needs) -> Taps:
        last = {r: int(positions[rows == r].max()) for r in np.unique(rows).tolist()}
        ends = np.array([last[r] for r in rows.tolist()])
        at = torch.from_numpy(self.begins[rows] + np.clip(positions + self.later, 0, ends)).to(cache.device)
        index = {layer: self.target.decoder.hidden_index(layer) for layer in needs.hidden}
        hidden = {layer: self.hidden[self.given.get(i, i)][at] for layer, i in index.items()}
        return Taps(hidden, rows, positions, tokens, cache)


@torch.inference_mode()
def drive(target: Source, drafter: Drafter[Any], texts: Sequence[Text], phase: int = 0) -> Places:
    """Decodes along texts in blocks of `DEPTHS` tokens: the first is a root, the others are taken for accepted drafts.

    Args:
        target: verifies every block, as in decoding.
        drafter: is asked for one candidate after every token.
        texts: all in one batch.
        phase: how many tokens the first block lacks.

    Raises:
        NotANumber: the target's logits are not finite.
    """
    rows = len(texts)
    cache = target.new_cache(rows, max(len(t.tokens) for t in texts) + DEPTHS)
    prompts = [t.tokens[: t.start] for t in texts]
    verified = target.prefill(cache, prompts, drafter.needs)
    state = drafter.start(prompts, np.array([t.tokens[t.start] for t in texts]), verified.taps)
    at, found = np.array([t.start for t in texts]), []
    length = DEPTHS - phase
    while (live := np.array([r for r in range(rows) if at[r] + 1 < len(texts[r].tokens)], np.int64)).size:
        ends = [min(int(at[r]) + length, len(texts[r].tokens) - 1) for r in live]
        blocks = [texts[r].tokens[at[r] : end] for r, end in zip(live, ends, strict=True)]
        tree, asked, state = chained(drafter, state, live, blocks, 1)
        verified = target.verify(cache, tree, drafter.needs, drafter.probes(state))
        nexts = [texts[r].tokens[at[r] + 1 : end + 1] for r, end in zip(live, ends, strict=True)]
        found += [_compared(tree, nodes, c, verified, live, at, nexts) for nodes, c in asked]
        bonus = np.array([n[-1] for n in nexts])
        verdict = Verdict(tuple(tree.of_row(int(r))[1:] for r in live), bonus)
        target.commit(cache, tree, verdict)
        kept = np.concatenate([verdict.kept(root) for root in range(len(live))])
        state = drafter.commit(state, tree, verdict, verified.taps.take(kept))
        at[live], length = ends, DEPTHS
    return Places.joined(found)


Proposed = list[tuple[Ints, Candidates]]
"""Nodes of one depth, and what was proposed after them."""


def chained(drafter: Drafter[Any], state: Any, live: Ints, blocks: Sequence[Ints], k: int) -> tuple[Tree, Proposed, Any]:
    """The chains of some blocks, one for each live row, and the k candidates proposed after the nodes of each depth."""
    tree = Tree.planted(live, np.array([b[0] for b in blocks]))
    frontier, asked = np.arange(len(live)), []
    for depth in range(max(map(len, blocks))):
        candidates, state = drafter.expand(state, tree, frontier, k, Drawing())
        asked.append((frontier, candidates))
        which = np.searchsorted(live, tree.row[frontier])
        on = np.array([len(blocks[i]) > depth + 1 for i in which], np.bool_)
        if on.any():
            tokens, nothing = np.array([blocks[i][depth + 1] for i in which[on]]), np.zeros(int(on.sum()))
            forced = Candidates(tokens[:, None], nothing[:, None], draw=candidates.draw)
            tree = tree.append(frontier[on], tokens, nothing, nothing, forced)
        frontier = np.arange(len(tree) - int(on.sum()), len(tree))
    return tree, asked, state


def _compared(
    tree: Tree, nodes: Ints, candidates: Candidates, verified: Verified, live: Ints, at: Ints, nexts: Sequence[Ints]
) -> Places:
    """The places after the nodes of one depth."""
    logits = verified.logits[torch.from_numpy(nodes).to(verified.logits.device)].float()
    if not bool(torch.isfinite(logits.max(-1).values).all()):
        raise NotANumber("the target's logits are not finite numbers (NaN or ∞): check its weights and dtype")
    p, choice = torch.softmax(logits, dim=-1), logits.argmax(-1)
    drafted, draft = np.isfinite(candidates.log_q[:, 0]), candidates.tokens[:, 0]
    overlap, surprise, covered = _beside(p, choice, candidates)
    depth = tree.depth[nodes]
    following = np.array([nexts[i][d] for i, d in zip(np.searchsorted(live, tree.row[nodes]), depth, strict=True)])
    chosen = choice.cpu().numpy()
    return Places(
        tree.row[nodes], at[tree.row[nodes]], depth + 1, drafted, drafted & (draft == chosen), np.where(drafted, overlap, 0.0),
        np.exp(np.where(drafted, candidates.log_q[:, 0], -np.inf)), surprise, covered, chosen == following,
    )  # fmt: skip


def _beside(p: Tensor, choice: Tensor, candidates: Candidates) -> tuple[Floats, Floats, Bools]:
    """[F] Σ min(p, q), the cross-entropy, and whether q gives the target's choice any chance."""
    q = candidates.log_probs
    if q is None:
        token = torch.from_numpy(candidates.tokens[:, :1]).to(p.device)
        return p.gather(-1, token)[:, 0].double().cpu().numpy(), np.zeros(len(p)), np.ones(len(p), np.bool_)
    log_q = q.float()
    overlap, surprise = torch.minimum(p, log_q.exp()).sum(-1), -(p * log_q.clamp(min=FLOOR)).sum(-1)
    covered = log_q.gather(-1, choice[:, None])[:, 0] > -torch.inf
    return overlap.double().cpu().numpy(), surprise.double().cpu().numpy(), covered.cpu().numpy()


TEXTS, TOKENS, PROMPT = 12, 48, 16
"""Texts measured on, tokens of each that are drafted, and how much of a plain text is taken for its prompt."""


def answers(target: Target, suite: str = "demo", count: int = TEXTS, tokens: int = TOKENS) -> list[Text]:
    """What the target itself answers, greedily, to prompts spread over a suite: text as it will be drafted.

    Raises:
        UserError: no prompt fits the target's context, or it answers nothing.
    """
    encoded = [encode(target.tokenizer, p.content) for p in suites.load(suite).prompts]
    fit = [e for e in encoded if len(e) + tokens <= target.decoder.context]
    if not fit:
        raise UserError(
            f"no prompt of suite '{suite}' fits the target's context of {target.decoder.context} with {tokens} new tokens"
        )
    chosen = [fit[i * len(fit) // min(count, len(fit))] for i in range(min(count, len(fit)))]
    return answered(target, chosen, tokens)


def answered(target: Target, prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[Text]:
    """What the target answers to prompts of token ids.

    Raises:
        UserError: every answer is shorter than 2 tokens.
    """
    requests = [Request(list(p), tokens, target.eos) for p in prompts]
    written = Rows(target.new_cache(len(requests), max(map(len, prompts)) + tokens))
    for _ in plain(target, Greedy(), written, requests):
        pass
    pairs = zip(prompts, written.written, strict=True)
    texts = [Text(np.array([*p, *w], np.int64), len(p)) for p, w in pairs if len(w) > 1]
    if not texts:
        raise UserError("the target answers every prompt with fewer than 2 tokens; name text to measure on with --data FILE")
    return texts


def read(target: Target, path: Path, count: int = TEXTS, tokens: int = TOKENS) -> list[Text]:
    """Texts of a file as `train --data` reads it: responses of chats, and plain text behind its first tokens.

    Raises:
        UserError: nothing in it can be read, or is long enough.
    """
    found = []
    for sample in samples.read([path], target.tokenizer, min(512, target.decoder.context)):
        first = int(np.flatnonzero(sample.learn)[0])
        start = first if first > 1 else min(PROMPT, len(sample.tokens) // 2)
        text = Text(sample.tokens[: start + tokens], start)
        if start and len(text.tokens) - start > 1:
            found.append(text)
    if not found:
        raise UserError(f"'{path}' holds no text of at least 4 tokens, or response of at least 2")
    return [found[i * len(found) // min(count, len(found))] for i in range(min(count, len(found)))]
