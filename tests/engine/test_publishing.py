"""Model cards and uploads, the notebooks, the citation, and lm-evaluation-harness."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from huggingface_hub import HfApi

import draftree
from draftree.cli.app import main
from draftree.registry import build
from draftree.target.target_names import shipped_folder
from draftree.testing.fakes import tiny_target
from draftree.weights import demo_folder

ROOT = Path(__file__).resolve().parents[2]


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in args])
    return int(ended.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = shipped_folder("demo", "edd")
    assert source is not None
    return shutil.copytree(source, tmp_path / "edd")


def test_a_card_says_what_the_folder_says_and_push_what_it_would_upload(
    folder: Path, capsys
) -> None:
    assert run("push", folder, "me/edd", "--dry-run", "--license", "apache-2.0") == 0
    assert f"The card is '{folder / 'README.md'}'.\nme/edd: README.md (" in capsys.readouterr().out
    text = (folder / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["library_name"] == "draftree"
    assert about["license"] == "apache-2.0"
    assert "edd" in about["tags"]
    assert "| hidden_layer | -4 |" in body
    assert "| training: epochs | 3.0 |" in body
    assert run("push", folder, "me/edd", "--dry-run", "--license", "mit") == 2
    assert "exists; --force overwrites it, without --result" in capsys.readouterr().err
    assert (folder / "README.md").read_text() == text
    assert run("push", folder, "me/edd", "--dry-run", "--license", "mit", "--force") == 0
    assert "license: mit" in (folder / "README.md").read_text()
    (folder / "README.md").write_text("of my own")
    (folder / "training.pt").write_bytes(b"state")
    capsys.readouterr()
    assert run("push", folder, "me/edd", "--dry-run", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["uploaded"] is False
    assert said["card"] is None
    assert (folder / "README.md").read_text() == "of my own"
    assert {"README.md", "config.json", "model.safetensors"} <= set(said["files"])
    assert "training.pt" not in said["files"]
    assert run("push", folder, "edd", "--dry-run") == 2
    assert "allowed is OWNER/NAME" in capsys.readouterr().err


def test_a_card_of_what_is_no_drafter_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    assert run("push", tmp_path, "me/edd", "--dry-run") == 2
    assert "holds no drafter of draftree" in capsys.readouterr().err
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize(
    ("method", "file"),
    [
        ("medusa", "medusa_lm_head.safetensors"),
        ("hydra", "hydra_lm_head.safetensors"),
        ("vdm", "pytorch_model.bin"),
    ],
)
def test_the_weights_are_uploaded_under_each_of_their_names(
    method: str, file: str, tmp_path: Path, capsys
) -> None:
    build("drafter", method).fresh(tiny_target()).save(tmp_path)
    if not (tmp_path / file).exists():
        (tmp_path / "model.safetensors").rename(tmp_path / file)
    assert run("push", tmp_path, "me/one", "--dry-run", "--json") == 0
    assert file in json.loads(capsys.readouterr().out)["files"]
    (tmp_path / file).unlink()
    assert run("push", tmp_path, "me/one", "--dry-run", "--json") == 2
    assert "needed is a trained drafter's folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["me/foo--bar", "me/foo.", "me/a/b", "me/x.git", "/x"])
def test_a_name_that_the_hub_refuses_is_refused_first(name: str, folder: Path, capsys) -> None:
    assert run("push", folder, name, "--dry-run") == 2
    assert f"the repository is '{name}', allowed is OWNER/NAME: " in (
        told := capsys.readouterr().err
    )
    assert told.count("\n") == 1
    assert not (folder / "README.md").exists()


def test_an_upload_without_a_connection_is_told_in_one_line(
    folder: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("no route to host")

    monkeypatch.setattr(HfApi, "create_repo", fail)
    assert run("push", folder, "me/edd") == 2
    assert capsys.readouterr().err == "draftree: cannot upload to 'me/edd': no route to host\n"


def test_a_card_shows_a_results_figures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftree.errors import UserError
    from draftree.evaluation.model_card import card

    ends = {"acceptance_length": [1.9, 2.1], "counted_speedup": [1.2, 1.4]}
    row = {"drafter": f"edd:checkpoint={folder}", "policy": "pct", "temperature": 0.0, "acceptance_length": 2.0,
           "alpha": 1.0, "nodes_per_step": 9.0,
           "depth_per_step": 2.0, "same_output": True, "prompts": 3, "counted_speedup": 1.3, "intervals": ends,
           "per_prompt": {"tokens": [3] * 3}}  # fmt: skip
    result = {"rows": [row], "simulated": False, "provenance": {
        "hardware": {"device": "a laptop"}, "suite": {"name": "demo"}, "date": "2026-01-02T", "seed": 0,
        "target": {"name": "demo"}}}  # fmt: skip
    text = card(folder, result)
    assert "Measured on a laptop, 3 prompts of demo, 2026-01-02." in text
    assert "| pct | 2.00 [1.90, 2.10] | 9.0 | 1.30 [1.20, 1.40] |" in text
    monkeypatch.chdir(folder.parent)
    shipped = shipped_folder("demo", "edd")
    assert shipped is not None
    for spec in ("edd", "edd/", "./edd", str(folder), "edd:hidden_layer=-4,checkpoint=edd"):
        assert "| pct | 2.00" in card(Path("edd"), result | {"rows": [row | {"drafter": spec}]})
    with pytest.raises(UserError, match="rows of edd/, needed is one of '"):
        card(shipped, result | {"rows": [row | {"drafter": "edd/"}]})
    monkeypatch.chdir(folder)
    assert "| pct | 2.00" in card(shipped, result | {"rows": [row | {"drafter": "edd"}]})
    for spec in ("edd", "other", "edd:checkpoint=other", f"edd:checkpoint={shipped}"):
        with pytest.raises(UserError, match=f"rows of {re.escape(spec)}, needed is one of '"):
            card(folder, result | {"rows": [row | {"drafter": spec}]})
    about = {**result["provenance"], "target": {"name": "smollm2"}}
    with pytest.raises(UserError, match="is of target 'smollm2', needed is 'demo'"):
        card(folder, result | {"provenance": about})


def test_the_citation_is_of_this_version() -> None:
    about = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert about["version"] == draftree.__version__
    assert about["title"] == "draftree"
    assert {"cff-version", "message", "authors"} <= set(about)


@pytest.mark.parametrize("name", ["compare", "train"])
def test_a_notebook_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """Its cells, in order and in one namespace, as a kernel would run them; none asks for a magic."""
    monkeypatch.chdir(tmp_path)
    book = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text("utf-8"))
    assert book["nbformat"] == 4
    space: dict[str, Any] = {"__name__": "__main__"}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "a notebook is kept without outputs"
            exec(compile("".join(cell["source"]), f"{name}.ipynb", "exec"), space)
    assert space["ours"].text


def test_the_harness_has_the_same_generations_with_drafts() -> None:
    pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    from draftree.evaluation.lm_evaluation import DraftreeLM

    assert get_model("draftree") is DraftreeLM
    asked = [("Tom has 3 apples and buys 4.", {"until": ["\n"], "max_gen_toks": 12}),
             ("A tram", {"until": ["zz"], "max_gen_toks": 9}), ("How many", {"until": ["\n"], "max_gen_toks": 12})]  # fmt: skip
    requests = [Instance("generate_until", {}, words, i) for i, words in enumerate(asked)]
    how = {"pretrained": str(demo_folder()), "device": "cpu", "dtype": "float32", "batch_size": 2}
    plain = get_model("hf")(**how).generate_until(requests, disable_tqdm=True)
    drafted = DraftreeLM(**how, drafter="edd", policy="chain")
    passes = list[int]()
    drafted.model.register_forward_pre_hook(lambda *_: passes.append(1))
    assert drafted.generate_until(requests, disable_tqdm=True) == plain
    assert 0 < len(passes) < 30
