"""Whatever a file holds, a program that reads it succeeds or ends with one line.

Small files of every format are mutated by chance (`mutations.py`). What still opens is used, and
its text must be the target's. `fuzz_files.py` does the same for thousands of mutations, under
limits of time and memory.
"""

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from architectures import fresh, target
from draftree.cli.arguments import quiet
from draftree.engine import Engine
from draftree.errors import MAX_MESSAGE_CHARACTERS, UserError
from draftree.policies.chain import Chain
from draftree.registry import KINDS, build, knobs, names
from draftree.target.config_size_checks import check_shapes
from draftree.testing.conformance import COSTS
from file_formats import FORMATS, PROMPT, PUBLISHED, TRAINABLE, original, plain, refusal, written
from file_formats import use as use_format
from fuzz_files import Hang, ended, limited
from mutations import DEEP, mutate

# Specs.

VALUES = [
    "", "x", "-1", "0", "1", "2", "3", "0.5", "1.5", "-0.5", "nan", "inf", "1e400", "1000000000000", "9" * 5000, "true", "none",
    "None", "ce", "a" * 9000, "\0", "\ud800", "..", "/", "=", "+", "1+2",
]  # fmt: skip


def odd_spec(kind: str, rng: random.Random) -> str:
    """A spec with odd values, keys or characters."""
    name = rng.choice(names(kind))
    keys = [*knobs(kind, name), "x", ""]
    items = [f"{rng.choice(keys)}={rng.choice(VALUES)}" for _ in range(rng.randrange(3))]
    spec = f"{name}:{','.join(items)}" if items else name
    for _ in range(rng.choice([0, 0, 0, 1, 5])):
        place = rng.randrange(1 + len(spec))
        spec = (
            spec[:place]
            + rng.choice([":", ",", "=", "+", "\0", "a", "é", "a" * 9000, ""])
            + spec[place + rng.randrange(2) :]
        )
    return spec


def used(kind: str, spec: str) -> None:
    """Builds a part and, where it asks for no files, writes a short text with it, which is the target's."""
    if spec.startswith("lm:"):
        return  # its models may lie on the hub
    made = build(kind, spec)
    t = target("llama")
    drafter = made.open(t) if kind == "drafter" else build("drafter", "pld").open(t)
    policy, acceptor = made if kind == "policy" else Chain(3), made if kind == "acceptor" else None
    engine = Engine(t, drafter, policy, acceptor, COSTS)
    assert engine.write([PROMPT]).tokens == plain() or not engine.keeps_text()


