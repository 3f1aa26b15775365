"""Batch-invariant linear layers by native kernels over packed weights.

Shapes: n tokens of a pass, K and E entries of a row before and after.
"""

from typing import Any, Self, final

from torch import Tensor

from draftree.native import GENERIC, transformer_kernels, variant
from draftree.native.transformer_kernels import DTYPES, INT8_GROUP, address


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


def rounds_drafters() -> bool:
    """Return whether weights of drafters are rounded to eight bits, as most variants are faster.

    The target verifies all drafts, so their logits need not be exact.
    """
    return variant() != GENERIC


@final
class NativeLinear:
    """Multiply by a packed weight with native kernels.

    Args:
        weight: [E, K] the weight, which must not change.
        bias: [E] the bias; None for none.
        eight_bits: whether to round the weight to eight bits in groups of 32 inputs. K must be a
            multiple of 32.

    Attributes:
        record: the weight in the form that the kernels read.
        wide: E, the number of outputs.
        eight_bits: whether the weight is rounded to eight bits.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, eight_bits: bool = False
    ) -> None:
        self.eight_bits = eight_bits
        if eight_bits:
            self._packed, code = transformer_kernels.pack_int8(weight), transformer_kernels.INT8
        else:
            code = transformer_kernels.code_of(weight.dtype)
            self._packed = transformer_kernels.pack(weight)
        self._bias = bias
        self.wide, inputs = weight.shape
        self.record: Any = transformer_kernels.core.Linear(
            address(self._packed), address(bias), inputs, self.wide, code
        )

    @classmethod
    def for_drafts(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """Return a product for the LM head of a drafter, in eight bits where that is faster."""
        return cls(weight, bias, weight.shape[1] % INT8_GROUP == 0 and rounds_drafters())

    def with_rows(self, weight: Tensor, bias: Tensor | None) -> "NativeLinear":
        """Return a product with other weights [E′, K] that are rounded as these are."""
        return NativeLinear(weight, bias, self.eight_bits)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the outputs […, E] for inputs […, K]."""
        return transformer_kernels.linear(self.record, rows)

    @property
    def bytes(self) -> int:
        """Return the size of the packed weight in bytes."""
        return self._packed.nbytes
