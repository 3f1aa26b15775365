"""The folder that makes a `custom_generate` repository, loaded as transformers loads it from the hub."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import draftree

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "custom_generate"


@pytest.mark.parametrize("options", [{}, {"drafter": "suffix", "policy": "chain:length=2"}])
def test_a_repository_generates_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    repository = tmp_path / "draftree"
    shutil.copytree(RECIPE, repository)
    name = draftree.demo_folder()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    ids = AutoTokenizer.from_pretrained(name)("def main(", return_tensors="pt")["input_ids"]
    plain = model.generate(ids, max_new_tokens=16)
    drafted = model.generate(
        ids, max_new_tokens=16, custom_generate=str(repository), trust_remote_code=True, **options
    )
    assert torch.equal(drafted, plain)


def test_a_wrong_option_is_told() -> None:
    model = AutoModelForCausalLM.from_pretrained(draftree.demo_folder(), dtype="float32")
    with pytest.raises(draftree.UserError, match="did you mean 'suffix'"):
        model.generate(
            torch.tensor([[1, 5]]),
            max_new_tokens=4,
            custom_generate=str(RECIPE),
            trust_remote_code=True,
            drafter="sufix",
        )
