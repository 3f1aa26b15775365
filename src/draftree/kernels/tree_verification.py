"""Verification of draft trees: inputs of the pass, accepted paths, and slots to commit.

Shapes: N nodes, R sequences, A accepted nodes with their roots, L layers, H key-value heads, S
slots.
"""

import numpy as np

from draftree.native import Array, native, native_as


@native_as("packed")
def pack_trees(
    row: Array, tokens: Array, depth: Array, parents: Array, lengths: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Return the inputs of a pass over draft trees, sequence by sequence.

    Nodes of a sequence keep their order.

    Args:
        row: [N] the sequence of each node.
        tokens: [N] ids.
        depth: [N] distance from the root.
        parents: [N] −1 for roots; a parent comes before its children.
        lengths: [R] number of committed tokens of each sequence.

    Returns:
        The index of each node in the pass [N]; ids [N] and positions [N] in the order of the pass;
            the number of nodes of each sequence [R]; and the visibility matrices [n, n] of all
            sequences, flattened one after another.
    """
    order = np.argsort(row, kind="stable")
    place = np.empty(len(row), np.int64)
    place[order] = np.arange(len(row))
    counts = np.bincount(row, minlength=len(lengths))
    seen, first = [], 0
    for count in counts.tolist():
        mine = np.zeros((count, count), np.bool_)
        for i in range(count):
            parent = parents[order[first + i]]
            if parent >= 0:
                mine[i] = mine[place[parent] - first]
            mine[i, i] = True
        seen.append(mine.ravel())
        first += count
    flat = np.concatenate([np.zeros(0, np.bool_), *seen])
    return place, tokens[order], (lengths[row] + depth)[order], counts, flat


@native_as("followed")
def follow_choices(parents: Array, tokens: Array, chosen: Array) -> tuple[Array, Array, Array]:
    """Follow the chosen tokens from each root through its tree.

    Args:
        parents: [N] −1 for roots, which come before all other nodes.
        tokens: [N] ids.
        chosen: [N] the token that is chosen after each node; of equal children the first is
            followed.

    Returns:
        The nodes of all paths, roots included [A]; the end (exclusive) of each root's path among
            them [roots]; and the token that is chosen after each path [roots].
    """
    found = list[int]()
    ends = list[int]()
    last = list[int]()
    for root in range(int(np.count_nonzero(parents < 0))):
        node = root
        while True:
            found.append(node)
            children = np.flatnonzero((parents == node) & (tokens == chosen[node]))
            if not len(children):
                break
            node = int(children[0])
        ends.append(len(found))
        last.append(int(chosen[node]))
    whole, behind, after = (np.array(each, np.int64) for each in (found, ends, last))
    return whole, behind, after


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
