"""Specs, and what they say when they are wrong."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Literal

import pytest

from draftree import registry
from draftree.drafters._fused import Fused
from draftree.drafters.edd import EDD
from draftree.drafters.pld import PLD
from draftree.errors import UnknownName, UserError
from draftree.policies.pct import PCT
from draftree.policies.vct import VCT
from draftree.utils.validated_dataclass import parse_value, rule_of


def test_a_part_is_named_by_its_file() -> None:
    assert {"edd", "lm", "pld", "vdm"} <= set(registry.names("drafter"))
    for kind in registry.KINDS:
        for name in registry.names(kind):
            assert not name.startswith("_")
            assert registry.build(kind, name) == registry.part(kind, name)()
            assert set(registry.knobs(kind, name)) == {
                f.name for f in fields(registry.part(kind, name)) if f.compare
            }
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
        ("policy", "pct:3", "'3' is not key=value; keys of policy 'pct': width"),
        ("policy", "pct:width=x", "pct: width is 'x', allowed is a whole number of at least 1"),
        (
            "policy",
            "pct:ratio=x",
            "pct: ratio is 'x', allowed is none or a finite number of at least 0",
        ),
        ("policy", "pct:width=0", "pct: width is 0, allowed is a whole number of at least 1"),
        ("drafter", "edd:loss=mse", "edd: loss is 'mse', allowed is kl or ce"),
        ("drafter", "base", "unknown drafter 'base'"),
        ("acceptor", "", "unknown acceptor ''"),
    ],
)
def test_a_wrong_spec_is_told_with_what_is_allowed(kind: str, spec: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        registry.build(kind, spec)


def test_a_checkpoint_folder_is_a_drafter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json' is not a drafter's config: No such file"):
        registry.build("drafter", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"draftree": {"drafter": "edd"}}))
    assert registry.build("drafter", str(tmp_path)) == EDD(checkpoint=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        UserError,
        match="none of dflash, dspark, eagle, eagle3, edd, glide, hydra, jetspec, medusa, mtp, peagle, vdm recognises",
    ):
        registry.build("drafter", str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(
        UserError,
        match=r"config.json' is not a drafter's config: it holds \[\], allowed is a JSON object",
    ):
        registry.build("drafter", str(tmp_path))


def test_drafters_are_fused_by_a_plus(tmp_path: Path) -> None:
    assert registry.build("drafter", "edd+pld") == Fused((EDD(), PLD()))
    spec = "pld:ngram=2,length=4+edd:loss=ce+pld"
    assert registry.build("drafter", spec) == Fused((PLD(ngram=2, length=4), EDD(loss="ce"), PLD()))
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"draftree": {"drafter": "edd"}}))
    for spec in (f"{folder}+pld", f"edd:checkpoint={folder}+pld"):
        assert registry.build("drafter", spec) == Fused((EDD(checkpoint=str(folder)), PLD()))
    assert registry.build("drafter", f"pld+edd:checkpoint={folder}") == Fused(
        (PLD(), EDD(checkpoint=str(folder)))
    )


def test_a_plus_in_a_path_that_exists_fuses_nothing(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    folder = tmp_path / "one+pld"  # what stands before the + exists too, and is no drafter
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"draftree": {"drafter": "edd"}}))
    held = EDD(checkpoint=str(folder))
    assert registry.build("drafter", str(folder)) == held
    assert registry.build("drafter", f"pld+{folder}+pld:ngram=1") == Fused(
        (PLD(), held, PLD(ngram=1))
    )
    assert registry.build("drafter", f"edd:checkpoint={folder}") == held
    assert registry.build("drafter", f"edd:checkpoint={folder},loss=ce") == EDD(
        checkpoint=str(folder), loss="ce"
    )
    assert registry.build("drafter", f"edd:loss=ce,checkpoint={folder}+pld") == Fused(
        (EDD(str(folder), loss="ce"), PLD())
    )


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("edd+pldd", "unknown drafter 'pldd'.*did you mean 'pld'"),
        ("edd:checkpoint=no/folder+pldd", "unknown drafter 'pldd'"),
        ("pld:ngram=x+edd", "pld: ngram is 'x', allowed is a whole number of at least 1"),
        ("edd+pld:3", "'3' is not key=value"),
        ("edd+pld:ngrm=3", "unknown key of drafter 'pld' 'ngrm'"),
        ("edd+", "has a '\\+' with nothing on one side"),
        ("+", "has a '\\+' with nothing on one side"),
    ],
)
def test_mistakes_in_a_fusion_are_named(spec: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        registry.build("drafter", spec)


def test_policies_are_not_fused() -> None:
    with pytest.raises(UserError, match=r"unknown policy 'pct\+vct'"):
        registry.build("policy", "pct+vct")


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [("3", int, 3), ("1e-2", float, 0.01), ("x", str, "x"), ("True", bool, True), ("false", bool, False),
     ("None", float | None, None), ("2", int | None, 2), ("a", Literal["a", "b"], "a"),
     ("-4", int | Literal["auto"], -4), ("auto", int | Literal["auto"], "auto")],
)  # fmt: skip
def test_a_value_is_parsed_by_its_type(text: str, hint: object, value: object) -> None:
    assert parse_value(text, hint) == value


@pytest.mark.parametrize(
    ("text", "hint"),
    [("1.5", int), ("yes", bool), ("c", Literal["a", "b"]), ("a", int | Literal["auto"])],
)
def test_a_value_of_another_type_is_refused(text: str, hint: object) -> None:
    rule = rule_of(hint)
    assert rule is not None
    assert not rule[1](parse_value(text, hint))


def test_an_unknown_name_without_a_near_one_lists_all() -> None:
    assert (
        str(UnknownName("fruit", "zzz", ["pear", "apple"]))
        == "unknown fruit 'zzz': known are apple, pear"
    )
