"""Training: what is learnt, what the losses are, and that an interrupted run ends with the same weights."""

import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftree.decoder import Decoder
from draftree.drafters.base import Batch
from draftree.drafters.edd import EDD
from draftree.drafters.vdm import VDM
from draftree.errors import UserError
from draftree.target import Needs, Target
from draftree.training.data import Sample
from draftree.training.losses import cross_entropy, draft_loss, kl
from draftree.training.masks import block_starts
from draftree.training.teacher import Teacher
from draftree.training.trainer import DEPTHS, STATE, Plan, Progress, acceptance_by_depth, evaluate, scale, split, train

VOCAB = 31
METHODS = {"edd": EDD, "vdm": VDM}


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=4, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.5,
    )  # fmt: skip
    return Target(Decoder(LlamaForCausalLM(config)), "tiny")


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, VOCAB, rng.integers(8, 20)) for _ in range(24)]
    return [Sample(t, np.arange(len(t)) >= 3) for t in texts]


def fresh(name: str, target: Target):
    torch.manual_seed(1)
    return METHODS[name]().fresh(target)


def weights(drafter) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in drafter.model.state_dict().items()}


def plan(**knobs) -> Plan:
    return Plan(**{"epochs": 2, "batch_size": 4, "lr": 1e-2, "held_out": 0.1, "evaluate_every": 4, "save_every": 3} | knobs)


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_falls_and_the_folder_is_a_drafter(name, target, samples, tmp_path) -> None:
    seen: list[Progress] = []
    train(target, fresh(name, target), samples, plan(epochs=20), tmp_path, seen.append)
    measured = [p.held_out_loss for p in seen if p.held_out_loss is not None]
    assert np.mean([p.loss for p in seen[-5:]]) < 0.8 * np.mean([p.loss for p in seen[:5]])
    assert len(measured) == len(seen) // 4 + (len(seen) % 4 > 0)
    assert seen[-1].acceptance_length is not None
    assert 1 <= seen[-1].acceptance_length <= 1 + DEPTHS
    again = METHODS[name](checkpoint=str(tmp_path)).open(target)
    assert again.knobs.loss == "kl"
    assert not (tmp_path / STATE).exists()
    assert len((tmp_path / "training.jsonl").read_text().splitlines()) == len(measured)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stop", [4, 7])
def test_an_interrupted_run_resumes_to_the_same_weights(name, stop, target, samples, tmp_path) -> None:
    straight, broken = fresh(name, target), fresh(name, target)
    train(target, straight, samples, plan(schedule="cosine", warmup=2), tmp_path / "straight")

    def interrupt(progress: Progress) -> None:
        if progress.step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(target, broken, samples, plan(schedule="cosine", warmup=2), tmp_path / "broken", interrupt)
    steps: list[int] = []
    resumed = METHODS[name]().fresh(target)  # other random weights: everything has to come from the saved state
    train(target, resumed, samples, plan(schedule="cosine", warmup=2), tmp_path / "broken", lambda p: steps.append(p.step))
    assert steps[0] == stop + 1
    for key, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[key]), key


