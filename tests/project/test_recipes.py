"""Recipes have the specs of what is shipped: the options in a checkpoint are those of the recipe's text."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftree.registry import build

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "weights" / "src" / "draftree_weights"
ABOUT = {"drafter", "target", "target_hash", "embedding_hash", "bias"}
"""What a checkpoint says beside its options."""


def recipe(name: str) -> ModuleType:
    """A script of recipes/."""
    path = ROOT / "recipes" / f"{name}.py"
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location(f"recipe_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = found
        spec.loader.exec_module(found)
    finally:
        sys.path.remove(str(path.parent))
    return found


def specs(target: str) -> dict[str, str]:
    """The spec of each drafter by the recipe of a target."""
    if target == "demo":
        return dict(recipe("demo_drafters").SPECS)
    trained = recipe("smollm2_drafters").SPECS | {
        "eagle3": recipe("smollm2_training").SPECS["eagle3"]
    }
    return {name: spec for name, (spec, *_) in trained.items()}


def stored(target: str) -> dict[str, dict[str, Any]]:
    """The options of each shipped drafter, by its name."""
    found = {}
    for path in sorted((WEIGHTS / target).glob("*/config.json")):
        options = json.loads(path.read_text("utf-8")).get("draftree", {})
        if options.get("drafter"):
            found[path.parent.name] = {k: v for k, v in options.items() if k not in ABOUT}
    return found


@pytest.mark.parametrize("target", ["demo", "smollm2"])
def test_every_shipped_drafter_is_what_its_recipe_trains(target: str) -> None:
    shipped, told = stored(target), specs(target)
    assert shipped
    assert shipped.keys() <= told.keys()
    for name, options in shipped.items():
        method = build("drafter", told[name])
        for option, value in options.items():
            asked = getattr(method, option)
            assert asked == value, (
                f"{target} {name}: {option} is {asked} by the recipe, and {value} as shipped"
            )
        for option in method.checkpoint_options.keys() - options.keys():
            asked, default = method.checkpoint_options[option], getattr(type(method)(), option)
            assert asked == default, f"{target} {name}: {option} is {asked}, not stored as shipped"
