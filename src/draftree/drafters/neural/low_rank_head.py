"""A low-rank LM head that finds candidate tokens; the full head then scores them exactly.

A logit is the product of a state h [D] and the token's row of the head W [V, D]. If μ is the mean
row, W − 1 μᵀ ≈ U A, with U [V, r] and A [r, D]: the best approximation of rank r. μᵀ h is the same
for all tokens, so the largest entries of U (A h) are likely those of W h. U has r / D of the head's
weights. Rare tokens stay possible, unlike with a draft vocabulary; q is over the candidates alone.

Shapes: D hidden size, V vocabulary, r rank, m candidates.
"""

import hashlib
import logging
from contextlib import suppress
from pathlib import Path
from typing import final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from draftree.errors import UserError
from draftree.utils.files import cache_folder, replace_file

LOG = logging.getLogger("draftree")
ROWS = 4096
"""Number of rows of a head that are converted to float64 at a time."""


@final
class CandidateHead(nn.Module):
    """Computes the logits of each state's m candidates, and −∞ for all other tokens.

    The candidates of a state are the m tokens with the largest logits by an approximation of the
    head of rank r. Their logits are then computed with the full head.

    Args:
        rows: [V, D] the weight of the full head.
        rank: r, the rank of the approximation, at least 1 and at most D.
        count: m, the number of candidates; at most V.
        method: name of the method, for error messages.
        bias: [V] the bias of the head, if it has one.

    Raises:
        UserError: the rank is larger than D.
    """

    def __init__(
        self, rows: Tensor, rank: int, count: int, method: str, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        vocab, width = rows.shape
        if rank > width:
            raise UserError(
                f"{method}: head_rank is {rank}, allowed is at most the width of the head: {width}"
            )
        self.down = nn.Linear(width, rank, bias=False, device=rows.device, dtype=rows.dtype)
        self.up = nn.Linear(
            rank, vocab, bias=bias is not None, device=rows.device, dtype=rows.dtype
        )
        down, up = factors(rows, rank)
        self.down.weight.data.copy_(down)
        self.up.weight.data.copy_(up)
        if bias is not None:
            self.up.bias.data.copy_(bias)
        self.requires_grad_(False)
        self._rows = rows.detach()
        self._bias = bias
        self._count = min(count, vocab)

    @property
    def weight(self) -> Tensor:
        """Return the weight of the full head [V, D]."""
        return self._rows

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits […, V] for states […, D]."""
        flat = states.to(self._rows.dtype).flatten(0, -2)
        near = self.up(self.down(flat)).float()  # a CPU's top-k of half precision is slow
        found = near.topk(self._count, dim=-1, sorted=False).indices
        products = [
            linear(state, self._rows.index_select(0, at))
            for state, at in zip(flat[:, None], found, strict=True)
        ]
        exact = torch.cat(
            products
        ).float()  # node by node: one product of gathered rows is slow in half precision
        if self._bias is not None:
            exact = exact + self._bias[found]
        logits: Tensor = torch.full_like(near, -torch.inf).scatter_(1, found, exact)
        return logits.view(*states.shape[:-1], -1)


def factors(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return V [r, D] and U [V, r] in float32, a low-rank approximation of a head.

    U V is the best approximation of rank r of the head's rows minus their mean. The factors are
    computed once, and stored in the cache folder under a hash of the rows.

    Args:
        rows: [V, D] the weight of the head.
        rank: r, the rank of the approximation.
    """
    file = cache_folder() / "factors" / f"{_digest(rows)}-{rank}.safetensors"
    with suppress(Exception):  # a missing or broken file is computed again
        kept = load_file(file)
        if kept["down"].shape == (rank, rows.shape[1]) and kept["up"].shape == (
            rows.shape[0],
            rank,
        ):
            return kept["down"], kept["up"]
    down, up = decompose_head(rows, rank)
    _keep(file, {"down": down, "up": up})
    return down, up


@torch.inference_mode()
def decompose_head(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Compute the factors of a head, see `factors`.

    The singular vectors of the centred rows are the eigenvectors of their covariance.
    """
    host = rows.detach().cpu()
    mean, parts = host.double().mean(dim=0), host.split(ROWS)
    square = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for part in parts:
        centred = part.double() - mean
        square += centred.T @ centred
    vectors = torch.linalg.eigh(square).eigenvectors[:, -rank:]
    up = torch.cat([((part.double() - mean) @ vectors).float() for part in parts])
    return vectors.T.float().contiguous(), up


def _digest(rows: Tensor) -> str:
    """Return a hash of the bits, the shape and the dtype of a head's rows."""
    hashed = hashlib.sha256(f"{tuple(rows.shape)} {rows.dtype}".encode())
    for part in rows.detach().split(ROWS):
        hashed.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:32]


def _keep(file: Path, tensors: dict[str, Tensor]) -> None:
    try:
        with replace_file(file) as part:
            save_file(tensors, part)
    except OSError as error:
        LOG.info("the factors of the head are not kept: %s", error)
