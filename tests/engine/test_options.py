"""Options: their ranges, the request they stand for, and that each gives plain decoding's text under every pairing."""

import json
import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from draftree.data.prompts import encode
from draftree.engine import Engine
from draftree.errors import UnknownName, UserError
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.request import Request
from draftree.sampling.grammar import Constrained, Grammar
from draftree.sampling.logits_processors import ForcedBeginning, FrequencyPenalty, PresencePenalty
from draftree.target.target import Target
from draftree.testing.fakes import Always, Sometimes, tiny_target
from draftree.text.option_fields import Parameters
from draftree.text.options import Options
from folders import target_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(str(target_folder(tmp_path_factory.mktemp("target"))), torch.float64)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens is 0, allowed is a whole number of at least 1"),
    ({"max_new_tokens": True}, "max_new_tokens is True, allowed is a whole number"),
    ({"max_new_tokens": 3.0}, "max_new_tokens is 3.0, allowed is a whole number"),
    ({"temperature": "hot"}, "temperature is 'hot', allowed is a finite number of at least 0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_p": 0.0}, "top_p is 0.0, allowed is a number in (0, 1]"),
    ({"min_p": 1.5}, "min_p is 1.5"),
    ({"typical_p": 0}, "typical_p is 0, allowed is a number in (0, 1]"),
    ({"seed": 2**64}, "seed is 18446744073709551616"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0, allowed is a finite number above 0"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty is inf, allowed is a finite number"),
    ({"presence_penalty": None}, "presence_penalty is None"),
    ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size is -2"),
    (
        {"logit_bias": {5: float("nan")}},
        "logit_bias is {5: nan}, allowed is ids or texts of one token",
    ),
    ({"logit_bias": {5: float("inf")}}, "logit_bias is {5: inf}"),
    ({"logit_bias": {"": 1.0}}, "logit_bias is {'': 1.0}"),
    ({"suppress": [-1]}, "suppress is [-1], allowed is ids of at least 0"),
    ({"bad_words": [""]}, "bad_words is [''], allowed is texts of at least one character"),
    (
        {"min_new_tokens": 9, "max_new_tokens": 8},
        "min_new_tokens is 9, allowed is at most max_new_tokens, 8",
    ),
    (
        {"min_new_tokens": 200},
        "min_new_tokens is 200, allowed is at most max_new_tokens, 128",
    ),
    ({"stop": ["a", ""]}, "stop is ['a', ''], allowed is texts of at least one character"),
    ({"stop": "\ufffd"}, "U+FFFD none of them"),
    ({"beginning": [1.5]}, "beginning is [1.5], allowed is a text, or ids"),
    ({"max_time": 0}, "max_time is 0, allowed is none or a finite number above 0"),
    ({"logprobs": -1}, "logprobs is -1, allowed is none or a whole number"),
    (
        {"json_schema": {}, "regex": "a"},
        "json_schema and regex are given, allowed is one of json_schema, regex, grammar",
    ),
    ({"regex": "("}, "regex '(' cannot be used"),
    ({"regex": 5}, "regex is 5, allowed is a pattern of at least one character"),
    (
        {"json_schema": ["a"]},
        "json_schema is ['a'], allowed is JSON text, or the object it stands for",
    ),
    ({"json_schema": "{"}, "JSON schema '{' cannot be used"),
    ({"grammar": "start: A"}, "grammar is 'start: A', allowed is a Grammar"),
    (
        {"regex": "a", "ignore_eos": True},
        "ignore_eos is given with regex, but a constrained response ends",
    ),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG, ids=lambda value: str(value)[:40])
def test_a_value_out_of_its_range_is_told_in_one_line(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)) as found:
        Options(**wrong)
    assert "\n" not in str(found.value)


def test_all_wrong_values_are_told_together() -> None:
    with pytest.raises(
        UserError,
        match=r"top_p is 3, allowed is .*; min_p is -1, allowed is .*; n is 0, allowed is",
    ):
        Options(top_p=3, min_p=-1, n=0)


def test_an_option_that_does_not_exist_is_told_with_the_nearest() -> None:
    with pytest.raises(
        UnknownName, match=r"unknown option 'max_new_token'.*did you mean 'max_new_tokens'"
    ):
        Options.of(None, {"max_new_token": 3})
    assert Options.of(Options(seed=3), {"top_k": 4}) == Options(seed=3, top_k=4)


