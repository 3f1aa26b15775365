"""Loops over tokens that Python is too slow for, as machine code."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from numba import njit
from numba.core import event
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., object])
Array = NDArray[Any]

OURS = __name__.partition(".")[0]
COMPILING = "compiling its loops for this machine, once after the installation; it takes 2 to 40 s"


def compiled(function: Function) -> Function:
    """Compiles a function on its first call, and keeps the machine code beside the source for later processes.

    For the type checker it stays the function that it is.
    """
    machine: Any = njit(cache=True, nogil=True)(function)
    same: Function = machine
    return same


@dataclass
class Remark(event.Listener):
    """Logs, the first time that a function of ours is compiled and not read from disk, what is being waited for."""

    told: bool = False

    def on_start(self, event: Any) -> None:
        if not self.told and event.data["dispatcher"].py_func.__module__.partition(".")[0] == OURS:
            self.told = True
            logging.getLogger(OURS).warning(COMPILING)

    def on_end(self, event: Any) -> None:
        """Nothing is told."""


REMARK = Remark()
_numba: Any = event  # untyped
_numba.register("numba:compile", REMARK)
