"""draftree: exactly what the model would have written anyway, in far fewer forward passes."""

import sys
from importlib import import_module
from opcode import opmap
from typing import TYPE_CHECKING, Any

from draftree import aliases
from draftree.aliases import MODULE
from draftree.errors import UnknownAttribute
from draftree.utils.gc_pause import pause_gc

if TYPE_CHECKING:
    from draftree.batch import Generation
    from draftree.costs.step_costs import Costs
    from draftree.engine import Engine, load, speculate
    from draftree.errors import DraftreeError, UserError
    from draftree.request import Request
    from draftree.sampling.grammar import Grammar
    from draftree.sampling.params import Sampling
    from draftree.scheduling.handle import Handle, RequestStats, Update
    from draftree.scheduling.options import SchedulerOptions
    from draftree.target.target import Target
    from draftree.text.completion import Completion, Token
    from draftree.text.conversation import Conversation
    from draftree.text.options import Options
    from draftree.tree import AcceptResult, Candidates, Tree
    from draftree.weights import demo_folder

__version__ = "0.1.0"

__all__ = [
    "AcceptResult",
    "Candidates",
    "Completion",
    "Conversation",
    "Costs",
    "DraftreeError",
    "Engine",
    "Generation",
    "Grammar",
    "Handle",
    "Options",
    "Request",
    "RequestStats",
    "Sampling",
    "SchedulerOptions",
    "Target",
    "Token",
    "Tree",
    "Update",
    "UserError",
    "demo_folder",
    "load",
    "speculate",
]

_MODULES = {
    "batch": ("Generation",),
    "costs.step_costs": ("Costs",),
    "engine": ("Engine", "load", "speculate"),
    "errors": ("DraftreeError", "UserError"),
    "request": ("Request",),
    "sampling.grammar": ("Grammar",),
    "sampling.params": ("Sampling",),
    "scheduling.handle": ("Handle", "RequestStats", "Update"),
    "scheduling.options": ("SchedulerOptions",),
    "target.target": ("Target",),
    "text.completion": ("Completion", "Token"),
    "text.conversation": ("Conversation",),
    "text.options": ("Options",),
    "tree": ("Candidates", "Tree", "AcceptResult"),
    "weights": ("demo_folder",),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    Importing torch takes seconds, and the command line's help does not need it.
    """
    for module, names in _MODULES.items():
        if name in names:
            with pause_gc():
                return getattr(import_module(f"draftree.{module}"), name)
    if (ours := aliases.SAME[MODULE].get(name)) is not None:
        return getattr(import_module("draftree.integrations.other_tools"), ours)
    unknown = UnknownAttribute(MODULE, name, sys.modules[__name__], _of_transformers(name))
    if _is_imported():  # Python would replace an AttributeError by one without the suggestion
        raise ImportError(str(unknown), name=__name__)
    raise unknown


def _of_transformers(name: str) -> str | None:
    """Return the import statement for a class of transformers that no table of names contains.

    Return None for any other name.
    """
    if not name[:1].isupper() or aliases.suggestion(MODULE, name):
        return None
    return (
        f"from transformers import {name}" if name in dir(import_module("transformers")) else None
    )


def _is_imported() -> bool:
    """Return whether a statement `from draftree import name` has called `__getattr__`."""
    frame = sys._getframe(2)
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def __dir__() -> list[str]:
    """Return the public names, for completion in editors and shells."""
    return [*__all__, "__version__"]
