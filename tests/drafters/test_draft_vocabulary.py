"""A draft vocabulary, and embedding and head that are the target's, in every trained drafter that has them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from architectures import target
from draftree.costs.step_costs import Costs
from draftree.doctor import forward_parity
from draftree.doctor.export_check import examine
from draftree.doctor.faults import draft_vocabulary
from draftree.drafters.base import TrainableMethod
from draftree.engine import Engine, generate_plain
from draftree.errors import DraftreeWarning, UserError
from draftree.formats.medusa import HEADS_FILE, to_vllm
from draftree.policies.eagle2 import EAGLE2
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing, draw_candidates
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.tree import DraftVocab, Draw
from forests import texts
from selection import one_in

SIZE = 20
COSTS = Costs({1: 1.0}, {1: 1.0})
TRAINED = (
    "edd",
    "vdm",
    "eagle",
    "eagle3",
    "mtp",
    "glide",
    "medusa",
    "hydra",
    "dflash",
    "dspark",
    "jetspec",
    "peagle",
)
MORE = {"glide": ",init=shared", "edd": ",shared=true", "vdm": ",shared=true"}
SHARING = ("edd", "vdm", "eagle", "mtp", "glide")
"""Those whose head is the target's own."""


def fresh(name: str, t: Target, size: int = SIZE):
    """A drafter and the ids that it may draft, most of them not the first ones."""
    method = build("drafter", f"{name}:draft_vocab={size}{MORE.get(name, '')}")
    assert isinstance(method, TrainableMethod)
    torch.manual_seed(0)
    drafter = method.fresh(t)
    counts = np.zeros(t.decoder.vocab, np.int64)
    ids = np.sort(np.random.default_rng(1).permutation(t.decoder.vocab)[:size])
    counts[ids] = 5
    drafter.fit_vocabulary(counts)
    return drafter, ids


def precise(drafter, *dtypes: torch.dtype) -> None:
    """Gives its weights one dtype after the other; rotary frequencies stay as they are."""
    for parameter in drafter.model.parameters():
        for dtype in dtypes:
            parameter.data = parameter.data.to(dtype)


@pytest.mark.parametrize("name", TRAINED)
def test_decoding_and_training_draft_the_same_tokens_of_the_vocabulary_alone(name: str) -> None:
    t = target("llama")
    drafter, ids = fresh(name, t)
    precise(drafter, torch.float64)
    trained, decoded = forward_parity.log_probs_of_both(
        t, drafter, np.stack(texts([12, 12], np.random.default_rng(2))), 4, 1
    )
    assert torch.allclose(trained.exp(), decoded.exp(), atol=1e-9)
    there = torch.isfinite(decoded).any(0).any(0).nonzero().flatten()
    assert there.tolist() == ids.tolist()


