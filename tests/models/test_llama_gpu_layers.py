"""Passes of Llama-like models in few operations: the model's numbers, and its own modules where anything differs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from draftree import Request, Target, load
from draftree.models import llama_gpu_layers
from draftree.models.causal_lm import CausalLM
from draftree.models.forward_batch import ForwardBatch
from draftree.models.graph_capture import Graphs
from draftree.models.hf_runner import UNNORMED, HFRunner
from draftree.models.kv_cache import SlotCache
from draftree.models.model_runner import Outputs
from draftree.registry import build
from draftree.testing.fakes import PassRecorder

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
KNOWN = {
    "llama": LlamaConfig(**SIZES),
    "biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "window": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES),
    "mixed": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "phi3": Phi3Config(**SIZES),
}
OTHERS = {
    "scaled embedding": GemmaConfig(**SIZES, head_dim=8),
    "capped": Gemma2Config(**SIZES, head_dim=8),
    "scaled residual": GraniteConfig(**SIZES, residual_multiplier=0.3),
    "scaled logits": GraniteConfig(**SIZES, logits_scaling=8.0),
    "norms after": Olmo2Config(**SIZES),
    "parallel": CohereConfig(**SIZES),
    "a middle layer without rotation": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
    "partial rotation": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
}


def model(config: Any, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    """A model of random weights, norms included."""
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for weight in made.parameters():
        weight.normal_(1.0 if weight.dim() == 1 else 0.0, 0.2)
    if config.model_type != "gemma2":
        made.set_attn_implementation(attention)
    return made


def passes(runner: HFRunner, columns: bool = False) -> list[Tensor]:
    """Logits and hidden states of a prompt of two texts and of a tree behind it."""
    device, found = torch.device("cpu"), []
    cache = SlotCache(runner.stored_shapes.shapes, 2, runner.model.dtype, device)
    cache.reserve(40)
    wanted = Outputs((0, 2, -1, UNNORMED))
    with torch.inference_mode():
        prompts = [np.arange(12), np.arange(7) + 20]
        batch = ForwardBatch.chains(prompts, cache.lengths.copy(), device)
        found.append(
            runner.forward(
                batch, cache, Outputs((0, 2, -1, UNNORMED), np.array([11, 18]) if columns else None)
            )
        )
        for row, prompt in enumerate(prompts):
            cache.keep(row, np.arange(len(prompt)))
        seen = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
        ids, places = (
            [np.array([3, 4, 5])] * 2,
            [length + np.array([0, 1, 1]) for length in cache.lengths],
        )
        slots = [length + np.arange(3) for length in cache.lengths]
        tree = ForwardBatch.from_sequences(
            ids, places, cache.lengths.copy(), [seen] * 2, slots, device
        )
        found.append(runner.forward(tree, cache, wanted))
    return [t for each in found for t in (each.logits, *each.hidden.values())]


@pytest.mark.parametrize("attention", ["sdpa", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KNOWN)
def test_numbers_are_the_models_own(name: str, dtype: torch.dtype, attention: str) -> None:
    made = model(KNOWN[name], dtype, attention)
    runner = HFRunner(made, few_operations=True)
    with torch.inference_mode():
        assert runner.few_operations() is not None
    for columns in (False, True):
        found, wanted = (
            passes(runner, columns),
            passes(HFRunner(made, few_operations=False), columns),
        )
        for ours, own in zip(found, wanted, strict=True):
            # Three layers, each of which rounds some twenty times.
            allowed = 3 * 20 * torch.finfo(dtype).eps
            assert ours.shape == own.shape
            assert float((ours.float() - own.float()).norm()) <= allowed * float(own.float().norm())


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_run_their_own_modules(name: str) -> None:
    runner = HFRunner(model(OTHERS[name]), few_operations=True)
    with torch.inference_mode():
        assert runner.few_operations() is None
    assert passes(runner)


def test_by_default_only_a_gpu_runs_them() -> None:
    with torch.inference_mode():
        assert HFRunner(model(KNOWN["llama"])).few_operations() is None


def test_gradients_go_through_the_models_own_modules() -> None:
    assert HFRunner(model(KNOWN["llama"]), few_operations=True).few_operations() is None


def test_eager_attention_is_the_models_own() -> None:
    runner = HFRunner(model(KNOWN["llama"], attention="eager"), few_operations=True)
    with torch.inference_mode():
        assert runner.few_operations() is None
        runner.model.set_attn_implementation("sdpa")
        assert runner.few_operations() is not None


def hooked(made: Any) -> None:
    made.model.layers[1].mlp.register_forward_hook(lambda _module, _args, out: 2 * out)


def overridden(made: Any) -> None:
    mlp = made.model.layers[1].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def wrapped(made: Any) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.inner = inner
            self.weight = inner.weight
            self.bias = inner.bias
            self.in_features = inner.in_features

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    attention = made.model.layers[1].self_attn
    attention.o_proj = Doubled(attention.o_proj)


@pytest.mark.parametrize("change", [hooked, overridden, wrapped])
def test_changed_modules_are_run_as_they_are(change: Callable[[Any], None]) -> None:
    made = model(KNOWN["llama"])
    change(made)
    runner = HFRunner(made, few_operations=True)
    with torch.inference_mode():
        assert runner.few_operations() is None


def test_a_trial_leaves_no_hooks_and_those_of_transformers_do_no_harm() -> None:
    """transformers' hooks stay in a model that was once asked for its hidden states."""
    made = model(KNOWN["llama"])
    with torch.inference_mode():
        assert HFRunner(made, few_operations=True).few_operations() is not None
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.modules())
        made(input_ids=torch.tensor([[1, 2]]), output_hidden_states=True)
        assert any(m._forward_hooks for m in made.modules())
        assert HFRunner(made, few_operations=True).few_operations() is not None


