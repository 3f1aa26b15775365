"""Faults that only block drafters can have, such as a wrong mask token."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from draftree.doctor.faults import Alternative
from draftree.drafters.base import Drafter
from draftree.drafters.neural.block_drafter import ParallelDrafter
from draftree.evaluation.target_trace import TokenText
from draftree.evaluation.teacher_forcing import Source
from draftree.formats.block_drafters import BlockDrafterConfig
from draftree.target.target import Target

MASK = "wrong mask token"
SHIFT = "slots of a block read one off"
INJECTION = "no hidden states injected"
TRIED_LAST_IDS = 4
"""Number of last ids of the vocabulary that are tried as the mask token."""
MIN_DEVIATION = 1e-5
"""Least standard deviation over tokens, relative to the largest value, of the keys and values that
a drafter computes from the target's hidden states."""


def block_alternatives(
    target: Target, drafter: Drafter[Any], source: Source
) -> Iterator[Alternative]:
    """Yield changes to try on a block drafter: other mask tokens, and slots read one off."""
    if not isinstance(drafter, ParallelDrafter):
        return
    layout, vocab = drafter.model.layout, target.decoder.vocab
    for mask in dict.fromkeys(
        [*range(vocab - 1, max(vocab - 1 - TRIED_LAST_IDS, -1), -1), *_special(target)]
    ):
        if mask != layout.mask and 0 <= mask < vocab:
            yield Alternative(
                MASK,
                f"token {mask} for {layout.mask} as the mask",
                source,
                _with(drafter, mask=mask),
            )
    ways = "a slot saying what comes behind it", "a slot saying what comes in its place"
    told = f"{ways[layout.shifted]} and not {ways[not layout.shifted]}"
    yield Alternative(SHIFT, told, source, _with(drafter, shifted=not layout.shifted))


def _special(target: Target) -> list[int]:
    """Return the ids of special tokens in the target's config, which are often mask tokens."""
    names = ("pad_token_id", "bos_token_id", "unk_token_id", "mask_token_id")
    found = (getattr(target.decoder.config, name, None) for name in names)
    return [token for token in found if isinstance(token, int)]


def _with(drafter: ParallelDrafter, **changed: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose context manager changes fields of a drafter's layout."""

    @contextmanager
    def made() -> Iterator[None]:
        model, before = drafter.model, drafter.model.layout
        values: BlockDrafterConfig = replace(before, **changed)
        model.layout = values
        try:
            yield
        finally:
            model.layout = before

    return made


@torch.inference_mode()
def find_missing_injection(
    target: Target, drafter: Drafter[Any], texts: Sequence[TokenText]
) -> str:
    """Return the reason if the target's hidden states do not reach a block drafter; else empty."""
    if not isinstance(drafter, ParallelDrafter):
        return ""
    tokens = texts[0].tokens
    hidden_states = target.prefill(
        target.new_cache(1, len(tokens)), [tokens], drafter.needs
    ).hidden_states
    dtype = next(drafter.model.parameters()).dtype
    hidden = {layer: h.to(dtype)[None] for layer, h in hidden_states.hidden.items()}
    values = [
        v[0]
        for _, v in drafter.model.context(
            hidden, torch.from_numpy(hidden_states.positions).to(target.decoder.device)[None]
        )
    ]
    spread = max(float(v.std(dim=1).max()) for v in values)
    size = max(float(v.abs().max()) for v in values)
    if spread > MIN_DEVIATION * size:
        return ""
    return f"what its layers make of the target's hidden states is the same for all of {len(tokens)} tokens"