@pytest.mark.parametrize("name", TRAINED)
def test_a_checkpoint_keeps_the_vocabulary_and_nothing_of_the_targets(
    name: str, tmp_path: Path
) -> None:
    t = target("llama")
    drafter, _ = fresh(name, t)
    precise(drafter, torch.float16, torch.float32)  # as it is written
    drafter.save(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    whole = (
        "t2d",
        "markov_head.markov_w1.weight",
    )  # what DSpark knows of the token before is of every token
    assert not [
        k for k, v in tensors.items() if t.decoder.vocab in v.shape and k not in whole
    ]  # no embedding, no whole head
    opened = build("drafter", f"{name}:checkpoint={tmp_path}").open(t)
    text = np.stack(texts([12], np.random.default_rng(2)))
    precise(drafter, t.decoder.dtype)
    assert torch.equal(
        forward_parity.draft_log_probs(t, opened, text, 4, 1),
        forward_parity.draft_log_probs(t, drafter, text, 4, 1),
    )
    with pytest.raises(UserError, match=r"draft_vocab is 7, allowed is 20"):
        build("drafter", f"{name}:checkpoint={tmp_path},draft_vocab=7{MORE.get(name, '')}").open(t)


@pytest.mark.parametrize(
    ("name", "acceptor"),
    [*((name, "match") for name in TRAINED), *one_in(2, TRAINED, ["multiround", "block"])],
)
def test_texts_are_the_targets(name: str, acceptor: str) -> None:
    """Greedily and from a seed the same texts; by rejection every token is one that the target could have chosen."""
    samplings = (Sampling(), Sampling(0.8, top_p=0.9, seed=5))
    t = target("llama")
    drafter, _ = fresh(name, t)
    precise(drafter, torch.float64)
    prompts = texts([9, 5], np.random.default_rng(4))
    policy = EAGLE2(8, 3, 3) if acceptor == "match" else build("policy", "chain")
    for sampling in samplings if acceptor == "match" else samplings[1:]:
        chosen = build("acceptor", acceptor) if sampling.temperature else None
        requests = [
            Request(list(p), 16, number=i, sampling=sampling) for i, p in enumerate(prompts)
        ]
        written = Engine(t, drafter, policy, chosen, COSTS).write(requests)
        if acceptor == "match":
            assert written.tokens == generate_plain(t, requests).tokens
        assert sum(s.nodes for s in written.stats.steps) > len(written.stats.steps)


@pytest.mark.parametrize("draw", list(Draw))
def test_draws_do_not_depend_on_the_device(draw: Draw) -> None:
    """Candidates of a draft vocabulary are those of whole logits in which other tokens have none."""
    ids, logits = torch.tensor([2, 3, 11, 17, 29]), torch.randn(4, 5, dtype=torch.float64)
    part = DraftVocab(ids, 40)
    rows = np.zeros(4, np.int64)
    depths = np.arange(4)
    noise = None if draw is Draw.POINT else Keyed(3, np.zeros(1, np.int64), np.full(1, 9))
    drawing = Drawing(draw, (Sampling(0.7, seed=3),) if noise else (), noise)
    narrow, wide = (
        draw_candidates(logits, 3, drawing, rows, depths, part),
        draw_candidates(part.whole(logits), 3, drawing, rows, depths),
    )
    assert narrow.tokens.tolist() == wide.tokens.tolist()
    assert np.allclose(narrow.log_q, wide.log_q)
    assert narrow.log_probs is not None
    assert wide.log_probs is not None
    assert torch.allclose(narrow.log_probs.exp(), wide.log_probs.exp())


def test_tokens_outside_the_vocabulary_have_no_column() -> None:
    ids, logits = torch.tensor([2, 3, 11]), torch.arange(12.0).reshape(4, 3)
    columns, rows = DraftVocab(ids, 40).columns(torch.tensor([3, 5, 11, 39]), logits)
    assert columns.tolist() == [1, 2]
    assert torch.equal(rows, logits[[0, 2]])


@pytest.mark.parametrize("name", SHARING)
def test_embedding_and_head_are_neither_trained_nor_changed(name: str) -> None:
    t = target("llama")
    drafter, _ = fresh(name, t, 0)
    precise(drafter, torch.float64)
    before = t.decoder.model.get_input_embeddings().weight.clone()
    batch = forward_parity.batch_of(t, drafter, np.stack(texts([10, 10], np.random.default_rng(3))))
    drafter.loss(batch).backward()
    torch.optim.SGD(drafter.model.parameters(), 0.1).step()
    assert torch.equal(before, t.decoder.model.get_input_embeddings().weight)
    assert not [k for k, v in drafter.model.state_dict().items() if t.decoder.vocab in v.shape]


@pytest.mark.parametrize(
    "spec", ["edd:shared=false", "vdm:shared=false", "glide:init=target", "glide:init=scratch"]
)
def test_a_head_of_its_own_is_whole(spec: str) -> None:
    t = target("llama")
    assert any(
        t.decoder.vocab in v.shape
        for v in build("drafter", spec).fresh(t).model.state_dict().values()
    )
    with pytest.raises(UserError, match=r"draft_vocab is 20, allowed with .* is 0"):
        build("drafter", f"{spec},draft_vocab=20").fresh(t)


@pytest.mark.parametrize("name", TRAINED)
def test_a_vocabulary_larger_than_the_targets(name: str) -> None:
    t = target("llama")
    with pytest.raises(
        UserError,
        match=f"{name}: draft_vocab is 9999, allowed is at most the target's vocabulary: ",
    ):
        fresh(name, t, 9999)


def test_another_embedding_is_told(tmp_path: Path) -> None:
    t = target("llama")
    drafter, _ = fresh("edd", t)
    drafter.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["draftree"]["embedding_hash"] = "0" * 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(DraftreeWarning, match="whose embedding is another"):
        build("drafter", f"edd:checkpoint={tmp_path}").open(t)


@pytest.mark.parametrize("name", ["edd", "vdm", "glide"])
def test_a_drafter_with_copies_of_embedding_and_head_drafts_as_before(
    name: str, tmp_path: Path, draftree
) -> None:
    t = target("llama")
    t.decoder.model.save_pretrained(tmp_path / "target")
    loaded = Target.load(str(tmp_path / "target"), "float64")
    drafter, _ = fresh(name, loaded, 0)
    drafter.save(tmp_path / "borrowing")
    status, _, told = draftree(
        "export", tmp_path / "borrowing", "--standalone", "--out", tmp_path / "alone"
    )
    assert not status, told
    text = np.stack(texts([12], np.random.default_rng(2)))
    one, other = (
        build("drafter", f"{name}:checkpoint={tmp_path / folder}").open(loaded)
        for folder in ("borrowing", "alone")
    )
    assert torch.allclose(
        forward_parity.draft_log_probs(loaded, one, text, 4, 1),
        forward_parity.draft_log_probs(loaded, other, text, 4, 1),
        atol=1e-2,
    )
    if name == "vdm":  # transformers' own
        AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
    status, _, told = draftree("export", tmp_path / "borrowing", "--out", tmp_path / "neither")
    assert status == 2
    assert "what can be exported" in told


def test_where_no_program_knows_a_draft_vocabulary_the_head_is_the_targets(
    tmp_path: Path, draftree
) -> None:
    t = target("llama")
    drafter, _ = fresh("eagle", t)
    drafter.save(tmp_path / "ours")
    status, _, told = draftree(
        "export", tmp_path / "ours", "--format", "eagle", "--out", tmp_path / "theirs"
    )
    assert not status, told
    opened = build("drafter", f"eagle:checkpoint={tmp_path / 'theirs'}").open(t)
    assert opened.knobs.draft_vocab == 0
    left, written = (
        set(load_file(tmp_path / name / "model.safetensors")) for name in ("ours", "theirs")
    )
    assert left - written == {"head.d2t"}


def test_medusa_heads_over_a_part_of_the_vocabulary_are_read_and_not_written_for_vllm(
    tmp_path: Path, draftree
) -> None:
    """vLLM 0.32 knows their layout, and cannot load them."""
    t = target("llama")
    opened = build("drafter", "medusa:draft_vocab=20").fresh(t)
    opened.save(tmp_path / "medusa")
    status, _, told = draftree("export", tmp_path / "medusa", "--out", tmp_path / "vllm")
    assert status == 2
    assert "a draft vocabulary of 20 tokens, allowed for 'vllm-medusa' is the whole" in told
    config, tensors = to_vllm({}, load_file(tmp_path / "medusa" / HEADS_FILE), t.decoder.vocab)
    assert tensors["token_map"].tolist() == list(range(20))
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "vllm" / "model.safetensors")
    assert "a draft vocabulary of 20 tokens" in examine(tmp_path / "vllm").faults[0]
    text = np.stack(texts([12], np.random.default_rng(2)))
    ours, vllm = (
        build("drafter", f"medusa:checkpoint={tmp_path / name}").open(t)
        for name in ("medusa", "vllm")
    )
    assert torch.equal(
        forward_parity.draft_log_probs(t, ours, text, 4, 1),
        forward_parity.draft_log_probs(t, vllm, text, 4, 1),
    )


@pytest.mark.parametrize("name", TRAINED)
def test_the_doctor_counts_what_can_be_drafted(name: str) -> None:
    t = target("llama")
    assert draft_vocabulary(fresh(name, t)[0].model, t.decoder.vocab) == SIZE
    assert draft_vocabulary(fresh(name, t, 0)[0].model, t.decoder.vocab) == t.decoder.vocab
