"""Facts for a bug report: versions, processor, threads, kernels, cache folder."""

import os
import platform
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from re import match
from typing import Any

import torch

import draftree
from draftree.evaluation.provenance import commit
from draftree.utils.files import cache_folder
from draftree.utils.hardware import machine

INSTRUCTIONS = (
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512vl",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
)
"""Instruction sets that determine which kernels are fast, as Linux names them."""
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "DRAFTREE_CACHE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "CUDA_VISIBLE_DEVICES",
)


def environment() -> dict[str, Any]:
    """Return the facts that a bug report needs, by name, as values that JSON can represent."""
    build: Any = torch.version
    return {
        "draftree": {
            "version": draftree.__version__,
            "commit": (commit() or {}).get("id", "")[:12] or "installed",
        },
        "python": f"{platform.python_version()} {platform.python_implementation()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": packages(),
        "processor": machine(torch.device("cpu"))["device"],
        "instruction_sets": instruction_sets(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": memory(),
        "torch_build": {
            "cuda": build.cuda or "no",
            "hip": build.hip or "no",
            "cpu": torch.backends.cpu.get_cpu_capability(),
        },
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],
        "kernels": kernels(),
        "cache_folder": str(cache_folder()),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def packages() -> dict[str, str]:
    """Return the versions of draftree's installed dependencies by name, including extras."""
    named = (match(r"[A-Za-z0-9_.-]+", line) for line in requires("draftree") or ())
    names = sorted({name[0] for name in named if name} - {"draftree"})
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def instruction_sets() -> list[str]:
    """Return the processor's instruction sets that matter for speed.

    The list is empty if the system does not report them.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return []
    flags = {
        word
        for line in lines
        if line.startswith(("flags", "Features"))
        for word in line.partition(":")[2].split()
    }
    return [name for name in INSTRUCTIONS if name in flags]


def memory() -> float | None:
    """Return the size of the machine's memory in GB; None if the system does not report it."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, OSError, ValueError):
        return None


def kernels() -> dict[str, str]:
    """Return a dict: the native kernels' `variant` in use, and the `available` variants."""
    from draftree import native

    return {"variant": native.variant(), "available": ", ".join(native.available()) or "none"}
