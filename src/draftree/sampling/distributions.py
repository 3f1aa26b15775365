"""The target's distribution at each tree node, and the interface of random sources.

Shapes: N nodes, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import final

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from draftree.errors import NotANumber, UserError
from draftree.kernels.topk import largest
from draftree.sampling.logits_processors import TENSORS, processor_name
from draftree.sampling.warpers import WARPERS, apply_warpers
from draftree.tree import Ints
from draftree.utils.hardware import to_device

NOT_FINITE = "the target's logits are not finite numbers (NaN or ∞): check its weights and dtype"


def apply_processors(
    logits: Tensor, processors: Sequence[LogitsProcessor], ids: Sequence[int]
) -> Tensor:
    """Return the logits [V] after a node, after all processors; see `stages`."""
    *_, last = stages(logits, processors, ids)
    return last


def stages(
    logits: Tensor, processors: Sequence[LogitsProcessor], ids: Sequence[int]
) -> Iterator[Tensor]:
    """Yield the logits [V] that processors receive, then the logits after each processor.

    They are float32, unless the raw logits are float64. Processors may write into them.

    Args:
        logits: [V] raw logits; float64 stays float64.
        processors: the processors, in their order.
        ids: all token ids before the predicted token.
    """
    exact = logits.dtype is torch.float64
    scores = logits[None].to(copy=True, dtype=torch.float64 if exact else torch.float32)
    shown = torch.tensor([list(ids)], device=scores.device)
    yield scores[0]
    for step in processors:
        scores = step(shown, scores)
        yield scores[0]


def apply_guides(logits: Tensor, guides: Sequence[LogitsProcessor], ids: Sequence[int]) -> Tensor:
    """Return draft logits [V] after a request's guides.

    All are −∞ if a guide rejects the drafted prefix, because the target cannot generate it.
    """
    try:
        return apply_processors(logits, guides, ids)
    except UserError:
        return torch.full_like(
            logits,
            -torch.inf,
            dtype=torch.float64 if logits.dtype is torch.float64 else torch.float32,
        )


@final
class Distributions:
    """Compute the target's distribution p after each node of a tree, on demand and only once.

    A processor that counts its calls is called as in plain decoding: once for every token, in their
    order. If a processor fails or all tokens are forbidden, p is the target's own distribution
    without processors, and `raise_if_invalid` raises an error. The error is delayed because an
    acceptor may look beyond the end of a text, where plain decoding computes nothing. For the same
    reason, logits that are not finite are an error only at nodes that become part of a text.

    Args:
        logits: [N, V] the target's raw logits.
        processors: maps a node to the processors of its request, which are given its whole text;
            none by default.
        text: maps a node to the token ids of its sequence up to and including the node; called only
            if there are processors.
        greedy: maps a node to whether its temperature is 0, so that p is 1 at the likeliest token.
        told: two lists [N] that the host may know already: the results of `likeliest`, and the
            token that the noise samples after each node, −1 if it must be computed.
        noise: maps nodes [M] to noise [M, V] on the logits' device, which samples the target's
            tokens after them. All tokens are then sampled there at once, and only they are copied
            to the host.
        at: [N] the index of each node's logits, if they are in another order; not allowed with
            noise.
        likeliest: whether the target's token after each node is the likeliest one, because all
            texts are greedy and no processor changes logits.

    Attributes:
        known: [N] the target's token after each node, if all are the likeliest ones; None if they
            must be computed one by one.
    """

    def __init__(
        self,
        logits: Tensor,
        processors: Callable[[int], Sequence[LogitsProcessor]] = lambda node: (),
        text: Callable[[int], Sequence[int]] = lambda node: (),
        greedy: Callable[[int], bool] = lambda node: False,
        told: tuple[Sequence[int], Sequence[int]] | None = None,
        noise: Callable[[Ints], Tensor] | None = None,
        at: Ints | None = None,
        likeliest: bool = False,
    ) -> None:
        self._logits = logits
        self._processors = processors
        self._text = text
        self.greedy = greedy
        self._at = at
        self._scores: dict[int, tuple[Tensor, Tensor]] = {}
        if told is None:
            told = (_likeliest(logits, at), ()) if noise is None else self._choose_tokens(noise)
        best, self._drawn = told
        self._not_finite = {n for n, token in enumerate(best) if token < 0}
        self._argmax = [max(token, 0) for token in best] if self._not_finite else best
        self.known = np.array(self._argmax, np.int64) if likeliest else None
        self._p: dict[int, Tensor] = {}
        self._refused: dict[int, Exception] = {n: NotANumber(NOT_FINITE) for n in self._not_finite}

    def raw(self, node: int) -> Tensor:
        """Return the target's raw logits [V] after a node."""
        return self._logits[node if self._at is None else int(self._at[node])]

    def processed_logits(self, node: int) -> Tensor:
        """Return the logits [V] after a node, changed by the request's processors."""
        return self.scores(node)[1]

    def scores(self, node: int) -> tuple[Tensor, Tensor]:
        """Return the logits [V] of a node before and after its processors.

        Processors may have written into the tensor that they got, so the first may be changed.
        """
        if node not in self._scores:
            if not (steps := self._processors(node)):
                return self.raw(node), self.raw(node)
            if all(
                type(step) in WARPERS for step in steps
            ):  # the text need not be brought to the device
                raw = self.raw(node)
                given = raw if raw.dtype is torch.float64 else raw.float()
                self._scores[node] = given, apply_warpers(given[None], steps)[0]
                return self._scores[node]
            try:
                given, *_, made = stages(self.raw(node), steps, self._text(node))
            except ValueError:  # some processors raise if an earlier one left no finite score
                self._refuse(node)
                given = made = self.raw(node)
            except Exception as error:  # raised if the node is part of the text
                self._refused.setdefault(node, error)
                given = made = self.raw(node)
            self._scores[node] = given, made
        return self._scores[node]

    def raise_if_invalid(self, nodes: Ints) -> None:
        """Raise an error if no token can be chosen after one of the given nodes.

        Raises:
            NotANumber: the target's logits there contain NaN or no finite number, or a processor
                forbids every token or makes logits infinite (for example by a tiny temperature in
                half precision).
            Exception: whatever a processor has raised there.
        """
        for node in nodes.tolist():
            if node in self._refused:
                raise self._refused[node]

    def _refuse(self, node: int) -> None:
        """Record why no token can be chosen after a node.

        The processors are run again, so that the message can name the first faulty one.
        """
        if node in self._refused:
            return
        steps, ids = self._processors(node), self._text(node)
        who, did = (
            f"one of the processors {', '.join(map(processor_name, steps))}",
            "leaves no finite score",
        )  # used if a processor counts its calls
        for step, scores in zip(
            steps, islice(stages(self.raw(node), steps, ids), 1, None), strict=True
        ):
            if not math.isfinite(best := float(scores.max())):
                who = f"processor {processor_name(step)}"
                did = "forbids every token" if best == -math.inf else f"makes the best score {best}"
                break
        told = (
            f"{who} {did} after {len(ids)} tokens, allowed are processors that leave one to choose"
        )
        self._refused[node] = NotANumber(told)

    def argmax(self, node: int) -> int:
        """Return the likeliest token after a node; the lower id wins a tie.

        A processor may force a token by a score of ∞.
        """
        if not self._processors(node):
            return self._argmax[node]
        best, index = self.processed_logits(node).max(dim=-1)
        if bool(best > -torch.inf):
            return int(index)
        self._refuse(node)
        return self._argmax[node]

    def sample_token(self, node: int, choose: Callable[[Tensor], int]) -> int:
        """Return the token that the target samples after a node.

        Args:
            node: the node.
            choose: samples a token from softmax(scores [V]), with the noise of the node's place;
                returns −1 if this is not a distribution.
        """
        if self._drawn and self._drawn[node] >= 0:
            return self._drawn[node]
        if (token := choose(self.processed_logits(node))) >= 0:
            return token
        self._refuse(node)
        return max(choose(self.raw(node)), 0)

    def _choose_tokens(self, noise: Callable[[Ints], Tensor]) -> tuple[list[int], list[int]]:
        """Return the likeliest tokens [N] after all nodes, and the sampled tokens [N].

        A token is −1 if it must be computed individually.
        """
        together, answers = dict[Sequence[LogitsProcessor], list[int]](), [likeliest(self._logits)]
        for node in range(n := len(self._logits)):
            if not self.greedy(node):
                together.setdefault(tuple(self._processors(node)), []).append(node)
        order = list[int]()
        for steps, nodes in together.items():
            if all(type(step) in WARPERS for step in steps):
                some = (
                    self._logits
                    if len(nodes) == n
                    else self._logits[to_device(np.array(nodes), self._logits.device)]
                )
                scores = apply_warpers(some, steps)
            elif all(type(step) in WARPERS or type(step) in TENSORS for step in steps):
                scores = torch.stack([self.processed_logits(node) for node in nodes])
            else:
                continue
            answers.append(likeliest(scores.double() + noise(np.array(nodes))))
            order += nodes
        told: list[int] = torch.cat(answers).tolist()
        drawn = np.full(n, -1)
        drawn[order] = told[n:]
        return told[:n], drawn.tolist()

    def __call__(self, node: int) -> Tensor:
        """Return p [V] after a node's path, as float64 on the host."""
        if node not in self._p:
            self._p[node] = self._compute(node)
        return self._p[node]

    def _compute(self, node: int) -> Tensor:
        if node in self._not_finite:
            raise self._refused[node]
        if self.greedy(node):
            certain = torch.zeros(self._logits.shape[-1], dtype=torch.float64)
            certain[self.argmax(node)] = 1
            return certain
        p = torch.softmax(self.processed_logits(node).cpu().double(), dim=-1)
        if bool(torch.isfinite(p).all()):
            return p
        self._refuse(node)
        return torch.softmax(self.raw(node).cpu().double(), dim=-1)


