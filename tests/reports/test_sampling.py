"""How tokens are drawn: temperatures, truncation, penalties, processors, seeds, and what is told of probabilities."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from architectures import model
from draftree import speculate
from draftree.drafters._from_objects import LoadedModel
from draftree.engine import Engine, generate_plain, load
from draftree.policies.chain import Chain
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import HiddenStateSpec, Target
from draftree.testing.fakes import TableDrafter, random_table, table_target
from draftree.testing.random_outcomes import outcomes
from generating import TEXTS
from reports import report
from reports.engines import LENGTH, PROMPT, asked, both, knowing, plainly, whole

KIND = "Sampling"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 4}


def logits_after(target: Target, ids: list[int]) -> Tensor:
    """Return the target's logits after a text, in a pass of their own."""
    return target.prefill(target.new_cache(1, 160), [np.array(ids)], HiddenStateSpec()).logits[0]


def steps_of(target: Target, count: int, choose: Any) -> list[int]:
    """Write token by token, without any of the engine's code: `choose(logits, prompt, written)`."""
    start = asked(target).prompt
    written = list[int]()
    for _ in range(count):
        written.append(int(choose(logits_after(target, [*start, *written]), start, written)))
    return written


@report(
    "ggml-org/llama.cpp#27972",
    KIND,
    "With a draft model the server reported a log-probability of 0 for every token.",
)
@report(
    "vllm-project/vllm#17876", KIND, "With n-gram drafts the log-probabilities of an answer were 0."
)
@report(
    "vllm-project/vllm#34497",
    KIND,
    "Log-probabilities that were asked for beside drafts were those of other positions.",
)
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_log_probabilities_are_those_of_a_pass_over_the_text(
    target: Target, options: dict[str, Any]
) -> None:
    for engine in both(target, [whole(target, **options)]):
        found = engine.complete(PROMPT, max_new_tokens=12, ignore_eos=True, logprobs=3, **options)
        assert found.stats.acceptance_length > 1.3
        start = [*asked(target).prompt]
        for i, token in enumerate(found.tokens):
            true = torch.log_softmax(logits_after(target, [*start, *found.tokens[:i]]), -1)
            assert found.logprobs[i].logprob == pytest.approx(float(true[token]), abs=1e-6)
            assert [t for t, _ in found.logprobs[i].top] == true.topk(3).indices.tolist()


@report(
    "vllm-project/vllm#18902",
    KIND,
    "A frequency penalty had no effect once drafts were on, and nothing said so.",
)
@pytest.mark.parametrize(
    ("frequency", "presence"), [(1.5, 0.0), (0.0, 2.0), (-0.8, 0.7), (0.4, -1.2)]
)
def test_penalties_hold_inside_accepted_blocks(
    target: Target, frequency: float, presence: float
) -> None:
    def penalised(logits: Tensor, _: Any, written: list[int]) -> Tensor:
        counts = torch.bincount(torch.tensor(written, dtype=torch.long), minlength=len(logits))
        return (logits - frequency * counts - presence * (counts > 0)).argmax()

    wanted = steps_of(target, 16, penalised)
    assert wanted != plainly(target)[:16]
    for engine in both(target, [[*asked(target).prompt, *wanted]]):
        given = {
            "frequency_penalty": frequency,
            "presence_penalty": presence,
            "max_new_tokens": 16,
            "ignore_eos": True,
        }
        found = engine.complete(PROMPT, **given)
        assert found.tokens == wanted
        assert found.stats.acceptance_length > 1.2


class Counting(LogitsProcessor):
    """Forces a token at certain calls."""

    def __init__(self, at: tuple[int, ...]) -> None:
        self.at, self.calls = at, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in self.at:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 9] = 0
        return scores


