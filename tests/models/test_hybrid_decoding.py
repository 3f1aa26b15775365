"""What is written with drafts over models that fold the text into a state: stock decoding's very tokens."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from draftree.acceptors.greedy import Greedy
from draftree.acceptors.rejection import Rejection
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.drafters.base import Drafter
from draftree.drafters.eagle import EAGLE
from draftree.drafters.lm import LMDrafter
from draftree.drafters.lookahead import Lookahead
from draftree.drafters.medusa import Medusa
from draftree.drafters.suffix import Suffix
from draftree.drafters.token_recycling import TokenRecycling
from draftree.engine import Engine, generate_plain
from draftree.loop import Components, State, admit, release, step
from draftree.models.causal_lm import CausalLM
from draftree.policies.base import Policy
from draftree.policies.chain import Chain
from draftree.policies.eagle2 import EAGLE2
from draftree.policies.yield_ import Yield
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing.fakes import Coached, Sometimes
from frequencies import goodness
from hybrids import FAMILIES, RULES, VOCAB, OneByOne, hybrid

NEW = 10
PROMPTS = [
    [5, 9, 7, 11, 5, 9, 7, 11, 5],
    [3, 3, 8],
    [40, 41, 42, 43, 44, 40, 41, 42, 43, 44, 40, 41, 2],
]
COSTS = Costs({1: 0.02}, {1: 1.0, 16: 1.2, 64: 2.0})
POLICIES: dict[str, Policy] = {
    "chain": Chain(4),
    "eagle2": EAGLE2(nodes=8, depth=3, width=2),
    "yield": Yield(width=3, depth=4),
}
DRAFTERS = ("suffix", "lookahead", "token_recycling", "lm", "eagle")
ALONE = ("mamba", "mamba2", "falcon_mamba")
"""Families without any attention; Medusa drafts for them, too."""
WARM = Sampling(temperature=1.0, seed=3)
PRODUCT = [
    (family, drafter, policy)
    for family in FAMILIES
    for drafter in (*DRAFTERS, *(("medusa",) if family in ALONE else ()))
    for policy in POLICIES
]
FEW = [
    (f, d, p)
    for i, (f, d, p) in enumerate(PRODUCT)
    if list(POLICIES).index(p) == (i // 3 + list(FAMILIES).index(f)) % 3
]
"""Every family with every drafter once, and with every policy."""
OFTEN = [
    (f, d, p)
    for i, (f, d, p) in enumerate(FEW)
    if not (i + list(FAMILIES).index(f)) % (2 if f in (*RULES.values(), *ALONE) else 3)
]
"""Of a family of each rule every second; of the others every third."""


@cache
def target(family: str) -> Target:
    """A family's tiny model."""
    return Target(CausalLM(hybrid(family)), family)


@cache
def small(family: str) -> LMDrafter:
    """A drafter that folds its text into a state itself: much like the target, and not quite."""
    model, draw = hybrid(family), torch.Generator().manual_seed(9)
    for weight in model.parameters():
        weight.add_(
            0.02 * torch.randn(weight.shape, generator=draw, dtype=torch.float32).to(weight.dtype)
        )
    return LMDrafter(Target(CausalLM(model), "small"))


@cache
def greedy(family: str) -> list[list[int]]:
    """What stock decoding writes after each prompt, one token a pass."""
    return [OneByOne(target(family).decoder.model, prompt).write(NEW) for prompt in PROMPTS]


@cache
def drawn(family: str) -> list[list[int]]:
    """What our plain decoding draws after each prompt."""
    return generate_plain(target(family), requests(WARM)).tokens


def requests(sampling: Sampling = Sampling()) -> list[Request]:
    """One for each prompt."""
    return [Request(p, NEW, number=i, sampling=sampling) for i, p in enumerate(PROMPTS)]


