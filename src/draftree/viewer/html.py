"""An HTML page that shows the draft tree of each step, without external resources."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from draftree.viewer.layout import GAP, HEIGHT, PAD, layout
from draftree.viewer.svg import tooltip
from draftree.viewer.token_text import mark_line_ends
from draftree.viewer.trace import Step, describe_run, totals

HOME = Path(__file__).parent


def render(steps: Sequence[Step], about: Mapping[str, str]) -> str:
    """Return the contents of an HTML file with the text and all steps."""
    parts = {
        "css": read_asset("tree.css") + read_asset("text.css") + read_asset("page.css"),
        "js": read_asset("tree.js") + read_asset("page.js"),
        "data": script_json(
            {"height": HEIGHT, "pad": PAD, "gap": GAP, "steps": [step_as_lists(s) for s in steps]}
        ),
        "prompt": escape(mark_line_ends(about.get("prompt", ""))),
        "about": escape(describe_run(about)),
        "totals": escape(totals(steps)),
        "text": "".join(map(spans, steps)),
        "last": str(len(steps) - 1),
        "first": str(min(1, len(steps) - 1)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], read_asset("page.html"))


def read_asset(name: str) -> str:
    """Return the text of a file in this package's folder."""
    return (HOME / name).read_text(encoding="utf-8")


def script_json(found: Any) -> str:
    """Return a value as JSON for a script in a page, in ASCII and without <, > and &."""
    text = json.dumps(found, allow_nan=False, separators=(",", ":"))
    return "".join(f"\\u{ord(c):04x}" if c in "<>&" else c for c in text)


def spans(step: Step) -> str:
    """Return the HTML of a step's text, with each token marked by its origin."""
    return "".join(
        f'<span class="{origin}" data-step="{step.number}">{escape(mark_line_ends(piece))}</span>'
        for piece, origin in zip(step.pieces, step.origins, strict=True)
    )


def step_as_lists(step: Step) -> dict[str, Any]:
    """Return a step for the page's script: a list for each figure, an entry for each node."""
    items, placed = step.items, layout(step)
    return {
        "head": step.head,
        "width": round(placed.width, 1),
        "height": placed.height,
        "x": [round(b.x, 1) for b in placed.boxes],
        "y": [round(b.y) for b in placed.boxes],
        "w": [round(b.width, 1) for b in placed.boxes],
        "label": [b.label for b in placed.boxes],
        "figure": [b.figure for b in placed.boxes],
        "text": [i.text for i in items],
        "tip": [tooltip(i) for i in items],
        "kind": [i.kind for i in items],
        "parent": [i.parent for i in items],
        "depth": [i.depth for i in items],
        "q": [round(n.q, 4) if n.rank else None for n in items],
        "value": [round(n.value, 4) if n.rank else None for n in items],
        "entropy": [
            None if n.entropy is None or not n.rank else round(n.entropy, 3) for n in items
        ],
        "rank": [n.rank or None for n in items],
    }
