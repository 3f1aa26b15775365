"""draftree: exactly what the model would have written anyway, in far fewer forward passes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftree.completion import Chat, Completion, Token
    from draftree.costs import Costs
    from draftree.engine import Engine, Generation, load
    from draftree.errors import DraftreeError, UserError
    from draftree.generation import speculate
    from draftree.grammar import Grammar
    from draftree.options import Options
    from draftree.sampling import Sampling
    from draftree.target import Target, demo_folder
    from draftree.text import Request
    from draftree.tree import Candidates, Tree, Verdict

__version__ = "0.1.0"

__all__ = [
    "Candidates",
    "Chat",
    "Completion",
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
    "completion": ("Chat", "Completion", "Token"),
    "costs": ("Costs",),
    "engine": ("Engine", "Generation", "load"),
    "grammar": ("Grammar",),
    "errors": ("DraftreeError", "UserError"),
    "generation": ("speculate",),
    "options": ("Options",),
    "sampling": ("Sampling",),
    "target": ("Target", "demo_folder"),
    "text": ("Request",),
    "tree": ("Candidates", "Tree", "Verdict"),
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: torch takes seconds, and the command line's help does not need it."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"draftree.{module}"), name)
    raise AttributeError(f"module 'draftree' has no attribute '{name}'")