def test_another_plan_does_not_resume(target, samples, tmp_path) -> None:
    def interrupt(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(target, fresh("vdm", target), samples, plan(), tmp_path, interrupt)
    with pytest.raises(UserError, match=r"lr=0\.01"):
        train(target, fresh("vdm", target), samples, plan(lr=1e-3), tmp_path)


def test_a_finished_drafter_is_not_overwritten(target, samples, tmp_path) -> None:
    train(target, fresh("vdm", target), samples, plan(epochs=0.2), tmp_path)
    with pytest.raises(UserError, match="finished"):
        train(target, fresh("vdm", target), samples, plan(epochs=0.2), tmp_path)


def test_kept_features_are_the_computed_ones(target, samples) -> None:
    needs = Needs(hidden=(-4, 1))
    kept, computed = Teacher(target, needs, keep=True), Teacher(target, needs)
    for _ in range(2):  # the second time from memory alone
        a, b = kept.batch(samples[:3], 5), computed.batch(samples[:3], 5)
        for i, s in enumerate(samples[:3]):
            n = len(s.tokens)
            torch.testing.assert_close(a.logits[i, :n], b.logits[i, :n])
            for layer in needs.hidden:
                torch.testing.assert_close(a.hidden[layer][i, :n], b.hidden[layer][i, :n])
    assert len(kept._kept) == 3


def test_padding_does_not_change_the_loss(target, samples) -> None:
    teacher, drafter = Teacher(target, Needs(hidden=(-4,))), fresh("edd", target)
    short = min(samples, key=lambda s: len(s.tokens))
    alone = drafter.forward(teacher.batch([short], 0), 5, 2)
    padded = drafter.forward(teacher.batch([short, max(samples, key=lambda s: len(s.tokens))], 0), 5, 2)
    torch.testing.assert_close(alone[0], padded[0, : len(short.tokens)], rtol=1e-5, atol=1e-5)


def batch(tokens, learn, logits) -> Batch:
    return Batch(torch.tensor(tokens), torch.tensor(learn), {}, torch.tensor(logits), torch.Generator())


def test_losses_by_hand() -> None:
    p, q = [[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]], [[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]
    b = batch([[0, 1, 0]], [[False, True, False]], [[[math.log(x) for x in row] for row in p]])
    draft = torch.tensor([[[math.log(x) for x in row] for row in q]])
    # Token 1 alone is learnt, and it is predicted from position 0.
    assert float(kl(b.logits, draft, b.learn)) == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))
    assert float(cross_entropy(b.tokens, draft, b.learn)) == pytest.approx(-math.log(0.75))
    assert float(draft_loss("kl", b, draft)) == float(kl(b.logits, draft, b.learn))
    assert float(draft_loss("ce", b, draft)) == float(cross_entropy(b.tokens, draft, b.learn))


def test_kl_is_smallest_where_draft_and_target_agree() -> None:
    logits = torch.randn(2, 5, 7)
    learn = torch.ones(2, 5, dtype=torch.bool)
    assert float(kl(logits, logits, learn)) == pytest.approx(0, abs=1e-6)
    assert float(kl(logits, torch.randn(2, 5, 7), learn)) > 0


def test_block_starts() -> None:
    assert block_starts(7, 3, 0).tolist() == [0, 0, 0, 3, 3, 3, 6]
    assert block_starts(7, 3, 1).tolist() == [0, 0, 2, 2, 2, 5, 5]


def test_simulated_acceptance_follows_the_text_only_while_the_target_agrees() -> None:
    choice = [3, 4, 5, 6, 7, 8]  # the target's greedy token after each position
    one = torch.nn.functional.one_hot
    tokens = [[0, 3, 4, 9, 6, 7]]  # the text leaves the target's choice at position 3
    b = Batch(
        torch.tensor(tokens), torch.ones(1, 6, dtype=torch.bool), {}, one(torch.tensor([choice]), 10).float(), torch.Generator()
    )
    guess = one(torch.tensor([[3, 4, 5, 0, 0, 0]]), 10).float()  # right at depths 1, 2 and 3
    matched, reached = acceptance_by_depth(b, guess, 0)
    assert matched.tolist()[:4] == [1, 1, 1, 0]
    assert reached.tolist()[:4] == [1, 1, 1, 0]


def test_a_perfect_drafter_has_the_longest_acceptance(target, samples) -> None:
    class Oracle:
        needs, model = Needs(), fresh("vdm", target).model
        loss = staticmethod(lambda b: torch.zeros(()))
        forward = staticmethod(lambda b, block, phase: b.logits)

    greedy = []
    for s in samples[:4]:
        ids = target.decoder.model.generate(
            torch.tensor(s.tokens[None, :4]),
            attention_mask=torch.ones(1, 4),
            max_new_tokens=30,
            do_sample=False,
            pad_token_id=0,
        )[0].numpy()
        greedy.append(Sample(ids, np.arange(len(ids)) >= 4))
    _, length = evaluate(Teacher(target, Needs()), Oracle(), greedy, plan())
    assert length == 1 + DEPTHS


