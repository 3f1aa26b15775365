"""Where a text ends: EOS, stop texts, limits, and what is counted and told of the end."""

import itertools
from typing import Any

import pytest
import torch

from architectures import model
from draftree import UserError, speculate
from draftree.drafters._from_objects import LoadedModel
from draftree.engine import load
from draftree.registry import build
from draftree.request import Request
from draftree.target.target import Target
from draftree.text.options import Options
from draftree.text.stop_strings import decode_tokens
from generating import TEXTS
from reports import report
from reports.engines import LENGTH, PROMPT, asked, both, knowing, plainly, whole

KIND = "Stops and limits"


def ids(**options: Any) -> list[int]:
    """Return what `generate` writes of a tiny Llama."""
    found: torch.Tensor = model("llama").generate(TEXTS[0][None], do_sample=False, **options)
    return found[0].tolist()


def hooks(count: int = 8) -> list[Any]:
    """Return hooks that draft with the model itself, and from the text."""
    return [
        speculate(d, f"chain:length={count}")
        for d in (LoadedModel(model("llama")), "pld", "suffix")
    ]


@report(
    "huggingface/transformers#47912",
    KIND,
    "An EOS was looked for at the last token of an accepted block alone, and the text went on after an EOS in its middle.",
)
def test_an_eos_inside_an_accepted_block_ends_the_text() -> None:
    text = ids(max_new_tokens=16, eos_token_id=None)
    for at in (len(TEXTS[0]) + 3, len(TEXTS[0]) + 6):
        wanted = ids(max_new_tokens=16, eos_token_id=[text[at], 70], pad_token_id=0)
        assert wanted == text[: text.index(text[at], len(TEXTS[0])) + 1]
        for hook in hooks():
            assert (
                ids(
                    max_new_tokens=16,
                    eos_token_id=[text[at], 70],
                    pad_token_id=0,
                    custom_generate=hook,
                )
                == wanted
            )


@report(
    "huggingface/transformers#48039",
    KIND,
    "Stop strings beside an assistant raised an error, and one that was complete inside a block was passed over.",
)
def test_stop_strings_work_beside_a_draft_model(target: Target) -> None:
    prompt = torch.tensor([target.tokenizer(PROMPT)["input_ids"]])
    served = target.decoder.model
    text = decode_tokens(target.tokenizer, plainly(target))
    for start in (2, 7, 11):
        given: dict[str, Any] = {"max_new_tokens": LENGTH, "eos_token_id": None, "do_sample": False}
        given |= {"stop_strings": [text[start : start + 2]], "tokenizer": target.tokenizer}
        hook = speculate(LoadedModel(served), "chain:length=5", tokenizer=target.tokenizer)
        assert torch.equal(
            served.generate(prompt, custom_generate=hook, **given), served.generate(prompt, **given)
        )


@report(
    "sgl-project/sglang#31599",
    KIND,
    "The token limit was asked before the stop text, so that a block which reached both hid the stop and leaked its tokens.",
)
def test_a_stop_inside_the_limit_wins_over_the_limit(target: Target) -> None:
    tokens, text = plainly(target), decode_tokens(target.tokenizer, plainly(target))
    at = next(
        i
        for i in range(4, 12)
        if "\ufffd" not in text[i - 1 : i + 1] and text.find(text[i - 1 : i + 1]) == i - 1
    )
    stop = text[at - 1 : at + 1]
    count = next(
        i for i in range(len(tokens) + 1) if stop in decode_tokens(target.tokenizer, tokens[:i])
    )
    for limit, engine in itertools.product(range(count, count + 6), both(target, [whole(target)])):
        found = engine.complete(
            PROMPT, max_new_tokens=limit, ignore_eos=True, stop=stop, logprobs=0
        )
        assert (found.ending, found.tokens, len(found.logprobs)) == ("stop", tokens[:count], count)
        assert found.text == text[: text.index(stop)]


@report(
    "vllm-project/vllm#49391",
    KIND,
    "With several tokens a step the stop text that stood first in the list won, and not the one that was complete first.",
)
def test_the_order_of_stop_texts_does_not_matter() -> None:
    """Two stop texts stand in one token: the one that is complete first ends the text, in whatever order they are given."""
    demo = Target.load("demo", torch.float32)
    prompt = "Once upon a time"
    tokens = plainly(demo, prompt, max_new_tokens=16)
    engine, seen = knowing(demo, [whole(demo, prompt, max_new_tokens=16)]), 0
    for at in range(2, 16):
        before, after = (
            decode_tokens(demo.tokenizer, tokens[:at]),
            decode_tokens(demo.tokenizer, tokens[: at + 1]),
        )
        piece = after[len(before) :]
        if len(piece) < 4 or piece[1] in after[: len(before) + 1] or piece[2:] in before:
            continue
        seen += 1
        for order in itertools.permutations([piece[2:], piece[1], "never"]):
            given: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, "stop": order}
            assert engine.complete(prompt, **given).text == after[: len(before) + 1]
            assert (
                "".join(t.text for t in engine.stream(prompt, **given)) == after[: len(before) + 1]
            )
        if seen == 2:
            break
    assert seen


@report(
    "vllm-project/vllm#41768",
    KIND,
    "A least number of tokens hid the EOS in one draft position too many, and sequences without drafts shifted the batch.",
)
def test_a_least_number_of_tokens_is_kept_to_the_token() -> None:
    text = ids(max_new_tokens=16, eos_token_id=None)[len(TEXTS[0]) :]
    eos = text[5]
    for least in range(text.index(eos) - 1, text.index(eos) + 6):
        given = {
            "max_new_tokens": 16,
            "min_new_tokens": least,
            "eos_token_id": eos,
            "pad_token_id": 0,
        }
        wanted = ids(**given)
        for hook in hooks(5):
            assert ids(custom_generate=hook, **given) == wanted


