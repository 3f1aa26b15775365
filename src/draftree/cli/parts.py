"""`draftree list`: the drafters, policies and acceptors, and their knobs. `draftree drafters`: trained ones by target."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from draftree.cli.console import emit
from draftree.cli.options import AsJson
from draftree.errors import UserError


def list_parts(as_json: AsJson = False) -> None:
    """List drafters, policies, acceptors with their knobs, how drafters are trained, suites, benchmarks' formats, machines."""
    from draftree import registry
    from draftree.cli import terminal
    from draftree.evaluation import formats, machines, suites
    from draftree.evaluation.machines import Machine

    plurals = {"drafter": "drafters", "policy": "policies", "acceptor": "acceptors"}
    listed = {plural: {name: _described(kind, name) for name in registry.names(kind)} for kind, plural in plurals.items()}
    listed["suites"] = {name: {"summary": suites.load(name).summary, "knobs": {}} for name in suites.names()}
    listed["formats"] = {name: {"summary": f.page, "knobs": {}} for name, f in formats.FORMATS.items()}
    listed["machines"] = {name: {"summary": Machine.load(name).summary, "knobs": {}} for name in machines.names()}
    stages = {name: registry.stages(name) for name in registry.parts("drafter")}
    if as_json:
        for name, those in stages.items():
            listed["drafters"][name] |= {"training": [asdict(stage) for stage in those]}
        emit(listed)
        return
    console = terminal.output()
    for kind, parts in listed.items():
        rows = [
            {"name": name, "about": p["summary"], "knobs": terminal.knobs_text(p["knobs"]).replace(",", ", ")}
            for name, p in parts.items()
        ]
        console.print(terminal.table(kind, rows))
    console.print(terminal.table("training", [terminal.stage_row(name, s) for name, those in stages.items() for s in those]))


def list_drafters(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Only for this model, as of --for.")] = None,
    target: Annotated[
        str | None, typer.Option("--for", "--target", "-m", metavar="MODEL", help="Only for this: a name, a folder, a hub id.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List trained drafters by target: those that draftree brings, and those that others have published."""
    from draftree.cli import terminal
    from draftree.cli.console import remark
    from draftree.formats.published import published, published_for
    from draftree.models.sources import shipped

    target = target or model
    own = [{"target": name, "drafter": method, "source": "draftree"} for name, method in shipped(target)]
    others = [asdict(entry) for entry in (published() if target is None else published_for(target))]
    if as_json:
        return emit({"shipped": own, "published": others})
    if not own and not others:
        remark(f"none is known for target '{target}'; 'suffix' and 'pld' need no training, and `draftree train` trains one")
        return None
    for title, rows in (
        ("shipped: --drafter NAME", own),
        ("published: --drafter published, or --drafter ID (downloaded)", others),
    ):
        if rows:
            terminal.output().print(terminal.table(title, rows))
    return None


def _described(kind: str, name: str) -> dict[str, Any]:
    """A part's summary and knobs; of one that cannot be used the error, and whose it is where it is not draftree's own."""
    from draftree import registry

    brought = ", ".join(registry.packages(kind, name))
    try:
        summary, knobs = registry.summary(kind, name), registry.knobs(kind, name)
    except UserError as error:
        return {"summary": str(error), "knobs": {}, "package": brought}
    if not brought:
        return {"summary": summary, "knobs": knobs}
    told = f"not used: that of package {brought}" if name in registry.own_names(kind) else f"package {brought}"
    return {"summary": f"{summary} ({told})", "knobs": knobs, "package": brought}
