"""What keeps states right: an oracle, mistakes that must show, threads, stock code left as it was, and what is refused."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_recurrent_trees import CLOSE, LENGTHS, errors, grown, some_paths
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from draftree.doctor import forward_parity
from draftree.doctor.state_memory import state_findings
from draftree.drafters.eagle import EAGLE
from draftree.drafters.eagle3 import EAGLE3
from draftree.drafters.edd import EDD
from draftree.drafters.glide import GLIDE
from draftree.drafters.hydra import Hydra
from draftree.drafters.medusa import Medusa
from draftree.drafters.mtp import MTP
from draftree.drafters.neural.layer_stack import CACHE
from draftree.drafters.suffix import Suffix
from draftree.engine import Engine, generate_plain
from draftree.errors import UserError
from draftree.models import architecture_checks
from draftree.models.causal_lm import CausalLM
from draftree.models.recurrent import recurrences, replaced_functions, state_cache
from draftree.models.recurrent.recurrences import Stash
from draftree.models.recurrent.state_cache import Snapshot, States
from draftree.models.recurrent.token_ancestors import TreePaths
from draftree.policies.eagle2 import EAGLE2
from draftree.request import Request
from draftree.target.target import HiddenStateSpec, Target
from hybrids import CLAMPED, FAMILIES, RULES, OneByOne, hybrid, in_float64
from path_rows import PathRows
from selection import one_in

SEEN = 1e-4
"""An error that no rounding makes."""


@pytest.mark.parametrize(
    "family",
    [
        *RULES.values(),
        *(pytest.param(f, marks=pytest.mark.long) for f in FAMILIES if f not in RULES.values()),
    ],
)
def test_a_tree_is_what_stock_mixers_make_of_its_paths(family: str) -> None:
    """The third route, which shares no mathematics with ours."""
    model, draw = hybrid(family), np.random.default_rng(5)
    with in_float64(model):
        target = Target(CausalLM(model), family)
        prompts = [draw.integers(2, 90, n) for n in LENGTHS]
        ours = target.new_cache(3, 64)
        theirs = target.new_cache(3, 64)
        oracle = PathRows(target, 3)
        pairs = [
            (
                target.prefill(ours, prompts, HiddenStateSpec()).logits,
                oracle.prefill(theirs, prompts),
            )
        ]
        for _ in range(2):
            tree = grown(draw, draw.integers(2, 90, 3), 10)
            pairs.append(
                (target.verify(ours, tree, HiddenStateSpec()).logits, oracle.verify(theirs, tree))
            )
            verdict = some_paths(draw, tree)
            target.commit(ours, tree, verdict)
            oracle.commit(theirs, tree, verdict)
    assert max(float((mine - other).abs().max()) for mine, other in pairs) < CLOSE


@property  # type: ignore[misc]
def _by_slot(paths: TreePaths) -> Tensor:
    """Every token's path goes through all slots before it."""
    return torch.ones(paths.seen.shape, dtype=torch.bool).tril(
        paths.seen.shape[2] - paths.seen.shape[1]
    )


@property  # type: ignore[misc]
def _without_itself(paths: TreePaths) -> Tensor:
    seen = paths.seen.copy()
    np.put_along_axis(seen, paths.columns[:, :, None], False, 2)
    return torch.from_numpy(seen)


def _neighbours(paths: TreePaths, k: int) -> Tensor:
    rows, n = paths.columns.shape
    begins = torch.arange(rows)[:, None] * (k + paths.slots) + 1 + torch.arange(n)
    return begins.flatten() + torch.arange(k)[:, None]


def _one_line(paths: TreePaths) -> list[tuple[Tensor, Tensor, Tensor]]:
    rows = torch.arange(len(paths.parents))
    return [
        (rows, torch.full_like(rows, slot), torch.full_like(rows, slot - 1))
        for slot in range(paths.slots)
    ]


