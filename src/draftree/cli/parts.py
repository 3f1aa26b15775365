"""`draftree list`: the drafters, policies and acceptors, and their knobs."""

from dataclasses import asdict
from typing import Any

from draftree.cli.console import emit
from draftree.cli.options import AsJson


def list_parts(as_json: AsJson = False) -> None:
    """List drafters, policies, acceptors and suites, with their knobs and defaults, and how drafters are trained."""
    from draftree import registry
    from draftree.cli import terminal
    from draftree.evaluation import suites

    found: dict[str, dict[str, dict[str, Any]]] = {
        plural: {
            name: {"summary": registry.summary(kind, name), "knobs": registry.knobs(kind, name)}
            for name in registry.names(kind)
        }
        for kind, plural in {"drafter": "drafters", "policy": "policies", "acceptor": "acceptors"}.items()
    }
    found["suites"] = {name: {"summary": suites.load(name).summary, "knobs": {}} for name in suites.names()}
    stages = {name: registry.stages(name) for name in registry.names("drafter")}
    if as_json:
        for name, those in stages.items():
            found["drafters"][name] |= {"training": [asdict(stage) for stage in those]}
        emit(found)
        return
    console = terminal.output()
    for kind, parts in found.items():
        rows = [{"name": name, "about": p["summary"], "knobs": terminal.knobs_text(p["knobs"])} for name, p in parts.items()]
        console.print(terminal.table(kind, rows))
    console.print(terminal.table("training", [terminal.stage_row(name, s) for name, those in stages.items() for s in those]))
