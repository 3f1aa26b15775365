"""Training of drafters: what is learnt of a chat, and what a loss depends on."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from architectures import target as architecture
from draftree import UserError
from draftree.data.samples import Sample, chat_samples, read_samples
from draftree.doctor import forward_parity
from draftree.drafters.edd import EDD
from draftree.drafters.neural.block_loss import draw_anchors
from draftree.models.causal_lm import CausalLM
from draftree.registry import build
from draftree.target.target import Target
from draftree.training.teacher import Teacher
from draftree.training.trainer import Objective, TrainingPlan, train
from folders import TEMPLATE, byte_tokenizer
from forests import texts
from reports import report

KIND = "Training of drafters"
TOKENIZER = byte_tokenizer()
TRAINED = ("edd", "eagle", "eagle3", "medusa", "vdm", "dflash:block=4")
GOOD = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "bc"}]}
VOCAB = 31


def saved(path: Path, *rows: object) -> Path:
    """Write rows as JSON lines."""
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def shown(sample: Sample) -> str:
    """Return a sample's text, with what is learnt in brackets."""
    edges = np.flatnonzero(np.diff(sample.learn.astype(int), prepend=0, append=0)).tolist()
    parts = [TOKENIZER.decode(part.tolist()) for part in np.split(sample.tokens, edges)]
    return "".join(f"[{part}]" if i % 2 else part for i, part in enumerate(parts))


def trainee(dropout: float = 0.0) -> Target:
    """Return a small target for whole trainings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=4, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.5, attention_dropout=dropout,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Target(CausalLM(LlamaForCausalLM(config)), "tiny")


def drafter_for(target: Target, spec: str) -> Any:
    """Return a fresh drafter in the target's dtype."""
    torch.manual_seed(1)
    made: Any = build("drafter", spec).fresh(target)
    made.model.to(target.decoder.dtype)
    return made


def loss(target: Target, drafter: Any, samples: list[Sample]) -> float:
    """Return the sum of a batch's losses, over all tokens that are learnt."""
    batch = Teacher(target, drafter.needs, samples, 0).batch(range(len(samples)), 0)
    with torch.no_grad():
        return float(drafter.loss(replace(batch, count=1.0)))


@report(
    "sgl-project/SpecForge#482",
    KIND,
    "Empty chats, and chats that an answer begins, ended a training with an error of indices.",
)
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "assistant", "content": "hello"}, *GOOD["messages"]]},
        {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": ""}]},
        {"messages": [*GOOD["messages"], {"role": "user", "content": "left open"}]},
        {"messages": [{"role": "system", "content": "be brief"}, *GOOD["messages"]]},
        {
            "conversations": [
                {"from": "gpt", "value": "cut"},
                {"from": "human", "value": "a?"},
                {"from": "gpt", "value": "bc"},
            ]
        },
        {"text": ""},
        {"messages": []},
    ],
    ids=lambda row: json.dumps(row)[:40],
)
def test_odd_rows_beside_a_good_one_are_learnt_or_left_out(
    row: dict[str, Any], tmp_path: Path
) -> None:
    target = trainee()
    samples = read_samples([saved(tmp_path / "a.jsonl", row, GOOD)], TOKENIZER, 64)
    assert shown(samples[-1]) == "<|user|>a?<|assistant|>[bc<eos>]"
    assert all(s.learn.any() for s in samples)
    few = [Sample(s.tokens % VOCAB, s.learn) for s in samples] * 3
    plan = TrainingPlan(epochs=1, batch_size=2, lr=1e-3, held_out=0.2, policy="chain:length=2")
    result = train(target, EDD().fresh(target), few, plan, tmp_path / "out")
    assert np.isfinite(result.loss)


