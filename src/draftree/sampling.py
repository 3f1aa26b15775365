"""The target's distribution at a node, and the only source of randomness.

Shapes: N nodes, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Self, final

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from draftree.errors import NotANumber
from draftree.given import COUNT, Rule, check, optional, real, several, whole
from draftree.processors import named
from draftree.tree import Candidates, Draw, Floats, Ints

BEYOND = 8
"""Values that a top-k asks for beyond k; half-precision logits often tie."""


SPREAD = 1.0
"""How far apart the logits of target and drafter are taken to be: the scale of a Gumbel error.

For drafters of the demo the target's choices are likeliest, or nearly so, with 1, at temperatures 0.7, 1 and 1.3 alike; heads
that are far off would want some more (benchmarks/coupling.py).
"""
CALL = 2**32
"""What the kinds of noise of one call are fewer than."""
SHARE: Rule = "a number in (0, 1]", lambda v: real(v) and 0 < v <= 1
RULES: dict[str, Rule] = {
    "temperature": ("a finite number of at least 0", lambda v: real(v) and v >= 0),
    "top_k": COUNT,
    "top_p": SHARE,
    "min_p": ("a number in [0, 1]", lambda v: real(v) and 0 <= v <= 1),
    "typical_p": SHARE,
    "seed": ("a whole number in 0 … 2⁶⁴ − 1", lambda v: whole(v, 0, 2**64 - 1)),
}
"""What a setting may be, in words and as a test."""
KEPT = 64
"""Places whose noise is kept: drafter and target ask for the same ones, and a step's last are the next one's first."""


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become p, and the seed of the draws.

    Attributes:
        temperature: 0 for greedy decoding, else a divisor of the logits.
        top_k: how many of the likeliest tokens are kept; 0 keeps all.
        top_p: the least mass of likeliest tokens that is kept; 1 keeps all.
        min_p: the least probability kept, relative to the likeliest token; 0 keeps all.
        typical_p: the least mass of the most typical tokens that is kept; 1 keeps all.
        seed: seed of the keyed noise, 0 … 2⁶⁴ − 1.
        warpers: what makes p of the logits, instead of what the knobs above stand for.

    Raises:
        UserError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    warpers: tuple[LogitsProcessor, ...] | None = None

    def __post_init__(self) -> None:
        check(self, RULES | {"warpers": ("none, or logits processors", optional(lambda v: several(v, callable)))})
        for name in RULES:  # transformers' processors take Python's own numbers alone
            kind = int if name in ("top_k", "seed") else float
            object.__setattr__(self, name, kind(getattr(self, name)))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def knobs(self) -> Self:
        """The same without what differs from call to call."""
        return replace(self, seed=0, warpers=None)

    @cached_property
    def processors(self) -> Sequence[LogitsProcessor]:
        """Hugging Face's own processors, in the order `generate` applies them; none for greedy decoding."""
        if self.greedy:
            return ()
        if self.warpers is not None:
            return self.warpers
        steps: list[LogitsProcessor] = []
        if self.temperature != 1:
            steps.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            steps.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            steps.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            steps.append(MinPLogitsWarper(self.min_p))
        if self.typical_p < 1:
            steps.append(TypicalLogitsWarper(self.typical_p))
        return tuple(steps)


def processed(logits: Tensor, processors: Sequence[LogitsProcessor], ids: Sequence[int]) -> Tensor:
    """[V] logits of one place after processors, see `stages`."""
    *_, last = stages(logits, processors, ids)
    return last


def stages(logits: Tensor, processors: Sequence[LogitsProcessor], ids: Sequence[int]) -> Iterator[Tensor]:
    """[V] logits of one place as processors see them, float32 and theirs to change, and after each processor.

    Args:
        logits: [V] raw ones; float64 stays float64.
        processors: in their order.
        ids: the whole text before the place.
    """
    exact = logits.dtype is torch.float64
    scores = logits[None].to(copy=True, dtype=torch.float64 if exact else torch.float32)
    shown = torch.tensor([list(ids)], device=scores.device)
    yield scores[0]
    for step in processors:
        scores = step(shown, scores)
        yield scores[0]


def nothing_own(node: int) -> Sequence[LogitsProcessor]:
    """That no request has processors of its own."""
    return ()


