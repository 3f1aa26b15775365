"""Turn SIGINT, SIGTERM and SIGHUP into exceptions, or defer them until a step has ended."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDING_SIGNALS = tuple(
    s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP")
)  # not all systems have all of them
"""The signals that ask a program to end.

They are sent by Ctrl-C, by a system or scheduler, and by a terminal that is closed.
"""


class Interrupted(KeyboardInterrupt):
    """Report that a signal asked the program to end.

    Attributes:
        status: the exit status of a program that the signal ended, as shells report it.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


STATUSES = frozenset(Interrupted(number).status for number in ENDING_SIGNALS)


@contextmanager
def raise_on_signal() -> Iterator[list[int]]:
    """Raise `Interrupted` at the current point of the program if a signal asks it to end.

    The yielded list contains the signals received.
    """
    came: list[int] = []

    def end(number: int, _: Any) -> None:
        came.append(number)
        raise Interrupted(number)

    with _handle_signals(end):
        yield came


@contextmanager
def postpone_signals() -> Iterator[list[int]]:
    """Postpone signals that ask the program to end.

    A signal that arrives inside the context is only added to the yielded list. When the context
    ends, every signal that the caller has not removed from the list is raised.
    """
    came: list[int] = []
    try:
        with _handle_signals(lambda number, _: came.append(number)):
            yield came
    finally:
        for number in came:
            signal.raise_signal(number)


@contextmanager
def _handle_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Set a handler for the signals that end a program.

    Ignored signals stay ignored, as with `nohup`. In a thread other than the main one nothing
    changes.
    """
    here = threading.current_thread() is threading.main_thread()
    before = {
        s: signal.getsignal(s)
        for s in ENDING_SIGNALS
        if here and signal.getsignal(s) not in (signal.SIG_IGN, None)
    }
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
