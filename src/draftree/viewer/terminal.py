"""Draw a step's tree in the terminal."""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from draftree.viewer.token_text import cut_to_cells, percent
from draftree.viewer.trace import SIGNS, Node, NodeKind, Step, children

STYLES: dict[NodeKind, str] = {
    "root": "default",
    "accepted": "bold green",
    "rejected": "dim",
    "bonus": "bold",
}
LEGEND = "✓ accepted · ⇒ chosen by the target · drafted tokens: q/value in percent"
ARROW = " ▸ "
BRANCH = "├ "
LAST = "└ "
THROUGH = "│ "
BELOW = "  "

MAX_LABEL_CELLS = 24
"""Largest width of a token in terminal cells; less in a terminal of fewer than 80 columns."""
FIGURES = 16
"""Width in terminal cells that a mark, percentages and an arrow need in addition to a token."""


def draw(console: Console, step: Step) -> None:
    """Print a step's figures and its tree within the console's width, and an empty line."""
    if step.number == 0:
        console.print(Text(LEGEND, style="dim"), soft_wrap=True)
    console.print(Text(step.head, style="bold"), soft_wrap=True)
    for line in lines(step, console.width):
        console.print(line, soft_wrap=True)
    console.print()


def lines(step: Step, width: int) -> Iterator[Text]:
    """Yield the lines of a step's tree, at most `width` cells wide; widths below 40 count as 40."""
    width = max(width, 40)
    items = step.items
    below = children(items)
    longest = min(MAX_LABEL_CELLS, width // 2 - FIGURES)

    def branch(i: int, prefix: str, first: str) -> Iterator[Text]:
        run = [i]
        while len(below[run[-1]]) == 1:
            run += below[run[-1]]
        forks = below[run[-1]]
        inner = prefix + {BRANCH: THROUGH, LAST: BELOW, "": ""}[first]
        rest = inner + (
            THROUGH if forks else BELOW
        )  # lines of the tree go on through a chain's further lines
        yield from wrap_chain((unit(items[j], longest) for j in run), width, prefix + first, rest)
        for j in forks:
            yield from branch(j, inner, LAST if j == forks[-1] else BRANCH)

    return branch(0, "", "")


def unit(item: Node, longest: int) -> Text:
    """Return a node's styled label: the mark of its kind, its text, and `q/value` in percent.

    The text is cut to `longest` terminal cells. The root and the bonus token have no percentages,
    because they were not drafted.
    """
    found = Text(SIGNS[item.kind] + cut_to_cells(item.text, longest), style=STYLES[item.kind])
    if item.rank:
        found.append(f" {percent(item.q)}/{percent(item.value)}", style="not bold")
    return found


def wrap_chain(units: Iterable[Text], width: int, first: str, rest: str) -> Iterator[Text]:
    """Yield the lines of a chain, broken between tokens.

    `first` and `rest` are the prefixes of the first line and of the others.
    """
    line, fresh = Text(shorten_prefix(first, width)), True
    for found in units:
        if not fresh and line.cell_len + len(ARROW) + found.cell_len > width:
            yield line
            line = Text(shorten_prefix(rest, width)).append(ARROW.lstrip(), style="dim")
        elif not fresh:
            line.append(ARROW, style="dim")
        line.append(found)
        fresh = False
    yield line


def shorten_prefix(prefix: str, width: int) -> str:
    """Return a line's prefix, cut at its start if it is wider than half of the line."""
    return prefix if len(prefix) <= width // 2 else "…" + prefix[1 - width // 2 :]
