"""Published drafters are listed by target, each with a method that opens it, and nothing is downloaded."""

import json
from collections.abc import Callable

import pytest

from draftree.engine import usual_drafter
from draftree.formats.known_checkpoints import published_drafters, published_drafters_for
from draftree.registry import names
from draftree.target.target_names import shipped_drafters, shipped_folder


def test_each_has_a_method_and_a_source() -> None:
    assert {entry.method for entry in published_drafters()} <= set(names("drafter"))
    assert all(
        entry.drafter.count("/") == entry.target.count("/") == 1 and entry.source
        for entry in published_drafters()
    )
    assert len({entry.drafter for entry in published_drafters()}) == len(published_drafters())


@pytest.mark.parametrize("target", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "models/Qwen3-8B/"])
def test_a_target_is_known_by_its_name(target: str) -> None:
    found = published_drafters_for(target)
    assert {entry.method for entry in found} == {"dflash", "dspark", "jetspec", "eagle3"}
    assert found[0].drafter in usual_drafter(target)[1]
    assert usual_drafter(target)[0] == "suffix"


def test_the_command_lists_them(draftree: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = draftree("drafters", "--for", "Qwen/Qwen3-4B", "--json")
    found = json.loads(out)
    assert (status, found["shipped"]) == (0, [])
    assert [entry["drafter"] for entry in found["published"]] == [
        e.drafter for e in published_drafters_for("Qwen/Qwen3-4B")
    ]
    assert "EAGLE-Vicuna" in draftree("drafters", "--json")[1]
    status, out, err = draftree("drafters", "--for", "nobody/knows")
    assert (status, out) == (0, "")
    assert "nobody/knows" in err


def test_shipped_drafters_have_folders() -> None:
    assert ("demo", "edd") in shipped_drafters()
    assert all(shipped_folder(target, method) for target, method in shipped_drafters())
    assert {target for target, _ in shipped_drafters("demo")} == {"demo"}
    assert shipped_drafters("other") == []


def test_the_heads_of_the_papers_are_known() -> None:
    """Those of EAGLE-2's tables, its baselines, and the later heads of the same authors."""
    known = {p.drafter for p in published_drafters()}
    sizes = ("7b", "13b", "33b")
    assert {f"FasterDecoding/medusa-vicuna-{size}-v1.3" for size in sizes} <= known
    assert {f"ankner/hydra-vicuna-{size}-v1.3" for size in sizes} <= known
    assert {
        "yuhuili/EAGLE-LLaMA3-Instruct-8B",
        "yuhuili/EAGLE-LLaMA3-Instruct-70B",
        "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
        "yuhuili/EAGLE-mixtral-instruct-8x7B",
        "yuhuili/EAGLE-Qwen2-7B-Instruct",
        "yuhuili/EAGLE-Qwen2-72B-Instruct",
        "yuhuili/EAGLE3-Vicuna1.3-13B",
        "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
    } <= known
