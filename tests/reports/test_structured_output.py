"""Grammars under drafts: what is forbidden is never accepted, and the grammar's state follows what was accepted alone."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from draftree.data.prompts import encode
from draftree.engine import Engine, generate_plain, load
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.grammar import Constrained, Grammar, Vocabulary
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from draftree.testing.fakes import Always, Scripted, Sometimes
from draftree.text.options import Options
from draftree.text.stop_strings import decode_tokens
from reports import report

KIND = "Structured output"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "caterpillar"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "age"],
    "additionalProperties": False,
}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WARM: dict[str, Any] = {"temperature": 1.2, "seed": 5}


def asked(target: Target, prompt: str = "ab", **options: Any) -> Request:
    """Return the request of a constrained completion."""
    known = Options(**{"max_new_tokens": 60, **options})
    return known.request(target, encode(target.tokenizer, prompt))


def texts(target: Target, request: Request, free: bool = False) -> list[list[int]]:
    """Return the request's text by plain decoding; `free` leaves the grammar out."""
    known = Request(request.prompt, 60, sampling=request.sampling) if free else request
    return [[*request.prompt, *generate_plain(target, [known]).tokens[0]]]


def engines(target: Target, plans: list[list[int]]) -> list[Engine]:
    """Return engines whose drafts follow plans, in chains and trees, and one that drafts from the text."""
    vocab = target.decoder.vocab
    return [
        Engine(target, Always(plans, vocab), Chain(5), costs=COSTS),
        Engine(target, Sometimes(plans, vocab), VCT(3, 3), costs=COSTS),
        load(target, "suffix", "chain:length=5", costs=COSTS),
    ]


