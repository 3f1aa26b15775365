"""Pause Python's garbage collector while libraries and models are loaded."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

SELDOM = 1_000_000
"""New objects from one search to the next; transformers and a model make some 700,000 that all
stay."""
MANY = 50_000
"""New objects that are taken for loaded ones."""
_LOCK = Lock()
_ENTERED: list[tuple[int, int, int]] = []
"""For each who is inside, of whatever thread, the thresholds that the first one found."""


@contextmanager
def seldom() -> Iterator[None]:
    """Run the garbage collector a thousand times less often inside the block.

    Otherwise it takes a third of the time of loading. What was loaded counts as old afterwards, as
    if it had survived three collections, so only a full collection looks at it again. (Freezing all
    objects and unfreezing them moves them there. Where other code has frozen objects, this is left
    out, because it would unfreeze them, too.)
    """
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
                if gc.get_count()[0] > MANY and not gc.get_freeze_count():
                    gc.freeze()
                    gc.unfreeze()
                gc.set_threshold(*before)
