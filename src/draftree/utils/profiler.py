"""A profiler of nested phases by wall-clock time."""

import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar, final

P = ParamSpec("P")
T = TypeVar("T")
_RECORD: ContextVar["PhaseSeconds | None"] = ContextVar("draftree.phases", default=None)


@final
class PhaseSeconds:
    """Sum the seconds of phases.

    Args:
        seconds: the sums by phase, which are changed in place. The name of a nested phase includes
            the outer ones: `grow/draft/model`.
    """

    def __init__(self, seconds: MutableMapping[str, float]) -> None:
        self._seconds = seconds
        self._open = list[str]()
        self._since = time.perf_counter()

    def turn(self) -> None:
        """Add the elapsed time to the open phase, if there is one."""
        now = time.perf_counter()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def begin(self, name: str) -> None:
        """Begin a phase inside the open one."""
        self.turn()
        self._open.append(f"{self._open[-1]}/{name}" if self._open else name)

    def end(self) -> None:
        """End the phase that was begun last."""
        self.turn()
        self._open.pop()


@contextmanager
def record_phases(seconds: MutableMapping[str, float]) -> Iterator[None]:
    """Add the seconds of phases inside the context to a dictionary, by the phase's name."""
    token = _RECORD.set(PhaseSeconds(seconds))
    try:
        yield
    finally:
        _RECORD.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the work inside the context as part of a phase.

    It costs almost nothing if no phases are recorded.
    """
    if (record := _RECORD.get()) is None:
        yield
        return
    record.begin(name)
    try:
        yield
    finally:
        record.end()


def in_phase(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that each call counts as a phase."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if (record := _RECORD.get()) is None:
                return function(*args, **kwargs)
            record.begin(name)
            try:
                return function(*args, **kwargs)
            finally:
                record.end()

        return call

    return decorate
