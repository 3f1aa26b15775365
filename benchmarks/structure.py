"""The levels of the source, and a picture of what imports what: docs/images/architecture.svg.

    python benchmarks/structure.py            # draws the picture
    python benchmarks/structure.py --check    # writes nothing; exit status 1 if it is out of date

A part is a package or a single file of `src/draftree`; "draftree" itself is the package's
`__init__`. Every import counts, also one inside a function or for type checking only.
`tests/project/test_structure.py` holds the order of `LEVELS`.
"""

import argparse
import ast
import graphlib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Set
from html import escape
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "draftree"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

LEVELS: Mapping[str, tuple[str, ...]] = {
    "program": ("__main__",),
    "command line": ("cli",),
    "other programs": ("integrations",),
    "examination, tuning, serving": ("doctor", "serving", "tuning"),
    "learning": ("training",),
    "measurement": ("evaluation", "testing"),
    "public names": ("draftree",),
    "engine": ("engine",),
    "continuous batching": ("scheduling",),
    "decoding": ("loop", "hf"),
    "putting together": ("drafting", "registry", "measure_costs", "text"),
    "costs of a pairing": ("cost_estimate",),
    "drafts and batches": ("drafters", "batch", "viewer"),
    "contracts": ("request", "policies", "acceptors", "formats"),
    "target": ("target", "data"),
    "models and numbers": ("models", "sampling", "costs"),
    "utilities": ("utils", "online_logistic"),
    "ground": ("tree", "metrics", "weights"),
    "loops": ("kernels",),
    "native kernels": ("native",),
    "errors": ("errors",),
    "names": ("aliases",),
}
"""The parts by level, the highest first; a part imports from lower levels alone."""

Graph = dict[str, set[str]]
"""What each module or part imports."""


def imports(source: Path = SOURCE) -> Graph:
    """Return the modules of a package with the modules of the same package that each imports."""
    files = {
        ".".join(p.relative_to(source.parent).with_suffix("").parts): p
        for p in sorted(source.rglob("*.py"))
    }
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    return {
        name: set(_imported(ast.parse(path.read_text("utf-8")), modules.keys()))
        for name, path in modules.items()
    }


def _imported(tree: ast.AST, modules: Set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import names no module"
            named = (
                f"{node.module}.{alias.name}" for alias in node.names
            )  # a module of a package, or something in a module
            yield from ({name if name in modules else str(node.module) for name in named} & modules)
        elif isinstance(node, ast.Import):
            yield from ({alias.name for alias in node.names} & modules)


def part(module: str) -> str:
    """Return the part that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def parts(modules: Graph) -> Graph:
    """Return what each part imports of others."""
    found: Graph = {part(module): set() for module in modules}
    for module, those in modules.items():
        found[part(module)] |= {part(other) for other in those} - {part(module)}
    return found


def level(name: str) -> int:
    """Return a part's height above the ground; −1 for a part without a level."""
    return next(
        (len(LEVELS) - 1 - i for i, names in enumerate(LEVELS.values()) if name in names), -1
    )


def faults(modules: Graph) -> list[str]:
    """Return the faults of the imports, one per line.

    They are parts without a level, imports that do not run downward, and a cycle.
    """
    known = [
        f"'{name}' stands in no level of benchmarks/structure.py"
        for name in parts(modules)
        if level(name) < 0
    ]
    wrong = [
        f"{module} imports {other}: '{part(other)}' is not below '{part(module)}'"
        for module, those in modules.items()
        for other in sorted(those)
        if part(module) != part(other) and level(part(module)) <= level(part(other))
    ]
    try:
        graphlib.TopologicalSorter(modules).prepare()
    except graphlib.CycleError as error:
        wrong.append(f"imports run in a circle: {' → '.join(error.args[1])}")
    return known + wrong


# The picture. Positions are in pixels; a lane is where a long arrow passes a level.

LEFT = 175
BOX = 34
FLOOR = 70
LANE = 12
GAP = 16
STYLE = """
svg { color-scheme: light dark; }
svg { --ground: #fff; --ink: #1f2328; --muted: #59636e; --line: #8c959f; --box: #f6f8fa; --band: #eaeef2; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #0d1117; --ink: #f0f6fc; --muted: #9198a1; --line: #6e7681; --box: #21262d; --band: #161b22; }
}
text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); text-anchor: middle; }
.level { fill: var(--muted); font-size: 12px; text-anchor: start; }
.ground { fill: var(--ground); } .band { fill: var(--band); }
.box { fill: var(--box); stroke: var(--line); }
path { fill: none; stroke: var(--line); stroke-width: 1.2; }
marker path { fill: var(--line); stroke: none; }
"""


def shortest(graph: Graph) -> Graph:
    """Return the arrows to lower parts that cannot be reached through another part."""
    reached: dict[str, set[str]] = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        reached[name] = graph[name].union(*(reached[other] for other in graph[name]))
    return {
        name: {o for o in those if not any(o in reached[p] for p in those)}
        for name, those in graph.items()
    }


def drawn(modules: Graph) -> str:
    """Return the picture as SVG: levels as floors, parts as boxes, and arrows by `shortest`."""
    every = parts(modules)
    arrows = [(a, b) for a, those in sorted(shortest(every).items()) for b in sorted(those)]
    floors: list[list[str]] = [
        [name for name in names if name in every] for names in reversed(LEVELS.values())
    ]
    lines = []
    for a, b in arrows:  # a long arrow has a lane on every floor between
        lanes = [f"{a} {b} {n}" for n in range(level(a) - 1, level(b), -1)]
        for n, lane in zip(range(level(a) - 1, level(b), -1), lanes, strict=True):
            floors[n].append(lane)
        lines.append([a, *lanes, b])
    x = _places(floors, [pair for line in lines for pair in itertools.pairwise(line)])
    y = {
        name: 40 + (len(floors) - 1 - n) * FLOOR for n, floor in enumerate(floors) for name in floor
    }
    width, height = max(at + _half(name) for name, at in x.items()) + 20, len(floors) * FLOOR + 50
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img">',
        "<title>What imports what in draftree</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 1 L7 4 L0 7 Z"/></marker></defs>',
        f'<rect class="ground" width="{width:.0f}" height="{height}" rx="8"/>',
    ]
    for n, title in enumerate(LEVELS):
        out.append(
            f'<rect class="band" x="8" y="{40 + n * FLOOR - 27}" width="{width - 16:.0f}" height="54" rx="6"/>'
        )
        out.append(f'<text class="level" x="20" y="{44 + n * FLOOR}">{escape(title)}</text>')
    out += [_arrow([(x[name], y[name]) for name in line]) for line in lines]
    for name, those in sorted(every.items()):
        told = escape(f"{name} imports {', '.join(sorted(those)) or 'nothing of draftree'}")
        at, half = x[name], _half(name)
        rect = f'<rect class="box" x="{at - half:.0f}" y="{y[name] - BOX // 2}" width="{2 * half:.0f}" height="{BOX}" rx="5"/>'
        out.append(
            f'<g><title>{told}</title>{rect}<text x="{at:.0f}" y="{y[name] + 5}">{name}</text></g>'
        )
    note = "An arrow means: imports. One that follows from others is left out; every import runs downward."
    return "\n".join(
        [*out, f'<text class="level" x="20" y="{height - 14}">{note}</text>', "</svg>", ""]
    )


