"""The trained weights: found through an entry point, and what is said where they are not installed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftree import weights
from draftree.engine import load, usual_drafter
from draftree.errors import UserError
from draftree.policies.c2t import C2T
from draftree.registry import build
from draftree.target.target_names import shipped_drafters, shipped_folder, shipped_name
from draftree.weights import GROUP, INSTALL, demo_folder, weights_folder
from packages import install

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment without any weights."""
    monkeypatch.setattr(weights, "entry_points", lambda **_: ())
    weights_folder.cache_clear()
    yield
    weights_folder.cache_clear()


@pytest.mark.usefixtures("nothing_installed")
class TestWithoutWeights:
    LINE = f"the trained weights for 'demo' are not installed: {INSTALL}"

    @pytest.mark.parametrize("use", [load, demo_folder, C2T], ids=["load", "demo_folder", "c2t"])
    def test_what_needs_them_says_what_to_install(self, use: Callable[[], object]) -> None:
        with pytest.raises(UserError) as error:
            use()
        assert str(error.value) == self.LINE

    @pytest.mark.parametrize(
        "words",
        [
            ("generate", "hello", "--target", "demo"),
            ("bench",),
            ("export", "edd", "--format", "eagle", "--out", "x"),
        ],
    )
    def test_a_command_ends_with_one_line(
        self, draftree: Callable[..., tuple[int, str, str]], words: tuple[str, ...]
    ) -> None:
        status, out, err = draftree(*words)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert INSTALL in err

    def test_smollm2_is_drafted_by_what_needs_no_training(self) -> None:
        name, told = usual_drafter("smollm2")
        assert name == "suffix"
        assert "the trained weights for 'smollm2' are not installed" in told
        assert INSTALL in told

    def test_no_drafter_is_shipped(self) -> None:
        assert shipped_drafters() == []
        assert shipped_folder("demo", "edd") is None
        assert shipped_name("demo") == "demo"
        assert shipped_name("x/y") is None


def test_a_drafter_named_for_smollm2_says_what_to_install(
    nothing_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = type("Named", (), {"name": "smollm2"})()
    with pytest.raises(UserError, match=r"weights for 'smollm2' are not installed"):
        build("drafter", "edd").open(target)


def test_weights_are_found_in_any_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brought" / "some").mkdir(parents=True)
    install(
        monkeypatch,
        tmp_path,
        "brought-weights",
        {},
        {GROUP: {"some": "brought.some", "stale": "gone.stale"}},
    )
    weights_folder.cache_clear()
    assert weights_folder("some") == tmp_path / "brought" / "some"
    assert weights_folder("stale") is None
    weights_folder.cache_clear()


def test_the_package_holds_code_only() -> None:
    """All files of the wheel, the built kernels aside, are text and take less than 5 MB."""
    files = [
        path
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so", ".pyd")
    ]
    for path in files:
        path.read_text("utf-8")
    assert sum(path.stat().st_size for path in files) < 5e6


def test_all_named_weights_are_there() -> None:
    assert weights_folder("demo") is not None
    assert {target for target, _ in shipped_drafters()} == {"demo", "smollm2"}
    for target, method in shipped_drafters():
        folder = shipped_folder(target, method)
        assert folder is not None
        assert json.loads((folder / "config.json").read_text())
