"""Identify the hardware, time work in interleaved rounds, and release memory of weights."""

import ctypes
import hashlib
import json
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftree.errors import UserError
from draftree.native import variant
from draftree.utils.files import Entries, cache_folder, read_object, write_text

ROUNDS_RANGE, WARM_UP_SECONDS = (3, 25), 0.25
"""The least and the largest number of rounds in which each function is timed.

`WARM_UP_SECONDS` is the duration in seconds from which on the first time counts, because a warm-up then
matters little.
"""
QUICK_SECONDS, MIN_QUICK_ROUNDS = 0.1, 7
"""Duration in seconds below which functions are timed in at least `MIN_QUICK_ROUNDS` rounds.

A machine may be slow in three successive rounds.
"""

MAX_TIMING_SECONDS = 0.15
"""Seconds for which `second_is_faster` times both functions."""

CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 512, "LRU_CACHE_CAPACITY": 256}
"""Environment variables that limit the caches of oneDNN and its wrapper, and sufficient values.

A linear layer over one number of tokens takes two entries of the first and one of the second. A new
entry takes half a millisecond.
"""
ARENA_MAX, MAX_ARENAS = -8, 2
"""glibc's M_ARENA_MAX.

`MAX_ARENAS` is its value: the number of memory arenas that all threads share, for the worker and the
event loop.
"""

KEPT_BYTES = 1 << 30
"""Value that `keep_memory` gives to the options in `THRESHOLDS`."""
PAGEOUT = 21
"""Linux's MADV_PAGEOUT, which drops pages of a mapped file without loss."""
THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}
"""glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, by the environment variables that set them."""


def describe_contention() -> str:
    """Return a message if other programs compete for the processors, else "".

    It is also "" if this is unknown.
    """
    try:
        load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not all systems have them
        return ""
    crowded = load > processors + 1  # this program counts too
    return (
        f"{load:.1f} programs compete for {processors} processor{'s' * (processors > 1)}"
        if crowded
        else ""
    )


def product_dtypes(device: torch.device, dtype: torch.dtype) -> list[torch.dtype]:
    """Return the dtypes in which a device may multiply numbers of a dtype.

    On a CPU, kernels may widen half precision to float32 if the processor has no instructions for
    it.
    """
    widened = device.type == "cpu" and dtype.itemsize < torch.float32.itemsize
    return [dtype, torch.float32] if widened else [dtype]


def time_interleaved(
    works: Sequence[Callable[[], Any]],
    device: torch.device,
    longest: float,
    before: Sequence[Callable[[], Any] | None] = (),
) -> list[float]:
    """Return the wall seconds of each function, run in turn in random order.

    Changes of the machine's speed then affect all functions equally. The result is the lower
    quartile of the rounds, because other programs on the machine can only make a function slower.

    Args:
        works: the functions to time.
        device: the device, which must be idle before and after each run.
        longest: seconds of all rounds together, shared evenly. Slow functions get fewer rounds,
            spread over the whole time.
        before: for each function, a function that is called before each run and is not timed; none
            by default.
    """

    def time_after(i: int) -> float:
        if before and (first := before[i]) is not None:
            first()
        return time_work(works[i], device)

    first = list(map(time_after, range(len(works))))
    seconds = [[once if once >= WARM_UP_SECONDS else time_after(i)] for i, once in enumerate(first)]
    least = [MIN_QUICK_ROUNDS if once[0] < QUICK_SECONDS else ROUNDS_RANGE[0] for once in seconds]
    wanted = [
        int(np.clip(longest / len(works) / max(s[0], 1e-9), a, ROUNDS_RANGE[1])) - 1
        for s, a in zip(seconds, least, strict=True)
    ]
    rounds, order = max(wanted), np.random.default_rng(0)
    for r in range(rounds):
        for i in order.permutation(len(works)):
            if (r + 1) * wanted[i] // rounds > r * wanted[i] // rounds:
                seconds[i].append(time_after(int(i)))
    return [float(np.quantile(each, 0.25)) for each in seconds]


