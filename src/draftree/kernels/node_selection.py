"""Choose the nodes that pay for their verification or expansion, in C++ or NumPy.

Shapes: N nodes, F frontier nodes, R sequences, W points of a curve.
"""

from typing import NamedTuple

import numpy as np

from draftree.kernels.cost_curve import Curve, height
from draftree.kernels.node_table import NodeTable
from draftree.kernels.scalar_log_exp import exp, round_to_unit
from draftree.kernels.score_ranking import falling, leading
from draftree.native import Array, native, native_as

Scan = tuple[Array, int, float, float]
Promise = tuple[Array, Array, float, float]


class PassPrice(NamedTuple):
    """The price of verification in a step.

    Attributes:
        target: [W] tokens of each sequence, and [W] seconds of a target pass over them.
        rows: R, the number of sequences.
        rate: λ, the price of a second in tokens.
        left: seconds that may still be spent.
    """

    target: Curve
    rows: int
    rate: float
    left: float


class DraftPrice(NamedTuple):
    """The price of the next draft step.

    Attributes:
        draft: the seconds of a draft step, as a curve over the nodes per sequence that it reads.
        fed: the number of nodes that the draft model must read. More nodes cost more time only
            beyond this number.
        ahead: the number of tree depths that one draft step drafts. A token at each of them is
            assumed to be accepted after the one before it with the same probability.
        waiting: seconds of postponed work that must be done before the step.
    """

    draft: Curve
    fed: int
    ahead: int
    waiting: float


class DraftSuccess(NamedTuple):
    """What is known of the success of draft steps.

    Attributes:
        weights: [5] w, the weights of the features of `worth_expanding`.
        recent: recent success.
        beyond: number of nodes that are accepted after a child at no cost.
    """

    weights: Array
    recent: float
    beyond: float


@native
def nodes_that_pay(
    score: Array, row: Array, roots: int, before: int, k: int, worth: Array, least: float
) -> tuple[Array, Array]:
    """Return the nodes of the last layer that are among the k best of their sequence, best first.

    Only sequences count in which the layer raised the summed value of the k best nodes enough.

    Args:
        score: [N] log values of the tree's nodes.
        row: [N] the sequence of each node.
        roots: the number of roots.
        before: the first node of the layer.
        k: the number of best nodes of each sequence.
        worth: [R] the summed value of the k best nodes without the layer.
        least: the gain that the layer has to exceed.

    Returns:
        The nodes, and [R] the summed value with the layer.
    """
    kept, total = leading(row[roots:], score[roots:], k) + roots, np.zeros(len(worth))
    for node in kept:
        total[row[node]] += exp(score[node])
    good = np.empty(len(kept), np.bool_)
    for i, node in enumerate(kept):
        good[i] = node >= before and total[row[node]] - worth[row[node]] > least
    return kept[good], total


@native
def worth_verifying(score: Array, price: PassPrice, ahead: int) -> Scan:
    """Find how many nodes to verify, so that their total value minus the cost is largest.

    The nodes with the highest scores are taken. Their verification may not add more seconds to the
    pass than `price.left`.

    Args:
        score: [N] log values of the nodes, without the roots.
        price: the price of verification.
        ahead: the largest number i of further nodes that is examined for the cost of one more node.

    Returns:
        - The indices of the nodes by falling score.
        - The number of nodes to verify, which are the first ones in this order.
        - The cost of verifying one more node, in tokens. It is the least average cost per node of i
          further nodes, for i = 1 … `ahead`.
        - The value of the worst of the nodes to verify; ∞ if there are none.
    """
    target, rows, rate, left = price
    order = falling(score)
    best = 0
    most = 0.0
    gain = 0.0
    roots = beside = height(*target, 1.0)
    for i in range(len(order)):
        gain += round_to_unit(exp(score[order[i]]))
        seconds = height(*target, 1 + (i + 1) / rows)
        net = gain - rate * (seconds - roots)
        if seconds - roots <= max(left, 0.0) and net > most:
            best = i + 1
            most = net
            beside = seconds
    further = np.inf
    for i in range(1, ahead + 1):
        further = min(further, (height(*target, 1 + (best + i) / rows) - beside) / i)
    return order, best, rate * further, exp(score[order[best - 1]]) if best else np.inf


