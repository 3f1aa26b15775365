"""Probe the machine: memory bandwidth, arithmetic rate and overhead of an operation.

It takes some hundred milliseconds once per machine, in a thread of its own while weights are
loaded. Figures are rough: timings of real steps correct whatever they get wrong.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch

from draftree.costs.cost_model import Speed
from draftree.errors import UserError
from draftree.utils.files import as_user_error, read_object, write_text
from draftree.utils.hardware import machine, measurement_path, product_dtypes, time_work


@dataclass(frozen=True)
class ProbeWorkload:
    """Describe the operations with which a kind of device is timed.

    Attributes:
        read: number of bytes that are read to time the memory; more than caches hold.
        sides: sides of the square matrices that are multiplied. Smaller ones come first, because a
            dtype may be emulated and slow.
        assumed: the speed that is used if a device cannot be probed.
    """

    read: int
    sides: tuple[int, ...]
    assumed: Speed


HOST = ProbeWorkload(64 << 20, (64, 256, 1024), Speed(bandwidth=10e9, rate=50e9, overhead=5e-6))
ACCELERATOR = ProbeWorkload(
    512 << 20, (256, 1024, 4096), Speed(bandwidth=500e9, rate=20e12, overhead=8e-6)
)
"""The operations for a GPU, which take far longer than their launch."""
MAX_PRODUCT_SECONDS = 0.004
"""Seconds of one product beyond which no larger one is tried."""
MIN_ROUNDS, MAX_TIMING_SECONDS = 3, 0.04
"""Number of timed runs of an operation after a first run, in which libraries are set up.

`MAX_TIMING_SECONDS` is the limit of their duration in seconds. The fastest run counts.
"""
MIN_PLAUSIBLE_SHARE = 1 / 50
"""Share of the assumed speed from which on a probe is saved.

A slower probe probably ran at the same time as other work.
"""


def select_workload(device: torch.device) -> ProbeWorkload:
    """Return the operations with which a device is timed."""
    return HOST if device.type == "cpu" else ACCELERATOR


def machine_speed(device: torch.device, dtype: torch.dtype) -> Speed:
    """Return the speed of a machine in one dtype.

    It comes from a probe in progress, from disk, or from a new probe.
    """
    try:
        return _probe(_full_name(device), dtype).result()
    except (
        RuntimeError,
        TypeError,
    ):  # out of memory, an operation or a dtype that the device lacks
        return select_workload(device).assumed


def start_probe(device: str | torch.device | None, dtype: torch.dtype | None) -> None:
    """Begin the probe in the background; `machine_speed` waits for its end.

    For a GPU the function waits until the probe is finished. The probe needs memory that weights
    will fill, and nothing else may run while passes are recorded.

    Args:
        device: the name of the device; by default a GPU if one is available. A device that does not
            exist is ignored here, because loading a model raises the error.
        dtype: the dtype of the weights; by default the usual ones are probed.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with suppress(Exception):
        name = _full_name(device)
        running = [
            _probe(name, each)
            for each in ((torch.float32, torch.bfloat16) if dtype is None else (dtype,))
        ]
        if torch.device(name).type != "cpu":
            wait(running)


def _full_name(device: str | torch.device) -> str:
    """Return a device's name with its index, as in tensors."""
    return str(torch.empty(0, device=device).device)


_ONE_AT_A_TIME = ThreadPoolExecutor(1, thread_name_prefix="draftree-probe")


@cache
def _probe(device: str, dtype: torch.dtype) -> "Future[Speed]":
    return _ONE_AT_A_TIME.submit(_known_speed, device, dtype)


def _known_speed(name: str, dtype: torch.dtype) -> Speed:
    device = torch.device(name)
    about = machine(device) | {"dtype": str(dtype)}
    path = measurement_path("speed", about)
    with suppress(UserError), as_user_error(f"'{path}' is not the speed of a machine"):
        if path.is_file():
            return Speed.of(read_object(path, "the speed of a machine")["speed"])
    speed = probe(device, dtype)
    least = select_workload(device).assumed
    if (
        speed.bandwidth < MIN_PLAUSIBLE_SHARE * least.bandwidth
        or speed.rate < MIN_PLAUSIBLE_SHARE * least.rate
    ):
        return speed
    with suppress(OSError):  # not writable: probed again by the next process
        write_text(path, json.dumps({"about": about, "speed": asdict(speed)}) + "\n")
    return speed


@torch.inference_mode()
def probe(device: torch.device, dtype: torch.dtype) -> Speed:
    """Measure memory bandwidth, matmul rate and the time of a small operation.

    This takes less than half a second.

    Args:
        device: the device to probe.
        dtype: the dtype of the weights. Matmuls are timed in each dtype of `product_dtypes`, and
            the highest rate is returned.
    """
    by = select_workload(device)
    block = torch.ones(by.read // 4, device=device)
    small = torch.ones(8, device=device)
    bandwidth = by.read / _time_fastest_round(block.sum, device)
    overhead = _time_fastest_round(lambda: [small.add(1) for _ in range(100)], device) / 100
    rate = 0.0
    for each in product_dtypes(device, dtype):
        for side in by.sides:
            square = torch.ones(side, side, device=device, dtype=each)
            seconds = _time_fastest_round(partial(torch.matmul, square, square), device)
            rate = max(rate, side**3 / seconds)
            if seconds > MAX_PRODUCT_SECONDS:
                break
    if device.type == "cuda":
        del block, square
        torch.cuda.empty_cache()
    return Speed(bandwidth, rate, overhead)


def _time_fastest_round(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of the fastest of several runs."""
    first = time_work(work, device)
    until, best = time.perf_counter() + MAX_TIMING_SECONDS, first
    for _ in range(MIN_ROUNDS):
        best = min(best, time_work(work, device))
        if time.perf_counter() > until:
            break
    return best