def time_work(work: Callable[[], Any], device: torch.device) -> float:
    """Return the wall seconds of a function, with the device idle before and after."""
    accelerator: Any = torch.accelerator
    wait = partial(accelerator.synchronize, device) if device.type != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device without waiting for the copy or for earlier work."""
    given = torch.from_numpy(values)
    if device.type == "cuda":
        given = given.pin_memory()
    return given.to(device, non_blocking=device.type != "mps")


def has_float64(device: torch.device) -> bool:
    """Return whether a device supports float64; Apple's `mps` does not."""
    return device.type != "mps"


def machine(device: torch.device) -> dict[str, str]:
    """Return a dict of the properties of the machine on which the speed of a pass depends."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    figures = {
        "device": chip,
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
    }
    return figures if device.type == "cuda" else {**figures, "kernels": variant()}


def _processor() -> str:
    try:
        names = [
            x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")
        ]
        return names[0].split(":", 1)[1].strip()
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def bound_memory() -> None:
    """Bound the memory that a long-running process keeps for reuse.

    Call it before a model is loaded. Environment variables that set the same bounds take
    precedence.

    - oneDNN and its wrapper in torch (ideep) keep half a megabyte for each input shape of each
      linear layer, by default for 1,024 of them. They read their bounds when the first linear layer
      runs.
    - glibc's allocator gives each new thread an arena of its own, up to eight per processor. Memory
      that a thread has freed there cannot be used by other threads. Existing arenas stay. With
      other C libraries nothing is changed.
    """
    for name, most in CACHES.items():
        os.environ.setdefault(name, str(most))
    limit = _of_glibc("mallopt")
    if limit is not None and "MALLOC_ARENA_MAX" not in os.environ:
        limit(ARENA_MAX, MAX_ARENAS)


def keep_memory() -> None:
    """Let glibc's allocator reuse freed blocks of up to 1 GiB; call it before training on a CPU.

    By default it returns blocks of more than 32 MiB at once. The kernel then clears their pages
    again for each intermediate result. Environment variables that set the same bounds take
    precedence. Other C libraries are not changed.
    """
    limit = _of_glibc("mallopt")
    if limit is None:
        return
    for name, option in THRESHOLDS.items():
        if name not in os.environ:
            limit(option, KEPT_BYTES)


def return_memory() -> None:
    """Return free memory of glibc's allocator to the operating system.

    Other C libraries do this by themselves.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc's allocator; None with another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def measurement_path(kind: str, about: Mapping[str, str]) -> Path:
    """Return the cache file for measurements of one kind with the given description."""
    key = hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / kind / f"{key}.json"


@torch.inference_mode()
def second_is_faster(
    topic: str,
    about: Mapping[str, str],
    works: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]],
) -> bool:
    """Return whether the second of two functions is faster on this machine.

    The first comparison is timed, and its result is saved.

    Args:
        topic: the folder where the result is saved.
        about: the properties that the result depends on, besides the machine.
        works: returns both functions.
    """
    cpu = torch.device("cpu")
    told = {**machine(cpu), **about}
    path = measurement_path(topic, told)
    with suppress(UserError):
        if path.is_file():
            return bool(Entries(read_object(path, topic), path).get("packed", float, least=0) < 1)
    own, ours = time_interleaved(works(), cpu, MAX_TIMING_SECONDS)
    with suppress(OSError):  # not writable: timed again by the next process
        write_text(path, json.dumps({"packed": ours / own, "about": told}, indent=1))
    return ours < own


def drop_pages(weight: Tensor) -> None:
    """Release the memory of a weight that is mapped from a file.

    A later access reads the weight from the file again. A packed weight is then in memory once. A
    weight that was converted while it was loaded is in no file and stays in memory twice.
    """
    size = mmap.PAGESIZE
    begin, end = (
        -(-weight.data_ptr() // size) * size,
        (weight.data_ptr() + weight.nbytes) // size * size,
    )
    if sys.platform == "linux" and begin < end:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), PAGEOUT
        )  # a failure is harmless
