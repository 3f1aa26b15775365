"""A language model of another vocabulary drafts the tokens that it shares with the target, and the text stays the target's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from draftree.drafters.lm import LM, LMDrafter
from draftree.drafters.neural.shared_vocabulary import Shared
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.request import Request
from draftree.target.target import Target
from draftree.testing import Case, Suite, cases
from draftree.testing.conformance import COSTS
from draftree.tree import DraftVocab
from folders import target_folder


def foreign(vocab: int, size: int = 40) -> LMDrafter:
    """A drafter of `size` tokens, 30 of which the target has too, under other numbers."""
    config = GPT2Config(
        vocab_size=size,
        n_positions=64,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = Target(CausalLM(GPT2LMHeadModel(config).double()), "small")
    rng = np.random.default_rng(0)
    ids, columns = np.sort(rng.permutation(vocab)[:30]), rng.permutation(size)[:30]
    reads = rng.integers(0, size, vocab)
    reads[ids] = columns
    told = (torch.from_numpy(each) for each in (ids, columns, reads))
    drafted, *others = told
    return LMDrafter(small, Shared(DraftVocab(drafted, vocab), *others))


@pytest.fixture(scope="module")
def suite() -> Suite:
    found = Suite()
    found._examples["lm"] = foreign(found.target.decoder.vocab)
    return found


SOME = [
    pytest.param(case, id=str(case), marks=() if i % 25 == 0 else pytest.mark.long)
    for i, case in enumerate(cases(only={"drafter": ["lm"]}))
]
"""All go through by hand; in the suite every twelfth."""


@pytest.mark.parametrize("case", SOME)
def test_the_text_is_the_targets_under_every_policy_and_acceptor(suite: Suite, case: Case) -> None:
    suite.run(case)


# Two tokenizers.


def model_folder(folder: Path, vocab: dict[str, int], space: str, seed: int = 5) -> str:
    """A small model whose tokenizer knows some characters, and writes spaces in its own way."""
    config = LlamaConfig(
        vocab_size=len(vocab) + 3, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=160, bos_token_id=None, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space, prepend_scheme="never")
    raw.decoder = decoders.Metaspace(replacement=space, prepend_scheme="never")
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(str(target_folder(tmp_path_factory.mktemp("large"))), torch.float64)


def test_tokens_are_matched_by_their_text_and_spaces_by_what_they_are(
    large: Target, tmp_path: Path
) -> None:
    letters = {c: i for i, c in enumerate(["▁", *"zyxwvutsrqponmlkjihgfedcba", "日"])}
    drafter = LM(model=model_folder(tmp_path / "small", letters, "▁")).open(large)
    shared, theirs = drafter.shared_vocabulary, large.tokenizer.get_vocab()
    assert shared is not None
    wanted = {theirs[c]: i for c, i in letters.items() if c not in "▁日"} | {
        theirs["Ġ"]: 0
    }  # of which it has three bytes
    assert dict(zip(shared.drafted.ids.tolist(), shared.columns.tolist(), strict=True)) == wanted
    assert [int(shared.reads[token]) for token in wanted] == list(wanted.values())
    assert drafter.description.endswith(", 27 of 260 tokens shared")
    prompt = large.tokenizer.encode("some words", add_special_tokens=False)
    engine = Engine(large, drafter, VCT(), costs=COSTS)
    written = engine.write([Request(prompt, 12)])
    assert (
        written.tokens
        == Engine(large, drafter, Chain(), costs=COSTS).plain([Request(prompt, 12)]).tokens
    )


def test_the_same_weights_under_other_numbers_draft_the_same(large: Target) -> None:
    """With columns and embeddings of a copy permuted, the copy's drafts are the target's own, and all are accepted."""
    vocab = large.decoder.vocab
    order = torch.from_numpy(np.random.default_rng(0).permutation(vocab))
    model = LlamaForCausalLM.from_pretrained(large.name).double()
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight[order] = weight.clone()
    shared = Shared(DraftVocab(torch.arange(vocab), vocab), order, order)
    request = Request([5, 9, 20, 31], 12)
    right, wrong = (
        Engine(large, LMDrafter(Target(CausalLM(model), "copy"), s), Chain(3), costs=COSTS).write(
            [request]
        )
        for s in (shared, replace(shared, reads=torch.arange(vocab)))
    )
    assert right.tokens == wrong.tokens
    assert len(right.stats.steps) < len(wrong.stats.steps)


def test_nothing_in_common_is_told_in_a_line(large: Target, tmp_path: Path) -> None:
    name = model_folder(tmp_path / "small", {"語": 0, "日": 1}, "▁")
    with pytest.raises(UserError, match="have no token in common") as error:
        LM(model=name).open(large)
    assert "\n" not in str(error.value)
