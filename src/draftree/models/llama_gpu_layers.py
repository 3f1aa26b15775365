"""Run Llama-like models on a GPU in few torch operations.

A layer of transformers takes some forty operations, most of them on a few numbers. On a GPU each is
a kernel of at least two microseconds, so that a pass over one token of 32 layers spends a third of
its time on them. Here a layer takes half as many: norms are one operation, queries and keys are
rotated together, and sums are part of the products before them. The weights are the model's own,
and its modules stay as they are.

Shapes: R sequences, n tokens of each, S slots, D hidden size, H query heads, G key-value heads, W
width of a head, V vocabulary.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftree.models.backend_names import GROUPED
from draftree.models.grouped_attention import MAX_GROUPED_TOKENS, attend_by_group
from draftree.models.llama_structure import (
    CHILDREN,
    STACK,
    causal_mask,
    child_names,
    epsilon,
    first_linears,
    is_rms_norm,
    linears,
    module_kind,
    norms,
)
from draftree.models.numeric_agreement import differs_by_rounding, relative_distance
from draftree.models.one_pass_caches import PassThroughCache

COLLECTING_HOOKS = "transformers.utils.output_capturing"
"""The module of the hooks by which transformers collects hidden states."""
TRIAL_TOKENS = 5
"""Number of tokens of the pass by which `LlamaLayers` are compared with the model."""


@final
class LlamaLayers:
    """Run the pass of a model whose layers are all Llama-like.

    Args:
        model: a causal language model for which `LlamaLayers.of` does not return None.
        stack: the transformer in the model, without the LM head.
        kinds: the attention type of each layer, which selects its mask.
    """

    def __init__(self, model: Any, stack: Any, kinds: tuple[str, ...]) -> None:
        self._model, self._stack = model, stack
        self._layers = [
            _Layer(module, i, kind)
            for i, (module, kind) in enumerate(zip(stack.layers, kinds, strict=True))
        ]

    @classmethod
    def of(cls, model: Any, stack: Any, kinds: tuple[str, ...]) -> Self | None:
        """Return the pass of a model; None if its results differ by more than rounding.

        Args:
            model: a causal language model.
            stack: the transformer in the model, without the LM head.
            kinds: the attention type of each layer.
        """
        if {name for name, _ in stack.named_children()} != STACK or not all(
            map(_fits, stack.layers)
        ):
            return None
        attention = stack.config._attn_implementation  # `eager` differs between models
        if (
            len(stack.layers) != len(kinds)
            or attention not in ALL_ATTENTION_FUNCTIONS
            or _is_hooked(model.modules())
        ):
            return None
        made = cls(model, stack, kinds)
        with torch.inference_mode():
            return made if made._agrees() else None

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Mapping[str, Tensor],
        cache: Cache,
        keep: int | Tensor = 0,
        entries: Iterable[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run a pass.

        Args:
            tokens: [R, n] ids.
            positions: [R, n] position ids.
            masks: [R, 1, n, S] added to the scores, by attention type.
            cache: stores keys and values, and returns the keys and values of all visible slots.
            keep: transformers' `logits_to_keep`: 0 for all columns, or a tensor of columns.
            entries: the requested hidden states. With L layers, i < L is the input of layer i, L is
                the output of the final norm, and L + 1 is its input.

        Returns:
            Logits [R, n or fewer, V], and hidden states [R, n, D] by entry.
        """
        x: Tensor = self._stack.embed_tokens(tokens)
        wanted = set(entries)
        caught = dict[int, Tensor]()
        last = len(self._layers)
        cosines, sines = self._stack.rotary_emb(x, positions)
        turned = cosines[:, :, None], _negate_first_half(sines)[:, :, None]
        seen = {kind: _Seen(mask, self._layers[0].each) for kind, mask in masks.items()}
        x = x.clone()  # sums are written into it
        for i, layer in enumerate(self._layers):
            if i in wanted:
                caught[i] = x.clone()
            layer.add_to(x, turned, seen[layer.kind], cache)
        normed = _apply_norm(x, self._stack.norm)
        caught |= {last: normed, last + 1: x}
        read = normed if isinstance(keep, int) else normed[:, keep]
        logits: Tensor = self._model.get_output_embeddings()(read)
        return logits, {entry: caught[entry] for entry in wanted}

    def _agrees(self) -> bool:
        """Return whether each kind of layer and a whole pass agree with the original model."""
        kinds = {module_kind(layer.module): layer for layer in self._layers}
        device = self._stack.norm.weight.device
        if not all(layer.agrees(self._stack.rotary_emb, device) for layer in kinds.values()):
            return False
        ids = (
            torch.arange(TRIAL_TOKENS, device=device)[None]
            % self._model.config.get_text_config(decoder=True).vocab_size
        )
        mask = causal_mask(TRIAL_TOKENS, self._stack.norm.weight)
        logits, hidden = self(
            ids,
            ids,
            dict.fromkeys({layer.kind for layer in self._layers}, mask),
            PassThroughCache(),
            entries=(0,),
        )
        embedded = list[Tensor]()
        note = lambda _module, args: embedded.append(args[0])
        hook = self._stack.layers[0].register_forward_pre_hook(note)
        try:
            wanted = self._model(input_ids=ids, position_ids=ids, use_cache=False)
        finally:
            hook.remove()
        # Rounding that one layer leaves is enlarged by all later ones: what this must notice, a
        # factor or a cap, is larger.
        return (
            relative_distance(logits, wanted.logits) < 0.2
            and relative_distance(hidden[0], embedded[0]) == 0
        )


