"""Attention by groups: the numbers of transformers' `sdpa`, without its copies of keys and values."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from draftree import Request, Target, load
from draftree.errors import UserError
from draftree.models.grouped_attention import MAX_GROUPED_TOKENS, grouped_attention
from draftree.target import load_weights, target
from draftree.target.kernel_choice import use_grouped_attention
from draftree.testing import tiny_target
from folders import target_folder


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not any(
            found.data_ptr() == a.data_ptr() for a in args if torch.is_tensor(a)
        ):
            self.made = max(self.made, found.numel())
        return found


def given(
    n: int, heads: int, groups: int, slots: int, per_head: bool, boolean: bool
) -> tuple[Any, ...]:
    torch.manual_seed(n)
    q, k, v = (torch.randn(2, h, s, 8) for h, s in ((heads, n), (groups, slots), (groups, slots)))
    seen = torch.rand(2, heads if per_head else 1, n, slots + 3) < 0.5
    seen[..., 0] = True
    return (
        q,
        k,
        v,
        seen
        if boolean
        else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min),
    )


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize(
    ("n", "heads", "groups"),
    [(1, 8, 2), (5, 8, 2), (61, 4, 1), (7, 4, 4), (MAX_GROUPED_TOKENS + 1, 4, 2)],
)
def test_numbers_are_those_of_repeated_heads(
    n: int, heads: int, groups: int, boolean: bool, per_head: bool
) -> None:
    q, k, v, mask = given(n, heads, groups, n + 40, per_head, boolean)
    module = torch.nn.Module()
    module.num_key_value_groups = heads // groups
    found, weights = grouped_attention(
        module,
        q,
        k,
        v,
        mask[..., : n + 40] if n in (1, MAX_GROUPED_TOKENS + 1) or heads == groups else mask,
    )
    each = heads // groups
    wide_k, wide_v = (t.repeat_interleave(each, 1) for t in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, wide_k, wide_v, mask[..., : n + 40]
    )
    torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert weights is None


def test_keys_and_values_are_not_copied() -> None:
    q, k, v, mask = given(8, 32, 8, 4096, False, False)
    module = torch.nn.Module()
    module.num_key_value_groups = 4
    with Largest() as seen:
        grouped_attention(module, q, k, v, mask)
    assert seen.made < k.numel()  # the mask of four heads, and the result
    with Largest() as seen:
        grouped_attention(
            module, q, k, v, mask[..., :4096], position_bias=torch.zeros(1, 1, 8, 4096)
        )
    assert seen.made >= 4 * k.numel()


def test_texts_are_those_of_sdpa() -> None:
    written = []
    for name in ("sdpa", "grouped"):
        model: Any = tiny_target().decoder.model
        model.set_attn_implementation(name)
        written.append(
            load(Target.of(model), "pld", "pct")
            .write([Request([1, 2, 3, 1, 2], 20), Request([4, 4], 20)])
            .tokens
        )
    assert written[0] == written[1]


def test_grouped_attention_is_chosen_on_a_gpu_for_shared_heads(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(target_folder(tmp_path / "t"))
    assert Target.load(folder).decoder.config._attn_implementation == "sdpa"
    assert (
        Target.load(folder, attn_implementation="grouped").decoder.config._attn_implementation
        == "grouped"
    )
    taken = list[Any]()
    monkeypatch.setattr(target, "use_grouped_attention", taken.append)
    monkeypatch.setattr(target, "resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(load_weights, "find_spec", lambda name: None)
    monkeypatch.setattr(LlamaForCausalLM, "to", lambda self, *_: self)
    Target.load(folder, torch.float32)
    assert len(taken) == 1
    Target.load(folder, torch.float32, attn_implementation="sdpa")
    assert len(taken) == 1


@pytest.mark.parametrize(
    ("groups", "attention", "wanted"),
    [(2, "sdpa", "grouped"), (4, "sdpa", "sdpa"), (2, "eager", "eager")],
)
def test_only_copies_are_replaced(groups: int, attention: str, wanted: str) -> None:
    config = LlamaConfig(
        vocab_size=9, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=groups, attn_implementation=attention,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    use_grouped_attention(model)
    assert model.config._attn_implementation == wanted


def test_attention_sinks_are_refused() -> None:
    q, k, v, mask = given(2, 4, 2, 3, False, True)
    with pytest.raises(UserError, match="Module has attention sinks, which 'grouped' does not"):
        grouped_attention(torch.nn.Module(), q, k, v, mask, s_aux=torch.zeros(4))
