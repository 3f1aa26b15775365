"""`generate` with drafts is `generate`: the same ids, scores, pieces and ends for every option, or a refusal by name."""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TopKLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from architectures import VOCAB, build, fresh, target
from draftree import UserError, speculate
from draftree.costs.step_costs import Costs
from draftree.data.prompts import encode
from draftree.drafters.neural.layer_stack import CACHE
from draftree.engine import ENGINES, Engine, get_engine
from draftree.errors import NotANumber
from draftree.evaluation import suites
from draftree.hf.generate import UNSUPPORTED_OPTIONS, Hook
from draftree.hf.generate_call import PURE_PROCESSORS, GenerateCall, prompt_ids
from draftree.models.causal_lm import CausalLM
from draftree.registry import build as build_part
from draftree.sampling.params import Sampling
from draftree.sampling.warpers import Temperature
from draftree.target.target import Target, name_of
from draftree.testing.fakes import Never, Sometimes, tiny_target
from draftree.weights import demo_folder
from generating import (
    EOS,
    PAD,
    TEXTS,
    Counting,
    Divisible,
    Forbidding,
    Forcing,
    Options,
    Rowwise,
    Shifting,
    padded,
    plans,
    trie,
    worst,
)

NEW = 16
POLICY = build_part("policy", "eagle2:nodes=12,depth=4,width=3")
SUITE = Path(__file__).parents[3] / "shared" / "data" / "spec_bench.jsonl"


def model() -> PreTrainedModel:
    return target("llama").decoder.model


def ids_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.sequences


def coached(prompted: Mapping[str, Tensor], output: Any) -> Engine:
    """An engine whose drafter knows what transformers has written, and says so at changing places among the siblings."""
    return Engine(target("llama"), Sometimes(plans(prompted, ids_of(output)), VOCAB), POLICY)


def same(
    prompted: Mapping[str, Tensor], options: Callable[[], Options], drafted: bool = True
) -> Tensor:
    """Asserts that a call writes the same ids as transformers, and returns the new ones; options may remember things."""
    theirs = model().generate(**prompted, **options())
    hook = Hook(lambda *_: engine)
    engine = coached(prompted, theirs)
    ours = model().generate(**prompted, **options(), custom_generate=hook)
    assert torch.equal(ids_of(ours), ids_of(theirs))
    assert hook.stats.acceptance_length > 1.2 or not drafted
    assert torch.equal(ids_of(engine.generate(**prompted, **options())), ids_of(theirs))
    new: Tensor = ids_of(theirs)[:, prompted["input_ids"].shape[1] :]
    return new


@cache
def greedy() -> list[list[int]]:
    """What the model writes after each text without any option but a limit."""
    written = model().generate(**padded(TEXTS), max_new_tokens=NEW)
    return written[:, len(TEXTS[0]) :].tolist()