@final
class _Layer:
    """Hold one layer and the sizes that its pass needs.

    Args:
        module: the transformers layer.
        index: its index in the model.
        kind: its attention type.

    Attributes:
        module: the transformers layer.
        kind: the attention type.
        each: query heads that share a key-value head.
    """

    def __init__(self, module: Any, index: int, kind: str) -> None:
        self.module = module
        self.kind = kind
        self._index = index
        self._width = int(module.self_attn.head_dim)
        self._heads = module.self_attn.o_proj.in_features // self._width
        outputs = sum(each.out_features for each in first_linears(module.self_attn))
        self._groups = (outputs // self._width - self._heads) // 2
        self.each = self._heads // self._groups

    def add_to(self, x: Tensor, turned: tuple[Tensor, Tensor], seen: "_Seen", cache: Cache) -> None:
        """Add the output of attention and feed-forward layer to hidden states [R, n, D] in place.

        Args:
            x: [R, n, D] the hidden states, which are written to.
            turned: [R or 1, n, 1, W] cosines, and sines whose first half is negated.
            seen: the mask.
            cache: stores keys and values.
        """
        module = self.module
        heads = self._heads
        groups = self._groups
        attention, mlp, (rows, n, _) = module.self_attn, module.mlp, x.shape
        read = _apply_norm(x, module.input_layernorm)
        first = [each(read).view(rows, n, -1, self._width) for each in first_linears(attention)]
        q, k, v = first if len(first) == 3 else first[0].split((heads, groups, groups), dim=2)
        if hasattr(attention, "q_norm"):
            q, k = _apply_norm(q, attention.q_norm), _apply_norm(k, attention.k_norm)
        both = torch.cat((q, k), dim=2)
        both = torch.addcmul(both * turned[0], both.roll(self._width // 2, -1), turned[1])
        q, k = both[:, :, :heads].transpose(1, 2), both[:, :, heads:].transpose(1, 2)
        keys, values = cache.update(k, v.transpose(1, 2), self._index)
        _add_product(x, self._attend(q, keys, values, seen), attention.o_proj)
        read = _apply_norm(x, module.post_attention_layernorm)
        inner = [each(read) for each in first_linears(mlp)]
        gate, up = inner if len(inner) == 2 else inner[0].chunk(2, dim=-1)
        activated = (mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn)(gate)
        _add_product(x, activated * up, mlp.down_proj)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: "_Seen") -> Tensor:
        """Return the attention output [R, n, H·W] of queries [R, H, n, W], as the model does."""
        attention, (rows, _, n, _) = self.module.self_attn, q.shape
        implementation = attention.config._attn_implementation
        if implementation == GROUPED and n <= MAX_GROUPED_TOKENS and self.each > 1:
            grouped = attend_by_group(q, keys, values, seen.grouped, attention.scaling)
            return grouped.reshape(rows, n, -1)
        interface = ALL_ATTENTION_FUNCTIONS[implementation]
        others: Tensor = interface(
            attention, q, keys, values, seen.mask, dropout=0.0, scaling=attention.scaling
        )[0]
        return others.reshape(rows, n, -1)

    def agrees(self, rotary: Any, device: torch.device) -> bool:
        """Return whether the output for random states equals that of the module up to rounding."""
        weight, draw = self.module.post_attention_layernorm.weight, torch.Generator().manual_seed(0)
        dtype = weight.dtype
        x = torch.empty(2, TRIAL_TOKENS, len(weight)).normal_(generator=draw).to(device, dtype)
        turned = rotary(x, torch.arange(TRIAL_TOKENS, device=device)[None])
        if turned[0].shape[-1] != self._width:
            return False
        mask = causal_mask(TRIAL_TOKENS, weight)
        try:
            wanted = self.module(x, attention_mask=mask, position_embeddings=turned)
        except Exception:  # a layer with other arguments is not supported
            return False
        if not isinstance(wanted, Tensor):
            return False
        found = x.clone()
        self.add_to(
            found,
            (turned[0][:, :, None], _negate_first_half(turned[1])[:, :, None]),
            _Seen(mask, self.each),
            PassThroughCache(),
        )
        return differs_by_rounding(found, wanted, x)


@final
class _Seen:
    """Hold a mask [R or 1, 1, n, S] and its copy for grouped heads [R or 1, 1, each·n, S].

    The copy repeats the mask once for each query head of a group, so that one product serves all.

    Args:
        mask: [R or 1, 1, n, S] the mask.
        each: the number of query heads that share a head of keys and values.
    """

    def __init__(self, mask: Tensor, each: int) -> None:
        self.mask = mask
        self.grouped = (
            mask if each == 1 or mask.shape[2] > MAX_GROUPED_TOKENS else mask.repeat(1, 1, each, 1)
        )


def _apply_norm(x: Tensor, norm: Any) -> Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, epsilon(norm))


def _negate_first_half(sines: Tensor) -> Tensor:
    """Return sines [R, n, W] with the first half negated, for the rotation by `roll`."""
    first, second = sines.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)


