"""Texts that outgrow the slots a drafter's cache begins with."""

import importlib
import pkgutil
from functools import cache

import pytest
import torch

from draftree import drafters
from draftree.drafters.base import TrainableMethod
from draftree.engine import Engine, generate_plain
from draftree.policies.vct import VCT
from draftree.registry import names, part
from draftree.request import Request
from draftree.target.target import Target
from draftree.testing.fakes import tiny_target
from selection import one_in

TRAINED = [n for n in names("drafter") if issubclass(part("drafter", n), TrainableMethod)]


@pytest.fixture(autouse=True)
def one_spare_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pkgutil.walk_packages(drafters.__path__, "draftree.drafters.")
    modules = [importlib.import_module(m.name) for m in found]
    with_own_caches = [m for m in modules if "SPARE_SLOTS" in vars(m)]
    assert len(with_own_caches) >= 4
    for module in with_own_caches:
        monkeypatch.setattr(module, "SPARE_SLOTS", 1)


REQUESTS = [Request([5, 6, 7], 40), Request([9, 8, 7, 6, 5], 25, number=1)]


@cache
def plainly() -> tuple[Target, list[list[int]]]:
    """A target, and what it writes by itself."""
    target = tiny_target(context=80)
    return target, generate_plain(target, REQUESTS).tokens


@pytest.mark.parametrize("name", one_in(2, TRAINED))
def test_a_cache_grows_with_the_text(name: str) -> None:
    target, texts = plainly()
    torch.manual_seed(0)
    engine = Engine(target, part("drafter", name)().example(target), VCT(width=2, depth=3))
    assert engine.write(REQUESTS).tokens == texts
