"""A small model in the shape of a large one computes the same, and costs more."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftree.data.prompts import encode, question
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.tree import Candidates, Tree
from draftree.weights import demo_folder
from folders import target_folder

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
import widen

from selection import one_in

QUESTIONS = (
    "How many legs do 3 dogs and 2 birds have together?",
    "Write a Python function that adds two numbers.",
)
LARGE = {"hidden_size": 512, "intermediate_size": 384, "num_hidden_layers": 26, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 4352}  # fmt: skip
VOCAB = 4096
WIDTH = 128
MORE = 2
RELATIVE = 2e-6
"""Of the largest logit, in float32: sums of another order in 24 layers' norms and products; 6e-7
was seen."""
EXACT = 1e-9
"""Where norms are computed in float64 too: what is left is 2⁻⁴⁰, the square of what new rows of the
vocabulary need."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target and its drafters, wider, deeper and with a larger vocabulary."""
    out = tmp_path_factory.mktemp("wide")
    counts = widen.widen(out, "demo", widen.METHODS, LARGE)
    assert set(counts) == {"target", *widen.METHODS}
    return out


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def both(request: pytest.FixtureRequest, wide: Path) -> tuple[Target, Target]:
    return Target.load("demo", request.param, "cpu"), Target.load(
        str(wide / "target"), request.param, "cpu"
    )


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in the dtype of their input; transformers' compute in float32 whatever it is."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )
        return out

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def tiny(folder: Path, **changes: Any) -> Path:
    """A random Llama on disk whose eps is as large as what its norms divide by."""
    values = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
              "head_dim": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.4,
              "rms_norm_eps": 0.5, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
              "tie_word_embeddings": True}  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(**(values | changes)))
        for name, p in model.named_parameters():
            if p.dim() == 1:  # norms and biases, which begin as ones and zeros
                torch.nn.init.normal_(p, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder)
    return folder


def run(folder: Path | str, ids: Tensor, dtype: torch.dtype = torch.float64) -> Any:
    return passed(Target.load(str(folder), dtype, "cpu"), ids)


@torch.inference_mode()
def passed(target: Target, ids: Tensor) -> Any:
    return target.decoder.model(input_ids=ids, output_hidden_states=True)


def prompt(target: Target, text: str) -> Tensor:
    return torch.tensor([encode(target.tokenizer, question(text))])


def largest(x: Tensor) -> float:
    return float(x.abs().max())


# Any Llama.

SIZES = [
    {},
    {"num_attention_heads": 8, "num_key_value_heads": 4},
    {"num_attention_heads": 8, "num_key_value_heads": 2},  # four queries share a key where two did
    {"num_attention_heads": 16, "num_key_value_heads": 4},
    {"num_attention_heads": 8, "num_key_value_heads": 8},  # none do: trained keys are there twice
    {"intermediate_size": 31},
    {"num_hidden_layers": 5},
    {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
    },
    {"hidden_size": 64},
    {"hidden_size": 256, "num_hidden_layers": 3},
    {"hidden_size": 64, "vocab_size": 41},
    {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 77,
    },
]
KINDS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "tied": ({}, {}),
    "untied": ({"tie_word_embeddings": False}, {}),
    "biases": ({"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 16}),
    "one key": ({"num_key_value_heads": 1}, {"num_key_value_heads": 8}),
    "three queries a key, then two": (
        {"hidden_size": 48, "num_attention_heads": 6},
        {"num_key_value_heads": 12},
    ),
}


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_same_logits_in_any_shape(sizes: dict[str, int], tmp_path: Path) -> None:
    same_logits(tmp_path, tiny(tmp_path / "small"), sizes)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [40, 50])
def test_the_same_logits_of_any_llama(kind: str, vocab: int, tmp_path: Path) -> None:
    values, sizes = KINDS[kind]
    wider = {
        "hidden_size": 4 * values.get("hidden_size", 16),
        "num_hidden_layers": 3,
        "vocab_size": vocab,
    }
    same_logits(tmp_path, tiny(tmp_path / "small", **values), wider | sizes)