def _half(name: str) -> float:
    """Return half the width of a box, or of a lane."""
    return LANE / 2 if " " in name else 4.6 * len(name) + 12


def _places(floors: list[list[str]], pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Return the horizontal position of each box and lane on its floor.

    It is near the boxes that it is connected to, without touching its neighbours.
    """
    near: dict[str, list[str]] = {name: [] for floor in floors for name in floor}
    for a, b in pairs:
        near[a].append(b)
        near[b].append(a)
    x = {name: 100.0 * i for floor in floors for i, name in enumerate(floor)}
    for _ in range(300):
        for floor in [*floors, *reversed(floors)]:
            wanted = {
                name: mean(x[other] for other in near[name]) if near[name] else x[name]
                for name in floor
            }
            row = sorted(floor, key=wanted.__getitem__)
            right, left = (
                _pushed(row, wanted),
                _pushed(row[::-1], {name: -at for name, at in wanted.items()}),
            )
            x |= {name: (right[name] - left[name]) / 2 for name in row}
    first = min(at - _half(name) for name, at in x.items())
    return {name: at - first + LEFT for name, at in x.items()}


def _pushed(row: list[str], wanted: dict[str, float]) -> dict[str, float]:
    """Return positions in a row's order, each where wanted or as near as the one before allows."""
    places, edge = {}, -math.inf
    for name in row:
        places[name] = max(wanted[name], edge + _half(name))
        edge = places[name] + _half(name) + GAP
    return places


def _arrow(points: list[tuple[float, float]]) -> str:
    """Return a smooth line from the first box's lower edge via lanes to the last's upper edge."""
    x, y = points[0][0], points[0][1] + BOX / 2
    d = f"M{x:.0f} {y:.0f}"
    for i, (to, below) in enumerate(points[1:], 2):
        end = below - (BOX / 2 if i == len(points) else 0)
        bend = (end - y) / 2
        d += f" C{x:.0f} {y + bend:.0f} {to:.0f} {end - bend:.0f} {to:.0f} {end:.0f}"
        x, y = to, end
    return f'<path d="{d}" marker-end="url(#head)"/>'


def main() -> int:
    """Draw or check; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing, tell whether the picture is up to date"
    )
    check = parser.parse_args().check
    modules = imports()
    if wrong := faults(modules):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    picture = drawn(modules)
    if check and (not PICTURE.is_file() or PICTURE.read_text("utf-8") != picture):
        print(
            f"{PICTURE} is not what the source says: run python benchmarks/structure.py",
            file=sys.stderr,
        )
        return 1
    if not check:
        PICTURE.write_text(picture, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
