"""Progress of long work, told to a callback."""

from typing import Protocol


class Tell(Protocol):
    """A callback that takes the amount done, a remark, and the total where that becomes known during the work."""

    def __call__(self, done: int, remark: str = "", of: int | None = None) -> None: ...


def silent(done: int, remark: str = "", of: int | None = None) -> None:
    """Ignores all progress."""
