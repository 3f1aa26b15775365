"""Measure numerical noise between runs, and sample tokens after a root for frequency tests.

Shapes: n tokens of a text, V vocabulary or outcomes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.batch import SequenceBatch
from draftree.engine import Engine, default_acceptor, run_loop
from draftree.evaluation.target_trace import Recording, TokenText
from draftree.loop import decode_plain
from draftree.models.kv_cache import SlotCache
from draftree.request import Emitted, Request, Scores
from draftree.sampling.keyed_noise import Keyed, RandomSource
from draftree.sampling.params import Sampling
from draftree.target.target import HiddenStateSpec, Target
from draftree.tree import AcceptResult, Floats, Ints, Tree

NOISE_FACTOR = 4
"""Factor of the measured noise up to which a difference of logits counts as noise."""
COMPARED_LOGITS = 64
"""Number of likeliest tokens at each position whose logits are compared."""
COUNTED_TOKENS = 2
"""Number of tokens after a root that are drawn and counted together."""
EXTRA_TOKENS = 8
"""Number of new tokens allowed beyond these, so that trees are as deep as in the middle of a
text."""
BEST_ENTROPY = 1.5
"""Best entropy in nats of the token after a root: the token is neither certain nor different in
every trial."""
NARROW_TOKENS = 24
"""Number of tokens of each text that the target reads one by one to measure its numerical noise."""


@dataclass(frozen=True)
class Noise:
    """Store the rounding differences between passes over different numbers of tokens.

    They are measured between plain decoding and one pass over the whole text, and do not count as
    errors.

    Attributes:
        logits: largest difference of logits; see `logit_shift`.
        p: largest difference of a token's probability.
        tv: largest total variation distance between two distributions of the next token.
        scale: largest absolute value of a position's largest logit.
    """

    logits: float = 0.0
    p: float = 0.0
    tv: float = 0.0
    scale: float = 0.0

    def joined(self, other: Self) -> Self:
        """Return the larger value of each figure."""
        mine, theirs = asdict(self), asdict(other)
        return type(self)(**{name: max(mine[name], theirs[name]) for name in mine})

    def allowed(self, dtype: torch.dtype) -> float:
        """Return the largest difference of logits that noise or rounding to `dtype` explains."""
        return NOISE_FACTOR * max(self.logits, torch.finfo(dtype).eps * self.scale)


@dataclass(frozen=True)
class Root:
    """Describe a position in a text after which tokens are drawn.

    Attributes:
        text: number of the prompt.
        before: token ids before the root, beginning with those of the prompt.
        token: token id of the root.
        distance: distance of the next token's entropy from `BEST_ENTROPY`, in nats.
    """

    text: int
    before: list[int]
    token: int
    distance: float


class OutputRecorder:
    """Collect the tokens of one text, and the logits from which each was chosen."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scores: list[Scores] = []

    def __call__(self, events: list[Emitted]) -> None:
        """Add the tokens and scores of a step."""
        for event in events:
            self.tokens += event.tokens
            self.scores += event.scores

    def raw(self, count: int) -> Tensor:
        """Return [count, V] the target's unprocessed logits for the first `count` tokens."""
        return torch.stack([s.raw for s in self.scores[:count]])


class ForcedFirstToken(RandomSource):
    """Draw with the keyed noise, but choose a given token as the first one of each text.

    All sequences then draw tokens after the same root.

    Args:
        rows: the sequences being generated.
        root: token id of the root.
    """

    def __init__(self, rows: SequenceBatch, root: int) -> None:
        self._rows, self._root = rows, root

    @override
    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        return (
            self._rows.noise.categorical(p, row, depth) if self._rows.written[row] else self._root
        )

    @override
    def choose(self, scores: Tensor, row: int, depth: int) -> int:
        return (
            self._rows.noise.choose(scores, row, depth) if self._rows.written[row] else self._root
        )

    @override
    def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
        return self._rows.noise.bernoulli(p, row, depth, index)


