"""P-EAGLE: several tokens in one pass, trained as what it decodes as, opened in both layouts."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from architectures import target
from drafting import after_all, perturbed, tokens_of
from draftree.doctor import forward_parity
from draftree.drafters.peagle import PEAGLE, PEAGLEDrafter, draw_slots
from draftree.errors import UserError
from draftree.registry import build, method_of
from draftree.target.target import Target
from draftree.training.export import export
from forests import worst


def drafter_of(t: Target, **knobs: Any) -> PEAGLEDrafter:
    return perturbed(PEAGLE(**({"layers": 2, "drafts": 4} | knobs)), t)  # type: ignore[return-value]


def test_the_comparison_sees_slots_at_the_roots_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of the slots have to go on."""
    t = target("llama")
    drafter = drafter_of(t)
    stock = drafter.model.forward

    def still(tokens: Any, features: Any, positions: Any, *rest: Any) -> Any:
        return stock(
            tokens,
            features,
            positions
            - (tokens == drafter.model.mask).cumsum(1) * torch.is_inference_mode_enabled(),
            *rest,
        )

    monkeypatch.setattr(drafter.model, "forward", still)
    assert forward_parity.largest_difference(t, drafter, tokens_of(1, 17, 0), 4, 1) > 1e-4


def test_the_objective_entry_by_entry() -> None:
    """KL of true pairs and of the chosen slots alike, their mean times what is learnt."""
    t = target("llama")
    drafter = drafter_of(t)
    batch = forward_parity.batch_of(t, drafter, tokens_of(1, 13, 3))
    with torch.no_grad():
        batch = replace(batch, generators=(torch.Generator().manual_seed(1),))
        chains, depths, valid = draw_slots(batch, 4, 0.7, 0.2)
        after, losses = after_all(batch)[0].log_softmax(-1), []
        entries = list(zip(chains[0].tolist(), depths[0].tolist(), strict=True))
        places = [(a, 0) for a in range(11)] + [
            e for e, there in zip(entries, valid[0], strict=True) if there
        ]
        logits = drafter.model.logits(drafter._outputs(batch, chains, depths))[0]
        slots = {entry: 12 + i for i, entry in enumerate(entries)}
        for a, d in places:
            q, p = logits[a if d == 0 else slots[a, d]].log_softmax(-1), after[a + d + 1]
            losses.append(float((p.exp() * (p - q)).sum()))
        batch = replace(batch, generators=(torch.Generator().manual_seed(1),))
        assert float(drafter.loss(batch)) == pytest.approx(float(np.mean(losses)), rel=1e-4)


def test_deeper_slots_are_learnt_behind_fewer_pairs() -> None:
    t = target("llama")
    batch = forward_parity.batch_of(t, drafter_of(t), tokens_of(2, 40, 3))
    chains, depths, valid = draw_slots(batch, 6, 0.5, 0.1)
    for row in range(2):
        by_depth = [set(chains[row][valid[row] & (depths[row] == d)].tolist()) for d in range(1, 6)]
        assert all(a >= b for a, b in itertools.pairwise(by_depth))
        assert len(by_depth[0]) in range(16, 20)
        assert len(by_depth[3]) in (1, 2, 3)


@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_without_our_entry_is_recognised_in_both_layouts(
    nested: bool, tmp_path: Path
) -> None:
    t = target("llama")
    drafter = drafter_of(t, draft_vocab=30)
    drafter.fit_vocabulary(np.arange(t.decoder.vocab))
    for parameter in drafter.model.parameters():
        parameter.data = parameter.data.half().double()
    drafter.save(tmp_path)
    wanted = forward_parity.draft_log_probs(t, drafter, tokens_of(1, 15, 5), 4, 1)
    said = {
        k: v
        for k, v in json.loads((tmp_path / "config.json").read_text()).items()
        if k != "draftree"
    }
    if nested:
        proposal = {"proposal_type": "greedy", "speculative_tokens": said.pop("num_depths")}
        outside = {
            k: said.pop(k)
            for k in ("mask_token_id", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
        }
        how = {"algorithm": "peagle", "proposal_methods": [proposal]}
        said = outside | {
            "speculators_model_type": "peagle",
            "transformer_layer_config": said,
            "speculators_config": how,
        }
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert method_of(tmp_path) == "peagle"
    assert torch.equal(
        forward_parity.draft_log_probs(
            t, build("drafter", str(tmp_path)).open(t), tokens_of(1, 15, 5), 4, 1
        ),
        wanted,
    )


@pytest.mark.parametrize("draft_vocab", [0, 30])
def test_an_exported_one_is_the_same_with_an_embedding_of_its_own(
    draft_vocab: int, tmp_path: Path
) -> None:
    target("llama").decoder.model.save_pretrained(tmp_path / "target")
    t = Target.load(str(tmp_path / "target"), torch.float64, "cpu")
    drafter = drafter_of(t, draft_vocab=draft_vocab)
    drafter.fit_vocabulary(np.arange(t.decoder.vocab))
    drafter.save(tmp_path / "ours")
    drafter = build("drafter", str(tmp_path / "ours")).open(t)
    export(str(tmp_path / "ours"), "speculators", tmp_path / "theirs", str(tmp_path / "target"))
    export(str(tmp_path / "theirs"), "speculators", tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (
        tmp_path / "theirs" / "config.json"
    ).read_text()
    said = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert "draftree" not in said
    assert said["transformer_layer_config"]["num_hidden_layers"] == 2
    assert said["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert (said["mask_token_id"], said["draft_vocab_size"]) == (
        drafter.model.mask,
        draft_vocab or t.decoder.vocab,
    )
    opened = build("drafter", str(tmp_path / "theirs")).open(t)
    one, other = (
        forward_parity.draft_log_probs(t, d, tokens_of(1, 15, 5), 4, 1).exp()
        for d in (opened, drafter)
    )
    assert worst(one, other) < 1e-3, "the embedding is a copy in float16"


@pytest.mark.parametrize(
    ("config", "tensor", "told"),
    [
        ({"fc_norm": True}, None, "fc_norm true, allowed is false"),
        ({"mask_token_id": None}, None, "mask_token_id None, allowed are 0 … 70"),
        ({"hidden_size": 64}, None, "hidden_size 64, allowed is the target's: 32"),
        ({}, "layers.1.mlp.up_proj.weight", "missing tensors: layers.1.mlp.up_proj.weight"),
    ],
)
def test_unfitting_config_entries_are_named_in_a_line(
    config: dict[str, Any], tensor: str | None, told: str, tmp_path: Path
) -> None:
    t = target("llama")
    drafter_of(t).save(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | config))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != tensor}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=told) as error:
        build("drafter", str(tmp_path)).open(t)
    assert "\n" not in str(error.value)
