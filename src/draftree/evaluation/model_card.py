"""The text of a trained drafter's model card."""

import json
from collections.abc import Mapping
from os.path import isdir
from pathlib import Path
from typing import Any

from draftree.errors import UserError
from draftree.evaluation.text_tables import faster_and_slower, result_table
from draftree.target.target_names import shipped_folder, shipped_name
from draftree.utils.files import read_object

CARD = "README.md"
SHOWN_PLAN_ENTRIES = ("epochs", "batch_size", "lr", "schedule", "max_tokens", "data", "seed")
"""Entries of the training plan that a card shows."""
CARD_COLUMNS = (
    "policy",
    "T",
    "τ [95 %]",
    "nodes/step",
    "speed-up [95 %]",
    "counted speed-up [95 %]",
    "same output",
)


def card(folder: Path, result: Mapping[str, Any] | None = None, licence: str | None = None) -> str:
    """Return the model card of a trained drafter as Markdown.

    Args:
        folder: folder with the drafter's checkpoint.
        result: saved result of a benchmark, whose rows with this drafter are shown; None for no
            figures.
        licence: identifier of the licence, as the hub defines it.

    Raises:
        UserError: the folder contains no drafter, or the result has no row with it or is of
            another target.
    """
    config = read_object(folder / "config.json", "the configuration of a drafter's checkpoint")
    own = config.get("draftree")
    if not isinstance(own, dict) or "drafter" not in own:
        raise UserError(
            f"'{folder}' holds no drafter of draftree: its config.json has no entry 'draftree' that names one"
        )
    name, target = str(own["drafter"]), str(own.get("target", ""))
    head = [
        "library_name: draftree",
        "pipeline_tag: text-generation",
        "tags:",
        "- speculative-decoding",
        f"- {name}",
    ]
    head += [f"license: {licence}"] * bool(licence)
    head += [f"base_model: {target}"] * ("/" in target and not Path(target).exists())
    lines = ["---", *head, "---", "", f"# {name} for {target or 'its target'}", ""]
    alone = "writes exactly what it writes alone, in fewer passes"
    lines += [f"A drafter for speculative decoding: with it {target or 'its target'} {alone}."]
    lines += [
        "",
        "```",
        f"draftree generate PROMPT --target {target or 'TARGET'} --drafter FOLDER",
        "```",
        "",
        "| | |",
        "|---|---|",
    ]
    told = {"method": name} | {k: v for k, v in own.items() if k not in ("drafter", "target")}
    told |= {
        k: config[k]
        for k in ("hidden_size", "num_hidden_layers", "vocab_size", "dtype")
        if k in config
    }
    plan = folder / "training.json"
    if plan.is_file():
        trained = read_object(plan, "the plan of a training")
        told |= {f"training: {k}": trained[k] for k in SHOWN_PLAN_ENTRIES if k in trained}
    lines += [
        f"| {key} | {json.dumps(value) if not isinstance(value, str) else value} |"
        for key, value in told.items()
    ]
    if result is not None:
        lines += ["", *_figures(folder, target, result)]
    return "\n".join(lines) + "\n"


def _folder_of(spec: str, target: str) -> Path | None:
    """Return the folder of the checkpoint that a drafter's spec stands for; None for no folder."""
    name, _, options = spec.partition(":")
    named = dict(item.partition("=")[::2] for item in options.split(",")).get("checkpoint")
    folder = named or (spec if isdir(spec) else shipped_folder(target, name))
    return None if folder is None else Path(folder).resolve()


def _figures(folder: Path, target: str, result: Mapping[str, Any]) -> list[str]:
    measured = result["provenance"]["target"]["name"]
    short = [shipped_name(name) or Path(name).name.lower() for name in (measured, target)]
    if target and short[0] != short[1]:
        raise UserError(f"the result is of target '{measured}', needed is '{target}'")
    drafted = [r for r in result["rows"] if r["policy"]]
    rows = [r for r in drafted if _folder_of(r["drafter"], measured) == folder.resolve()]
    if not rows:
        there = ", ".join(dict.fromkeys(r["drafter"] for r in drafted))
        raise UserError(
            f"the result has rows of {there or 'no drafter'}, needed is one of '{folder}'"
        )
    cells = result_table(rows)
    columns = [c for c in CARD_COLUMNS if any(row.get(c) for row in cells)]
    about = result["provenance"]
    kind = "Simulated" if result.get("simulated") else "Measured"
    device, suite = about["hardware"].get("device", "one machine"), about["suite"]["name"]
    where = f"{kind} on {device}, {rows[0]['prompts']} prompts of {suite}"
    table = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    table += [f"| {' | '.join(row.get(c, '') for c in columns)} |" for row in cells]
    return [
        "## Figures",
        "",
        f"{where}, {about['date'][:10]}.",
        "",
        *table,
        "",
        faster_and_slower(
            {**result, "rows": [r for r in result["rows"] if r in rows or not r["policy"]]}
        ),
    ]
