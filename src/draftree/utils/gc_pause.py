"""Pause Python's garbage collector while libraries and models are loaded."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

GC_THRESHOLD = 1_000_000
"""Number of new objects between two garbage collections.

transformers and a model create about 700,000 objects that all stay alive.
"""
MIN_LOADED_OBJECTS = 50_000
"""Number of new objects from which on they are treated as permanent."""
_LOCK = Lock()
_ENTERED: list[tuple[int, int, int]] = []
"""The original thresholds, once for each block that is active in any thread."""


@contextmanager
def pause_gc() -> Iterator[None]:
    """Run the garbage collector a thousand times less often inside the block.

    Otherwise garbage collection takes a third of the time of loading. Objects loaded in the block
    are then in the oldest generation, so that only a full collection looks at them again. Freezing
    and unfreezing all objects moves them there. This step is omitted if other code has frozen
    objects, because it would unfreeze them too.
    """
    with _LOCK:
        _ENTERED.append(_ENTERED[0] if _ENTERED else gc.get_threshold())
        first, *others = _ENTERED[0]
        gc.set_threshold(max(first, GC_THRESHOLD) if first else 0, *others)
    try:
        yield
    finally:
        with _LOCK:
            if _ENTERED:  # else `end_gc_pause` was called
                _leave()


def end_gc_pause() -> None:
    """Run the garbage collector as usual from now on, also inside blocks of `pause_gc`.

    A command calls it when everything is loaded and long work begins, such as serving requests.
    """
    with _LOCK:
        while _ENTERED:
            _leave()


def _leave() -> None:
    """Leave one block; after the last one, objects loaded in them are old, and thresholds usual."""
    before = _ENTERED.pop()
    if not _ENTERED:
        if gc.get_count()[0] > MIN_LOADED_OBJECTS and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)
