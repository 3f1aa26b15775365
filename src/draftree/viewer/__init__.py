"""Draw the draft trees of a run: in the terminal, as SVG, or as an HTML page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from draftree.utils.files import write_text
from draftree.viewer import html, svg
from draftree.viewer.terminal import draw
from draftree.viewer.trace import Step, Watch

__all__ = ["FORMATS", "Step", "Watch", "draw", "save_picture"]
FORMATS = {".html": html.render, ".svg": svg.render}


def save_picture(path: Path, steps: Sequence[Step], about: Mapping[str, str]) -> None:
    """Write the steps' trees in the format of the file's suffix.

    Args:
        path: path with one of the suffixes in `FORMATS`.
        steps: the steps, the prefill first.
        about: target, drafter and so on by name, for the head; includes `prompt`.
    """
    write_text(path, FORMATS[path.suffix.lower()](steps, about))
