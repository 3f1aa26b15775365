"""A device that is not here, on a CPU: tensors know which of them would lie on it, and what it lacks or forbids fails."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

MARK = "lies_on_the_device"
HOSTS = ("numpy", "__array__")
"""Functions that refuse a tensor that is not on the host."""
ACROSS = ("copy_", "__set__", "__setitem__", "__getitem__", "_has_compatible_shallow_copy_type")
"""Functions that take tensors of two devices: copies, and indices that lie on the host."""


class WithoutFloat64(TorchFunctionMode):
    """Apple's `mps` by its rules: no float64, and no operation over tensors here and there.

    What is made of a tensor on the device lies there, too; `cpu`, `item` and `tolist` bring values
    to the host.
    """

    device = torch.device("mps:0")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device or func is torch._C._nn._parse_to:
            return func(*args, **kwargs)
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        there = [t for t in tensors if hasattr(t, MARK)]
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__get__" and owner == "device":
            return self.device if there else func(*args, **kwargs)
        if name == "__get__" and owner in ("is_cpu", "is_mps"):
            return (owner == "is_mps") == bool(there)
        if name in HOSTS and there:
            raise TypeError(f"can't convert mps:0 device type tensor to numpy, by {name}")
        wanted = self._wanted(name, args, kwargs)
        places = {hasattr(t, MARK) for t in tensors if t.dim()}
        if len(places) > 1 and wanted is None and name not in ACROSS:
            raise RuntimeError(f"tensors are on mps:0 and on cpu, in {name}")
        on_host = [self._on_host(a) for a in args]
        found = func(*on_host, **{k: self._on_host(v) for k, v in kwargs.items()})
        if name == "__set__" and owner == "data" and hasattr(args[1], MARK):
            self._mark(args[0])
        if wanted is None and any(found is t for t in tensors):  # written in place
            return found
        if wanted is not None and any(
            found is t for t in tensors
        ):  # on one device, nothing would be copied
            found = found.clone() if wanted != bool(there) else found
        if bool(there) if wanted is None else wanted:
            tree_map(self._mark, found)
        return found

    def _wanted(self, name: str, args: Any, kwargs: Any) -> bool | None:
        """Whether a result is asked for on the device; None where nothing is said."""
        if name == "cpu":
            return False
        said = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.device)]
        said += [
            torch.device(a)
            for a in (kwargs.get("device"), *(args[1:2] if name == "to" else ()))
            if isinstance(a, str)
        ]
        others = [a for a in args[1:2] if name == "to" and isinstance(a, Tensor)]
        if others:
            return hasattr(others[0], MARK)
        return said[0].type == "mps" if said else None

    def _on_host(self, given: Any) -> Any:
        if isinstance(given, torch.device) or (isinstance(given, str) and given.startswith("mps")):
            return torch.device("cpu") if torch.device(given).type == "mps" else given
        return given

    def _mark(self, found: Any) -> Any:
        if isinstance(found, Tensor):
            if found.dtype is torch.float64:
                raise TypeError(
                    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
                )
            setattr(found, MARK, True)
        return found


def moved(model: nn.Module) -> nn.Module:
    """Return a model with its weights marked as the device's."""
    for each in held(model):
        setattr(each, MARK, True)
    return model


def held(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()
