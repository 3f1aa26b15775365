"""Batch-invariant linear layers by native kernels over packed weights.

Shapes: n tokens of a pass, K and E entries of a row before and after.
"""

from typing import Any, final

from torch import Tensor

from draftree.native import transformer_kernels
from draftree.native.transformer_kernels import DTYPES, address


def can_pack(weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the native kernels support a weight and its bias."""
    given = (weight,) if bias is None else (weight, bias)
    ours = all(
        t.device.type == "cpu" and type(t.data) is Tensor and t.dtype is weight.dtype for t in given
    )
    return (
        transformer_kernels.core is not None
        and ours
        and not any(t.is_inference() for t in given)
        and weight.dtype in DTYPES
    )


@final
class NativeLinear:
    """Multiply by a packed weight with native kernels.

    Args:
        weight: [E, K] the weight, which must not change.
        bias: [E] the bias; None for none.

    Attributes:
        record: the weight in the form that the kernels read.
        wide: E, the number of outputs.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = transformer_kernels.pack(weight)
        self._bias = bias
        self._dtype = weight.dtype
        self.wide, self._inputs = weight.shape
        sizes = self._inputs, self.wide, transformer_kernels.code_of(weight.dtype)
        self.record: Any = transformer_kernels.core.Linear(
            address(self._packed), address(bias), *sizes
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the outputs […, E] for inputs […, K]."""
        return transformer_kernels.linear(self.record, rows)

    @property
    def bytes(self) -> int:
        """Return the size of the packed weight in bytes."""
        return self._packed.nbytes
