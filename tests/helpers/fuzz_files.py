"""Mutates small originals of every format that draftree reads, and uses them in a process with little memory.

    python tests/helpers/fuzz_files.py --mutations 2000 --seed 0 --out build/fuzz

A mutation is a fault where the use ends with anything but success or a `DraftreeError`, writes
another text than the target, takes more than 10 seconds of processor time, or needs more memory
than twice that of the original. Each format runs in a process of its own. Results are appended to a
file for each format, so that a second start goes on where the first one ended. The program is in
`tests/` because the originals are made by the helpers of the tests.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

SECONDS = 10
"""The processor time that a use may take. It does not pass in a process that is stopped, or that
others keep waiting."""
WALL = 600
"""The seconds by the clock that a use may take, for one that waits and computes nothing."""
UNANSWERED = 120
"""Processor time without a result, imports included, after which a process is ended: no handler
interrupts a hang in C code."""
UNANSWERED_WALL = 1200
"""Seconds by the clock without a result, after which a process is ended."""
SLACK = 24 << 20
"""Bytes that the peak may differ from run to run, because of allocators and of what is imported
late."""
ALLOWED = 1 << 30
"""Bytes of address space beyond those of the process with its imports."""


class Hang(KeyboardInterrupt):
    """A use takes too long."""


def memory(entry: str) -> int:
    """Return a size of this process in bytes, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{entry}:"))


