"""Targets that the tests share: they are tiny, and read but never changed."""

from pathlib import Path

import pytest
import torch

from draftree.target.target import Target
from folders import talking_folder, target_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder: random weights, one token for each byte, a context of 160 tokens."""
    return target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(folder: Path) -> Target:
    """The target of `folder`."""
    return Target.load(str(folder), torch.float64)


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target that writes letters, and ends its turns."""
    return Target.load(str(talking_folder(tmp_path_factory.mktemp("talking"))), torch.float64)