@final
class Distributions:
    """p after every node of a tree, computed where it is asked for and nowhere else, and once.

    A processor that keeps count of its calls is called as plain decoding would call it: once for every token, in their order.

    Where processors leave nothing to choose, p is the target's own as if there were none, and `vouch` raises: an acceptor may
    look beyond the end of a text, where plain decoding asks nobody.

    Args:
        logits: [N, V] the target's raw logits.
        processors: what turns raw logits into the request's, given the node's whole text; the same for all requests.
        text: the token ids of a node's sequence up to and including it, asked only when there are processors.
        greedy: whether the temperature is 0, so that p is certain of the likeliest token.
        own: the processors of a node's own request, which come first.

    Raises:
        NotANumber: the logits hold NaN, or no finite number at some node.
    """

    def __init__(
        self,
        logits: Tensor,
        processors: Sequence[LogitsProcessor],
        text: Callable[[int], Sequence[int]],
        greedy: bool = False,
        own: Callable[[int], Sequence[LogitsProcessor]] = nothing_own,
    ) -> None:
        self._logits, self._processors, self._text, self._greedy, self._own = logits, processors, text, greedy, own
        best, index = logits.max(dim=-1)  # NaN wins a maximum, so the check costs no pass of its own
        if not bool(torch.isfinite(best).all()):
            raise NotANumber("the target's logits are not finite numbers (NaN or ∞): check its weights and dtype")
        self._argmax: list[int] = index.tolist()
        self._scores: dict[int, tuple[Tensor, Tensor]] = {}
        self._p: dict[int, Tensor] = {}
        self._refused: dict[int, NotANumber] = {}

    def raw(self, node: int) -> Tensor:
        """[V] the target's logits as they are."""
        return self._logits[node]

    def processed(self, node: int) -> Tensor:
        """[V] logits after the request's processors."""
        return self.scores(node)[1]

    def scores(self, node: int) -> tuple[Tensor, Tensor]:
        """[V] the logits that processors were given, with what they may have written into them; and what they made of them."""
        if node not in self._scores:
            if not (steps := (*self._own(node), *self._processors)):
                return self.raw(node), self.raw(node)
            try:
                given, *_, made = stages(self.raw(node), steps, self._text(node))
            except ValueError:  # some of transformers' processors raise where one before them has left no number
                self._refuse(node)
                given = made = self.raw(node)
            self._scores[node] = given, made
        return self._scores[node]

    def vouch(self, nodes: Ints) -> None:
        """Raises where nothing could be chosen after one of the nodes that a text goes through.

        Raises:
            NotANumber: a processor forbids every token there, or makes infinities of the logits (a tiny temperature in half
                precision, say).
        """
        for node in nodes.tolist():
            if node in self._refused:
                raise self._refused[node]

    def _refuse(self, node: int) -> None:
        """Notes why nothing can be chosen after a node: processors are asked once more, so that the first can be named."""
        steps, ids = (*self._own(node), *self._processors), self._text(node)
        who, did = f"one of the processors {', '.join(map(named, steps))}", "leaves no finite score"  # if it counts its calls
        for step, scores in zip(steps, islice(stages(self.raw(node), steps, ids), 1, None), strict=True):
            if not math.isfinite(best := float(scores.max())):
                who = f"processor {named(step)}"
                did = "forbids every token" if best == -math.inf else f"makes the best score {best}"
                break
        told = f"{who} {did} after {len(ids)} tokens, allowed are processors that leave one to choose"
        self._refused[node] = NotANumber(told)

    def argmax(self, node: int) -> int:
        """The likeliest token after a node; the lower id wins a tie. A processor may force one by a score of ∞."""
        if not self._processors and not self._own(node):
            return self._argmax[node]
        best, index = self.processed(node).max(dim=-1)
        if bool(best > -torch.inf):
            return int(index)
        self._refuse(node)
        return self._argmax[node]

    def __call__(self, node: int) -> Tensor:
        """[V] p(· | path of the node), float64 on the host."""
        if node not in self._p:
            self._p[node] = self._compute(node)
        return self._p[node]

    def _compute(self, node: int) -> Tensor:
        if self._greedy:
            certain = torch.zeros(self._logits.shape[-1], dtype=torch.float64)
            certain[self.argmax(node)] = 1
            return certain
        p = torch.softmax(self.processed(node).double().cpu(), dim=-1)
        if bool(torch.isfinite(p).all()):
            return p
        self._refuse(node)
        return torch.softmax(self.raw(node).double().cpu(), dim=-1)


class Chance(ABC):
    """Where an acceptor's randomness comes from: two methods, so that a test can branch over every outcome."""

    @abstractmethod
    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        """A token of distribution p [V], drawn for the place `depth` tokens behind sequence `row`'s root."""

    @abstractmethod
    def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
        """True with probability p, for the same place; `index` tells apart several questions about it."""


