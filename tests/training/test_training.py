"""Training: what is learnt, what the losses are, and that an interrupted run ends with the same weights."""

import dataclasses
import json
import math
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from drafting import after_all
from draftree.data.samples import Sample
from draftree.drafters.base import Batch
from draftree.drafters.eagle import EAGLE
from draftree.drafters.edd import EDD
from draftree.drafters.neural.draft_masks import block_starts
from draftree.drafters.neural.losses import draft_loss, kl, predicting_positions
from draftree.drafters.vdm import VDM
from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.models.native_runner import MAX_RELATIVE_ERROR
from draftree.models.numeric_agreement import relative_distance
from draftree.native.transformer_kernels import core
from draftree.target.target import HiddenStateSpec, Target
from draftree.training import time_limit
from draftree.training.distributed import Processes
from draftree.training.feature_cache import Shards
from draftree.training.held_out_metrics import CHAIN_LENGTH, acceptance_by_depth, evaluate
from draftree.training.resume import STATE, start_from
from draftree.training.teacher import Teacher
from draftree.training.trainer import (
    Progress,
    TrainingPlan,
    learning_rate_factor,
    split_samples,
    train,
)

VOCAB = 31
METHODS = {"edd": EDD, "vdm": VDM}


def made(dropout: float = 0.0, hidden_size: int = 16) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden_size, num_hidden_layers=4, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.5,
        attention_dropout=dropout, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Target(CausalLM(LlamaForCausalLM(config)), "tiny")


@pytest.fixture(scope="module")
def target() -> Target:
    return made()


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


def plan(**knobs) -> TrainingPlan:
    return TrainingPlan(**{"epochs": 2, "batch_size": 4, "lr": 1e-2, "held_out": 0.1, "evaluate_every": 4, "save_every": 3,
                   "policy": "chain:length=2"} | knobs)  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_falls_and_the_folder_is_a_drafter(name, target, samples, tmp_path) -> None:
    seen: list[Progress] = []
    train(target, fresh(name, target), samples, plan(epochs=12), tmp_path, seen.append)
    measured = [p.held_out_loss for p in seen if p.held_out_loss is not None]
    assert np.mean([p.loss for p in seen[-5:]]) < 0.8 * np.mean([p.loss for p in seen[:5]])
    assert len(measured) == len(seen) // 4 + (len(seen) % 4 > 0)
    end = seen[-1]
    assert end.acceptance_length is not None
    assert end.overlap is not None
    assert end.acceptance_by_depth is not None
    assert end.acceptance_length == pytest.approx(1 + np.cumprod(end.acceptance_by_depth).sum())
    assert len(end.acceptance_by_depth) == CHAIN_LENGTH
    assert 0 < end.overlap < 1
    again = METHODS[name](checkpoint=str(tmp_path)).open(target)
    assert again.knobs.loss == "kl"
    assert not (tmp_path / STATE).exists()
    logged = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [row["held_out_loss"] for row in logged] == measured
    assert logged[-1]["acceptance_by_depth"] == list(end.acceptance_by_depth)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stop", [4, 7])
def test_an_interrupted_run_resumes_to_the_same_weights(name, stop, samples, tmp_path) -> None:
    target = made(dropout=0.2)  # its noise, too, has to be the same
    straight, broken = fresh(name, target), fresh(name, target)
    train(target, straight, samples, plan(schedule="cosine", warmup=2), tmp_path / "straight")

    def interrupt(progress: Progress) -> None:
        if progress.step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(
            target,
            broken,
            samples,
            plan(schedule="cosine", warmup=2),
            tmp_path / "broken",
            interrupt,
        )
    steps: list[int] = []
    resumed = METHODS[name]().fresh(
        target
    )  # other random weights: everything has to come from the saved state
    train(
        target,
        resumed,
        samples,
        plan(schedule="cosine", warmup=2),
        tmp_path / "broken",
        lambda p: steps.append(p.step),
    )
    assert steps[0] == stop + 1
    for key, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[key]), key
    logs = [(tmp_path / run / "training.jsonl").read_text() for run in ("straight", "broken")]
    assert logs[0] == logs[1]


