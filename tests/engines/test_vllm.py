"""The proposer inside vLLM: texts, the distribution at temperature 1, and many requests of which some are aborted."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import draftree

vllm = pytest.importorskip("vllm")
SPEC = {
    "method": "custom_class",
    "model": "draftree.integrations.vllm.Proposer",
    "num_speculative_tokens": 8,
}
TIE = 1e-3
"""Two tokens of log probabilities that are closer than this may change places, as passes of other
widths round otherwise."""


def started(model: str, spec: dict[str, Any] | None, **own: Any) -> Any:
    more = (
        {} if spec is None else {"speculative_config": spec, "additional_config": {"draftree": own}}
    )
    return vllm.LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=50,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 28,
        **more,
    )


def proposer(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter


def written(llm: Any, prompts: list[list[int]], **options: Any) -> list[Any]:
    asked = vllm.SamplingParams(ignore_eos=True, detokenize=False, **options)
    return [
        answer.outputs[0]
        for answer in llm.generate(
            [{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False
        )
    ]


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(5, 4000, random.integers(4, 12)).tolist() * 3 for _ in range(count)]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """What vLLM writes without drafts; its engine ends before another begins, as two cannot live in a process."""
    return written(
        started(str(draftree.demo_folder()), None),
        prompts(20),
        temperature=0,
        max_tokens=40,
        logprobs=2,
    )


OWN_CHAINS: dict[str, str] = {}
BY_A_DRAFTER = {"drafter": "suffix+pld", "policy": "chain:length=4"}


@pytest.fixture(scope="module", params=[OWN_CHAINS, BY_A_DRAFTER], ids=["own", "drafter"])
def drafting(plain: list[Any], request: pytest.FixtureRequest) -> Any:
    return started(str(draftree.demo_folder()), SPEC, **request.param)


def test_greedy_texts_are_the_same(drafting: Any, plain: list[Any]) -> None:
    drafted = written(drafting, prompts(20), temperature=0, max_tokens=40)
    assert proposer(drafting).chains.figures.accepted > 20
    for ours, theirs in zip(drafted, plain, strict=True):
        if list(ours.token_ids) != list(theirs.token_ids):
            at = int(np.argmax(np.array(ours.token_ids) != np.array(theirs.token_ids)))
            best, second = sorted((x.logprob for x in theirs.logprobs[at].values()), reverse=True)[
                :2
            ]
            assert best - second < TIE


def test_of_fifty_requests_a_fifth_aborted_nothing_is_left(drafting: Any) -> None:
    engine, made = drafting.llm_engine, proposer(drafting)
    for i, prompt in enumerate(prompts(50)):
        asked = vllm.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, asked)
    for _ in range(4):
        engine.step()
    engine.abort_request([str(i) for i in range(0, 50, 5)])
    while engine.has_unfinished_requests():
        engine.step()
    written(drafting, prompts(1), temperature=0, max_tokens=2)
    assert made._failures == 0
    assert len(made.chains.slots.live) == 1
    assert len(made.chains.slots.texts) <= 4


def repeated(
    x: torch.Tensor, ends: torch.Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Return what vLLM's `expand_batch_to_tokens` is described to return: [tokens] the value of each token's request."""
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
    return torch.repeat_interleave(
        torch.where(x == replace_from, replace_to, x), counts, output_size=tokens
    )


def test_vllm_on_a_cpu_loses_the_temperatures_of_drafts() -> None:
    """Why drafts are accepted too often there: the values go into a copy that is dropped, and memory stays as it was.

    vLLM 0.32, `vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`. Where this fails vLLM is
    mended: then the sentence in docs/how-to/use-with-vllm.md and the replacement in the next test
    go.
    """
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    ends = torch.tensor([1, 3, 6])
    before = torch.full((6,), 123.0)
    assert repeated(temperatures, ends, 6).tolist() == [0.5, 1, 1, 2, 2, 2]
    found = before.clone()
    _expand_kernel_impl(found, temperatures, ends.int(), 0, 1)
    assert found.equal(before)


def test_the_distribution_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 1 the first three tokens of a tiny model are distributed as it says (chi-squared, 1 in 1,000).

    vLLM's own rejection sampling verifies the drafts; its fault on CPUs, which the test above
    shows, is mended here.
    """
    sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")
    monkeypatch.setattr(sampler, "expand_batch_to_tokens", repeated)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=5,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({}))
    llm = started(str(tmp_path), SPEC, drafter="suffix", policy="chain:length=2")
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    count = 6000
    seen = Counter(
        tuple(text.token_ids)
        for text in written(llm, [prompt] * count, temperature=1.0, max_tokens=3)
    )
    expected = _probabilities(model, prompt, 3)
    figures = proposer(llm).chains.figures
    assert figures.accepted > 300
    rest = [(seen[path], count * p) for path, p in expected.items()]
    big = [(n, e) for n, e in rest if e >= 5]
    small = [(n, e) for n, e in rest if e < 5]
    cells = [*big, (sum(n for n, _ in small), sum(e for _, e in small))] if small else big
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    degrees = len(cells) - 1
    assert statistic < degrees + 3.1 * (2 * degrees) ** 0.5 + 4, (statistic, degrees)


def _probabilities(model: Any, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for path, p in found.items():
            with torch.no_grad():
                following = (
                    model(torch.tensor([[*prompt, *path]])).logits[0, -1].softmax(-1).tolist()
                )
            longer |= {(*path, token): p * q for token, q in enumerate(following)}
        found = longer
    return found
