"""Parts of other packages: found by entry points, usable everywhere, and in nobody's way where they are broken."""

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftree import registry
from draftree.errors import UserError
from draftree.testing import Suite, __main__, cases
from packages import forget, install

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "add-a-drafter.md").read_text("utf-8")
SOURCE = re.findall(r'```python title="bigram.py"\n(.*?)```', PAGE, re.DOTALL)[0]
POINTS = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])["project"][
    "entry-points"
]
CHAINED = '''
from dataclasses import dataclass
from draftree.policies.vct import VCT
from draftree.policies.base import Policy
from draftree.acceptors.greedy import Greedy
from draftree.acceptors.base import Acceptor

@dataclass(frozen=True)
class Twin(Policy):
    """Two children of every node, two layers."""

    depth: int = 2

    def draft(self, expand, tree, costs, room, memory):
        return VCT(2, self.depth).draft(expand, tree, costs, room, memory)

@dataclass(frozen=True)
class Copy(Acceptor):
    exact_for, survives_pruning, greedy, sampling = Greedy.exact_for, True, True, False

    def accept(self, tree, p, chance):
        return Greedy().accept(tree, p, chance)

@dataclass
class Loose(Policy):
    draft = Twin.draft

@dataclass(frozen=True)
class Half(Policy):
    pass

def function():
    pass
'''


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    for name in ("bigram", "others"):
        sys.modules.pop(name, None)
    forget()


