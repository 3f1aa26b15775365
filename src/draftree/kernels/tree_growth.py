"""Append candidates to a draft tree, in C++ or NumPy.

Shapes: N nodes, F frontier nodes, K candidates.
"""

from typing import NamedTuple

import numpy as np

from draftree.kernels.node_table import NodeTable
from draftree.native import Array, native_as


class CandidateTable(NamedTuple):
    """The candidates after a frontier.

    Attributes:
        tokens: [F, K] their ids.
        log_q: [F, K] their log q, −∞ where there is no candidate.
        sources: [F, K] the source of each candidate; [0, 0] if all have the same.
        source: the source that all candidates have.
    """

    tokens: Array
    log_q: Array
    sources: Array
    source: int


@native_as("appended")
def append_nodes(
    nodes: NodeTable,
    frontier: Array,
    candidates: CandidateTable,
    keep: Array,
    score: Array,
    entropy: Array,
    first_q: int,
) -> NodeTable:
    """Return a tree to which candidates after a frontier were added.

    Args:
        nodes: the tree of N nodes.
        frontier: [F] the candidates' parents; numbers from N on are candidates of this call.
        candidates: [F, K] the candidates.
        keep: [F, K] whether a candidate becomes a node; [0, 0] for all.
        score: [F, K] the candidates' scores; [0, 0] for the parent's score plus log q.
        entropy: [F] the entropy of each parent's q; [0] for zeros.
        first_q: the index of the first parent's q among all stored q; −1 if q is not stored.
    """
    tokens, log_q, sources, source = candidates
    before, added, (count, width) = len(nodes.tokens), 0, log_q.shape
    for f in range(count):
        for k in range(width):
            added += log_q[f, k] > -np.inf and (keep.size == 0 or keep[f, k])
    new = NodeTable(*(np.append(column, np.empty(added, column.dtype)) for column in nodes))
    at = before
    for f, parent in enumerate(frontier):
        for k in range(width):
            if log_q[f, k] > -np.inf and (keep.size == 0 or keep[f, k]):
                new.tokens[at] = tokens[f, k]
                new.parents[at] = parent
                new.depth[at] = new.depth[parent] + 1
                new.row[at] = new.row[parent]
                new.log_q[at] = log_q[f, k]
                new.score[at] = score[f, k] if score.size else new.score[parent] + log_q[f, k]
                new.source[at] = sources[f, k] if sources.size else source
                new.entropy[at] = entropy[f] if entropy.size else 0.0
                new.number[at] = at
                new.q_row[at] = first_q + f if first_q >= 0 else -1
                at += 1
    return new
