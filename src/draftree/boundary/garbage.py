"""Python's search for unreachable objects, put off while libraries and models are loaded."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

SELDOM = 100_000
"""New objects from one search to the next; transformers and a model make some 700,000 that all stay."""
_LOCK = Lock()
_ENTERED: list[tuple[int, int, int]] = []
"""For each who is inside, of whatever thread, the thresholds that the first one found."""


@contextmanager
def seldom() -> Iterator[None]:
    """Searches for garbage a hundred times less often inside: among what is being loaded it takes a third of the time."""
    with _LOCK:
        _ENTERED.append(_ENTERED[0] if _ENTERED else gc.get_threshold())
        first, *others = _ENTERED[0]
        gc.set_threshold(max(first, SELDOM) if first else 0, *others)
    try:
        yield
    finally:
        with _LOCK:
            before = _ENTERED.pop()
            if not _ENTERED:
                gc.set_threshold(*before)