def sample_plain(
    target: Target, root: Root, sampling: Sampling, batches: Iterable[range]
) -> list[tuple[int, ...]]:
    """Return for each trial the tokens that plain decoding generates after a root.

    A trial generates `COUNTED_TOKENS` tokens. `batches` are the indices of the trials.
    """
    found: list[tuple[int, ...]] = []
    cache: SlotCache | None = None
    for numbers in batches:
        if cache is None or cache.rows != len(numbers) or not target.reuses_prefixes:
            cache = target.new_cache(len(numbers), len(root.before) + COUNTED_TOKENS + 1)
        cache.truncate(np.full(cache.rows, len(root.before)))
        prompt, rows = [*root.before, root.token], SequenceBatch(cache)
        requests = [
            Request(prompt, COUNTED_TOKENS, target.eos, n, sampling=sampling) for n in numbers
        ]
        run_loop(decode_plain(target, default_acceptor(sampling.greedy), rows, requests), rows)
        found += map(tuple, rows.written)
    return found


def sample_speculative(
    engine: Engine, root: Root, sampling: Sampling, batches: Iterable[range]
) -> list[tuple[int, ...]]:
    """Return for each trial the tokens that an engine with drafts generates after a root.

    A trial generates `COUNTED_TOKENS` tokens. `batches` are the indices of the trials.
    """
    found: list[tuple[int, ...]] = []
    enough = len(root.before) + 1 + COUNTED_TOKENS
    engine.forget()
    for numbers in batches:
        wanted = Request(
            root.before,
            1 + COUNTED_TOKENS + EXTRA_TOKENS,
            engine.eos,
            criteria=(lambda ids, _: ids.shape[1] >= enough,),
        )
        numbered = [replace(wanted, number=n) for n in numbers]
        rows, steps = engine.begin(
            numbered, sampling, source=lambda rows: ForcedFirstToken(rows, root.token)
        )
        run_loop(steps, rows)
        found += (tuple(w[1:]) for w in rows.written)
    return found


def logit_shift(a: Tensor, b: Tensor) -> float:
    """Return the largest difference between two sets of logits [n, V].

    At each position, only the `COMPARED_LOGITS` likeliest tokens of `a` are compared. Their logits
    are taken relative to that of the likeliest token.
    """
    best = a.topk(min(COMPARED_LOGITS, a.shape[-1]), dim=-1).indices
    moved = b.gather(-1, best).cpu().double() - a.gather(-1, best).cpu().double()
    apart = (moved - moved[:, :1]).abs()
    return float(apart.masked_fill(apart.isnan(), 0).max())  # tokens that are at −∞ in both


def margin_at_difference(
    base: OutputRecorder, ours: OutputRecorder, at: int, sampling: Sampling, noise: Keyed
) -> float:
    """Return plain decoding's logit margin at the first token at which two texts differ.

    It is the difference between the logits of plain decoding's own token and of the other one, at
    temperatures above 0 including the sampling noise. It is ∞ if plain decoding could not have
    chosen the other token.

    Args:
        base: tokens and scores of plain decoding.
        ours: tokens of the other text.
        at: index of the first token at which they differ.
        sampling: sampling settings of both texts.
        noise: sampling noise whose next draw belongs to this token.
    """
    if at >= len(base.tokens) or at >= len(ours.tokens):
        return math.inf  # they agree on every token, and one of them has gone on
    scores = base.scores[at].processed.cpu().double().numpy()
    if not sampling.greedy:
        scores = (scores + noise.gumbel(0, 0, len(scores))) * sampling.temperature
    margin = float(scores[base.tokens[at]] - scores[ours.tokens[at]])
    return math.inf if math.isnan(margin) else abs(margin)