def _add_product(x: Tensor, states: Tensor, layer: nn.Linear) -> None:
    """Add a linear layer's output for states [R, n, …] to x [R, n, D] in place."""
    if layer.bias is None:
        x.view(-1, x.shape[-1]).addmm_(states.reshape(-1, states.shape[-1]), layer.weight.t())
    else:
        x += linear(states, layer.weight, layer.bias)


def _fits(module: Any) -> bool:
    """Return whether a module is a Llama-like layer with stock linear layers on one device."""
    if child_names(module) != CHILDREN:
        return False
    found = linears(module)
    if found is None or any(type(each) is not nn.Linear for each in found):
        return False
    attention = module.self_attn
    if not all(map(is_rms_norm, norms(module))):
        return False
    placed = {(p.dtype, p.device) for p in module.parameters()}
    known = isinstance(getattr(attention, "head_dim", None), int) and isinstance(
        getattr(attention, "scaling", None), float
    )
    return known and len(placed) == 1 and _rotates(attention)


def _rotates(attention: Any) -> bool:
    width: int = attention.head_dim
    inputs: int = attention.o_proj.in_features
    return width % 2 == 0 and inputs % width == 0


def _is_hooked(modules: Iterable[nn.Module]) -> bool:
    """Return whether any module's forward was changed from outside, as accelerate does.

    Hooks by which transformers collects hidden states do nothing outside its own passes. They stay
    in a model that was once asked for them.
    """
    for module in modules:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        own = (hook for hook in hooks if getattr(hook, "__module__", "") != COLLECTING_HOOKS)
        if any(own) or "forward" in vars(module):
            return True
    return False
