"""What a stranger tries first: a model of their own, whatever types come to hand, Ctrl-C in the middle."""

import asyncio
import copy
import json
import pickle
import random
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from math import inf, nan
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import typer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
)

import draftree as public
from draftree.cli import arguments
from draftree.cli.app import app
from draftree.costs.step_costs import Costs
from draftree.data.prompts import encode, question
from draftree.drafters.base import Method, TrainableMethod
from draftree.drafters.edd import EDD
from draftree.drafters.lookahead import Lookahead
from draftree.drafters.pld import PLD
from draftree.drafters.suffix import Suffix
from draftree.drafters.vdm import VDM
from draftree.engine import Engine, load, speculate
from draftree.errors import DraftreeError, UserError
from draftree.formats.checkpoint import DRAFTREE_ENTRY
from draftree.policies.chain import Chain
from draftree.policies.pct import PCT
from draftree.policies.vct import VCT
from draftree.registry import build, names, part
from draftree.request import Request
from draftree.sampling.grammar import Grammar
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.text.options import Options
from draftree.text.stop_strings import decode_tokens
from draftree.utils.files import read_object, write_text
from draftree.weights import demo_folder
from folders import byte_tokenizer, target_folder

TEXTS = ["abcab", "x", "the cat sat on the cat"]
UNIT = Costs({1: 1.0}, {1: 1.0})
SMALL = {"max_new_tokens": 9, "ignore_eos": True}
TRAINED = [
    n
    for n in names("drafter")
    if issubclass(part("drafter", n), TrainableMethod) and demo_folder(n).is_dir()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(str(folder), torch.float64)


@pytest.fixture
def engine(target: Target) -> Engine:
    return load(target, PLD(), Chain(3))


def loaded(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model


def in_memory(vocab: int = 260) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return LlamaForCausalLM(config)


# A model of one's own


def test_a_loaded_model_works_alone_and_says_what_drafts(folder: Path, target: Target) -> None:
    with pytest.warns(
        UserWarning,
        match=r"none is shipped for target .*: 'suffix' drafts, which needs no training",
    ):
        engine = load(loaded(folder), costs=UNIT)
    assert "Suffix" in type(engine.drafter).__name__
    assert engine.tokenizer.get_vocab() == target.tokenizer.get_vocab(), (
        "that of the folder it was loaded from"
    )
    found = engine.complete(TEXTS[0], **SMALL)
    ids = torch.tensor([encode(target.tokenizer, TEXTS[0])])
    stock: Any = loaded(folder)
    theirs = stock.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=9,
        do_sample=False,
        eos_token_id=None,
    )
    assert found.tokens == theirs[0, ids.shape[1] :].tolist()


def test_a_folder_may_be_a_path_and_so_may_a_drafter(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    drafter: Any = VDM().fresh(target)
    drafter.save(tmp_path)
    engine = load(folder, drafter=tmp_path, policy="chain", dtype="float64")
    assert (
        engine.complete(TEXTS[0], **SMALL).tokens
        == load(target, PLD(), Chain(3)).complete(TEXTS[0], **SMALL).tokens
    )


def test_the_demo_has_its_drafter_by_whatever_name() -> None:
    for place in ("demo", demo_folder(), str(demo_folder())):
        engine = load(place)
        assert engine.target.name == "demo"
        assert isinstance(engine.drafter, type(EDD().open(engine.target)))


def test_a_tokenizer_goes_beside_a_model() -> None:
    with pytest.warns(UserWarning, match="training mode"):
        engine = load(in_memory(), "pld", "chain", tokenizer=byte_tokenizer())
    assert engine.complete("ab", max_new_tokens=3).text == decode_tokens(
        byte_tokenizer(), engine.complete("ab", max_new_tokens=3).tokens
    )


def test_without_a_tokenizer_ids_are_written_and_texts_are_told_to_need_one() -> None:
    engine = load(in_memory().eval(), "pld", "chain")
    written = engine.write([Request([5, 6, 7], 4)]).tokens
    assert written == engine.plain([Request([5, 6, 7], 4)]).tokens
    ids = torch.tensor([[5, 6, 7]])
    assert (
        engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)[0, 3:].tolist()
        == written[0]
    )
    for prompt in ("ab", [5, 6]):
        with pytest.raises(
            UserError, match=r"has no tokenizer that can be read .*load\(…, tokenizer=…\) takes one"
        ):
            engine.complete(prompt)


def test_a_model_in_training_is_told_and_put_to_rest_whenever_that_is_found(folder: Path) -> None:
    model = loaded(folder)
    model.train()
    with pytest.warns(
        UserWarning, match="is in training mode and is put into evaluation mode"
    ) as told:
        engine = load(model, "pld", "chain")
    assert len(told) == 1
    assert not model.training
    first = engine.complete(TEXTS[0], **SMALL).tokens
    model.train()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    with pytest.warns(UserWarning, match="training mode"):
        second = engine.complete(TEXTS[0], **SMALL).tokens
    assert second != first
    assert second == load(model, "pld", "chain").complete(TEXTS[0], **SMALL).tokens, (
        "and nothing of the old weights is kept"
    )
    model.train()
    with pytest.warns(UserWarning, match="training mode"):
        engine.plain([Request([1, 2], 2)])


def test_speculate_drafts_for_any_model_without_being_told_how(folder: Path) -> None:
    model: Any = loaded(folder)
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "do_sample": False}
    expected = model.generate(ids, **asked)
    hook = speculate(policy="chain")
    with pytest.warns(UserWarning, match="'suffix' drafts"):
        assert torch.equal(model.generate(ids, **asked, custom_generate=hook), expected)
    assert torch.equal(model.generate(ids, **asked, custom_generate=hook), expected), (
        "and says it once"
    )


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: in_memory().eval().to("meta"), "the LlamaForCausalLM has no weights"),
    "no head": (lambda: LlamaModel(in_memory().config).eval(), "LlamaModel .* is not supported"),
    "a class": (
        lambda: LlamaForCausalLM,
        "target is <class .*, allowed is demo, smollm2, a Hugging Face folder",
    ),
    "a module": (lambda: torch.nn.Linear(2, 2), "target is Linear"),
    "nothing": (lambda: None, "target is None"),
    "bytes": (lambda: b"demo", "target is b'demo'"),
    "half a character": (lambda: "\ud800", "cannot load target"),
    "no file name": (lambda: "\0", "cannot load target"),
}


