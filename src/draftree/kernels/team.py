"""Machine code that several threads run together: those that torch computes with, which meet at points of the code.

Torch's threads wait for work in a loop for a while, so that one more call of theirs begins at once, and so do these at their
meetings; threads of our own would stand in their way on the same processors.
"""

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba.extending import intrinsic

from draftree.kernels.memory import WHOLE, entry, part

ARRIVED, YIELD, NUMBER, COUNT, FIRST = 0, 8, 9, 10, 16
"""Entries of a table: how many have arrived at meetings; addresses of functions that let another thread run, and that say a
thread's number and how many there are; and the first one of the work itself."""
PATIENCE = 4000
"""Looks at who has arrived before another thread is let run."""


def _ask(typing: Any, address: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.FunctionType(ir.IntType(32), []).as_pointer())
        return builder.sext(builder.call(place, []), ir.IntType(64))

    return WHOLE(WHOLE), made


def _arrive(typing: Any, address: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.IntType(64)(1), "seq_cst")

    return WHOLE(WHOLE), made


def _look(typing: Any, address: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return WHOLE(WHOLE), made


_asked: Any = intrinsic(_ask)
"""What a function at an address says."""
_arrived: Any = intrinsic(_arrive)
_looked: Any = intrinsic(_look)


@part
def meet(table: Any, threads: Any) -> None:
    """Waits until all threads have come here."""
    if threads > 1:
        awaited = (_arrived(table) // threads + 1) * threads
        looks = 0
        while _looked(table) < awaited:
            looks += 1
            if looks > PATIENCE:
                _asked(entry(table, YIELD))


@part
def share(count: Any, thread: Any, threads: Any) -> Any:
    """The parts [begin, end) of so many that a thread does."""
    return count * thread // threads, count * (thread + 1) // threads


@part
def member(table: Any) -> Any:
    """A thread's number, and how many there are."""
    if entry(table, NUMBER) == 0:
        return 0, 1
    return _asked(entry(table, NUMBER)), _asked(entry(table, COUNT))


def run(code: int, work: Sequence[int], alone: bool = False) -> None:
    """Runs machine code with all of torch's threads, or with this one where they cannot be had.

    Args:
        code: the address of a function of a table's address.
        work: what stands in the table from `FIRST` on.
        alone: whether this thread does it all.
    """
    threads, found = (1 if alone else torch.get_num_threads()), _functions()
    together = threads > 1 and found is not None
    head = (0, 0, 0, 0, 0, 0, 0, 0, *(found[1:] if together and found else (0, 0, 0)), 0, 0, 0, 0, 0)
    table = array("q", (*head, *work))
    if together and found:
        found[0](code, table.buffer_info()[0], threads, 0)
    else:
        _ONE(code)(table.buffer_info()[0])


_ONE: Any = ctypes.CFUNCTYPE(None, ctypes.c_int64)


@cache
def _functions() -> tuple[Any, int, int, int] | None:
    """What begins a team's work, and the addresses of what a table holds; None where torch's threads are of another kind."""
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    try:
        threads, system = ctypes.CDLL(str(libraries[0])), ctypes.CDLL(None)
        begin = threads.GOMP_parallel
        named = system.sched_yield, threads.omp_get_thread_num, threads.omp_get_num_threads
    except (IndexError, OSError, AttributeError, TypeError):
        return None
    begin.argtypes, begin.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    a, b, c = (int(ctypes.cast(function, ctypes.c_void_p).value or 0) for function in named)
    return begin, a, b, c