@final
class Keyed(Chance):
    """Noise that depends on (seed, request, position, token) alone, whatever was drafted (DESIGN, Exactness).

    A token is argmax(log p + g) with Gumbel noise g from the counter-based generator Philox, so plain and
    speculative decoding of one seed write the same text.

    Every other use of noise is keyed by the step's root too, so that it is fresh in every step: a rule that has looked at
    drafts it did not accept (block verification) would be wrong if the same place were drafted with the same noise again.

    Args:
        seed: the run's seed.
        requests: [R] each row's request number.
        positions: [R] the position in its sequence of each row's root.
        call: which of several calls of one seed this is. Rules by rejection need drafts that do not depend on the noise that
            judges them, and a drafter that remembers what an earlier call wrote with the same noise does.
    """

    def __init__(self, seed: int, requests: Ints, positions: Ints, call: int = 0) -> None:
        self._seed, self._requests, self._positions, self._call = seed, requests, positions, call

    def uniform(self, row: int, depth: int, kind: int, n: int) -> Floats:
        """[n] numbers in [0, 1) for one place; `kind` tells apart its uses, 0 being the target's own choice of a token."""
        root = int(self._positions[row])
        step = root + 1 if kind else 0
        return _uniform(self._seed, int(self._requests[row]), step, root + depth + 1, kind + self._call * CALL, n)

    def gumbel(self, row: int, depth: int, n: int) -> Floats:
        """[n] the noise that the target's token for a place is drawn with."""
        return _choosing(self._seed, int(self._requests[row]), int(self._positions[row]) + depth + 1, self._call * CALL, n)

    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(p.numpy()) + self.gumbel(row, depth, len(p))))

    def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
        return bool(self.uniform(row, depth, 1, index + 1)[index] < p)


def _uniform(seed: int, request: int, step: int, place: int, kind: int, n: int) -> Floats:
    key = np.array([seed, request], np.uint64)  # a list of large seeds would be read as floats
    generator = np.random.Philox(key=key, counter=[0, step, place, kind])
    return np.random.Generator(generator).random(n)


@lru_cache(KEPT)
def _choosing(seed: int, request: int, place: int, kind: int, n: int) -> Floats:
    """The target's noise for a place; one array serves all that ask, so nobody may change it."""
    noise = gumbel(_uniform(seed, request, 0, place, kind, n))
    noise.flags.writeable = False
    return noise


def gumbel(uniform: Floats) -> Floats:
    """Gumbel noise from numbers in [0, 1)."""
    with np.errstate(divide="ignore"):
        noise: Floats = -np.log(-np.log(uniform))
    return noise


@dataclass(frozen=True)
class Drawing:
    """How a drafter is to draw its candidates.

    Attributes:
        kind: of draw.
        sampling: the request's; q goes through the same warpers as p, and in greedy decoding through none.
        noise: for all but `point` draws.
        shaped: what the requests' own processors make of logits [F, V] after the frontier at hand.
    """

    kind: Draw = Draw.POINT
    sampling: Sampling = field(default_factory=Sampling)
    noise: Keyed | None = None
    shaped: Callable[[Tensor], Tensor] | None = None

    def log_q(self, logits: Tensor) -> Tensor:
        """Log q of a drafter's logits [F, V], in float32 or, where they are draws of their own or float64, in float64.

        Where a logit is NaN or ∞, or nothing is allowed, the whole row is NaN.
        """
        logits = logits.double() if self.noise is not None or logits.dtype is torch.float64 else logits.float()
        if self.shaped is not None:
            logits = self.shaped(logits)
        if self.sampling.processors:
            there = finite(logits)[:, None]
            logits = logits.where(there, 0.0)  # some warpers raise at NaN
            nobody = torch.zeros((len(logits), 0), dtype=torch.int64, device=logits.device)  # no warper asks for the text
            for step in self.sampling.processors:
                logits = step(nobody, logits)
            logits = logits.where(there, torch.nan)
        return torch.log_softmax(logits, dim=-1)


def finite(logits: Tensor) -> Tensor:
    """[F] whether the largest of each row of logits [F, V] is finite: NaN and ∞ win a maximum, and −∞ forbids a token."""
    return torch.isfinite(logits.amax(dim=-1))


def drawn(logits: Tensor, k: int, drawing: Drawing, rows: Ints, depths: Ints) -> Candidates:
    """K candidates from the drafter's logits; none after a node where these are no numbers (broken weights, an overflow).

    Args:
        logits: [F, V] after each frontier node.
        k: how many; fewer where the vocabulary is smaller.
        drawing: top-k for `point` draws (the lower id wins a tie) and for coupled ones, else samples of q.
        rows: [F] each frontier node's sequence.
        depths: [F] its depth.
    """
    found = _chosen(drawing.log_q(logits), min(k, logits.shape[-1]), drawing, rows, depths)
    nothing = np.isnan(found.log_q).any(axis=1, keepdims=True)  # seen on the host, where the candidates are in any case
    if not nothing.any():
        return found
    return replace(
        found,
        tokens=np.where(nothing, 0, found.tokens),
        log_q=np.where(nothing, -np.inf, found.log_q),
        log_probs=None if found.log_probs is None else absent(found.log_probs),
        unconditioned=None if found.unconditioned is None else absent(found.unconditioned),
        finite=bool(finite(logits).all()),
    )