def drafter(name: str, family: str, texts: list[list[int]]) -> Drafter[Any]:
    """One that is right now and then: random weights hardly ever are."""
    own: dict[str, Any] = {
        "suffix": Suffix(),
        "lookahead": Lookahead(),
        "eagle": EAGLE(),
        "medusa": Medusa(),
    }
    own["token_recycling"] = TokenRecycling()
    inner = small(family) if name == "lm" else own[name].example(target(family))
    return Coached(inner, Sometimes([[*p, *t] for p, t in zip(PROMPTS, texts, strict=True)], VOCAB))


def written(
    family: str, name: str, policy: str, sampling: Sampling, texts: list[list[int]]
) -> None:
    """Writes with drafts, and compares with what they must be."""
    engine = Engine(target(family), drafter(name, family, texts), POLICIES[policy], costs=COSTS)
    out = engine.write(requests(sampling))
    assert out.tokens == texts
    assert out.stats.acceptance_length > 1.2, "hardly anything was accepted: the test is idle"


@pytest.mark.parametrize(("family", "name", "policy"), OFTEN)
def test_stock_greedy_tokens_are_written(family: str, name: str, policy: str) -> None:
    written(family, name, policy, Sampling(), greedy(family))


@pytest.mark.parametrize(("family", "name", "policy"), FEW[::4])
def test_a_seeds_text_is_that_of_plain_decoding(family: str, name: str, policy: str) -> None:
    written(family, name, policy, WARM, drawn(family))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(f, torch.bfloat16, marks=[pytest.mark.long] * (i % 2))
        for i, f in enumerate(FAMILIES)
    ]
    + [
        pytest.param(f, torch.float32, marks=[pytest.mark.long] * (f not in RULES.values()))
        for f in FAMILIES
    ],
)
def test_texts_part_where_two_tokens_are_as_good_as_equal_alone(
    family: str, dtype: torch.dtype
) -> None:
    """Stock greedy decoding's text, up to where it prefers its own token by less than its own forms round apart."""
    model = hybrid(family, dtype)
    texts = [OneByOne(model, prompt).write(NEW) for prompt in PROMPTS]
    whole, likely = (
        Target(CausalLM(model), family),
        Sometimes([[*p, *t] for p, t in zip(PROMPTS, texts, strict=True)], VOCAB),
    )
    out = Engine(
        whole, Coached(Suffix().example(whole), likely), POLICIES["eagle2"], costs=COSTS
    ).write(requests())
    assert out.stats.acceptance_length > 1.2, "hardly anything was accepted: the test is idle"
    for prompt, ours, theirs in zip(PROMPTS, out.tokens, texts, strict=True):
        same = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), NEW
        )
        if same < NEW:
            one_by_one = OneByOne(model, prompt).after(theirs[:same]).logits.float()
            at_once = OneByOne(model, [*prompt, *theirs[:same]]).logits.float()
            apart = float((one_by_one - at_once).abs().max())
            assert float(one_by_one[theirs[same]] - one_by_one[ours[same]]) < 2 * apart


@pytest.mark.long
@pytest.mark.parametrize(("family", "name", "policy"), PRODUCT)
def test_the_whole_product(family: str, name: str, policy: str) -> None:
    written(family, name, policy, Sampling(), greedy(family))
    written(family, name, policy, WARM, drawn(family))


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.long) if f == "kimi_linear" else f for f in RULES.values()],
)
def test_rejection_keeps_the_distribution(family: str) -> None:
    """χ² of pairs of tokens drawn behind a prompt, with a drafter near the target, against stock decoding's law."""
    many = 60
    warm = Sampling(temperature=1.0, top_k=3, seed=5)
    prompt = PROMPTS[0]
    law: dict[tuple[int, ...], float] = {}
    begun = OneByOne(target(family).decoder.model, prompt)
    for first, p in likeliest(begun.logits):
        law |= {(first, second): p * q for second, q in likeliest(begun.after([first]).logits)}
    engine = Engine(target(family), small(family), Chain(4), Rejection(), COSTS)
    found: Counter[tuple[int, ...]] = Counter()
    for batch in range(5):
        asked = [Request(prompt, 4, number=batch * many + i, sampling=warm) for i in range(many)]
        out = engine.write(asked, reuse=False)
        found.update(tuple(tokens[:2]) for tokens in out.tokens)
        assert out.stats.acceptance_length > 1.1
    assert found.keys() <= law.keys()
    assert goodness([found[pair] for pair in law], list(law.values())).p_value > 1e-3