def processor_seconds(process: int) -> float:
    """Return the processor time of a process, in user code and in the kernel; 0 of one that is gone."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0.0
    user, kernel = text.rpartition(")")[2].split()[11:13]  # the name in parentheses may hold spaces
    return (int(user) + int(kernel)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def limited(processor: float = SECONDS, wall: float = WALL) -> Iterator[None]:
    """Raise Hang inside when the processor time of this process or the time by the clock has passed a limit."""

    def hang(*_: Any) -> None:
        raise Hang

    before = {number: signal.signal(number, hang) for number in (signal.SIGPROF, signal.SIGALRM)}
    try:
        signal.setitimer(signal.ITIMER_PROF, processor)
        signal.setitimer(signal.ITIMER_REAL, wall)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def ended(
    process: subprocess.Popen[Any],
    out: Path,
    processor: float = UNANSWERED,
    wall: float = UNANSWERED_WALL,
) -> bool:
    """Wait for a process that appends results to a file; end it if it has been without one for too long.

    Args:
        process: that was started.
        out: its file of results.
        processor: the processor time that it may take without a result, in seconds.
        wall: the seconds by the clock.

    Returns:
        whether it ended by itself.
    """
    size = -1
    used = 0.0
    changed = 0.0
    while process.poll() is None:
        if out.stat().st_size != size:
            size = out.stat().st_size
            used = processor_seconds(process.pid)
            changed = time.monotonic()
        if processor_seconds(process.pid) - used > processor or time.monotonic() - changed > wall:
            process.kill()
            process.wait()
            return False
        time.sleep(0.2)
    return True


@contextmanager
def peak() -> Iterator[list[int]]:
    """Measure how far the resident memory rises inside; the list has the bytes afterwards."""
    found: list[int] = []
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    yield found
    found.append(memory("VmHWM") - before)


def refused_memory(error: BaseException | None) -> bool:
    """Return whether an allocation that failed is among the causes of an error."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def run_cases(name: str, cases: range, seed: int, out: Path) -> None:
    """Run the cases of one format in this process, and append a line for each to its file."""
    import torch

    import file_formats
    import mutations
    from conftest import Silent
    from draftree.cli import arguments, terminal

    torch.set_num_threads(1)
    arguments.quiet()
    terminal.CLOCK = Silent()
    found, scratch = file_formats.FORMATS[name], Path(tempfile.mkdtemp(prefix="draftree-fuzz-"))
    os.environ["DRAFTREE_CACHE"] = str(scratch / "cache")
    originals = [
        file_formats.original(name, i, scratch / f"original{i}")
        for i in range(len(found.originals))
    ]
    most = 0
    for folder in 2 * originals:
        shutil.copytree(folder, scratch / "case")
        with peak() as bytes_:
            message = file_formats.use(name, scratch / "case")
        assert message is None, f"the original is refused: {message}"
        shutil.rmtree(scratch / "case")
        most = max(most, bytes_[0]) if folder in originals else most
    size = memory("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (size + ALLOWED, size + ALLOWED))

    with out.open("a", encoding="utf-8") as journal:
        for case in cases:
            rng = random.Random(f"{seed} {name} {case}")
            shutil.copytree(rng.choice(originals), scratch / "case")
            file = mutations.mutate(scratch / "case", rng, found.files)
            result: dict[str, Any] = {"case": case, "file": file, "outcome": "used"}
            start = time.process_time()
            try:
                with peak() as bytes_, limited():
                    message = file_formats.refusal(found.use, scratch / "case")
                if message is not None:
                    result |= {"outcome": "refused", "message": message[:200]}
                if message is not None and ("\n" in message or not message or len(message) > 1200):
                    result |= {"outcome": "fault", "what": "the message is no short line"}
                if bytes_[0] > 2 * most + SLACK:
                    result |= {
                        "outcome": "fault",
                        "what": f"memory: {bytes_[0] >> 20} MB, the original takes {most >> 20}",
                    }
                if message is not None and "allocate" in message:
                    result |= {"outcome": "fault", "what": f"an allocation failed: {message}"}
            except Hang:
                result |= {
                    "outcome": "fault",
                    "what": "hang",
                    "where": traceback.format_exc()[-2500:],
                }
            except BaseException as error:
                what = "an allocation failed" if refused_memory(error) else type(error).__name__
                result |= {
                    "outcome": "fault",
                    "what": f"{what}: {str(error)[:300]}",
                    "where": traceback.format_exc()[-2500:],
                }
            result["seconds"] = round(time.process_time() - start, 3)
            shutil.rmtree(scratch / "case")
            journal.write(json.dumps(result) + "\n")
            journal.flush()
    shutil.rmtree(scratch)
    os._exit(0)  # without what libraries do at the end of a process with little memory


def results(path: Path) -> list[dict[str, Any]]:
    """Return the results that a file holds; a last line that was broken off is left out."""
    found = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def run_format(name: str, count: int, seed: int, out: Path) -> None:
    """Run the missing cases of a format in processes of their own; one that crashes or hangs is recorded as a fault."""
    while True:
        done = results(out)
        out.write_text("".join(json.dumps(r) + "\n" for r in done), "utf-8")
        first = len(done)
        if first >= count:
            return
        words = [
            sys.executable,
            __file__,
            "--child",
            name,
            str(first),
            str(count),
            "--seed",
            str(seed),
            "--out",
            str(out),
        ]
        messages = out.with_suffix(".err")
        with messages.open("w") as file:
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=file)
        hung = not ended(process, out)
        error = messages.read_text("utf-8", "replace")
        done = results(out)
        if process.returncode == 0 and len(done) >= count:
            return
        if len(done) == first and not hung and "original" in error:
            raise RuntimeError(f"{name}: {error[-2000:]}")
        what = "hang in C code" if hung else f"the process ended with status {process.returncode}"
        with out.open("a", encoding="utf-8") as journal:
            journal.write(
                json.dumps(
                    {"case": len(done), "outcome": "fault", "what": what, "where": error[-2000:]}
                )
                + "\n"
            )


def main() -> int:
    """Run all formats; print a line for each and one for each fault; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutations", type=int, default=2000, help="of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("build/fuzz"), help="folder of the results"
    )
    parser.add_argument("--only", nargs="*", help="names of formats")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        name, first, last = asked.child
        run_cases(name, range(int(first), int(last)), asked.seed, asked.out)
    from file_formats import FORMATS

    asked.out.mkdir(parents=True, exist_ok=True)
    faults = 0
    for name in asked.only or FORMATS:
        path = asked.out / f"{name.replace(' ', '-')}-{asked.seed}.jsonl"
        run_format(name, asked.mutations, asked.seed, path)
        found = results(path)[: asked.mutations]
        counts = Counter(r["outcome"] for r in found)
        slowest = max(r.get("seconds", 0.0) for r in found)
        print(
            f"{name}: {len(found)} mutations, {dict(counts)}, slowest {slowest:.1f} s of processor time",
            flush=True,
        )
        for r in found:
            if r["outcome"] == "fault":
                faults += 1
                print(f"  case {r['case']}, {r.get('file', '?')}: {r['what']}", flush=True)
    print(f"{faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