def _all_nodes(stash: Stash, state: Tensor, row: int, path: Tensor) -> None:
    several = next(iter(stash.parts.values())).shape[-2]
    stash.fold(state, {name: part[row, :, :several] for name, part in stash.parts.items()})


def _first_nodes(stash: Stash, state: Tensor, row: int, path: Tensor) -> None:
    stash.fold(state, {name: part[row, :, : len(path)] for name, part in stash.parts.items()})


def _clamped(x: Tensor) -> Tensor:
    return torch.nn.functional.softplus(x).clamp(min=0.001)


MISTAKES: dict[str, tuple[str, Any, str, Any]] = {
    "a convolution over neighbours": ("lfm2", TreePaths, "windows", _neighbours),
    "a convolution over neighbours, before a rule": (
        "qwen3_5_text",
        TreePaths,
        "windows",
        _neighbours,
    ),
    "the delta rule by slots": ("qwen3_5_text", TreePaths, "mask", _by_slot),
    "the delta rule by slots, a decay for each channel": (
        "kimi_linear",
        TreePaths,
        "mask",
        _by_slot,
    ),
    "state space duality by slots": ("bamba", TreePaths, "mask", _by_slot),
    "the selective scan by slots": ("jamba", TreePaths, "levels", property(_one_line)),
    "the delta rule without its own write": ("qwen3_5_text", TreePaths, "mask", _without_itself),
    "state space duality without its own write": ("bamba", TreePaths, "mask", _without_itself),
    "all nodes folded": ("qwen3_5_text", Stash, "move", _all_nodes),
    "all nodes of state space duality folded": ("bamba", Stash, "move", _all_nodes),
    "all nodes of the selective scan folded": ("mamba", Stash, "move", _all_nodes),
    "the first nodes folded": ("qwen3_5_text", Stash, "move", _first_nodes),
    "a step that is clamped in trees": ("nemotron_h", replaced_functions, "softplus", _clamped),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, where, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(where, name, wrong)
    assert max(errors(family, steps=2, nodes=6)) > SEEN


def test_a_strict_system_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's own u is no part of what it is reduced by."""
    stock = torch.linalg.solve_triangular
    own = lambda a, b, **how: stock(a + 1.5 * torch.eye(a.shape[-1], dtype=a.dtype), b, upper=False)
    monkeypatch.setattr(recurrences.torch.linalg, "solve_triangular", own)
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(modeling_qwen3_5, "torch", torch)
        assert max(errors("qwen3_5_text", steps=1, nodes=3)) > SEEN


@pytest.mark.parametrize("family", RULES.values())
def test_a_snapshot_is_no_alias(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what was committed then, whatever was written since; an alias is not."""

    def again() -> bool:
        target = Target(CausalLM(hybrid(family)), family)
        cache, prompt = target.new_cache(2, 64), np.arange(2, 9)
        first = target.prefill(cache, [prompt, prompt[:4]], HiddenStateSpec()).logits
        before = [t.clone() for t in _bases(cache.states)]
        target.prefill(
            cache, [np.arange(2, 22), np.arange(3, 9)[[0, 1, 2, 3, 3, 3]]], HiddenStateSpec()
        )
        assert cache.truncate(np.array([8, 5])).tolist() == [7, 4]
        same = all(map(torch.equal, before, _bases(cache.states)))
        more = [np.append(prompt, 50), np.append(prompt[:4], 50)]
        fresh = target.prefill(target.new_cache(2, 64), more, HiddenStateSpec()).logits
        return (
            same
            and bool(
                torch.allclose(
                    target.prefill(cache, more, HiddenStateSpec()).logits, fresh, atol=1e-4
                )
            )
            and len(first) == 2
        )

    assert again()

    def aliased(self: States, lengths: Any) -> None:
        for row, length in enumerate(lengths.tolist()):
            if length:
                self._snapshots[row].append(Snapshot(length, tuple(t[row] for t in _bases(self))))

    monkeypatch.setattr(States, "mark", aliased)
    assert not again()


def _bases(kept: States | None) -> list[Tensor]:
    assert kept is not None
    return [*kept.tails.values(), *kept.bases.values()]


def test_snapshots_are_few_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(CausalLM(hybrid("qwen3_5_text")), "x")
    cache = target.new_cache(2, 64)
    assert cache.states is not None
    bare = cache.states.bytes
    for end in range(3, 30):
        target.prefill(cache, [np.arange(2, 2 + end)] * 2, HiddenStateSpec())
    assert cache.states.bytes == bare * (1 + state_cache.SNAPSHOTS)
    monkeypatch.setattr(state_cache, "BYTES", 3 * bare // 2)  # three rows' worth
    target.prefill(cache, [np.arange(2, 40)] * 2, HiddenStateSpec())
    assert cache.states.bytes == bare + 3 * bare // 2
    assert cache.truncate(np.array([20, 20])).tolist() == [0, 0]


@pytest.mark.parametrize("family", RULES.values())
def test_the_bytes_that_are_told_are_those_that_are_held(family: str) -> None:
    """By `doctor`, for a sequence and a node; by the figures of a text, with its snapshots."""
    target = Target(CausalLM(hybrid(family, torch.float32)), family)
    cache, tree = target.new_cache(1, 64), grown(np.random.default_rng(0), np.array([5]), 7)
    told = {finding.name: finding.value for finding in state_findings(target)}
    assert told["state"] == sum(t.nbytes for t in _bases(cache.states)) == cache.state_bytes
    target.verify(cache, tree, HiddenStateSpec())
    scratch: Any = cache.states and cache.states._scratch
    stashed = [
        *scratch.columns.values(),
        *(p for made in scratch.made.values() for p in made.parts.values()),
    ]
    assert told["stash"] == sum(t.nbytes for t in stashed) / 8
    stats = generate_plain(target, [Request([5, 9, 7], 3)]).stats
    assert stats.as_json()["state_bytes"] == 2 * told["state"], (
        "the state and that of the prompt's end"
    )


def test_other_models_have_no_states_to_tell_of() -> None:
    target = Target.load("demo")
    assert not list(state_findings(target))
    assert generate_plain(target, [Request([5, 9, 7], 3)]).stats.state_bytes == 0


@pytest.mark.parametrize(("family", "by"), one_in(2, list(RULES.values()), [1, 2, 3, 4, 64, 65]))
def test_a_prompt_in_parts_is_the_prompt(family: str, by: int) -> None:
    """Parts of 1, K − 1 and K tokens, of a chunk and one more; ragged rows."""
    model, draw = hybrid(family), np.random.default_rng(2)
    with in_float64(model):
        target = Target(CausalLM(model), family)
        prompts = [draw.integers(2, 90, n) for n in (5 + 2 * by if by < 9 else 140, 3 + by)]
        cache = target.new_cache(2, 200)
        for end in range(by, max(map(len, prompts)) + by, by):
            parts = [p[:end] for p in prompts]
            grew = np.array([r for r, part in enumerate(parts) if len(part) > cache.lengths[r]])
            if len(grew):
                target.prefill(cache, [parts[r] for r in grew], HiddenStateSpec(), grew)
        for row, prompt in enumerate(prompts):
            whole = target.new_cache(1, 200)
            target.prefill(whole, [prompt], HiddenStateSpec())
            for ours, theirs in zip(_bases(cache.states), _bases(whole.states), strict=True):
                assert float((ours[row] - theirs[0]).abs().max()) < CLOSE


def test_a_drafted_chain_is_a_tree() -> None:
    """A chain of drafts looks like a prompt; of one that is cut after its first token only that may be kept."""
    model = hybrid("qwen3_5_text")
    prompt = [5, 9, 7, 11, 5]
    written = OneByOne(model, prompt).write(12)
    wrong = [
        prompt + [(t + 1 + i % 2) % 90 for i, t in enumerate(written)],
        prompt + written[:1] + [3] * 11,
    ]
    for text in wrong:
        target = Target(CausalLM(model), "x")
        engine = Engine(target, Suffix().open(target), EAGLE2(nodes=4, depth=4, width=1))
        engine.write([Request(text, 3)])
        assert engine.write([Request(prompt, 12)]).tokens == [written]


def test_two_threads_one_of_them_stock() -> None:
    """Both write what they write alone, over one modeling module."""
    mine, other = hybrid("qwen3_5_text"), hybrid("qwen3_5_text", seed=4)
    prompt, target = [5, 9, 7, 11, 5, 9, 7], Target(CausalLM(mine), "x")
    alone = OneByOne(other, prompt).write(40)
    ours = (
        Engine(target, Suffix().open(target), EAGLE2(nodes=8))
        .write([Request(prompt, 40)])
        .tokens[0]
    )
    found: dict[str, list[list[int]]] = {"stock": [], "ours": []}

    def run(name: str, write: Callable[[], list[int]]) -> None:
        found[name] += [write() for _ in range(3)]

    engine = Engine(target, Suffix().open(target), EAGLE2(nodes=8))
    threads = [
        threading.Thread(target=run, args=("stock", lambda: OneByOne(other, prompt).write(40))),
        threading.Thread(
            target=run,
            args=("ours", lambda: engine.write([Request(prompt, 40)], reuse=False).tokens[0]),
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"stock": [alone] * 3, "ours": [ours] * 3}
    assert ours == OneByOne(mine, prompt).write(40)


@pytest.mark.parametrize("family", RULES.values())
def test_stock_code_is_left_as_it_is(family: str) -> None:
    """Bit-equal outputs, decoding and gradients before and after; no function of the module is replaced."""
    model = hybrid(family, torch.float32)
    module: Any = __import__("sys").modules[type(model).__module__]
    installed = {
        name: vars(module)[name] for name in replaced_functions.NAMES.keys() & vars(module).keys()
    }

    def outcome() -> list[Tensor]:
        ids = torch.arange(2, 14)[None]
        model.train().requires_grad_(True)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        model.eval().requires_grad_(False)
        return [*gradients, OneByOne(model, range(2, 14)).after([3, 4, 5]).logits]

    before = outcome()
    decoder = CausalLM(model)
    Target(decoder, family).prefill(decoder.new_cache(1, 8), [np.arange(2, 6)], HiddenStateSpec())
    assert all(map(torch.equal, before, outcome()))
    assert all(vars(module)[name] is function for name, function in installed.items())


def test_a_kernel_for_a_whole_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("qwen3_5_text")
    monkeypatch.setattr(
        modeling_qwen3_5.Qwen3_5GatedDeltaNet,
        "forward",
        lambda self, hidden_states, **_: hidden_states,
    )
    with pytest.raises(
        UserError, match=r"layer 0 \(linear_attention\) hands its cache neither keys nor a state"
    ):
        CausalLM(model).new_cache(1, 8)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "causal_conv1d_fn",
            r"the convolution of layer 0 \(linear_attention\) is computed by a kernel that knows no tree",
        ),
        (
            "torch_chunk_gated_delta_rule",
            r"layer 0 \(linear_attention\) folds the text into a state by a function",
        ),
    ],
)
def test_a_function_that_is_not_ours_is_refused(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        replaced_functions,
        "NAMES",
        {other: rule for other, rule in replaced_functions.NAMES.items() if other != name},
    )
    monkeypatch.setattr(
        replaced_functions, "_class_of", replaced_functions._class_of.__wrapped__
    )  # classes that were made before know the name
    decoder = CausalLM(hybrid("qwen3_5_text"))
    with pytest.raises(UserError, match=f"^Qwen3_5ForCausalLM is not supported: {told}"):
        _ = decoder.shapes


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("lfm2")
    monkeypatch.setattr(architecture_checks.transformers, "__version__", "5.22.3")
    with pytest.raises(UserError, match=r"takes transformers 5\.23 or newer, and this is 5\.22\.3"):
        CausalLM(model)


def test_code_that_is_not_transformers_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("lfm2")
    monkeypatch.setattr(type(model), "__module__", "transformers_modules.someone.modeling_lfm2")
    with pytest.raises(UserError, match="its code is not transformers' own"):
        CausalLM(model)


@pytest.mark.parametrize("family", ["jamba", "mamba", "falcon_mamba"])
def test_transformers_still_forgets_the_state(family: str) -> None:
    """Where several tokens follow one. If this fails it is mended: `Answers.s6` could hand the state to the stock scan."""
    model = hybrid(family)
    assert not torch.allclose(read_on(model), one_by_one(model), atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "bamba", "lfm2"])
def test_other_rules_keep_it(family: str) -> None:
    model = hybrid(family)
    assert torch.allclose(read_on(model), one_by_one(model), atol=1e-4)


@pytest.mark.parametrize("family", CLAMPED)
def test_transformers_still_clamps_the_step_in_prompts_alone(family: str) -> None:
    """If this fails it is mended: `SlotCache.reusable` could be all."""
    model = hybrid(family)
    for name, weight in model.named_parameters():
        if "dt_bias" in name:
            weight.sub_(6.0)  # steps below the bound
    with in_float64(model):
        assert not torch.allclose(
            OneByOne(model, PROMPT).logits,
            OneByOne(model, PROMPT[:1]).after(PROMPT[1:]).logits,
            atol=1e-4,
        )


def test_transformers_still_counts_bambas_positions_from_zero() -> None:
    """Where none are given."""
    model: Any = hybrid("bamba")
    cache = OneByOne(model, PROMPT).cache
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([[7]]), use_cache=True, **{CACHE: cache}).logits[0, -1]
    assert not torch.allclose(out, OneByOne(model, PROMPT).after([7]).logits, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "bamba"])
def test_transformers_still_lets_padding_behind_a_state_count(family: str) -> None:
    """If this fails it is mended; our rows are padded at the end, and their padding neither decays nor writes."""
    model: Any = hybrid(family)
    cache = OneByOne(model, PROMPT[:4]).cache
    ids, mask = torch.tensor([[0, 0, *PROMPT[4:]]]), torch.tensor([[*[1] * 4, 0, 0, *[1] * 4]])
    at = torch.tensor([[0, 0, 4, 5, 6, 7]])
    with torch.inference_mode():
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=at, use_cache=True, **{CACHE: cache}
        ).logits[0, -1]
    assert not torch.allclose(out, one_by_one(model), atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_bits_are_refused_by_name(family: str) -> None:
    with pytest.raises(UserError, match="gives a token other bits in company"):
        Target.of(hybrid(family, torch.float32), exactness="bits")


PROMPT = [5, 9, 7, 11, 5, 9, 7, 11]


def read_on(model: PreTrainedModel) -> Tensor:
    """Logits of stock code after four tokens and then four at once."""
    reader = OneByOne(model, PROMPT[:4])
    reader._read(PROMPT[4:])
    return reader.logits


def one_by_one(model: PreTrainedModel) -> Tensor:
    """Likewise, one after the other."""
    return OneByOne(model, PROMPT[:4]).after(PROMPT[4:]).logits


TRAINED = (EAGLE, EAGLE3, Medusa, Hydra, MTP, EDD, GLIDE)


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_drafters_are_trained_as_they_decode_or_are_refused_by_name(
    family: str, method: Any
) -> None:
    target = Target(CausalLM(hybrid(family, torch.float32)), family)
    if family == "mamba2" and method in (MTP, EDD, GLIDE):
        with pytest.raises(
            UserError, match=f"^{method.kind()}: Mamba2ForCausalLM is not supported: "
        ):
            method().example(target)
        return
    tokens = np.stack([np.random.default_rng(1).integers(2, 90, 17)] * 2)
    assert forward_parity.largest_difference(target, method().example(target), tokens, 4, 1) < SEEN