def likeliest(logits: torch.Tensor) -> list[tuple[int, float]]:
    """The three likeliest tokens and their probabilities among themselves."""
    values, tokens = logits.topk(3)
    return list(zip(tokens.tolist(), values.softmax(0).tolist(), strict=True))


@pytest.mark.parametrize("family", RULES.values())
def test_rows_that_join_leave_and_finish_inside_a_path(family: str) -> None:
    whole, texts = target(family), greedy(family)
    ends = [frozenset({t[6]}) for t in texts]  # within an accepted path now and then
    until = [
        t[: next(i for i, token in enumerate(t) if token in end) + 1]
        for t, end in zip(texts, ends, strict=True)
    ]
    helped = Coached(small(family), Sometimes([[*PROMPTS[i], *texts[i]] for i in (0, 1)], VOCAB))
    parts = Components(whole, helped, POLICIES["eagle2"], Greedy(), COSTS)
    rows = SequenceBatch(whole.new_cache(2, 8))
    state = State()
    found = dict[int, list[int]]()
    waiting = list(itertools.chain(range(3), range(3)))
    owners: dict[int, int] = {}
    for _ in range(200):
        free = rows.free.tolist()
        new = [waiting.pop(0) for _ in free if waiting]
        if new:
            asked = [Request(PROMPTS[i], NEW, ends[i]) for i in new]
            _, state = admit(parts, rows, asked, state)
            owners |= dict(zip(free, new, strict=False))
        if rows.live.size:
            _, state = step(parts, rows, state)
        for row in [r for r in owners if r not in rows.live]:
            found[owners[row]] = list(rows.written[row])
            assert found[owners[row]] == until[owners.pop(row)]
            state = release(parts, rows, row, state)
        if not owners and not waiting:
            break
    assert len(found) == 3


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=[pytest.mark.long] * (f == "kimi_linear"))
        for f in (*RULES.values(), "nemotron_h")
    ],
)
def test_chats_that_go_on_fork_and_shrink(family: str) -> None:
    """Whatever is taken from the caches, the text is that of a prompt read from its beginning."""
    whole = target(family)
    engine = Engine(whole, Suffix().open(whole), POLICIES["eagle2"])
    draw = np.random.default_rng(1)
    first = draw.integers(2, 90, 70).tolist()
    answer = engine.write([Request(first, NEW)]).tokens[0]
    turns = {
        "goes on": [*first, *answer, 8, 9],
        "goes on again": [*first, *answer, 8, 9, 10, 11],
        "forks inside the answer": [*first, *answer[:5], 20, 21],
        "forks at the prompt's end": [*first[:-4], 30, 31, 32],
        "shrinks": first[:40],
        "the same again": first[:40],
        "another one": [7, 8, 9],
        "the first again": first,
    }
    for told, prompt in turns.items():
        assert engine.write([Request(prompt, NEW)]).tokens == [
            OneByOne(whole.decoder.model, prompt).write(NEW)
        ], told


@pytest.mark.parametrize("family", RULES.values())
def test_a_prompt_is_not_read_again_up_to_a_snapshot(family: str) -> None:
    whole = target(family)
    first = np.random.default_rng(1).integers(2, 90, 90).tolist()
    engine = Engine(whole, Suffix().open(whole), POLICIES["chain"])
    answer = engine.write([Request(first, NEW)]).tokens[0]
    reused = {}
    for told, prompt in {
        "on": [*first, *answer, 8],
        "again": first,
        "other end": [*first[:-6], 1, 2],
    }.items():
        engine = replace(engine)
        engine.write([Request(first, NEW)])
        rows, steps = engine.begin([Request(prompt, NEW)])
        reused[told] = int(rows.cache.lengths[0])
        del steps
    assert reused == {"on": 90 + NEW - 1, "again": 90 - 16, "other end": 90 - 16}
