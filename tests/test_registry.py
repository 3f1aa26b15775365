"""Specs, and what they say when they are wrong."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Literal

import pytest

from draftree import registry
from draftree.drafters.edd import EDD
from draftree.drafters.pld import PLD
from draftree.errors import UnknownName, UserError
from draftree.policies.pct import PCT
from draftree.policies.vct import VCT


def test_a_part_is_named_by_its_file() -> None:
    assert {"edd", "lm", "pld", "vdm"} <= set(registry.names("drafter"))
    for kind in registry.KINDS:
        for name in registry.names(kind):
            assert not name.startswith("_")
            assert registry.build(kind, name) == registry.part(kind, name)()
            assert set(registry.knobs(kind, name)) == {f.name for f in fields(registry.part(kind, name))}
            assert registry.summary(kind, name)


@pytest.mark.parametrize(
    ("kind", "spec", "part"),
    [
        ("policy", "pct", PCT()),
        ("policy", "pct:width=3,ratio=0.1", PCT(width=3, ratio=0.1)),
        ("policy", "pct:ratio=none", PCT()),
        ("policy", "vct:depth=2", VCT(depth=2)),
        ("drafter", "pld:ngram=2", PLD(ngram=2)),
        ("drafter", "edd:checkpoint=some/folder,loss=ce", EDD(checkpoint="some/folder", loss="ce")),
    ],
)
def test_a_spec_is_the_dataclass(kind: str, spec: str, part: object) -> None:
    assert registry.build(kind, spec) == part


@pytest.mark.parametrize(
    ("kind", "spec", "told"),
    [
        ("policy", "pctt", "unknown policy 'pctt'.*did you mean 'pct'"),
        ("policy", "pct:widht=3", "unknown key of policy 'pct' 'widht'.*did you mean 'width'"),
        ("policy", "pct:3", "'3' in spec 'pct:3' is not key=value; keys of policy 'pct': width"),
        ("policy", "pct:width=x", "pct:width is 'x', allowed is a whole number"),
        ("policy", "pct:ratio=x", "pct:ratio is 'x', allowed is a number"),
        ("policy", "pct:width=0", "width=0"),
        ("drafter", "edd:loss=mse", "edd:loss is 'mse', allowed are kl, ce"),
        ("drafter", "base", "unknown drafter 'base'"),
        ("acceptor", "", "unknown acceptor ''"),
    ],
)
def test_a_wrong_spec_is_told_with_what_is_allowed(kind: str, spec: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        registry.build(kind, spec)


def test_a_checkpoint_folder_is_a_drafter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no readable config\.json"):
        registry.build("drafter", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"draftree": {"drafter": "edd"}}))
    assert registry.build("drafter", str(tmp_path)) == EDD(checkpoint=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="none of eagle, eagle3, edd, glide, hydra, medusa, mtp, vdm recognises"):
        registry.build("drafter", str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="is no object"):
        registry.build("drafter", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [("3", int, 3), ("1e-2", float, 0.01), ("x", str, "x"), ("True", bool, True), ("false", bool, False),
     ("None", float | None, None), ("2", int | None, 2), ("a", Literal["a", "b"], "a")],
)  # fmt: skip
def test_a_value_is_parsed_by_its_type(text: str, hint: object, value: object) -> None:
    assert registry.parse(text, hint, "here") == value


@pytest.mark.parametrize(("text", "hint"), [("1.5", int), ("yes", bool), ("c", Literal["a", "b"])])
def test_a_value_of_another_type_is_refused(text: str, hint: object) -> None:
    with pytest.raises(UserError, match="allowed"):
        registry.parse(text, hint, "here")


def test_an_unknown_name_without_a_near_one_lists_all() -> None:
    assert str(UnknownName("fruit", "zzz", ["pear", "apple"])) == "unknown fruit 'zzz': known are apple, pear"
