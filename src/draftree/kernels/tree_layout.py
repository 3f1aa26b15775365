"""Positions, visibility and mask of the tokens of a draft pass.

Shapes: N nodes of a tree, F frontier nodes, B nodes fed before, P pending tokens, n tokens of a
pass, m scratch slots, S slots.
"""

from typing import Any

import numpy as np

from draftree.native import Array, native


@native
def unfed(parents: Array, frontier: Array, fed: Array) -> tuple[Array, Array]:
    """Return the nodes of a frontier's paths that were not fed [M], ascending.

    The second result [N] is each node's place in the order of feeding, or −1.

    Args:
        parents: [N] −1 for roots.
        frontier: [F].
        fed: [B] nodes in the order in which they were fed.
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


@native
def laid(
    pending: Array,
    before: Array,
    nodes: Array,
    base: int,
    tokens: Array,
    depth: Array,
    parents: Array,
) -> tuple[Array, Array, Array, Array]:
    """Return one row's part of a draft pass over nodes.

    It consists of ids [n], positions [n], what each token sees [n, m], and the positions [m] of the
    scratch slots. The first pass of a step also reads the pending tokens, which come before all
    nodes.

    Args:
        pending: [P] committed tokens that were not fed in an earlier step.
        before: [B] nodes fed in this step.
        nodes: [F] nodes that are fed now.
        base: slots of the row that all see.
        tokens: [N] of the tree, as are the next two arguments.
        depth: [N].
        parents: [N].
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
    """Write a row's additive mask as integers: 0 where a token sees a slot, else `lowest`.

    Args:
        bits: [n, S] the mask, which is overwritten.
        seen: [n′, m] whether a token sees a scratch slot; tokens after the n′ are padding and see
            all.
        length: slots before the scratch ones, which all see.
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