@pytest.mark.usefixtures("exact_norms")
def test_heads_stay_as_wide_where_the_config_does_not_say_how_wide(tmp_path: Path) -> None:
    small = tiny(tmp_path / "small", head_dim=4)
    config = json.loads((small / "config.json").read_text())
    del config["head_dim"]
    (small / "config.json").write_text(json.dumps(config))
    same_logits(
        tmp_path, small, {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    )  # 64 / 8 is not 4


def same_logits(home: Path, small: Path, sizes: dict[str, int]) -> None:
    widen.widen(home / "large", str(small), wanted=sizes)
    ids = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(2))
    a, b = run(small, ids), run(home / "large" / "target", ids)
    assert b.logits.shape[-1] == sizes.get("vocab_size", 40)
    assert largest(a.logits) > 1, "there is something to compare"
    assert largest(a.logits - b.logits[..., :40]) < EXACT * largest(a.logits)
    assert bool((b.logits[..., 40:] < -1e4).all())


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("wrong", ["eps", "norm"])
def test_the_comparison_sees_what_is_not_rescaled(wrong: str, tmp_path: Path) -> None:
    small = tiny(tmp_path / "small")
    widen.widen(tmp_path, str(small), wanted={"hidden_size": 64})
    ids = torch.arange(12)[None]
    large = Target.load(str(tmp_path / "target"), torch.float64, "cpu")
    for module in large.decoder.model.modules():
        if isinstance(module, LlamaRMSNorm):
            assert module.variance_epsilon == 0.5 / 4
            if wrong == "eps":
                module.variance_epsilon = 0.5
            else:
                module.weight.mul_(2)
    assert largest(run(small, ids).logits - passed(large, ids).logits) > 0.01


# The demo target.


def test_the_same_logits_to_the_noise_of_the_norms(both: tuple[Target, Target]) -> None:
    small, large = both
    for text in QUESTIONS:
        ids = prompt(small, text)
        a, b = passed(small, ids).logits, passed(large, ids).logits[..., :VOCAB]
        assert largest(a - b) < RELATIVE * largest(a)
        assert largest(a.softmax(-1) - b.softmax(-1)) < 2 * RELATIVE * largest(a), (
            "a probability moves by as much as two logits"
        )


@pytest.mark.usefixtures("exact_norms")
def test_the_same_logits_where_norms_are_exact(wide: Path) -> None:
    small = Target.load("demo", torch.float64, "cpu")
    ids = prompt(small, QUESTIONS[0])
    a = passed(small, ids).logits
    assert largest(a - run(wide / "target", ids).logits[..., :VOCAB]) < EXACT * largest(a)


def test_hidden_states_are_the_same_and_added_dimensions_are_zero(
    both: tuple[Target, Target],
) -> None:
    small, large = both
    ids = prompt(small, QUESTIONS[0])
    a, b = passed(small, ids).hidden_states, passed(large, ids).hidden_states
    for entry in (-1, -4, -24):
        assert largest(a[entry] - b[entry][..., :WIDTH]) < RELATIVE * largest(a[entry])
    for states in b[:-1]:
        assert torch.equal(states[..., WIDTH], torch.full_like(states[..., 0], widen.FLOOR)), (
            "no layer writes to the floor"
        )
    assert all(largest(states[..., WIDTH + 1 :]) == 0 for states in b)


def test_further_layers_add_nothing(both: tuple[Target, Target]) -> None:
    _, large = both
    states = passed(large, prompt(large, QUESTIONS[0])).hidden_states
    assert torch.equal(states[0], states[MORE])
    assert not torch.equal(states[MORE], states[MORE + 1])


def test_new_rows_of_the_vocabulary_are_far_below_all_others(both: tuple[Target, Target]) -> None:
    _, large = both
    texts = [
        prompt(large, QUESTIONS[0]),
        torch.arange(VOCAB)[-100:][None],
        torch.zeros(1, 40, dtype=torch.long),
    ]
    for ids in texts:
        logits = passed(large, ids).logits
        assert logits.shape[-1] == LARGE["vocab_size"]
        assert bool(logits.isfinite().all())
        assert float(logits[..., VOCAB:].max()) < min(-1e4, float(logits[..., :VOCAB].min()) - 1e4)
        assert largest(logits.softmax(-1)[..., VOCAB:]) == 0


def requests(target: Target) -> list[Request]:
    return [
        Request(encode(target.tokenizer, question(q)), 16, target.eos, number=i)
        for i, q in enumerate(QUESTIONS)
    ]


def engine(target: Target, drafter: str) -> Engine:
    return Engine(
        target, build("drafter", drafter).open(target), build("policy", "vct:width=2,depth=3")
    )


