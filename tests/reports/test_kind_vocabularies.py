"""Vocabularies that number tokens otherwise, and tokens that the tokenizer has and the embedding lacks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftree.drafters.lm import language_model
from draftree.engine import Engine, load
from draftree.errors import UserError
from draftree.target.target import Target
from folders import byte_tokenizer, target_folder
from reports import report

pytestmark = pytest.mark.usefixtures("quick")
Command = Callable[..., tuple[int, str, str]]
SIZE = 260
CHATS = [
    [{"role": "user", "content": "hi 0"}, {"role": "assistant", "content": "ho <|tool|> ho"}],
    [{"role": "user", "content": "hi <|pad2|> 1"}, {"role": "assistant", "content": "ho ho"}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture(scope="module")
def shuffled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with its ids permuted, in weights and tokenizer alike; special tokens keep theirs."""
    out = tmp_path_factory.mktemp("shuffled") / "t"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    free = torch.arange(4, SIZE)
    new = torch.arange(SIZE)
    new[free] = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[new] = module.weight.clone()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    said = json.loads((out / "tokenizer.json").read_text())
    said["model"]["vocab"] = {
        token: int(new[number]) for token, number in said["model"]["vocab"].items()
    }
    (out / "tokenizer.json").write_text(json.dumps(said))
    return out


@pytest.fixture(scope="module")
def added(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target whose tokenizer alone has two more tokens."""
    out = target_folder(tmp_path_factory.mktemp("added") / "t")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>", "<|pad2|>"]})
    tokenizer.save_pretrained(out)
    return out


def lengths(engine: Engine, temperature: float) -> float:
    """τ, once the text was found to be the target's."""
    done = engine.complete(
        "def main(", max_new_tokens=24, temperature=temperature, seed=1, ignore_eos=True
    )
    plain = load(engine.target, "pld", "chain").complete(
        "def main(", max_new_tokens=24, temperature=temperature, seed=1, ignore_eos=True
    )
    assert done.tokens == plain.tokens
    return done.stats.acceptance_length


@report(
    "ggml-org/llama.cpp#3812",
    "Vocabularies",
    "A draft model with another vocabulary drafted unrelated text, and nothing said so.",
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_tokens_under_other_ids_are_matched_by_their_text(
    temperature: float, folder: Path, shuffled: Path
) -> None:
    """As the target drafts for itself with its tokens renumbered, nearly all is accepted."""
    own = lengths(load(str(folder), f"lm:model={folder}", "chain:length=5"), temperature)
    other = lengths(load(str(folder), f"lm:model={shuffled}", "chain:length=5"), temperature)
    assert other == pytest.approx(own, abs=0.01)
    assert other > 4


def test_the_same_vocabulary_is_not_looked_up(folder: Path) -> None:
    target = Target.load(str(folder))
    assert language_model(Target.load(str(folder)), target).shared_vocabulary is None


def test_an_assistant_of_the_hook_is_matched_too(folder: Path, shuffled: Path) -> None:
    target = Target.load(str(folder))
    drafter = language_model(Target.of(AutoModelForCausalLM.from_pretrained(shuffled)), target)
    assert drafter.shared_vocabulary is not None
    assert "260 of 260 tokens shared" in drafter.description


def test_padded_rows_of_a_draft_model_are_never_drafted(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(320, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[SIZE:] = 9 * model.get_output_embeddings().weight[40]
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert lengths(load(str(folder), f"lm:model={tmp_path}", "chain:length=5"), 0.0) > 4


def test_padded_rows_of_a_target_are_in_nobodys_way(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(320, mean_resizing=False)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    for drafter in (f"lm:model={folder}", "suffix"):
        lengths(load(str(tmp_path), drafter, "chain:length=5"), 0.0)


@report(
    "FasterDecoding/Medusa#45",
    "Vocabularies",
    "A token id beyond the embedding ended the training in an index kernel.",
)
@pytest.mark.parametrize("name", ["medusa", "edd", "eagle3"])
@pytest.mark.parametrize("at", [0, 1])
def test_training_names_a_token_beyond_the_embedding(
    name: str, at: int, added: Path, tmp_path: Path, draftree: Command
) -> None:
    data = tmp_path / "added_tokens.jsonl"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS[at:]))
    out = tmp_path / "out"
    status, _, err = draftree("train", name, "--target", added, "--data", data, "--out", out)
    token = ["<|tool|>", "<|pad2|>"][at]
    assert status == 2
    told = f"{data}:1 has token '{token}' with id {SIZE + at}, allowed are ids below the {SIZE} rows of the target's embedding"
    assert told in err
    assert "Traceback" not in err
    assert not (out / "config.json").exists()


def test_rows_with_such_tokens_may_be_left_out(
    added: Path, tmp_path: Path, draftree: Command
) -> None:
    data = tmp_path / "some.jsonl"
    fine = [
        [{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": "ho ho"}]
        for i in range(3)
    ]
    data.write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in [*CHATS, *fine]) + "{broken\n"
    )
    options = ("--skip-bad-rows", "--epochs", "1", "--batch-size", "2", "--held-out", "0")
    status, _, err = draftree(
        "train", "medusa", "--target", added, "--data", data, "--out", tmp_path / "out", *options
    )
    assert status == 0, err
    assert "3 rows cannot be read and are left out" in err
    assert f"{data}:1 has token '<|tool|>'" in " ".join(err.split())


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("a <|tool|> b", {}), ([5, SIZE], {}), ([{"role": "user", "content": "<|pad2|>"}], {}),
        ("a", {"logit_bias": {SIZE: 2.0}}), ("a", {"logit_bias": {"<|tool|>": 2.0}}), ("a", {"suppress": [SIZE]}),
        ("a", {"beginning": "<|tool|>"}),
    ],
    ids=str,
)  # fmt: skip
def test_prompts_and_options_name_such_a_token(
    prompt: object, options: dict[str, object], added: Path
) -> None:
    engine = load(str(added), "suffix")
    with pytest.raises(UserError, match=rf"{SIZE}|{SIZE + 1}|tool"):
        engine.complete(prompt, max_new_tokens=2, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("options", [{"bad_words": ["<|tool|>"]}, {"stop": ["<|tool|>"]}], ids=str)
def test_texts_that_can_never_be_written_change_nothing(
    options: dict[str, object], added: Path
) -> None:
    engine = load(str(added), "suffix")
    assert (
        engine.complete("ab", max_new_tokens=6, **options).tokens
        == engine.complete("ab", max_new_tokens=6).tokens
    )


def test_a_datastore_with_such_tokens_is_refused(
    added: Path, tmp_path: Path, draftree: Command
) -> None:
    data = tmp_path / "text.txt"
    data.write_text("a <|tool|> b")
    where = ("--target", added, "--data", data, "--out", tmp_path / "d")
    status, _, err = draftree("datastore", "build", "--kind", "rest", *where)
    assert status == 0, err
    with pytest.raises(UserError, match=rf"token ids up to {SIZE + 1}"):
        load(str(added), f"rest:datastore={tmp_path / 'd'}")
