"""Text and tokens: other vocabularies, characters of several tokens, beginnings of texts, large ids; options of commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

from draftree.data.prompts import encode, question
from draftree.data.samples import read_samples
from draftree.drafters._from_objects import LoadedModel
from draftree.drafters.rest import REST, RESTDrafter, index_documents
from draftree.engine import Engine, generate_plain, load
from draftree.models.causal_lm import CausalLM
from draftree.policies.chain import Chain
from draftree.request import Request
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from draftree.text.options import Options
from draftree.text.stop_strings import decode_tokens
from folders import TEMPLATE, byte_tokenizer
from reports import report
from reports.engines import PROMPT, both, plainly, whole

KIND = "Text, tokens and options"


class Starting(LogitsProcessor):
    """Forces the first token after a prompt of a length."""

    def __init__(self, token: int, length: int) -> None:
        self.token, self.length = token, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, self.token] = 0
        return scores


@report(
    "huggingface/transformers#46936",
    KIND,
    "Drafting across tokenizers crashed where the draft's spelling of a text is the longer one.",
)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 2}], ids=["greedy", "sampled"]
)
def test_a_draft_model_may_spell_texts_at_greater_length(
    target: Target, options: dict[str, Any]
) -> None:
    demo = Target.load("demo", torch.float32)
    engine = load(demo, LoadedModel(target), "chain:length=4", costs=COSTS)
    requests = [
        Request(encode(demo.tokenizer, text), 8, number=i)
        for i, text in enumerate(["def main(", "é x"])
    ]
    sampling = Options(**options).sampling
    assert (
        engine.write(requests, sampling).tokens
        == generate_plain(demo, requests, sampling=sampling).tokens
    )


@report(
    "vllm-project/vllm#48853",
    KIND,
    "A prompt that ends inside a character came back whole in the first piece of the stream.",
)
@pytest.mark.parametrize("character", ["🌶", "漢", "🇨🇿"])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_prompt_may_end_inside_a_character(target: Target, character: str, cut: int) -> None:
    ids = encode(target.tokenizer, "ab" + character)[:-cut]
    engine = load(target, "pld", "chain:length=4", costs=COSTS)
    pieces = list(engine.stream(ids, max_new_tokens=10, ignore_eos=True))
    tokens = [t.id for t in pieces]
    assert tokens == plainly(target, ids, max_new_tokens=10)
    assert "".join(t.text for t in pieces) == decode_tokens(target.tokenizer, tokens)


@report(
    "waybarrios/vllm-mlx#109", KIND, "Streams showed halves of characters that several tokens make."
)
@pytest.mark.parametrize("drafter", ["pld", "suffix", "lookahead"])
def test_pieces_are_whole_characters(target: Target, drafter: str) -> None:
    text = "a 🌶 漢字 🇨🇿 žluť مرحبا e\u0301!"
    engine = load(target, drafter, "chain:length=5", costs=COSTS)
    given: dict[str, Any] = {
        "beginning": text,
        "max_new_tokens": len(text.encode()),
        "ignore_eos": True,
    }
    pieces = [t.text for t in engine.stream(PROMPT, **given)]
    assert "".join(pieces) == engine.complete(PROMPT, **given).text == text
    assert not any("\ufffd" in piece for piece in pieces)
    for stop in ("字", "ž", "🇨🇿"):
        stopped = [t.text for t in engine.stream(PROMPT, stop=stop, **given)]
        assert "".join(stopped) == text[: text.index(stop)]
        assert not any("\ufffd" in piece for piece in stopped)


@report(
    "ggml-org/llama.cpp#4025", KIND, "The speculative path read the prompt without special tokens."
)
@report(
    "huggingface/transformers#46124",
    KIND,
    "A text had a token of its beginning too few or too many.",
)
def test_a_text_has_one_beginning(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("{{ bos_token }}" + TEMPLATE)
    tokenizer.add_special_tokens({"bos_token": "<|user|>"})
    bos = tokenizer.bos_token_id
    raw: Any = tokenizer.backend_tokenizer
    raw.post_processor = TemplateProcessing(
        single="<|user|> $A", pair="<|user|> $A $B", special_tokens=[("<|user|>", bos)]
    )
    assert encode(tokenizer, "ab")[:2] != [bos, bos]
    assert encode(tokenizer, "ab").count(bos) == 1
    system = [{"role": "system", "content": "x"}]
    assert encode(tokenizer, system)[0] == bos
    assert encode(tokenizer, system).count(bos) == 1
    assert encode(tokenizer, question("a")).count(bos) == 2, (
        "the beginning, and the mark of the user's turn"
    )
    chat = [{"role": "system", "content": "x"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "q"}, chat[1]]})
    )
    (sample,) = read_samples([tmp_path / "a.jsonl"], tokenizer, 64)
    assert sample.tokens.tolist().count(bos) == 2
    assert sample.tokens.tolist()[:2] == [bos, bos]


@report("FasterDecoding/REST#23", KIND, "Data stores kept ids in 16 bits.")
@report("FasterDecoding/REST#19", KIND, "Tokens that were added to a vocabulary were not counted.")
def test_a_data_store_keeps_large_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, last = 69_994, 69_993
    documents = [np.array([1, 65_536, last, 65_537, 1, 65_536, last, 65_537, 5], np.uint32)]
    drafter = RESTDrafter(REST(), (index_documents(documents, vocab),), vocab)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, initializer_range=0.4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    target, sent = Target(CausalLM(LlamaForCausalLM(config).double()), "large"), set[int]()
    verify = Target.verify

    def watched(self: Target, cache: Any, tree: Any, *more: Any) -> Any:
        sent.update(tree.tokens.tolist())
        return verify(self, cache, tree, *more)

    request = Request([1, 65_536, last], 6, processors=(Starting(65_537, 3),))
    monkeypatch.setattr(Target, "verify", watched)
    found = Engine(target, drafter, Chain(4), costs=COSTS).write([request])
    assert found.tokens[0][0] == 65_537
    assert {1, 65_536, last} <= sent, "what follows in the documents was drafted"
    assert found.tokens == generate_plain(target, [request]).tokens


@report(
    "ml-explore/mlx-lm#1297",
    KIND,
    "Options of drafting were read from the command line, and never handed on.",
)
@pytest.mark.parametrize(
    ("options", "reads"),
    [
        (["--drafter", "pld"], lambda told: told["stats"]["nodes_per_step"]),
        (["--policy", "chain:length=2"], lambda told: told["stats"]["nodes_per_step"]),
        (["--max-new-tokens", "3"], lambda told: told["stats"]["new_tokens"]),
        (["--temperature", "1.5", "--seed", "7"], lambda told: told["text"]),
    ],
    ids=["drafter", "policy", "length", "temperature"],
)
def test_options_of_a_command_change_what_it_does(
    options: list[str],
    reads: Callable[[Any], Any],
    folder: Path,
    draftree: Callable[..., tuple[int, str, str]],
) -> None:
    base = ["generate", "ababab", "--target", str(folder), "--json"]
    given = {"--drafter": f"lm:model={folder}", "--policy": "chain", "--max-new-tokens": "8"}

    def told(changes: list[str]) -> Any:
        named = {**given, **dict(zip(changes[::2], changes[1::2], strict=True))}
        status, out, _ = draftree(*base, *[word for pair in named.items() for word in pair])
        assert status == 0
        return json.loads(out)

    assert reads(told(options)) != reads(told([]))


@report("am17an/llama.cpp#20", KIND, "A request that was cancelled left its slot busy.")
def test_many_streams_may_be_open_at_once(target: Target) -> None:
    for engine in both(target, [whole(target)]):
        streams = [engine.stream(PROMPT, max_new_tokens=8, ignore_eos=True) for _ in range(4)]
        firsts = [next(s).id for s in streams]
        streams[1].close()
        streams[3].close()
        assert [t.id for t in streams[0]] == [t.id for t in streams[2]] == plainly(target)[1:8]
        assert set(firsts) == {plainly(target)[0]}
