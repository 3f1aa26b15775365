"""Compute the costs of derived machines from their rooflines: `src/draftree/machines/*.json`.

    python benchmarks/machines.py            # writes the files of kind "derived"
    python benchmarks/machines.py --check    # writes nothing; exit status 1 if one is out of date

The entry `roofline` of a file has the figures of the machine and the target; the formula is in
`draftree.evaluation.roofline`. Files with published or measured costs are not changed.
"""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from draftree.costs.step_costs import Costs
from draftree.evaluation.roofline import MACHINES_FOLDER, Drafting, Machine, Roofline, machine_names
from draftree.measure_costs import GPU_TARGET_WIDTHS, TARGET_WIDTHS

CONTEXTS = (0, 8192)
"""Numbers of committed tokens for which a derived file has entries. Costs at other contexts
are interpolated linearly."""
ONE_LAYER = Drafting(layers=1, heads=1)
"""Work of the drafter that the draft curves in the machine files assume. Its draft step reads the
weights of one target layer and of one LM head."""


def cost_entries(roofline: Roofline, work: Drafting) -> tuple[Costs, ...]:
    """Return a drafter's costs on a machine, one entry for each context in `CONTEXTS`."""
    found = []
    for context in CONTEXTS:
        target = {n: roofline.target(n, context) for n in (*TARGET_WIDTHS, *GPU_TARGET_WIDTHS)}
        found.append(
            Costs(
                roofline.steps(work),
                target,
                roofline.commit(work),
                context,
                catch_up=roofline.catch_up(work),
            )
        )
    return tuple(found)


def recompute_machine(machine: Machine) -> dict[str, Any]:
    """Return the contents of a machine's file, computed from the roofline that it stores."""
    assert machine.roofline is not None
    file = {
        "entries": [asdict(entry) for entry in cost_entries(machine.roofline, ONE_LAYER)],
        "about": dict(machine.table.about),
        "roofline": asdict(machine.roofline),
    }
    found: dict[str, Any] = json.loads(json.dumps(file))
    return found


def main() -> int:
    """Write or check the files; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    status = 0
    for machine in map(Machine.load, machine_names()):
        if machine.table.about["kind"] != "derived":
            continue
        path = MACHINES_FOLDER / f"{machine.name}.json"
        new = recompute_machine(machine)
        if json.loads(path.read_text("utf-8")) == new:
            continue
        if check:
            print(f"{path} is out of date: run python benchmarks/machines.py", file=sys.stderr)
            status = 1
        else:
            path.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