@pytest.mark.parametrize("name", MODELS)
def test_invalid_targets_are_refused_in_a_line(name: str) -> None:
    make, told = MODELS[name]
    with pytest.raises(UserError, match=told) as found:
        load(make(), "pld", "chain")
    assert "\n" not in str(found.value)


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"policy": 5},
        r"policy is 5, allowed is a spec \(accumlogp, .*beam, c2t, .*\) or an instance of Policy, or None$",
    ),
    ({"policy": PCT}, r"policy is <class .*; did you mean PCT\(\)\?"),
    ({"policy": PLD()}, r"policy is PLD\(.*, allowed is a spec"),
    ({"policy": ""}, "unknown policy ''"),
    ({"acceptor": 5}, "acceptor is 5, allowed is .* or an instance of Acceptor, or None"),
    ({"acceptor": ""}, "unknown acceptor ''"),
    ({"drafter": 5}, "drafter is 5, allowed is .* or an instance of Method, or None"),
    ({"drafter": PLD}, r"did you mean PLD\(\)\?"),
    ({"drafter": ""}, "unknown drafter ''"),
    ({"drafter": Path("nowhere")}, "unknown drafter 'nowhere'"),
    ({"costs": 5}, "costs is 5, allowed is Costs, a CostTable"),
    ({"costs": "costs.json"}, "costs is 'costs.json'"),
    ({"tokenizer": "demo"}, "tokenizer is 'demo', allowed is one of transformers' tokenizers"),
    (
        {"device": "meta"},
        "device is 'meta', allowed is one that torch can use here .*: it holds no values",
    ),
    ({"device": "tpu"}, "device is 'tpu', allowed is one that torch can use here"),
    ({"device": []}, r"device is \[\], allowed is one that torch can use here"),
    (
        {"dtype": "float23"},
        "unknown dtype 'float23': known are bfloat16, .*; did you mean 'float32'",
    ),
    ({"dtype": torch.int8}, "unknown dtype 'int8'"),
    ({"dtype": 5}, "unknown dtype '5'"),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_type_is_told_at_load_with_what_is_allowed(
    wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told) as found:
        load("demo", **{"drafter": "pld", "policy": "chain", **wrong})
    assert "\n" not in str(found.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told() -> None:
    with pytest.raises(
        UserError,
        match=r"device is 'cuda', (but there is no CUDA here|allowed is one that torch can use here)",
    ):
        load("demo", device="cuda")


def test_a_loaded_model_is_neither_moved_nor_rounded(target: Target, folder: Path) -> None:
    for given in (target, loaded(folder)):
        for wrong in ({"dtype": "float32"}, {"device": "cpu"}):
            with pytest.raises(UserError, match="allowed is None with a loaded model"):
                load(given, "pld", "chain", **wrong)


def test_a_dtype_may_be_named(folder: Path) -> None:
    for dtype in ("float64", "torch.float64", torch.float64):
        assert load(folder, "pld", "chain", dtype=dtype).target.decoder.dtype is torch.float64


# Lists of prompts


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 4}, {"stop": "a"}, {"logprobs": 1}], ids=str
)
def test_each_text_of_a_list_is_the_one_that_it_would_be_alone(
    engine: Engine, options: dict[str, Any]
) -> None:
    chats = [question(text) for text in TEXTS]
    ids = [encode(engine.tokenizer, text) for text in TEXTS]
    for prompts in (
        TEXTS,
        tuple(TEXTS),
        ids,
        [np.array(row) for row in ids],
        chats,
        [TEXTS[0], ids[1], chats[2]],
    ):
        found: Any = engine.complete(prompts, **SMALL, **options)
        for prompt, done in zip(prompts, found, strict=True):
            alone = engine.complete(prompt, **SMALL, **options)
            assert replace(done, stats=alone.stats, logprobs=alone.logprobs) == alone
            assert [one.token for one in done.logprobs] == [one.token for one in alone.logprobs]


