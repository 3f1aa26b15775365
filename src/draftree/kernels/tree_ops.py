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
    """Remove nodes from a tree, and return its columns and whether every node kept its parent.

    The columns are integers [7, M] and floats [3, M], in the order of `tree_growth.appended`. Roots
    must be kept.

    Args:
        tokens: [N] ids.
        parents: [N] the parent of each node, which comes before it; −1 for roots.
        depth: [N] distance from the root.
        row: [N] the sequence of each node.
        log_q: [N] log q of each token after its path.
        score: [N] log values.
        source: [N] the drafter that proposed it.
        entropy: [N] the entropy of the q that proposed it.
        number: [N] its number among all drafted nodes.
        q_row: [N] the index of its q among all stored q; −1 for none.
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
    """Return [N, N] True where node j is node i or one of its ancestors.

    A parent comes before its children. A root's parent is −1.
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
    """Return the nodes above a depth limit.

    Args:
        nodes: [F] the nodes to choose from.
        depth: [N] depth of the tree's nodes.
        row: [N] sequence of the tree's nodes.
        bounds: [R] the depth limit of each sequence.
        most: the depth limit of all sequences.
    """
    keep = np.empty(len(nodes), np.bool_)
    for i, node in enumerate(nodes):
        keep[i] = depth[node] < min(bounds[row[node]], most)
    return nodes[keep]
