"""Packages of others as they lie on a path once they are installed, without an installer."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from draftree import registry


def forget() -> None:
    """What the registry has found is looked for again."""
    for cached in (registry.names, registry.own_names, registry.plugins, registry.part):
        cached.cache_clear()


def install(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    package: str,
    modules: Mapping[str, str],
    points: Mapping[str, Mapping[str, str]],
) -> None:
    """Puts a package on the path until the test ends; `forget` has to follow then.

    Args:
        monkeypatch: undoes it.
        folder: empty, or with other packages in it.
        package: its name.
        modules: the text of each.
        points: its entry points by group and name.
    """
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text, "utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    said = folder / f"{package.replace('-', '_')}-0.1.dist-info"
    said.mkdir()
    (said / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    lines = [
        line
        for group, those in points.items()
        for line in (f"[{group}]", *(f"{n} = {v}" for n, v in those.items()))
    ]
    (said / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))
    forget()