@report(
    "sgl-project/SpecForge#429",
    KIND,
    "Chats with calls of tools, which have no text, broke the preparation of the data.",
)
@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ([{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
          {"role": "tool", "content": "3"}], "<|assistant|>[<eos>]<|tool|>3"),
        ([{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "3"}],
         "<|assistant|>[<eos>]<|tool|>3"),
        ([{"role": "observation", "content": "3"}], "<|tool|>3"),
        ([{"role": "user", "content": [{"type": "text", "text": "more"}]}], "<|user|>more"),
        ([{"role": "developer", "content": "be brief"}], "<|system|>be brief"),
        ([{"role": "tool", "content": [{"type": "image"}]}], None),
    ],
    ids=["call", "empty call", "observation", "parts", "developer", "image"],
)  # fmt: skip
def test_a_call_of_a_tool_is_learnt_or_told_with_its_line(
    said: list[dict[str, Any]], wanted: str | None, tmp_path: Path
) -> None:
    chat = {
        "messages": [
            {"role": "user", "content": "a?"},
            *said,
            {"role": "assistant", "content": "end"},
        ]
    }
    file = saved(tmp_path / "a.jsonl", GOOD, chat)
    if wanted is None:
        told = (
            rf"^{re.escape(str(file))}:2: a message holds a part of type 'image', allowed is text$"
        )
        with pytest.raises(UserError, match=told):
            read_samples([file], TOKENIZER, 128)
        return
    samples = read_samples([file], TOKENIZER, 128)
    assert shown(samples[-1]) == f"<|user|>a?{wanted}<|assistant|>[end<eos>]"


@report(
    "huggingface/trl#3927",
    KIND,
    "Answers beyond the longest sample gave steps that learnt nothing, and gradients that were no numbers.",
)
def test_answers_beyond_the_longest_sample_are_told(tmp_path: Path) -> None:
    long = {
        "messages": [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "bc"}]
    }
    with pytest.raises(UserError, match="nothing to learn"):
        read_samples([saved(tmp_path / "all.jsonl", long, long)], TOKENIZER, 32)
    samples = read_samples([saved(tmp_path / "some.jsonl", long, GOOD, long)], TOKENIZER, 32)
    assert [shown(s) for s in samples] == ["<|user|>a?<|assistant|>[bc<eos>]"]


