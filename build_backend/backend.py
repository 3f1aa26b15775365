"""Build draftree with scikit-build-core, and take a C++ compiler from PyPI where the machine has none.

If no compiler works at all, the package is built without its native kernels, and runs on PyTorch
and Python.
"""

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from scikit_build_core import build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

COMPILERS = ("clang-cl", "clang++") if sys.platform == "win32" else ("c++", "g++", "clang++")
ZIG = "ziglang>=0.14"
PURE = {"wheel.cmake": "false", "wheel.py-api": "py3"}
"""The settings of a package without native kernels."""


def has_compiler() -> bool:
    """Return whether the machine has a C++ compiler that can build the kernels."""
    return bool(os.environ.get("CXX")) or any(shutil.which(name) for name in COMPILERS)


def zig_target() -> str:
    """Return zig's name of this machine, without features that another machine of its kind may lack."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    if sys.platform == "darwin":
        return f"{machine}-macos"
    if sys.platform == "win32":
        return f"{machine}-windows-gnu"
    name, version = platform.libc_ver()
    return f"{machine}-linux-gnu.{version}" if name == "glibc" else f"{machine}-linux-musl"


def use_zig() -> None:
    """Let CMake use `python -m ziglang`, if it is installed."""
    try:
        import ziglang  # noqa: F401
    except ImportError:
        return
    folder = Path("build", "zig").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for variable, tool, options in (
        ("CC", "cc", f"-target {zig_target()}"),
        ("CXX", "c++", f"-target {zig_target()}"),
        ("AR", "ar", ""),
        ("RANLIB", "ranlib", ""),
    ):
        command = f'"{sys.executable}" -m ziglang {tool} {options}'
        if sys.platform == "win32":
            script, text = folder / f"{tool}.bat", f"@{command} %*\r\n"
        else:
            script, text = folder / tool, f'#!/bin/sh\nexec {command} "$@"\n'
        script.write_text(text)
        script.chmod(0o755)
        os.environ[variable] = str(script)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what a build needs beside pyproject.toml's list: CMake and Ninja if they are missing, and a compiler."""
    return [
        *build.get_requires_for_build_wheel(config_settings),
        *([] if has_compiler() else [ZIG]),
    ]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return what an editable installation needs, as `get_requires_for_build_wheel` does."""
    return [
        *build.get_requires_for_build_editable(config_settings),
        *([] if has_compiler() else [ZIG]),
    ]


def build_with(
    build_it: Any, folder: str, config_settings: Any, metadata_directory: str | None
) -> str:
    """Build with the native kernels, or without them if that fails."""
    if not has_compiler():
        use_zig()
    try:
        return str(build_it(folder, config_settings, metadata_directory))
    except (Exception, SystemExit) as error:
        print(
            f"The native kernels could not be built ({error}). Building draftree without them.",
            file=sys.stderr,
        )
    # The prepared metadata name this system, which a package without kernels does not need.
    return str(build_it(folder, {**(config_settings or {}), **PURE}, None))


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel."""
    return build_with(build.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build an editable installation."""
    return build_with(build.build_editable, wheel_directory, config_settings, metadata_directory)
