"""draftree: exactly what the model would have written anyway, in far fewer forward passes."""

from draftree.costs import Costs
from draftree.engine import Engine, Generation, load
from draftree.errors import DraftreeError, UserError
from draftree.sampling import Sampling
from draftree.target import Target
from draftree.text import Request
from draftree.tree import Candidates, Tree, Verdict

__version__ = "0.1.0"

__all__ = [
    "Candidates",
    "Costs",
    "DraftreeError",
    "Engine",
    "Generation",
    "Request",
    "Sampling",
    "Target",
    "Tree",
    "UserError",
    "Verdict",
    "load",
]
