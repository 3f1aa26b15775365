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
class ServedRequest:
    """Store the times at which one request received tokens, and the numbers of these tokens.

    Attributes:
        handle: handle of the request.
        due: arrival time of the request, in seconds from the start of the run.
        times: times of the steps that returned tokens for the request, in seconds from the start of
            the run.
        counts: number of tokens that each step in `times` returned for the request.
    """

    handle: Handle
    due: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


def arrival_times(count: int, rate: float, seed: int) -> Floats:
    """Return [count] arrival times in seconds of a Poisson process with `rate` per second."""
    gaps: Floats = np.random.default_rng(seed).exponential(1 / rate, count)
    return np.cumsum(gaps)


def serve_arrivals(
    engine: Engine,
    requests: Sequence[Request],
    times: Floats,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[list[ServedRequest], float]:
    """Submit each request at its arrival time, and run steps until all requests have ended.

    A request that arrives during a step is submitted right after the step. Its waiting time counts
    from its arrival.

    Args:
        engine: an engine without unfinished requests.
        requests: requests in the order of their arrival.
        times: [N] arrival time of each request, in seconds from the start.
        advance: called with the number of requests that have ended.

    Returns:
        The record of each request, and the seconds of the whole run.
    """
    start, served = time.perf_counter(), dict[int, ServedRequest]()
    coming, ended = list(zip(requests, times.tolist(), strict=True)), 0
    while coming or engine.scheduler.num_unfinished:
        while coming and coming[0][1] <= time.perf_counter() - start:
            request, due = coming.pop(0)
            handle = engine.submit(request)
            served[handle.id] = ServedRequest(handle, due)
        if not engine.scheduler.num_unfinished:
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


def figures_of_run(served: Sequence[ServedRequest], seconds: float) -> dict[str, Any]:
    """Return the figures of a run that took `seconds`: throughput, waiting times and steps.

    `time_between_updates` is the time between two steps that return tokens of a request. For
    `time_between_tokens` this time is divided by the number of tokens that the second step returns.
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
        "time_to_first_token": _percentiles(np.array(first)),
        "time_between_tokens": _percentiles(each),
        "time_between_updates": _percentiles(np.concatenate([gap for gap, _ in gaps])),
        "tokens_per_step": (sum(s.accepted for s in stats) + steps) / steps if steps else 1.0,
        "nodes_per_step": sum(s.drafted for s in stats) / steps if steps else 0.0,
        "preemptions": sum(s.preemptions for s in stats),
    }


def measure_arrivals(
    engine: Engine,
    requests: Sequence[Request],
    times: Floats,
    limits: SchedulerOptions,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Return the figures of requests that arrive at given times, measured after a warm-up."""
    engine.set_limits(**vars(limits))
    _warm_up(engine, requests[:1])
    return figures_of_run(*serve_arrivals(engine, requests, times, advance))


def measure_batches(
    engines: Mapping[Name, Engine],
    requests: Mapping[Name, Sequence[Request]],
    size: int,
    limits: SchedulerOptions,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[Name, dict[str, Any]]:
    """Return the figures by engine when requests are submitted in batches of `size`.

    Each batch runs to its end. Engines take turns after every batch, so that other work on the
    machine affects all of them equally. Requests that do not fill a batch are left out. Each engine
    first runs a warm-up batch that is not timed. After it, what the engine has kept of its prompts
    and of other runs is dropped, because the same requests are timed.

    Args:
        engines: engines to compare, by any name.
        requests: requests by engine, the same number for each.
        size: number of requests in a batch; it replaces `max_sequences` in the limits.
        limits: limits of the scheduler.
        advance: called with the number of requests that have ended.
    """
    served, seconds = (
        {name: list[ServedRequest]() for name in engines},
        {name: list[float]() for name in engines},
    )
    for name, engine in engines.items():
        engine.set_limits(**(vars(limits) | {"max_sequences": size}))
        _warm_up(engine, requests[name][:size])
    for count, (name, batch) in enumerate(_alternate(requests, size), 1):
        found, took = serve_arrivals(engines[name], batch, np.zeros(size))
        served[name] += found
        seconds[name].append(took)
        advance(count * size)
    return {
        name: figures_of_run(served[name], sum(seconds[name]))
        | {"seconds_of_batches": seconds[name]}
        for name in engines
    }


def _warm_up(engine: Engine, requests: Sequence[Request]) -> None:
    """Generate two tokens of each request, and drop everything that the engine keeps of texts."""
    short = [replace(each, max_new_tokens=2) for each in requests]
    serve_arrivals(engine, short, np.zeros(len(short)))
    engine.forget()
    engine.carried = None


def _alternate(
    requests: Mapping[Name, Sequence[Request]], size: int
) -> Iterator[tuple[Name, Sequence[Request]]]:
    """Yield (engine, batch) with the engines in turn; each round starts with another engine."""
    names = list(requests)
    for number in range(min(map(len, requests.values())) // size):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            yield name, requests[name][number * size : (number + 1) * size]


def _percentiles(values: Floats) -> dict[str, float] | None:
    """Return the percentiles in `PERCENTILES` of the values, by name; None without values."""
    if not len(values):
        return None
    return {name: float(np.percentile(values, share)) for name, share in PERCENTILES.items()}
