"""The acceptance length of a policy's trees along known texts: what decoding them would count."""

from typing import Any

import numpy as np
import pytest
import torch

from draftree.costs.step_costs import UNIT_COSTS, Costs
from draftree.data.samples import Sample
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.evaluation.target_trace import TokenText
from draftree.evaluation.tree_acceptance import MAX_DEPTH, count_matches, expected_length
from draftree.registry import build
from draftree.request import Request
from draftree.target.target import Target
from draftree.testing.fakes import Coached, Sometimes, TableDrafter, tiny_target
from draftree.training.held_out_metrics import MAX_TREE_TEXT_TOKENS, _first_learnt
from draftree.training.training_job import Training

V = 61
LIKELY, SECOND = 0.6, 0.4
CHEAP = Costs({1: 0.05}, {1: 1.0, 16: 1.2})


def counting() -> Target:
    """After t comes t + 1: its layers add nothing, and its head knows each token's embedding."""
    target = tiny_target()
    model: Any = target.decoder.model
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        embedding = model.get_input_embeddings().weight
        model.lm_head.weight = torch.nn.Parameter(
            (embedding / embedding.norm(dim=-1, keepdim=True)).roll(1, 0)
        )
    return target


def half_right() -> TableDrafter:
    """After an even token the right one is drafted first, after an odd one second; the other one is always 0."""
    q = torch.zeros(V, V)
    for t in range(V):
        q[t, (t + 1) % V], q[t, 0] = (LIKELY, SECOND) if t % 2 == 0 else (SECOND, LIKELY)
    return TableDrafter(q)


@pytest.mark.parametrize(
    ("policy", "text", "matched", "reached", "length"),
    [
        # Roots 1, 2, 4, 6, 8 of the text: a miss, and four times a hit that a miss follows, the
        # last at the text's end.
        ("chain:length=3", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 0], [5, 3], 1.8),
        # Both children of every root, and no more: every other token is drafted.
        ("ddtree:nodes=2", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 0], [4, 4], 2.0),
        # The two best and their best three children, the right one among them; the text's end is no
        # miss.
        ("ddtree:nodes=5", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 3, 0], [3, 3, 2], 3.0),
        # After 2 the text goes on with 8, not 3: a hit there counts, what comes behind it is
        # unknown.
        ("chain:length=3", [0, 1, 2, 8, 9], [2, 0], [3, 0], 1 + 2 / 3),
    ],
)  # fmt: skip
def test_trees_of_a_drafter_that_is_half_right(policy, text, matched, reached, length) -> None:
    found = count_matches(
        counting(),
        half_right(),
        build("policy", policy),
        [TokenText(np.array(text), 1)],
        UNIT_COSTS,
    )
    assert [f[: len(matched)].tolist() for f in found] == [matched, reached]
    assert expected_length(*found) == pytest.approx(length)


@pytest.mark.parametrize(
    ("drafter", "policy"),
    [
        ("edd", "chain:length=4"),
        ("eagle3", "eagle2:nodes=8"),
        ("dflash", "ddtree:nodes=8"),
        ("dspark", "yield"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_along_its_own_text_trees_are_accepted_as_in_decoding(drafter, policy, seed) -> None:
    """Decoding goes on behind the counted text, as its last trees are limited by its last token."""
    target, prompt, counted = tiny_target(context=60), [3, 1, 4], 30
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = build("drafter", drafter).example(target)
    request = Request(prompt, counted + MAX_DEPTH)
    plan = [*prompt, *Engine(target, made, build("policy", "chain")).plain([request]).tokens[0]]
    helped = lambda: Coached(made, Sometimes([plan], 61))
    steps = (
        Engine(target, helped(), build("policy", policy), costs=CHEAP).write([request]).stats.steps
    )
    accepted = [s.accepted for s in steps]
    roots = np.cumsum([0, *(1 + a for a in accepted)])[:-1].tolist()
    last = counted - 1  # the counted text's last token; the first token after the prompt is 0
    hits = [min(a, last - root) for root, a in zip(roots, accepted, strict=True) if root < last]
    text = TokenText(np.array(plan[: len(prompt) + counted]), len(prompt))
    matched, reached = count_matches(target, helped(), build("policy", policy), [text], CHEAP)
    assert reached[0] == len(hits) < 28
    assert matched.sum() == sum(hits)


def test_several_texts_count_as_each_alone() -> None:
    texts = [TokenText(np.arange(i, 12 + i), 1 + i % 2) for i in range(5)]
    count = lambda some: np.stack(
        count_matches(counting(), half_right(), build("policy", "ddtree"), some, UNIT_COSTS)
    )
    assert count(texts).tolist() == sum(count([text]) for text in texts).tolist()


def test_the_first_that_is_learnt_is_gone_along() -> None:
    learn = np.zeros(90, np.bool_)
    learn[5:20], learn[30:], tokens = True, True, np.arange(90)
    text = _first_learnt(Sample(tokens, learn))
    assert text is not None
    assert (text.start, text.tokens.tolist()) == (5, list(range(20)))
    learn[5:20] = False
    text = _first_learnt(Sample(tokens, learn))
    assert text is not None
    assert (text.start, len(text.tokens)) == (30, 30 + MAX_TREE_TEXT_TOKENS)


def test_a_policy_that_is_not_known_is_refused_before_anything_is_loaded(tmp_path) -> None:
    with pytest.raises(UserError, match=r"policy 'ddtre'.*ddtree"):
        Training.of("edd", [], {"policy": "ddtre"}).fit("nowhere", [], tmp_path / "out")
    assert not (tmp_path / "out").exists()
