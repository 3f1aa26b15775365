"""What must hold for every batch: the texts of plain decoding, the same texts again, and nothing left behind."""

import contextlib
import gc
import os
import threading
from pathlib import Path
from typing import cast

import numpy as np
import torch

from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.engine import Engine
from draftree.loop import Components, State, admit, release, step
from draftree.registry import build, part
from draftree.request import Request
from draftree.scheduling.handle import Handle
from draftree.testing.conformance import COSTS, RandomCosts, Suite, Watched
from draftree.testing.fakes import Always
from strategies import Batch, Served, suite

Text = tuple[int, tuple[int, ...], bool]
"""The index of a request, what was written, and whether it was cancelled."""


class Interruption(KeyboardInterrupt):
    """Ends a call in the middle."""


def parts_of(batch: Batch, one: Suite, rows: SequenceBatch) -> Components:
    """Return what writes a batch: the drafter is coached, so that paths are accepted."""
    drafter = one.drafter(batch.drafter, batch.requests, coach=Always)
    watched = Watched(
        part("acceptor", batch.acceptor)(), lambda: rows.room(one.target), one.coverage
    )
    return Components(
        one.target, drafter, build("policy", batch.policy), watched, RandomCosts(batch.seed)
    )


def write(batch: Batch) -> list[Text]:
    """Write a batch, with its joins and cancellations; return the texts in the order in which they end."""
    one = suite(batch.model)
    rows, state = SequenceBatch(one.target.new_cache(batch.slots, 8)), State()
    parts = parts_of(batch, one, rows)
    waiting = list(range(len(batch.requests)))
    owners = dict[int, int]()
    texts = list[Text]()
    tick = 0
    while waiting or owners:
        joining, cancelled = batch.events[min(tick, len(batch.events) - 1)]
        tick += 1
        count = min(joining if owners else max(joining, 1), len(rows.free), len(waiting))
        if count:
            new, waiting = waiting[:count], waiting[count:]
            events, state = admit(parts, rows, [batch.requests[i] for i in new], state)
            owners |= {event.row: i for event, i in zip(events, new, strict=True)}
        if rows.live.size:
            _, state = step(parts, rows, state)
        for slot in sorted(owners):
            if slot not in rows.live or (slot == cancelled and tick < len(batch.events)):
                texts.append((owners.pop(slot), tuple(rows.written[slot]), slot in rows.live))
                state = release(parts, rows, slot, state)
    assert len(rows.free) == batch.slots, "a slot is not free"
    assert not rows.lengths.any(), "the KV cache still holds tokens"
    assert not rows.cache.lengths.any(), "the KV cache still holds tokens"
    return texts


def check_texts(batch: Batch, texts: list[Text]) -> None:
    """Assert that every text is the one of plain decoding, a cancelled one its beginning."""
    one, acceptor = suite(batch.model), part("acceptor", batch.acceptor)()
    assert sorted(i for i, _, _ in texts) == list(range(len(batch.requests)))
    for i, tokens, cancelled in texts:
        request = batch.requests[i]
        if not cancelled:
            one.judge(acceptor, request, request.sampling, list(tokens), f"request {i}")
        elif acceptor.keeps_text:
            short = Request(**(vars(request) | {"max_new_tokens": len(tokens)}))
            one.same(short, request.sampling, list(tokens), f"request {i}, cancelled")


def check_engine(batch: Batch) -> None:
    """Assert that an engine that reuses its cache writes the same after requests that were interrupted at any token."""
    one, acceptor = suite(batch.model), part("acceptor", batch.acceptor)()
    drafter = one.drafter(batch.drafter, batch.requests, coach=Always)
    engine = Engine(one.target, drafter, build("policy", batch.policy), acceptor, COSTS)
    events = [event for event in batch.events for _ in range(2)]
    for i, request in enumerate(batch.requests):
        after = events[i % len(events)][1]
        if after is not None:
            seen: list[int] = []

            def interrupt(new: object, seen: list[int] = seen, after: int = after) -> None:
                seen.append(0)
                if len(seen) > after:
                    raise Interruption

            with contextlib.suppress(Interruption):
                engine.write([request], on_tokens=interrupt)
        written = engine.write([request]).tokens[0]
        one.judge(acceptor, request, request.sampling, written, f"request {i} on a used engine")


