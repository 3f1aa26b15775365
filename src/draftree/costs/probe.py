"""A probe of the machine: memory bandwidth, arithmetic rate and the overhead of an operation, for the first cost estimate.

It takes some hundred milliseconds once per machine, in a thread of its own while weights are loaded. Figures are rough:
timings of real steps correct whatever they get wrong.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from draftree.boundary.files import read_object, understood, write_text
from draftree.boundary.machine import kept, machine, timed
from draftree.costs.model import Speed
from draftree.errors import UserError

READ = 64 << 20
"""Bytes that are read to time the memory: more than most caches hold."""
SIDES = (64, 256, 1024)
"""Sides of the square matrices that are multiplied, smaller ones first: a dtype may be emulated, and slow."""
ENOUGH = 0.004
"""Seconds of one product from which on no larger one is tried."""
ROUNDS, LONGEST = 3, 0.04
"""Each work is timed so often, or for so many seconds, and the fastest time counts."""
ASSUMED = Speed(bandwidth=10e9, rate=50e9, overhead=5e-6)
"""Stands for a machine that cannot be probed."""


def machine_speed(device: torch.device, dtype: torch.dtype) -> Speed:
    """Return the speed of a machine in one dtype: from a running probe, from disk, or by probing it now."""
    try:
        return _probe(str(device), dtype).result()
    except RuntimeError:  # out of memory, say, or an operation that the device lacks
        return ASSUMED


def start_probe(device: str, dtype: torch.dtype | None) -> None:
    """Begin the probe in the background; `machine_speed` waits for its end.

    Args:
        device: to probe, by its name; one that does not exist is told by whoever loads something to it.
        dtype: of the weights; by default those that weights usually have.
    """
    for each in (torch.float32, torch.bfloat16) if dtype is None else (dtype,):
        _probe(device, each)


_ONE_AT_A_TIME = ThreadPoolExecutor(1, thread_name_prefix="draftree-probe")


@cache
def _probe(device: str, dtype: torch.dtype) -> "Future[Speed]":
    return _ONE_AT_A_TIME.submit(_known_speed, device, dtype)


def _known_speed(name: str, dtype: torch.dtype) -> Speed:
    device = torch.device(name)
    about = machine(device) | {"dtype": str(dtype)}
    path = kept("speed", about)
    with suppress(UserError), understood(f"'{path}' is not the speed of a machine"):
        if path.is_file():
            return Speed.of(read_object(path, "the speed of a machine")["speed"])
    speed = probe(device, dtype)
    with suppress(OSError):  # a home that cannot be written to: probed again the next time
        write_text(path, json.dumps({"about": about, "speed": asdict(speed)}) + "\n")
    return speed


@torch.inference_mode()
def probe(device: torch.device, dtype: torch.dtype) -> Speed:
    """Time memory, products and a small operation on a machine; takes less than half a second.

    Args:
        device: to probe.
        dtype: of the products.
    """
    block = torch.ones(READ // 4, device=device)
    small = torch.ones(8, device=device)
    bandwidth = READ / _fastest(block.sum, device)
    overhead = _fastest(lambda: [small.add(1) for _ in range(100)], device) / 100
    rate = 0.0
    for side in SIDES:
        square = torch.ones(side, side, device=device, dtype=dtype)
        product: Callable[[], Any] = lambda square=square: square @ square  # type: ignore[misc]
        seconds = _fastest(product, device)
        rate = max(rate, side**3 / seconds)
        if seconds > ENOUGH:
            break
    return Speed(bandwidth, rate, overhead)


def _fastest(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of the fastest of some rounds; the first one, in which libraries set themselves up, counts least."""
    until, best = time.perf_counter() + LONGEST, float("inf")
    for _ in range(ROUNDS):
        best = min(best, timed(work, device))
        if time.perf_counter() > until:
            break
    return best