def test_steps_after_the_last_save_are_logged_once_when_a_killed_run_resumes(
    target, samples, tmp_path
) -> None:
    def kill(progress: Progress) -> None:
        if progress.step == 5:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        train(target, fresh("vdm", target), samples, plan(evaluate_every=1), tmp_path, kill)
    train(target, fresh("vdm", target), samples, plan(evaluate_every=1), tmp_path)
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "training.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, len(steps) + 1))


def test_dropout_is_drawn_and_the_global_generator_is_left_alone(samples, tmp_path) -> None:
    losses = []
    for i, rate in enumerate((0.0, 0.2)):
        target = made(rate)
        drafter, before_it = fresh("edd", target), torch.get_rng_state()
        losses.append(train(target, drafter, samples, plan(epochs=0.2), tmp_path / str(i)).loss)
        assert torch.equal(torch.get_rng_state(), before_it)
    assert losses[0] != losses[1]


def test_frozen_weights_stay_and_are_not_saved(target, samples, tmp_path) -> None:
    drafter = fresh("edd", target)
    drafter.model.get_input_embeddings().requires_grad_(
        False
    )  # tied: the head's name is frozen with it
    started = weights(drafter)

    def interrupt(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(target, drafter, samples, plan(), tmp_path, interrupt)
    state = torch.load(tmp_path / STATE, weights_only=True)
    moved = {key for key, value in weights(drafter).items() if not torch.equal(value, started[key])}
    assert (
        set(state["model"])
        == moved
        == {k for k in started if "embed_tokens" not in k and "lm_head" not in k}
    )


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


def test_kept_features_are_the_computed_ones(target, samples, tmp_path) -> None:
    needs = HiddenStateSpec(hidden=(-4, 1), kv=(-1, 0))
    shards = Shards.at(tmp_path, target, samples, needs)
    size = shards.size
    shards.fill(Processes.on(target.decoder.device))
    assert (shards.size, shards.lacking) == (0, ())
    written = sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
    assert size <= written < size + 40_000  # the rest names the tensors
    kept, computed = Teacher(target, needs, samples, shards=shards), Teacher(target, needs, samples)
    a, b = kept.batch([3, 0, 7], 5), computed.batch([3, 0, 7], 5)
    for row, i in enumerate([3, 0, 7]):
        n = len(samples[i].tokens)
        torch.testing.assert_close(
            after_all(a)[row, :n], after_all(b)[row, :n], rtol=1e-4, atol=1e-5
        )
        for layer in needs.hidden:
            torch.testing.assert_close(
                a.hidden[layer][row, :n], b.hidden[layer][row, :n], rtol=1e-4, atol=1e-5
            )
        for layer in needs.kv:
            for ours, theirs in zip(a.kv[layer], b.kv[layer], strict=True):
                torch.testing.assert_close(
                    ours[row, :, :n], theirs[row, :, :n], rtol=1e-4, atol=1e-5
                )


@pytest.mark.skipif(core is None, reason="the native kernels were not built")
def test_features_of_native_passes_are_the_models(samples) -> None:
    target, native = made(hidden_size=64), made(hidden_size=64)
    needs = HiddenStateSpec(hidden=(-4, 1))
    assert native.decoder.use_native_kernels()
    chosen = [3, 0, 7]
    found, wanted = (Teacher(each, needs, samples).batch(chosen, 5) for each in (native, target))
    for row, i in enumerate(chosen):
        n = len(samples[i].tokens)
        pairs = [(after_all(found)[row, :n], after_all(wanted)[row, :n])]
        pairs += [(found.hidden[at][row, :n], wanted.hidden[at][row, :n]) for at in needs.hidden]
        for ours, theirs in pairs:
            assert relative_distance(ours, theirs) < MAX_RELATIVE_ERROR[torch.float32]


def test_a_run_on_kept_features_learns_the_same(target, samples, tmp_path) -> None:
    a = train(target, fresh("edd", target), samples, plan(), tmp_path / "online")
    b = train(target, fresh("edd", target), samples, plan(cache_features=True), tmp_path / "kept")
    assert b.loss == pytest.approx(a.loss, rel=1e-4)
    assert list((tmp_path / "kept" / "features").rglob("*.safetensors"))


def test_too_small_a_disk_is_told_before_the_work(target, samples, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(UserError, match=r"features need 0\.0 GB in '.*', free are 0\.0 GB"):
        train(target, fresh("edd", target), samples, plan(cache_features=True), tmp_path)
    assert not list(tmp_path.iterdir())


def test_padding_does_not_change_the_loss(target, samples) -> None:
    teacher, drafter = Teacher(target, HiddenStateSpec(hidden=(-4,)), samples), fresh("edd", target)
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))
    alone = drafter.forward(teacher.batch([order[0]], 0), 5, 2)
    padded = drafter.forward(teacher.batch([order[0], order[-1]], 0), 5, 2)
    torch.testing.assert_close(
        alone[0], padded[0, : len(samples[order[0]].tokens)], rtol=1e-5, atol=1e-5
    )


