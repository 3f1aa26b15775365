"""Each step's tree, drawn in the terminal or as a picture in a file."""

from draftree.viewer.picture import check_picture, save_picture
from draftree.viewer.steps import Step, Watch
from draftree.viewer.terminal import draw

__all__ = ["Step", "Watch", "check_picture", "draw", "save_picture"]
