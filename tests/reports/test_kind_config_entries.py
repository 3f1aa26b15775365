"""Entries of a drafter's config that change what its network computes are used or refused by name.

Reported for exported EAGLE-3 layers in other engines, whose sliding window was ignored: they
drafted worse without a word.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from architectures import build
from draftree.cli.app import main
from draftree.errors import DraftreeWarning, UserError, format_value
from draftree.formats import config_entries
from draftree.formats.block_drafters import Sight
from draftree.formats.config_entries import Table
from draftree.models.causal_lm import CausalLM
from draftree.registry import build as part
from draftree.target.target import Target
from kind_models import PROMPT, changed, expected, fresh, target, written
from reports import report

TABLES = {
    "llama": config_entries.LLAMA,
    "eagle": config_entries.EAGLE,
    "peagle": config_entries.PEAGLE,
    "speculators": config_entries.SPECULATORS,
    "glide": config_entries.FLAT_GLIDE,
    "qwen3": config_entries.QWEN3,
    "blocks": config_entries.FLAT_BLOCK_DRAFTER,
    "medusa": config_entries.MEDUSA,
    "speculated blocks": config_entries.SPECULATED_BLOCKS,
    "hydra": config_entries.HYDRA,
}
CHANGES: dict[str, Any] = {
    "layer_types": ["sliding_attention"],
    "use_sliding_window": True,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "logit_scale": 0.06,
    "attention_multiplier": 0.01,
    "query_pre_attn_scalar": 256,
    "attention_sinks": True,
    "num_sink_tokens": 4,
    "qk_norm": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "sandwich_norm": True,
    "partial_rotary_factor": 0.5,
    "rope_interleave": True,
    "no_rope_layers": [1],
    "attention_chunk_size": 16,
    "num_experts": 4,
    "kv_lora_rank": 16,
    "use_parallel_residual": True,
}
"""Entries of other networks, with values that switch them on."""


@pytest.fixture(scope="module")
def llama() -> Target:
    return target("llama")


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What is warned of in a test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told: list[str] = []
        yield told
        told += [str(one.message) for one in caught if issubclass(one.category, DraftreeWarning)]


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle", "glide"])
@pytest.mark.parametrize("entry", CHANGES)
def test_entries_of_other_networks_are_refused_by_name(
    name: str, entry: str, llama: Target, tmp_path: Path
) -> None:
    fresh(name, llama).save(tmp_path / "d")
    changed(tmp_path / "d", **{entry: CHANGES[entry]})
    with pytest.raises(UserError, match=entry):
        part("drafter", f"{name}:checkpoint={tmp_path / 'd'}").open(llama)


@pytest.mark.parametrize("name", ["dflash", "dspark", "jetspec"])
@pytest.mark.parametrize(
    "entry", sorted(CHANGES.keys() - {"layer_types", "use_sliding_window", "qk_norm"})
)
def test_blocks_refuse_them_too(name: str, entry: str, llama: Target, tmp_path: Path) -> None:
    fresh(name, llama).save(tmp_path / "d")
    changed(tmp_path / "d", **{entry: CHANGES[entry]})
    with pytest.raises(UserError, match=entry):
        part("drafter", f"{name}:checkpoint={tmp_path / 'd'}").open(llama)


@pytest.mark.parametrize(
    "name", ["eagle", "eagle3", "peagle", "glide", "medusa", "hydra", "dflash", "dspark"]
)
def test_unknown_entries_are_named_in_a_warning_unless_they_are_switched_off(
    name: str, llama: Target, tmp_path: Path
) -> None:
    fresh(name, llama).save(tmp_path / "d")
    part("drafter", str(tmp_path / "d")).open(
        llama
    )  # warnings are errors: nothing that is written is unknown
    changed(tmp_path / "d", tomorrows_flag=False, tomorrows_list=[], tomorrows_factor=0.5)
    with pytest.warns(DraftreeWarning, match=r"tomorrows_factor 0\.5$"):
        opened = part("drafter", str(tmp_path / "d")).open(llama)
    assert written(llama, opened, [PROMPT], 6) == expected(llama, [PROMPT], 6)


@pytest.mark.parametrize("name", TABLES)
def test_an_entry_stands_in_one_column_of_a_table(name: str) -> None:
    table: Table = TABLES[name]
    assert not table.used & table.harmless
    doubly = (table.used | table.harmless) & table.refused.keys()
    assert doubly <= {
        "use_sliding_window",
        "hydra_head_arch",
        "grounded_heads",
        "hidden_state_offset",
    }, "used where allowed"


@pytest.mark.parametrize(
    ("table", "config"),
    [(config_entries.LLAMA, LlamaConfig()), (config_entries.QWEN3, Qwen3Config())],
)
def test_a_whole_config_of_transformers_is_known(table: Table, config: Any) -> None:
    table.check({**config.to_dict(), **config.to_diff_dict()}, "config.json", "eagle3")


def test_the_entries_of_published_drafters_are_known() -> None:
    """Configs as DeepSpec, z-lab and SpecForge publish them; a warning would be an error here."""
    qwen3 = {
        "architectures": ["Qwen3DSparkModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": None,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 160,
        "layer_types": ["full_attention"] * 2,
        "max_position_embeddings": 512,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 4,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 320,
    }
    dspark = {
        "block_size": 7,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "mask_token_id": 319,
        "markov_head_type": "vanilla",
        "markov_rank": 16,
        "num_anchors": 512,
        "target_layer_ids": [0, 1, 2],
    }
    dflash = {
        "block_size": 8,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "rope_scaling": None,
        "rope_theta": 1e4,
    }
    config_entries.FLAT_BLOCK_DRAFTER.check(qwen3 | dspark, "config.json", "dspark")
    nested = {"mask_token_id": 319, "target_layer_ids": [0, 2], "causal_head": True}
    config_entries.FLAT_BLOCK_DRAFTER.check(
        qwen3 | dflash | {"dflash_config": nested}, "config.json", "dflash"
    )
    config_entries.FLAT_BLOCK_DRAFTER.check(nested, "config.json", "dflash")
    llama = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 256,
        "draft_vocab_size": 160,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "torch_dtype": "float16",
        "transformers_version": "4.36.2",
        "sliding_window": None,
        "target_hidden_size": 64,
        "eagle_config": {},
        "max_window_layers": 28,
    }
    config_entries.EAGLE.check_layer(llama, "config.json", "eagle3")
    config_entries.EAGLE.check_layer(
        llama | {"sliding_window": 4096, "use_sliding_window": False}, "config.json", "eagle3"
    )


def test_a_window_that_no_entry_switches_on_is_named(warned: list[str]) -> None:
    with pytest.warns(DraftreeWarning, match="sliding_window 4096"):
        config_entries.EAGLE.check_layer({"sliding_window": 4096}, "config.json", "eagle3")


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        ({"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}, Sight(True, 3)),
        ({"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}, Sight(False)),
        ({"layer_types": ["sliding_attention"], "sliding_window": 3}, Sight(True, 3)),
        ({"use_sliding_window": False, "sliding_window": 3}, Sight(False)),
    ],
)
def test_the_windows_of_blocks_are_those_of_transformers(
    window: dict[str, Any], wanted: Sight, llama: Target, tmp_path: Path
) -> None:
    fresh("dflash", llama).save(tmp_path / "d")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    (tmp_path / "d" / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "layer_types"} | window)
    )
    opened: Any = part("drafter", str(tmp_path / "d")).open(llama)
    assert opened.model.layout.sights == (wanted,)
    assert written(llama, opened, [PROMPT], 8) == expected(llama, [PROMPT], 8)


def test_a_window_that_is_switched_off_and_named_is_refused(llama: Target, tmp_path: Path) -> None:
    fresh("dflash", llama).save(tmp_path / "d")
    window = {
        "layer_types": ["sliding_attention"],
        "sliding_window": 3,
        "use_sliding_window": False,
    }
    changed(tmp_path / "d", **window)
    with pytest.raises(UserError, match="use_sliding_window"):
        part("drafter", str(tmp_path / "d")).open(llama)


@report(
    "vllm-project/speculators#684",
    "Draft checkpoints and exports",
    "The window that a draft layer was trained with was ignored when it was served.",
)
@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle"])
def test_the_window_of_an_exported_layer_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The case as it was reported: the entries are merged into an exported config."""
    demo = Target.load("demo")
    spec = name
    if name == "peagle":  # none is shipped
        fresh(name, demo).save(tmp_path / "own")
        spec = str(tmp_path / "own")
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "export",
                spec,
                "--target",
                "demo",
                "--format",
                "speculators",
                "--out",
                str(tmp_path / "d"),
            ]
        )
    assert not ended.value.code, capsys.readouterr().err
    part("drafter", str(tmp_path / "d")).open(demo)
    layer = {"sliding_window": 2, "use_sliding_window": True, "layer_types": ["sliding_attention"]}
    changed(tmp_path / "d", transformer_layer_config=layer)
    with pytest.raises(
        UserError, match=r"layer_types \['sliding_attention'\], allowed is full_attention"
    ):
        part("drafter", str(tmp_path / "d")).open(demo)


