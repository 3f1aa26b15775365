"""Which kernels a model is computed by: layers by native kernels where they can be and shall be, else other linear layers."""

from typing import Any

import torch
from torch import Tensor, nn

from draftree.models.between import GATED
from draftree.models.four_bits import FourBits
from draftree.models.linears import TRIED, quicken, quicker
from draftree.models.native_layers import UNIT, Layer, PreparedLayer, is_native
from draftree.models.native_linear import can_pack
from draftree.models.sources import Loading
from draftree.native import dense, variant

CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""The parts of a layer that we know."""
CLOSE, SUMS = 4.0, 64.0
"""How far what a trial gives may lie from the model's own, beside the size of all of it: in units of its precision, and, as
sums of thousands go another way, of float32's."""
GENERIC = "generic"
"""The variant of the native kernels that may be slower than torch's."""
LARGE = 32_000_000
"""Weights of a model from which on its layers are compiled unasked: it takes some seconds, once after the installation."""


def _can_pack(linear: Any) -> bool:
    """True for a linear layer that we have code for."""
    if type(linear) is FourBits:
        return dense.core is not None
    return type(linear) is nn.Linear and can_pack(linear.weight, linear.bias)


def fits(module: Any) -> bool:
    """True for a module that looks like a layer that is compiled."""
    if not isinstance(module, PreparedLayer) and {name for name, _ in module.named_children()} != CHILDREN:
        return False
    attention, mlp = module.self_attn, module.mlp
    parts, known = {name for name, _ in attention.named_children()}, {"q_proj", "k_proj", "v_proj", "o_proj"}
    if not known <= parts <= known | {"q_norm", "k_norm"} or {n for n, _ in mlp.named_children()} != GATED:
        return False
    linears = [*(getattr(attention, name) for name in sorted(known)), mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if len({type(x) for x in linears}) > 1 or not all(map(_can_pack, linears)):
        return False
    one = len({p.dtype for p in module.parameters() if p.is_floating_point()}) == 1 and not [
        *attention.parameters(recurse=False)
    ]
    widths = [getattr(attention, "head_dim", None), *(x.out_features for x in linears)]
    return one and all(isinstance(w, int) and w % UNIT == 0 for w in widths)


def compile_layers(model: nn.Module, chosen: bool = False) -> bool:
    """Lets the layers of a model that can be compiled be computed by native kernels; the others stay what they are.

    Args:
        model: whose weights are not expected to change.
        chosen: whether that is asked for. Else it is done with kernels for the processor's own instruction set; the generic
            ones are timed beside the model's own.

    Returns:
        Whether there are any.
    """
    agreed, used = dict[str, bool](), list[Layer]()
    for module in filter(fits, model.modules()):
        ours, kind = Layer(module), repr(module)
        if kind not in agreed:
            agreed[kind] = agrees(module, ours) and (chosen or variant() != GENERIC or _quicker(module, ours, kind))
        if agreed[kind]:
            used.append(ours)
    config = getattr(model, "config", None)
    one_mask = len(set(getattr(config, "layer_types", None) or ())) < 2
    for i, layer in enumerate(used):
        others = next((k for k, other in enumerate(used) if k > i and other.sizes != layer.sizes), len(used))
        layer.use(used[i + 1 : others] if one_mask else [])
    return bool(used)


def _quicker(module: Any, ours: Layer, kind: str) -> bool:
    """True where a layer takes less time by native kernels, over the widths that kernels are tried at."""
    stock: Any = type(module).forward
    x = [torch.ones(1, n, ours.sizes.deep, dtype=ours.sizes.dtype) for n in TRIED]
    turned = [(torch.ones(1, n, ours.sizes.width, dtype=ours.sizes.dtype),) * 2 for n in TRIED]
    own = lambda: [stock(module, rows, position_embeddings=t) for rows, t in zip(x, turned, strict=True)]
    machine = lambda: [ours(rows, None, t, None) for rows, t in zip(x, turned, strict=True)]
    about = {"layer": kind, "dtype": str(ours.sizes.dtype), "tried": str(TRIED)}
    return quicker("layers", about, lambda: (own, machine))


def hasten(model: Any, loading: Loading, compile: bool | None) -> bool:
    """Lets a model be computed by the kernels that are asked for.

    Args:
        model: as it was loaded, where it is to be.
        loading: the options.
        compile: whether its layers are compiled where they can be; by default where it is large and that is faster here.

    Returns:
        Whether some are compiled.
    """
    if compile is None:
        large = sum(p.numel() for p in model.parameters()) >= LARGE
        compile, chosen = large and loading.kernels is None and loading.attn_implementation is None, False
    else:
        chosen = True
    compiled = compile and compile_layers(model, chosen)
    quicken(model, loading.kernels or ("native" if compiled else None), inside(model))
    return compiled


def is_compiled(module: nn.Module) -> bool:
    """True where a layer is computed by native kernels."""
    return any(is_native(vars(module).get(name)) for name in ("forward", "finish"))


def inside(model: nn.Module) -> set[nn.Module]:
    """The parts of the layers of a model that are computed by native kernels."""
    return {part for layer in filter(is_compiled, model.modules()) for part in layer.modules()}


def compiled_kinds(model: nn.Module) -> list[str]:
    """The kinds of layers that are computed by native kernels, for the record."""
    return sorted({type(m).__name__ for m in model.modules() if is_compiled(m)})


@torch.inference_mode()
def agrees(module: Any, ours: Layer) -> bool:
    """True where a layer and its machine code differ by rounding alone, over random states that some see and some do not."""
    n, draw, sizes = 5, torch.Generator().manual_seed(0), ours.sizes
    dtype = sizes.dtype
    x, ready = (torch.empty(2, n, deep).normal_(generator=draw).to(dtype) for deep in (sizes.deep, sizes.reads))
    angles = torch.empty(2, n, sizes.width // 2).uniform_(0, 6, generator=draw).repeat(1, 1, 2)
    turned = angles.cos().to(dtype), angles.sin().to(dtype)
    mask = torch.full((2, 1, n, n), torch.finfo(dtype).min, dtype=dtype).triu(1)
    mask[0, 0, 3, 1:3] = torch.finfo(dtype).min
    if isinstance(module, PreparedLayer):
        wanted, found = type(module).finish(module, ready, x, turned, mask, {})[0], ours(x, mask, turned, None, ready)
    else:
        try:
            wanted = type(module).forward(module, x, attention_mask=mask, position_embeddings=turned)
        except Exception:  # a layer of that look that takes something else is another one
            return False
        found = ours(x, mask, turned, None)
    if not isinstance(wanted, Tensor):
        return False
    apart = (found.float() - wanted.float()).norm() / (wanted - x).float().norm()
    return bool(apart < CLOSE * torch.finfo(dtype).eps + SUMS * torch.finfo(torch.float32).eps)
