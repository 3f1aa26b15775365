"""Progress of long work, told to a callback."""

from typing import Protocol


class Tell(Protocol):
    """Is told how much is done, what is being done, and of how much where that is known only now."""

    def __call__(self, done: int, remark: str = "", of: int | None = None) -> None: ...


def silent(done: int, remark: str = "", of: int | None = None) -> None:
    """Tells nobody."""
