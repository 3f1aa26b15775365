"""The interface of the engine that the scheduler needs."""

from typing import Protocol

from draftree.loop import Components, State
from draftree.target.target import Target


class Host(Protocol):
    """Define the part of an engine that the scheduler uses."""

    @property
    def target(self) -> Target:
        """Return the target of the engine."""
        ...

    calls: int
    """Number of earlier calls whose texts the drafter may remember, see `Keyed`."""

    def set_evaluation_mode(self) -> bool:
        """Put the target into evaluation mode, and return whether it was in training mode."""
        ...

    def scheduled_parts(self) -> tuple[Components, State]:
        """Return the engine's parts, and the states of drafter and policy for a new batch.

        The parts are target, drafter, policy, acceptor and costs.
        """
        ...

    def remember(self, state: State) -> None:
        """Keep the memory of drafter and policy from the state after the last step."""
        ...
