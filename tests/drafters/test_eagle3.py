"""EAGLE-3's layers, draft vocabulary and objective."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from architectures import model, target
from drafting import after_all
from draftree.doctor import forward_parity
from draftree.drafters.eagle3 import EAGLE3
from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.target.model_construction import one_layer
from draftree.target.target import Target
from forests import texts


def of_layers(count: int) -> Target:
    """A target of some layers."""
    return Target(CausalLM(one_layer(model("llama").config, count).double()), "some")


@pytest.mark.parametrize(("count", "layers"), [(24, (2, 12, 21)), (8, (2, 4, 5)), (7, (2, 3, 4))])
def test_the_official_layers(count: int, layers: tuple[int, int, int]) -> None:
    assert EAGLE3().layers(of_layers(count)) == layers


@pytest.mark.parametrize("count", range(2, 24))
def test_small_targets_get_three_different_layers(count: int) -> None:
    """The defaults collide for 4 to 6 layers, where the official code would read fewer tensors."""
    target_of = of_layers(count)
    layers = EAGLE3().layers(target_of)
    assert list(layers) == sorted(set(layers))
    assert len(layers) == 3
    assert layers[0] >= 0
    assert layers[2] <= count
    assert EAGLE3().example(target_of).needs.hidden == layers


def test_layers_that_collide_are_named() -> None:
    with pytest.raises(
        UserError, match=r"the layers are \(2, 2, 5\), allowed are three different ones of 0 … 8"
    ):
        EAGLE3(middle=2, high=5).layers(of_layers(8))
    with pytest.raises(UserError, match="does not exist"):
        EAGLE3(high=9).layers(of_layers(8))


def test_only_the_draft_vocabulary_is_drafted() -> None:
    t = target("llama")
    drafter = EAGLE3(draft_vocab=20).fresh(t)
    counts = np.zeros(t.decoder.vocab, np.int64)
    wanted = np.sort(np.random.default_rng(0).permutation(t.decoder.vocab)[:20])
    counts[wanted] = np.arange(1, 21)
    drafter.fit_vocabulary(counts)
    state = drafter.model.state_dict()
    assert (state["d2t"] + torch.arange(20)).tolist() == wanted.tolist()
    assert state["t2d"].nonzero().flatten().tolist() == wanted.tolist()
    assert drafter.model.logits(torch.randn(3, drafter.model.width)).shape == (3, 20)
    assert drafter.model.draft_vocabulary is not None
    assert drafter.model.draft_vocabulary.ids.tolist() == wanted.tolist()
    head = t.decoder.model.get_output_embeddings().weight  # the draft head begins as the target's
    assert torch.equal(state["lm_head.weight"].double(), head[wanted].float().double())


def test_tokens_that_cannot_be_drafted_are_not_learnt() -> None:
    """The loss over a draft vocabulary is the sum over positions whose greedy token is in it, by hand."""
    t = target("llama")
    drafter = EAGLE3(draft_vocab=t.decoder.vocab // 2, steps=2, decay=0.5).fresh(t)
    drafter.model.double()
    batch = forward_parity.batch_of(t, drafter, np.stack(texts([11, 11], np.random.default_rng(1))))
    ids = torch.arange(t.decoder.vocab // 2)
    expected = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        features = drafter.model.fuse(batch.hidden)
        for j, (out, _) in enumerate(drafter.training_time_test(batch, features, 2)):
            for row in range(2):
                for i in range(
                    1 + j, 10
                ):  # token i + 1 is predicted; position 0 has no pair before it
                    wanted = after_all(batch)[row, i]
                    if int(wanted.argmax()) in ids:
                        q = torch.log_softmax(drafter.model.logits(out[row, i]), -1)
                        expected -= 0.5**j * (torch.softmax(wanted[ids], -1) * q).sum()
        assert float(drafter.loss(batch)) == pytest.approx(float(expected) / batch.count, rel=1e-5)


def test_a_draft_vocabulary_larger_than_the_targets() -> None:
    with pytest.raises(UserError, match="draft_vocab is 100000, allowed is at most"):
        EAGLE3(draft_vocab=100_000).fresh(target("llama"))


def test_layers_that_codes_count_differently_have_to_be_said(tmp_path: Path) -> None:
    t = of_layers(8)
    EAGLE3().example(t).save(tmp_path)  # type: ignore[attr-defined]
    config = json.loads((tmp_path / "config.json").read_text())
    del config["draftree"], config["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}})
    )
    with pytest.raises(UserError, match=r"names its layers \[1, 3, 6\] in eagle_config"):
        EAGLE3(checkpoint=str(tmp_path)).open(t)
    assert EAGLE3(checkpoint=str(tmp_path), low=2, middle=4, high=7).open(t).needs.hidden == (
        2,
        4,
        7,
    )


@torch.no_grad()
def test_new_drafter_copies_the_target_layer_that_reads_the_highest_entry() -> None:
    ours, decoder = target("llama"), target("llama").decoder
    net = EAGLE3(low=1, middle=2, high=3, init="target").fresh(ours).model.double()
    ids = torch.arange(3, 12)[None]
    hidden = decoder.model(ids, output_hidden_states=True).hidden_states
    features, positions = net.fuse(dict(enumerate(hidden))), torch.arange(9)[None]
    high = net.reads[-1]
    torch.testing.assert_close(features, hidden[high], rtol=0, atol=0)
    mask = decoder.hf.causal(ids)["attention_mask"]
    out = net(ids, features, positions, mask, DynamicCache())
    theirs = decoder.layers[high](
        features, attention_mask=mask, position_embeddings=net.rotary(features, positions)
    )
    torch.testing.assert_close(out, theirs, rtol=0, atol=1e-6)
    scratch = EAGLE3(low=1, middle=2, high=3).fresh(ours).model
    assert not torch.equal(
        scratch.fuse({i: h.float() for i, h in enumerate(hidden)}), hidden[high].float()
    )


def test_a_target_of_other_layers_leaves_it_as_it_is() -> None:
    torch.manual_seed(0)
    drawn = EAGLE3(low=1, middle=2, high=3).fresh(target("gpt_neox")).model.state_dict()
    torch.manual_seed(0)
    begun = (
        EAGLE3(low=1, middle=2, high=3, init="target").fresh(target("gpt_neox")).model.state_dict()
    )
    assert all(torch.equal(value, begun[name]) for name, value in drawn.items())
