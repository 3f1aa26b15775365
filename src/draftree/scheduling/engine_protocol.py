"""The interface of the engine that the scheduler needs."""

from typing import Protocol

from draftree.loop import Parts, State
from draftree.target.target import Target


class Host(Protocol):
    """An engine, as the scheduler sees it."""

    @property
    def target(self) -> Target:
        """Return the model."""
        ...

    def scheduled_parts(self) -> tuple[Parts, State]:
        """Return the parts of a step, and the state that it begins with."""
        ...

    def remember(self, state: State) -> None:
        """Keep the state that a step ended with."""
        ...
