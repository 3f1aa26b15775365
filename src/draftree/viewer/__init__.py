"""Each step's tree, drawn in the terminal, or of all steps in a file: a static SVG, or an HTML page to go through them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from draftree.boundary.files import writable
from draftree.errors import UnknownName
from draftree.viewer import page, svg
from draftree.viewer.steps import Step, Watch
from draftree.viewer.terminal import draw

__all__ = ["Step", "Watch", "check_picture", "draw", "save_picture"]
FORMATS = {".html": page.render, ".svg": svg.render}


def check_picture(path: Path) -> None:
    """Refuses, before the work, a file that `save_picture` could not write.

    Raises:
        UserError: its suffix is not known, or its place cannot be written to.
    """
    if path.suffix.lower() not in FORMATS:
        raise UnknownName(f"kind of picture, told by the suffix of '{path}',", path.suffix.lower(), FORMATS)
    writable(path)


def save_picture(path: Path, steps: Sequence[Step], about: Mapping[str, str]) -> None:
    """Writes the steps' trees in the format that the file's suffix names.

    Args:
        path: that `check_picture` let pass; its folder is made where it is missing.
        steps: the prefill first.
        about: what wrote them, by name, for the head; `prompt` among them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FORMATS[path.suffix.lower()](steps, about), encoding="utf-8")