class Sure(StoppingCriteria):
    """Ends a text where the last token was far the best, and wants to see the scores of all tokens so far."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert all(s.shape == (len(input_ids), VOCAB) for s in scores)
        top = torch.stack(scores)[-1].topk(2).values
        return (top[:, 0] - top[:, 1] > 0.5) & torch.tensor(len(scores) > 4)


def bads(row: int) -> list[list[int]]:
    w = greedy()[row]
    return [[w[1]], [w[4], w[5]], [w[8], w[9], w[10]]]


OPTIONS: Mapping[str, Callable[[], Options]] = {
    "nothing": dict,
    "repetition": lambda: {"repetition_penalty": 1.7},
    "liked repetition": lambda: {"repetition_penalty": 0.1},
    "ngrams": lambda: {"no_repeat_ngram_size": 2},
    "bad words": lambda: {"bad_words_ids": bads(0)},
    "bias": lambda: {"sequence_bias": [[[greedy()[0][2]], -9.0], [[greedy()[0][5], 40], 8.0]]},
    "suppress": lambda: {"suppress_tokens": greedy()[0][2:6]},
    "begin suppress": lambda: {"begin_suppress_tokens": [w[0] for w in greedy()]},
    "forced eos": lambda: {"forced_eos_token_id": 33},
    "min length": lambda: {"min_length": 15, "eos_token_id": greedy()[0][3]},
    "min new": lambda: {"min_new_tokens": 9, "eos_token_id": greedy()[0][3]},
    "eos list": lambda: {"eos_token_id": [greedy()[0][6], greedy()[1][9]]},
    "no eos": lambda: {"eos_token_id": -1},
    "prefix": lambda: {"prefix_allowed_tokens_fn": trie},
    "decay": lambda: {"exponential_decay_length_penalty": (3, 1.3)},
    "renormalize": lambda: {"renormalize_logits": True, "repetition_penalty": 0.7},
    "invalid values": lambda: {"remove_invalid_values": True, "no_repeat_ngram_size": 3},
    "encoder": lambda: {"encoder_repetition_penalty": 9.0, "encoder_no_repeat_ngram_size": 2},
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "own": lambda: {"logits_processor": LogitsProcessorList([Rowwise()])},
    "own, by call": lambda: {
        "logits_processor": LogitsProcessorList([Shifting()]),
        "eos_token_id": -1,
    },
    "own and others": lambda: {
        "logits_processor": [Rowwise(), TemperatureLogitsWarper(0.5)],
        "repetition_penalty": 1.5,
    },
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([Divisible(11)])},
    "criterion, by call": lambda: {"stopping_criteria": StoppingCriteriaList([Counting(7)])},
    "criteria": lambda: {
        "stopping_criteria": [Divisible(13), Counting(9)],
        "eos_token_id": [greedy()[2][9]],
    },
    "length": lambda: {"stopping_criteria": [MaxLengthCriteria(13)]},
    "everything": lambda: {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": bads(2),
        "suppress_tokens": [9],
        "min_new_tokens": 5,
        "logits_processor": [Rowwise()],
        "stopping_criteria": [Divisible(17)],
    },
}


@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, rows) for i, name in enumerate(OPTIONS) for rows in ((3,) if i % 6 else (1, 3))],
)
def test_greedy_ids_are_those_of_generate(name: str, rows: int) -> None:
    """Also with padding, and where the option bites."""
    written = same(padded(TEXTS[:rows]), lambda: {"max_new_tokens": NEW, **OPTIONS[name]()})
    plain = torch.tensor(greedy()[:rows])
    if name not in ("nothing", "no eos"):
        assert written.shape != plain.shape or not torch.equal(written, plain), (
            "the option changes nothing: the test is idle"
        )


HIDDEN = torch.tensor([[1, 0, 1, 0, 0, 1], [0, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]])
"""Zeros inside two rows, one of them padded, and a row without any."""


@pytest.mark.parametrize(
    "name", ["nothing", "ngrams", "encoder", "min new", "own", "criterion", "criteria"]
)
def test_ids_hidden_inside_a_row(name: str) -> None:
    """The model reads the others, at places counted without them; processors and criteria are shown them all."""
    ids = torch.tensor([[7, 5, 9, 5, 9, 11], [PAD, PAD, 3, 5, 8, 8], [12, 5, 9, 30, 31, 4]])
    bare = model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
    assert not torch.equal(
        model().generate(ids, attention_mask=HIDDEN, max_new_tokens=NEW), bare
    ), "the mask is idle"
    for rows in (1, 3):
        same(
            {"input_ids": ids[:rows], "attention_mask": HIDDEN[:rows]},
            lambda: {"max_new_tokens": NEW, **OPTIONS[name]()},
        )


def test_criteria_are_told_scores_where_ids_are_hidden() -> None:
    prompted = {"input_ids": TEXTS[0][None], "attention_mask": HIDDEN[:1]}
    told = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "max_new_tokens": 24,
        "repetition_penalty": 1.3,
    }
    assert 4 < same(prompted, lambda: {**told, "stopping_criteria": [Sure()]}).shape[1] < 24


def test_ids_hidden_from_a_model_with_windows_are_refused_by_their_place() -> None:
    """Its windows count places, hidden ones too, and so the text is not the others'."""
    engine = Engine(target("mistral-sliding"), Never([[3]] * 2, VOCAB), POLICY)
    with pytest.raises(
        UserError, match=r"row 1 of attention_mask has a zero at place 3, behind a one; .* window"
    ):
        engine.generate(torch.full((2, 6), 5), attention_mask=HIDDEN[[2, 1]], max_new_tokens=3)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("option", ["suppress", "own", "eta"])
def test_a_processor_that_forbids_every_token_is_named(
    rows: int, sampled: bool, option: str
) -> None:
    """transformers writes token 0 then, or raises."""
    options: Options = {"suppress_tokens": list(range(VOCAB))}
    if option == "own":
        options = {
            "logits_processor": [Rowwise(), Forbidding(len(TEXTS[0]) + 3), Rowwise()],
            "eos_token_id": -1,
        }
    elif option == "eta":  # which raises at what is left to it
        options |= {"eta_cutoff": 0.01, "renormalize_logits": True}
    name = "Forbidding" if option == "own" else "SuppressTokensLogitsProcessor"
    engine = Engine(target("llama"), Never([t.tolist() for t in TEXTS[:rows]], VOCAB), POLICY)
    with pytest.raises(
        NotANumber, match=f"^processor {name} forbids every token after [69] tokens, allowed are"
    ):
        engine.generate(**padded(TEXTS[:rows]), max_new_tokens=5, do_sample=sampled, **options)


def test_processors_after_the_end_of_a_text_do_not_matter() -> None:
    """A draft may reach beyond the token at which a criterion ends the text."""
    forbidding = Forbidding(len(TEXTS[0]) + 7)
    same(
        padded(TEXTS),
        lambda: {
            "logits_processor": [forbidding],
            "stopping_criteria": [Counting(7)],
            "max_new_tokens": NEW,
        },
    )


