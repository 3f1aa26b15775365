"""Drafter states across requests, and what happens when a drafter raises an exception."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from draftree.batch import SequenceBatch
from draftree.drafters.base import Drafter
from draftree.errors import DraftreeError, DraftreeWarning, first_line
from draftree.models.kv_cache import SlotCache
from draftree.target.target import HiddenStates
from draftree.tree import Ints


class DrafterFault(Exception):
    """An exception that a drafter raised.

    Attributes:
        rows: the slots of the sequences for which it was raised again when they were tried alone;
            empty if it was not raised again.
        error: the exception of the drafter.
    """

    def __init__(self, rows: list[int], error: Exception) -> None:
        super().__init__(str(error))
        self.rows, self.error = rows, error


def start_drafter(
    drafter: Drafter[Any], rows: SequenceBatch, hidden_states: HiddenStates, state: Any, begun: Ints
) -> Any:
    """Return a drafter's state after sequences have begun a text.

    A sequence for which the drafter raises an exception is generated without drafts.
    """

    def start(state: Any, hidden_states: HiddenStates, begun: Ints) -> Any:
        return drafter.start(rows.texts, rows.last.copy(), hidden_states, state, begun)

    try:
        return start(state, hidden_states, begun)
    except Exception as error:
        failed = list[int]()
        for row in begun.tolist():
            try:
                state = start(
                    state,
                    hidden_states.take(np.flatnonzero(hidden_states.rows == row)),
                    np.array([row], np.int64),
                )
            except Exception:
                failed.append(row)
        stop_drafting(rows, drafter, DrafterFault(failed, error))
        return state


def release_slot(drafter: Drafter[Any], rows: SequenceBatch, state: Any, row: int) -> Any:
    """Return a drafter's state after a slot has been freed.

    Return None if the drafter raises an exception; all sequences are then generated without drafts.
    """
    if state is None:
        return None
    try:
        return drafter.truncate(state, rows.lengths, np.array([row], np.int64))
    except Exception as error:
        stop_drafting(rows, drafter, DrafterFault(rows.live.tolist(), error))
        return None


def select_drafter_state(
    drafter: Drafter[Any], rows: SequenceBatch, state: Any, chosen: Ints, cache: SlotCache
) -> Any:
    """Return a drafter's state with sequences moved to other slots; None if it cannot move them."""
    try:
        return drafter.select(state, chosen, cache)
    except Exception as error:
        rows.warn(describe_fault(drafter, error))
        return None


def carry_state(drafter: Drafter[Any], state: Any) -> Any:
    """Return the state that a drafter keeps from text to text; None if it raises an exception."""
    try:
        return None if state is None else drafter.carry(state)
    except Exception as error:
        warnings.warn(describe_fault(drafter, error), DraftreeWarning, stacklevel=2)
        return None


def describe_fault(
    drafter: Drafter[Any], error: Exception, then: str = "what it knew is lost"
) -> str:
    """Return the message for a drafter that raised an exception."""
    what = (
        str(error)
        if isinstance(error, DraftreeError)
        else f"{type(error).__name__}: {first_line(error)}"
    )
    return f"the drafter failed, and {then}: {what} ({drafter.description})"


def stop_drafting(rows: SequenceBatch, drafter: Drafter[Any], fault: DrafterFault) -> None:
    """Generate the failed sequences without drafts to their end, and warn about it."""
    rows.undrafted.update(fault.rows)
    rows.warn(
        describe_fault(
            drafter,
            fault.error,
            "the text continues without drafts" if fault.rows else "it is asked again",
        )
    )


def raises(call: Callable[[], object]) -> bool:
    """Return whether a call raises an exception."""
    try:
        call()
    except Exception:
        return True
    return False