def absent(log_q: Tensor) -> Tensor:
    """[F, V] log q with −∞ in place of NaN: what is no number is not there."""
    return log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def _chosen(log_probs: Tensor, k: int, drawing: Drawing, rows: Ints, depths: Ints) -> Candidates:
    """K candidates of q, drawn as they are to be."""
    before = None
    if drawing.kind is Draw.COUPLED and drawing.noise is not None:
        before, log_probs = log_probs, coupled(log_probs, drawing.noise, rows, depths, drawing.sampling.temperature)
    elif drawing.kind.sampled and drawing.noise is not None:
        return _sampled(log_probs, k, drawing.kind, drawing.noise, rows, depths)
    tokens, log_q = top_k(log_probs, k)
    draw = Draw.POINT if drawing.noise is None else drawing.kind
    return Candidates(tokens, log_q, log_probs, draw, unconditioned=before)


def coupled(log_probs: Tensor, noise: Keyed, rows: Ints, depths: Ints, temperature: float) -> Tensor:
    """[F, V] log q of what the target will choose, given the noise it will choose with.

    The target takes argmax(log p + g), and g is known before p is. Where the logits differ by Gumbel errors of scale `SPREAD`,
    log p and log q differ by errors of SPREAD / T, and the target's token is x with probability
    softmax((log q + g) · T / SPREAD)(x): the surer, the further the first is ahead.
    """
    places = zip(rows.tolist(), depths.tolist(), strict=True)
    g = np.stack([noise.gumbel(row, depth, log_probs.shape[-1]) for row, depth in places])
    return torch.log_softmax((log_probs + torch.from_numpy(g).to(log_probs.device)) * (temperature / SPREAD), dim=-1)


def _sampled(log_probs: Tensor, k: int, kind: Draw, noise: Keyed, rows: Ints, depths: Ints) -> Candidates:
    """K draws of each q; where without replacement fewer tokens can come, the others are missing."""
    log_q = log_probs.cpu().numpy()
    tokens = np.empty((len(rows), k), np.int64)
    for i, (row, depth) in enumerate(zip(rows.tolist(), depths.tolist(), strict=True)):
        if kind is Draw.WITHOUT_REPLACEMENT:  # the top k of log q + Gumbel noise, in order
            tokens[i] = np.argsort(-(log_q[i] + gumbel(noise.uniform(row, depth, 2, log_q.shape[1]))))[:k]
        else:
            for j in range(k):
                tokens[i, j] = np.argmax(log_q[i] + gumbel(noise.uniform(row, depth, 2 + j, log_q.shape[1])))
    return Candidates(tokens, np.take_along_axis(log_q, tokens, axis=1), log_probs, kind)


def allowed(candidates: Candidates, shaped: Callable[[Tensor], Tensor], vocab: int, device: torch.device) -> Candidates:
    """Candidates of a search without those that the processors of a request forbid.

    Args:
        candidates: [F, K], without a whole q.
        shaped: what the processors make of logits [F, V].
        vocab: V.
        device: the target's, where the processors expect to be called.
    """
    scores = shaped(torch.zeros(len(candidates.tokens), vocab, device=device)).cpu().numpy()
    forbidden = np.take_along_axis(scores, candidates.tokens, axis=1) == -np.inf
    return replace(candidates, log_q=np.where(forbidden, -np.inf, candidates.log_q))


def top_k(values: Tensor, k: int) -> tuple[Ints, Floats]:
    """The k largest of each row [F, V] in descending order; of equal ones the lower index comes first.

    `torch.topk` leaves the order of equal values open, so some more values are asked for: if the k-th is larger than
    the last of them, everything that equals it is there, and a sort on the host settles ties. Values and indices come
    there in one transfer, and only a longer tie takes another.
    """
    top = values.topk(min(k + BEYOND, values.shape[-1]), dim=-1)
    found, index = _on_host(top.values, top.indices)
    ties = found[:, 1:] == found[:, :-1]
    if ties[:, :k].any():
        if found.shape[1] < values.shape[1] and (found[:, k - 1] == found[:, -1]).any():
            whole = torch.sort(values, dim=-1, descending=True, stable=True)
            found, index = _on_host(whole.values[:, :k], whole.indices[:, :k])
        else:
            order = np.lexsort((index, -found))
            found, index = np.take_along_axis(found, order, axis=1), np.take_along_axis(index, order, axis=1)
    return index[:, :k], found[:, :k]


def _on_host(values: Tensor, indices: Tensor) -> tuple[Floats, Ints]:
    """Values and indices in one transfer; float64 holds whole numbers below 2⁵³ exactly."""
    both = torch.stack((values.double(), indices.double())).cpu().numpy()
    return both[0], both[1].astype(np.int64)