@pytest.mark.parametrize(
    ("name", "both"),
    one_in(2, ["edd", "eagle", "eagle3"], [torch.float64, torch.float32]),
    indirect=["both"],
    ids=str,
)
def test_the_same_text_in_the_same_steps(
    name: str, both: tuple[Target, Target], wide: Path
) -> None:
    small, large = both
    a, b = engine(small, name), engine(large, f"{name}:checkpoint={wide / name}")
    first, second = a.write(requests(small)), b.write(requests(large))
    assert first.tokens == second.tokens
    assert first.stats.steps == second.stats.steps
    assert first.stats.acceptance_length > 1.5, "a drafter that drafts nonsense would prove little"
    assert a.plain(requests(small)).tokens == second.tokens


def drafted(target: Target, drafter: str) -> Iterator[Candidates]:
    """Candidates after a root, after its children, and after theirs."""
    opened, root = build("drafter", drafter).open(target), np.array([300])
    tokens = np.array(encode(target.tokenizer, question(QUESTIONS[0])))
    cache = target.new_cache(1, 256)
    state: Any = opened.start(
        [tokens], root, target.prefill(cache, [tokens], opened.needs).hidden_states
    )
    tree, frontier = Tree.from_roots(np.zeros(1, np.int64), root), np.array([0])
    for _ in range(3):
        found, state = opened.expand(state, tree, frontier, 2, Drawing())
        yield found
        parents, count = np.repeat(frontier, 2), 2 * len(frontier)
        log_q = found.log_q.reshape(-1)
        frontier, tree = (
            len(tree) + np.arange(count),
            tree.append(parents, found.tokens.reshape(-1), log_q, log_q, found),
        )


@pytest.mark.parametrize(
    ("name", "both"),
    one_in(2, widen.METHODS, [torch.float64, torch.float32]),
    indirect=["both"],
    ids=str,
)
def test_the_same_draft_probabilities_along_a_tree(
    name: str, both: tuple[Target, Target], wide: Path
) -> None:
    small, large = both
    for a, b in zip(
        drafted(small, name), drafted(large, f"{name}:checkpoint={wide / name}"), strict=True
    ):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert np.abs(a.log_q - b.log_q).max() < 5e-5, "of logits up to 16 in float32"


def test_layers_heads_and_units_are_there_to_be_paid(wide: Path) -> None:
    target = Target.load(str(wide / "target"), torch.float32, "cpu")
    for layer in target.decoder.layers:
        used = [
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.v_proj,
            layer.mlp.gate_proj,
            layer.mlp.up_proj,
        ]
        assert all(bool((w.weight != 0).any(1).all()) for w in used), (
            "no row of them could be skipped"
        )
    # Embedding and head are not tied: 2 · 4352 · 512. A layer has queries and output 2 · 512 · 256,
    # keys and values 2 · 512 · 128, the MLP 3 · 512 · 384, two norms 1024; 26 of them, and the last
    # norm.
    assert (
        sum(p.numel() for p in target.decoder.model.parameters())
        == 4_456_448 + 26 * (262_144 + 131_072 + 589_824 + 1024) + 512
    )


def test_what_belongs_to_the_text_is_copied(wide: Path) -> None:
    large, small = Target.load(str(wide / "target"), torch.float32, "cpu"), Target.load("demo")
    assert encode(large.tokenizer, question("a 12 b")) == encode(
        small.tokenizer, question("a 12 b")
    )
    assert large.eos == small.eos


def test_half_precision_is_as_exact_where_nothing_is_rounded(tmp_path: Path) -> None:
    widen.widen(tmp_path, "demo", wanted={"hidden_size": 512, "intermediate_size": 352, "num_attention_heads": 4,
                                          "num_key_value_heads": 2}, dtype=torch.float16)  # fmt: skip
    with safe_open(next((tmp_path / "target").glob("*.safetensors")), "pt") as file:
        assert {file.get_tensor(k).dtype for k in file.keys()} == {torch.float16}  # noqa: SIM118 - not a mapping
    small = Target.load("demo")
    ids = prompt(small, QUESTIONS[0])
    a = passed(small, ids).logits
    assert largest(a - run(tmp_path / "target", ids, torch.float32).logits) < RELATIVE * largest(a)


def test_a_layer_counted_from_the_first_moves_with_it(tmp_path: Path) -> None:
    other = tmp_path / "edd21"
    shutil.copytree(demo_folder("edd"), other)
    config = json.loads((other / "config.json").read_text())
    config["draftree"]["hidden_layer"] = 21  # of 0 … 24, the same as -4
    (other / "config.json").write_text(json.dumps(config))
    widen.widen(tmp_path, "demo", [str(other)], {"num_hidden_layers": 27})
    said = json.loads((tmp_path / "edd" / "config.json").read_text())
    assert said["draftree"]["hidden_layer"] == 24
    assert said["num_hidden_layers"] == 1