def test_a_processor_may_force_a_token_by_infinity() -> None:
    assert (
        same(padded(TEXTS), lambda: {"max_new_tokens": NEW, "logits_processor": [Forcing()]}) == 9
    ).any()


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_without_an_end_of_text_go_on_until_all_have_stopped(rows: int) -> None:
    """transformers fills rows that have ended only where there are EOS ids."""
    bare = build("llama", {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
    prompted = padded(TEXTS[:rows])
    options: Options = {
        "max_new_tokens": NEW,
        "stopping_criteria": [Divisible(9)],
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    theirs = bare.generate(**prompted, **options)
    assert theirs.sequences.shape[1] < len(TEXTS[0]) + NEW
    engine = Engine(Target(CausalLM(bare)), coached(prompted, theirs).drafter, POLICY)
    ours = engine.generate(**prompted, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert worst(ours.scores, theirs.scores) < 1e-5


@pytest.mark.parametrize(("name", "rows"), [("mistral-sliding", 3), ("gemma2", 1), ("gpt_neox", 3)])
def test_other_architectures(name: str, rows: int) -> None:
    """Gemma 2 without padding, which makes NaN of transformers' own float64 logits: its softmax is in float32."""
    prompted, options = padded(TEXTS[:rows]), {"max_new_tokens": NEW, "repetition_penalty": 1.3}
    t = target(name)
    theirs = t.decoder.model.generate(**prompted, **options)
    engine = Engine(t, coached(prompted, theirs).drafter, POLICY)
    assert torch.equal(engine.generate(**prompted, **options), theirs)


def test_forced_bos_after_a_prompt_of_one() -> None:
    same(padded([torch.tensor([5])]), lambda: {"max_new_tokens": NEW, "forced_bos_token_id": 44})


def test_max_length_counts_the_padding() -> None:
    assert same(padded(TEXTS), lambda: {"max_length": 17}).shape == (3, 17 - len(TEXTS[0]))
    assert same(padded(TEXTS[1:2]), lambda: {"max_length": 17}).shape == (1, 17 - len(TEXTS[1]))


def test_a_criterion_of_length_below_the_prompt_gives_one_token() -> None:
    assert same(
        padded(TEXTS),
        lambda: {"stopping_criteria": [MaxLengthCriteria(3)], "max_new_tokens": 5},
        False,
    ).shape == (
        3,
        1,
    )


def test_a_generation_config_with_and_without_options() -> None:
    config = GenerationConfig(
        max_new_tokens=NEW, repetition_penalty=1.4, eos_token_id=[greedy()[0][6]], pad_token_id=PAD
    )
    first = same(padded(TEXTS), lambda: {"generation_config": config})
    second = same(
        padded(TEXTS),
        lambda: {"generation_config": config, "max_new_tokens": 7, "repetition_penalty": 1.0},
    )
    assert first.shape[1] > second.shape[1]


def test_the_same_prompts_without_a_mask() -> None:
    """transformers reads it off the padding."""
    ids = padded(TEXTS)["input_ids"]
    theirs = model().generate(ids, max_new_tokens=9)
    assert torch.equal(coached(padded(TEXTS), theirs).generate(ids, max_new_tokens=9), theirs)


def test_prompts_of_another_integer_type() -> None:
    prompted = {k: v.int() for k, v in padded(TEXTS).items()}
    theirs = model().generate(**prompted, max_new_tokens=5)
    ours = coached(prompted, theirs).generate(**prompted, max_new_tokens=5)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


SUPPRESSED: Options = {"suppress_tokens": [4, 5]}
DECAY: Options = {"exponential_decay_length_penalty": (0, 1.3), "eos_token_id": 4}
SCORED: Mapping[str, Callable[[], Options]] = {
    "plain": dict,
    "processed": lambda: {"repetition_penalty": 1.5, "suppress_tokens": [4, 5]},
    "written into": lambda: {
        "logits_processor": [Rowwise(), Shifting()],
        "repetition_penalty": 1.5,
    },
    "written into first": lambda: {"logits_processor": [Shifting(), Rowwise()]},
    "written into twice": lambda: {"logits_processor": [Shifting(), Forcing(), Rowwise()]},
    "invalid values": lambda: {"remove_invalid_values": True, "suppress_tokens": [4, 5]},
    "invalid values made larger": lambda: {"remove_invalid_values": True, **SUPPRESSED, **DECAY},
    "normalized": lambda: {
        "renormalize_logits": True,
        "remove_invalid_values": True,
        "no_repeat_ngram_size": 1,
    },
}


@pytest.mark.parametrize("name", SCORED)
def test_scores_and_logits_are_those_of_generate(name: str) -> None:
    """Also where a processor writes into the logits, which transformers tells of then; the largest numbers are float32's."""
    told = {
        "max_new_tokens": NEW,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    for texts in (TEXTS[:1], TEXTS):
        theirs = model().generate(**padded(texts), **told, **{"eos_token_id": -1, **SCORED[name]()})
        ours = coached(padded(texts), theirs).generate(
            **padded(texts), **told, **{"eos_token_id": -1, **SCORED[name]()}
        )
        assert type(ours) is type(theirs)
        assert worst(ours.scores, theirs.scores) < 1e-5
        assert worst(ours.logits, theirs.logits) < 1e-5
        assert (ours.attentions, ours.hidden_states, getattr(ours, CACHE)) == (None, None, None)


def test_scores_of_a_row_that_has_ended_are_nothing() -> None:
    """Zeros, so that log-probabilities of what follows the end are numbers."""
    eos, told = (
        greedy()[0][4],
        {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 12},
    )
    theirs = model().generate(**padded(TEXTS), **told, eos_token_id=eos)
    engine = coached(padded(TEXTS), theirs)
    ours = engine.generate(**padded(TEXTS), **told, eos_token_id=eos)
    end = [
        (row == eos).nonzero()[0, 0].item() if (row == eos).any() else 12
        for row in ours.sequences[:, len(TEXTS[0]) :]
    ]
    assert min(end) < 11 < max(end)
    for t, (mine, other) in enumerate(zip(ours.scores, theirs.scores, strict=True)):
        for row, n in enumerate(end):
            assert (mine[row] - other[row]).abs().max() < 1e-5 if t <= n else not mine[row].any()
    assert ours.logits is None
    assert (
        engine.target.decoder.model.compute_transition_scores(
            ours.sequences, ours.scores, normalize_logits=True
        )
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_criteria_are_told_the_scores_where_they_are_kept(rows: int) -> None:
    told = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "max_new_tokens": 24,
        "repetition_penalty": 1.3,
    }
    written = same(padded(TEXTS[:rows]), lambda: {**told, "stopping_criteria": [Sure()]})
    assert 4 < written.shape[1] < 24


def sampled(engine: Engine, texts: Sequence[Tensor] = TEXTS, **options: Any) -> Tensor:
    written: Tensor = engine.generate(**padded(texts), do_sample=True, max_new_tokens=12, **options)
    return written


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
        {"min_p": 0.2, "typical_p": 0.9, "top_k": 0, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
        {"temperature": 1.3, "repetition_penalty": 1.4, "renormalize_logits": True},
        {"watermarking_config": WatermarkingConfig(bias=3.0)},
    ],
    ids=["plain", "top", "cutoffs", "normalized", "watermark"],
)
def test_sampled_ids_are_those_of_plain_decoding_with_the_seed(options: Options) -> None:
    """Whatever was drafted; and p is what transformers would draw from, which its own scores tell."""
    engine = Engine(target("llama"), Never([t.tolist() for t in TEXTS], VOCAB), POLICY)
    first = sampled(engine, seed=5, **options)
    good = Engine(target("llama"), coached(padded(TEXTS), first).drafter, POLICY)
    hook = Hook(lambda *_: good)
    told = {
        "do_sample": True,
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_scores": True,
        **options,
    }
    second = model().generate(**padded(TEXTS), **told, seed=5, custom_generate=hook)
    assert torch.equal(second.sequences, first)
    assert hook.stats.acceptance_length > 1.2
    assert not torch.equal(sampled(good, seed=6, **options), first)
    for t, scores in enumerate(second.scores):  # transformers' after the same text
        so_far = first[:, : len(TEXTS[0]) + t]
        mask = torch.cat((padded(TEXTS)["attention_mask"], torch.ones(3, t, dtype=torch.int64)), 1)
        theirs = (
            model().generate(so_far, attention_mask=mask, **{**told, "max_new_tokens": 1}).scores[0]
        )
        alive = [i for i, row in enumerate(so_far[:, len(TEXTS[0]) :].tolist()) if EOS not in row]
        assert worst([scores[alive]], [theirs[alive]]) < 1e-5


def test_engine_plain_writes_the_same() -> None:
    """Without options that the two call differently."""
    from draftree.request import Request

    engine = Engine(target("llama"), Never([t.tolist() for t in TEXTS], VOCAB), POLICY)
    requests = [Request(t.tolist(), 12, frozenset({EOS}), number=i) for i, t in enumerate(TEXTS)]
    plain = engine.plain(requests, Sampling(temperature=0.8, top_k=20, seed=11)).tokens
    ours = sampled(engine, temperature=0.8, top_k=20, seed=11)[:, len(TEXTS[0]) :].tolist()
    for row, tokens in zip(ours, plain, strict=True):
        assert row == tokens + [PAD] * (len(row) - len(tokens))


def test_torchs_seed_repeats_a_call() -> None:
    engine = Engine(target("llama"), Never([t.tolist() for t in TEXTS], VOCAB), POLICY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first, second = sampled(engine), sampled(engine)
        torch.manual_seed(3)
        assert torch.equal(sampled(engine), first)
        assert not torch.equal(first, second)
        before = torch.get_rng_state()
        engine.generate(**padded(TEXTS), max_new_tokens=3)
        assert torch.equal(torch.get_rng_state(), before), "greedy decoding draws nothing"


def test_several_sequences_of_a_prompt_differ_and_repeat() -> None:
    engine = Engine(
        target("llama"), Never([t.tolist() for t in TEXTS for _ in range(2)], VOCAB), POLICY
    )
    several = sampled(engine, num_return_sequences=2, seed=4, repetition_penalty=1.2)
    assert several.shape[0] == 6
    assert not torch.equal(several[0], several[1])
    again = sampled(engine, num_return_sequences=2, seed=4, repetition_penalty=1.2)
    assert torch.equal(several, again)


def test_a_prefix_function_is_asked_with_the_number_of_its_prompt() -> None:
    options: Options = {
        "max_new_tokens": 6,
        "do_sample": True,
        "top_k": 1,
        "num_return_sequences": 2,
    }
    options["prefix_allowed_tokens_fn"] = trie
    theirs = model().generate(**padded(TEXTS), **options)
    engine = Engine(
        target("llama"), Never([t.tolist() for t in TEXTS for _ in range(2)], VOCAB), POLICY
    )
    assert torch.equal(engine.generate(**padded(TEXTS), **options), theirs)


def test_a_default_that_transformers_ignores_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model().generation_config, "cache_implementation", "hybrid")
    same(padded(TEXTS), lambda: {"max_new_tokens": 6})


def batch(processors: list[LogitsProcessor], **options: Any) -> GenerateCall:
    ids = padded(TEXTS[:1])["input_ids"]
    return GenerateCall(ids, prompt_ids(ids, {}), GenerationConfig(**options), processors, [])


def test_warpers_at_the_end_shape_drafts_too() -> None:
    warpers = [TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]
    own = Rowwise()
    made = batch([own, *warpers], do_sample=True, temperature=0.5)
    assert (made.sampling(1).temperature, made.sampling(1).warpers) == (0.5, tuple(warpers))
    assert [type(step) for step in made.sampling(1).processors] == [Temperature, TopKLogitsWarper]
    assert made.requests(made.sampling(1))[0].processors == (own,)
    last = LogitNormalization()
    late = batch([own, *warpers, last], do_sample=True, temperature=0.5)
    assert late.sampling(1).processors == ()
    assert late.requests(late.sampling(1))[0].processors == (own, *warpers, last)
    none = batch([own, *warpers])
    assert none.sampling(1).greedy
    assert none.requests(none.sampling(1))[0].processors == (own, *warpers)


def test_pure_processors_guide_drafts_and_no_others() -> None:
    seen: list[LogitsProcessor] = []

    class Spy(Hook):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.extend(kwargs["logits_processor"])
            return super().__call__(*args, **kwargs)

    theirs = model().generate(**padded(TEXTS[:1]), max_new_tokens=4)
    engine = coached(padded(TEXTS[:1]), theirs)
    options = {**OPTIONS["everything"](), "begin_suppress_tokens": [3], "forced_eos_token_id": EOS}
    model().generate(
        **padded(TEXTS[:1]), max_new_tokens=6, **options, custom_generate=Spy(lambda *_: engine)
    )
    guides = batch(seen).requests(Sampling())[0].guides
    assert len(guides) == len(seen) - 1
    assert {type(g) for g in guides} <= PURE_PROCESSORS


class Told(BaseStreamer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


def test_a_streamer_is_told_what_transformers_tells_it() -> None:
    theirs = Told()
    through_engine = Told()
    through_hook = Told()
    prompted, options = padded(TEXTS[:1]), {"max_new_tokens": NEW, "eos_token_id": greedy()[0][9]}
    written = model().generate(**prompted, **options, streamer=theirs)
    engine = coached(prompted, written)
    engine.generate(**prompted, **options, streamer=through_engine)
    model().generate(
        **prompted, **options, custom_generate=Hook(lambda *_: engine, streamer=through_hook)
    )
    assert theirs.seen[-1] == "end"
    assert through_engine.seen == through_hook.seen == theirs.seen
    with pytest.raises(UserError, match="3 rows, a streamer takes 1"):
        engine.generate(**padded(TEXTS), max_new_tokens=1, streamer=Told())


@cache
def demo() -> SimpleNamespace:
    """The demo as a plain model in float32, and its tokenizer; in half precision passes of other shapes round otherwise."""
    folder = demo_folder()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return SimpleNamespace(
        model=plain, tokenizer=AutoTokenizer.from_pretrained(folder, padding_side="left")
    )


def asked(*questions: str) -> dict[str, Tensor]:
    encoded = demo().tokenizer(list(questions), return_tensors="pt", padding=True)
    return {k: encoded[k] for k in ("input_ids", "attention_mask")}


QUESTIONS = (
    "How many legs do 3 dogs and 2 birds have together?",
    "A pen costs $2 and a book $7. What do 5 of each cost?",
)


def test_a_plain_model_speculates_with_what_is_shipped_for_it() -> None:
    """Twice by the same parts, opened once; the demo is known by its folder."""
    options = {"max_new_tokens": 32, "repetition_penalty": 1.1}
    theirs = demo().model.generate(**asked(*QUESTIONS), **options)
    vars(demo().model).pop(ENGINES, None)
    for _ in range(2):
        hook = speculate("edd", POLICY)
        assert torch.equal(
            demo().model.generate(**asked(*QUESTIONS), **options, custom_generate=hook), theirs
        )
        assert hook.stats.acceptance_length > 1.3
    (engine,) = vars(demo().model)[ENGINES].values()
    assert engine.target.name == "demo"
    assert engine.held is None, "the user may change the weights before the next call"


def test_engines_go_with_their_model() -> None:
    made = fresh("llama")
    first = get_engine(made, build_part("drafter", "pld"), POLICY, None, None)
    assert get_engine(made, build_part("drafter", "pld"), POLICY, None, None) is first
    assert get_engine(made, "pld", POLICY, None, None) is not first
    assert (
        get_engine(made, build_part("drafter", "pld"), POLICY, None, Costs({1: 1.0}, {1: 1.0}))
        is not first
    )
    shallow = copy.copy(made)
    assert (
        get_engine(shallow, build_part("drafter", "pld"), POLICY, None, None).target.decoder.model
        is shallow
    )
    assert name_of(made) == "LlamaForCausalLM in memory"
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert not vars(copied)[ENGINES]
    assert ENGINES not in made.state_dict()
    made.to(torch.bfloat16)
    assert get_engine(made, build_part("drafter", "pld"), POLICY, None, None) is not first


def test_weights_that_change_between_calls() -> None:
    made, hook = fresh("llama"), speculate("pld", POLICY)
    prompted = padded(TEXTS[:1])
    first = made.generate(**prompted, max_new_tokens=NEW, custom_generate=hook)
    made.load_state_dict(fresh("llama", seed=1).state_dict())
    second = made.generate(**prompted, max_new_tokens=NEW, custom_generate=hook)
    assert not torch.equal(first, second)
    assert torch.equal(second, fresh("llama", seed=1).generate(**prompted, max_new_tokens=NEW))


def test_a_model_in_training_is_put_to_rest_for_the_call() -> None:
    made = build("llama", {"attention_dropout": 0.5})
    theirs = made.generate(**padded(TEXTS), max_new_tokens=9)
    made.train()
    made.model.layers[1].eval()
    flags = [m.training for m in made.modules()]
    for _ in range(2):
        assert torch.equal(
            made.generate(
                **padded(TEXTS), max_new_tokens=9, custom_generate=speculate("pld", POLICY)
            ),
            theirs,
        )
        assert [m.training for m in made.modules()] == flags


def test_stop_strings() -> None:
    """By every way: transformers drops the tokenizer that they need."""
    prompted = asked(QUESTIONS[0])
    tokenizer = demo().tokenizer
    plain = demo().model
    words = tokenizer.decode(
        plain.generate(**prompted, max_new_tokens=16)[0, prompted["input_ids"].shape[1] :]
    )
    stop = [words[len(words) // 2 :][:5], "@@"]
    options: Options = {"max_new_tokens": 16, "stop_strings": stop}
    theirs = plain.generate(**prompted, **options, tokenizer=tokenizer)
    assert theirs.shape[1] < prompted["input_ids"].shape[1] + 16
    engine = get_engine(plain, "edd", POLICY, None, None)
    config = GenerationConfig(**options)
    own = StoppingCriteriaList([StopStringCriteria(tokenizer, stop)])
    for ours in (
        plain.generate(**prompted, **options, custom_generate=speculate("edd", POLICY)),
        plain.generate(
            **prompted, **options, custom_generate=speculate("edd", POLICY, tokenizer=tokenizer)
        ),
        plain.generate(
            **prompted,
            max_new_tokens=16,
            stopping_criteria=own,
            custom_generate=speculate("edd", POLICY),
        ),
        engine.generate(**prompted, **options, tokenizer=tokenizer),
        engine.generate(**prompted, generation_config=config),
        engine.generate(
            **prompted, max_new_tokens=16, stopping_criteria=own, stop_strings=["never"]
        ),
    ):
        assert torch.equal(ours, theirs)
    assert config.stop_strings == stop
    assert len(own) == 1
    with pytest.raises(ValueError, match="stop strings"):
        plain.generate(
            **prompted,
            generation_config=config,
            tokenizer=tokenizer,
            custom_generate=speculate("edd", POLICY),
        )


def test_stop_strings_of_a_batch() -> None:
    prompted, options = asked(*QUESTIONS), {"max_new_tokens": 16, "stop_strings": [" of", "e c"]}
    theirs = demo().model.generate(**prompted, **options, tokenizer=demo().tokenizer)
    ours = get_engine(demo().model, "edd", POLICY, None, None).generate(**prompted, **options)
    assert torch.equal(ours, theirs)


def test_stop_strings_without_a_tokenizer() -> None:
    with pytest.raises(UserError, match=r"speculate\(tokenizer=…\)"):
        model().generate(
            **padded(TEXTS),
            max_new_tokens=3,
            stop_strings=["a"],
            custom_generate=speculate("pld", POLICY),
        )


def test_stop_strings_in_the_models_own_config() -> None:
    plain, prompted = copy.copy(demo().model), asked(QUESTIONS[0])
    plain.generation_config = copy.deepcopy(plain.generation_config)
    plain.generation_config.stop_strings = [" legs"]
    theirs = plain.generate(**prompted, max_new_tokens=24, tokenizer=demo().tokenizer)
    assert theirs.shape[1] < prompted["input_ids"].shape[1] + 24
    assert torch.equal(
        get_engine(plain, "edd", POLICY, None, None).generate(**prompted, max_new_tokens=24), theirs
    )


def test_pieces_of_text_are_streamed_as_transformers_streams_them() -> None:
    streams = [TextIteratorStreamer(demo().tokenizer, skip_prompt=True) for _ in range(3)]
    prompted = asked(QUESTIONS[1])
    demo().model.generate(**prompted, max_new_tokens=24, streamer=streams[0])
    demo().model.generate(
        **prompted, max_new_tokens=24, custom_generate=speculate("edd", POLICY, streamer=streams[1])
    )
    get_engine(demo().model, "edd", POLICY, None, None).generate(
        **prompted, max_new_tokens=24, streamer=streams[2]
    )
    pieces = [list(stream) for stream in streams]
    assert len(pieces[0]) > 5
    assert pieces[1] == pieces[2] == pieces[0]


def test_a_watermark_that_remembers_its_calls() -> None:
    """SynthID's sampling is of one row and one draw of the keys; greedily its scores can be compared."""
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 7])
    same(
        padded(TEXTS),
        lambda: {"max_new_tokens": NEW, "watermarking_config": config, "eos_token_id": -1},
    )


def test_a_text_ends_with_the_context_and_says_so() -> None:
    t = tiny_target(context=20)
    engine = Engine(t, Never([[1, 2, 3]], 61), POLICY)
    with pytest.warns(UserWarning, match="context of 20"):
        written = engine.generate(
            torch.tensor([[1, 2, 3]]), max_new_tokens=40, attention_mask=torch.ones(1, 3)
        )
    assert written.shape == (1, 21)
    assert torch.equal(
        written, t.decoder.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=18)
    )


REFUSALS: Mapping[str, tuple[Options, str]] = {
    "beams": ({"num_beams": 3}, "num_beams is 3, allowed is 1"),
    "groups": ({"num_beams": 4, "num_beam_groups": 2}, "num_beams is 4"),
    "groups alone": ({"num_beam_groups": 2}, "num_beam_groups is 2"),
    "constraints": ({"constraints": [1]}, "constraints is"),
    "words": ({"force_words_ids": [[5]]}, "force_words_ids is"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha is 0.6"),
    "dola": ({"dola_layers": "high"}, "dola_layers is 'high'"),
    "guidance": ({"guidance_scale": 2.0}, "guidance_scale is 2.0"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is 3, .*pld"),
    "mtp": ({"use_mtp": True}, "use_mtp is True, .*mtp"),
    "early exit": ({"assistant_early_exit": 2}, "assistant_early_exit is 2"),
    "speculation": ({"speculation_type": "dflash"}, "speculation_type is 'dflash'"),
    "assistant": ({"is_assistant": True}, "is_assistant is True"),
    "healing": ({"token_healing": True}, "token_healing is True"),
    "no cache": ({"use_cache": False}, "use_cache is False"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
    "offloaded cache": (
        {"cache_implementation": "offloaded"},
        "cache_implementation is 'offloaded'",
    ),
    "a cache": ({CACHE: DynamicCache()}, f"{CACHE} is given"),
    "attentions": (
        {"output_attentions": True, "return_dict_in_generate": True},
        "output_attentions is True",
    ),
    "states": (
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "output_hidden_states is True",
    ),
    "embeddings": (
        {"inputs_embeds": torch.zeros(1, 3, 32, dtype=torch.float64)},
        "inputs_embeds may change",
    ),
    "labels": ({"labels": torch.zeros(1, 3)}, "labels may change what the model computes"),
    "positions": ({"position_ids": torch.tensor([[4, 5, 6]])}, "position_ids are not 0, 1, 2"),
    "right padding": (
        {"attention_mask": torch.tensor([[1, 1, 0]])},
        "row 0 of attention_mask .* pad on the left",
    ),
    "nothing seen": ({"attention_mask": torch.tensor([[0, 0, 0]])}, "row 0 of attention_mask"),
    "a longer mask": (
        {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])},
        r"attention_mask is \[1, 5\]",
    ),
    "a longer mask of ones": ({"attention_mask": torch.ones(1, 5)}, "position_ids are not 0, 1, 2"),
    "out of the vocabulary": ({"input_ids": torch.tensor([[4, VOCAB]])}, f"token id {VOCAB}"),
}


@pytest.mark.filterwarnings("default:Using the model-agnostic default")
@pytest.mark.parametrize("how", ["hook", "engine"])
@pytest.mark.parametrize("name", REFUSALS)
def test_unsupported_options_are_refused_by_name(name: str, how: str) -> None:
    options, message = REFUSALS[name]
    options = {
        "input_ids": torch.tensor([[3, 8, 8]]),
        "max_new_tokens": 3,
        **copy.deepcopy(options),
    }
    engine = Engine(target("llama"), Never([[3]], VOCAB), POLICY)
    with pytest.raises(UserError, match=message):
        model().generate(
            **options, custom_generate=Hook(lambda *_: engine)
        ) if how == "hook" else engine.generate(**options)


def test_every_refused_option_has_a_test() -> None:
    assert set(UNSUPPORTED_OPTIONS) <= {
        name for options, _ in REFUSALS.values() for name in options
    }


def test_options_that_transformers_hides_from_a_hook_are_refused() -> None:
    engine = Engine(target("llama"), Never([[3]], VOCAB), POLICY)
    for options, message in (
        ({"assistant_model": model()}, "assistant_model is given"),
        ({"custom_generate": "somebody/something"}, "custom_generate is given"),
        ({"synced_gpus": True}, "synced_gpus is given"),
        ({"cache_implementation": "paged"}, "cache_implementation is 'paged'"),
        ({"cache_implementation": "quantized"}, "cache_implementation is 'quantized'"),
        (
            {"generation_config": GenerationConfig(cache_implementation="paged")},
            "cache_implementation is 'paged'",
        ),
    ):
        with pytest.raises(UserError, match=message):
            engine.generate(**padded(TEXTS), **options)


def test_guidance_by_hand_is_refused() -> None:
    guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, model())
    with pytest.raises(UserError, match="guidance"):
        Engine(target("llama"), Never([[3]], VOCAB), POLICY).generate(
            **padded(TEXTS), logits_processor=[guide], max_new_tokens=3
        )


def test_a_processor_that_may_remember_is_refused_where_it_would_be_asked_ahead() -> None:
    engine = Engine(
        target("llama"),
        Never([[3]], VOCAB),
        build_part("policy", "chain"),
        build_part("acceptor", "block"),
    )
    assert sampled(engine, TEXTS[:1], seed=1, repetition_penalty=1.2).shape == (
        1,
        len(TEXTS[0]) + 12,
    )
    written = sampled(
        engine, TEXTS[:1], seed=1, renormalize_logits=True, remove_invalid_values=True
    )
    assert written.shape == (1, len(TEXTS[0]) + 12)
    with pytest.raises(UserError, match="processor Shifting may keep count of its calls"):
        sampled(engine, TEXTS[:1], logits_processor=[Shifting()])


def test_an_encoder_decoder_model_is_refused() -> None:
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": VOCAB,
    }
    t5 = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(UserError, match="encoder-decoder"):
        t5.generate(**padded(TEXTS), max_new_tokens=3, custom_generate=speculate("pld"))


def test_a_processor_that_cannot_be_copied_is_refused_for_a_batch_alone() -> None:
    held = Rowwise()
    held.lines = iter([1])  # type: ignore[attr-defined]
    held.code = (i for i in range(3))  # type: ignore[attr-defined]
    engine = Engine(target("llama"), Never([t.tolist() for t in TEXTS], VOCAB), POLICY)
    engine.generate(**padded(TEXTS[:1]), max_new_tokens=3, logits_processor=[held])
    with pytest.raises(UserError, match="Rowwise cannot be copied for each row"):
        engine.generate(**padded(TEXTS), max_new_tokens=3, logits_processor=[held])


DEMO_OPTIONS: Mapping[str, Callable[[], Options]] = {
    "plain": dict,
    "repetition": lambda: {"repetition_penalty": 1.2},
    "ngrams": lambda: {"no_repeat_ngram_size": 3},
    "bad words": lambda: {"bad_words_ids": [[5], [17, 30], [260], [300, 301]]},
    "bias": lambda: {"sequence_bias": [[[270], -4.0], [[300], 2.0], [[310, 311], 3.0]]},
    "suppress": lambda: {"suppress_tokens": list(range(300, 330))},
    "begin suppress": lambda: {"begin_suppress_tokens": list(range(250, 400))},
    "forced eos": lambda: {"forced_eos_token_id": 2},
    "min new": lambda: {"min_new_tokens": 20},
    "min length": lambda: {"min_length": 175},
    "max length": lambda: {"max_length": 1024, "max_time": 1e6, "max_new_tokens": 20},
    "eos list": lambda: {"eos_token_id": [2, 300, 14]},
    "stop strings": lambda: {"stop_strings": [". ", "\n", " to the"]},
    "prefix": lambda: {
        "prefix_allowed_tokens_fn": lambda _, ids: list(range(int(ids[-1]) % 3, 4096, 2))
    },
    "decay": lambda: {"exponential_decay_length_penalty": (5, 1.2)},
    "renormalize": lambda: {"renormalize_logits": True, "repetition_penalty": 1.1},
    "invalid values": lambda: {"remove_invalid_values": True},
    "encoder": lambda: {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 3},
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=2.0)},
    "own processor": lambda: {"logits_processor": [Shifting()]},
    "own criterion": lambda: {"stopping_criteria": [Divisible(7)]},
}


@pytest.mark.long
@pytest.mark.parametrize("name", DEMO_OPTIONS)
def test_the_demo_on_50_prompts(name: str) -> None:
    """In batches of 10, without options one by one. Where texts part, the two best processed scores are as good as equal."""
    if not SUITE.exists():
        pytest.skip("the prompts are not here")
    plain = demo().model
    tokenizer = demo().tokenizer
    parted = []
    every = suites.load(str(SUITE)).prompts
    chosen = [encode(tokenizer, p.content)[-160:] for p in every[:: len(every) // 50][:50]]
    size = 1 if name == "plain" else 10
    for at in range(0, 50, size):
        prompted = padded([torch.tensor(ids) for ids in chosen[at : at + size]])
        call = lambda prompted=prompted, **more: plain.generate(
            **prompted, **{"max_new_tokens": 24, **DEMO_OPTIONS[name](), **more}
        )
        theirs = call(tokenizer=tokenizer, output_scores=True, return_dict_in_generate=True)
        ours = call(custom_generate=speculate("edd", POLICY))
        start = prompted["input_ids"].shape[1]
        for row, (mine, other) in enumerate(
            zip(ours.tolist(), theirs.sequences.tolist(), strict=True)
        ):
            n = min(len(mine), len(other))
            if (differ := next((i for i in range(n) if mine[i] != other[i]), None)) is not None:
                top = theirs.scores[differ - start][row].topk(2).values
                assert top[0] - top[1] < 1e-4, f"prompt {at + row}: {top.tolist()}"
                parted.append(at + row)
        assert ours.shape == theirs.sequences.shape or parted, (
            "some texts are only longer than others"
        )
    print(f"{name}: {len(parted)} of 50 texts part at a tie")


@pytest.mark.parametrize("wrong", [-1, 2**64, "x", 1.5])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_wrong_seed_is_refused_in_greedy_calls_too(wrong: Any, sampled: bool) -> None:
    with pytest.raises(UserError, match=r"seed is .*, allowed is a whole number in 0"):
        speculate(drafter="pld", policy="chain", seed=wrong)
    engine = Engine(
        tiny_target(),
        build_part("drafter", "pld").open(tiny_target()),
        build_part("policy", "chain"),
    )
    with pytest.raises(UserError, match=r"seed is .*, allowed is a whole number in 0"):
        engine.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=2, do_sample=sampled, seed=wrong)


def test_a_misspelt_part_is_told_at_once() -> None:
    with pytest.raises(UserError, match=r"unknown policy 'pctt'.*did you mean 'pct'"):
        speculate(policy="pctt")


def test_generate_hands_its_streamer_and_its_assistant_to_the_hook() -> None:
    theirs, ours = Told(), Told()
    prompted = asked(QUESTIONS[1])
    written = demo().model.generate(**prompted, max_new_tokens=24, streamer=theirs)
    found = demo().model.generate(
        **prompted, max_new_tokens=24, streamer=ours, custom_generate=speculate
    )
    assert torch.equal(found, written)
    assert ours.seen == theirs.seen
    with pytest.raises(UserError, match="streamer is given to generate and to speculate"):
        demo().model.generate(
            **prompted, max_new_tokens=2, streamer=ours, custom_generate=speculate(streamer=Told())
        )
    small = copy.deepcopy(demo().model)
    hook = speculate(policy="chain:length=3")
    found = demo().model.generate(
        **prompted, max_new_tokens=24, assistant_model=small, custom_generate=hook
    )
    assert torch.equal(found, written)
    assert hook.stats.acceptance_length > 3, "the model itself drafts what it writes"
    with pytest.raises(
        UserError, match="assistant_model is given to generate and drafter to speculate"
    ):
        demo().model.generate(
            **prompted, max_new_tokens=2, assistant_model=small, custom_generate=speculate("pld")
        )


def test_speculate_needs_no_parentheses_and_takes_a_model_by_transformers_name() -> None:
    prompted = asked(QUESTIONS[1])
    written = demo().model.generate(**prompted, max_new_tokens=24)
    assert torch.equal(
        demo().model.generate(**prompted, max_new_tokens=24, custom_generate=speculate), written
    )
    hook = speculate(assistant_model=copy.deepcopy(demo().model), policy="chain:length=3")
    assert torch.equal(
        demo().model.generate(**prompted, max_new_tokens=24, custom_generate=hook), written
    )
    assert hook.stats.acceptance_length > 3
    with pytest.raises(UserError, match="the policy is given twice, 'pct' and 'chain:length=5'"):
        speculate(num_assistant_tokens=5, policy="pct")