def test_text_of_a_seed_does_not_depend_on_its_place_in_the_list(engine: Engine) -> None:
    first, other, second = engine.complete(["ab", "x", "ab"], temperature=1.5, seed=3, **SMALL)
    assert first.tokens == second.tokens != other.tokens


def test_an_array_of_two_dimensions_is_a_list_of_ids(engine: Engine) -> None:
    rows = [[70, 71, 72], [80, 81, 82]]
    expected = [engine.complete(row, **SMALL).tokens for row in rows]
    for given in (np.array(rows), torch.tensor(rows), list(torch.tensor(rows))):
        found: Any = engine.complete(given, **SMALL)
        assert [done.tokens for done in found] == expected
    one: Any = engine.complete([torch.tensor([70]), torch.tensor([80])], **SMALL)
    assert [done.tokens for done in one] == [
        engine.complete([i], **SMALL).tokens for i in (70, 80)
    ], "rows of one id, no ids"


def test_asyncio_takes_lists_too(engine: Engine) -> None:
    found = asyncio.run(engine.acomplete(TEXTS, **SMALL))
    assert [done.tokens for done in found] == [
        engine.complete(text, **SMALL).tokens for text in TEXTS
    ]


def test_a_stream_refuses_a_list(engine: Engine) -> None:
    prompts: Any = TEXTS
    with pytest.raises(
        UserError, match="there is a list of 3 prompts, allowed is one: `complete` takes several"
    ):
        engine.stream(prompts)

    async def streamed() -> None:
        async for _ in engine.astream(prompts):
            pass

    with pytest.raises(UserError, match="there is a list of 3 prompts"):
        asyncio.run(streamed())


def test_a_list_of_nothing_is_an_empty_prompt(engine: Engine) -> None:
    for empty in ([], (), np.array([]), torch.tensor([]), ["", "a"], [[], [5]]):
        with pytest.raises(UserError, match="the prompt is empty"):
            engine.complete(empty)


# Wrong types in calls