def test_every_option_has_its_help_and_its_place_in_the_docstring() -> None:
    names = {f.name for f in fields(Options)}
    assert names - {"n", "max_length"} == {f.name for f in fields(Parameters) if f.metadata["help"]}
    for name in names:
        assert f"{name}: " in str(Options.__doc__)


def test_processors_are_transformers_own_in_its_order_and_ours_behind_them(target: Target) -> None:
    asked = Options(
        logit_bias={"a": 1, 9: -3.0}, repetition_penalty=2, no_repeat_ngram_size=2, bad_words="x", min_new_tokens=3,
        suppress=[5], frequency_penalty=1, presence_penalty=1, beginning="b", regex="[a-z]+",
    )  # fmt: skip
    request = asked.request(target, [4, 5, 6], number=7)
    assert [type(p) for p in request.processors] == [
        SequenceBiasLogitsProcessor, RepetitionPenaltyLogitsProcessor, NoRepeatNGramLogitsProcessor,
        NoBadWordsLogitsProcessor, MinNewTokensLengthLogitsProcessor, SuppressTokensLogitsProcessor, FrequencyPenalty,
        PresencePenalty, ForcedBeginning, Constrained,
    ]  # fmt: skip
    assert request.guides == request.processors
    assert (request.number, request.eos) == (7, {1})
    assert Options().request(target, [4]) == Request([4], 128, frozenset({1}))
    assert Options(ignore_eos=True, min_new_tokens=2).request(target, [4]) == Request([4], 128)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"logit_bias": {260: 1.0}}, "logit_bias names token id 260, allowed are 0 … 259"),
        ({"logit_bias": {"ab": 1.0}}, "logit_bias names 'ab', which is 2 tokens"),
        ({"suppress": [999]}, "suppress names token id 999, allowed are 0 … 259"),
        ({"beginning": [300]}, "beginning names token id 300"),
    ],
    ids=str,
)
def test_a_token_that_does_not_exist_is_told(
    target: Target, wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        Options(**wrong).request(target, [4])


def test_a_text_needs_a_tokenizer() -> None:
    bare = tiny_target()
    bare.name = "./nowhere"  # else a hub would be asked
    with pytest.raises(UserError, match="has no tokenizer"):
        Options(stop="a").request(bare, [4])
    assert Options(suppress=[3]).request(bare, [4]).criteria == ()


EVERY: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "typical_p": {"temperature": 1.0, "typical_p": 0.6},
    "seed": {"temperature": 1.0, "seed": 9},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 2.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "logit_bias": {"logit_bias": {"a": 4.0, 40: 3.0, 41: float("-inf")}},
    "suppress": {"suppress": list(range(30, 120))},
    "bad_words": {"bad_words": ["a", "bc", "e"]},
    "min_new_tokens": {"logit_bias": {1: 6.0}, "min_new_tokens": 9},
    "stop": {"logit_bias": {"a": 5.0, "b": 5.0}, "stop": ["ab", "ba", "aaaaa", "bbbb"]},
    "stop_ids": {"logit_bias": {40: 5.0, 41: 5.0, 42: 5.0}, "stop_ids": [41]},
    "json_schema": {"json_schema": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}},
                                    "required": ["name"], "additionalProperties": False}},
    "regex": {"regex": "(yes|no), [a-c]{3,8}!"},
    "grammar": {"grammar": Grammar.lark('start: "x" start | "y"')},
    "beginning": {"beginning": "Sure: "},
    "logprobs": {"logprobs": 2},
    "ignore_eos": {"logit_bias": {1: 5.0}, "ignore_eos": True},
    "all of them": {"repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.3, "no_repeat_ngram_size": 3,
                    "logit_bias": {"a": 3.0}, "suppress": [50], "bad_words": ["b"], "min_new_tokens": 5, "stop": ["zz"],
                    "top_k": 50, "top_p": 0.95, "beginning": "!"},
}  # fmt: skip
"""Every option that does not depend on time."""


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param(
            n, t, marks=pytest.mark.long if "temperature" not in EVERY[n] and i % 2 != t else ()
        )
        for i, n in enumerate(EVERY)
        for t in (0.0, 1.0)
        if t or "temperature" not in EVERY[n]
    ],
)
def test_every_option_gives_the_text_of_plain_decoding(
    target: Target, name: str, temperature: float
) -> None:
    options = Options(**{"max_new_tokens": 20, "temperature": temperature, **EVERY[name]})
    prompt = encode(target.tokenizer, "abcab")
    request, sampling = options.request(target, prompt, number=3), options.sampling
    assert (
        request == options.request(target, prompt, number=3)
        or request.processors
        or request.criteria
    )
    first = Engine(target, Always([[]], 260), Chain(1))
    expected = first.plain([request], sampling).tokens[0]
    plans = [[*prompt, *expected, 7, 7, 7, 7]]
    for drafter, policy in ((Always(plans, 260), Chain(4)), (Sometimes(plans, 260), VCT(3))):
        again = options.request(target, prompt, number=3)
        found = Engine(target, drafter, policy).write([again], sampling, reuse=False)
        assert found.tokens[0] == expected, "under a request of its own"
        if len(expected) > 3:
            assert found.stats.acceptance_length > 1, "whole paths were accepted"
    assert (
        Engine(target, drafter, policy).write([request], sampling, reuse=False).tokens[0]
        == expected
    ), "it serves again"


