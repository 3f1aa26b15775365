"""Runs the conformance suite and says what it covered: `python -m draftree.testing [--full]`."""

import argparse
import sys
import time

import torch

from draftree.registry import names
from draftree.testing.conformance import Suite, cases


def main() -> int:
    """Runs all cases; the exit status is 1 where one fails."""
    parser = argparse.ArgumentParser(prog="python -m draftree.testing", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every check for every pairing, not pairwise")
    chosen = cases(full=parser.parse_args().full)
    torch.set_num_threads(1)  # the models are tiny, and threads would only wait for each other
    suite, failed, start = Suite(), 0, time.perf_counter()
    for acceptor in names("acceptor"):
        suite.baseline(acceptor)
    for case in chosen:
        try:
            suite.run(case)
        except Exception as error:  # whatever a part raises is a failure of its case, and the next one goes on
            failed += 1
            print(f"FAILED {case}: {type(error).__name__}: {error}", file=sys.stderr)
    print(suite.coverage)
    print(f"{'FAILED ' + str(failed) if failed else 'all held'} in {time.perf_counter() - start:.1f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
