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
    """Write a picture of all steps, in the format that the suffix of the path names.

    Args:
        path: path of the file, with one of the suffixes in `FORMATS`.
        steps: steps of the text, beginning with the prefill.
        about: texts for the head of the picture by name, such as `prompt`, target and drafter.
    """
    write_text(path, FORMATS[path.suffix.lower()](steps, about))