@report(
    "openvinotoolkit/openvino.genai#4081",
    KIND,
    "A grammar that had ended was asked for the next mask, and the request crashed.",
)
@report(
    "sgl-project/sglang#15373",
    KIND,
    "The mask of a grammar that had ended was filled for the rest of the drafts.",
)
@report(
    "vllm-project/vllm#53777",
    KIND,
    "Drafts that the grammar forbids were handed to it, and it failed to advance.",
)
@pytest.mark.parametrize("options", [{}, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "given", [{"json_schema": SCHEMA}, {"regex": "(ab|ba){2,3}c"}], ids=["json", "regex"]
)
def test_a_grammar_ends_with_eos_inside_drafts(
    target: Target, given: dict[str, Any], options: dict[str, Any]
) -> None:
    request = asked(target, **given, **options)
    wanted = generate_plain(target, [request]).tokens[0]
    assert wanted[-1] in target.eos
    for engine in [
        *engines(target, texts(target, request)),
        *engines(target, texts(target, request, free=True)),
    ]:
        assert engine.write([request]).tokens == [wanted]


@report(
    "sgl-project/sglang#21723",
    KIND,
    "In a batch the end of a grammar was not noticed inside an accepted block.",
)
@report(
    "sgl-project/sglang#28682",
    KIND,
    "Tokens after the end of the grammar were committed and had to be taken back.",
)
def test_grammars_of_a_batch_end_at_different_steps(target: Target) -> None:
    requests = [asked(target, "a", regex="ab"), asked(target, "b", json_schema=SCHEMA), asked(target, "c"),
                asked(target, "d", regex="[ab]{9}", **WARM)]  # fmt: skip
    alone = [generate_plain(target, [r]).tokens[0] for r in requests]
    assert [a[-1] in target.eos for a in alone] == [True, True, False, True]
    plans = [[*r.prompt, *a, *[9] * 6] for r, a in zip(requests, alone, strict=True)]
    for engine in engines(target, plans):
        assert engine.write(requests).tokens == alone


@report(
    "sgl-project/sglang#25388",
    KIND,
    "A token was accepted by the verification and rejected by the grammar afterwards.",
)
@report("ollama/ollama#18105", KIND, "A request with a grammar could not use drafts at all.")
@pytest.mark.parametrize("acceptor", ["match", "rejection", "block"])
def test_what_is_accepted_is_what_the_grammar_allows(target: Target, acceptor: str) -> None:
    engine = load(target, "lookahead", "chain:length=4", acceptor, costs=COSTS)
    pattern = "(a|bc|cab){3,5}d"
    for seed in range(4):
        found = engine.complete("ab", regex=pattern, max_new_tokens=40, temperature=1.5, seed=seed)
        assert re.fullmatch(pattern, found.text)
        assert found.ending == "eos"
    long = Engine(target, Always([[]], 260), Chain(4), build("acceptor", acceptor), COSTS)
    found = long.complete("ab", regex="x{12}", max_new_tokens=40, temperature=1.0)
    assert (found.text, found.ending) == ("x" * 12, "eos")
    assert found.stats.acceptance_length > 2, "what is forced is drafted"


@report(
    "vllm-project/vllm#44297",
    KIND,
    "Positions after the token that ends a thought kept the mask of the unconstrained part.",
)
@report(
    "vllm-project/vllm#36138",
    KIND,
    "The grammar was left out where reasoning ended inside drafted tokens.",
)
def test_a_grammar_that_begins_inside_an_accepted_block_holds(target: Target) -> None:
    """What comes before the grammar is forced, so that its last tokens and the first of the grammar are one draft."""
    grammar = Grammar.lark('start: /[x-z]*/ "|" /(ab|ba)+/')
    request = asked(target, grammar=grammar, **WARM)
    wanted = generate_plain(target, [request]).tokens[0]
    text = decode_tokens(target.tokenizer, wanted[:-1] if wanted[-1] in target.eos else wanted)
    assert re.fullmatch(r"[x-z]*(\|(ab|ba)*[ab]?)?", text)
    for engine in engines(target, texts(target, request)):
        assert engine.write([request]).tokens == [wanted]


@report(
    "vllm-project/vllm#41897",
    KIND,
    "Masks were computed for a chain of drafts alone, and not for the branches of a tree.",
)
def test_every_branch_of_a_tree_has_its_own_mask(target: Target) -> None:
    """The right token comes second or third among siblings, so that accepted paths lie on later branches."""

    class Later(Scripted):
        def place(self, row: int, position: int) -> int | None:
            return 1 + position % 2

    for options in ({}, WARM):
        request = asked(target, regex="(a[bc]d|b[ac]e){4}", **options)
        plans = texts(target, request)
        found = Engine(target, Later(plans, 260), VCT(3, 3), costs=COSTS).write([request])
        assert found.tokens[0] == plans[0][len(request.prompt) :]
        assert found.stats.acceptance_length > 2


@report(
    "InternLM/lmdeploy#4551",
    KIND,
    "With drafts on, schemas and patterns were ignored, and nothing said so.",
)
@report(
    "tenstorrent/tt-inference-server#3199",
    KIND,
    "JSON with text fields came back without its closing brace.",
)
@report("kekzl/imp#1199", KIND, "An answer ended as complete while its JSON was still open.")
@pytest.mark.parametrize("drafter", ["pld", "suffix", "lookahead", "token_recycling"])
def test_json_is_whole_where_it_ends(target: Target, drafter: str) -> None:
    engine = load(target, drafter, "chain:length=6", costs=COSTS)
    for schema, seed in ((SCHEMA, 0), (PERSON, 1), (PERSON, 2)):
        found = engine.complete(
            "ab", json_schema=schema, max_new_tokens=90, temperature=1.0, seed=seed
        )
        assert found.ending == "eos"
        assert set(json.loads(found.text)) == set(schema["required"])
        cut = engine.complete(
            "ab", json_schema=schema, max_new_tokens=5, temperature=1.0, seed=seed
        )
        assert (cut.ending, cut.tokens) == ("length", found.tokens[:5])


@report(
    "vllm-project/vllm#30916",
    KIND,
    "After a request was pushed out its old drafts and the state of its grammar no longer agreed.",
)
@report(
    "vllm-project/vllm#31955",
    KIND,
    "Drafts from before a pause were checked against the grammar after it.",
)
def test_a_grammar_goes_on_after_a_text_was_left(target: Target) -> None:
    request = asked(target, json_schema=SCHEMA)
    wanted = generate_plain(target, [request]).tokens[0]
    for engine in engines(target, [[*request.prompt, *wanted]]):
        for steps_taken in (1, 2, 3):
            rows, steps = engine.begin([request])
            for _ in range(steps_taken):
                next(steps)
            steps.close()
            assert rows.written[0] == wanted[: len(rows.written[0])]
            assert engine.write([request]).tokens == [wanted], (
                "with the same processors, asked about other texts before"
            )


@report(
    "anthony-chaudhary/fak#5271",
    KIND,
    "The grammar advanced by what was drafted, and its state was spoiled by a rejection.",
)
@report(
    "vllm-project/vllm#12388",
    KIND,
    "A grammar had to be rolled back by as many tokens as it had taken, not as were drafted.",
)
def test_the_mask_after_a_text_does_not_depend_on_what_was_asked_before(target: Target) -> None:
    tokens = Vocabulary.of(target.tokenizer, target.decoder.vocab, target.eos)
    processor = Constrained(Grammar.json_schema(SCHEMA), tokens, 0)
    request = asked(target, json_schema=SCHEMA)
    wanted = generate_plain(target, [request]).tokens[0]
    rng = np.random.default_rng(0)
    true = [
        Constrained(Grammar.json_schema(SCHEMA), tokens, 0).allowed_tokens(wanted[:n])
        for n in range(len(wanted))
    ]
    for n in rng.integers(0, len(wanted), 40):
        processor.allowed_tokens(
            [*wanted[:n], *rng.integers(4, 260, rng.integers(0, 4)).tolist()]
        )  # drafts that are rejected
        assert (processor.allowed_tokens(wanted[:n]) == true[n]).all()
    assert all(bool(mask[token]) for mask, token in zip(true, wanted, strict=True))


@report(
    "microsoft/onnxruntime-genai#2315",
    KIND,
    "Tokens that a grammar forces, drafts and draws had to agree on what is seen outside.",
)
def test_forced_tokens_are_drafted_in_front_of_the_drafter(target: Target) -> None:
    never = Engine(target, Sometimes([[]], 260), Chain(5), costs=COSTS)
    for options in ({}, WARM):
        request = asked(target, json_schema=SCHEMA, **options)
        found = never.write([request])
        assert found.tokens == generate_plain(target, [request]).tokens
        assert found.stats.acceptance_length > 1.5, "the names of the fields are forced"
    torch.manual_seed(0)