def serve(batch: Served) -> list[tuple[str, tuple[int, ...]]]:
    """Submit requests to a new engine, with cancellations; return the status and the tokens of each."""
    one = suite(batch.model)
    drafter = one.drafter(batch.drafter, batch.requests, coach=Always)
    engine = Engine(
        one.target,
        drafter,
        build("policy", batch.policy),
        costs=cast(Costs, RandomCosts(batch.seed)),
    )
    needed = [
        min(len(r.prompt) + r.max_new_tokens, one.target.decoder.context + 1)
        for r in batch.requests
    ]
    limits = {
        "max_sequences": batch.sequences,
        "max_batch_tokens": batch.tokens,
        "max_cache_tokens": max(needed) + batch.cache,
    }
    engine.set_limits(**limits, share_passes=bool(batch.seed % 2))
    scheduler = engine.scheduler
    waiting = list(batch.requests)
    handles = list[Handle]()
    tick = 0
    while waiting or scheduler.num_unfinished:
        count, cancelled = batch.events[min(tick, len(batch.events) - 1)]
        for request in waiting[: count if handles and scheduler.num_unfinished else max(count, 1)]:
            handles.append(engine.submit(request))
        waiting = list(batch.requests[len(handles) :])
        engine.step()
        assert scheduler.cache_tokens <= limits["max_cache_tokens"], (
            "the cache holds more than is allowed"
        )
        assert scheduler.running <= batch.sequences, "more sequences run than are allowed"
        if cancelled is not None and cancelled < len(handles) and tick < len(batch.events):
            engine.cancel(handles[cancelled])
        tick += 1
        assert tick < 2000, "requests never end"
    assert engine.step() == [], "a step without requests brings something"
    assert (scheduler.running, scheduler.waiting, scheduler.cache_tokens) == (0, 0, 0)
    assert all(handle.finished and handle.error is None for handle in handles)
    return [(handle.status, tuple(handle.entry.written)) for handle in handles]


def check_served(batch: Served) -> None:
    """Assert everything that holds for submitted requests: plain decoding's texts, and the same ones again."""
    np.random.seed(0)
    one, found = suite(batch.model), serve(batch)
    for i, (request, (status, tokens)) in enumerate(zip(batch.requests, found, strict=True)):
        if status == "finished":
            one.judge(
                part("acceptor", "match")(), request, request.sampling, list(tokens), f"request {i}"
            )
        else:
            assert status == "cancelled"
            short = Request(**(vars(request) | {"max_new_tokens": max(len(tokens), 1)}))
            if tokens:
                one.same(short, request.sampling, list(tokens), f"request {i}, cancelled")
    assert serve(batch) == found, "the second time another text is written"


def check_nothing_served_left(batch: Served) -> None:
    """Assert that submitted requests leave no thread, open file, file or tensor."""
    serve(batch)
    before = left()
    serve(batch)
    assert left() == before


def left() -> tuple[int, int, list[str], int]:
    """Return the numbers of threads, of open files and of tensors, and the names of files that a batch may have written."""
    gc.collect()
    files = sorted(
        str(p)
        for folder in (Path.cwd(), Path(os.environ["DRAFTREE_CACHE"]))
        for p in folder.glob("*")
    )
    tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return threading.active_count(), opened, files, tensors


def check_batch(batch: Batch) -> None:
    """Assert everything that holds for a batch."""
    np.random.seed(0)
    texts = write(batch)
    check_texts(batch, texts)
    assert write(batch) == texts, "the second time another text is written"


def check_nothing_left(batch: Batch) -> None:
    """Assert that a batch leaves no thread, open file, file or tensor."""
    write(batch)  # what is computed once and kept
    before = left()
    write(batch)
    assert left() == before