@report(
    "sgl-project/sglang#21724",
    KIND,
    "A custom logits processor was skipped where drafts were verified.",
)
@report(
    "sgl-project/sglang#26330",
    KIND,
    "A processor for a thinking budget was not asked about drafted tokens.",
)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_processor_is_called_once_for_each_token(sampled: bool) -> None:
    places = (2, 3, 7, 12)
    given: dict[str, Any] = {"max_new_tokens": 16, "do_sample": sampled, "eos_token_id": None}
    given |= {"temperature": 1.0, "top_k": 0} if sampled else {}
    for drafter in (LoadedModel(model("llama")), "pld"):
        hook = speculate(drafter, "chain:length=5", seed=1)
        found = model("llama").generate(
            TEXTS[0][None], custom_generate=hook, logits_processor=[Counting(places)], **given
        )[0, len(TEXTS[0]) :]  # fmt: skip
        assert all(found[i - 1] == 9 for i in places)
        if not sampled:
            plain_ids = model("llama").generate(
                TEXTS[0][None], logits_processor=[Counting(places)], **given
            )
            assert torch.equal(found, plain_ids[0, len(TEXTS[0]) :])


@report(
    "vllm-project/vllm#9441", KIND, "Requests with and without seeds in one batch wrote gibberish."
)
@report("vllm-project/vllm#6038", KIND, "The seed of a request was not respected with drafts.")
def test_seeded_requests_in_one_batch_are_what_they_are_alone(target: Target) -> None:
    requests = [asked(target, number=i, **options) for i, options in enumerate(
        [{}, SAMPLED, {"temperature": 0.7, "seed": 9, "top_p": 0.9}, {"temperature": 1.3, "top_k": 20}]
    )]  # fmt: skip
    alone = [generate_plain(target, [r]).tokens[0] for r in requests]
    assert len(set(map(tuple, alone))) == 4
    texts = [[*r.prompt, *t] for r, t in zip(requests, alone, strict=True)]
    for order in ([0, 1, 2, 3], [3, 1, 0]):
        for engine in both(target, [texts[i] for i in order]):
            assert engine.write([requests[i] for i in order]).tokens == [alone[i] for i in order]


@report(
    "vllm-project/vllm#42744",
    KIND,
    "Minimal probabilities and logit biases reached the bonus token alone, not verified drafts.",
)
@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.2},
        {"logit_bias": {70: 6.0, 75: -9.0}},
        {"min_p": 0.05, "logit_bias": {71: 5.0}},
        {"suppress": [70, 71]},
    ],
    ids=str,
)
def test_truncation_and_bias_reach_every_drafted_token(
    target: Target, options: dict[str, Any]
) -> None:
    given = {**SAMPLED, **options}
    wanted = plainly(target, **given)
    for engine in both(target, [whole(target, **given)]):
        found = engine.complete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, **given)
        assert found.tokens == wanted
        assert "drafted" in found.origins
    if "min_p" in options:
        for i, token in enumerate(wanted):
            logits = logits_after(target, [*asked(target).prompt, *wanted[:i]])
            bias = torch.zeros(len(logits), dtype=logits.dtype)
            bias[71] = options.get("logit_bias", {}).get(71, 0.0)
            p = torch.softmax(logits + bias, -1)
            assert p[token] >= options["min_p"] * p.max()


