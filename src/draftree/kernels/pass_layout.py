"""Tokens, positions, visibility and mask of a pass over draft trees.

Shapes: N nodes, R sequences, F frontier nodes, B nodes fed before, M nodes not fed yet, P pending
tokens, n tokens of a pass, m scratch slots, S slots.
"""

from typing import Any

import numpy as np

from draftree.native import Array, native, native_as


@native_as("unfed")
def unfed_nodes(parents: Array, frontier: Array, fed: Array) -> tuple[Array, Array]:
    """Return the nodes on the paths to a frontier that were not fed yet.

    Args:
        parents: [N] −1 for roots.
        frontier: [F] the nodes whose paths are needed.
        fed: [B] nodes in the order in which they were fed.

    Returns:
        The nodes [M], ascending, and [N] each node's index in the order of feeding, or −1.
    """
    places = np.full(len(parents), -1)
    wanted = np.zeros(len(parents), np.bool_)
    count = 0
    for i, node in enumerate(fed):
        places[node] = i
    for end in frontier:
        node = end
        while node >= 0 and places[node] < 0 and not wanted[node]:
            wanted[node], count, node = True, count + 1, parents[node]
    return np.flatnonzero(wanted), places


@native_as("laid")
def draft_pass_layout(
    pending: Array,
    before: Array,
    nodes: Array,
    base: int,
    tokens: Array,
    depth: Array,
    parents: Array,
) -> tuple[Array, Array, Array, Array]:
    """Return one sequence's part of a draft pass over nodes.

    The first pass of a step also reads the pending tokens, which come before all nodes.

    Args:
        pending: [P] committed tokens that were not fed in an earlier step.
        before: [B] nodes that were fed earlier in this step.
        nodes: [F] nodes that are fed now.
        base: number of slots of the sequence that all tokens see.
        tokens: [N] ids of the tree's nodes.
        depth: [N] their depth.
        parents: [N] their parents, −1 for roots.

    Returns:
        The ids [n], positions [n], whether each token sees each scratch slot [n, m], and the
            positions of the scratch slots [m].
    """
    count = len(pending)
    waiting = 0 if len(before) else len(pending)
    done = len(before)
    wide, deep = waiting + len(nodes), count + done + len(nodes)
    ids = np.empty(wide, np.int64)
    positions = np.empty(wide, np.int64)
    scratch = np.empty(deep, np.int64)
    seen, at = np.zeros((wide, deep), np.bool_), np.full(len(parents), -1)
    for i in range(count):
        scratch[i] = base + i
    for i in range(done + len(nodes)):
        node = before[i] if i < done else nodes[i - done]
        at[node], scratch[count + i] = count + i, base + count + depth[node]
    for i in range(waiting):
        ids[i], positions[i] = pending[i], base + i
        seen[i, : i + 1] = True
    for i, new in enumerate(nodes):
        ids[waiting + i], positions[waiting + i] = tokens[new], base + count + depth[new]
        seen[waiting + i, :count] = True
        node = new
        while node >= 0:
            if at[node] >= 0:
                seen[waiting + i, at[node]] = True
            node = parents[node]
    return ids, positions, seen, scratch


@native
def hide(bits: Array, seen: Array, length: int, lowest: Any) -> None:
    """Write a sequence's additive mask as integers: 0 if a token sees a slot, else `lowest`.

    Args:
        bits: [n, S] the mask, which is overwritten.
        seen: [n′, m] whether a token sees a scratch slot; tokens from n′ on are padding and see all
            slots.
        length: number of slots before the scratch slots, which all tokens see.
        lowest: the bits of the lowest number of the dtype.
    """
    wide, deep = seen.shape
    for i in range(len(bits)):
        bits[i, :length] = 0
        if i >= wide:
            bits[i, length:] = 0
            continue
        bits[i, length:] = lowest
        for j in range(deep):
            if seen[i, j]:
                bits[i, length + j] = 0


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
