"""Tree operations: select nodes, and compute their ancestor matrix.

Shapes: N nodes, M of them that are kept.
"""

import numpy as np

from draftree.native import Array, native


@native
def kept(
    tokens: Array,
    parents: Array,
    depth: Array,
    row: Array,
    log_q: Array,
    score: Array,
    source: Array,
    entropy: Array,
    number: Array,
    q_row: Array,
    keep: Array,
) -> tuple[Array, Array, bool]:
    """Return the columns of the nodes to keep, and whether none of them lost its parent.

    The columns are integers [7, M] and others [3, M], in the order of `growing.appended`. Roots
    have to be kept.

    Args:
        tokens: [N] ids.
        parents: [N] a parent stands before its children; −1 for none.
        depth: [N] distance from the root.
        row: [N] the sequence of each node.
        log_q: [N] of each token after its path.
        score: [N] log values.
        source: [N] which drafter proposed it.
        entropy: [N] of the q that it comes from.
        number: [N] its number among all drafted nodes.
        q_row: [N] where its q is kept; −1 for none.
        keep: [N] whether a node is kept.
    """
    count, connected = np.count_nonzero(keep), True
    whole = np.empty((7, count), np.int64)
    real = np.empty((3, count))
    new = np.zeros(len(keep), np.int64)
    at = 0
    for i in range(len(keep)):
        if keep[i]:
            new[i], parent = at, parents[i]
            connected &= parent < 0 or keep[parent]
            whole[0, at], whole[1, at], whole[2, at] = (
                tokens[i],
                new[parent] if parent >= 0 else -1,
                depth[i],
            )
            whole[3, at], whole[4, at], whole[5, at], whole[6, at] = (
                row[i],
                source[i],
                number[i],
                q_row[i],
            )
            real[0, at], real[1, at], real[2, at] = log_q[i], score[i], entropy[i]
            at += 1
        else:
            connected &= parents[i] >= 0
    return whole, real, connected


@native
def paths(parents: Array) -> Array:
    """Return [N, N] whether node j is node i or one of its ancestors.

    A parent comes before its children and is −1 for none.
    """
    count = len(parents)
    seen = np.zeros((count, count), np.bool_)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] = seen[parent]
        seen[i, i] = True
    return seen


@native
def shallow(nodes: Array, depth: Array, row: Array, bounds: Array, most: float) -> Array:
    """Return the nodes that are above a depth.

    Args:
        nodes: [F].
        depth: [N] of the tree's nodes.
        row: [N].
        bounds: [R] the depth for each row.
        most: the depth for all rows.
    """
    keep = np.empty(len(nodes), np.bool_)
    for i, node in enumerate(nodes):
        keep[i] = depth[node] < min(bounds[row[node]], most)
    return nodes[keep]