def likeliest(logits: Tensor) -> Tensor:
    """Return the tokens […] with the largest of logits […, V]; the lower id wins a tie.

    A token is −1 if its logit is NaN or infinite. NaN counts as the maximum, so that no separate
    check is needed.
    """
    best, index = logits.max(dim=-1)
    return index.masked_fill(~best.isfinite(), -1)


def _likeliest(logits: Tensor, at: Ints | None) -> list[int]:
    """Return the likeliest token of each vector of logits [N, V], as a list on the host.

    Args:
        logits: [N, V] the logits.
        at: the indices of the vectors, in the order of the list; by default all.
    """
    found = _all_likeliest(logits)
    return found if at is None else [found[i] for i in at.tolist()]


def _all_likeliest(logits: Tensor) -> list[int]:
    if logits.is_cpu and logits.dtype is torch.bfloat16:
        tokens: list[int] = largest(logits.contiguous().view(torch.int16).numpy()).tolist()
        return tokens
    if logits.is_cpu:  # torch takes ten times as long
        whole = (
            logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        ).numpy()
        at = whole.argmax(axis=-1)
        found: list[int] = np.where(
            np.isfinite(np.take_along_axis(whole, at[:, None], -1)[:, 0]), at, -1
        ).tolist()
        return found
    there: list[int] = likeliest(logits).tolist()
    return there
