"""Operations that give a row the same bits in a pass of any width: a kernel's habits are found out here, and evened out.

Kernels are chosen by the width of a pass, and another kernel sums in another order; and of a tensor whose size is no multiple
of the processor's lanes the last entries go through other code than the rest. So for each kind of layer it is tried out at
which widths all rows keep their bits, in any place and company; other passes are padded, or cut into blocks.
With attention that does not depend on company either (`exact_attention.py`) a model then gives a token the same logits, bit for
bit, in a prompt, in a step of its own and in a tree; `parting` looks whether it does.

Shapes: R rows of a batch, n tokens or rows of a pass, D and E entries of a row before and after.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from draftree.errors import UserError
from draftree.models.decoder import Decoder
from draftree.models.feed import Feed

Rows = Callable[[Tensor], Tensor]
STEPS = (1, 2, 4, 8, 16, 32)
"""Widths and multiples that passes may be padded to."""
NARROW = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64)
WIDE = (96, 128, 256)
"""Widths that are tried; blocks are of the last narrow one where a wide one differs."""
CUTS = (1, 1, 2, 3, 1, 5, 8, 13, 1, 16, 33)
"""The parts in which a text is read, to be compared with it in one."""
TURNED = 32
"""Positions whose rotation is computed at a time."""


@dataclass(frozen=True)
class Widths:
    """The widths at which an operation's rows have one set of bits.

    Attributes:
        least: narrower passes are padded to it.
        multiple: of it all passes are.
        most: wider passes are cut into blocks of it; None where no width is too wide.
    """

    least: int = 1
    multiple: int = 1
    most: int | None = None

    def padded(self, n: int) -> int:
        """The width at which a pass of width n is computed."""
        return -(-max(n, self.least) // self.multiple) * self.multiple

    def apply(self, operation: Rows, rows: Tensor) -> Tensor:
        """An operation [n, D] → [n, E] at these widths."""
        if self.most is not None and len(rows) > self.most:
            return torch.cat([self.apply(operation, part) for part in rows.split(self.most)])
        more = self.padded(len(rows)) - len(rows)
        return operation(pad(rows, (0, 0, 0, more)))[: len(rows)] if more else operation(rows)


@torch.inference_mode()
def widths(operation: Rows, entries: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Widths | None:
    """The widths at which an operation's rows keep their bits, as narrow as will do; None where there are none.

    Args:
        operation: [n, D] → [n, E], row by row.
        entries: D.
        dtype: of the rows.
        device: likewise.
    """
    drawn = np.random.default_rng(0).normal(size=(max(WIDE), entries))
    rows, last = torch.from_numpy(drawn).to(device, dtype), max(NARROW)
    seen = {n: [(at, operation(rows[at : at + n])) for at in {0, last - n}] for n in NARROW}
    for multiple, least in sorted(itertools.product(STEPS, STEPS), key=lambda pair: (max(pair), pair)):
        found = Widths(least, multiple)
        step = found.padded(1)
        alone = torch.cat([operation(rows[at : at + step]) for at in range(0, last, step)])
        kept = (torch.equal(y, alone[at : at + n]) for n in NARROW if found.padded(n) == n for at, y in seen[n])
        if all(kept):
            wide = all(torch.equal(operation(rows[:n])[:last], alone) for n in WIDE)
            return found if wide else Widths(least, multiple, last)
    return None


def exact(decoder: Decoder, name: str) -> Decoder:
    """A model with the attention `draftree`, brought to give a token the same bits in any company.

    Args:
        decoder: is changed in place.
        name: for the error.

    Raises:
        UserError: it cannot be brought to it.
    """
    unstable = [kind for kind, kept in even(decoder).items() if kept is None]
    where = f"in its {unstable[0]}" if unstable else parting(decoder)
    if where is not None:
        raise UserError(
            f"exactness is 'bits', but target '{name}' gives a token other bits in company, {where}: allowed is 'ties'"
        )
    return decoder


def even(decoder: Decoder) -> dict[str, Widths | None]:
    """Evens out the layers of a model, in place: those without parts of their own, and rotations.

    Returns:
        By kind, what was done; None where no width is stable, or with weights that are no plain layer's, as experts: they are
        left as they are.
    """
    layers, found = _layers(decoder), dict[str, Widths | None]()
    for module in decoder.model.modules():
        if any(p.dim() > 1 for p in module.parameters(recurse=False)) and not isinstance(module, nn.Embedding):
            found |= {} if module in layers else {type(module).__name__: None}
    for module, entries in layers.items():
        stock = module.forward
        name = " ".join((type(module).__name__, str(entries), *(str(tuple(p.shape)) for p in module.parameters())))
        if name not in found:
            found[name] = widths(stock, entries, decoder.dtype, decoder.device)
        if (kept := found[name]) is not None and kept != Widths():
            module.forward = _evened(stock, kept)
    for module in decoder.stack.modules():
        if "rope_type" in vars(module):
            module.forward = _turned(module.forward)
    return found


@torch.inference_mode()
def _layers(decoder: Decoder) -> dict[nn.Module, int]:
    """The layers that have no parts and make rows of rows, in a pass, and D of each."""
    found: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor) and args[0].is_floating_point() and isinstance(out, Tensor):
            found[module] = args[0].shape[-1]

    hooks = [m.register_forward_hook(note) for m in decoder.model.modules() if not list(m.children())]
    decoder.forward(decoder.new_cache(1, 2), Feed.chains([np.zeros(2, np.int64)], np.zeros(1, np.int64), decoder.device))
    for hook in hooks:
        hook.remove()
    return found


def _evened(stock: Rows, kept: Widths) -> Rows:
    def forward(rows: Tensor) -> Tensor:
        flat = kept.apply(stock, rows.reshape(-1, rows.shape[-1]).contiguous())
        return flat.reshape(*rows.shape[:-1], flat.shape[-1])

    return forward


def _turned(stock: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A rotary embedding that computes `TURNED` positions at a time, so that none is at the end of a tensor."""

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        count = position_ids.shape[1]
        blocks = pad(position_ids, (0, -count % TURNED)).split(TURNED, dim=1)
        parts = [stock(x, block, *args, **kwargs) for block in blocks]
        return tuple(torch.cat(each, dim=1)[:, :count] for each in zip(*parts, strict=True))

    return forward


