"""The likeliest tokens of logits and their log q, without computing log q of all tokens.

Shapes: F distributions, V tokens, K likeliest ones.
"""

import numpy as np
import torch
from torch import Tensor

from draftree.kernels.entropy import MAX_EXPONENT, VECTOR_FLOATS, exponential
from draftree.kernels.log_exp import log
from draftree.kernels.topk import likeliest
from draftree.native import Array, core, native
from draftree.native.cpu_threads import thread_count

BLOCK_VALUES = 8 * VECTOR_FLOATS
"""Number of values in a block.

Each column of a block is summed in float32, and the sums of blocks are added in float64.
"""


@native
def top_log_probs(logits: Array, k: int, threads: int) -> tuple[Array, Array, Array]:
    """Return the k likeliest tokens [F, K], their log q [F, K], and the log-sum-exp [F] of logits.

    Log q is the logit minus the log-sum-exp, rounded to float32 and returned in float64. Of tokens
    with equal log q the lower id comes first. If the largest logit of a vector is not finite, or
    one is NaN, its tokens are 0 … K − 1 and all its other results are NaN.

    Args:
        logits: [F, V] float32, or bfloat16 as int16.
        k: the number of tokens; limited to V.
        threads: number of C++ threads that share the work; the results do not depend on it.
    """
    if logits.dtype == np.int16:
        logits = (logits.astype(np.int32) << 16).view(np.float32)
    rows, width = logits.shape
    padded = np.full((rows, -(-width // BLOCK_VALUES) * BLOCK_VALUES), -np.inf, np.float32)
    padded[:, :width] = logits
    top = padded.max(axis=1, initial=-np.inf, keepdims=True)
    known = np.isfinite(top)
    distances = np.where(known, top, 0) - np.where(known, padded, 0)
    weights = exponential(np.where(distances < MAX_EXPONENT, distances, MAX_EXPONENT))
    count = padded.shape[1] // BLOCK_VALUES
    columns = weights.reshape(rows, count, BLOCK_VALUES // VECTOR_FLOATS, VECTOR_FLOATS)
    blocks = np.zeros((rows, count, VECTOR_FLOATS), np.float32)
    for i in range(BLOCK_VALUES // VECTOR_FLOATS):
        blocks = blocks + columns[:, :, i]
    sums = np.cumsum(blocks, axis=1, dtype=np.float64)[:, -1]
    total = np.cumsum(sums, axis=1)[:, -1]
    log_sums = (top[:, 0] + log(np.where(known[:, 0], total, 1.0))).astype(np.float32)
    log_sums = np.where(known[:, 0], log_sums, np.float32(np.nan))
    tokens, log_q = likeliest(np.ascontiguousarray(logits - log_sums[:, None]), k)
    return tokens, log_q, log_sums


AVAILABLE = core is not None and hasattr(core.loops, "top_log_probs")
"""Whether the C++ function exists; without it, PyTorch is faster than the Python function."""


def reads(logits: Tensor) -> bool:
    """Return whether the C++ function supports the dtype and device of logits."""
    return AVAILABLE and logits.is_cpu and logits.dtype in (torch.float32, torch.bfloat16)


def top_of(logits: Tensor, k: int) -> tuple[Array, Array, Array]:
    """Return the result of `top_log_probs` for logits [F, V] that it supports."""
    logits = logits.detach().contiguous()
    bits = logits.view(torch.int16) if logits.dtype is torch.bfloat16 else logits
    return top_log_probs(bits.numpy(), k, thread_count())


def log_softmax(logits: Tensor) -> Tensor:
    """Return log q […, V] of logits […, V] in float32 or float64.

    For float32 on a CPU the result is bitwise that of `top_log_probs`, and elsewhere that of
    PyTorch.
    """
    if not reads(logits) or not logits.numel():
        return torch.log_softmax(logits, dim=-1)
    sums = torch.from_numpy(top_of(logits.reshape(-1, logits.shape[-1]), 1)[2])
    return logits - sums.view(*logits.shape[:-1], 1)
