"""Public fakes and the conformance suite: `python -m draftree.testing [--full]`."""

from draftree.testing.conformance import Case, Coverage, Suite, cases
from draftree.testing.fakes import (
    Always,
    Coached,
    Never,
    Scripted,
    Sometimes,
    TableDrafter,
    TableModel,
    random_table,
    table_target,
    tiny_target,
)
from draftree.testing.random_outcomes import Branching, outcomes

__all__ = [
    "Always",
    "Branching",
    "Case",
    "Coached",
    "Coverage",
    "Never",
    "Scripted",
    "Sometimes",
    "Suite",
    "TableDrafter",
    "TableModel",
    "cases",
    "outcomes",
    "random_table",
    "table_target",
    "tiny_target",
]