# The tests.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """An original of each format, made once."""
    quiet()
    root = tmp_path_factory.mktemp("whole")

    @cache
    def made(name: str, number: int) -> Path:
        return original(name, number, root / f"{list(FORMATS).index(name)}-{number}")

    return lambda name, number=0: made(name, number)


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, f in FORMATS.items() for i in range(len(f.originals))]
)
def test_an_original_is_used_and_a_mutation_is_used_or_refused(
    name: str, number: int, whole: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(whole(name, number), tmp_path / "original")
    assert use_format(name, tmp_path / "original") is None
    for seed in range(number % 2, 3, 2):  # `make fuzz` runs thousands
        folder = tmp_path / f"case{seed}"
        shutil.copytree(whole(name, number), folder)
        file = mutate(folder, random.Random(f"{name} {number} {seed}"), FORMATS[name].files)
        try:
            use_format(name, folder)
        except BaseException as error:
            error.add_note(f"{name}, original {number}, seed {seed}: {file}")
            raise


def specs(kind: str, seeds: range) -> None:
    for seed in seeds:
        spec = odd_spec(kind, random.Random(f"{kind} {seed}"))
        try:
            said = refusal(partial(used, kind), spec)
        except BaseException as error:
            error.add_note(f"{kind}, case {seed}: {spec[:200]}")
            raise
        assert said is None or ("\n" not in said and 0 < len(said) <= 2 * MAX_MESSAGE_CHARACTERS), (
            said
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_is_used_or_told(kind: str) -> None:
    specs(kind, range(15))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_specs(kind: str) -> None:
    specs(kind, range(15, 700))


@pytest.mark.parametrize("name", [n for n in names("drafter") if n not in TRAINABLE])
def test_no_knob_makes_a_drafter_larger_than_memory(name: str) -> None:
    for knob in knobs("drafter", name):
        refusal(partial(used, "drafter"), f"{name}:{knob}=1000000000000")


# What chance seldom finds.


DRAFTERS = {
    "edd": "drafter",
    "vdm": "drafter",
    "eagle": "drafter",
    "eagle3": "drafter",
    "glide": "published drafter",
}
"""Methods, and the format in which their files are."""


def original_of(method: str) -> tuple[str, int]:
    """Return the format and number of the original of a method's drafter; of any other format the first."""
    name = DRAFTERS.get(method, method)
    return name, (TRAINABLE if name == "drafter" else PUBLISHED).index(
        method
    ) if method in DRAFTERS else 0


@pytest.mark.parametrize("method", [*DRAFTERS, "target config"])
def test_sizes_are_bounded_by_the_weights(
    method: str, whole: Callable[..., Path], tmp_path: Path
) -> None:
    name, number = original_of(method)
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "head_dim",
    ):
        folder = tmp_path / key
        shutil.copytree(whole(name, number), folder)
        config = json.loads((folder / "config.json").read_text())
        for size in (10**9, 10**12, 0, -1) if key != "head_dim" else (10**9, 10**12):
            (folder / "config.json").write_text(json.dumps(config | {key: size}))
            always_one = key == "num_hidden_layers" and name == "drafter"
            assert always_one or use_format(name, folder) is not None, (key, size)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "glide"])
