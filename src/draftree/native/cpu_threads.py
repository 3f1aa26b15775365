"""Number of threads of the kernels, and torch's threads as theirs."""

import ctypes
import math
import os
from functools import cache
from pathlib import Path

import torch

from draftree.native import core

CGROUPS = Path("/sys/fs/cgroup")


def quota(root: Path, groups: str) -> float:
    """Return the number of processors that the CPU quota allows; infinite without a quota.

    Args:
        root: the folder where control groups (version 2) are mounted.
        groups: the content of `/proc/self/cgroup`; quotas of enclosing groups count too.
    """
    (name,) = [line[3:] for line in groups.splitlines() if line.startswith("0::")] or [""]
    folder, found = root / name.strip("/"), math.inf
    for place in (folder, *folder.parents):
        if not place.is_relative_to(root):
            break
        try:
            most, period = (place / "cpu.max").read_text().split()
            found = min(found, int(most) / int(period))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return found


@cache
def processor_share() -> int:
    """Return the number of processors that this process may use.

    It is the size of the affinity mask, or the CPU quota rounded up if that is less.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        limit = quota(CGROUPS, Path("/proc/self/cgroup").read_text())
    except OSError:  # not Linux
        limit = math.inf
    return max(1, math.ceil(min(allowed, limit)))


def thread_count() -> int:
    """Return the number of threads of a kernel: torch's, but at most the usable processors."""
    return min(torch.get_num_threads(), processor_share())


@cache
def share_torch_threads() -> bool:
    """Let the kernels run on torch's OpenMP threads, if torch uses GNU's library.

    Otherwise they use threads of their own. Torch's threads wait in a busy loop for more work, so
    that threads of another pool would compete with them for processors.
    """
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    try:
        library = ctypes.CDLL(str(libraries[0]))
        functions = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
    except (IndexError, OSError, AttributeError):
        return False
    core.use_openmp(
        *(int(ctypes.cast(function, ctypes.c_void_p).value or 0) for function in functions)
    )
    return True
