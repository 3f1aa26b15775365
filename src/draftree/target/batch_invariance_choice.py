"""Decide whether a target runs with batch-invariant kernels, by request or by measured cost.

The findings about a kind of model are saved in the cache folder, by machine, dtype and shapes.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from draftree.errors import UserError
from draftree.models.accelerate_dispatch import is_spread
from draftree.models.batch_invariant_model import BatchInvariantModel
from draftree.models.causal_lm import CausalLM
from draftree.models.cpu_linear import packed_shapes
from draftree.models.forward_batch import ForwardBatch
from draftree.models.fused_cpu_modules import replaced_kinds
from draftree.models.invariant_widths import Widths
from draftree.models.model_runner import ModelRunner, Outputs
from draftree.utils.files import Entries, as_user_error, read_object, write_text
from draftree.utils.hardware import has_float64, machine, measurement_path, time_interleaved

HALF = (torch.bfloat16, torch.float16)
"""Dtypes in which two tokens often have almost equal probabilities."""
PROBE_CONTEXT, MAX_DEFAULT_SLOWDOWN, MAX_PROBE_SECONDS = 256, 0.02, 2.0
"""Context length in tokens at which the cost of batch invariance is measured.

`MAX_DEFAULT_SLOWDOWN` is the largest relative cost at which `bits` is the default. `MAX_PROBE_SECONDS` is the duration of
the measurement in seconds.
"""
MIN_REPORTED_PERCENT = 1.0
"""Relative cost in percent from which on the choice is logged."""
LAYOUT = "3"
"""Version of the saved files; it changes when the measurements or their results change."""
CHUNK_SIZES = (1, 1, 2, 3, 1, 5, 8, 13, 1, 16, 33)
"""Lengths of the parts in which a test text is read; the result is compared with a single pass."""
LOG = logging.getLogger("draftree")
Word = Literal["bits", "ties"] | None


@dataclass(frozen=True)
class Findings:
    """Hold the measurements of a kind of model on a machine.

    Attributes:
        kinds: the batch widths at which each kind of layer is batch invariant; None for a kind
            without such widths.
        parting: the first layer whose bits depend on how a text is split into passes; None if none
            does.
        price: the relative increase of the time of a pass over one token; None if it was not
            measured.
    """

    kinds: Mapping[str, Widths | None]
    parting: str | None
    price: float | None = None

    @property
    def lacks(self) -> str | None:
        """Return the place where passes are not batch invariant; None if they are."""
        unstable = [name for name, widths in self.kinds.items() if widths is None]
        return f"in its {unstable[0]}" if unstable else self.parting

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """Return findings from the dictionary that was saved as JSON."""
        entries = Entries(stored, "findings")
        kinds = {
            name: widths and Widths.of(widths)
            for name, widths in entries.get("kinds", dict[str, dict[str, Any] | None]).items()
        }
        return cls(kinds, entries.get("parting", str | None), entries.get("price", float | None))


def probe_batch_invariance(
    decoder: CausalLM, priced: bool = False
) -> tuple[BatchInvariantModel, Findings]:
    """Measure whether a model can be batch invariant, or load an earlier result of this machine.

    Args:
        decoder: the model.
        priced: whether the cost in time is measured too.

    Returns:
        The batch-invariant runner, which is not in use yet, and the findings.
    """
    about = measurement_key(decoder)
    path = measurement_path("exactness", about)
    before = _load_findings(path)
    stable = BatchInvariantModel(decoder, {} if before is None else before.kinds)
    found = before
    if found is None:
        own = None if stable.exact else "in its attention, which is no other one"
        unknown = None in stable.widths.values()
        found = Findings(
            stable.widths, own or (None if unknown else first_variant_layer(decoder, stable.runner))
        )
    if priced and found.price is None and found.lacks is None:
        found = replace(found, price=price(decoder, stable))
    if found is not before:
        with suppress(OSError):  # not writable: measured again by the next process
            write_text(
                path,
                json.dumps(
                    {**asdict(found), "about": about, "date": time.strftime("%Y-%m-%d %H:%M")},
                    indent=1,
                ),
            )
    return stable, found


def measurement_key(decoder: CausalLM) -> dict[str, str]:
    """Return a dict of the properties of machine and model on which the findings depend."""
    shapes = "".join(f"{name}{tuple(p.shape)}" for name, p in decoder.model.named_parameters())
    return {
        **machine(decoder.device),
        "dtype": str(decoder.dtype),
        "attention": str(decoder.config._attn_implementation),
        "model": str(decoder.config.model_type),
        "shapes": hashlib.sha256(shapes.encode()).hexdigest(),
        "layout": LAYOUT,
        "packed": " ".join(packed_shapes(decoder.hf.model)),
        "between": " ".join(replaced_kinds(decoder.hf.model)),
        "compiled": " ".join(decoder.native_kinds),
    }


def _load_findings(path: Path) -> Findings | None:
    with (
        suppress(UserError),
        as_user_error(f"'{path}' does not hold findings"),
    ):  # an earlier version may have written it otherwise
        return Findings.of(read_object(path, "findings")) if path.is_file() else None
    return None


def price(
    decoder: CausalLM,
    stable: BatchInvariantModel,
    width: int = 1,
    context: int = PROBE_CONTEXT,
    longest: float = MAX_PROBE_SECONDS,
) -> float:
    """Return the relative increase of the time of a pass with the batch-invariant runner.

    Args:
        decoder: the model.
        stable: the batch-invariant runner.
        width: number of tokens of the pass, in one sequence.
        context: number of tokens before them, limited by the model's context.
        longest: duration of the measurement in seconds.
    """
    count = min(context, decoder.context - width)
    cache = decoder.new_cache(1, count + width)
    ids = np.arange(count + width) % decoder.vocab
    with torch.inference_mode():
        batch = ForwardBatch.chains([ids[:count]], cache.lengths.copy(), decoder.device)
        decoder.runner.forward(batch, cache)
        cache.keep(0, np.arange(count))
        feed = ForwardBatch.chains([ids[count:]], cache.lengths.copy(), decoder.device)

        steps = [partial(each.forward, feed, cache) for each in (decoder.runner, stable.runner)]
        own, ours = time_interleaved(steps, decoder.device, longest)
    return ours / own - 1


def resolve_exactness(
    decoder: CausalLM, name: str, asked: Word, free: bool = True, anyway: bool = False
) -> tuple[BatchInvariantModel | None, Word]:
    """Decide whether a target's passes are batch invariant.

    They are if the user requests it. Without a request they are in half precision, if this costs
    almost no time.

    Args:
        decoder: the model.
        name: the name of the target, for messages.
        asked: the user's request; None if there is none.
        free: whether the attention implementation may be changed without a request.
        anyway: whether passes are batch invariant without a request at any cost, as for a model
            that is computed in half precision by default.

    Returns:
        The batch-invariant runner, which is not in use yet, or None; and `bits`, `ties`, or None if
            nothing was requested or decided.

    Raises:
        UserError: bits were requested and passes cannot be batch invariant.
    """
    if not has_float64(decoder.device):
        if asked == "bits":
            told = f"and the target on '{decoder.device.type}', which lacks the float64 that its attention sums in"
            raise UserError(f"exactness is 'bits', {told}: allowed there is 'ties'")
        return None, asked
    if is_spread(decoder.model):  # its layers have no weights to test
        return None, asked
    if asked == "ties" or (asked is None and not (free and decoder.dtype in HALF)):
        return None, asked
    stable, found = probe_batch_invariance(decoder, priced=asked is None and not anyway)
    if asked == "bits":
        if found.lacks is not None:
            told = f"but target '{name}' gives a token other bits in company, {found.lacks}"
            raise UserError(f"exactness is 'bits', {told}: allowed is 'ties'")
        return stable, asked
    if anyway and found.lacks is None:
        return stable, "bits"
    if found.price is None:
        LOG.info(
            "exactness is 'ties': a token's bits depend on the rest of a pass, %s", found.lacks
        )
        return None, "ties"
    percent, cheap = 100 * max(found.price, 0), found.price <= MAX_DEFAULT_SLOWDOWN
    if percent >= MIN_REPORTED_PERCENT:
        LOG.info(
            "exactness is '%s': with bits a step takes %.1f %% longer on this machine",
            "bits" if cheap else "ties",
            percent,
        )
    return (stable, "bits") if cheap else (None, "ties")


@torch.inference_mode()
def first_variant_layer(decoder: CausalLM, runner: ModelRunner | None = None) -> str | None:
    """Return the first layer at which a text's bits depend on how it is split into passes.

    The result is the LM head if only logits differ, and None if nothing differs.
    """
    count = min(sum(CHUNK_SIZES), decoder.context)
    ids = np.random.default_rng(1).integers(0, decoder.vocab, count)
    layers = tuple(range(int(decoder.config.num_hidden_layers) + 1))

    def read(parts: Sequence[Any]) -> tuple[Tensor, dict[int, Tensor]]:
        cache = decoder.new_cache(1, count)
        logits = list[Tensor]()
        hidden = list[dict[int, Tensor]]()
        for part in parts:
            batch = ForwardBatch.chains([part], cache.lengths.copy(), decoder.device)
            out = (runner or decoder.runner).forward(batch, cache, Outputs(layers))
            logits.append(out.logits)
            hidden.append(dict(out.hidden))
            cache.keep(0, cache.lengths[0] + np.arange(len(part)))
        return torch.cat(logits), {layer: torch.cat([h[layer] for h in hidden]) for layer in layers}

    (whole, states), (parts, others) = (
        read([ids]),
        read([p for p in np.split(ids, np.cumsum(CHUNK_SIZES)[:-1]) if len(p)]),
    )
    for layer in layers[1:]:
        if not torch.equal(states[layer], others[layer]):
            return f"from layer {layer - 1} on ({type(decoder.layers[layer - 1]).__name__})"
    return None if torch.equal(whole, parts) else f"in its head ({type(decoder.model).__name__})"
