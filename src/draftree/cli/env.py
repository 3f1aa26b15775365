"""`draftree env`: print what a bug report needs."""

from typing import Any

from draftree.cli.console import emit
from draftree.cli.options import AsJson


def show_environment(as_json: AsJson = False) -> None:
    """Print what a bug report needs: versions, processor, threads, torch's build, kernels, cache folder."""
    from draftree.evaluation.environment import environment

    found = environment()
    if as_json:
        return emit(found)
    for name, value in found.items():
        print(f"{name.replace('_', ' ') + ':':18}{as_text(value)}")
    return None


def as_text(value: Any) -> str:
    """Return a value of the environment as one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items()) or "none"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "unknown" if value is None else str(value)
