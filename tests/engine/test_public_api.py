"""The public names: few, documented, and all there."""

import importlib
import inspect

import pytest

import draftree
from draftree.errors import DraftreeError, NotANumber, UnknownName, UserError
from draftree.registry import KINDS, knobs, names, part, summary

PUBLIC = {
    "Candidates",
    "Completion",
    "Conversation",
    "Costs",
    "DraftreeError",
    "Engine",
    "Generation",
    "Grammar",
    "Handle",
    "Options",
    "Request",
    "RequestStats",
    "Sampling",
    "SchedulerOptions",
    "Target",
    "demo_folder",
    "Token",
    "Tree",
    "Update",
    "UserError",
    "AcceptResult",
    "load",
    "speculate",
}


def test_the_public_names() -> None:
    assert set(draftree.__all__) == PUBLIC, (
        "a change of the public names is a decision: change it here too"
    )


@pytest.mark.parametrize("name", ["draftree", "draftree.testing"])
def test_all_is_sorted_complete_and_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(set(module.__all__))
    for public in module.__all__:
        assert inspect.getdoc(getattr(module, public)), f"{name}.{public} has no docstring"
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


def test_the_tree_of_errors() -> None:
    assert issubclass(UserError, DraftreeError)
    assert issubclass(UnknownName, UserError)
    assert issubclass(NotANumber, DraftreeError)


def test_version_is_that_of_the_project() -> None:
    assert draftree.__version__.count(".") == 2


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in KINDS for n in names(k)])
def test_every_part_has_knobs_documented_and_a_summary(kind: str, name: str) -> None:
    cls = part(kind, name)
    assert summary(kind, name).rstrip(".")
    said = "".join(inspect.getdoc(c) or "" for c in cls.__mro__[:-1])
    for knob in knobs(kind, name):
        assert f"{knob}:" in said, f"{kind} {name}: knob '{knob}' is not in the docstring"
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert getattr(cls, "__final__", False), f"{kind} {name} is not marked final"
