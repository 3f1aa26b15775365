"""Loops over tokens that Python is too slow for, as machine code."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compiles a function on its first call, and keeps the machine code beside the source for later processes.

    For the type checker it stays the function that it is.
    """
    machine: Any = njit(cache=True, nogil=True)(function)
    same: Function = machine
    return same
