"""The demo that ships with the package: a small target and its trained drafters."""

from pathlib import Path


def demo_folder(name: str = "target") -> Path:
    """The folder of a shipped part of the demo."""
    return Path(__file__).parent / name
