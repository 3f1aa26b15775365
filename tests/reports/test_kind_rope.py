"""Rotary embeddings that depend on the length: texts on both sides of the switch, and across it.

Found by trying Phi-3's and Phi-4's rope: the keys of short texts were kept at the switch, and the
text differed from that of transformers' `generate`, which reads the whole text anew there.
"""

from functools import cache

import pytest
import torch

from architectures import CROSSING, VOCAB, fresh, target
from draftree.costs.step_costs import UNIT_COSTS
from draftree.drafters.lm import LMDrafter
from draftree.drafters.neural.draft_configs import of_values
from draftree.drafters.neural.rotary import Rotary
from draftree.engine import Engine
from draftree.registry import build as part
from draftree.request import Request
from draftree.target.target import Target

SWITCH = 16
TEXT = [int(i) for i in torch.randint(3, VOCAB, (30,), generator=torch.Generator().manual_seed(2))]


@cache
def reference(name: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """The likeliest tokens by the stock model.

    At the switch of `longrope` the whole text is read anew, as here for every token. `dynamic`
    turns each token by the frequencies of its own time, which `generate` keeps in its cache.
    """
    model, ids = fresh(name), list(prompt)
    if name == "dynamic":
        how = {
            "max_new_tokens": count,
            "min_new_tokens": count,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        return model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)).long(), **how
        )[0, len(ids) :].tolist()
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def engine(name: str, policy: str = "chain:length=5") -> Engine:
    """A target that drafts for itself, so that drafts reach across the switch."""
    to = target(name)
    return Engine(
        to, LMDrafter(Target(to.decoder, "itself")), part("policy", policy), costs=UNIT_COSTS
    )


def check(own: Engine, name: str, prompts: list[list[int]], count: int) -> None:
    """Compare what is written for prompts in one batch."""
    found = own.write([Request(prompt, count) for prompt in prompts]).tokens
    assert found == [reference(name, tuple(prompt), count) for prompt in prompts]


@pytest.mark.parametrize("policy", ["chain:length=5", "eagle2"])
@pytest.mark.parametrize(
    "length", [4, SWITCH - 4, SWITCH - 2, SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 6]
)
@pytest.mark.parametrize("name", CROSSING)
def test_texts_before_at_across_and_behind_the_switch(name: str, length: int, policy: str) -> None:
    check(engine(name, policy), name, [TEXT[:length]], 10)


@pytest.mark.parametrize("name", CROSSING)
def test_batches_on_both_sides_of_the_switch(name: str) -> None:
    check(engine(name), name, [TEXT[:4], TEXT[:22], TEXT[: SWITCH - 2]], 10)


@pytest.mark.parametrize("name", CROSSING)
def test_requests_that_follow_on_one_engine(name: str) -> None:
    own = engine(name)
    for length in (SWITCH - 3, SWITCH + 6, 5, SWITCH + 1, SWITCH - 1):
        check(own, name, [TEXT[:length]], 8)
    check(own, name, [TEXT[: SWITCH + 6]], 6)
    check(own, name, [[*TEXT[: SWITCH - 4], 9]], 8)


@pytest.mark.parametrize("name", CROSSING)
def test_submitted_requests_share_no_prefixes_across_the_switch(name: str) -> None:
    own = engine(name)
    own.set_limits(prefix_block=2)
    for length in (SWITCH - 4, SWITCH + 6, SWITCH - 4):
        handle = own.submit(Request(TEXT[:length], 6))
        assert handle.result().tokens == reference(name, tuple(TEXT[:length]), 6)
        assert handle.cached_tokens == 0


@pytest.mark.parametrize("name", CROSSING)
@pytest.mark.parametrize("drafter", ["suffix", "eagle", "vdm", "edd", "dflash"])
def test_other_drafters_across_the_switch(name: str, drafter: str) -> None:
    to = target(name)
    method = part("drafter", drafter)
    torch.manual_seed(0)
    own = Engine(
        to,
        method.open(to) if drafter == "suffix" else method.fresh(to),
        part("policy", "eagle2"),
        costs=UNIT_COSTS,
    )
    check(own, name, [TEXT[: SWITCH - 3], TEXT[:20]], 8)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_drafters_own_rotation_of_a_sequence_does_not_depend_on_others(kind: str) -> None:
    values = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 64 if kind == "longrope" else SWITCH,
    }
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
        rope |= {"original_max_position_embeddings": SWITCH, **factors}  # type: ignore[assignment]
    rotary = Rotary(of_values(values | {"rope_parameters": rope}))
    states, places = torch.zeros(1, 3, 32), torch.tensor([[3, 4, 5]])
    alone = rotary(states, places)
    both = rotary(states.expand(2, -1, -1), torch.tensor([[3, 4, 5], [38, 39, 40]]))
    after = rotary(states, places)
    for one, other, again in zip(alone, both, after, strict=True):
        assert torch.equal(one[0], other[0]), "a long sequence in the batch"
        assert torch.equal(one, again), "a long sequence before it"
