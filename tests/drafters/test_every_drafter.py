"""What holds for every drafter; trained ones are found by name and tried with some of their options.

What is trained is what decodes; a stored drafter opens as it was; a sequence is drafted for as if
it were alone.
"""

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from architectures import SOME, VOCAB, target
from architectures import build as build_model
from drafting import perturbed, prefix_difference, tokens_of
from draftree.acceptors.greedy import Greedy
from draftree.costs.step_costs import Costs
from draftree.doctor import forward_parity
from draftree.drafters.base import TrainableMethod
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.policies.beam import Beam
from draftree.registry import build, method_of, names, part
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.tree import Tree
from forests import NOISE, texts, worst
from selection import one_in

TRAINED = [name for name in names("drafter") if issubclass(part("drafter", name), TrainableMethod)]
OPTIONS = {
    "eagle3": ["low=1,middle=2,high=4"],
    "edd": ["hidden_layer=-3"],
    "vdm": [""],
    "glide": ["block=5", "block=5,layers=2"],
    "hydra": ["heads=3", "heads=3,arch=mlp"],
    "medusa": ["heads=4,layers=2"],
    "dflash": ["layers=2,block=5"],
    "dspark": [
        "layers=2,block=4,rank=6",
        "block=4,rank=6,markov=gated,confidence=false",
        "block=4,rank=6,markov=rnn",
    ],
    "jetspec": ["layers=2,block=5"],
    "peagle": ["drafts=4", "drafts=4,layers=3"],
}
"""Options with which trained drafters are tried; others have their defaults."""
SPECS = [f"{n}:{o}".rstrip(":") for n in TRAINED for o in OPTIONS.get(n, [""])]
DEEPER = [*SPECS, "mtp:layers=2", "mtp:layers=3"]
"""Beside them heads whose training forward takes a head's own layer for each depth."""
BLOCKS = [(1, 1, 0), (3, 5, 0), (1, 4, 3), (3, 7, 2)]
"""Number of texts, tokens of a block, phase of the blocks."""
COSTS = Costs({1: 0.1}, {1: 1.0})


def method_from(spec: str, **options: Any) -> TrainableMethod:
    """Return the options of a trained drafter."""
    found = replace(build("drafter", spec), **options)
    assert isinstance(found, TrainableMethod)
    return found


def scale_of(spec: str) -> float:
    """Return the size of the noise in the weights; cross attention needs more to matter."""
    return 0.15 if spec.startswith("glide") else 0.1


def tolerance(spec: str) -> float:
    """Return the allowed difference: drafters whose own layers have float32 norms add to the target's."""
    return (
        NOISE
        if spec.partition(":")[0] in ("edd", "vdm", "glide", "hydra", "medusa")
        else 10 * NOISE
    )


def both_forwards(
    spec: str, model: str, rows: int, count: int, block: int, phase: int
) -> tuple[Tensor, Tensor]:
    """Return log q of the training forward and of decoding, in blocks of some tokens."""
    t = target(model)
    # Two layers of GLIDE read a prompt in the blocks of training.
    own = {"block": block} if spec.startswith("glide") else {}
    drafter = perturbed(method_from(spec, **own), t, scale_of(spec))
    tokens = tokens_of(rows, count, block)
    return forward_parity.log_probs_of_both(t, drafter, tokens, block, phase)


@pytest.mark.parametrize(("spec", "model", "blocks"), one_in(4, SPECS, SOME, BLOCKS))
def test_training_forward_is_the_decoding_forward(
    spec: str, model: str, blocks: tuple[int, int, int]
) -> None:
    rows, block, phase = blocks
    trained, steps = both_forwards(spec, model, rows, 17, block, phase)
    assert worst(steps, trained) < tolerance(spec)
    if heads := getattr(build("drafter", spec), "heads", 0):
        uniform = float(steps.std(-1).min()) < 1e-9
        assert uniform is (block > heads), "beyond the last head, and only there, q is uniform"


@settings(max_examples=30)
@given(
    spec=st.sampled_from([*SPECS, "glide:layers=3,hidden=48", "glide:hidden=16"]),
    rows=st.sampled_from([1, 3]),
    count=st.integers(9, 20),
    cut=st.integers(1, 8).flatmap(
        lambda block: st.tuples(st.just(block), st.integers(0, block - 1))
    ),
)
def test_training_forward_is_the_decoding_forward_in_any_blocks(
    spec: str, rows: int, count: int, cut: tuple[int, int]
) -> None:
    trained, steps = both_forwards(spec, "llama", rows, count, *cut)
    assert worst(steps, trained) < tolerance(spec)