def test_a_module_that_is_replaced_later_is_noticed() -> None:
    made = model(KNOWN["llama"])
    runner = HFRunner(made, few_operations=True)
    passes(runner)
    wrapped(made)
    for ours, own in zip(passes(runner), passes(HFRunner(made, few_operations=False)), strict=True):
        torch.testing.assert_close(ours, own, rtol=0, atol=0)


def test_a_planted_mistake_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sines of the wrong sign turn queries and keys the other way, which relative positions alone would not show."""
    monkeypatch.setattr(llama_gpu_layers, "_negate_first_half", lambda sines: sines)
    with torch.inference_mode():
        assert HFRunner(model(KNOWN["llama"]), few_operations=True).few_operations() is None


class Counted(TorchDispatchMode):
    """Counts operations that compute or copy; views are none."""

    VIEWS = (
        "view", "reshape", "to.", "transpose", "t.", "slice", "select", "unsqueeze", "split", "expand", "_unsafe_view",
        "detach", "alias", "permute", "as_strided",
    )  # fmt: skip
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not str(func).removeprefix("aten.").startswith(self.VIEWS)
        return func(*args, **(kwargs or {}))


def test_operations_are_few() -> None:
    """Half as many for a layer as the model's own modules take."""
    counts = []
    for few in (True, False):
        for layers in (3, 5):
            made = model(LlamaConfig(**SIZES | {"num_hidden_layers": layers}), attention="grouped")
            runner = HFRunner(made, few_operations=few)
            passes(runner)
            with Counted() as seen:
                passes(runner)
            counts.append(seen.count)
    ours, own = ((counts[i + 1] - counts[i]) / 4 for i in (0, 2))  # two passes of two more layers
    assert ours <= 21, ours
    assert own > 36, own


@pytest.mark.parametrize("drafter", ["pld", "suffix"])
def test_texts_are_plain_ones(drafter: str) -> None:
    """Recorded passes and prompts, alone and two at once."""
    made = model(KNOWN["llama"], torch.float64)
    decoder = CausalLM(made, capture=Graphs(PassRecorder()))
    decoder.use_runner(HFRunner(made, few_operations=True))
    engine = load(Target(decoder, "tiny"), drafter, "chain")
    requests = [Request([1, 2, 3, 1, 2], 20), Request([4, 4, 4], 20)]
    for some in (requests, requests[:1]):
        assert engine.write(some, reuse=False).tokens == engine.plain(some).tokens
    own = load(Target(CausalLM(made), "tiny"), drafter, "chain")
    assert own.plain(requests).tokens == engine.plain(requests).tokens


@pytest.mark.parametrize("name", ["edd", "vdm"])
def test_a_drafter_with_the_targets_embedding_runs_in_few_operations(name: str) -> None:
    target = Target(CausalLM(model(KNOWN["llama"])), "target")
    drafter = build("drafter", f"{name}:shared=true").example(target)
    network: Any = drafter.decoder.model
    with torch.inference_mode():
        assert HFRunner(network, few_operations=True).few_operations() is not None
