"""`draftree doctor --export`: an exported drafter is examined without its engine; and the target that an export names."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftree.doctor.export_check import examine
from draftree.errors import UserError
from draftree.target.target_names import SMOLLM2_HUB_ID, public_name
from draftree.training.export import drafter_folder, export


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported drafter of the demo."""
    export("demo/eagle3", "speculators", tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("drafter", "form"),
    [("eagle3", "speculators"), ("eagle3", "eagle"), ("eagle", "eagle"), ("medusa", "vllm-medusa")],
)
def test_exported_folder_passes(tmp_path: Path, drafter: str, form: str) -> None:
    export(f"demo/{drafter}", form, tmp_path / "out")
    report = examine(tmp_path / "out")
    assert (report.drafter, report.format, report.faults) == (drafter, form, ())


def test_an_eagle_for_the_official_code_is_told_to_be_none_for_vllm(tmp_path: Path) -> None:
    for form, told in (("eagle", 1), ("vllm-eagle", 0)):
        export("demo/eagle", form, tmp_path / form)
        report = examine(tmp_path / form)
        assert report.faults == ()
        assert sum("export it as vllm-eagle" in remark for remark in report.remarks) == told


def test_a_damaged_one_is_told(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    for change, told in (
        (
            {"fc.weight": whole["fc.weight"] * float("nan")},
            "fc.weight has values that are not finite",
        ),
        ({"fc.weight": torch.zeros_like(whole["fc.weight"])}, "fc.weight has only zeros"),
        ({"fc.weight": whole["fc.weight"][:5].clone()}, "mis-shaped"),
    ):
        save_file(whole | change, folder / "model.safetensors", metadata={"format": "pt"})
        assert any(told in fault for fault in examine(folder).faults)
    del whole["fc.weight"]
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    assert "missing tensors: fc.weight" in examine(folder).faults[0]


def test_the_target_is_named_for_others(tmp_path: Path) -> None:
    """By its hub id: no other program knows `smollm2`."""
    out = tmp_path / "out"
    export("smollm2/eagle3", "eagle", out)
    assert public_name("smollm2") == SMOLLM2_HUB_ID
    assert public_name("demo") == "demo"
    assert drafter_folder("smollm2/eagle3") == drafter_folder("eagle3", "smollm2")


def test_a_target_that_nobody_finds_is_remarked(folder: Path) -> None:
    assert "neither a hub id nor a folder" in examine(folder).remarks[0]
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = SMOLLM2_HUB_ID
    (folder / "config.json").write_text(json.dumps(config))
    assert examine(folder).remarks == ()
    assert examine(folder).verifier == SMOLLM2_HUB_ID


def test_folder_that_is_no_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="allowed is none"):
        examine(drafter_folder("demo/edd"))
    with pytest.raises(UserError):
        examine(tmp_path)


def test_the_command_tells_and_fails(
    folder: Path, draftree: Callable[..., tuple[int, str, str]]
) -> None:
    status, out, _ = draftree("doctor", "--export", folder, "--json")
    assert (status, json.loads(out)["faults"]) == (0, [])
    (folder / "model.safetensors").unlink()
    status, out, _ = draftree("doctor", "--export", folder)
    assert status == 1
    assert "an engine cannot use it" in out