@pytest.fixture
def bigram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter of docs/how-to/add-a-drafter.md, installed."""
    install(monkeypatch, tmp_path, "draftree-bigram", {"bigram": SOURCE}, POINTS)


def test_a_drafter_of_one_file_passes_conformance(bigram: None) -> None:
    assert registry.packages("drafter", "bigram") == ["draftree-bigram"]
    suite = Suite()
    every = cases(only={"drafter": ["bigram"], "acceptor": ["greedy", "match"]})
    some = [
        case for case in every if case.check != "joining-8"
    ]  # which is as joining, with more rows
    for policy in registry.names("policy"):
        for case in [each for each in some if each.policy == policy][::5]:
            suite.run(case)
    assert suite.coverage.parts["drafter"] == {"bigram"}
    assert suite.coverage.parts["policy"] == set(registry.names("policy"))
    assert suite.coverage.accepted.keys() >= {0, 1, 2, 3}


def test_plugin_names_work_like_all_others(
    bigram: None, draftree: Callable[..., tuple[int, str, str]]
) -> None:
    built = registry.build("drafter", "bigram:trust=0.25")
    assert (built.kind(), built.trust) == ("bigram", 0.25)
    assert [type(p).__name__ for p in registry.build("drafter", "bigram+pld").parts] == [
        "Bigram",
        "PLD",
    ]
    with pytest.raises(
        UserError,
        match="unknown key of drafter 'bigram' 'trst': known are trust; did you mean 'trust'",
    ):
        registry.build("drafter", "bigram:trst=1")
    assert "bigram" in registry.parts("drafter")
    status, out, _ = draftree("list", "--json")
    told = json.loads(out)["drafters"]
    assert status == 0
    assert told["bigram"] == {
        "summary": "Bigrams: draft the tokens that followed the same token earlier in the text. (package draftree-bigram)",
        "knobs": {"trust": 0.5},
        "package": "draftree-bigram",
        "training": [],
    }
    assert "package" not in told["pld"]
    asked = (
        "generate",
        "1 2 3 1 2",
        "--max-new-tokens",
        6,
        "--policy",
        "chain",
        "--baseline",
        "--json",
    )
    status, out, _ = draftree(*asked, "--drafter", "bigram")
    assert status == 0
    assert json.loads(out)["baseline"]["same_output"]


def test_the_suite_is_asked_for_one_part(
    bigram: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["testing", "--drafter", "bigram", "--policy", "chain", "--acceptor", "greedy"]
    monkeypatch.setattr(sys, "argv", argv)
    assert __main__.main() == 0
    out = capsys.readouterr().out
    assert "drafter   bigram\npolicy    chain\nacceptor  greedy\n" in out
    monkeypatch.setattr(sys, "argv", [*argv[:2], "bigrm"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    assert "unknown drafter 'bigrm'" in capsys.readouterr().err


def test_policies_and_acceptors_are_found_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {
        "draftree.policies": {"twin": "others:Twin"},
        "draftree.acceptors": {"copy": "others:Copy"},
    }
    install(monkeypatch, tmp_path, "others", {"others": CHAINED}, points)
    assert registry.knobs("policy", "twin") == {"depth": 2}
    assert registry.summary("policy", "twin") == "Two children of every node, two layers."
    suite = Suite()
    for case in cases(
        only={"drafter": ["sometimes"], "policy": ["twin"], "acceptor": ["copy", "match"]}
    ):
        if not case.check.endswith("-8"):
            suite.run(case)
    assert suite.coverage.parts["acceptor"] == {"copy", "match"}


BROKEN = {
    "gone": ("nowhere:Gone", "No module named 'nowhere'"),
    "missing": ("others:Missing", "module 'others' has no attribute 'Missing'"),
    "function": ("others:function", "is <function function"),
    "greedy": (
        "others:Copy",
        "is <class 'others.Copy'>, allowed is a whole Policy: a frozen dataclass",
    ),
    "loose": (
        "others:Loose",
        "is <class 'others.Loose'>, allowed is a whole Policy: a frozen dataclass",
    ),
    "half": (
        "others:Half",
        "is <class 'others.Half'>, allowed is a whole Policy: a frozen dataclass",
    ),
    "other": (
        "others:Twin",
        "is <class 'others.Twin'>, allowed is a whole Policy: a frozen dataclass other, in any case",
    ),
}


def test_a_broken_one_is_told_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draftree: Callable[..., tuple[int, str, str]]
) -> None:
    points = {name: value for name, (value, _) in BROKEN.items()}
    install(monkeypatch, tmp_path, "others", {"others": CHAINED}, {"draftree.policies": points})
    status, out, _ = draftree("list", "--json")
    told = json.loads(out)["policies"]
    assert status == 0
    for name, (value, why) in BROKEN.items():
        line = f"policy '{name}' of package 'others' cannot be used: entry point {value}"
        with pytest.raises(UserError, match=re.escape(line)) as error:
            registry.build("policy", name)
        assert why in str(error.value)
        assert told[name] == {"summary": str(error.value), "knobs": {}, "package": "others"}
        assert draftree("generate", "1", "--policy", name)[::2] == (2, f"draftree: {error.value}\n")
    assert set(registry.parts("policy")) == set(registry.own_names("policy"))
    assert draftree("list")[0] == 0


def test_a_broken_drafter_leaves_folders_to_those_that_know_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draftree: Callable[..., tuple[int, str, str]]
) -> None:
    install(monkeypatch, tmp_path, "others", {}, {"draftree.drafters": {"gone": "nowhere:Gone"}})
    status, _, told = draftree("train", "gone", "--data", tmp_path, "--out", tmp_path / "out")
    assert (status, told.count("\n")) == (2, 1)
    assert "drafter 'gone' of package 'others' cannot be used" in told
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        UserError,
        match="none of dflash, dspark, eagle, eagle3, edd, glide, hydra, jetspec, medusa, mtp, peagle, vdm recognises",
    ):
        registry.build("drafter", str(folder))


def test_shipped_parts_keep_their_names_and_clashes_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draftree: Callable[..., tuple[int, str, str]]
) -> None:
    for package in ("one", "two"):
        points = {"draftree.policies": {"twin": "others:Twin", "pct": "others:Twin"}}
        install(monkeypatch, tmp_path, package, {"others": CHAINED}, points)
    assert registry.part("policy", "pct").__module__ == "draftree.policies.pct"
    with pytest.raises(
        UserError,
        match=r"policy 'twin' is provided by several packages, one, two: allowed is one of them",
    ):
        registry.part("policy", "twin")
    told = json.loads(draftree("list", "--json")[1])["policies"]
    assert told["pct"]["summary"].endswith("(not used: that of package one, two)")
    assert told["pct"]["knobs"]
    assert "is provided by several packages" in told["twin"]["summary"]