@report(
    "NVIDIA-NeMo/Megatron-Bridge#3359",
    KIND,
    "Without marks of generation in the template all tokens were learnt.",
)
@report("huggingface/trl#7230", KIND, "The token that ends a turn was not learnt.")
@report(
    "unslothai/unsloth#1290",
    KIND,
    "Answers were not found where a single token begins them, and every label was masked.",
)
@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (TEMPLATE, "<|user|>a?<|assistant|>[bé<eos>]<|user|>c?<|assistant|>[d<eos>]"),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
         "{% if add_generation_prompt %}assistant: {% endif %}", "user: a?\nassistant: [bé\n]user: c?\nassistant: [d\n]"),
    ],
    ids=["tokens", "trimming"],
)  # fmt: skip
def test_answers_and_their_ends_alone_are_learnt(template: str, wanted: str) -> None:
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "bé"},
            {"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]  # fmt: skip
    (sample,) = chat_samples(byte_tokenizer(template), chat)
    assert shown(sample) == wanted


@report(
    "axolotl-ai-cloud/axolotl#2089",
    KIND,
    "A turn was looked for by its text, and not found or found elsewhere, and masks went astray.",
)
@report("axolotl-ai-cloud/axolotl#1916", KIND, "The end of the last turn was not learnt.")
@report(
    "FasterDecoding/Medusa#101",
    KIND,
    "Labels were the same as the inputs: questions were learnt as well as answers.",
)
def test_answers_that_repeat_the_question_are_told_apart(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ab"},
            {"role": "user", "content": "<|assistant|>"}, {"role": "assistant", "content": "a"}]  # fmt: skip
    (sample,) = read_samples([saved(tmp_path / "a.jsonl", {"messages": chat})], TOKENIZER, 99)
    assert (
        shown(sample)
        == "<|user|>ab<|assistant|>[ab<eos>]<|user|><|assistant|><|assistant|>[a<eos>]"
    )


@report(
    "sgl-project/SpecForge#885",
    KIND,
    "The mask was not moved along with tokens and labels: the first answer token was left out, another taken in.",
)
@pytest.mark.parametrize("spec", TRAINED)
def test_the_loss_is_over_the_marked_tokens_exactly(spec: str) -> None:
    """Labels after the marked part change nothing; the first and the last of it do."""
    target = architecture("llama")
    drafter = drafter_for(target, spec)
    (row,) = texts([14], np.random.default_rng(3))
    learn = (np.arange(14) >= 5) & (np.arange(14) < 10)
    plain_loss = loss(target, drafter, [Sample(row, learn)])
    assert np.isfinite(plain_loss)
    assert plain_loss > 0
    for after in (10, 12):
        other = row.copy()
        other[after] = (other[after] + 11) % 60 + 3
        assert loss(target, drafter, [Sample(other, learn)]) == pytest.approx(plain_loss, abs=1e-9)
    for at in (5, 9):
        fewer = learn.copy()
        fewer[at] = False
        assert loss(target, drafter, [Sample(row, fewer)]) != pytest.approx(plain_loss, abs=1e-6)


@report(
    "sgl-project/SpecForge#296",
    KIND,
    "Chats were rendered for training otherwise than the model reads them when it answers.",
)
def test_a_thinking_template_is_learnt_as_it_is_read() -> None:
    thoughtful = TEMPLATE.replace(
        "{{ m['content'] }}",
        "{% if m['role'] == 'assistant' and loop.last %}<t></t>{% endif %}{{ m['content'] }}",
    )
    tokenizer = byte_tokenizer(thoughtful)
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]  # fmt: skip
    samples = chat_samples(tokenizer, chat)
    for sample, end in zip(samples, (2, 4), strict=True):
        read_as = tokenizer.apply_chat_template(
            chat[: end - 1], tokenize=False, add_generation_prompt=True
        )
        text = str(tokenizer.decode(sample.tokens.tolist()))
        assert text.startswith(read_as)
        assert shown(sample) == f"{read_as}[{text[len(read_as) :]}]"


@report(
    "sgl-project/SpecForge#563",
    KIND,
    "After the first measurement a training went on in evaluation mode, without dropout.",
)
def test_a_measurement_leaves_the_drafter_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, modes = trainee(dropout=0.2), []
    forward = Objective.forward
    monkeypatch.setattr(
        Objective, "forward", lambda self, b: modes.append(self.model.training) or forward(self, b)
    )
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(0, VOCAB, 10), np.arange(10) >= 3) for _ in range(12)]
    plan = TrainingPlan(
        epochs=2, batch_size=4, lr=1e-3, held_out=0.2, evaluate_every=1, policy="chain:length=2"
    )
    train(target, EDD().fresh(target), samples, plan, tmp_path)
    assert len(modes) >= 4
    assert all(modes)
    assert not target.decoder.model.training


@report(
    "sgl-project/SpecForge#555",
    KIND,
    "Most rows of prepared text were skipped, and batches were far smaller than asked for.",
)
def test_every_row_of_text_is_learnt(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}", "tools": []} if i % 2 else {"text": f"row {i}"} for i in range(40)]
    samples = read_samples([saved(tmp_path / "a.jsonl", *rows)], TOKENIZER, 64)
    assert [TOKENIZER.decode(s.tokens.tolist()) for s in samples] == [row["text"] for row in rows]
    assert all(s.learn[1:].all() for s in samples)


