"""Choose or sample candidates from the draft distribution q.

Shapes: F frontier nodes, K candidates, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from draftree.kernels.log_probs import log_softmax, reads, top_of
from draftree.kernels.topk import likeliest
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.params import Sampling
from draftree.sampling.warpers import apply_warpers
from draftree.tree import Bools, Candidates, DraftVocab, Draw, Floats, Ints, mask_nan
from draftree.utils.hardware import has_float64, to_device

EXTRA_TOP_K = 8
"""Number of values that a top-k requests beyond k, because half-precision logits often tie."""
GUMBEL_ERROR_SCALE = 1.0
"""The assumed difference of drafter and target logits, as the scale of a Gumbel error.

For drafters of the demo, 1 gives the target's choices the highest likelihood, or nearly so, at
temperatures 0.7, 1 and 1.3. Less accurate draft heads would need a larger value
(benchmarks/coupling.py).
"""


@dataclass(frozen=True)
class Drawing:
    """Store the parameters by which a drafter chooses its candidates.

    Attributes:
        kind: how candidates are chosen: the likeliest ones (`POINT`), or with random noise.
        settings: [R] the sampling settings of each sequence. q goes through the same warpers as p.
            In greedy decoding q goes through none. Empty if all sequences are greedy.
        noise: source of the random noise; None for `POINT`.
        shaped: applies the requests' own processors to logits [F, V] after the current frontier.
    """

    kind: Draw = Draw.POINT
    settings: Sequence[Sampling] = ()
    noise: Keyed | None = None
    shaped: Callable[[Tensor], Tensor] | None = None

    def log_q(self, logits: Tensor, rows: Ints) -> Tensor:
        """Return log q [F, V] of a drafter's logits, in float32 or float64.

        It is float64 if the choice uses noise, and for float64 logits. If a logit of a node is NaN
        or ∞, or no token is allowed, all log q of the node are NaN.

        Args:
            logits: [F, V] logits after each frontier node.
            rows: [F] the sequence of each frontier node.
        """
        if self.noise is not None and not has_float64(logits.device):
            logits = logits.cpu()
        logits = (
            logits.double()
            if self.noise is not None or logits.dtype is torch.float64
            else logits.float()
        )
        if self.shaped is not None:
            logits = self.shaped(logits)
        each = {row: self.settings[row] for row in set(rows.tolist())} if self.settings else {}
        if len(different := set(each.values())) == 1:
            logits = warp_finite_rows(logits, *different)
        else:
            for setting in different:
                mine = torch.tensor(
                    [each[row] == setting for row in rows.tolist()], device=logits.device
                )
                logits = torch.where(mine[:, None], warp_finite_rows(logits, setting), logits)
        return log_softmax(logits)

    @property
    def by_node(self) -> bool:
        """Whether nodes with equal logits may get different candidates."""
        return self.shaped is not None or (self.noise is not None and self.kind.is_sampled)

    def is_unchanged(self, rows: Ints) -> bool:
        """Return whether q is the softmax of the drafter's unchanged logits in float32.

        Args:
            rows: [F] the sequence of each frontier node.
        """
        if self.noise is not None or self.shaped is not None:
            return False
        return not any(self.settings[row].processors for row in rows.tolist() if self.settings)

    def temperature(self, row: int) -> float:
        """Return the temperature of a sequence, which is 0 for greedy decoding."""
        return self.settings[row].temperature if self.settings else 0.0


def warp_finite_rows(logits: Tensor, setting: Sampling) -> Tensor:
    """Return logits […, V] after temperature and cuts; all NaN where the largest is not finite.

    Without temperature and cuts they are returned unchanged.
    """
    if not setting.processors:
        return logits
    there = finite(logits)[..., None]
    return apply_warpers(logits.where(there, 0.0), setting.processors).where(
        there, torch.nan
    )  # some warpers raise an error at NaN


def finite(logits: Tensor) -> Tensor:
    """Return […] whether the largest of logits […, V] is finite.

    NaN and ∞ count as the maximum, and −∞ forbids a token.
    """
    return torch.isfinite(logits.amax(dim=-1))


def draw_candidates(
    logits: Tensor,
    k: int,
    drawing: Drawing,
    rows: Ints,
    depths: Ints,
    drafted: DraftVocab | None = None,
) -> Candidates:
    """Choose K candidates after each frontier node from the drafter's logits.

    A node gets no candidates if its logits are not finite, as with broken weights or an overflow.

    Args:
        logits: [F, V] after each frontier node, or [F, V′] for a draft vocabulary.
        k: number of candidates; fewer if the vocabulary is smaller.
        drawing: the kind of choice. `point` and coupled choices take the top k (the lower id wins a
            tie), the others sample from q.
        rows: [F] the sequence of each frontier node.
        depths: [F] the depth of each frontier node.
        drafted: the draft vocabulary; by default all tokens can be drafted.
    """
    if drafted is not None:
        # What chooses among a few of the tokens is cheaper than what chooses among all of them;
        # noise and processors know all.
        if drawing.noise is None and drawing.shaped is None:
            found = draw_candidates(logits, k, drawing, rows, depths)
            return replace(found, tokens=drafted.numbers[found.tokens], drafted=drafted)
        logits = drafted.whole(logits)
    k = min(k, logits.shape[-1])
    if reads(logits) and drawing.is_unchanged(rows):
        tokens, log_q, log_sums = top_of(logits, k)
        found = Candidates(tokens, log_q, logits, log_sums=log_sums)
    else:
        found = _draw_by_kind(drawing.log_q(logits, rows), k, drawing, rows, depths)
    nothing = np.isnan(found.log_q).any(
        axis=1, keepdims=True
    )  # no sync: candidates are on the host
    if not nothing.any():
        return found
    return replace(
        found,
        tokens=np.where(nothing, 0, found.tokens),
        log_q=np.where(nothing, -np.inf, found.log_q),
        logs=found.logs
        if found.logs is None or found.log_sums is not None
        else mask_nan(found.logs),
        unconditioned=None if found.unconditioned is None else mask_nan(found.unconditioned),
        finite=bool(finite(logits).all()),
    )


def _draw_by_kind(
    log_probs: Tensor, k: int, drawing: Drawing, rows: Ints, depths: Ints
) -> Candidates:
    """Choose K candidates from log q in the requested way."""
    before = None
    if drawing.kind is Draw.COUPLED and drawing.noise is not None:
        before, log_probs = log_probs, couple_log_q(log_probs, drawing, rows, depths)
    elif drawing.kind.is_sampled and drawing.noise is not None:
        return _draw_samples(log_probs, k, drawing.kind, drawing.noise, rows, depths)
    tokens, log_q = top_k(log_probs, k)
    draw = Draw.POINT if drawing.noise is None else drawing.kind
    return Candidates(tokens, log_q, log_probs, draw, unconditioned=before)


def couple_log_q(log_probs: Tensor, drawing: Drawing, rows: Ints, depths: Ints) -> Tensor:
    """Return log q [F, V] of the target's choice, given the noise that samples this choice.

    The target chooses argmax(log p + g), and the noise g is known before p. If the logits of
    drafter and target differ by Gumbel errors of scale s = `GUMBEL_ERROR_SCALE`, log p and log q
    differ by errors of scale s / T at temperature T. The target's token is then distributed as
    softmax((log q + g) · T / s). For greedy sequences, which have no noise, log q is returned
    unchanged.
    """
    assert drawing.noise is not None
    scale = np.array([drawing.temperature(row) / GUMBEL_ERROR_SCALE for row in rows.tolist()])
    open_ = np.flatnonzero(scale)
    noise = drawing.noise.gumbel_of(
        rows[open_], depths[open_], log_probs.shape[1], log_probs.device
    )
    if len(open_) == len(rows) and (scale == scale[0]).all():  # a plain number needs no copy
        return torch.log_softmax((log_probs + noise) * float(scale[0]), dim=-1)
    at, scales = to_device(
        np.stack((open_, scale[open_].view(np.int64))), log_probs.device
    )  # float64 is sent as int64
    known = torch.log_softmax((log_probs[at] + noise) * scales.view(torch.float64)[:, None], dim=-1)
    return log_probs.index_copy(0, at, known)


def _draw_samples(
    log_probs: Tensor, k: int, kind: Draw, noise: Keyed, rows: Ints, depths: Ints
) -> Candidates:
    """Sample K tokens from each q, independently for all nodes.

    `Traversal` judges the tokens below one sibling before the next sibling, so equal noise at equal
    depths would bias it. Sampling without replacement may yield fewer tokens; the others are then
    missing.
    """
    drawn = partial(noise.gumbel_of, rows, depths, log_probs.shape[1], log_probs.device)
    first = 2 + k * _count_earlier(rows, depths)
    if kind is Draw.WITHOUT_REPLACEMENT:  # the top k of log q + Gumbel noise, in order
        tokens, _ = top_k(log_probs + drawn(kind=first), k)
    else:
        each = [top_k(log_probs + drawn(kind=first + j), 1)[0] for j in range(k)]
        tokens = np.concatenate(each, axis=1)
    bare = Candidates(tokens, np.zeros(tokens.shape), log_probs, kind)
    return replace(bare, log_q=bare.log_of(tokens))


def _count_earlier(rows: Ints, depths: Ints) -> Ints:
    """Return for each node [F] how many earlier ones have its sequence and its depth."""
    seen = Counter[tuple[int, int]]()
    counts = np.empty(len(rows), np.int64)
    for i, place in enumerate(zip(rows.tolist(), depths.tolist(), strict=True)):
        counts[i] = seen[place]
        seen[place] += 1
    return counts


def drop_forbidden(
    candidates: Candidates, shaped: Callable[[Tensor], Tensor], vocab: int, device: torch.device
) -> Candidates:
    """Remove candidates that a request's processors forbid.

    Args:
        candidates: [F, K] candidates without a full distribution q.
        shaped: applies the processors to logits [F, V].
        vocab: V, the size of the vocabulary.
        device: the target's device, on which the processors are called.
    """
    scores = shaped(torch.zeros(len(candidates.tokens), vocab, device=device)).cpu().numpy()
    forbidden = np.take_along_axis(scores, candidates.tokens, axis=1) == -np.inf
    return replace(candidates, log_q=np.where(forbidden, -np.inf, candidates.log_q))


def on_host(values: Tensor) -> bool:
    """Return whether values can be read on the host without a copy."""
    return values.is_cpu and values.dtype in (torch.float32, torch.float64)


def top_k(values: Tensor, k: int) -> tuple[Ints, Floats]:
    """Return the indices and the values [F, k] of the k largest entries of vectors [F, V].

    Both are on the host and in falling order of the values. The lower index wins a tie.

    `torch.topk` does not define the order of equal values. So a few more than k are requested, and
    copied to the host with their indices in one transfer. Ties are settled there. If the k-th value
    equals the last of these, more equal values may exist. Only then the device sorts the whole
    vectors, which costs a second transfer. Values that are on the host already are read directly.
    """
    if on_host(values):
        return likeliest(values.contiguous().numpy(), k)
    top = values.topk(min(k + EXTRA_TOP_K, values.shape[-1]), dim=-1)
    found, index = _on_host(top.values, top.indices)
    ties = found[:, 1:] == found[:, :-1]
    if ties[:, :k].any():
        if found.shape[1] < values.shape[1] and (found[:, k - 1] == found[:, -1]).any():
            whole = torch.sort(values, dim=-1, descending=True, stable=True)
            found, index = _on_host(whole.values[:, :k], whole.indices[:, :k])
        else:
            order = np.lexsort((index, -found))
            found, index = (
                np.take_along_axis(found, order, axis=1),
                np.take_along_axis(index, order, axis=1),
            )
    return index[:, :k], found[:, :k]


def _on_host(values: Tensor, indices: Tensor) -> tuple[Floats, Ints]:
    """Return values and indices on the host, copied in one transfer.

    float64 represents integers below 2⁵³ exactly.
    """
    if not has_float64(values.device):
        return values.cpu().double().numpy(), indices.cpu().numpy()
    both = torch.stack((values.double(), indices.double())).cpu().numpy()
    return both[0], both[1].astype(np.int64)


def insert_empty_candidates(found: Candidates, open_: Bools) -> Candidates:
    """Return candidates for all nodes of a frontier; nodes with a forced token get none.

    Args:
        found: the candidates after the other nodes.
        open_: [F] whether a node has no forced token.
    """
    if open_.all():
        return found
    spread = found.share_lists(np.maximum(np.cumsum(open_) - 1, 0))
    return replace(spread, log_q=np.where(open_[:, None], spread.log_q, -np.inf))


def insert_forced_tokens(found: Candidates, forced: Ints) -> Candidates:
    """Return candidates for all nodes of a frontier; nodes with a forced token get that token.

    Args:
        found: the candidates after the other nodes.
        forced: [F] the token that must come after a node; −1 for nodes without one.
    """
    fixed = np.flatnonzero(forced >= 0)
    place = np.cumsum(forced < 0) - 1  # index of each open node in `found`
    whole = replace(found, logs=found.log_probs, drafted=None, log_sums=None)
    whole = whole.share_lists(np.maximum(place, 0))
    tokens, log_q = whole.tokens.copy(), whole.log_q.copy()
    tokens[fixed], log_q[fixed] = 0, -np.inf
    tokens[fixed, 0], log_q[fixed, 0] = forced[fixed], 0.0

    def certain(logs: Tensor | None) -> Tensor | None:
        if logs is None:
            return None
        logs, at = logs.clone(), torch.from_numpy(fixed).to(logs.device)
        logs[at] = -torch.inf
        logs[at, torch.from_numpy(forced[fixed]).to(logs.device)] = 0.0
        return logs

    unconditioned = found.unconditioned
    if unconditioned is not None and found.drafted is not None:
        unconditioned = found.drafted.whole(unconditioned)
    if unconditioned is not None:
        unconditioned = unconditioned[
            torch.from_numpy(np.maximum(place, 0)).to(unconditioned.device)
        ]
    return replace(
        whole,
        tokens=tokens,
        log_q=log_q,
        logs=certain(whole.logs),
        unconditioned=certain(unconditioned),
    )