def test_schedule_and_split(samples) -> None:
    p = plan(schedule="cosine", warmup=4)
    assert [scale(p, s, 100) for s in (0, 1)] == pytest.approx([0.25, 0.5], rel=1e-2)
    assert scale(p, 99, 100) == pytest.approx(0.05, rel=0.1)
    learnt, held = split(samples, p)
    assert len(learnt) + len(held) == len(samples)
    assert not {id(s) for s in learnt} & {id(s) for s in held}


def test_checkpoint_errors(target, samples, tmp_path) -> None:
    train(target, fresh("edd", target), samples, plan(epochs=0.2), tmp_path)
    weights_file, about = tmp_path / "model.safetensors", json.loads((tmp_path / "draftree.json").read_text())
    with pytest.raises(UserError, match=r"holds a drafter 'edd', asked for was 'vdm'"):
        VDM(checkpoint=str(tmp_path)).open(target)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    with pytest.raises(UserError, match="vocab_size 99, allowed is the target's: 31"):
        EDD(checkpoint=str(tmp_path)).open(target)
    (tmp_path / "config.json").write_text(json.dumps(config))
    change_tensors(weights_file, lambda t: {k: v for k, v in t.items() if "k_proj" not in k})
    with pytest.raises(UserError, match=r"missing keys: .*k_proj"):
        EDD(checkpoint=str(tmp_path)).open(target)
    change_tensors(weights_file, lambda t: t | {"foreign.weight": torch.zeros(2)})
    with pytest.raises(UserError, match="does not hold exactly"):
        EDD(checkpoint=str(tmp_path)).open(target)
    weights_file.write_bytes(b"not tensors")
    with pytest.raises(UserError, match="cannot load drafter"):
        EDD(checkpoint=str(tmp_path)).open(target)
    weights_file.unlink()
    with pytest.raises(UserError, match="has no weights"):
        EDD(checkpoint=str(tmp_path)).open(target)
    (tmp_path / "draftree.json").write_text(json.dumps(about | {"hidden_layer": -40}))
    with pytest.raises(UserError, match="hidden state -40 does not exist"):
        EDD(checkpoint=str(tmp_path)).open(target)


def change_tensors(path: Path, change) -> None:
    from safetensors.torch import load_file, save_file

    save_file(change(load_file(path)), path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"epochs": math.inf}, "epochs is inf"),
        ({"lr": math.nan}, "lr is nan"),
        ({"warmup": -1}, "warmup is -1"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"max_tokens": 1}, "max_tokens is 1"),
    ],
)
def test_plans_out_of_range_are_refused(knobs, told) -> None:
    with pytest.raises(UserError, match=told):
        plan(**knobs)


def test_a_diverged_run_is_no_drafter(target, samples, tmp_path) -> None:
    drafter = fresh("vdm", target)
    with torch.no_grad():
        drafter.model.get_output_embeddings().weight.fill_(math.nan)
    with pytest.raises(UserError, match="training diverged: the loss is nan at step 1"):
        train(target, drafter, samples, plan(), tmp_path)
    assert not (tmp_path / "draftree.json").exists()
    assert not (tmp_path / STATE).exists()


def test_other_data_do_not_resume(target, samples, tmp_path) -> None:
    def interrupt(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(target, fresh("vdm", target), samples, plan(), tmp_path, interrupt)
    other = [Sample(s.tokens[::-1].copy(), s.learn) for s in samples]
    with pytest.raises(UserError, match="interrupted run with data="):
        train(target, fresh("vdm", target), other, plan(), tmp_path)
