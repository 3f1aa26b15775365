"""Run the conformance suite: `python -m draftree.testing [--full] [--drafter NAME …]`.

Named drafters, policies or acceptors, be they of other packages, are tested with all the others;
without names all are.
"""

import argparse
import sys
import time
import warnings

import torch

from draftree.errors import DraftreeError, DraftreeWarning
from draftree.models.graph_capture import EagerCapture, Graphs
from draftree.registry import KINDS, part, parts
from draftree.target.target import resolve_device
from draftree.testing.conformance import SCRIPTED, Suite, batch_cases, cases
from draftree.testing.fakes import PassRecorder, tiny_target

PROGRESS_SECONDS = 20.0
"""Seconds between two messages about the progress."""


def main() -> int:
    """Run the cases that the command line selects.

    Returns:
        1 if a case fails, there is no case or no drafted token was accepted; 0 otherwise.
    """
    parser = argparse.ArgumentParser(
        prog="python -m draftree.testing", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--full", action="store_true", help="run every check for every pairing, not pairwise"
    )
    for kind in KINDS:
        parser.add_argument(
            f"--{kind}",
            action="append",
            default=[],
            metavar="NAME",
            help=f"only this {kind}; may be repeated",
        )
    batched = "instead: every pairing under continuous batching of so many sequences, as 1 3 8"
    parser.add_argument("--batches", type=int, nargs="+", default=[], metavar="N", help=batched)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run only each N-th case")
    parser.add_argument("--start", type=int, default=0, metavar="N", help="skip the first N cases")
    parser.add_argument(
        "--captured", action="store_true", help="record passes of few sizes once, and repeat them"
    )
    parser.add_argument(
        "--compiled",
        nargs="?",
        const="float32",
        choices=("float32", "bfloat16"),
        help="run layers by native kernels, by default in float32",
    )
    parser.add_argument("--device", default="cpu", help="device of the target; cpu by default")
    asked = vars(parser.parse_args())
    only: dict[str, list[str]] = {kind: asked[kind] for kind in KINDS}
    try:
        for kind, named in only.items():
            [part(kind, name) for name in named if name not in SCRIPTED]
        device = resolve_device(asked["device"])
    except DraftreeError as error:
        parser.error(str(error))
    if min([*asked["batches"], asked["every"], asked["start"] + 1]) < 1:
        parser.error(
            "--batches and --every take whole numbers of at least 1, --start of at least 0"
        )
    chosen = batch_cases(asked["batches"], only) if asked["batches"] else cases(asked["full"], only)
    chosen = chosen[asked["start"] :: asked["every"]]
    warnings.simplefilter("error", DraftreeWarning)  # as of a drafter that raises an exception
    torch.set_num_threads(1)  # the models are tiny, and threads would only wait for each other
    recording = Graphs() if device.type == "cuda" else Graphs(PassRecorder())
    target = tiny_target(
        capture=recording if asked["captured"] else EagerCapture(),
        compiled=asked["compiled"] is not None,
        device=device,
        dtype=getattr(torch, asked["compiled"] or "float64"),
    )
    suite = Suite(target)
    failed = 0
    start = time.perf_counter()
    for acceptor in only["acceptor"] or parts("acceptor"):
        suite.baseline(acceptor)
    told = start
    for i, case in enumerate(chosen):
        if (now := time.perf_counter()) - told > PROGRESS_SECONDS:
            told, left = now, (now - start) / i * (len(chosen) - i)
            print(
                f"{i:,} of {len(chosen):,} cases held or failed, {left / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )
        try:
            suite.run(case)
        except (
            Exception
        ) as error:  # whatever a part raises is a failure of its case, and the next one goes on
            failed += 1
            print(f"FAILED {case}: {type(error).__name__}: {error}", file=sys.stderr)
    print(suite.coverage)
    if not failed and not any(suite.coverage.accepted):  # its keys are numbers of accepted nodes
        print(f"FAILED: {len(chosen)} cases ran and accepted no drafted token", file=sys.stderr)
        return 1
    print(
        f"{'FAILED ' + str(failed) if failed else 'all held'} in {time.perf_counter() - start:.1f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