def batch(tokens: list[list[int]], learn: list[list[bool]], logits: torch.Tensor) -> Batch:
    learnt = torch.tensor(learn)
    return Batch(
        torch.tensor(tokens),
        learnt,
        {},
        {},
        lambda at: logits[at],
        (torch.Generator(),),
        float(learnt.sum()),
    )


def test_losses_by_hand() -> None:
    p, q = [[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]], [[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]
    b = batch([[0, 1, 0]], [[False, True, False]], torch.tensor(p).log()[None])
    draft = torch.tensor(q).log()[None][predicting_positions(b.learn)]
    # Token 1 alone is learnt, and it is predicted from position 0.
    divergence = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert float(draft_loss("kl", b, draft)) == pytest.approx(divergence)
    assert float(draft_loss("ce", b, draft)) == pytest.approx(-math.log(0.75))
    half = dataclasses.replace(b, count=2.0)  # of a batch that is half of a step
    assert float(draft_loss("kl", half, draft)) == pytest.approx(divergence / 2)
    assert float(draft_loss("ce", half, draft)) == pytest.approx(-math.log(0.75) / 2)


def test_kl_is_smallest_where_draft_and_target_agree() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 7)
    assert float(kl(logits, logits)) == pytest.approx(0, abs=1e-5)
    assert float(kl(logits, torch.randn(5, 7))) > 0.1


def test_block_starts() -> None:
    assert block_starts(7, 3, 0).tolist() == [0, 0, 0, 3, 3, 3, 6]
    assert block_starts(7, 3, 1).tolist() == [0, 0, 2, 2, 2, 5, 5]


def test_simulated_acceptance_follows_the_text_only_while_the_target_agrees() -> None:
    choice = [3, 4, 5, 6, 7, 8]  # the target's greedy token after each position
    tokens = [[0, 3, 4, 9, 6, 7]]  # the text leaves the target's choice at position 3
    b = batch(tokens, [[True] * 6], torch.zeros(1, 6, 10))
    guess = torch.tensor([[3, 4, 5, 0, 0, 0]])  # right at depths 1, 2 and 3
    matched, reached = acceptance_by_depth(b, torch.tensor([choice]), guess, 0)
    assert matched.tolist()[:4] == [1, 1, 1, 0]
    assert reached.tolist()[:4] == [1, 1, 1, 0]


def test_a_perfect_drafter_has_the_longest_acceptance(target, samples) -> None:
    class Oracle:
        needs, model = HiddenStateSpec(), fresh("vdm", target).model
        loss = staticmethod(lambda b: torch.zeros(()))
        forward = staticmethod(lambda b, block, phase: after_all(b))

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
    found = evaluate(
        Teacher(target, HiddenStateSpec(), greedy),
        Oracle(),
        range(4),
        2,
        Processes.on(torch.device("cpu")),
    )
    assert found is not None
    assert found.acceptance_length == 1 + CHAIN_LENGTH
    assert found.acceptance_by_depth == (1.0,) * CHAIN_LENGTH
    assert found.overlap == pytest.approx(1)