@report(
    "huggingface/transformers#46993",
    KIND,
    "Prompt lookup returned more new tokens than `max_new_tokens` allows.",
)
@pytest.mark.parametrize("drafter", ["pld:length=10", "suffix", "lookahead"])
def test_no_more_than_max_new_tokens_are_written(target: Target, drafter: str) -> None:
    engine = load(target, drafter, "chain:length=10")
    for limit in (1, 2, 3, 5):
        found = engine.complete("ababababababab", max_new_tokens=limit, ignore_eos=True)
        assert found.tokens == plainly(target, "ababababababab", max_new_tokens=limit)
        assert found.ending == "length"


@report(
    "sgl-project/sglang#21258",
    KIND,
    "A repetition penalty of 0 was allowed and divided by zero.",
)
@report(
    "ml-explore/mlx-lm#1591",
    KIND,
    "A token limit of -1 crashed the draft loop.",
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("max_new_tokens", -1), ("max_new_tokens", 0),
        ("temperature", -0.5), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -2), ("min_p", 2.0),
        ("typical_p", 0.0), ("seed", -1), ("n", 0), ("logprobs", -1), ("frequency_penalty", float("inf")),
        ("max_time", -1.0), ("no_repeat_ngram_size", -2), ("min_new_tokens", -1),
    ],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^{name} is [^\n]*allowed is [^\n]*$"):
        Options.of(None, {name: value})


@report(
    "ikawrakow/ik_llama.cpp#2358",
    KIND,
    "A whole accepted block was charged to the limit before it was shown, so that answers were shorter than their count said.",
)
@pytest.mark.parametrize("limit", [1, 4, 7, 8, 13])
def test_as_many_tokens_are_shown_as_are_counted(target: Target, limit: int) -> None:
    for engine in both(target, [whole(target)]):
        found = engine.complete(PROMPT, max_new_tokens=limit, ignore_eos=True, logprobs=0)
        assert found.tokens == plainly(target)[:limit]
        assert found.stats.new_tokens == len(found.logprobs) == len(found.origins) == limit
        shown = list(engine.stream(PROMPT, max_new_tokens=limit, ignore_eos=True))
        assert [t.id for t in shown] == found.tokens


@report(
    "sgl-project/sglang#39826",
    KIND,
    "A counter took in tokens that were accepted after the stop, and came out above the number of tokens of the answer.",
)
def test_nothing_after_the_end_is_counted(target: Target) -> None:
    text = decode_tokens(target.tokenizer, plainly(target))
    engine, beyond = knowing(target, [whole(target)]), 0
    for stop in sorted({c for c in text[3:] if c != "\ufffd"}):
        found = engine.complete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, stop=stop)
        assert found.stats.new_tokens == len(found.tokens) == len(found.origins)
        beyond += sum(s.accepted + 1 for s in found.stats.steps) + 1 > len(found.tokens)
    assert beyond, "some texts end inside an accepted path"


@report(
    "vllm-project/vllm#56101",
    KIND,
    "The length of accepted runs counted tokens after an EOS inside the run, and so said more than was written.",
)
def test_the_acceptance_length_says_that_it_is_before_the_cut(target: Target) -> None:
    """It is a figure of the drafts: τ counts what was accepted, the number of tokens what was written; neither is the other."""
    tokens = plainly(target)
    eos = tokens[8]
    request = Request(asked(target).prompt, LENGTH, frozenset({eos}))
    engine = knowing(target, [whole(target)])
    found = engine.write([request])
    end = tokens.index(eos) + 1
    assert found.tokens == [tokens[:end]]
    assert found.stats.new_tokens == end
    accepted = sum(s.accepted + 1 for s in found.stats.steps)
    assert accepted >= end - 1
    assert found.stats.acceptance_length == accepted / len(found.stats.steps)


@report(
    "sgl-project/sglang#11572",
    KIND,
    "The rate of accepted drafts came out above 1.",
)
@pytest.mark.parametrize(
    "policy", ["chain:length=3", "vct:width=3,depth=2", "beam:width=3,depth=3"]
)
def test_no_more_drafts_are_accepted_than_were_sent(target: Target, policy: str) -> None:
    for limit in (3, 9, LENGTH):
        steps = (
            knowing(target, [whole(target)], build("policy", policy))
            .write([asked(target, max_new_tokens=limit)])
            .stats.steps
        )
        assert all(0 <= s.accepted <= s.depth <= s.nodes for s in steps)
        assert any(s.accepted for s in steps) or limit < 4


@report(
    "Pushkinist/rMLX#235",
    KIND,
    "A step that failed in mid-text was reported as an end by length, so that a crash looked like a short answer.",
)
def test_a_step_that_fails_is_an_error_and_no_ending(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = knowing(target, [whole(target)]), 0
    verify = type(target).verify

    def failing(*args: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise RuntimeError("no memory")
        return verify(*args)

    monkeypatch.setattr(type(target), "verify", failing)
    shown = []
    with pytest.raises(RuntimeError, match="no memory"):
        shown.extend(engine.stream(PROMPT, max_new_tokens=LENGTH, ignore_eos=True))
    assert all(t.ending is None for t in shown)
    assert engine.complete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True).tokens == plainly(target)
