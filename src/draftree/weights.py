"""Find the trained weights of the demo and of SmolLM2, which are a separate distribution."""

from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from draftree.errors import UserError

GROUP = "draftree.weights"
"""Group of the entry points that map a target's name to the package with its weights."""
INSTALL = "pip install ./weights in a clone of draftree"


@cache
def weights_folder(target: str) -> Path | None:
    """Return the folder with the weights for a target, `demo` or `smollm2`.

    Return None if they are not installed.
    """
    for point in entry_points(group=GROUP, name=target):
        with suppress(ModuleNotFoundError):
            spec = find_spec(point.value)
            for folder in (spec and spec.submodule_search_locations) or ():
                return Path(folder)
    return None


def demo_folder(name: str = "target") -> Path:
    """Return the folder of a part of the demo: its target, or the drafter of a method.

    Raises:
        UserError: the weights are not installed.
    """
    folder = weights_folder("demo")
    if folder is None:
        raise UserError(missing_weights_message("demo"))
    return folder / name


def missing_weights_message(target: str) -> str:
    """Return the message for a target whose weights are not installed."""
    return f"the trained weights for '{target}' are not installed: {INSTALL}"