def test_held_out_figures_do_not_depend_on_the_batch(target, samples) -> None:
    drafter = fresh("edd", target)
    teacher, alone = Teacher(target, drafter.needs, samples), Processes.on(torch.device("cpu"))
    one, many = (evaluate(teacher, drafter, range(9), together, alone) for together in (1, 5))
    assert one is not None
    assert many is not None
    assert one.held_out_loss == pytest.approx(many.held_out_loss, rel=1e-5)
    assert one.overlap == pytest.approx(many.overlap, rel=1e-5)
    assert one.acceptance_by_depth == many.acceptance_by_depth


def test_the_overlap_is_that_of_the_distributions(target, samples) -> None:
    class Shifted:
        needs, model = HiddenStateSpec(), fresh("vdm", target).model
        loss = staticmethod(lambda b: torch.zeros(()))
        forward = staticmethod(lambda b, block, phase: after_all(b).roll(1, -1))

    teacher = Teacher(target, HiddenStateSpec(), samples)
    found = evaluate(teacher, Shifted(), [0, 1], 2, Processes.on(torch.device("cpu")))
    p = torch.cat(
        [after_all(teacher.batch([i], 0))[0, :-1].softmax(-1)[samples[i].learn[1:]] for i in (0, 1)]
    )
    assert found is not None
    assert found.overlap == pytest.approx(
        float(torch.minimum(p, p.roll(1, -1)).sum(-1).mean()), rel=1e-5
    )


def test_schedule_and_split(samples) -> None:
    p = plan(schedule="cosine", warmup=4)
    assert [learning_rate_factor(p, s, 100) for s in (0, 1)] == pytest.approx([0.25, 0.5], rel=1e-2)
    assert learning_rate_factor(p, 99, 100) == pytest.approx(0.05, rel=0.1)
    learnt, held = split_samples(samples, p)
    assert len(learnt) + len(held) == len(samples)
    assert not set(learnt) & set(held)


def test_samples_of_a_row_are_not_divided(samples) -> None:
    rows = [dataclasses.replace(sample, row=i // 3) for i, sample in enumerate(samples)]
    learnt, held = split_samples(rows, plan(held_out=0.25))
    assert sorted(learnt + held) == list(range(24))
    assert len(held) == 6
    assert not {rows[i].row for i in learnt} & {rows[i].row for i in held}
    text = [dataclasses.replace(sample, row=0) for sample in samples]
    assert split_samples(text, plan()) == split_samples(samples, plan())


def test_checkpoint_errors(target, samples, tmp_path) -> None:
    train(target, EDD(shared=True).fresh(target), samples, plan(epochs=0.2), tmp_path)
    weights_file, config = (
        tmp_path / "model.safetensors",
        json.loads((tmp_path / "config.json").read_text()),
    )
    change = lambda new: (tmp_path / "config.json").write_text(json.dumps(new))
    with pytest.raises(UserError, match=r"holds a drafter 'edd', needed is 'vdm'"):
        VDM(checkpoint=str(tmp_path)).open(target)
    change(config | {"vocab_size": 99})
    with pytest.raises(UserError, match="vocab_size 99, allowed is the target's: 31"):
        EDD(checkpoint=str(tmp_path)).open(target)
    change(config)
    tensors = load_file(weights_file)
    save_file(
        {k: v for k, v in tensors.items() if "k_proj" not in k},
        weights_file,
        metadata={"format": "pt"},
    )
    with pytest.raises(UserError, match=r"missing tensors: .*k_proj"):
        EDD(checkpoint=str(tmp_path)).open(target)
    save_file(tensors | {"foreign.weight": torch.zeros(2)}, weights_file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"foreign tensors: foreign\.weight"):
        EDD(checkpoint=str(tmp_path)).open(target)
    weights_file.write_bytes(b"not tensors")
    with pytest.raises(UserError, match="cannot read"):
        EDD(checkpoint=str(tmp_path)).open(target)
    weights_file.unlink()
    with pytest.raises(UserError, match="has no weights"):
        EDD(checkpoint=str(tmp_path)).open(target)
    change(config | {"draftree": config["draftree"] | {"hidden_layer": -40}})
    with pytest.raises(UserError, match="hidden state -40 does not exist"):
        EDD(checkpoint=str(tmp_path)).open(target)


def test_a_run_may_begin_with_the_weights_of_another(target, samples, tmp_path) -> None:
    first = EDD(max_block=7, loss="ce").fresh(target)
    train(target, first, samples, plan(epochs=0.2), tmp_path)
    drafter = start_from(EDD(loss="kl", min_block=1, named=frozenset({"loss"})), tmp_path, target)
    assert drafter.knobs == EDD(max_block=7, loss="kl")  # what was not set is the checkpoint's
    for key, value in weights(first).items():
        assert torch.equal(weights(drafter)[key], value.half().float()), key
    assert all(p.requires_grad and p.dtype == torch.float32 for p in drafter.model.parameters())
    with pytest.raises(UserError, match="holds a drafter 'edd', needed is 'vdm'"):
        start_from(VDM(), tmp_path, target)


def test_a_published_checkpoint_goes_on_as_the_network_it_is(target, tmp_path) -> None:
    """A fresh drafter would have the target's rope and no embedding of its own."""
    EAGLE().fresh(target).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["draftree"], config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 500.0}))
    drafter = start_from(EAGLE(), tmp_path, target)
    like, at = torch.zeros(1), torch.arange(9)[None]
    turned = drafter.model.rotary(like, at)[0]
    assert not torch.allclose(turned, EAGLE().fresh(target).model.rotary(like, at)[0])
    assert torch.equal(
        turned, EAGLE(checkpoint=str(tmp_path)).open(target).model.rotary(like, at)[0]
    )
    assert all(p.dtype == torch.float32 for p in drafter.model.parameters())