@torch.inference_mode()
def parting(decoder: Decoder) -> str | None:
    """The place where a text's bits first depend on how it is cut: a layer, or the head; None where they do not."""
    count = min(sum(CUTS), decoder.context)
    ids = np.random.default_rng(1).integers(0, decoder.vocab, count)
    layers = tuple(range(int(decoder.config.num_hidden_layers) + 1))

    def read(parts: Sequence[Any]) -> tuple[Tensor, dict[int, Tensor]]:
        cache, logits, hidden = decoder.new_cache(1, count), list[Tensor](), list[dict[int, Tensor]]()
        for part in parts:
            with decoder.tapped(layers) as caught:
                logits.append(decoder.forward(cache, Feed.chains([part], cache.lengths.copy(), decoder.device))[0])
            hidden.append(dict(caught))
            cache.keep(0, cache.lengths[0] + np.arange(len(part)))
        return torch.cat(logits), {layer: torch.cat([h[layer][0] for h in hidden]) for layer in layers}

    (whole, states), (parts, others) = read([ids]), read([p for p in np.split(ids, np.cumsum(CUTS)[:-1]) if len(p)])
    for layer in layers[1:]:
        if not torch.equal(states[layer], others[layer]):
            return f"from layer {layer - 1} on ({type(decoder.layers[layer - 1]).__name__})"
    return None if torch.equal(whole, parts) else f"in its head ({type(decoder.model).__name__})"
