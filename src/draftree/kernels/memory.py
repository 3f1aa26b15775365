"""Numbers of bfloat16 and float32 where they lie in a tensor's memory, read and written by machine code.

A kernel that is handed addresses is called in some two microseconds; wrapping tensors as arrays takes ten times that.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from draftree.kernels.compiled import Array, Function

ROUND, UPPER = np.uint32(0x7FFF), np.uint32(0xFFFF0000)
"""What is added before the lower half of a word is cut off, and the half that a number of bfloat16 fills."""
WHOLE: Any = types.int64  # untyped, as much of numba is
NOTHING: Any = types.void


def part(function: Function) -> Function:
    """Compiles a function into those that call it, every operation rounded as it is written."""
    machine: Any = njit(nogil=True, forceinline=True, error_model="numpy")(function)
    same: Function = machine
    return same


def _pointer(typing: Any, address: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    kinds: Any = types
    return kinds.voidptr(address), made


pointer: Any = intrinsic(_pointer)
"""An address as a pointer, for `carray`."""


def _place(context: Any, builder: Any, kind: Any, args: Any) -> Any:
    return builder.gep(builder.inttoptr(args[0], context.get_value_type(kind).as_pointer()), [args[1]])


def _loading(kind: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_place(context, builder, kind, args))

    def typed(typing: Any, address: Any, at: Any) -> Any:
        return kind(WHOLE, WHOLE), made

    return intrinsic(typed)


def _storing(kind: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _place(context, builder, kind, args))
        return context.get_dummy_value()

    def typed(typing: Any, address: Any, at: Any, value: Any) -> Any:
        return NOTHING(WHOLE, WHOLE, kind), made

    return intrinsic(typed)


def _taking(kind: Any, source: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(kind))

    def typed(typing: Any, value: Any) -> Any:
        return kind(source), made

    return intrinsic(typed)


_REAL, _WORD, _HALF = (getattr(types, name) for name in ("float32", "uint32", "uint16"))
entry = _loading(WHOLE)
"""One of consecutive whole numbers of 64 bits."""
word, put_word = _loading(_WORD), _storing(_WORD)
"""One of consecutive words of 32 bits."""
real, put_real = _loading(_REAL), _storing(_REAL)
"""One of consecutive numbers of float32."""
_half_at, _put_half = _loading(_HALF), _storing(_HALF)
as_real, _as_bits = _taking(_REAL, _WORD), _taking(_WORD, _REAL)


@part
def number(address: Any, at: Any, half: Any) -> Any:
    """One of consecutive numbers; `half` where they are bfloat16's. Loops over it compile in a third of the time of arrays."""
    return as_real(np.uint32(_half_at(address, at)) << np.uint32(16)) if half else real(address, at)


@part
def put(address: Any, at: Any, value: Any, half: Any) -> None:
    """Writes one of consecutive numbers, rounded to bfloat16 where they are such."""
    if half:
        _put_half(address, at, np.uint16(_nearest(_as_bits(value)) >> np.uint32(16)))
    else:
        put_real(address, at, value)


@part
def settled(value: Any, half: Any) -> Any:
    """A number, rounded to what `put` would write of it."""
    return as_real(_nearest(_as_bits(value))) if half else value


@part
def read(address: Any, half: Any, bits: Array) -> None:
    """Reads consecutive numbers as float32's bits; `half` where they are bfloat16's."""
    for e in range(len(bits)):
        bits[e] = _as_bits(number(address, e, half))


@part
def write(bits: Array, half: Any, address: Any) -> None:
    """Writes float32's bits as consecutive numbers; bfloat16's are the nearest ones, of two the even one."""
    for e in range(len(bits)):
        put(address, e, as_real(bits[e]), half)


@part
def _nearest(bits: Any) -> Any:
    # Nothing that is no number: to its upper half, with a bit that keeps it from becoming infinite.
    number = (bits & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000)
    rounded = bits + ROUND + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded if number else bits | np.uint32(0x00400000)) & UPPER
