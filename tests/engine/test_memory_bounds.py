"""A process that serves for long keeps bounded memory: compiled kernels of oneDNN, and arenas of the C library's allocator."""

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from draftree.models.cpu_linear import packable
from draftree.utils.hardware import CACHES, MAX_ARENAS

SHAPES = """
import json, os, torch
from draftree.utils.hardware import bound_memory, return_memory
from draftree.models.cpu_linear import Packed

bound_memory()
layer, found = Packed(torch.zeros(16, 16)), []
for tokens in range(1, 701):
    layer(torch.zeros(tokens, 16))
    if tokens in (400, 700):
        return_memory()
        found.append(int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
print(json.dumps(found))
"""
THREADS = """
import ctypes, json, sys, tempfile, threading
from draftree.utils.hardware import bound_memory

if sys.argv[1] == "bound":
    bound_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.fopen.restype, libc.malloc_info.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
ended = threading.Barrier(9)

def work():
    libc.malloc(10_000)
    ended.wait()

for _ in range(8):
    threading.Thread(target=work).start()
with tempfile.NamedTemporaryFile() as file:
    stream = libc.fopen(file.name.encode(), b"w")
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    ended.wait()
    print(json.dumps(file.read().decode().count("<heap nr=")))
"""
FAULTS = """
import json, resource, sys, torch
from draftree.utils.hardware import keep_memory

if sys.argv[1] == "keep":
    keep_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def fill(times):
    for _ in range(times):
        torch.empty(1 << 24).zero_()

fill(10)  # aligned blocks find room for their neighbours after a few of them
before = faults()
fill(4)
print(json.dumps(faults() - before))
"""
linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory is read from /proc, arenas are glibc's"
)


def printed(code: str, *words: str, **variables: str) -> Any:
    """Return what a program prints as JSON, in a process without the variables that set the bounds."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in CACHES and not name.startswith("MALLOC_")
    }
    found = subprocess.run(
        [sys.executable, "-c", code, *words], env=own | variables, capture_output=True, check=True
    )
    return json.loads(found.stdout)


@linux
@pytest.mark.skipif(
    not packable(torch.zeros(16, 16), None), reason="oneDNN is not in this build of torch"
)
def test_layers_over_many_numbers_of_tokens_keep_bounded_memory() -> None:
    """Of 300 further shapes none stays, unless the user's own variables allow it; each takes about half a megabyte."""
    before, after = printed(SHAPES)
    assert after - before < 20e6
    before, after = printed(SHAPES, **dict.fromkeys(CACHES, "2000"))
    assert after - before > 60e6


@linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library has no arenas")
def test_threads_share_arenas() -> None:
    assert printed(THREADS, "bound") <= MAX_ARENAS
    assert printed(THREADS, "free") > MAX_ARENAS
    assert printed(THREADS, "bound", MALLOC_ARENA_MAX="5") == 5


@linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the options are glibc's")
def test_training_reuses_freed_memory() -> None:
    """Blocks of 64 MiB have 16,384 pages; a kept block has no page faults."""
    assert printed(FAULTS, "keep") < 1000
    assert printed(FAULTS, "free") > 4000  # fewer with huge pages
    assert printed(FAULTS, "keep", MALLOC_MMAP_THRESHOLD_="1000000") > 4000
