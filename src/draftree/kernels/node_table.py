"""The nodes of draft trees as columns: select nodes, and compute their ancestor matrix.

Shapes: N nodes, F nodes to choose from, R sequences.
"""

from typing import NamedTuple

import numpy as np

from draftree.native import Array, native, native_as


class NodeTable(NamedTuple):
    """The columns of draft trees, one entry for each node.

    The first nodes are the roots, one for each running sequence; every other node i has `parents[i]
    < i`.

    Attributes:
        tokens: [N] token ids.
        parents: [N] the node number of the parent, −1 for a root.
        depth: [N] distance from the root.
        row: [N] the slot of each node's sequence.
        log_q: [N] log q(token | path), 0 for a root.
        score: [N] the value by which the policy ranks nodes; for most policies the sum of log q
            along the node's path.
        source: [N] the number of the drafter that proposed the node, −1 for a root and 0 for a
            single drafter. For fused drafters, source + 1 is a bit mask of the drafters that
            proposed the node. With two drafters, 0 means the first, 1 the second, and 2 both.
        entropy: [N] entropy in nats of the distribution that the node was drawn from, if the policy
            needs it; otherwise 0.
        number: [N] the node's number during drafting, by which drafters index their caches.
        q_row: [N] the row of `Tree.q` that the node was drawn from, −1 for none.
    """

    tokens: Array
    parents: Array
    depth: Array
    row: Array
    log_q: Array
    score: Array
    source: Array
    entropy: Array
    number: Array
    q_row: Array


@native_as("kept")
def keep_nodes(nodes: NodeTable, keep: Array) -> tuple[NodeTable, bool]:
    """Remove nodes from a tree; return the others, and whether every node kept its parent.

    Roots must be kept.

    Args:
        nodes: the tree.
        keep: [N] whether a node is kept.
    """
    chosen = np.flatnonzero(keep)
    new = np.where(keep, np.cumsum(keep) - 1, 0)
    parents = nodes.parents[chosen]
    connected = (keep[parents] | (parents < 0)).all() and (nodes.parents[~keep] >= 0).all()
    table = NodeTable(*(column[chosen] for column in nodes))
    return table._replace(parents=np.where(parents < 0, -1, new[parents])), bool(connected)


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
