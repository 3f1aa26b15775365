"""`draftree train c2t`, between its options and its result."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from draftree.boundary import files
from draftree.boundary.files import filled, inside, locked
from draftree.cli import terminal
from draftree.drafters.base import Drafter, Trainable
from draftree.errors import UserError
from draftree.evaluation.provenance import fingerprint
from draftree.models.target import Target
from draftree.policies.c2t import CONFIG, Classifier
from draftree.registry import build
from draftree.request import Request
from draftree.tuning.c2t import (
    PLAN,
    Collected,
    Knobs,
    Plan,
    Round,
    Trained,
    collect,
    digest,
    entries_of,
    full,
    learn,
    prompts,
    split,
    summed,
)

# The command.


@dataclass(frozen=True)
class Asked:
    """What `draftree train c2t` was asked for.

    Attributes:
        data: files of prompts.
        out: the folder of the classifier.
        target: its name.
        drafter: the spec of the drafter whose trees are learnt from.
        knobs: as key=value.
        init_from: the classifier it begins with.
        epochs: passes; None, as below, for the paper's. The least number of steps is a knob.
        batch_size: entries in a step.
        lr: learning rate.
        held_out: share of the texts.
        seed: of everything drawn.
        trees: the folder in which the trees stay; by default they lie in `out` until the run has ended.
        device: of target and drafter.
        dtype: of the target.
    """

    data: Sequence[Path]
    out: Path
    target: str = "demo"
    drafter: str | None = None
    knobs: Sequence[str] = ()
    init_from: Path | None = None
    epochs: float | None = None
    batch_size: int | None = None
    lr: float | None = None
    held_out: float | None = None
    seed: int = 0
    trees: str = ""
    device: str | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """What the options of the command line ask for.

        Args:
            given: the options that were set.

        Raises:
            UserError: one of them is of drafters only.
        """
        values = {k: v for k, v in given.items() if k not in ("name", "as_json")}
        values = {{"features": "trees"}.get(k, k): v for k, v in values.items()}
        known = [f.name for f in fields(cls)]
        if foreign := [k for k in values if k not in known]:
            raise UserError(f"--{foreign[0].replace('_', '-')} is of drafters, train c2t does not take it; see --help")
        items = str(given.get("name", "")).partition(":")[2].split(",")
        return cls(**{**values, "knobs": [*filter(None, items), *values.get("knobs", [])]})

    def plan(self) -> Plan:
        """The numbers given, and the paper's for the others."""
        if self.epochs is not None and not float(self.epochs).is_integer():
            raise UserError(f"epochs is {self.epochs}, allowed for c2t is a whole number")
        given = {"epochs": None if self.epochs is None else int(self.epochs), "batch_size": self.batch_size, "lr": self.lr,
                 "held_out": self.held_out, "seed": self.seed}  # fmt: skip
        usual: dict[str, Any] = {"lr": 1e-4} if self.init_from is not None else {}
        return Plan(**usual | {name: value for name, value in given.items() if value is not None})


def run(asked: Asked) -> Trained:
    """Grows the trees, learns, and writes the classifier.

    Raises:
        UserError: something that was asked for does not exist, does not fit or is too little.
    """
    if not asked.drafter:
        raise UserError("train c2t needs --drafter: the classifier learns from the trees that this drafter grows")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"train c2t was started in {os.environ['WORLD_SIZE']} processes, allowed is 1")
    start = None if asked.init_from is None else Classifier.load(asked.init_from)
    knobs, plan, method = Knobs.read(asked.knobs, start), asked.plan(), build("drafter", asked.drafter)
    files.writable(asked.out, folder=True)
    own = asked.out / "trees"
    if (asked.out / CONFIG).is_file() and not own.is_dir():  # they are removed last
        raise UserError(f"'{asked.out}' holds a finished classifier: name another folder to train into")
    with terminal.busy("loading"):
        target = Target.load(asked.target, asked.dtype, asked.device)
        drafter = method.open(target)
        requests, too_long = prompts(target, asked.data, knobs)
    if too_long:
        terminal.remark(f"prompts left out, too long for the target's context: {too_long}")
    kept = Collected(Path(asked.trees) if asked.trees else own, about(target, drafter, asked.drafter, requests, knobs))
    kept.begin()
    with terminal.progress("draft trees", len(requests)) as tell, locked(kept.folder, inside(kept.folder)):
        texts = collect(target, drafter, requests, knobs, kept, lambda done, trees: tell(done, f"{trees:,} trees"))
    learnt, held = split(texts, plan)
    with terminal.progress("train c2t", full(entries_of(learnt, knobs), knobs, plan)) as tell:
        net, rounds = learn(learnt, held, knobs, plan, start, lambda r: tell(r.step, told(r)))
    end = summed(texts, learnt, knobs, plan, rounds)
    said = {"target": target.name, "drafter": asked.drafter, **{k: v for k, v in asdict(end).items() if k != "rounds"}}
    figures = {name: getattr(end.kept, name) for name in ("auc", "recall", "positive_rate")}
    note = {"command": shlex.join(["draftree", *sys.argv[1:]]), **asdict(plan), **asdict(knobs), **said,
            "skipped_too_long": too_long, "data": kept.about["prompts"],
            "ending": end.ending, "history": [asdict(r) for r in rounds], "held_out_trees": held.trees}  # fmt: skip
    with filled(asked.out, last=CONFIG) as folder:
        replace(net, trained_on=said | figures).save(folder)
        (folder / PLAN).write_text(json.dumps(note, indent=1) + "\n")
    if not asked.trees:
        shutil.rmtree(kept.folder)
    return end


def told(found: Round) -> str:
    """A round in a line."""
    rates = f"recall {found.recall:.3f}, positive rate {found.positive_rate:.4f}"
    return f"loss {found.loss:.3f}, held out: AUC {found.auc:.4f}, {rates}"


def show(end: Trained, out: Path) -> None:
    """What a run came to, in two lines."""
    line = (
        f"{out}: step {end.step:,} of {end.rounds[-1].step:,}, {told(end.kept)}; {end.entries:,} entries of "
        f"{end.trees:,} trees ({end.accepted:,} of {end.nodes:,} nodes accepted)"
    )
    for text in (line, end.ending):
        terminal.output().print(text, soft_wrap=True, markup=False)


def about(target: Target, drafter: Drafter[Any], spec: str, requests: Sequence[Request], knobs: Knobs) -> dict[str, Any]:
    """What trees depend on."""
    weights = fingerprint(drafter.model) if isinstance(drafter, Trainable) else ""
    grown = {name: getattr(knobs, name) for name in ("depth", "width", "entropy_top", "tokens")}
    models = {"target": fingerprint(target.decoder.model), "drafter": f"{spec}: {drafter.described}", "weights": weights}
    return models | grown | {"prompts": digest([list(r.prompt) for r in requests])}
