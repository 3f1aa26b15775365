"""A list of published drafter checkpoints by target. None is downloaded unasked."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from draftree.errors import UserError, format_value

CHECKPOINTS_FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class PublishedDrafter:
    """A published drafter.

    Attributes:
        drafter: the hub id of the drafter.
        target: the hub id of the model for which it was trained.
        method: the method of draftree that opens it.
        layout: the layout of its files.
        source: the document or page that names it.
    """

    drafter: str
    target: str
    method: str
    layout: str
    source: str


@cache
def published_drafters() -> tuple[PublishedDrafter, ...]:
    """Return all known published drafters."""
    return tuple(
        PublishedDrafter(**entry) for entry in json.loads(CHECKPOINTS_FILE.read_text("utf-8"))
    )


def find_published(target: str) -> str:
    """Return the hub id of the first known published drafter for a target.

    Raises:
        UserError: no published drafter is known for the target.
    """
    if not (known := published_drafters_for(target)):
        told = "`draftree drafters` lists those that are; 'suffix' and 'pld' need no training"
        raise UserError(
            f"drafter is 'published', but none is known for target {format_value(target)}: {told}"
        )
    return known[0].drafter


def published_drafters_for(target: str) -> tuple[PublishedDrafter, ...]:
    """Return the published drafters for a target: a hub id, or a folder of the same name."""
    name = target.rstrip("/").rpartition("/")[2].lower()
    return tuple(
        entry for entry in published_drafters() if entry.target.rpartition("/")[2].lower() == name
    )
