"""Make a model batch invariant: pad each layer to widths at which its bits do not change.

For each kind of layer, the widths are searched at which a row has the same bits in every pass, and
passes are padded or cut to them (`invariant_widths.py`). With batch-invariant attention
(`invariant_attention.py`), a model then gives a token bitwise the same logits in a prompt, in a step of
its own and in a tree. `target/batch_invariance_choice.py` checks this.

Shapes: R rows of a batch, n tokens or rows of a pass, D and E entries of a row before and after.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from draftree.models.backend_names import EXACT
from draftree.models.causal_lm import CausalLM
from draftree.models.cpu_linear import KernelLinear
from draftree.models.forward_batch import ForwardBatch
from draftree.models.hf_runner import HFRunner, Rotation, join_rotations
from draftree.models.invariant_experts import are_experts, expert, make_expert_forward
from draftree.models.invariant_widths import Made, Rows, Widths, find_elementwise_widths, widths
from draftree.models.model_runner import ModelRunner
from draftree.models.native_linear import NativeLinear
from draftree.models.weight_sharing_copy import share_weights

ROPE_BLOCK = 32
"""Number of positions in one computation of a rotary embedding."""


@dataclass(frozen=True)
class LayerCall:
    """Hold example arguments of a layer, and the widths of its input and output.

    Attributes:
        args: the layer's arguments, reduced to one vector each.
        entries: D, the width of the input vectors.
        to: E, the width of the output if its entries are computed independently of one another, as
            in activations and routers; else 0.
    """

    args: tuple[Tensor, ...]
    entries: int
    to: int


@dataclass
class LayerKind:
    """Describe a kind of layer and its batch-invariant forward.

    Attributes:
        widths: the batch widths at which it is computed; None if no width is stable or its weights
            are of an unknown kind.
        own: the original forward of one such layer.
        ours: the batch-invariant forward; the same as `own` if it needs no change.
        args: example arguments of both.
        count: the number of such layers in the model.
    """

    widths: Widths | None
    own: Callable[..., Any]
    ours: Callable[..., Any]
    args: tuple[Tensor, ...]
    count: int = 0


@final
class BatchInvariantModel:
    """Run passes in which a token's bits do not depend on the other tokens in the batch.

    Linear layers, activations, experts and rotary embeddings are made batch invariant in a copy of
    the model that shares its weights. Native kernels are batch invariant already.

    Args:
        decoder: the model, which stays unchanged.
        known: the widths that were found earlier, by kind of layer.

    Attributes:
        kinds: the kinds of layers by name; a kind without stable widths is not changed.
        runner: the runner of batch-invariant passes.
    """

    def __init__(self, decoder: CausalLM, known: Mapping[str, Widths | None] = {}) -> None:
        self.kinds: dict[str, LayerKind] = {}
        self.runner: ModelRunner = decoder.runner
        if decoder.native_kinds:
            return
        own = HFRunner(share_weights(decoder.hf.model))
        self.runner, layers = own, _layers(own, decoder)
        for module in own.model.modules():
            if module in layers:
                self._add(module, layers[module], decoder, known)
            elif any(p.dim() > 1 for p in module.parameters(recurse=False)) and not isinstance(
                module, nn.Embedding
            ):
                unknown = self.kinds.setdefault(
                    type(module).__name__, LayerKind(None, module.forward, module.forward, ())
                )
                unknown.count += 1
            elif "rope_type" in vars(module):
                _change(module, _rope_in_blocks(vars(module).get("forward")))
        own.model.set_attn_implementation(EXACT)

    def use(self, decoder: CausalLM) -> None:
        """Make a decoder's passes batch invariant."""
        if isinstance(self.runner, HFRunner):
            decoder.use_runner(self.runner)

    @property
    def exact(self) -> bool:
        """Return whether attention is batch invariant too.

        Some models allow only their own attention implementation.
        """
        return (
            not isinstance(self.runner, HFRunner)
            or self.runner.config._attn_implementation == EXACT
        )

    def _add(
        self,
        module: nn.Module,
        seen: LayerCall,
        decoder: CausalLM,
        known: Mapping[str, Widths | None],
    ) -> None:
        name, own = f"{type(module).__name__} {seen.entries}", module.forward
        name = " ".join((name, *(str(tuple(p.shape)) for p in module.parameters())))
        many = are_experts(module)
        before = {**known, **self.widths}
        ours = own
        if name in before:
            found = before[name]
        elif isinstance(module, KernelLinear) and isinstance(module.kernel, NativeLinear):
            found = Widths()  # batch invariant at every width
        else:
            at_best = find_elementwise_widths(seen.to) if seen.to else Widths()
            found = widths(
                expert(module, 0) if many else own,
                seen.entries,
                decoder.dtype,
                decoder.device,
                at_best,
            )
        if found is not None and (many or found != Widths()):
            ours = _change(
                module,
                make_expert_forward(found.apply)
                if many
                else _make_invariant_forward(vars(module).get("forward"), found),
            )
        self.kinds.setdefault(name, LayerKind(found, own, ours, seen.args)).count += 1

    @property
    def widths(self) -> dict[str, Widths | None]:
        """Return the batch widths at which each kind of layer is computed, by its name."""
        return {name: kind.widths for name, kind in self.kinds.items()}