@torch.inference_mode()
def measure_noise(target: Target, prompt: Sequence[int], base: OutputRecorder) -> Noise:
    """Measure the differences between plain decoding and one pass of the stock model.

    The stock model reads the whole text. If its rotary frequencies change with the length of the
    text, such a pass differs from plain decoding by design, and only the part before the change is
    compared.
    """
    count, boundary = len(base.tokens), target.decoder.rope_boundary
    if boundary is not None and (boundary[0] == "dynamic" or len(prompt) <= boundary[1]):
        count = min(count, boundary[1] - len(prompt) + 1)
    if count < 1:
        return Noise()
    ids = torch.tensor([[*prompt, *base.tokens[: count - 1]]], device=target.decoder.device)
    wide = target.decoder.model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0]
    narrow = base.raw(count)
    p, q = (torch.softmax(x.cpu().double(), dim=-1) for x in (narrow, wide))
    apart = (p - q).abs()
    scale = float(narrow.max(dim=-1).values.abs().max())
    return Noise(
        logit_shift(narrow, wide), float(apart.max()), float(apart.sum(-1).max() / 2), scale
    )


def most_uncertain_root(text: int, prompt: list[int], base: OutputRecorder) -> Root | None:
    """Return the position after which the next token's entropy is nearest to `BEST_ENTROPY`.

    The result is None for a text of fewer than 2 tokens.
    """
    if len(base.tokens) < 2:
        return None
    p = torch.softmax(base.raw(len(base.tokens))[1:].cpu().double(), dim=-1)
    away = (torch.special.entr(p).sum(-1) - BEST_ENTROPY).abs()
    at = int(away.argmin())
    return Root(text, [*prompt, *base.tokens[:at]], base.tokens[at], float(away[at]))


def frequency_distance(a: Floats, b: Floats) -> tuple[float, float]:
    """Return the total variation distance between two samples, and its expectation.

    The expectation is computed for two samples from the same distribution.

    Args:
        a: [V] counts of each outcome in the first sample.
        b: [V] counts of each outcome in the second sample.
    """
    n, m = a.sum(), b.sum()
    p = (a + b) / (n + m)
    spread = np.sqrt(p * (1 - p) * (1 / n + 1 / m))
    return float(np.abs(a / n - b / m).sum() / 2), float(spread.sum() * math.sqrt(2 / math.pi) / 2)


@torch.inference_mode()
def narrow_and_wide(target: Target, texts: Sequence[TokenText]) -> tuple[np.ndarray, np.ndarray]:
    """Measure the margin of the two largest logits in narrow and in wide passes.

    A narrow pass reads one token of each text, a wide pass whole texts. The two results are arrays
    [M] over M positions: |narrow margin − wide margin|, and the narrow margin. Both margins are of
    the two likeliest tokens of the narrow pass.
    """
    record = Recording.of(target, texts)
    cache = target.new_cache(len(texts), max(len(t.tokens) for t in texts))
    target.prefill(cache, [t.tokens[: t.start] for t in texts], HiddenStateSpec())
    changes, margins = [], []
    for i in range(NARROW_TOKENS):
        live = np.array([r for r, t in enumerate(texts) if t.start + i < len(t.tokens)], np.int64)
        if not live.size:
            break
        positions = np.array([texts[r].start + i for r in live])
        tree = Tree.from_roots(
            live, np.array([texts[r].tokens[p] for r, p in zip(live, positions, strict=True)])
        )
        top = target.verify(cache, tree, HiddenStateSpec()).logits.topk(2)
        wide = record.after(live, positions).gather(-1, top.indices).cpu().double()
        values = top.values.cpu().double()
        margin = values[:, 0] - values[:, 1]
        margins.append(margin.numpy())
        changes.append((margin - (wide[:, 0] - wide[:, 1])).abs().numpy())
        nothing: tuple[Ints, ...] = (np.zeros(0, np.int64),) * len(live)
        target.commit(cache, tree, AcceptResult(nothing, tree.tokens))
    return np.concatenate(changes), np.concatenate(margins)
