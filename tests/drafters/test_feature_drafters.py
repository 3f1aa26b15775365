"""EAGLE, EAGLE-3 and MTP: what they are trained as is what they decode as."""

import pytest
import torch

from architectures import build as build_model
from architectures import fresh, rope, target
from drafting import perturbed, tokens_of
from draftree.doctor import forward_parity
from draftree.drafters.neural.draft_configs import of_values
from draftree.drafters.neural.feature_drafter import PairDrafter
from draftree.drafters.neural.rotary import Rotary
from draftree.models.causal_lm import CausalLM
from draftree.registry import build, part
from draftree.target.target import Target
from forests import NOISE, worst

METHODS = ("eagle", "eagle3", "mtp")
LEVELS = (*METHODS, "mtp:layers=2", "mtp:layers=3")


def drafter_of(method: str, t: Target) -> PairDrafter:
    return perturbed(build("drafter", method), t)  # type: ignore[return-value]


@pytest.mark.parametrize("method", METHODS)
def test_the_comparison_sees_a_feature_off_by_one(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = target("llama")
    drafter = drafter_of(method, t)
    stock = drafter._train_pass
    shifted = lambda tokens, features, *rest: stock(tokens, features.roll(1, dims=1), *rest)
    monkeypatch.setattr(drafter, "_train_pass", shifted)
    assert forward_parity.largest_difference(t, drafter, tokens_of(1, 17, 0), 4, 1) > 1e-3


@pytest.mark.parametrize("method", LEVELS)
def test_every_aligned_pass_is_a_depth_of_decoding(method: str) -> None:
    """The j-th pass of training gives after each token what a block has at depth j."""
    t = target("llama")
    drafter = drafter_of(method, t)
    batch = forward_parity.batch_of(t, drafter, tokens_of(2, 13, 5))
    features = drafter.model.fuse(batch.hidden)
    with torch.no_grad():
        for j, (out, known) in enumerate(drafter.training_time_test(batch, features, 4)):
            block, level = j + 1, drafter.model.at(min(j, drafter.model.levels - 1))
            for phase in range(block):
                logits = drafter.forward(batch, block, phase)
                deep = [i for i in range(13) if (i + phase) % block == j and i - j >= 1]
                assert known[deep].all()
                assert worst(level.logits(out)[:, deep], logits[:, deep]) < NOISE


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, False), (torch.float16, False), (torch.float32, True)]
)
def test_half_precision_trains_close_to_float32(
    method: str, dtype: torch.dtype, autocast: bool
) -> None:
    """A float32 drafter of a half-precision target, and of a float32 one in bfloat16 autocast."""
    found = []
    for kind, mixed in ((torch.float32, False), (dtype, autocast)):
        t = Target(CausalLM(fresh("llama").to(kind)), "half")
        torch.manual_seed(0)
        drafter = part("drafter", method)().fresh(t)
        batch = forward_parity.batch_of(t, drafter, tokens_of(2, 12, 7))
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = drafter.loss(batch)
            with torch.no_grad():
                logits = drafter.forward(batch, 5, 2)
        loss.backward()
        assert {p.grad.dtype for p in drafter.model.parameters() if p.grad is not None} == {
            torch.float32
        }
        found.append((float(loss.detach()), torch.log_softmax(logits[:, 1:].float(), -1)))
    assert found[1][0] == pytest.approx(found[0][0], rel=0.05)
    assert 0 < worst(found[1][1], found[0][1]) < 0.2


@pytest.mark.parametrize("method", METHODS)
def test_a_target_of_scaled_and_partial_rope(method: str) -> None:
    """Drafters of Llama's kind rotate whole keys, whatever share the target rotates."""
    scaled = rope("linear", factor=2.0, partial_rotary_factor=0.25)
    t = Target(CausalLM(build_model("gpt_neox", {"hidden_act": "gelu", **scaled})), "scaled")
    assert (
        forward_parity.largest_difference(t, drafter_of(method, t), tokens_of(2, 13, 3), 4, 1)
        < 10 * NOISE
    )


def test_rotary_frequencies_lie_where_they_are_used() -> None:
    """Else each pass on a GPU would copy them there."""
    rotary = Rotary(of_values({"hidden_size": 32, "num_attention_heads": 4}))
    cos, _ = rotary(
        torch.empty(1, 2, 32, device="meta"), torch.zeros(1, 2, dtype=torch.long, device="meta")
    )
    assert cos.device.type == rotary._embedding.inv_freq.device.type == "meta"