CALLS: list[tuple[Callable[[Engine], Any], str]] = [
    (
        lambda e: e.write("text"),
        "the requests are 'text', allowed is a list of Request; texts are for `complete`",
    ),  # type: ignore[arg-type]
    (lambda e: e.write(Request([5])), "allowed is a list of Request"),  # type: ignore[arg-type]
    (lambda e: e.write([5]), "allowed is a list of Request"),  # type: ignore[list-item]
    (lambda e: e.write([Request([5])], 0.7), "sampling is 0.7, allowed is a Sampling"),  # type: ignore[arg-type]
    (
        lambda e: e.write([Request([5])], on_tokens=5),
        "on_tokens is 5, allowed is a callable, or None",
    ),  # type: ignore[arg-type]
    (lambda e: e.plain([Request([5])], "greedy"), "sampling is 'greedy'"),  # type: ignore[arg-type]
    (lambda e: e.conversation().say(None), "the text is None, allowed is a text"),  # type: ignore[arg-type]
    (lambda e: e.conversation().say("\ud800"), "the text is '.ud800', allowed is a text"),
    (lambda e: e.conversation().stream(5), "the text is 5"),  # type: ignore[arg-type]
    (lambda e: e.chat(5), "messages is 5, allowed is a text, messages"),
    (lambda e: e.chat([]), r"messages is \[\]"),
    (lambda e: e.chat([5, 6]), r"messages is \[5, 6\].*`complete` takes token ids"),
    (lambda e: e.chat([{"role": "user", "content": b"a"}]), "messages is"),
    (
        lambda e: e.chat([{"role": "system", "content": "b"}], system="a"),
        "begin with a system message",
    ),
    (lambda e: e.chat("a", system=5), "system is 5, allowed is a text"),
    (lambda e: e.conversation(["a"]), r"system is \['a'\], allowed is a text"),
    (lambda e: e.conversation(messages="a"), "messages is 'a', allowed is a list of messages"),
    (lambda e: e.complete("\ud800"), "not valid Unicode"),
    (lambda e: e.complete("a", beginning=b"x"), "beginning is b'x', allowed is a text, or ids"),
    (lambda e: e.complete("a", suppress=b"x"), "suppress is b'x', allowed is ids"),
    (lambda e: e.complete("a", stop=b"x"), "stop is b'x'"),
    (lambda e: e.complete("a", beginning="\ud800"), "beginning is '.ud800'"),
    (lambda e: e.complete("a", bad_words=["\ud800"]), "bad_words is"),
    (lambda e: e.complete("a", regex="\ud800"), "regex is"),
    (lambda e: e.complete("a", ignore_eos="no"), "ignore_eos is 'no', allowed is true or false"),
    (lambda e: e.complete("a", json_schema={1: 2}), "it has the key 1, allowed are texts"),
    (
        lambda e: e.complete("a", json_schema={"properties": {"a": {"enum": [{None: 1}]}}}),
        "it has the key None",
    ),
    (lambda e: e.complete("a", temperature=10**400), "temperature is 1000"),
    (lambda e: e.complete("a", seed=10**5000), "seed is a int, allowed is a whole number"),
    (lambda e: e.generate([5, 6]), "allowed is a tensor of ids"),
    (
        lambda e: e.generate(torch.tensor([[5]]), streamer=5),
        "streamer is 5, allowed is one of transformers' streamers",
    ),
    (lambda e: e.generate(torch.tensor([[5]]), seed="x"), "seed is 'x'"),
    (lambda e: e.generate(torch.tensor([[5]]), tokenizer=5), "tokenizer is 5"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "told"), CALLS, ids=[told for _, told in CALLS])
def test_a_wrong_type_in_a_call_is_told_in_a_line(
    engine: Engine, call: Callable[[Engine], Any], told: str
) -> None:
    with pytest.raises(UserError, match=told) as found:
        call(engine)
    assert "\n" not in str(found.value)
    assert engine.complete("ab", max_new_tokens=2).tokens


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint8)]
)
def test_a_requests_ids_may_come_in_any_row(
    engine: Engine, kind: Callable[[list[int]], Any]
) -> None:
    plain = Request([70, 71], 5, frozenset([1]), before=[3])
    given = Request(kind([70, 71]), 5, kind([1]), before=kind([3]))
    assert given == plain
    assert engine.write([given]).tokens == engine.write([plain]).tokens


def test_settings_may_be_numbers_of_any_library() -> None:
    for whole in (np.int32, np.uint64):
        made = Sampling(temperature=2, top_k=whole(3), top_p=np.float32(0.5), seed=whole(7))
        assert made == Sampling(2.0, 3, 0.5, seed=7)
        assert [type(n) for n in (made.temperature, made.top_k, made.seed)] == [float, int, int]
        assert made.processors, "transformers takes Python's own numbers alone"


# Ctrl-C