@report(
    "sgl-project/SpecForge#470",
    KIND,
    "Blocks that overlap saw hidden states of tokens that they had to draft.",
)
@pytest.mark.parametrize("spec", ["dflash:block=4", "dspark:block=4,rank=6", "jetspec:block=4"])
def test_a_block_reads_nothing_of_what_it_drafts(spec: str) -> None:
    target = architecture("llama")
    drafter = drafter_for(target, spec)
    rows = np.stack(texts([16], np.random.default_rng(3)))
    alone = drafter.blocks(forward_parity.batch_of(target, drafter, rows), torch.tensor([[6]]))[
        0, 0
    ]
    many = drafter.blocks(
        forward_parity.batch_of(target, drafter, rows), torch.tensor([[4, 5, 6, 7]])
    )[0, 2]
    assert torch.allclose(alone, many, atol=1e-9)
    later = rows.copy()
    later[0, 7:] = (later[0, 7:] + 13) % 60 + 3
    other = drafter.blocks(forward_parity.batch_of(target, drafter, later), torch.tensor([[6]]))[
        0, 0
    ]
    assert torch.allclose(alone, other, atol=1e-9) or spec.startswith("dspark"), (
        "a Markov head reads the token before"
    )
    earlier = rows.copy()
    earlier[0, 3] = (earlier[0, 3] + 13) % 60 + 3
    assert not torch.allclose(
        alone,
        drafter.blocks(forward_parity.batch_of(target, drafter, earlier), torch.tensor([[6]]))[
            0, 0
        ],
    )


@report(
    "sgl-project/SpecForge#471",
    KIND,
    "Hidden states, labels and masks of a block were moved against one another.",
)
@pytest.mark.parametrize("spec", ["dflash:block=5", "dspark:block=5,rank=6", "jetspec:block=5"])
def test_what_a_block_is_trained_as_is_what_it_decodes(spec: str) -> None:
    target = architecture("llama")
    drafter = drafter_for(target, spec)
    rows = np.stack(texts([14, 14], np.random.default_rng(5)))
    assert forward_parity.largest_difference(target, drafter, rows, 4, 1) < 1e-6
    batch = forward_parity.batch_of(target, drafter, rows)
    places = draw_anchors(batch, 4, 3, 0.0)
    assert (
        places.labels[places.valid]
        > places.anchors[:, :, None].expand_as(places.labels)[places.valid]
    ).all()
    assert torch.equal(
        places.labels[:, :, 0][places.valid[:, :, 0]], places.anchors[places.valid[:, :, 0]] + 1
    )


@report(
    "vllm-project/speculators#1071",
    KIND,
    "The number of roots was one for all texts of a row, and short ones were hardly learnt.",
)
def test_each_text_has_its_own_number_of_roots() -> None:
    target = architecture("llama")
    samples = [
        Sample(row, np.arange(len(row)) >= 2) for row in texts([20, 7], np.random.default_rng(3))
    ]
    batch = Teacher(target, drafter_for(target, "dflash:block=4").needs, samples, 0).batch(
        range(2), 0
    )
    places = draw_anchors(batch, 3, 4, 0.0)
    assert places.valid[:, :, 0].sum(1).tolist() == [4, 4]


@report(
    "NVIDIA-NeMo/Automodel#3004",
    KIND,
    "Texts that are packed into one row must not see one another's hidden states.",
)
@pytest.mark.parametrize("spec", ["edd", "eagle3", "medusa", "vdm"])
def test_texts_of_a_batch_are_learnt_apart(spec: str) -> None:
    target = architecture("llama")
    drafter = drafter_for(target, spec)
    samples = [
        Sample(row, np.arange(len(row)) >= 2)
        for row in texts([15, 8, 11], np.random.default_rng(3))
    ]
    draws = Teacher(target, drafter.needs, samples, 0)

    def part(numbers: list[int]) -> float:
        with torch.no_grad():
            return float(drafter.loss(replace(draws.batch(numbers, 0), count=1.0)))

    assert part([0, 1, 2]) == pytest.approx(sum(part([i]) for i in range(3)), rel=1e-6)
