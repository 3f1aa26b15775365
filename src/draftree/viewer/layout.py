"""Positions of a tree's boxes: depth increases to the right."""

from dataclasses import dataclass

from rich.cells import cell_len

from draftree.viewer.token_text import cut_to_cells, percent
from draftree.viewer.trace import SIGNS, Node, Step, children

CELL, PAD = 7.2, 8.0
"""Width in pixels of a letter in a fixed-width font of 12 px, and padding in pixels on the left and
right of a box's text."""
ROW, HEIGHT, GAP = 28.0, 22.0, 26.0
"""Sizes in pixels: distance between two lines, height of a box, and gap between two columns."""
MAX_LABEL_CELLS = 18
"""Largest width of a token's text in cells. The tooltip contains the whole text."""


@dataclass(frozen=True)
class Box:
    """Store a node's position and width in pixels, its text, and its q in percent."""

    x: float
    y: float
    width: float
    label: str
    figure: str


@dataclass(frozen=True)
class Layout:
    """Store the boxes of a tree in the order of its nodes, and the picture's size in pixels."""

    boxes: tuple[Box, ...]
    width: float
    height: float


def layout(step: Step) -> Layout:
    """Compute the boxes of a step's nodes so that no two of them overlap."""
    items = step.items
    row = node_lines(items)
    labels = [SIGNS[i.kind] + cut_to_cells(i.text, MAX_LABEL_CELLS) for i in items]
    figures = [percent(i.q) if i.rank else "" for i in items]
    cells = [cell_len(a) + (len(b) + 1 if b else 0) for a, b in zip(labels, figures, strict=True)]
    widths = [2 * PAD + CELL * n for n in cells]
    left = columns(items, widths)
    boxes = tuple(
        Box(left[item.depth], row[i] * ROW, widths[i], labels[i], figures[i])
        for i, item in enumerate(items)
    )
    return Layout(boxes, max(b.x + b.width for b in boxes), max(row) * ROW + HEIGHT)


def columns(items: list[Node], widths: list[float]) -> list[float]:
    """Return the left edge in pixels of the boxes at each depth."""
    left = [0.0]
    for depth in range(max(i.depth for i in items)):
        left.append(
            left[-1] + GAP + max(w for i, w in zip(items, widths, strict=True) if i.depth == depth)
        )
    return left


def node_lines(items: list[Node]) -> list[int]:
    """Return the number of the line on which each node is drawn.

    A first child is on the line of its parent. Other nodes take the next free line in depth-first
    order.
    """
    below = children(items)
    row = [0] * len(items)
    used = 0
    waiting = [0]
    while waiting:
        i = waiting.pop()
        first = items[i].parent < 0 or below[items[i].parent][0] == i
        used = used if first else used + 1
        row[i] = used
        waiting += reversed(below[i])
    return row