class Interrupter:
    """Counts the lines of this library that a call runs, and raises KeyboardInterrupt at one of them.

    Args:
        at: which; none, to count.
    """

    def __init__(self, at: int = -1) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if "/draftree/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self

    def run(self, call: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        finally:
            sys.settrace(before)


INTERRUPTED: dict[str, Callable[[Engine], Any]] = {
    "write": lambda e: e.write([Request([70, 71, 70, 71], 9), Request([72, 70], 9)]),
    "complete": lambda e: e.complete(TEXTS[0] + "ab", temperature=1.0, **SMALL),
    "batch": lambda e: e.complete(TEXTS, **SMALL),
    "stream": lambda e: list(e.stream(TEXTS[0], **SMALL)),
    "plain": lambda e: e.plain([Request([70, 71], 5)]),
}
METHODS: dict[str, Method] = {"suffix": Suffix(), "lookahead": Lookahead(), "vdm": VDM()}


@pytest.mark.parametrize("name", INTERRUPTED)
@pytest.mark.parametrize("method", METHODS)
def test_an_engine_can_be_used_again_after_ctrl_c(target: Target, name: str, method: str) -> None:
    survives(target, METHODS[method], INTERRUPTED[name], 2)


@pytest.mark.long
@pytest.mark.parametrize("name", INTERRUPTED)
@pytest.mark.parametrize("method", METHODS)
def test_an_engine_can_be_used_again_after_ctrl_c_at_many_points(
    target: Target, name: str, method: str
) -> None:
    survives(target, METHODS[method], INTERRUPTED[name], 60)


def survives(target: Target, method: Method, call: Callable[[Engine], Any], points: int) -> None:
    """One engine, interrupted at so many points, writes the right texts after each."""
    drafter = method.example(target) if isinstance(method, TrainableMethod) else method.open(target)
    engine, fresh = Engine(target, drafter, VCT(2, 2)), Engine(target, drafter, VCT(2, 2))
    greedy, sampled = (
        fresh.complete(TEXTS[0], **SMALL, **options).tokens
        for options in ({}, {"temperature": 1.0, "seed": 2})
    )
    longest = 0
    for i in range(points):
        counting = Interrupter()
        if i % 20 == 0:  # how long a call is depends on what is kept from earlier ones
            counting.run(lambda: call(engine))
            longest = counting.lines
        at = 1 + int(longest * random.Random(i).random())
        with suppress(KeyboardInterrupt):
            Interrupter(at).run(lambda: call(engine))
        assert engine.complete(TEXTS[0], **SMALL).tokens == greedy, at
        assert engine.complete(TEXTS[0], **SMALL, temperature=1.0, seed=2).tokens == sampled, at


def test_an_interrupted_turn_leaves_a_chat_as_it_was(target: Target) -> None:
    options = {"max_new_tokens": 6, "ignore_eos": True}
    chat, other = (
        Engine(target, Suffix().open(target), VCT(2, 2)).conversation(**options) for _ in range(2)
    )
    first = chat.say("ab").text
    assert other.say("ab").text == first
    counting = Interrupter()
    messages = list(chat.messages)
    counting.run(lambda: chat.say("cd"))
    chat.messages = list(messages)
    second = other.say("cd").text
    for i in range(8):
        with pytest.raises(KeyboardInterrupt):
            Interrupter(1 + int(counting.lines / 2 * random.Random(i).random())).run(
                lambda: chat.say("cd")
            )
        assert chat.messages == messages
    assert chat.say("cd").text == second


def test_a_call_that_is_interrupted_among_the_caches_leaves_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    expected = engine.complete("abcabcabc", **SMALL).tokens
    with monkeypatch.context() as patch:
        patch.setattr(
            type(engine.drafter), "truncate", interrupted
        )  # the target's cache is cut by then, the drafter's is not
        with pytest.raises(KeyboardInterrupt):
            engine.complete("ab", **SMALL)
    assert engine.held is None
    assert engine.complete("abcabcabc", **SMALL).tokens == expected


def test_a_listener_may_interrupt(target: Target, engine: Engine) -> None:
    def listener(events: Any) -> None:
        raise KeyboardInterrupt

    expected = engine.write([Request([70, 71], 9)]).tokens
    with pytest.raises(KeyboardInterrupt):
        engine.write([Request([70, 71, 72], 9)], on_tokens=listener)
    assert engine.write([Request([70, 71], 9)]).tokens == expected


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_is_neither_pickled_nor_copied(engine: Engine, how: Callable[[Any], Any]) -> None:
    for held in (engine, engine.conversation()):
        with pytest.raises(
            UserError, match="an Engine cannot be pickled or copied: it holds a model"
        ):
            how(held) if held is engine else pickle.dumps(held)


# Nothing is passed over in silence


OTHERWISE = {
    "loss": ("ce", "kl"),
    "arch": ("mlp", "prefix-mlp"),
    "variant": ("official", "paper"),
    "cross": (True, False),
}
"""Two values of knobs that are no numbers; a checkpoint cannot have both."""


@pytest.mark.parametrize("name", TRAINED)
def test_a_knob_that_the_checkpoint_fixes_is_honoured_or_refused(name: str) -> None:
    demo, said = (
        Target.load("demo"),
        read_object(demo_folder(name) / "config.json", "a config")[DRAFTREE_ENTRY],
    )
    own = {f.name: said[f.name] for f in fields(part("drafter", name)) if f.name in said}
    assert own
    for knob, fixed in own.items():
        wrong = next(
            v
            for v in OTHERWISE.get(knob, (0.5, 0.25) if isinstance(fixed, float) else (7, 8))
            if v != fixed
        )
        with pytest.raises(UserError, match=rf"{knob}\b.*, allowed "):
            load(demo, f"{name}:{knob}={wrong}", "chain")
    same = ",".join(f"{k}={v}" for k, v in own.items() if v is not None)
    engines = [load(demo, spec, "chain") for spec in (f"{name}:{same}", name)]
    assert len({e.drafter.description for e in engines}) == 1, (
        "what the checkpoint says anyway may be said"
    )


def test_a_default_that_was_asked_for_is_no_exception(target: Target, tmp_path: Path) -> None:
    EDD(hidden_layer=-3).example(target).save(tmp_path)  # type: ignore[attr-defined]
    assert build("drafter", f"edd:checkpoint={tmp_path}").open(target).knobs.hidden_layer == -3
    for asked in (-4, -2):
        with pytest.raises(
            UserError, match=f"edd: hidden_layer is {asked}, allowed is -3: '.*' fixes it"
        ):
            build("drafter", f"edd:checkpoint={tmp_path},hidden_layer={asked}").open(target)
    with pytest.raises(UserError, match="hidden_layer is -4"):
        load(target, f"edd:checkpoint={tmp_path},hidden_layer=-4+suffix", "chain")


def test_a_published_checkpoint_fixes_what_its_weights_say(tmp_path: Path) -> None:
    demo = Target.load("demo")
    for name, asked in (
        ("medusa", "heads=3"),
        ("hydra", "heads=2"),
        ("eagle3", "draft_vocab=100"),
        ("eagle", "bias=False"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for file in demo_folder(name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = {
            k: v
            for k, v in read_object(folder / "config.json", "a config").items()
            if k != DRAFTREE_ENTRY
        }
        write_text(folder / "config.json", json.dumps(config))
        knob, _, value = asked.partition("=")
        build("drafter", f"{name}:checkpoint={folder}").open(demo)
        with pytest.raises(
            UserError, match=rf"{name}: {knob} is {value}, allowed is \w+: '.*' fixes it"
        ):
            build("drafter", f"{name}:checkpoint={folder},{asked}").open(demo)


@pytest.mark.parametrize("option", ["--acceptor", "--policy", "--drafter"])
def test_an_empty_spec_is_refused(
    draftree: Callable[..., tuple[int, str, str]], option: str
) -> None:
    status, out, err = draftree(
        "generate", "x", "--drafter", "pld", "--policy", "chain", option, ""
    )
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"unknown {option[2:]} ''" in err


def test_the_command_says_what_drafts_where_nothing_is_named(
    draftree: Callable[..., tuple[int, str, str]], folder: Path
) -> None:
    asked = ("generate", "abab", "--target", folder, "--policy", "chain", "--max-new-tokens", 4)
    status, _, err = draftree(*asked, "--json")
    assert (status, err.count("\n")) == (0, 1)
    assert "'suffix' drafts, which needs no training" in err
    status, _, err = draftree(*asked, "--drafter", "suffix", "--json")
    assert (status, err) == (0, "")


def test_doctor_promises_nothing_where_nothing_promises_it(
    draftree: Callable[..., tuple[int, str, str]],
) -> None:
    asked = (
        "doctor",
        "--lossless",
        "--drafter",
        "pld",
        "--policy",
        "chain",
        "--acceptor",
        "typical",
        "--limit",
        2,
    )
    status, out, err = draftree(*asked, "--max-new-tokens", 4, "--trials", 100)
    assert (status, err) == (1, "")
    told = "NOT lossless: nothing that was asked for promises it; typical, chain, T = 1 is lossy by design"
    assert out.splitlines()[-1] == told


# Whatever comes to hand

JUNK: list[Any] = [
    None, 0, 5, -3, 10**30, 5.5, 1e308, 1e-320, -0.0, nan, inf, -inf, True, False, "", "x", "\ud800", "\0", "\ufffd", "a" * 200,
    b"", b"x", bytearray(b"x"), (), {}, set(), object(), object, len, lambda *_: None, ..., 1j, range(3), Path("x"), Path(),
    {1: 2}, {"a": nan}, {"type": "object"}, {"type": 5}, {5: 1.0}, {"role": "user", "content": "a"}, [{"role": "user"}],
    np.float32(0.5), np.int64(3), np.bool_(True), np.array([]), np.array([1, 2]), np.array([[1, 2]]), np.array([1.5]),
    np.array(["a"]), np.array([None]), np.ones((2, 2, 2), np.uint8), torch.tensor([]), torch.tensor([1, 2]),
    torch.tensor([[1, 2]]), torch.tensor([1.5]), torch.tensor([True]), torch.tensor(3), torch.empty(2, device="meta"),
    torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.complex64), Options(), Sampling(), PLD(), PLD, Chain(),
    Request([5]), UNIT, Grammar.regex("a*"), ValueError("x"), 2**64, 2**63, -(2**63), 1000, "0.5", "none", frozenset([1]),
]  # fmt: skip
"""What may be given for anything."""


def junk(rng: random.Random) -> Any:
    """Anything, or a list or a mapping of it."""
    kind = rng.random()
    if kind < 0.15:
        return [rng.choice(JUNK) for _ in range(rng.randint(1, 3))]
    if kind < 0.2:
        return tuple(rng.choice(JUNK) for _ in range(2))
    if kind < 0.25:
        return {key: rng.choice(JUNK) for key in ("a", rng.choice(["type", "role", 5, "content"]))}
    return rng.choice(JUNK)


ASKED: dict[str, Any] = {**{f.name: f.default for f in fields(Options)}, "max_new_tokens": 2}
REQUEST = {f.name: f.default for f in fields(Request) if f.name != "prompt"}
Public = tuple[Callable[[Engine], Callable[..., Any]], dict[str, Any]]
PUBLIC: dict[str, Public] = {
    "load": (lambda e: load, {"target": "demo", "drafter": "pld", "policy": "chain", "acceptor": None, "costs": None,
                              "dtype": None, "device": None, "tokenizer": None}),
    "write": (lambda e: e.write, {"requests": [Request([5, 6], 2)], "sampling": Sampling(), "on_tokens": None, "reuse": True}),
    "plain": (lambda e: e.plain, {"requests": [Request([5, 6], 2)], "sampling": Sampling(), "on_tokens": None}),
    "complete": (lambda e: e.complete, {"prompt": "ab", **ASKED}),
    "stream": (lambda e: lambda **given: list(e.stream(**given)), {"prompt": "ab", **ASKED}),
    "acomplete": (lambda e: lambda **given: asyncio.run(e.acomplete(**given)), {"prompt": "ab", **ASKED}),
    "chat": (lambda e: e.chat, {"messages": "ab", "system": None, **ASKED}),
    "conversation": (lambda e: e.conversation, {"system": None, "messages": None, **ASKED}),
    "say": (lambda e: e.conversation(max_new_tokens=2).say, {"text": "ab", **ASKED}),
    "generate": (lambda e: lambda inputs, **given: e.generate(inputs, max_new_tokens=2, **given),
                 {"inputs": torch.tensor([[5, 6]]), "seed": None, "streamer": None, "tokenizer": None}),
    "Options": (lambda e: Options, ASKED),
    "Request": (lambda e: lambda **given: e.write([Request(**given)]), {**REQUEST, "prompt": [5, 6], "max_new_tokens": 2}),
    "Sampling": (lambda e: lambda **given: e.write([Request([5, 6], 3)], Sampling(**given)),
                 {f.name: f.default for f in fields(Sampling)}),
    "Grammar": (lambda e: Grammar, {"kind": "regex", "given": "a", "source": "start: /a/", "canonical": True}),
    "json_schema": (lambda e: Grammar.json_schema, {"schema": {}, "spaces": "line", "canonical": True}),
    "regex": (lambda e: Grammar.regex, {"pattern": "a*", "canonical": True}),
    "lark": (lambda e: Grammar.lark, {"text": "start: /a/", "canonical": True}),
    "Costs": (lambda e: Costs, {"draft": {1: 1.0}, "target": {1: 1.0}, "commit": 0.0, "context": 0, "rows": 1}),
    "speculate": (lambda e: speculate, {"drafter": "pld", "policy": "chain", "acceptor": None, "costs": None, "seed": None,
                                        "streamer": None, "tokenizer": None}),
}  # fmt: skip
"""What can be called, and arguments that are right."""


def told_in_a_line(call: Callable[[], Any], about: str) -> bool:
    """Whether a call was served; if not, it said so in one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, on strange but lawful values
            call()
    except DraftreeError as error:
        told = str(error)
    except Exception as error:
        raise AssertionError(f"{about}: {type(error).__name__}: {error}") from error
    else:
        return True
    assert "\n" not in told, about
    assert 5 < len(told) <= 700, about
    return False


OWN = {"on_tokens", "processors", "guides", "stateless", "forced", "criteria", "warpers"}
"""Arguments that are called."""


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def strange(engine: Engine, name: str, cases: int, seed: int = 0) -> None:
    """Calls with one or two arguments that may be anything."""
    get, good = PUBLIC[name]
    rng = random.Random(f"{name} {seed}")
    served = 0
    for _ in range(cases):
        wrong = {
            key: junk(rng)
            for key in rng.sample(sorted(good), min(len(good), rng.choice([1, 1, 2])))
        }
        if name == "load" and isinstance(wrong.get("target"), str | Path):
            continue  # it would be looked for under the hub's names
        if name == "generate" and wrong.get("inputs", good) is None:
            continue  # transformers asks the config for a first token, and says itself that there is none
        if any(
            callable(part)
            for key in OWN & wrong.keys()
            for part in [wrong[key], *listed(wrong[key])]
        ):
            continue  # what it raises when called is its own
        served += told_in_a_line(partial(get(engine), **{**good, **wrong}), f"{name}({wrong!r})")
    assert told_in_a_line(partial(get(engine), **good), f"{name}: what is right is served")
    assert served < cases, "some of it was refused"
    assert len(engine.complete("ab", max_new_tokens=2).tokens) == 2


@pytest.mark.parametrize("name", PUBLIC)
def test_anything_is_served_or_told_in_a_line(engine: Engine, name: str) -> None:
    strange(engine, name, 12 if name == "load" else 60)


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLIC)
def test_anything_is_served_or_told_in_a_line_at_length(engine: Engine, name: str) -> None:
    strange(engine, name, 200 if name == "load" else 600, seed=1)


VALUES = [
    "", "x", "5", "0", "-1", "-0", "nan", "inf", "-inf", "1e400", "1e-320", "0.5", "true", "none", "5.5", "9" * 20, "\udcff",
    "\u2028", "{", "{}", "[]", "a=b", "a=1", "5=1", "=", "5=nan", "a*", "(", "edd:hidden_layer=99", "medusa:heads=3",
    "pld:ngram=x", "pld:", "pld+", "+", "a+b", "chain:length=-1", "greedy:x=1", "/", ".", "..", "~", "-", "--", "a" * 3000,
    "[" * 5000, "pld:ngram=1" + ",ngram=1" * 1000, "cuda", "meta", "float23", "x.html", "x.svg",
]  # fmt: skip


def options_of(command: str) -> list[str]:
    """The options of a command that take a value."""
    found: Any = typer.main.get_command(app)
    told = [
        p.opts[-1]
        for p in found.commands[command].params
        if p.opts[-1].startswith("--") and not p.is_flag
    ]
    return sorted(set(told) - {"--target"})


def on_the_command_line(
    draftree: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    where: Path,
    cases: int,
    seed: int,
) -> None:
    """`generate` with one or two options that may be anything: status 0, or 2 and one line."""
    arguments.quiet()
    demo, real = Target.load("demo"), Target.load
    quick = lambda name, *place, **how: (
        real(name, *place, **how) if any((*place, *how.values())) else demo
    )
    monkeypatch.setattr(Target, "load", quick)
    monkeypatch.chdir(where)
    options = options_of("generate")
    rng = random.Random(seed)
    refused = 0
    assert len(options) > 25
    for _ in range(cases):
        wrong = [
            f"{name}={rng.choice(VALUES)}" for name in rng.choices(options, k=rng.choice([1, 1, 2]))
        ]
        good = ["--drafter=pld", "--policy=chain", "--max-new-tokens=3", "--json"]
        status, out, err = draftree(
            "generate", rng.choice(["ab", "ab", *VALUES[-5:]]), *good, *wrong
        )
        assert status in (0, 2), (wrong, err)
        assert err.count("\n") == (status == 2), (wrong, err[:600])
        assert len(err) < 800, (wrong, err)
        assert bool(out) == (status == 0), (wrong, out)
        refused += status == 2
    assert 0 < refused < cases


def test_options_are_served_or_told_in_a_line(
    draftree: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_the_command_line(draftree, monkeypatch, tmp_path, 25, 0)


@pytest.mark.long
def test_options_are_served_or_told_in_a_line_at_length(
    draftree: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_the_command_line(draftree, monkeypatch, tmp_path, 600, 1)


def test_every_public_callable_is_in_these_tests() -> None:
    """Those that are results, or hold what others check, have no arguments of their own to be wrong."""
    results = {"Candidates", "Completion", "Conversation", "DraftreeError", "Engine", "Generation", "Target", "Token", "Tree",
               "Handle", "RequestStats", "SchedulerOptions", "Update", "UserError", "AcceptResult", "demo_folder"}  # fmt: skip
    assert set(public.__all__) - results <= set(PUBLIC)
