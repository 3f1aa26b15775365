"""Accepted paths of verified draft trees.

Shapes: N nodes, A accepted nodes with their roots.
"""

import numpy as np

from draftree.native import Array, native_as


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