def test_every_option_is_in_that_test() -> None:
    assert {f.name for f in fields(Options)} - set(EVERY) == {
        "max_new_tokens",
        "max_time",
        "n",
        "max_length",
    }


BEYOND_ASCII = list(range(98, 260))
"""Bytes that are no character by themselves."""


def text_of(target: Target, **options: Any) -> str:
    engine = Engine(target, Sometimes([[]], 260), Chain(3))
    return engine.complete("abcab", **{"max_new_tokens": 30, **options}).text


def test_options_do_what_they_say(target: Target) -> None:
    assert text_of(target, beginning="Sure: ").startswith("Sure: ")
    assert re.fullmatch("(yes|no), [a-c]{3,8}!", text_of(target, regex="(yes|no), [a-c]{3,8}!"))
    compact = Grammar.json_schema(EVERY["json_schema"]["json_schema"], spaces="none")
    assert len(json.loads(text_of(target, grammar=compact))["name"]) <= 4
    unlike = text_of(target, no_repeat_ngram_size=1, suppress=BEYOND_ASCII)
    assert len(set(unlike)) == len(unlike)
    plain = text_of(target, suppress=BEYOND_ASCII)
    assert plain[0] not in text_of(target, suppress=BEYOND_ASCII, bad_words=plain[0])
    assert set(text_of(target, logit_bias={"k": 1000.0})) == {"k"}
    assert text_of(target, logit_bias={"k": 1000.0}, frequency_penalty=1000.0).count("k") == 1


def test_a_banned_word_is_banned_behind_a_space_too(target: Target) -> None:
    engine = Engine(target, Sometimes([[]], 260), Chain(3))
    request = Options(bad_words=["hm"]).request(target, [9])
    h, m, space = encode(engine.tokenizer, "hm ")
    banned = next(p for p in request.processors if isinstance(p, NoBadWordsLogitsProcessor))
    assert set(banned.sequence_bias) == {(h, m), (space, h, m)}


def test_an_eos_cannot_be_a_bad_word(target: Target) -> None:
    assert Options(bad_words="<eos>").request(target, [9]).processors[0].bad_word_ids != [[1]]  # type: ignore[attr-defined]


def test_time_ends_a_text_at_the_next_token(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    engine = Engine(target, Sometimes([[]], 260), Chain(3))
    done = engine.complete("abcab", max_time=4.5, ignore_eos=True, max_new_tokens=50)
    assert (len(done.tokens), done.ending, done.stop) == (5, "stop", None), (
        "5 tokens after the start it was 5 s later"
    )
    assert (
        len(engine.complete("abcab", max_time=1000, ignore_eos=True, max_new_tokens=50).tokens)
        == 50
    )


def test_all_of_them_are_functions_that_leave_their_input(target: Target) -> None:
    everything = EVERY["all of them"]
    for step in Options(**{**everything, "temperature": 1}).request(target, [5]).processors:
        assert isinstance(step, LogitsProcessor)
        scores = torch.randn(1, 260, dtype=torch.float64)
        given = scores.clone()
        once = step(torch.tensor([[5, 6, 6, 7]]), scores)
        assert torch.equal(step(torch.tensor([[5, 6, 6, 7]]), scores), once), (
            "a function of its input"
        )
        assert torch.equal(scores, given), "which it leaves as it is"


def test_the_least_number_of_tokens_is_compared_with_the_length_that_counts() -> None:
    target = tiny_target(context=512)
    asked = Options(max_length=400, min_new_tokens=200)
    assert asked.request(target, [4]).max_new_tokens == 399
    with pytest.raises(
        UserError, match="min_new_tokens is 200, allowed is at most max_length less the prompt, 150"
    ):
        asked.request(target, [4] * 250)
