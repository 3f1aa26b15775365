"""Targets whose heads are no even cut of the hidden size, in every trained drafter.

Reported for EAGLE-3 and DFlash in other engines, where layers of a drafter took the hidden size
divided by the heads.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from architectures import EXPERTS
from draftree.drafters.neural.draft_configs import of_values
from draftree.errors import UserError
from draftree.registry import build as part
from kind_models import PROMPT, TRAINED, expected, fresh, target, written
from reports import report
from selection import one_in

MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
       "num_key_value_heads": 4}  # fmt: skip
ROUTED = {**EXPERTS, "num_local_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
          "first_k_dense_replace": 3}  # fmt: skip
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "3-heads-of-16-in-40": (
        "qwen3",
        {
            "hidden_size": 40,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_hidden_layers": 5,
        },
    ),
    "explicit-width": ("llama", {"head_dim": 24}),
    "one-key-head": ("llama", {"num_key_value_heads": 1}),
    "biases-of-three-projections": ("qwen2", {"num_key_value_heads": 1}),
    "all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "keys-wider-than-values": ("deepseek_v3", {**MLA, **ROUTED}),
    "head-divided": (
        "granite",
        {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    ),
    "head-multiplied": ("cohere", {"logit_scale": 0.5}),
    "head-input-scaled": ("minicpm3", {**MLA, "dim_model_base": 8}),
}
"""Name: `model_type`, and what differs from the usual sizes."""


@report(
    "vllm-project/speculators#517",
    "Draft checkpoints and exports",
    "Targets whose hidden size is no multiple of their heads could not get a drafter.",
)
@pytest.mark.parametrize(("name", "kind"), one_in(3, TRAINED, list(TARGETS)))
def test_drafters_are_made_saved_and_opened_and_write_the_targets_text(
    name: str, kind: str, tmp_path: Path
) -> None:
    model_type, changes = TARGETS[kind]
    to = target(model_type, **changes)
    fresh(name, to).save(tmp_path / "d")
    opened = part("drafter", str(tmp_path / "d")).open(to)
    assert written(to, opened, [PROMPT, [3, 8]], 8) == expected(to, [PROMPT, [3, 8]], 8)


@pytest.mark.parametrize("kind", ["head-divided", "head-multiplied", "head-input-scaled"])
def test_a_head_that_is_lent_gives_the_targets_own_logits(kind: str) -> None:
    model_type, changes = TARGETS[kind]
    decoder = target(model_type, **changes).decoder
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        states = decoder.stack(input_ids=ids, use_cache=False).last_hidden_state[0]
        wanted = decoder.model(input_ids=ids, use_cache=False).logits[0]
    assert decoder._behind_head is not None, "no pass of the whole model for each draft"
    assert torch.allclose(decoder.head(states), wanted, rtol=1e-9, atol=1e-9)
    some = torch.tensor([4, 9, 2])
    assert torch.allclose(decoder.head_for(some)(states), wanted[:, some], rtol=1e-9, atol=1e-9)


def test_heads_without_a_width_of_their_own_must_divide_the_hidden_size() -> None:
    sizes = {"hidden_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3}
    with pytest.raises(UserError, match="40"):
        of_values(sizes)
    assert of_values(sizes | {"head_dim": 16}).head_dim == 16


@pytest.mark.parametrize(
    ("name", "biased"),
    one_in(
        2,
        ["eagle", "eagle3", "peagle", "dflash"],
        [("q_proj",), ("q_proj", "k_proj", "v_proj"), ("v_proj", "o_proj")],
    ),
)
def test_biases_are_where_the_tensors_have_them(
    name: str, biased: tuple[str, ...], tmp_path: Path
) -> None:
    to = target("llama")
    drafter = fresh(name, to)
    drafter.save(tmp_path / "d")
    file = tmp_path / "d" / "model.safetensors"
    tensors = load_file(file)
    before = written(to, part("drafter", str(tmp_path / "d")).open(to), [PROMPT])
    for key in [
        key for key in tensors if key.endswith(tuple(f"self_attn.{one}.weight" for one in biased))
    ]:
        tensors[key.replace("weight", "bias")] = torch.linspace(-3, 3, len(tensors[key])).to(
            tensors[key].dtype
        )
    save_file(tensors, file, {"format": "pt"})
    opened: Any = part("drafter", str(tmp_path / "d")).open(to)
    state = {
        key: value for key, value in opened.model.state_dict().items() if key.endswith("_proj.bias")
    }
    assert {key.split(".")[-2] for key in state} == set(biased)
    assert all(
        torch.allclose(value, torch.linspace(-3, 3, len(value)).to(value), atol=1e-2)
        for value in state.values()
    )
    assert written(to, opened, [PROMPT]) == before == expected(to, [PROMPT])
