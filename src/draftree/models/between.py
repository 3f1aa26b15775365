"""What a layer of a loaded model does between its matrix products, in one call each: norms, rotations, gates.

Torch takes six to twelve small operations for each, which after a matrix product, when the caches hold weights, cost several
times what they cost by themselves. Ours (`native/dense.py`) stand in for those that they are found to agree with.

Shapes: R rows of a batch, n tokens, H heads, D entries.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from draftree.models.sources import Kernels
from draftree.native import dense
from draftree.native.dense import DTYPES

ROTATE = "apply_rotary_pos_emb"
"""The name of transformers' function in its modeling modules."""
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""The parts of a gated feed-forward layer."""
_MARK = "__draftree__"
"""An attribute of the functions that are in the place of `ROTATE`."""


def shorten(model: nn.Module, kernels: Kernels | None = None) -> None:
    """Lets norms, rotations and gates be computed by one call each, where that gives what the model's own give.

    Rotations give the same bits, so that all models of an architecture may have them. Norms add in another order.

    Args:
        model: on a CPU, in a dtype of the kernels; others are left as they are.
        kernels: `stock` leaves it as it is.
    """
    own = next(model.parameters(), None)
    if dense.core is None or kernels == "stock" or own is None or own.device.type != "cpu" or own.dtype not in DTYPES:
        return
    for file in {sys.modules[type(m).__module__] for m in model.modules()}:
        _dispatched(file)
    agreed: dict[Any, bool] = {}
    for module in model.modules():
        if (ours := _ours(module)) is not None and "forward" not in vars(module):
            kind = type(module), *((tuple(p.shape), p.dtype) for p in module.parameters()), repr(module)
            if kind not in agreed:
                agreed[kind] = _agrees(module, ours, own.dtype)
            if agreed[kind]:
                module.forward = MethodType(ours, module)


def shortened(model: nn.Module) -> list[str]:
    """The kinds of modules that are computed by our calls, for the record."""
    return sorted({type(m).__name__ for m in model.modules() if _is_ours(vars(m).get("forward"))})


def epsilon_of(norm: nn.Module) -> float | None:
    """What a norm adds to a mean square; None where it is not computed by our call."""
    forward: Any = vars(norm).get("forward")
    ours = isinstance(forward, MethodType) and getattr(forward.__func__, "func", None) is _normed
    return float(forward.__func__.keywords["epsilon"]) if ours else None


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, MethodType) and getattr(forward.__func__, "func", None) in (_normed, _fed)


def _ours(module: nn.Module) -> Callable[..., Tensor] | None:
    """Our forward for a module, if it looks like one that we have one for."""
    epsilon = vars(module).get("variance_epsilon", vars(module).get("eps"))
    children, weights = {name for name, _ in module.named_children()}, dict(module.named_parameters())
    if type(module).__name__.endswith("RMSNorm") and set(weights) == {"weight"} and isinstance(epsilon, float):
        return partial(_normed, epsilon=epsilon)
    return partial(_fed) if children == GATED and not list(module.parameters(recurse=False)) else None


@torch.inference_mode()
def _agrees(module: Any, ours: Callable[..., Tensor], dtype: torch.dtype) -> bool:
    """True where a module's own forward and ours differ by rounding alone, on random rows."""
    width = module.weight.shape[-1] if hasattr(module, "weight") else module.gate_proj.in_features
    rows = torch.empty(1, 8, width).normal_(generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = module(rows)
    return bool(torch.allclose(ours(module, rows), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6))


def _plain(*tensors: Tensor) -> bool:
    """True where a kernel may read tensors' memory, and no gradient is wanted."""
    dtype, grad = tensors[0].dtype, torch.is_grad_enabled()
    for t in tensors:  # asked a hundred times a pass
        if t.dtype is not dtype or not t.is_cpu or (grad and t.requires_grad) or not t.is_contiguous():
            return False
    return dtype in DTYPES


def _normed(module: Any, rows: Tensor, epsilon: float) -> Tensor:
    """The forward of a norm over the last of […, D]."""
    weight = module.weight
    if torch.compiler.is_compiling() or not _plain(rows, weight):
        stock: Tensor = type(module).forward(module, rows)
        return stock
    return dense.rms_norm(rows, weight, epsilon)


def _fed(module: Any, rows: Tensor) -> Tensor:
    """The forward of a gated feed-forward layer."""
    gate, source = module.gate_proj(rows), module.up_proj(rows)
    if torch.compiler.is_compiling() or not _plain(gate, source):
        stock: Tensor = module.down_proj(module.act_fn(gate) * source)
        return stock
    fed: Tensor = module.down_proj(dense.swiglu(gate, source))
    return fed


def _dispatched(module: ModuleType) -> None:
    """Puts our rotation before a modeling module's own, once, if it gives the very same bits."""
    stock: Any = getattr(module, ROTATE, None)
    if stock is None or vars(stock).get(_MARK) or not _turns(stock):
        return

    @wraps(stock)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        turned = None if kwargs or len(args) != 4 or torch.compiler.is_compiling() else _turned(*args)
        return stock(*args, **kwargs) if turned is None else turned

    vars(dispatch)[_MARK] = True
    setattr(module, ROTATE, dispatch)


@torch.inference_mode()
def _turns(stock: Callable[..., Any]) -> bool:
    """True where a function rotates halves against each other as ours does, bit for bit."""
    draw = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        q, k = (torch.empty(2, 5, heads, 48).normal_(generator=draw).to(dtype).transpose(1, 2) for heads in (3, 1))
        angles = [torch.empty(2, 5, 48).normal_(generator=draw).to(dtype) for _ in range(2)]
        with suppress(Exception):  # a function of that name that takes something else is another one
            ours, own = _turned(q, k, *angles), stock(q, k, *angles)
            if ours is not None and all(map(torch.equal, ours, own)):
                continue
        return False
    return True


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Queries and keys [R, H, n, D], rotated by [R, n, D]; None where they do not lie as they do in a plain pass."""
    if q.dim() != 4 or cos.shape != sin.shape or not _plain(cos, q.transpose(1, 2), k.transpose(1, 2), sin):
        return None
    rows, _, n, width = q.shape
    if cos.shape != (rows, n, width) or k.shape[0] != rows or k.shape[2:] != (n, width) or width % 2:
        return None
    one, other = (dense.rotate(t.transpose(1, 2).reshape(rows * n, -1, width), cos, sin) for t in (q, k))
    return one.view(rows, n, -1, width).transpose(1, 2), other.view(rows, n, -1, width).transpose(1, 2)