def test_state_of_a_run_with_other_options_is_not_resumed(target, samples, tmp_path) -> None:
    def interrupt(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(
            target, fresh("vdm", target), samples, plan(), tmp_path, interrupt, {"init_from": "a"}
        )
    assert json.loads((tmp_path / "training.json").read_text())["init_from"] == "a"
    with pytest.raises(UserError, match="interrupted run with init_from=a"):
        train(target, fresh("vdm", target), samples, plan(), tmp_path, about={"init_from": "b"})
    again = plan(
        evaluate_every=1, save_every=1, accumulate=2
    )  # what does not change what is learnt may be another
    train(target, fresh("vdm", target), samples, again, tmp_path, about={"init_from": "a"})


def test_checkpoints_of_earlier_steps_are_kept(target, samples, tmp_path) -> None:
    """A kept checkpoint is what an interrupted run had learnt by then, and keeping changes nothing of what is learnt."""
    end = train(target, fresh("edd", target), samples, plan(keep_every=2), tmp_path / "a")
    kept = sorted(folder.name for folder in (tmp_path / "a").glob("step-*"))
    assert kept == sorted(f"step-{step}" for step in range(2, end.steps, 2))
    seen = []

    def interrupt(progress: Progress) -> None:
        if progress.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    drafter = fresh("edd", target)
    with pytest.raises(KeyboardInterrupt):
        train(target, drafter, samples, plan(), tmp_path / "b", interrupt)
    for name, value in (
        EDD(checkpoint=str(tmp_path / "a" / "step-4")).open(target).model.state_dict().items()
    ):
        seen.append(torch.equal(value, drafter.model.state_dict()[name].half().to(value.dtype)))
    assert all(seen)


def test_bfloat16_runs_close_to_float32(target, samples, tmp_path) -> None:
    a = train(target, fresh("edd", target), samples, plan(), tmp_path / "a")
    b = train(target, fresh("edd", target), samples, plan(bf16=True), tmp_path / "b")
    assert a.loss != b.loss
    assert a.loss == pytest.approx(b.loss, rel=0.05)


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
        ({"batch_size": 0}, "batch_size is 0"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"schedule": "step"}, "schedule is 'step', allowed is constant or cosine or linear"),
        (
            {"warmup": 1.5},
            r"warmup is 1\.5, allowed is a whole number of steps, or a share of all below 1",
        ),
        ({"warmup": math.nan}, "warmup is nan"),
        ({"warmup": math.inf}, "warmup is inf"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0\.9, 1\.0\), allowed is two numbers in \[0, 1\)"),
        ({"betas": (math.nan, 0.9)}, r"betas is \(nan, 0\.9\)"),
        ({"weight_decay": -0.1}, r"weight_decay is -0\.1"),
        ({"weight_decay": math.inf}, "weight_decay is inf"),
        ({"floor": 1.1}, r"floor is 1\.1"),
        ({"clip": 0.0}, r"clip is 0\.0"),
        ({"clip_by": "size"}, "clip_by is 'size', allowed is norm or value"),
    ],
)
def test_plans_out_of_range_are_refused(knobs, told) -> None:
    with pytest.raises(UserError, match=told):
        plan(**knobs)


