"""What the scheduler needs of the engine that it belongs to."""

from typing import Protocol

from draftree.loop import Parts, State
from draftree.models.target import Target


class Host(Protocol):
    """An engine, as the scheduler sees it."""

    @property
    def target(self) -> Target: ...
    def scheduled_parts(self) -> tuple[Parts, State]: ...
    def remember(self, state: State) -> None: ...
