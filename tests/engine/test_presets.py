"""A name without options is the published method; presets name what departs from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftree.errors import UnknownName
from draftree.registry import build, names, part

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "presets.md"
PAPERS: dict[tuple[str, str], dict[str, Any]] = {
    ("drafter", "edd"): {"hidden_layer": -4, "loss": "kl", "min_block": 5, "max_block": 10, "phase": 0, "shared": False,
                         "init": "scratch", "draft_vocab": 0},
    ("drafter", "vdm"): {"shared": False, "init": "scratch", "draft_vocab": 0},
    ("drafter", "glide"): {"layers": 1, "hidden": "paper", "block": 5, "loss": "ce", "cross": True, "kv_layer": -1,
                           "variant": "paper", "init": "scratch", "phase": 0, "draft_vocab": 0},
    ("drafter", "eagle"): {"feature_weight": 1.0, "token_weight": 0.1, "noise": 0.1, "steps": 1, "bias": True, "top_k": 0},
    ("drafter", "eagle3"): {"init": "scratch", "steps": 7},
    ("policy", "cape"): {"length": 4, "max_nodes": 32, "bins": "paper", "sets": None},
    ("policy", "beam"): {"width": 4, "depth": 4, "survivors": True},
    ("policy", "pct"): {"width": 5, "max_depth": 10, "leaf_threshold": 0.01},
    ("policy", "c2t"): {"beta": 0.5, "width": 15, "layer_top": 15, "depth": 10, "classifier": "", "chain": False},
    ("policy", "dymax"): {"threshold": 0.3, "length": 10},
    ("policy", "dyjoint"): {"threshold": 0.08, "length": 10},
    ("policy", "eagle2"): {"nodes": None, "depth": 6, "width": 10, "expand_by": "value", "rerank": True,
                           "rank_by": "value"},
    ("policy", "opttree"): {"nodes": 50, "threshold": None, "max_depth": 10},
    ("policy", "vct"): {"width": 3, "depth": 5, "layer_top": None},
    ("policy", "mcts"): {"c1": 32, "c2": 8, "iterations": 150},
}  # fmt: skip
"""By kind and name, what a paper or its official code says."""


@pytest.mark.parametrize(("kind", "name"), PAPERS)
def test_a_name_without_options_is_the_published_method(kind: str, name: str) -> None:
    built = build(kind, name)
    wanted = PAPERS[kind, name]
    assert {k: getattr(built, k) for k in wanted} == wanted


def test_a_preset_sets_what_no_other_option_sets() -> None:
    fast = build("drafter", "edd:preset=fast")
    assert (fast.shared, fast.init, fast.phase) == (True, "target", "random")
    for spec in ("edd:preset=fast,phase=2", "edd:phase=2,preset=fast"):
        assert build("drafter", spec).phase == 2
        assert build("drafter", spec).shared
    assert build("policy", "beam:preset=fast").survivors is False
    with pytest.raises(UnknownName, match=r"preset of drafter 'edd'.*fast"):
        build("drafter", "edd:preset=fats")
    with pytest.raises(UnknownName, match="key of policy 'chain'"):
        build("policy", "chain:preset=fast")


def test_the_page_shows_every_preset_beside_the_paper() -> None:
    """In the order of names; a value that a preset leaves alone is not shown."""
    page, rows = PAGE.read_text("utf-8"), []
    for kind in ("drafter", "policy"):
        for name in names(kind):
            for preset, values in getattr(part(kind, name), "presets", {}).items():
                paper = build(kind, name)
                changed = [
                    f"`{k}={shown(getattr(paper, k))}` → `{k}={shown(v)}`"
                    for k, v in values.items()
                ]
                rows.append(f"| `{name}` | `{name}:preset={preset}` | {', '.join(changed)} |")
    assert "\n".join(rows) in page, f"{PAGE.name} should hold:\n" + "\n".join(rows)


def shown(value: Any) -> str:
    """Return a value as a spec writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_the_command_line_knows_presets(draftree: Any, tmp_path: Path) -> None:
    """Its early checks read the source of a part, without importing it."""
    words = (
        "replay",
        "--limit",
        "1",
        "-n",
        "4",
        "--recording",
        str(tmp_path / "of"),
        "--out",
        str(tmp_path / "r.json"),
        "--json",
    )
    status, out, _ = draftree(*words, "--pair", "pld beam:preset=fast")
    assert status == 0
    assert json.loads(out)["rows"][-1]["policy"] == "beam:preset=fast"
    status, _, err = draftree(*words, "--pair", "pld beam:preset=fats", "--force")
    assert (status, "preset is 'fats', allowed is fast" in err) == (2, True)
    status, _, err = draftree(
        "train",
        "edd:preset=fast",
        "--data",
        str(tmp_path / "none.jsonl"),
        "--out",
        str(tmp_path / "o"),
    )
    assert (status, "none.jsonl" in err) == (2, True)


def test_nodes_follow_the_size_of_the_target() -> None:
    """EAGLE-2, appendix A: 60, 50 and 48 for 7B, 13B and 70B."""
    policy = build("policy", "eagle2")
    assert [
        policy.for_target_size(int(size)).num_verified for size in (135e6, 7e9, 13e9, 33e9, 70e9)
    ] == [
        60,
        60,
        50,
        48,
        48,
    ]
    assert build("policy", "eagle2:nodes=26").for_target_size(int(70e9)).num_verified == 26
    assert policy.for_target_size(int(1e9)) is policy
