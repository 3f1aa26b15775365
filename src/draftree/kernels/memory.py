"""Numbers of bfloat16 and float32 where they lie in a tensor's memory, read and written by machine code.

A kernel that is handed addresses is called in some two microseconds; wrapping tensors as arrays takes ten times that.
"""

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from draftree.kernels.compiled import Array, Function

ROUND, UPPER = np.uint32(0x7FFF), np.uint32(0xFFFF0000)
"""What is added before the lower half of a word is cut off, and the half that a number of bfloat16 fills."""


def part(function: Function) -> Function:
    """Compiles a function into those that call it, every operation rounded as it is written."""
    machine: Any = njit(nogil=True, inline="always")(function)
    same: Function = machine
    return same


def _pointer(typing: Any, address: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    kinds: Any = types
    return kinds.voidptr(address), made


pointer: Any = intrinsic(_pointer)
"""An address as a pointer, for `carray`."""


@part
def halves(address: Any, count: Any) -> Any:
    """[count] words of 16 bits from an address on."""
    return carray(pointer(address), (count,), np.uint16)


@part
def words(address: Any, count: Any) -> Any:
    """[count] words of 32 bits from an address on."""
    return carray(pointer(address), (count,), np.uint32)


@part
def read(address: Any, half: Any, bits: Array) -> None:
    """Reads consecutive numbers as float32's bits; `half` where they are bfloat16's."""
    if half:
        short = halves(address, len(bits))
        for e in range(len(bits)):
            bits[e] = np.uint32(short[e]) << np.uint32(16)
    else:
        long = words(address, len(bits))
        for e in range(len(bits)):
            bits[e] = long[e]


@part
def write(bits: Array, half: Any, address: Any) -> None:
    """Writes float32's bits as consecutive numbers; bfloat16's are the nearest ones, of two the even one."""
    if half:
        short = halves(address, len(bits))
        for e in range(len(bits)):
            short[e] = np.uint16(_nearest(bits[e]) >> np.uint32(16))
    else:
        long = words(address, len(bits))
        for e in range(len(bits)):
            long[e] = bits[e]


@part
def settle(bits: Array, half: Any) -> None:
    """Rounds numbers in place to what `write` would write of them."""
    if half:
        for e in range(len(bits)):
            bits[e] = _nearest(bits[e])


@part
def _nearest(bits: Any) -> Any:
    # Nothing that is no number: to its upper half, with a bit that keeps it from becoming infinite.
    number = (bits & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000)
    rounded = bits + ROUND + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded if number else bits | np.uint32(0x00400000)) & UPPER
