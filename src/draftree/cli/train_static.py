"""`draftree train static`, between its options and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from draftree.boundary import files
from draftree.cli import inputs, terminal
from draftree.drafters.base import Drafter
from draftree.errors import UserError
from draftree.evaluation import report
from draftree.evaluation.driven import answered
from draftree.models.target import Target
from draftree.registry import build
from draftree.timing import measured
from draftree.tree import Ints
from draftree.tuning.static import (
    BATCH,
    NAME,
    Driven,
    Settings,
    drive,
    prompts_of,
    texts_of,
    written,
)

# The command.


@dataclass(frozen=True)
class Asked:
    """What was asked for.

    Attributes:
        name: the spec, `static` and its knobs.
        data: the files of prompts or texts.
        out: the file that is written.
        drafter: the spec of the one the tree is for.
        target: its target.
        knobs: further ones, as key=value.
        costs: a file of costs; they are measured here by default.
        device: to compute on.
        dtype: of the target's weights.
    """

    name: str
    data: Sequence[Path]
    out: Path
    drafter: str
    target: str = "demo"
    knobs: Sequence[str] = ()
    costs: Path | None = None
    device: str | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From the command line's options that were given.

        Raises:
            UserError: the drafter is missing, or an option means nothing here.
        """
        known, said = [f.name for f in fields(cls)], {k: v for k, v in given.items() if k != "as_json"}
        if strange := [f"--{option.replace('_', '-')}" for option in said if option not in known]:
            allowed = ", ".join("--set" if k == "knobs" else f"--{k}" for k in known if k != "name")
            raise UserError(f"train {NAME} was given {', '.join(strange)}, allowed are {allowed}")
        if "drafter" not in said:
            raise UserError(f"train {NAME} was given no drafter, name the one the tree is for with --drafter")
        return cls(**said)

    @property
    def settings(self) -> Settings:
        """The knobs of the spec, and the further ones."""
        return Settings.parsed([*filter(None, self.name.partition(":")[2].split(",")), *self.knobs])


def run(asked: Asked) -> dict[str, Any]:
    """Finds the tree and writes it to a new file, as `static:paths=FILE` reads it; returns what was written.

    Raises:
        UserError: something that was asked for does not exist or does not fit, or the file exists.
    """
    settings, out = asked.settings, asked.out
    if out.exists():
        raise UserError(f"'{out}' exists, allowed is a new file")
    method, fixed = build("drafter", asked.drafter), inputs.fixed_costs(asked.costs)
    files.writable(out)
    with terminal.busy("loading"):
        model = Target.load(asked.target, asked.dtype, asked.device)
        opened: Drafter[Any] = method.open(model)
    found, context = _measured(settings, asked.data, model, opened)
    with terminal.busy("measuring what a step costs"):
        costs = (fixed or measured(model, opened)).at(context, 1)
    with terminal.busy("searching"):
        about = {"target": asked.target, "drafter": asked.drafter, "data": list(map(str, asked.data))}
        result = written(settings, found, costs) | about
    report.save(result, out)
    return result


def show(found: Mapping[str, Any], out: Path) -> None:
    """What was found, the tree in the last line."""
    console = terminal.output()
    rows = [
        {"depth": str(d), "places": str(n), **{f"rank {r}": f"{a:.3f}" for r, a in enumerate(rates[:SHOWN])}}
        for d, (n, rates) in enumerate(zip(found["places"], found["acceptance"], strict=True), 1)
    ]
    console.print(terminal.table(f"acceptance of {found['drafter']} by rank and depth", rows))
    sizes = [
        {"nodes": str(s["nodes"]), "expected τ": f"{s['tau']:.2f}", "predicted speed-up": f"{s['speedup']:.2f}"}
        for s in found["sizes"]
    ]
    console.print(terminal.table("trees with the largest expected τ, by size", sizes))
    told = (
        f"{out}: expected τ {found['tau']:.2f} (decoding along the data {found['decoded_tau']:.2f}), "
        f"{found['nodes']} nodes, depth {found['depth']}, predicted speed-up {found['speedup']:.2f}"
    )
    console.print(told + ("" if found["speedup"] > 1 else ": plain decoding is faster"), soft_wrap=True, markup=False)


SHOWN = 6
"""Ranks of which the table shows the acceptance."""


def _measured(settings: Settings, files: Sequence[Path], target: Target, drafter: Drafter[Any]) -> tuple[Driven, int]:
    """The drafter driven along the data, and the mean number of committed tokens it was measured behind."""
    prompts = prompts_of(files, target, settings) if settings.answers else []
    texts = [] if settings.answers else texts_of(files, target, settings)
    work = [("answering", i) for i in range(0, len(prompts), BATCH)]
    steps = len(work) + -(-len(prompts or texts) // BATCH)
    found = list[Ints]()
    with terminal.progress(f"train {NAME}", steps) as tell:
        for done, (what, i) in enumerate(work):
            tell(done, what)
            texts += answered(target, prompts[i : i + BATCH], settings.tokens)
        if not texts:
            raise UserError("the target answers every prompt with fewer than 2 tokens; answers=false reads the data as it is")
        for i in range(0, len(texts), BATCH):
            tell(len(work) + i // BATCH, "driving the drafter along")
            found += drive(target, drafter, texts[i : i + BATCH], settings.depth, settings.width).texts
    context = np.mean([(t.start + len(t.tokens)) / 2 for t in texts])
    return Driven(found, settings.width), round(float(context))
