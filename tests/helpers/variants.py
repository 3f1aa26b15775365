"""Test each variant of the native kernels that this processor can run, and running without them: `make test-variants`.

    python tests/helpers/variants.py --variant avx2 --share 3 --out build/variants

DRAFTREE_NATIVE forces a variant. It runs the tests of the kernels, and a share of the whole
conformance product, with native layers (`off`: on PyTorch). The cases of a share lie evenly in the
product, so that each pairing of drafter, policy and acceptor is among them; the variants begin at
different cases. As many processes run at a time as there are processors. A part that passed is not
repeated while sources and tests are the same. The exit status is 1 if a part failed.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree import native
from draftree.native.cpu_threads import processor_share

ROOT = Path(__file__).resolve().parents[2]
KERNEL_TESTS = sorted(
    [
        *(ROOT / "tests" / "native").glob("test_native_*.py"),
        *(
            ROOT / "tests" / "models" / f"test_{name}.py"
            for name in ("fused_cpu_modules", "native_runner", "cpu_linear")
        ),
    ]
)
SLICES = 4
"""Processes that run a variant's share of the product, one after another or together."""


@dataclass(frozen=True)
class Part:
    """What one process tests of a variant."""

    variant: str
    name: str
    command: tuple[str, ...]


def parts_of(variant: str, first: int, share: int) -> list[Part]:
    """Return the parts of a variant.

    Args:
        variant: a name that DRAFTREE_NATIVE takes.
        first: the first case of its share.
        share: it runs one of so many cases of the product.
    """
    tests = ("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *map(str, KERNEL_TESTS))
    product = (
        "-m",
        "draftree.testing",
        "--full",
        *(["--compiled"] if variant != native.OFF else []),
    )
    slices = [(first % share + share * i, share * SLICES) for i in range(SLICES)]
    return [
        Part(variant, "kernels", tests),
        *(
            Part(
                variant,
                f"conformance-{start}-of-{every}",
                (*product, "--start", str(start), "--every", str(every)),
            )
            for start, every in slices
        ),
    ]


def fingerprint(root: Path) -> str:
    """Return a digest of the sources, the extension module and the tests."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in ("src", "tests") for p in (root / folder).rglob("*")):
        if path.suffix in (".py", ".so", ".pyd", ".cpp", ".h"):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def run(part: Part, source: str, out: Path) -> dict[str, Any]:
    """Run a part unless it has passed with these sources; return what is known of it.

    Args:
        part: the part.
        source: the digest of the sources.
        out: the folder of logs and results.
    """
    kept, log = (out / f"{part.variant}.{part.name}.{kind}" for kind in ("json", "log"))
    if kept.is_file() and (known := json.loads(kept.read_text()))["source"] == source:
        return dict(known)
    env = {
        **os.environ,
        native.VARIABLE: part.variant,
        "OMP_NUM_THREADS": "1",
        "DRAFTREE_CACHE": str(out / "cache"),
    }
    start = time.monotonic()
    with log.open("w") as file:
        status = subprocess.run(
            [sys.executable, *part.command],
            cwd=ROOT,
            env=env,
            stdout=file,
            stderr=file,
            check=False,
        ).returncode
    passed = sum(map(int, re.findall(r"^(?:cases +)?(\d+) passed", log.read_text(), re.MULTILINE)))
    found = {
        "part": part.name,
        "source": source,
        "status": status,
        "passed": passed,
        "seconds": time.monotonic() - start,
    }
    if status == 0:
        kept.write_text(json.dumps(found))
    return found


def line_of(variant: str, found: Sequence[dict[str, Any]], out: Path) -> str:
    """Return the line that tells how a variant's tests ended."""
    failed = [part["part"] for part in found if part["status"]]
    if failed:
        return (
            f"{variant}: FAILED: {', '.join(str(out / f'{variant}.{name}.log') for name in failed)}"
        )
    tests = sum(part["passed"] for part in found if part["part"] == "kernels")
    cases = sum(part["passed"] for part in found) - tests
    return f"{variant}: {tests:,} tests and {cases:,} cases passed, {sum(part['seconds'] for part in found):.0f} s"


def main(words: Sequence[str] | None = None) -> int:
    """Test the variants and print a line for each."""
    allowed = (*native.available(), native.OFF)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--variant", action="append", choices=allowed, help="only this one; repeat it"
    )
    parser.add_argument(
        "--share", type=int, default=3, help="one of so many cases of the product for each variant"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "variants", help="folder of logs and results"
    )
    asked = parser.parse_args(words)
    asked.out.mkdir(parents=True, exist_ok=True)
    source, failed = fingerprint(ROOT), False
    with ThreadPoolExecutor(processor_share()) as pool:
        running = {
            variant: [
                pool.submit(run, part, source, asked.out)
                for part in parts_of(variant, first, asked.share)
            ]
            for first, variant in enumerate(asked.variant or allowed)
        }
        for variant, results in running.items():
            found = [result.result() for result in results]
            failed |= any(part["status"] for part in found)
            print(line_of(variant, found, asked.out), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