def test_a_diverged_run_is_no_drafter(target, samples, tmp_path) -> None:
    drafter = fresh("vdm", target)
    with torch.no_grad():
        next(drafter.model.parameters()).fill_(math.nan)  # embedding and head are the target's
    with pytest.raises(UserError, match="training diverged: the loss is nan at step 1"):
        train(target, drafter, samples, plan(), tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert not (tmp_path / STATE).exists()


def test_other_data_do_not_resume(target, samples, tmp_path) -> None:
    def interrupt(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(target, fresh("vdm", target), samples, plan(), tmp_path, interrupt)
    other = [Sample(s.tokens[::-1].copy(), s.learn) for s in samples]
    with pytest.raises(UserError, match="interrupted run with data="):
        train(target, fresh("vdm", target), other, plan(), tmp_path)


def test_a_run_of_so_many_seconds_ends_with_its_rate_at_the_floor(
    target, samples, tmp_path, monkeypatch
) -> None:
    """With a clock of a tenth of a second a look; a run that was not saved begins anew, its clock too."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += 0.1
        return now[0]

    rates: list[float] = []
    adam = torch.optim.AdamW.step
    spy = lambda self, *of, **how: (
        rates.append(self.param_groups[0]["lr"]),
        adam(self, *of, **how),
    )[1]
    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    monkeypatch.setattr(time_limit.time, "monotonic", monotonic)
    bounded, seen = plan(epochs=6, schedule="linear", floor=0.1, max_seconds=1.0), list[Progress]()

    def listen(progress: Progress) -> None:
        seen.append(progress)
        if progress.step == 3 and len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(target, fresh("edd", target), samples, bounded, tmp_path, listen)
    assert not (tmp_path / "config.json").is_file()
    begun_with = rates[:3]
    assert begun_with == pytest.approx(
        [1e-2, 9.1e-3, 8.2e-3]
    )  # a tenth of the time is a tenth of the way to the floor
    now[0], seen[:] = 0.0, [Progress(0, 0, math.nan)]
    end = train(target, fresh("edd", target), samples, bounded, tmp_path, seen.append)
    assert end.step == end.steps < 32
    assert end.held_out_loss is not None
    assert end.acceptance_length is not None
    assert 0.999e-3 <= rates[-1] <= 1.901e-3
    assert (tmp_path / "config.json").is_file()
    free = train(target, fresh("edd", target), samples, plan(epochs=6), tmp_path / "free")
    assert free.step == free.steps == 32


def test_the_seconds_before_an_interruption_count(target, samples, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        time_limit.time, "monotonic", iter(np.arange(0, 100, 0.1).tolist()).__next__
    )
    bounded, stop = plan(epochs=6, max_seconds=1.0, save_every=1), [4]

    def listen(progress: Progress) -> None:
        if progress.step == stop[0]:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(target, fresh("edd", target), samples, bounded, tmp_path, listen)
    spent = torch.load(tmp_path / STATE, weights_only=True)["seconds"]
    assert spent >= 0.4
    assert (
        time_limit.Clock(1.0, spent, Processes.on("cpu")).share == spent
    )  # also in the first step after it
    stop[0] = 0
    end = train(target, fresh("edd", target), samples, bounded, tmp_path, listen)
    assert 4 < end.step <= 10