@pytest.mark.parametrize(
    ("spec", "model"), one_in(2, DEEPER, ["llama", "mistral-sliding", "qwen3"])
)
def test_a_prefix_is_kept_and_the_rest_read_anew(spec: str, model: str) -> None:
    own = {"block": 3} if spec.startswith("glide") else {}
    t = target(model)
    drafter = perturbed(method_from(spec, **own), t, scale_of(spec))
    assert prefix_difference(t, drafter) < tolerance(spec)


@pytest.mark.parametrize("spec", SPECS)
def test_loss_falls_and_gradients_reach_every_weight(spec: str) -> None:
    t = target("qwen3")
    torch.manual_seed(0)
    drafter = method_from(spec).fresh(t)
    for parameter in drafter.model.parameters():
        parameter.data = parameter.data.double()
    batch = forward_parity.batch_of(t, drafter, tokens_of(4, 14, 7))
    weights = {n: p for n, p in drafter.model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.Adam(weights.values(), lr=3e-3)
    t.decoder.model.zero_grad()
    losses = []
    for _ in range(8):
        loss = drafter.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        assert [n for n, p in weights.items() if p.grad is None or not p.grad.any()] == []
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05
    theirs = list(t.decoder.model.parameters())
    assert not {p.data_ptr() for p in weights.values()} & {p.data_ptr() for p in theirs}
    if hasattr(drafter.knobs, "heads"):  # others compute their loss with the target's head
        assert all(p.grad is None for p in theirs)


@pytest.mark.parametrize("spec", [*DEEPER, "glide:layers=2,hidden=16,block=3,loss=kl,kv_layer=-2"])
def test_a_saved_drafter_opens_as_it_was(spec: str, tmp_path: Path) -> None:
    t = target("llama")
    drafter = perturbed(method_from(spec), t, scale_of(spec))
    for parameter in drafter.model.parameters():
        parameter.data = parameter.data.half().double()  # as it is written
    drafter.save(tmp_path / "one")
    opened = build("drafter", str(tmp_path / "one")).open(t)
    assert opened.knobs == replace(drafter.resolved_knobs, checkpoint=str(tmp_path / "one"))
    ours, theirs = drafter.model.state_dict(), opened.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    drafts = [
        forward_parity.draft_log_probs(t, either, tokens_of(1, 15, 5), 4, 1)
        for either in (drafter, opened)
    ]
    assert torch.equal(*drafts)
    opened.save(tmp_path / "two")
    stored = [sorted(f for f in (tmp_path / n).iterdir()) for n in ("one", "two")]
    assert [f.name for f in stored[0]] == [f.name for f in stored[1]]
    for one, two in zip(*stored, strict=True):
        read = json.loads if one.suffix == ".json" else bytes
        assert read(one.read_bytes()) == read(two.read_bytes()), one.name
    assert method_of(tmp_path / "one") == spec.partition(":")[0]


@pytest.mark.parametrize("changes", [{"vocab_size": VOCAB + 1}, {"hidden_size": 64}], ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_a_target_of_other_sizes_is_refused_in_a_line(
    name: str, changes: dict[str, int], tmp_path: Path
) -> None:
    perturbed(method_from(name), target("llama")).save(tmp_path)
    other = Target(CausalLM(build_model("llama", {"num_hidden_layers": 4, **changes})), "other")
    ((key, value),) = changes.items()
    with pytest.raises(UserError, match=rf"{key}\b.*\b{value}\b") as error:
        build("drafter", str(tmp_path)).open(other)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", names("drafter"))
def test_a_sequence_is_drafted_for_as_if_it_were_alone(name: str) -> None:
    """Candidates after the roots of two of three sequences, in another order."""
    t = target("llama")
    method = build("drafter", name)
    trained = isinstance(method, TrainableMethod)
    drafter = perturbed(method, t) if trained else method.example(t)
    prompts = [np.array(p) for p in ([7, 8, 9, 7, 8], [7, 5], [8, 4, 9, 8, 4, 6, 8])]
    roots = np.array([9, 7, 4])

    def candidates(rows: list[int], of: list[int]) -> Any:
        some = [prompts[row] for row in rows]
        read = t.prefill(t.new_cache(len(rows), 8), some, drafter.needs).hidden_states
        state = drafter.start(some, roots[rows], read)
        tree = Tree.from_roots(np.array(of), roots[rows][of])
        return drafter.expand(state, tree, np.arange(len(of))[::-1], 3, Drawing())[0]

    together = candidates([0, 1, 2], [0, 2])
    for place, row in enumerate((2, 0)):
        alone = candidates([row], [0])
        drafted = np.flatnonzero(np.isfinite(alone.log_q[0]))
        there = together.log_q[place]
        assert np.flatnonzero(np.isfinite(there)).tolist() == drafted.tolist()
        assert together.tokens[place][drafted].tolist() == alone.tokens[0][drafted].tolist()
        assert there[drafted] == pytest.approx(alone.log_q[0][drafted], abs=tolerance(name))


@pytest.mark.parametrize("name", [n for n in names("drafter") if n not in ("lm", "rest", *TRAINED)])
def test_options_tell_drafters_apart_in_their_description(name: str) -> None:
    """Costs and results are kept by it."""
    t, kind = target("llama"), part("drafter", name)
    plain = kind().open(t).description
    assert plain == kind().open(t).description
    for field in fields(kind):
        default = field.default
        if isinstance(default, bool | int | float) and default is not MISSING:
            other = not default if isinstance(default, bool) else default + 1
            if name == "pld" and field.name == "confidence":
                other = 0.5
            if name == "suffix" and field.name == "least":
                other = 0.5
            assert kind(**{field.name: other}).open(t).description != plain, field.name


@pytest.mark.parametrize("policy", names("policy"))
@pytest.mark.parametrize("spec", ["medusa:heads=1", "hydra:heads=1"])
def test_every_policy_ends_with_the_last_head(spec: str, policy: str) -> None:
    t = target("llama")
    requests = [
        Request(text.tolist(), 7, number=i)
        for i, text in enumerate(texts([4, 6], np.random.default_rng(5)))
    ]
    sampling = Sampling(temperature=float((names("policy").index(policy) + len(spec)) % 2))
    drafter = perturbed(method_from(spec), t, 0.2)  # sure enough for every policy
    engine = Engine(t, drafter, build("policy", policy), costs=COSTS)
    written = engine.write(requests, sampling)
    assert written.tokens == engine.plain(requests, sampling).tokens
    assert max(s.depth for s in written.stats.steps) == 1, "there is one head"


@pytest.mark.parametrize(
    "spec", ["dflash:block=5", "dspark:block=4,rank=6", "jetspec:block=5", "peagle:drafts=4"]
)
def test_a_tree_of_all_depths_takes_one_pass(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    t = target("llama")
    drafter, passes = perturbed(method_from(spec), t), list[int]()
    stock = drafter.model.forward

    def counted(*inputs: Any) -> Any:
        passes.append(len(inputs[0]))
        return stock(*inputs)

    monkeypatch.setattr(drafter.model, "forward", counted)
    done = Engine(t, drafter, Beam(width=3, depth=9), Greedy(), COSTS).write(
        [Request([3, 1, 4], 12)]
    )
    work = [w for w in done.stats.work if w.fed > 1]  # the last token has no room for drafts
    assert len(passes) == len(work) > 2
    assert {w.frontiers for w in work} == {(1,)}
    assert max(s.depth for s in done.stats.steps) == drafter.ahead, "none is beyond the block"


@pytest.mark.parametrize("model", SOME)
@pytest.mark.parametrize("spec", ["hydra:heads=3", "hydra:heads=3,arch=mlp", "medusa:heads=4"])
def test_comparison_notices_a_hidden_state_of_the_root(
    spec: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake: heads that read position s instead of s − 1, where decoding has no hidden state yet."""
    stock = forward_parity.batch_of

    def shifted(*arguments: Any) -> Any:
        batch = stock(*arguments)
        batch.hidden[-1] = batch.hidden[-1].roll(-1, 1)
        return batch

    monkeypatch.setattr(forward_parity, "batch_of", shifted)
    t = target(model)
    drafter = perturbed(method_from(spec), t, scale_of(spec))
    assert forward_parity.largest_difference(t, drafter, tokens_of(1, 15), 3, 1) > 1e-3