@native_as("selected")
def select_nodes(score: Array, price: PassPrice) -> Array:
    """Return [R + N] True at the roots and at the nodes that are worth their verification.

    A child's value must not exceed its parent's.
    """
    order, count, _, _ = worth_verifying(score[price.rows :], price, 1)
    keep = np.zeros(len(score), np.bool_)
    keep[: price.rows] = True
    keep[price.rows + order[:count]] = True
    return keep


@native
def promising(
    nodes: NodeTable,
    start: int,
    deepest: Array,
    limit: int,
    widest: int,
    unread: float,
    price: PassPrice,
    ahead: int,
) -> Promise:
    """Return the best nodes of each sequence that may have children, by sequence and falling value.

    Args:
        nodes: the tree of N nodes.
        start: the first node that is considered.
        deepest: [R] the depth limit of each sequence.
        limit: the depth limit of all sequences.
        widest: the largest number of nodes of a sequence.
        unread: the entropy that marks nodes whose parent the drafter has not read.
        price: the price of verification.
        ahead: the most nodes over which the cost of a further node is averaged.

    Returns:
        The nodes; those among them whose parent the drafter has read; the least cost of verifying
            one more node; and the value of the worst node that is worth its verification.
    """
    row, depth, score = nodes.row, nodes.depth, nodes.score
    able, count = np.empty(len(row) - start, np.int64), 0
    for node in range(start, len(row)):
        if depth[node] < min(deepest[row[node]], limit):
            able[count], count = node, count + 1
    able = able[:count]
    likely = able[leading(row[able], score[able], widest)]
    _, _, least, worst = worth_verifying(score[price.rows :], price, ahead)
    return likely, likely[nodes.entropy[likely] != unread], least, worst


@native
def worth_expanding(
    nodes: NodeTable,
    frontier: Array,
    below: Array,
    success: DraftSuccess,
    least: float,
    step: DraftPrice,
    price: PassPrice,
) -> tuple[Array, float]:
    """Return the frontier nodes that are worth a common draft step, best first, and its seconds.

    The result is empty if no number of nodes is worth it. After a node of value v, a child that was
    not found before is accepted with probability v · σ(w · x). The features x are 1, whether the
    node is a root, log v, recent success, and the share of v that was found. The child has to pay
    for its verification too.

    Args:
        nodes: the tree.
        frontier: [F] the nodes that the step can expand.
        below: [F] the summed value of the tokens that retrieval found after each; [0] for none.
        success: what is known of the success of draft steps.
        least: the cost of verifying one more node, in tokens.
        step: the price of the draft step.
        price: the price of verification.
    """
    weights, recent, beyond = success
    draft, fed, ahead, waiting = step
    target, rows, rate, left = price
    net = np.empty(len(frontier))
    for f, node in enumerate(frontier):
        x = (
            weights[0]
            + weights[1] * (nodes.depth[node] == 0)
            + weights[2] * nodes.score[node]
            + weights[3] * recent
        )
        value, net[f] = exp(nodes.score[node]), 0.0
        worth = value / (1 + exp(-x - (weights[4] * below[f] / value if below.size else 0.0)))
        for _ in range(ahead):
            net[f] += max((1 + beyond) * worth - least, 0.0)
            worth /= 1 + exp(-x)
    order = falling(net)
    best = 0
    most = 0.0
    gain = 0.0
    spent = 0.0
    left -= height(*target, 1 + 1 / rows) - height(
        *target, 1.0
    )  # at least one node must be verified
    for i in range(len(order)):
        gain += round_to_unit(max(net[order[i]], 0.0))
        seconds = waiting + height(*draft, min(i + 1, fed) / rows)
        if seconds <= left and gain - rate * seconds > most:
            best = i + 1
            most = gain - rate * seconds
            spent = seconds
    return frontier[order[:best]], spent