def _change(module: nn.Module, to: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the forward of a module in draftree's copy of the model, and return the new one."""
    module.forward = MethodType(to, module)
    return module.forward


@torch.inference_mode()
def _layers(runner: HFRunner, decoder: CausalLM) -> dict[nn.Module, LayerCall]:
    """Return the modules of a model that compute each token separately, with example arguments.

    They are experts, and layers without submodules that map each vector to a vector.
    """
    found: dict[nn.Module, LayerCall] = {}

    def note(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        rows, made = args[0] if args else None, (out,) if isinstance(out, Tensor) else out
        if (
            not isinstance(rows, Tensor)
            or not rows.is_floating_point()
            or not isinstance(made, tuple)
        ):
            return
        one = tuple(
            each.reshape(-1, each.shape[-1])[:1] for each in args if isinstance(each, Tensor)
        )
        if are_experts(module):
            found[module] = LayerCall(one, rows.shape[-1], 0)
        elif len(args) == 1 and (
            made[0] is out or all(isinstance(kind, Tensor) and kind.dim() == 2 for kind in made)
        ):
            by_entries = len(made) > 1 or not list(module.parameters())
            found[module] = LayerCall(
                one, rows.shape[-1], by_entries * max(kind.shape[-1] for kind in made)
            )

    noted = [m for m in runner.model.modules() if are_experts(m) or not list(m.children())]
    hooks = [m.register_forward_hook(note) for m in noted]
    batch = ForwardBatch.chains([np.zeros(2, np.int64)], np.zeros(1, np.int64), decoder.device)
    runner.forward(batch, decoder.new_cache(1, 2))
    for hook in hooks:
        hook.remove()
    return found


def _make_invariant_forward(own: Rows | None, kept: Widths) -> Callable[..., Made]:
    """Return a batch-invariant forward of a layer, as a function of the layer and its input.

    Args:
        own: the forward that was set on the layer itself; None if it has that of its class.
        kept: the batch widths at which it is computed.
    """

    def forward(module: nn.Module, rows: Tensor) -> Made:
        stock: Rows = own or partial(type(module).forward, module)
        flat: Made = kept.apply(stock, rows.reshape(-1, rows.shape[-1]).contiguous())
        return flat.reshape(*rows.shape[:-1], flat.shape[-1]) if isinstance(flat, Tensor) else flat

    return forward


def _rope_in_blocks(own: Callable[..., Rotation] | None) -> Callable[..., Rotation]:
    """Return a rotary embedding's forward that computes `ROPE_BLOCK` positions at a time.

    No position is then in the remainder of a vectorised loop, whose instructions may round
    otherwise. Each block ends with the largest position of all, because the frequencies may depend
    on it.
    """

    def forward(
        module: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Rotation:
        stock = own or partial(type(module).forward, module)
        last, parts = position_ids.amax(-1, keepdim=True), []
        for block in position_ids.split(ROPE_BLOCK - 1, dim=-1):
            *rows, count = block.shape
            filled = torch.cat((block, last.expand(*rows, ROPE_BLOCK - count)), dim=-1)
            parts.append((stock(x, filled, *args, **kwargs), count))
        return join_rotations(parts, dim=-2)

    return forward