def test_nothing_is_allocated_before_shapes_are_compared(
    method: str, whole: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(whole(*original_of(method)), tmp_path / "x")
    change(tmp_path / "x", intermediate_size=10**14)  # more than any machine has
    assert "mis-shaped tensors" in (use_format("drafter", tmp_path / "x") or "")


@pytest.mark.parametrize(
    ("change_", "line"),
    [
        (
            {"intermediate_size": 48000},
            "intermediate_size 48000 makes model.layers.0.mlp.gate_proj.weight [48000, 32]",
        ),
        (
            {"intermediate_size": 47},
            "intermediate_size 47 makes model.layers.0.mlp.gate_proj.weight [47, 32]",
        ),
        (
            {"num_key_value_heads": 4},
            "its sizes make model.layers.0.self_attn.k_proj.weight [32, 32]",
        ),
    ],
    ids=["too large", "too small", "no entry has the size"],
)
def test_a_targets_sizes_are_compared_before_it_is_loaded(
    change_: dict[str, int],
    line: str,
    whole: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(whole("target config"), tmp_path / "x")
    change(tmp_path / "x", **change_)
    monkeypatch.setattr(
        PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("it is loaded")
    )
    said = use_format("target config", tmp_path / "x") or ""
    assert line in said
    assert "'model.safetensors' has [" in said


def test_experts_that_are_merged_as_they_are_read_are_bounded(tmp_path: Path) -> None:
    fresh("mixtral-sliding").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    check_shapes(config, tmp_path)
    config.intermediate_size = 48000
    line = r"its sizes make model.layers.0.mlp.experts.gate_up_proj \[3, 96000, 32\], the weights beside it have \d+ numbers"
    with pytest.raises(UserError, match=line):
        check_shapes(config, tmp_path)


def test_the_sizes_of_shards_are_compared(whole: Callable[..., Path], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(whole("target config")).save_pretrained(
        tmp_path, max_shard_size="20KB"
    )
    shards, config = sorted(tmp_path.glob("*.safetensors")), AutoConfig.from_pretrained(tmp_path)
    assert len(shards) > 1
    check_shapes(config, tmp_path)
    config.intermediate_size = 48000
    with pytest.raises(
        UserError,
        match=r"intermediate_size 48000 makes .*, 'model-0000\d-of-.*safetensors' has \[48, 32\]",
    ):
        check_shapes(config, tmp_path)


@pytest.mark.parametrize(
    ("change_", "line"),
    [
        (
            {"r": 800000},
            "r is 800000, 'adapter_model.safetensors' has base_model.model.model.layers.0",
        ),
        ({"r": 1}, "r is 1, 'adapter_model.safetensors' has base_model.model.model.layers.0"),
        (
            {"rank_pattern": {"q_proj": 800000}},
            "rank_pattern['q_proj'] is 800000, 'adapter_model.safetensors' has",
        ),
        ({"r": 7, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 8}}, None),
    ],
    ids=["too large", "too small", "pattern", "pattern for all"],
)
def test_an_adapters_ranks_are_compared_before_it_is_loaded(
    change_: dict[str, Any],
    line: str | None,
    whole: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peft = pytest.importorskip("peft")
    shutil.copytree(whole("adapter"), tmp_path / "x")
    path = tmp_path / "x" / "lora" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change_))
    if line is None:
        assert use_format("adapter", tmp_path / "x") is None
        return
    monkeypatch.setattr(
        peft.PeftModel, "from_pretrained", lambda *_, **__: pytest.fail("it is loaded")
    )
    assert line in (use_format("adapter", tmp_path / "x") or "")


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_block_is_no_larger_than_a_tree(
    method: str, whole: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(whole("published drafter", PUBLISHED.index(method)), tmp_path / "x")
    change(tmp_path / "x", block_size=10**6)  # its masks would take 8 TB
    assert "block_size is 1000000, allowed is at most" in (
        use_format("published drafter", tmp_path / "x") or ""
    )


@pytest.mark.parametrize("dtype", [">i4", ">i8"])
def test_a_datastore_of_another_byte_order_is_refused(
    dtype: str, whole: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(whole("data store of REST"), tmp_path / "x")
    np.save(tmp_path / "x" / "tokens.npy", np.load(tmp_path / "x" / "tokens.npy").astype(dtype))
    assert "allowed is a one-dimensional array of integers in this machine's byte order" in (
        use_format("data store of REST", tmp_path / "x") or ""
    )


@pytest.mark.parametrize("seed", [501, 922, 1045, 1343, 1375])
def test_a_gguf_header_that_was_too_much_is_refused(
    seed: int, whole: Callable[..., Path], tmp_path: Path
) -> None:
    """Mutations that took all memory, or minutes."""
    pytest.importorskip("gguf")
    shutil.copytree(whole("GGUF"), tmp_path / "x")
    rng = random.Random(f"0 GGUF {seed}")
    rng.choice([0])  # the draw of the original
    mutate(tmp_path / "x", rng, "*.gguf")
    assert use_format("GGUF", tmp_path / "x") is not None


def test_heads_are_bounded_by_the_weights(whole: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(whole("target config"), tmp_path / "x")
    change(tmp_path / "x", head_dim=8000)  # would be allocated, and then not fit
    assert "head_dim makes 4 heads of 8000" in (use_format("target config", tmp_path / "x") or "")


def test_a_result_with_half_a_character_is_refused_before_the_page_is_written(
    whole: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(whole("result"), tmp_path / "x")
    result = json.loads((tmp_path / "x" / "result.json").read_text())
    result["texts"]["0"][0]["pieces"][0] = "\ud800"
    result["provenance"]["date"] = "\ud800"
    (tmp_path / "x" / "result.json").write_text(json.dumps(result))
    assert "the entries do not match each other" in (use_format("result", tmp_path / "x") or "")


def test_a_row_without_a_policy_is_refused(whole: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(whole("result"), tmp_path / "x")
    result = json.loads((tmp_path / "x" / "result.json").read_text())
    del result["rows"][1]["policy"]
    (tmp_path / "x" / "result.json").write_text(json.dumps(result))
    assert "the entries do not match each other: no 'policy'" in (
        use_format("result", tmp_path / "x") or ""
    )


CACHED = ("learnt costs", "findings of a machine", "training state", "recordings", "journal")
"""Formats of which a broken file is written anew."""
STORES = ("data store of REST", "official data store of REST", "features")
WITHOUT_JSON = ("safetensors", "GGUF", "grammar", "parquet", *STORES)


@pytest.mark.parametrize(
    "text", [DEEP, '{"a":' * 10000 + "1" + "}" * 10000], ids=["lists", "objects"]
)
@pytest.mark.parametrize("name", [n for n in FORMATS if n not in CACHED + WITHOUT_JSON])
def test_json_nested_ten_thousand_deep_is_refused(
    name: str, text: str, whole: Callable[..., Path], tmp_path: Path
) -> None:
    files = [f for f in whole(name).rglob("*.json*") if f.match(FORMATS[name].files)]
    assert files
    for file in files:
        folder = tmp_path / file.name
        shutil.copytree(whole(name), folder)
        (folder / file.relative_to(whole(name))).write_text(text)
        assert "nested too deep" in (use_format(name, folder) or ""), file.name


TEMPLATES = [
    "{{ 1 / 0 }}",
    "{{ messages[9].x.y }}",
    "{% for i in range(10 ** 12) %}{% endfor %}",
    "{{ x(",
    3,
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_may_raise_anything(
    template: Any, whole: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(whole("target config"), tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    (tmp_path / "t" / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": template})
    )
    assert refusal(written, tmp_path / "t") is not None


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1",)


LINES: dict[str, Callable[[Path], list[str]]] = {
    "a pickle": lambda t: torch.save({"x": Evil()}, t / "pytorch_model.bin") or (t / "model.safetensors").unlink() or [],
    "a tokenizer that is a list": lambda t: (t / "tokenizer.json").write_text("[]") and [],
    "no layers": lambda t: change(t, num_hidden_layers=0),
    "layers below none": lambda t: change(t, num_hidden_layers=-3),
    "odd heads": lambda t: change(t, num_attention_heads=7),
    "text for a number": lambda t: change(t, hidden_size="32"),
    "an unknown dtype": lambda t: change(t, dtype="float12"),
    "a dtype of whole numbers": lambda t: change(t, dtype="int8"),
    "other sizes": lambda t: change(t, intermediate_size=40),
    "a long spec": lambda t: ["--policy", "a" * 9000],
    "a long value": lambda t: ["--top-k", "a" * 9000],
    "a long name": lambda t: ["--target", "a" * 9000],
    "a long option": lambda t: ["--" + "a" * 9000],
}  # fmt: skip


def change(folder: Path, **values: Any) -> list[str]:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return []


@pytest.mark.parametrize("case", LINES)
def test_the_command_line_tells_it_in_one_line(
    draftree, case: str, whole: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(whole("target config"), tmp_path / "t")
    options = LINES[case](tmp_path / "t")
    usual = (
        "--target",
        tmp_path / "t",
        "--drafter",
        "pld",
        "--policy",
        "chain",
        "--max-new-tokens",
        "2",
    )
    status, out, err = draftree("generate", "x", *usual, *options)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert len(err) < 2 * MAX_MESSAGE_CHARACTERS


# The fuzzer's own limits.


def compute() -> None:
    """Use the processor for ever."""
    while True:
        pass


def test_a_use_is_a_hang_by_its_processor_time() -> None:
    with limited(processor=0.05):
        time.sleep(0.3)  # as a process does that others keep waiting
    with pytest.raises(Hang), limited(processor=0.05, wall=60):
        compute()
    with pytest.raises(Hang), limited(wall=0.05):
        time.sleep(60)


def child(code: str) -> subprocess.Popen[bytes]:
    """Start a process of Python that imports nothing else."""
    return subprocess.Popen([sys.executable, "-I", "-c", code])


@pytest.mark.parametrize(
    ("code", "limits", "by_itself"),
    [
        ("import time; time.sleep(1)", {"processor": 0.5}, True),
        ("while True: pass", {"processor": 0.5}, False),
        ("import time; time.sleep(60)", {"wall": 0.5}, False),
    ],
    ids=["waits", "computes", "waits for ever"],
)
def test_a_process_is_ended_by_its_processor_time(
    code: str, limits: dict[str, float], by_itself: bool, tmp_path: Path
) -> None:
    (tmp_path / "x").touch()
    process = child(code)
    assert ended(process, tmp_path / "x", **limits) is by_itself
    assert process.poll() is not None
