"""The target's distribution at a node, and the only source of randomness.

Shapes: N nodes, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftree.errors import NotANumber, UserError
from draftree.tree import Candidates, Draw, Floats, Ints

BEYOND = 8
"""Values that a top-k asks for beyond k; half-precision logits often tie."""


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become p, and the seed of the draws.

    Attributes:
        temperature: 0 for greedy decoding, else a divisor of the logits.
        top_k: how many of the likeliest tokens are kept; 0 keeps all.
        top_p: the least mass of likeliest tokens that is kept; 1 keeps all.
        min_p: the least probability kept, relative to the likeliest token; 0 keeps all.
        seed: seed of the keyed noise, 0 … 2⁶⁴ − 1.

    Raises:
        UserError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed, ok in (
            ("temperature", "a finite number of at least 0", 0 <= self.temperature < math.inf),
            ("top_k", "a whole number of at least 0", self.top_k >= 0),
            ("top_p", "a number in (0, 1]", 0 < self.top_p <= 1),
            ("min_p", "a number in [0, 1]", 0 <= self.min_p <= 1),
            ("seed", "a whole number in 0 … 2⁶⁴ − 1", 0 <= self.seed < 2**64),
        ):
            if not ok:
                raise UserError(f"{name} is {getattr(self, name)}, allowed is {allowed}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @cached_property
    def processors(self) -> Sequence[LogitsProcessor]:
        """Hugging Face's own processors, in the order `generate` applies them; none for greedy decoding."""
        if self.greedy:
            return ()
        steps: list[LogitsProcessor] = []
        if self.temperature != 1:
            steps.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            steps.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            steps.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            steps.append(MinPLogitsWarper(self.min_p))
        return tuple(steps)


@final
class Distributions:
    """p after every node of a tree, computed where it is asked for and nowhere else.

    Args:
        logits: [N, V] the target's raw logits.
        processors: what turns raw logits into the request's, given the node's whole text.
        text: the token ids of a node's sequence up to and including it, asked only when there are processors.
        greedy: whether the temperature is 0, so that p is certain of the likeliest token.

    Raises:
        NotANumber: the logits hold NaN, or no finite number at some node.
    """

    def __init__(
        self,
        logits: Tensor,
        processors: Sequence[LogitsProcessor],
        text: Callable[[int], Sequence[int]],
        greedy: bool = False,
    ) -> None:
        self._logits, self._processors, self._text, self._greedy = logits, processors, text, greedy
        best, index = logits.max(dim=-1)  # NaN wins a maximum, so the check costs no pass of its own
        if not bool(torch.isfinite(best).all()):
            raise NotANumber("the target's logits are not finite numbers (NaN or ∞): check its weights and dtype")
        self._argmax: list[int] = index.tolist()

    def processed(self, node: int) -> Tensor:
        """[V] logits after the request's processors."""
        scores = self._logits[node : node + 1]
        if self._processors:
            ids = torch.tensor([list(self._text(node))], device=scores.device)
            for step in self._processors:
                scores = step(ids, scores)
        return scores[0]

    def argmax(self, node: int) -> int:
        """The likeliest token after a node; the lower id wins a tie."""
        if not self._processors:
            return self._argmax[node]
        return int(self.processed(node).argmax())

    def __call__(self, node: int) -> Tensor:
        """[V] p(· | path of the node), float64 on the host.

        Raises:
            NotANumber: a processor made infinities of the logits (a tiny temperature in half precision, say).
        """
        if self._greedy:
            certain = torch.zeros(self._logits.shape[-1], dtype=torch.float64)
            certain[self.argmax(node)] = 1
            return certain
        p = torch.softmax(self.processed(node).double().cpu(), dim=-1)
        if not bool(torch.isfinite(p).all()):
            raise NotANumber("the processed logits are not finite numbers: the temperature is too small for the dtype")
        return p


class Chance(ABC):
    """Where an acceptor's randomness comes from: two methods, so that a test can branch over every outcome."""

    @abstractmethod
    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        """A token of distribution p [V], drawn for the place `depth` tokens behind sequence `row`'s root."""

    @abstractmethod
    def bernoulli(self, p: float, row: int, depth: int) -> bool:
        """True with probability p, for the same place."""


@final
class Keyed(Chance):
    """Noise that depends on (seed, request, position, token) alone, whatever was drafted (DESIGN, Exactness).

    A token is argmax(log p + g) with Gumbel noise g from the counter-based generator Philox, so plain and
    speculative decoding of one seed write the same text.

    Args:
        seed: the run's seed.
        requests: [R] each row's request number.
        positions: [R] the position in its sequence of each row's root.
    """

    def __init__(self, seed: int, requests: Ints, positions: Ints) -> None:
        self._seed, self._requests, self._positions = seed, requests, positions

    def uniform(self, row: int, depth: int, kind: int, n: int) -> Floats:
        """[n] numbers in [0, 1) for one place; `kind` tells apart the uses of a place."""
        place = int(self._positions[row]) + depth + 1
        key = np.array([self._seed, int(self._requests[row])], np.uint64)  # a list of large seeds would be read as floats
        generator = np.random.Philox(key=key, counter=[0, 0, place, kind])
        return np.random.Generator(generator).random(n)

    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(p.numpy()) + gumbel(self.uniform(row, depth, 0, len(p)))))

    def bernoulli(self, p: float, row: int, depth: int) -> bool:
        return bool(self.uniform(row, depth, 1, 1)[0] < p)


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
        temperature: the request's; sampled draws come from q at this temperature.
        noise: for sampled draws.
    """

    kind: Draw = Draw.POINT
    temperature: float = 0.0
    noise: Keyed | None = None


def drawn(logits: Tensor, k: int, drawing: Drawing, rows: Ints, depths: Ints) -> Candidates:
    """K candidates from the drafter's logits.

    Args:
        logits: [F, V] after each frontier node.
        k: how many; fewer where the vocabulary is smaller.
        drawing: top-k for `point` draws (the lower id wins a tie), else samples of q at the request's temperature.
        rows: [F] each frontier node's sequence.
        depths: [F] its depth.
    """
    k = min(k, logits.shape[-1])
    if drawing.kind is Draw.POINT or drawing.noise is None:
        log_probs = torch.log_softmax(logits if logits.dtype is torch.float64 else logits.float(), dim=-1)
        tokens, log_q = top_k(log_probs, k)
        return Candidates(tokens, log_q, log_probs)
    log_probs = torch.log_softmax(logits.double() / (drawing.temperature or 1.0), dim=-1)
    log_q_all = log_probs.cpu().numpy()
    tokens = np.empty((len(rows), k), np.int64)
    for i, (row, depth) in enumerate(zip(rows.tolist(), depths.tolist(), strict=True)):
        if drawing.kind is Draw.WITHOUT_REPLACEMENT:  # the top k of log q + Gumbel noise, in order
            tokens[i] = np.argsort(-(log_q_all[i] + gumbel(drawing.noise.uniform(row, depth, 2, log_q_all.shape[1]))))[:k]
        else:
            for j in range(k):
                noise = gumbel(drawing.noise.uniform(row, depth, 2 + j, log_q_all.shape[1]))
                tokens[i, j] = np.argmax(log_q_all[i] + noise)
    return Candidates(tokens, np.take_along_axis(log_q_all, tokens, axis=1), log_probs, drawing.kind)


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
