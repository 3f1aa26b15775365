"""Fused CPU modules: norms and gated feed-forward layers in one call each.

Torch runs six to twelve small operations for a norm or a gate. After a matrix product, when the
caches hold weights, each costs several times what it costs alone. These modules replace those of
models and drafters that draftree loaded, where a trial finds them equal. A model that the user
passes in keeps its own.

Shapes: R sequences, n tokens, D entries.
"""

import copy
from collections.abc import Callable, Container, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from draftree.models.backend_names import Kernels
from draftree.models.llama_structure import GATED, epsilon, module_kind
from draftree.models.native_layers import norm_record
from draftree.native import transformer_kernels
from draftree.native.transformer_kernels import DTYPES


class Replacement(nn.Module):
    """Replace a module and keep its parameters and submodules.

    A deep copy is a copy of the replaced module.

    Args:
        replaced: the module that is replaced.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self._parameters, self._buffers = replaced._parameters, replaced._buffers
        self._modules = replaced._modules
        self.training = replaced.training
        self._replaced = (replaced,)  # in a tuple, as it is no part of this module

    @property
    def replaced_module(self) -> Any:
        """Return the module that was replaced."""
        return self._replaced[0]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the replaced module has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_replaced"][0], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the replaced module."""
        other: nn.Module = copy.deepcopy(self.replaced_module, memo)
        return other


@final
class KernelRMSNorm(Replacement):
    """Compute RMSNorm over the last dimension of […, D] by a native kernel.

    Args:
        replaced: the module that is replaced; its weight must not change.

    Attributes:
        record: the norm in the form that the kernels read.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__(replaced)
        self._epsilon = epsilon(replaced)
        self.record: Any = norm_record(replaced)

    def forward(self, rows: Tensor) -> Tensor:
        """Return each vector divided by its root mean square, times the weight."""
        weight = self._parameters["weight"]
        assert weight is not None
        if not _kernels_can_read(rows, weight):
            stock: Tensor = self.replaced_module(rows)
            return stock
        return transformer_kernels.rms_norm(rows, weight, self._epsilon)


@final
class KernelMLP(Replacement):
    """Compute a gated feed-forward layer by a native kernel."""

    def forward(self, rows: Tensor) -> Tensor:
        """Return the outputs […, D] for inputs […, D]."""
        gate, up = self.gate_proj(rows), self.up_proj(rows)
        gated = (
            transformer_kernels.swiglu(gate, up)
            if _kernels_can_read(gate, up)
            else self.act_fn(gate) * up
        )
        out: Tensor = self.down_proj(gated)
        return out


def _kernels_can_read(*tensors: Tensor) -> bool:
    """Return whether kernels may read the memory of tensors, and no gradient is needed."""
    dtype, grad = tensors[0].dtype, torch.is_grad_enabled()
    for t in tensors:  # called a hundred times in a pass
        wanted = grad and t.requires_grad
        if t.dtype is not dtype or not t.is_cpu or wanted or not t.is_contiguous():
            return False
    return dtype in DTYPES


def _kernel_for(module: nn.Module) -> Callable[[nn.Module], nn.Module] | None:
    """Return the class that replaces a module, chosen by its structure; None if none fits."""
    found = vars(module).get("variance_epsilon", vars(module).get("eps"))
    weights = {name for name, _ in module.named_parameters()}
    normed = type(module).__name__.endswith("RMSNorm") and weights == {"weight"}
    if normed and isinstance(found, float):
        return KernelRMSNorm
    gated = {name for name, _ in module.named_children()} == GATED
    return KernelMLP if gated and not list(module.parameters(recurse=False)) else None


@torch.inference_mode()
def _agrees(module: Any, ours: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether two modules differ only by rounding, on random inputs."""
    normed = isinstance(ours, KernelRMSNorm)
    width = module.weight.shape[-1] if normed else module.gate_proj.in_features
    draw = torch.Generator().manual_seed(0)
    rows = torch.empty(1, 8, width).normal_(generator=draw).to(dtype)
    tolerance = 2 * torch.finfo(dtype).eps
    return bool(torch.allclose(ours(rows), module(rows), rtol=tolerance, atol=1e-6))


def replace_modules(
    model: nn.Module, kernels: Kernels | None = None, but: Container[nn.Module] = ()
) -> None:
    """Replace norms and gated feed-forward layers of a model on a CPU by native kernels.

    Args:
        model: a model that draftree loaded; a dtype that the kernels lack leaves it unchanged.
        kernels: `stock` leaves the model unchanged.
        but: modules that are left unchanged.
    """
    own = next(model.parameters(), None)
    unfit = transformer_kernels.core is None or kernels == "stock" or own is None
    if unfit or own is None or own.device.type != "cpu" or own.dtype not in DTYPES:
        return
    agreed: dict[Any, bool] = {}
    for parent, name, child in named_submodules(model, but):
        if (make := _kernel_for(child)) is None:
            continue
        shapes = ((tuple(p.shape), p.dtype) for p in child.parameters())
        kind = type(child), *shapes, module_kind(child)
        ours = make(child)
        if kind not in agreed:
            agreed[kind] = _agrees(child, ours, own.dtype)
        if agreed[kind]:
            setattr(parent, name, ours)


def named_submodules(
    model: nn.Module, but: Container[nn.Module] = ()
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield (parent, name, submodule) for a model's submodules, except inside excluded modules."""
    for parent in list(model.modules()):
        if parent not in but:
            for name, child in list(parent.named_children()):
                if child not in but:
                    yield parent, name, child


def replaced_kinds(model: nn.Module) -> list[str]:
    """Return the class names of norms and gated layers that kernels compute, for the record."""
    kinds = (KernelRMSNorm, KernelMLP)
    return sorted(
        {type(m.replaced_module).__name__ for m in model.modules() if isinstance(m, kinds)}
    )
