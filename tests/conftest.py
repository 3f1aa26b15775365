"""One thread for every test, as the models are tiny and threads would only wait; no deadlines; no network; the command line."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # before it is imported; else each name that is no folder waits for a hub, up to a minute
)

import pytest
import torch
from hypothesis import settings
from transformers.utils.logging import disable_progress_bar

from draftree import native
from draftree.cli import terminal
from draftree.cli.app import main

torch.set_num_threads(1)
disable_progress_bar()  # as the first command of a process does; else a test's output depends on those before it
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell starts what runs in the background with it ignored

# The parent is whatever hypothesis chose: where CI is set, it draws the same examples every time.
settings.register_profile("draftree", parent=settings.default, deadline=None)
settings.load_profile("draftree")


class Silent(terminal.Clock):
    """On a slow machine, too, standard error holds nothing but what a test is about."""

    def beating(
        self, beat: Callable[[], None], known: Callable[[], bool] = bool
    ) -> nullcontext[None]:
        return nullcontext()


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "CLOCK", Silent())
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it for its workers


@pytest.fixture(scope="session", autouse=True)
def in_a_moment() -> Iterator[None]:
    """What a program times before it goes on, costs of passes and of kernels, is timed in a few rounds."""
    from draftree import measure_costs  # not in the process that only hands tests out
    from draftree.utils import hardware

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_costs, "MAX_SECONDS", 0.01)
        patch.setattr(measure_costs, "MEASURED_CONTEXTS", (32,))
        patch.setattr(hardware, "MAX_TIMING_SECONDS", 0.01)
        patch.setattr(hardware, "ROUNDS_RANGE", (1, 2))
        yield


VARIANTS = (
    [native.requested_variant]
    if native.requested_variant in native.available()
    else native.available()
)
"""Variants of the native kernels that tests force: the one of DRAFTREE_NATIVE, or all that this
processor can run."""


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force a variant of the native kernels during a test."""
    before = native.variant()
    native.core.use_variant(request.param)
    yield request.param
    native.core.use_variant(before)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs are measured once, and kept inside the tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def one_demo() -> Iterator[None]:
    """Load the demo target once for each way in which a module's tests, which only read it, ask for it."""
    from draftree.target.target import Target  # not in the process that only hands tests out

    load, loaded = Target.load, dict[str, Target]()

    def once(name: str, dtype: Any = None, device: Any = None, **how: Any) -> Target:
        if name != "demo":
            return load(name, dtype, device, **how)
        key = repr((dtype, device, sorted(how.items())))
        if key not in loaded:
            loaded[key] = load(name, dtype, device, **how)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "load", once)
        yield


@pytest.fixture
def draftree(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command: (exit status, standard output, standard error)."""

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in args])
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run
