"""The input slots of a block: mask tokens after a root, or a path with a mask after each token.

If slots see only the slots before them, later masks do not change their outputs. So one pass reads
a whole tree: its tokens once, and after every expanded node a mask that sees the node's path.

Shapes: R slots, n slots of a pass, g slots of a root, F frontier nodes, D hidden size, S slots of
the cache.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftree.drafters.neural.block_model import ParallelNet
from draftree.formats.block_drafters import BlockDrafterConfig
from draftree.models.kv_cache import SlotCache
from draftree.tree import Ints, Tree


@dataclass(frozen=True)
class SlotGroup:
    """The slots of a block in training: first the root's slot; the last slots predict the drafts.

    Attributes:
        offsets: [g] distance of each slot's position from the root's; 0 for the root.
        given: [g] whether a slot contains the text's token, and not a mask; true for the root.
        sees: [g, g] whether a slot may see another slot; layers may restrict this further.
    """

    offsets: Tensor
    given: Tensor
    sees: Tensor

    def to(self, device: torch.device) -> "SlotGroup":
        """Return the group with its tensors on another device."""
        return SlotGroup(self.offsets.to(device), self.given.to(device), self.sees.to(device))


def make_slot_group(layout: BlockDrafterConfig, conditioned: bool) -> SlotGroup:
    """Return the slots of a block in training.

    They are the root and masks or, if `conditioned`, tokens of the text from the root on, and a
    mask after each of them.
    """
    if not conditioned:
        at = torch.arange(layout.block)
        return SlotGroup(at, at == 0, torch.ones(len(at), len(at), dtype=torch.bool))
    at = torch.arange(layout.drafts)
    before, none = at[:, None] >= at, torch.zeros(len(at), len(at), dtype=torch.bool)
    sees = torch.cat(
        (
            torch.cat((before, none), dim=1),
            torch.cat((before, torch.eye(len(at), dtype=torch.bool)), dim=1),
        )
    )
    return SlotGroup(torch.cat((at, at + 1)), torch.arange(2 * len(at)) < len(at), sees)


def compute_mask_outputs(net: ParallelNet, cache: SlotCache, tree: Tree, nodes: Ints) -> Tensor:
    """Return the outputs [F, D] of masks that follow nodes [F].

    A mask sees the tokens of its path and the committed tokens.

    Args:
        net: the network. Its slots must see only earlier slots, and each must predict the token at
            its own place.
        cache: the cache of the committed tokens; this pass adds no entries to it.
        tree: the tree of the nodes.
        nodes: [F] the nodes.
    """
    device, paths = cache.device, tree.ancestors[nodes]
    read = np.flatnonzero(paths.any(0))
    rows = np.concatenate((tree.row[read], tree.row[nodes]))
    slots = np.zeros(len(rows), np.int64)
    for row in np.unique(rows):
        slots[rows == row] = np.arange((rows == row).sum())
    n, starts = int(slots.max()) + 1, cache.lengths.copy()
    tokens = np.full((cache.rows, n), net.layout.mask)
    tokens[rows[: len(read)], slots[: len(read)]] = tree.tokens[read]
    places = np.repeat(starts[:, None], n, axis=1)
    places[rows, slots] += np.concatenate((tree.depth[read], tree.depth[nodes] + 1))
    sees = np.zeros((cache.rows, n, n), np.bool_)
    sees[:, np.arange(n), np.arange(n)] = True
    i, j = np.nonzero(np.concatenate((tree.ancestors[np.ix_(read, read)], paths[:, read])))
    sees[rows[i], slots[i], slots[j]] = True
    writer = cache.writer(starts, n)
    size = int(starts.max()) + n
    keys = np.tile(np.arange(size), (cache.rows, 1))
    there = np.repeat((keys < starts[:, None])[:, None], n, axis=1)
    for row, start in enumerate(starts.tolist()):
        keys[row, start : start + n] = places[row]
        there[row, :, start : start + n] = sees[row]
    out: Tensor = net(
        *(torch.from_numpy(each).to(device) for each in (tokens, places, keys, there)), writer
    )
    at = len(read)
    return out[torch.from_numpy(rows[at:]).to(device), torch.from_numpy(slots[at:]).to(device)]