STRAY = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    "entries", [("sliding_window",), ("sliding_window", "layer_types")], ids=len
)
@pytest.mark.parametrize("kind", ["llama", "olmo2", "gemma", "stablelm"])
def test_a_targets_entry_that_its_model_does_not_read_is_named(
    kind: str, entries: tuple[str, ...]
) -> None:
    """A window beside a model without windows: the text is the one of the network, which sees all tokens."""
    model = build(kind, {"num_hidden_layers": 4, **{name: STRAY[name] for name in entries}})
    with pytest.warns(DraftreeWarning) as told:
        to = Target(CausalLM(model), kind)
    assert [str(w.message) for w in told if w.category is DraftreeWarning] == [
        f"the target's config has {name} {format_value(STRAY[name])}, which a {kind} has not: it is not used"
        for name in sorted(entries)
    ]
    ids, stored = (
        torch.tensor([PROMPT * 3]),
        {"use_cache": False, "do_sample": False, "pad_token_id": 0, "eos_token_id": None},
    )
    wanted = model.generate(ids, max_new_tokens=10, **stored)[0, ids.shape[1] :].tolist()
    assert (
        expected(to, [PROMPT * 3], 10)
        == written(to, part("drafter", "suffix").open(to), [PROMPT * 3], 10)
        == [wanted]
    )


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_a_targets_own_window_is_used(kind: str) -> None:
    model = build(kind, {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0})
    assert CausalLM(model).hf.window == 3
