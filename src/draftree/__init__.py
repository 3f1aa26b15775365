"""draftree: exactly what the model would have written anyway, in far fewer forward passes."""

import sys
from importlib import import_module
from opcode import opmap
from typing import TYPE_CHECKING, Any

from draftree.aliases import MODULE
from draftree.boundary.garbage import seldom
from draftree.errors import unknown

if TYPE_CHECKING:
    from draftree.costs.curves import Costs
    from draftree.demo import demo_folder
    from draftree.engine import Engine, load, speculate
    from draftree.errors import DraftreeError, UserError
    from draftree.models.target import Target
    from draftree.request import Request
    from draftree.rows import Generation
    from draftree.sampling.grammar import Grammar
    from draftree.sampling.settings import Sampling
    from draftree.text.completion import Completion, Token
    from draftree.text.conversation import Conversation
    from draftree.text.options import Options
    from draftree.tree import Candidates, Tree, Verdict

__version__ = "0.1.0"

__all__ = [
    "Candidates",
    "Completion",
    "Conversation",
    "Costs",
    "DraftreeError",
    "Engine",
    "Generation",
    "Grammar",
    "Options",
    "Request",
    "Sampling",
    "Target",
    "Token",
    "Tree",
    "UserError",
    "Verdict",
    "demo_folder",
    "load",
    "speculate",
]

_MODULES = {
    "costs.curves": ("Costs",),
    "demo": ("demo_folder",),
    "engine": ("Engine", "load", "speculate"),
    "errors": ("DraftreeError", "UserError"),
    "models.target": ("Target",),
    "request": ("Request",),
    "rows": ("Generation",),
    "sampling.grammar": ("Grammar",),
    "sampling.settings": ("Sampling",),
    "text.completion": ("Completion", "Token"),
    "text.conversation": ("Conversation",),
    "text.options": ("Options",),
    "tree": ("Candidates", "Tree", "Verdict"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: torch takes seconds, and the command line's help does not need it."""
    for module, names in _MODULES.items():
        if name in names:
            with seldom():
                return getattr(import_module(f"draftree.{module}"), name)
    told = unknown(MODULE, name, import_module("draftree"))
    if _is_imported():  # Python would replace an AttributeError by one without the hint
        raise ImportError(told)
    raise AttributeError(told)


def _is_imported() -> bool:
    """Return whether the name that is looked up stands in `from draftree import name`."""
    frame = sys._getframe(2)
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def __dir__() -> list[str]:
    """Return the public names, for completion in editors and shells."""
    return [*__all__, "__version__"]
