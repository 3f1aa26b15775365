"""Benchmark continuous batching: throughput and latency under Poisson arrivals or fixed batches."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from draftree.engine import Engine
from draftree.request import Request
from draftree.scheduling.handle import Handle
from draftree.scheduling.options import SchedulerOptions
from draftree.tree import Floats

PERCENTILES = {"median": 50, "p99": 99}
Name = TypeVar("Name")


@dataclass(frozen=True)
class Served:
    """Store what one request received, and when.

    Attributes:
        handle: handle of the request.
        due: time of its arrival in seconds from the start of the run.
        times: times of the steps that returned tokens, in seconds from the start of the run.
        counts: number of tokens that each of these steps returned.
    """

    handle: Handle
    due: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


def arrival_times(count: int, rate: float, seed: int) -> Floats:
    """Return [count] arrival times in seconds: a Poisson process of `rate` requests a second."""
    gaps: Floats = np.random.default_rng(seed).exponential(1 / rate, count)
    return np.cumsum(gaps)


def serve(
    engine: Engine,
    requests: Sequence[Request],
    times: Floats,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[list[Served], float]:
    """Submit each request at its time and run steps until all have ended.

    A request that arrives during a step is submitted right after it; its waiting time counts from
    its arrival.

    Args:
        engine: without unfinished requests.
        requests: requests in the order of their arrival.
        times: [N] when each arrives, in seconds from the start.
        advance: called with the number of requests that have ended.

    Returns:
        What each request got, and the seconds of the whole run.
    """
    start, served = time.perf_counter(), dict[int, Served]()
    coming, ended = list(zip(requests, times.tolist(), strict=True)), 0
    while coming or engine.scheduler.unfinished:
        while coming and coming[0][1] <= time.perf_counter() - start:
            request, due = coming.pop(0)
            handle = engine.submit(request)
            served[handle.id] = Served(handle, due)
        if not engine.scheduler.unfinished:
            time.sleep(max(coming[0][1] - (time.perf_counter() - start), 0.0))
            continue
        updates = engine.step()
        now = time.perf_counter() - start
        for update in updates:
            one = served[update.handle.id]
            if update.tokens:
                one.times.append(now)
                one.counts.append(len(update.tokens))
        finished = sum(one.handle.finished for one in served.values())
        if finished > ended:
            advance(finished)
        ended = finished
    return list(served.values()), time.perf_counter() - start


def row(served: Sequence[Served], seconds: float) -> dict[str, Any]:
    """Return the figures of a run.

    `time_between_tokens` shares the seconds since the last tokens of a request among the tokens
    that come at a time; `time_between_updates` does not.
    """
    first = [one.times[0] - one.due for one in served]
    gaps = [(np.diff(one.times), np.array(one.counts[1:], np.int64)) for one in served]
    each = np.concatenate([np.repeat(gap / count, count) for gap, count in gaps])
    stats = [one.handle.stats for one in served]
    tokens, steps = sum(s.tokens for s in stats), sum(s.steps for s in stats)
    return {
        "requests": len(served),
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(served) / seconds,
        "time_to_first_token": _spread(np.array(first)),
        "time_between_tokens": _spread(each),
        "time_between_updates": _spread(np.concatenate([gap for gap, _ in gaps])),
        "tokens_per_step": (sum(s.accepted for s in stats) + steps) / steps if steps else 1.0,
        "nodes_per_step": sum(s.drafted for s in stats) / steps if steps else 0.0,
        "preemptions": sum(s.preemptions for s in stats),
    }


def measured(
    engine: Engine,
    requests: Sequence[Request],
    times: Floats,
    limits: SchedulerOptions,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Return the figures of requests that arrive at given times, after a warm-up by one of them."""
    engine.set_limits(**vars(limits))
    serve(engine, [replace(requests[0], max_new_tokens=2)], np.zeros(1))
    return row(*serve(engine, requests, times, advance))


def measured_in_batches(
    engines: Mapping[Name, Engine],
    requests: Mapping[Name, Sequence[Request]],
    size: int,
    limits: SchedulerOptions,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[Name, dict[str, Any]]:
    """Return the figures of each engine when requests are submitted in batches of `size`.

    Each batch runs to its end. Engines take turns after every batch, so other work on the machine
    affects all of them alike. Requests that do not fill a batch are left out. Each engine first
    runs a warm-up batch that is not timed. What its drafter remembers of earlier answers is dropped
    before: another size may have answered the same requests.

    Args:
        engines: the engines that are compared.
        requests: requests of each engine, the same number for each.
        size: requests in a batch; `max_sequences` of the limits is set to it.
        limits: limits of the scheduler.
        advance: called with the number of requests that have ended.
    """
    served, seconds = (
        {name: list[Served]() for name in engines},
        {name: list[float]() for name in engines},
    )
    for name, engine in engines.items():
        engine.carried = None
        engine.set_limits(**(vars(limits) | {"max_sequences": size}))
        serve(
            engine,
            [replace(each, max_new_tokens=2) for each in requests[name][:size]],
            np.zeros(size),
        )
    for count, (name, batch) in enumerate(_turns(requests, size), 1):
        found, took = serve(engines[name], batch, np.zeros(size))
        served[name] += found
        seconds[name].append(took)
        advance(count * size)
    return {
        name: row(served[name], sum(seconds[name])) | {"seconds_of_batches": seconds[name]}
        for name in engines
    }


def _turns(
    requests: Mapping[Name, Sequence[Request]], size: int
) -> Iterator[tuple[Name, Sequence[Request]]]:
    """Yield batches of the engines in turn, starting with another engine each time."""
    names = list(requests)
    for number in range(min(map(len, requests.values())) // size):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            yield name, requests[name][number * size : (number + 1) * size]


def _spread(values: Floats) -> dict[str, float] | None:
    """Return the percentiles of seconds; None where there are none."""
    if not len(values):
        return None
    return {name: float(np.percentile(values, share)) for name, share in PERCENTILES.items()}