@report(
    "vllm-project/vllm#9834",
    KIND,
    "Verification used fixed sampling parameters instead of the request's own.",
)
@report(
    "vllm-project/vllm#10198",
    KIND,
    "The target's probabilities were compared without the sampling parameters of the request.",
)
@report(
    "google-ai-edge/LiteRT-LM#3017",
    KIND,
    "With drafts the sampling parameters of the verifying model were not used.",
)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.4),
        Sampling(2.0),
        Sampling(1.0, top_k=2),
        Sampling(1.0, top_p=0.5),
        Sampling(0.8, min_p=0.3),
    ],
    ids=str,
)
def test_the_distribution_is_that_of_the_requests_own_sampling(sampling: Sampling) -> None:
    """Every outcome of two tokens is enumerated, with rejection of sampled drafts, and compared with the plain product."""
    vocab = 4
    target, q = table_target(random_table(vocab, 3)), torch.softmax(torch.randn(vocab, vocab), -1)
    prompt = [1, 2]
    request = Request(prompt, 2, sampling=sampling)

    def run(chance: Any) -> tuple[int, ...]:
        engine = Engine(target, TableDrafter(q, chance), Chain(2), build("acceptor", "rejection"))
        rows, steps = engine.begin([request], source=lambda _: chance)
        for _ in steps:
            pass
        return tuple(rows.written[0])

    def shaped(ids: list[int]) -> Tensor:
        logits = logits_after(target, ids)[None]
        for step in sampling.processors:
            logits = step(torch.tensor([ids]), logits)
        return torch.softmax(logits[0], -1)

    found = outcomes(run)
    for a in range(vocab):
        for b in range(vocab):
            wanted = float(shaped(prompt)[a] * shaped([*prompt, a])[b])
            assert found.get((a, b), 0.0) == pytest.approx(wanted, abs=1e-9)


@report(
    "EricLBuehler/mistral.rs#2424",
    KIND,
    "The speculative path computed a distribution, and took its likeliest token.",
)
@report(
    "vllm-project/vllm#13196",
    KIND,
    "The output of rejection sampling did not change with the seed.",
)
def test_other_seeds_draw_other_texts(target: Target) -> None:
    for acceptor in ("match", "rejection"):
        engine = load(target, "pld", "chain:length=3", acceptor)
        given = {"max_new_tokens": 10, "temperature": 1.0, "ignore_eos": True}
        found = [engine.complete(PROMPT, seed=seed, **given).tokens for seed in range(12)]
        assert len(set(map(tuple, found))) == 12
        assert engine.complete(PROMPT, seed=3, **given).tokens == found[3]


@report(
    "vllm-project/vllm#27077",
    KIND,
    "Greedy requests were marked by another temperature than was tested, and logits divided by 0.",
)
def test_a_temperature_of_zero_among_others_divides_nothing(target: Target) -> None:
    requests = [
        asked(target, number=i, temperature=t, seed=2) for i, t in enumerate((0.0, 1e-6, 1.0, 0.0))
    ]
    alone = [generate_plain(target, [r]).tokens[0] for r in requests]
    assert alone[0] == alone[1] == alone[3] != alone[2]
    for engine in both(target, [[*r.prompt, *t] for r, t in zip(requests, alone, strict=True)]):
        assert engine.write(requests).tokens == alone


@report(
    "jaymody/speculative-sampling#3",
    KIND,
    "Drafts were the likeliest tokens while the rule took them for draws, so the distribution was another.",
)
@pytest.mark.parametrize("acceptor", ["rejection", "multiround", "block", "traversal"])
def test_a_rule_for_sampled_drafts_gets_sampled_drafts(acceptor: str) -> None:
    """Drafts come from a distribution far from the target's; the rule says which draw it needs, and the policy honours it."""
    vocab = 3
    target = table_target(random_table(vocab, 5))
    q = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1]])
    policy = build(
        "policy", "chain:length=2" if acceptor in ("rejection", "block") else "vct:width=2,depth=1"
    )
    request = Request([0, 1], 2, sampling=Sampling(1.0))

    def run(chance: Any) -> tuple[int, ...]:
        engine = Engine(target, TableDrafter(q, chance), policy, build("acceptor", acceptor))
        rows, steps = engine.begin([request], source=lambda _: chance)
        for _ in steps:
            pass
        return tuple(rows.written[0])

    found = outcomes(run)
    for a in range(vocab):
        for b in range(vocab):
            first = torch.softmax(logits_after(target, [0, 1]), -1)[a]
            then = torch.softmax(logits_after(target, [0, 1, a]), -1)[b]
            assert found.get((a, b), 0.0) == pytest.approx(float(first * then), abs=1e-9)


