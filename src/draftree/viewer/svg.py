"""Draw all steps of a run in one static SVG."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

from draftree.viewer.layout import CELL, GAP, HEIGHT, PAD, Box, layout
from draftree.viewer.token_text import cut_to_cells, mark_line_ends, percent
from draftree.viewer.trace import Node, Step, describe_run, totals

MAX_STEPS, MAX_HEIGHT = 24, 6000.0
"""Largest number of steps that are drawn, and largest height of a picture in pixels."""
MARGIN, HEADER_HEIGHT, CAPTION_HEIGHT, STEP_GAP = 24.0, 84.0, 24.0, 26.0
"""Sizes in pixels: margin of the picture, height of its head, height of a step's caption, and gap
between two steps."""
MIN_WIDTH = 760.0
"""Least width of a picture in pixels, so that the head fits."""

CSS = (Path(__file__).parent / "tree.css").read_text(encoding="utf-8")
STYLE = """
.tree rect.ground { fill: var(--ground); stroke: none; }
.tree .title { font-weight: bold; }
.tree .muted { fill: var(--muted); }
"""


def render(steps: Sequence[Step], about: Mapping[str, str]) -> str:
    """Return the contents of an SVG file with all steps."""
    verified = [s for s in steps if s.number]
    drawn = steps_that_fit(verified)
    tall = [CAPTION_HEIGHT + layout(s).height + STEP_GAP for s in drawn]
    width = max([MIN_WIDTH, *(layout(s).width for s in drawn)]) + 2 * MARGIN
    height = MARGIN + HEADER_HEIGHT + sum(tall)
    below = accumulate(tall, initial=MARGIN + HEADER_HEIGHT)
    body = "\n".join(figure(s, y) for s, y in zip(drawn, below, strict=False))
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    prompt = text_of(about.get("prompt", ""))
    described = f"{totals(steps)}. {describe_run(about)}. The text: {text_of(''.join(p for s in steps for p in s.pieces))}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tree" {size} role="img" aria-labelledby="title desc">\n'
        f'<title id="title">{escape("Trees drafted for: " + prompt)}</title>\n<desc id="desc">{escape(described)}</desc>\n'
        f"<style>{CSS}{STYLE}</style>\n"
        f'<rect class="ground" width="{width:.0f}" height="{height:.0f}" rx="8"/>\n'
        f"{head(steps, drawn, about, int((width - 2 * MARGIN) / CELL))}\n{body}\n</svg>\n"
    )


def steps_that_fit(steps: Sequence[Step]) -> list[Step]:
    """Return the first steps that fit into a picture of limited size; at least one, if any."""
    tall = accumulate(CAPTION_HEIGHT + layout(s).height + STEP_GAP for s in steps)
    return [
        s
        for i, (s, t) in enumerate(zip(steps, tall, strict=True))
        if i == 0 or (i < MAX_STEPS and t <= MAX_HEIGHT)
    ]


def head(steps: Sequence[Step], drawn: Sequence[Step], about: Mapping[str, str], cells: int) -> str:
    """Return the head of the picture: prompt, target and drafter, figures, and a legend.

    `cells` is the largest number of characters in a line.
    """
    count = sum(s.number > 0 for s in steps)
    cut = f" · the first {len(drawn)} of {count} steps are drawn" if len(drawn) < count else ""
    lines = [
        ("title", text_of(about.get("prompt", ""))),
        ("muted", describe_run(about)),
        ("muted", totals(steps) + cut),
        (
            "muted",
            "✓ accepted · ⇒ chosen by the target · figures: q in percent · the fuller a box, the higher its value",
        ),
    ]
    return "\n".join(
        f'<text class="{style}" x="{MARGIN:g}" y="{MARGIN + 12 + 19 * i:g}">{escape(cut_to_cells(line, cells))}</text>'
        for i, (style, line) in enumerate(lines)
    )


def text_of(text: str) -> str:
    """Return text on one line, without characters that XML forbids."""
    return " ".join(mark_line_ends(text).split())


def figure(step: Step, y: float) -> str:
    """Return the SVG elements of one step, a caption and its tree, at height `y` in pixels."""
    items, boxes = step.items, layout(step).boxes
    edges = [
        edge(i, boxes[i.parent], b) for i, b in zip(items, boxes, strict=True) if i.parent >= 0
    ]
    edges.sort(
        key=lambda drawn: 'class="rejected"' not in drawn
    )  # edges share pieces: the accepted path is drawn on top
    nodes = [node(i, b) for i, b in zip(items, boxes, strict=True)]
    caption = f'<text class="title" x="0" y="12">{escape(step.head)}</text>'
    inner = "\n".join([f'<g transform="translate(0 {CAPTION_HEIGHT:g})">', *edges, *nodes, "</g>"])
    return f'<g transform="translate({MARGIN:g} {y:g})">\n{caption}\n{inner}\n</g>'


def edge(item: Node, parent: Box, box: Box) -> str:
    """Return the SVG path from a parent's right side to its child's left side.

    The line bends in the gap before the child's column.
    """
    start, bend = parent.x + parent.width, box.x - GAP / 2
    up, down = parent.y + HEIGHT / 2, box.y + HEIGHT / 2
    return f'<path class="{item.kind}" d="M{start:.1f} {up:g}H{bend:.1f}V{down:g}H{box.x:.1f}"/>'


def node(item: Node, box: Box) -> str:
    """Return the SVG elements of a node: a box with text, probability q and tooltip.

    The box is more opaque for a node of higher value.
    """
    opacity = (
        0.5 * math.sqrt(item.value) if item.rank else 0.0
    )  # the root, because most values are small
    return "\n".join(
        [
            f'<g class="{item.kind}" transform="translate({box.x:.1f} {box.y:g})"><title>{escape(tooltip(item))}</title>',
            f'<rect width="{box.width:.1f}" height="{HEIGHT:g}" rx="5" fill-opacity="{opacity:.2f}"/>',
            f'<text class="label" x="{PAD:g}" y="15">{escape(box.label)}</text>',
            f'<text class="figure" x="{box.width - PAD:.1f}" y="15" text-anchor="end">{escape(box.figure)}</text></g>',
        ]
    )


def tooltip(n: Node) -> str:
    """Return the text of a node's tooltip with all its figures."""
    if not n.rank:
        return f"{n.text}: {'chosen by the target' if n.kind == 'bonus' else 'written before'}"
    entropy = "" if n.entropy is None else f", entropy {n.entropy:.2f} nats"
    return f"{n.text}: {n.kind}, q {percent(n.q)} %, value {percent(n.value)} %{entropy}, rank {n.rank} of its siblings"