# Shapes by name, and what is refused.


@pytest.mark.parametrize(("name", "parameters"), [("200m", 200e6), ("1b", 1e9), ("7b", 6.738e9)])
def test_a_shape_has_the_parameters_it_is_called_by(name: str, parameters: float) -> None:
    config = json.loads((demo_folder() / "config.json").read_text())
    small = widen.Shape.of(config)
    large = widen.enlarged(small, widen.SHAPES[name])
    widening = widen.Widening(small, large, config, torch.float32, 0)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**widening.config(config, large.num_hidden_layers)))
    count = sum(p.numel() for p in model.parameters())
    assert abs(count / parameters - 1) < 0.005
    assert f"{count:,}" in (widen.__doc__ or "")
    assert large.num_attention_heads * 32 == large.hidden_size


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 32}, "hidden is 32, allowed is the target's times a power of 4: 16, 64"),
        ({"hidden_size": 8}, "hidden is 8"),
        (
            {"intermediate_size": 23},
            "intermediate_size is 23, allowed is at least the target's: 24",
        ),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, allowed is at least the target's: 2"),
        ({"num_attention_heads": 7, "num_key_value_heads": 2}, "7 heads read 2"),
        (
            {"num_attention_heads": 6},
            "num_attention_heads is 6, transformers allows divisors of the hidden size: 16",
        ),
        ({"num_attention_heads": 3}, "num_attention_heads is 3"),
        ({"num_attention_heads": 4, "num_key_value_heads": 8}, "4 heads read 8"),
        ({"vocab_size": 41}, "needs a wider stream"),
        ({"vocab_size": 39, "hidden_size": 64}, "vocab_size is 39"),
    ],
)
def test_shapes_that_cannot_hold_the_small_one(changes: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        widen.enlarged(widen.Shape(16, 24, 2, 4, 2, 40), changes)
    assert "\n" not in str(error.value)


def test_keys_are_enough_for_the_trained_queries() -> None:
    # Two keys, three queries on each; where two share a key, each key is needed twice.
    small = widen.Shape(48, 24, 2, 6, 2, 40)
    with pytest.raises(
        UserError, match="6 heads read 3 key-value heads, allowed are divisors of 6 of at least 4"
    ):
        widen.enlarged(small, {"num_key_value_heads": 3})
    large = widen.enlarged(small, {"num_attention_heads": 8, "num_key_value_heads": 4})
    assert widen.heads(small, large) == ([0, 1, 2, 4, 5, 6], [0, 1, 2, 3], [0, 0, 1, 1])


@pytest.mark.parametrize("name", ["medusa", "hydra", "glide", "eagel"])
def test_other_drafters_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eagle, .*vdm"):
        widen.widen(tmp_path, "demo", [name])
    assert not any(tmp_path.iterdir())


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    small = tiny(tmp_path / "small")
    with pytest.raises(UserError, match=r"trained for target 'demo', allowed is one for '.*small'"):
        widen.widen(tmp_path / "out", str(small), [str(demo_folder("edd"))])


def test_other_targets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="of type gpt2, allowed is llama"):
        widen.widen(tmp_path / "out", str(tmp_path))
    with pytest.raises(UserError, match="nowhere"):
        widen.widen(tmp_path / "out", "nowhere")


def test_half_precision_cannot_hold_a_larger_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="float16 cannot"):
        widen.widen(
            tmp_path, "demo", wanted={"hidden_size": 512, "vocab_size": 5000}, dtype=torch.float16
        )


def test_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = target_folder(tmp_path / "small")
    command = [
        "widen.py",
        "--out",
        str(tmp_path),
        "--target",
        str(small),
        "--hidden",
        "128",
        "--layers",
        "5",
        "--kv-heads",
        "4",
    ]
    monkeypatch.setattr(sys, "argv", command)
    widen.main()
    written = capsys.readouterr().out
    count = sum(
        p.numel()
        for p in Target.load(str(tmp_path / "target"), device="cpu").decoder.model.parameters()
    )
    assert written == f"{tmp_path / 'target'}: {count:,} parameters\n"
    with pytest.raises(SystemExit, match="is there: name another folder"):
        widen.main()
    monkeypatch.setattr(sys, "argv", [*command, "--shape", "7b"])
    with pytest.raises(
        SystemExit, match="is there"
    ):  # what is given goes before the shape: 2048 would not fit 32
        widen.main()
