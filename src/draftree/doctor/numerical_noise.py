"""Measure how far passes of different width move the margin between the two largest logits."""

from collections.abc import Sequence

import numpy as np
import torch

from draftree.evaluation.target_trace import Recording, TokenText
from draftree.target.target import HiddenStateSpec, Target
from draftree.tree import AcceptResult, Ints, Tree

NARROW_TOKENS = 24
"""Number of tokens of each text that the target reads one by one to measure its numerical noise."""


@torch.inference_mode()
def narrow_and_wide(target: Target, texts: Sequence[TokenText]) -> tuple[np.ndarray, np.ndarray]:
    """Measure the margin of the two largest logits in narrow and in wide passes.

    A narrow pass reads one token of each text, a wide pass whole texts. The two results are arrays
    [M] over M positions: |narrow margin − wide margin|, and the narrow margin. Both margins are of
    the two likeliest tokens of the narrow pass.
    """
    record = Recording.of(target, texts)
    cache = target.new_cache(len(texts), max(len(t.tokens) for t in texts))
    target.prefill(cache, [t.tokens[: t.start] for t in texts], HiddenStateSpec())
    changes, margins = [], []
    for i in range(NARROW_TOKENS):
        live = np.array([r for r, t in enumerate(texts) if t.start + i < len(t.tokens)], np.int64)
        if not live.size:
            break
        positions = np.array([texts[r].start + i for r in live])
        tree = Tree.from_roots(
            live, np.array([texts[r].tokens[p] for r, p in zip(live, positions, strict=True)])
        )
        top = target.verify(cache, tree, HiddenStateSpec()).logits.topk(2)
        wide = record.after(live, positions).gather(-1, top.indices).cpu().double()
        values = top.values.cpu().double()
        margin = values[:, 0] - values[:, 1]
        margins.append(margin.numpy())
        changes.append((margin - (wide[:, 0] - wide[:, 1])).abs().numpy())
        nothing: tuple[Ints, ...] = (np.zeros(0, np.int64),) * len(live)
        target.commit(cache, tree, AcceptResult(nothing, tree.tokens))
    return np.concatenate(changes), np.concatenate(margins)
