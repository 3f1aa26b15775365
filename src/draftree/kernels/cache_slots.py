"""Slots of the KV cache that a step writes and moves.

Shapes: N nodes, R sequences, A accepted nodes with their roots, L layers, H key-value heads, S
slots.
"""

import numpy as np

from draftree.native import Array, native


@native
def path_slots(row: Array, nodes: Array, lengths: Array) -> tuple[Array, Array]:
    """Return the sequence [A] of some nodes, and the slots [A] where a tree pass wrote them.

    Args:
        row: [N] the sequence of each node. The pass wrote the nodes of a sequence in their order
            after its committed tokens.
        nodes: [A] the nodes.
        lengths: [R] number of committed tokens.
    """
    column, seen = np.empty(len(row), np.int64), np.zeros(len(lengths), np.int64)
    for node, owner in enumerate(row.tolist()):
        column[node] = seen[owner]
        seen[owner] += 1
    return row[nodes], lengths[row[nodes]] + column[nodes]


@native
def next_slots(rows: Array, lengths: Array) -> tuple[Array, Array]:
    """Return the slots [A] after the committed tokens of sequences [A], and the new lengths [R].

    A sequence that is given several times gets several slots.
    """
    new, found = lengths.copy(), np.empty(len(rows), np.int64)
    for i, row in enumerate(rows.tolist()):
        found[i] = new[row]
        new[row] += 1
    return found, new


@native
def move_slots(stored: Array, rows: Array, old: Array, new: Array) -> None:
    """Copy slots of a cache to other slots; all of them are read before any is written.

    Args:
        stored: [L, R, H, S, bytes] keys or values of the layers.
        rows: [A] the sequence of each slot.
        old: [A] the slots that are read.
        new: [A] the slots that are written.
    """
    apart = old != new
    rows = rows[apart]
    old = old[apart]
    new = new[apart]
    stored[:, rows, :, new] = stored[:, rows, :, old]
