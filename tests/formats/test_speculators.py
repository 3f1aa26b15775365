"""Exported drafters in the library `speculators`: it opens them whole, and computes what they compute here.

The library asks for other versions of transformers and torch than ours, so that these tests are for
those who have it: one way is `pip install --no-deps --target FOLDER speculators openai loguru …`,
and FOLDER behind everything else on PYTHONPATH.
"""

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftree.doctor import forward_parity
from draftree.drafters.neural.block_drafter import ParallelDrafter
from draftree.drafters.peagle import PEAGLEDrafter
from draftree.registry import build
from draftree.target.target import Target
from draftree.training.export import export
from folders import target_folder
from forests import worst

SPECS = (
    "dflash:layers=2,block=5",
    "dflash:block=4,draft_vocab=100",
    "dspark:block=4,rank=6",
    "dspark:block=4,rank=6,markov=gated",
    "dspark:block=4,rank=6,markov=rnn,confidence=false",
    "jetspec:layers=2,block=5",
    "peagle:layers=2,drafts=4",
    "peagle:drafts=3,draft_vocab=100",
)
COUNT = 14
"""Tokens of the text."""
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def library() -> Any:
    """The library's class that opens any of its folders."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "speculators.models",
            reason="the library speculators is not installed",
            exc_type=ImportError,
        )
        return importlib.import_module("speculators").SpeculatorModel


def theirs(model: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the library's training forward measures its loss by: logits, and where they stand."""
    told: dict[str, Any] = {}

    def grab(*values: Any, **named: Any) -> tuple[None, dict[str, Any]]:
        told.update(named | ({"logits": values[0]} if values else {}))
        return None, {}

    monkeypatch.setattr(sys.modules[type(model).__module__], "compute_metrics", grab)
    with torch.no_grad():
        model(**given)
    return told


@pytest.mark.parametrize("spec", SPECS)
def test_an_exported_one_opens_there_and_says_the_same(
    spec: str, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = target_folder(tmp_path / "target")
    t = Target.load(str(folder), torch.float32)
    torch.manual_seed(0)
    fresh: Any = build("drafter", spec).fresh(t)
    fresh.fit_vocabulary(np.arange(t.decoder.vocab))
    for parameter in fresh.model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    fresh.save(tmp_path / "ours")
    export(str(tmp_path / "ours"), "speculators", tmp_path / "theirs")
    drafter: Any = build("drafter", str(tmp_path / "theirs")).open(t)
    config = library.config_class.from_pretrained(tmp_path / "theirs")
    config.transformer_layer_config._attn_implementation = "eager"
    model = library.from_pretrained(tmp_path / "theirs", config=config, dtype=torch.float32).eval()
    own, read = dict(drafter.model.state_dict()), dict(model.state_dict())
    assert set(own) - set(read) <= {"lm_head.d2t", "lm_head.t2d"}, (
        "whose places are d2t and t2d there"
    )
    other = {
        name
        for name, value in own.items()
        if name in read and not torch.equal(value, read[name].to(value))
    }
    assert other <= {"embed_tokens.weight", "lm_head.weight"}, (
        "which it may take from the target, in full precision"
    )
    tokens = np.random.default_rng(1).integers(4, 100, (1, COUNT))
    batch = forward_parity.batch_of(t, drafter, tokens)
    said = {
        "hidden_states": torch.cat([batch.hidden[layer] for layer in drafter.needs.hidden], -1),
        "document_ids": torch.zeros_like(batch.tokens), "verifier_last_hidden_states": torch.zeros(1, COUNT, 32),
        "input_ids": batch.tokens, "loss_mask": torch.zeros_like(batch.tokens),
    }  # fmt: skip
    if isinstance(drafter, ParallelDrafter):
        said["loss_mask"][0, 6] = 1
        logits = theirs(model, said | {"max_anchors": 1}, monkeypatch)["logits"][
            0, -drafter.ahead :
        ]
        ours = drafter.blocks(batch, torch.tensor([[6]]))[0, 0]
    else:
        assert isinstance(drafter, PEAGLEDrafter)
        pairs = {"input_ids": batch.tokens[:, 1:], "hidden_states": said["hidden_states"][:, :-1]}
        pairs |= {
            name: torch.ones_like(batch.tokens[:, 1:]) for name in ("document_ids", "loss_mask")
        }
        pairs |= {
            "num_depths": drafter.ahead,
            "down_sample_ratio": 1.0,
            "verifier_last_hidden_states": torch.zeros(1, 13, 32),
        }
        pairs["loss_mask"][0, 0] = 0  # no chain begins before the text
        told = theirs(model, said | pairs, monkeypatch)
        slots = told["depth"] > 0
        assert slots.any()
        chains, depths = told["anchor_pos"][slots][None], told["depth"][slots][None]
        ours, logits = (
            drafter.model.logits(drafter._outputs(batch, chains, depths))[0],
            told["logits"][0],
        )
    assert worst(ours.detach(), logits) < 5e-3
