"""Load the native kernels (C++) and select the variant for the processor.

`DRAFTREE_NATIVE` forces a variant, for tests and timing, or turns the kernels `off`. Without them,
models run on PyTorch and loops on Python and NumPy, which is slower. The loops give the same bits.
"""

import logging
import os
import re
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftree.errors import UnknownName, UserError, first_line

_core: Any = None
_missing = ""
try:
    _core = import_module("draftree.native._core")
except ImportError as error:  # installed without a compiler, or built for another machine
    _missing = first_line(error)

Function = TypeVar("Function", bound=Callable[..., Any])
Array = NDArray[Any]
VARIABLE = "DRAFTREE_NATIVE"
OFF = "off"
GENERIC = "generic"
"""The variant for any processor, which may be slower than PyTorch's kernels."""
VARIANTS = (GENERIC, "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
"""All variants of the native kernels, by instruction set."""

ABSENCE_REMARK = (
    "draftree has no native kernels ({}), and runs on PyTorch and Python kernels, which are slower"
)
MISSING_REMARK = (
    "draftree's native kernels are older than its sources: {} run in Python, which is slower; "
    "build them anew with: pip install --no-deps --editable ."
)
OUTDATED_REMARK = (
    "draftree's native kernels were built from other sources than those of this checkout; "
    "build them anew with: pip install --no-deps --editable ."
)

requested_variant = os.environ.get(VARIABLE, "")
core: Any = None if requested_variant == OFF else _core
"""The extension module, or None if it was not built or is switched off."""
if core is not None and requested_variant in core.variants():
    core.use_variant(requested_variant)


def available() -> tuple[str, ...]:
    """Return the variants that this processor can run, fastest first.

    The list is empty if the kernels were not built.
    """
    return () if _core is None else tuple(_core.variants())


def variant() -> str:
    """Return the variant in use, or `off` if there is none."""
    return OFF if core is None else str(core.variant())


def check_variable() -> None:
    """Check the environment variable `DRAFTREE_NATIVE`.

    Raises:
        UserError: it names an unknown variant, or one that this processor cannot run.
    """
    allowed = (*available(), OFF)
    if requested_variant and requested_variant not in allowed:
        if requested_variant not in VARIANTS:
            raise UnknownName(f"value of {VARIABLE}", requested_variant, allowed)
        why = (
            "draftree was installed without its native kernels"
            if _core is None
            else "this processor cannot run it"
        )
        raise UserError(
            f"{VARIABLE} is '{requested_variant}', but {why}: allowed are {', '.join(allowed)}"
        )


LOG = logging.getLogger(__name__.partition(".")[0])
missing_loops: list[str] = []
"""Names of loops that the extension module lacks, or that take other arguments there, because it is
older than the sources."""
PARAMETER = re.compile(r"\w+: ")
"""The beginning of a parameter in a signature of nanobind: `def follow(arg0: object, /) -> tuple`."""


def sources_digest(folder: Path) -> str:
    """Return a digest of the C++ sources in a folder, as CMakeLists.txt computes it.

    It is empty if there are none, as where draftree was installed from a wheel.
    """
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in (".cpp", ".h")
    )
    lines = (f"{sha256((folder / name).read_bytes()).hexdigest()} {name}\n" for name in names)
    return sha256("".join(lines).encode()).hexdigest() if names else ""


@cache
def report_absence() -> None:
    """Log once if native kernels, or some of their loops, are missing or outdated."""
    if _core is None and requested_variant != OFF:
        LOG.warning(ABSENCE_REMARK.format(_missing))
    elif missing_loops:
        LOG.warning(MISSING_REMARK.format(", ".join(sorted(missing_loops))))
    elif core is not None:
        here = sources_digest(Path(__file__).parent)
        if here and here != getattr(core, "sources_digest", ""):
            LOG.warning(OUTDATED_REMARK)


REFERENCES: dict[str, Callable[..., Any]] = {}
"""The Python functions that have a C++ counterpart, by name."""


def takes_arguments_of(twin: Callable[..., Any], function: Callable[..., Any]) -> bool:
    """Return whether a C++ function takes numbers of arguments that the Python function takes.

    The C++ function of an older extension may have the name but another signature, and would raise
    `TypeError` when it is called. nanobind stores the signatures of all overloads as text.
    """
    signatures = getattr(twin, "__nb_signature__", ())
    parameters = signature(function).parameters.values()
    required = sum(each.default is each.empty for each in parameters)
    counts = [len(PARAMETER.findall(text)) for text, *_ in signatures]
    return all(required <= count <= len(parameters) for count in counts)


def native(function: Function) -> Function:
    """Return the C++ function of the same name, or this function if there is no current one.

    The Python function is the specification: both return the same bits.
    """
    return native_as(function.__name__)(function)


def native_as(name: str) -> Callable[[Function], Function]:
    """Return a decorator that replaces a Python function by the C++ function `name`.

    Without native kernels, or if the C++ function is missing or outdated, the decorator returns the
    Python function. `native` does the same for a C++ function with the Python function's name.
    """

    def twin_of(function: Function) -> Function:
        # NumPy would warn of infinite results; C++ does not.
        reference = REFERENCES[name] = np.errstate(all="ignore")(function)
        if core is None:
            return reference
        twin: Function | None = getattr(core.loops, name, None)
        if twin is not None and takes_arguments_of(twin, function):
            return twin
        missing_loops.append(name)
        if report_absence.cache_info().currsize:  # of a module imported after the report
            LOG.warning(MISSING_REMARK.format(name))
        return reference

    return twin_of