@report(
    "1CatAI/1Cat-vLLM#656",
    KIND,
    "Drafts drawn at temperatures above 0 spoiled the texts of batches of more than two.",
)
@pytest.mark.parametrize("acceptor", ["match", "rejection"])
def test_drafts_that_are_drawn_spoil_no_batch(target: Target, acceptor: str) -> None:
    engine = Engine(
        target, load(target, LoadedModel(target)).drafter, Chain(4), build("acceptor", acceptor)
    )
    requests = [
        asked(target, "abcde"[: i + 1], number=i, temperature=0.8, seed=5, max_new_tokens=10)
        for i in range(5)
    ]
    alone = [engine.write([r], reuse=False).tokens[0] for r in requests]
    assert engine.write(requests, reuse=False).tokens == alone
    assert len(set(map(tuple, alone))) == 5


@report(
    "Blaizzy/mlx-vlm#2029",
    KIND,
    "A seeded request with top-k left the path that draws by position, and its text depended on the grouping.",
)
@pytest.mark.parametrize(
    "options", [{"top_k": 40}, {"top_k": 5, "top_p": 0.9}, {"typical_p": 0.8}], ids=str
)
def test_the_text_of_a_seed_does_not_depend_on_how_drafts_are_grouped(
    target: Target, options: dict[str, Any]
) -> None:
    given = {**SAMPLED, **options, "max_new_tokens": LENGTH, "ignore_eos": True}
    wanted = plainly(target, **{k: v for k, v in given.items() if k != "ignore_eos"})
    text = [*asked(target).prompt, *wanted]
    for policy in (
        "chain:length=1",
        "chain:length=7",
        "vct:width=2,depth=3",
        "eagle2:nodes=12,depth=4,width=3",
    ):
        assert (
            knowing(target, [text], build("policy", policy)).complete(PROMPT, **given).tokens
            == wanted
        )


@report(
    "NVIDIA/TensorRT-LLM#12588",
    KIND,
    "Draft probabilities of later requests were computed with the first request's sampling parameters.",
)
def test_each_sequence_is_drafted_with_its_own_sampling(target: Target) -> None:
    """Under rejection of sampled drafts the draws depend on the drafts' own distribution: a neighbour's would show."""
    draft = load(target, LoadedModel(target)).drafter
    engine = Engine(target, draft, Chain(3), build("acceptor", "rejection"))
    given = [
        {"temperature": 0.3},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.6},
    ]
    requests = [
        asked(target, number=i, seed=7, max_new_tokens=12, **options)
        for i, options in enumerate(given)
    ]
    together = engine.write(requests, reuse=False)
    for request, tokens in zip(requests, together.tokens, strict=True):
        assert engine.write([request], reuse=False).tokens == [tokens]
    assert all(s.accepted == s.depth for s in together.stats.steps), (
        "of the same model every draft is accepted"
    )


@report(
    "NVIDIA/TensorRT-LLM#19487",
    KIND,
    "Requests without a seed shared one stream of random numbers, and gave the same texts.",
)
@report(
    "PaddlePaddle/FastDeploy#5568",
    KIND,
    "Tokens of one step shared a random number, so that samples were less diverse.",
)
@report("vllm-project/vllm#6137", KIND, "Several samples of one prompt failed with drafts.")
def test_samples_of_one_prompt_differ_from_one_another(target: Target) -> None:
    engine = load(target, "suffix", "chain:length=4")
    found = engine.complete(PROMPT, n=6, temperature=1.0, seed=3, max_new_tokens=8, ignore_eos=True)
    assert len({tuple(f.tokens) for f in found}) == 6
    first = engine.complete(PROMPT, temperature=1.0, seed=3, max_new_tokens=8, ignore_eos=True)
    assert found[0].tokens == first.tokens
    noise = [f.tokens[i] for f in found for i in range(8)]
    assert len(set(noise)) > 12, "positions of a step do not repeat one draw"
