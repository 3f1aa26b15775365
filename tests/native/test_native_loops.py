"""Each loop in C++ gives the bits of the Python function that it replaces, also for NaN, infinities, ties and empty arrays."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftree import kernels, native
from draftree.kernels import node_selection, node_table, score_ranking
from draftree.kernels.acceptance_calibration import RetrievalNote
from draftree.kernels.hit_acceptance import HitRates, JudgedNodes, LearningRates
from draftree.kernels.node_selection import DraftPrice, DraftSuccess, PassPrice
from draftree.kernels.node_table import NodeTable
from draftree.kernels.tree_growth import CandidateTable

pytestmark = pytest.mark.skipif(native.core is None, reason="the native kernels were not built")
for module in pkgutil.iter_modules(kernels.__path__):  # each adds its functions to the references
    importlib.import_module(f"{kernels.__name__}.{module.name}")
SEEDS = range(40)
Arguments = tuple[Any, ...]
Random = np.random.Generator
INF, NAN = np.inf, np.nan


def logs(r: Random, *shape: int, holes: tuple[float, ...] = (-INF,)) -> np.ndarray:
    """Return log probabilities, many of them equal and some impossible."""
    found = -np.round(r.exponential(2.0, shape), r.integers(0, 4))
    for hole in holes:
        found[r.random(shape) < 0.1] = hole
    return found


def odd(r: Random, *shape: int) -> np.ndarray:
    """Return numbers of all kinds."""
    found = np.round(r.normal(0, 3, shape), r.integers(0, 3))
    for special in (NAN, INF, -INF, 1e300, -1e300, 0.0):
        found[r.random(shape) < 0.03] = special
    return found


def whole(r: Random, high: int, *shape: int) -> np.ndarray:
    return r.integers(0, max(high, 1), shape)


def tree(r: Random, roots: int = 2, most: int = 30) -> NodeTable:
    """Return a tree with 0 to `most` nodes after its roots."""
    count = roots + int(r.integers(0, most))
    parents = np.array([-1 if i < roots else r.integers(0, i) for i in range(count)])
    depth, row = np.zeros(count, np.int64), np.arange(count)
    for i in range(roots, count):
        depth[i], row[i] = depth[parents[i]] + 1, row[parents[i]]
    return NodeTable(
        tokens=whole(r, 9, count),
        parents=parents,
        depth=depth,
        row=row,
        source=whole(r, 3, count),
        number=np.arange(count),
        q_row=whole(r, 5, count) - 1,
        log_q=logs(r, count, holes=()),
        score=logs(r, count, holes=(-INF, NAN) if r.random() < 0.2 else ()),
        entropy=np.where(r.random(count) < 0.3, -1.0, r.random(count)),
    )


def curve(r: Random) -> tuple[np.ndarray, np.ndarray]:
    count = int(r.integers(1, 6))
    return np.cumsum(r.integers(1, 5, count)).astype(float), np.abs(r.normal(1, 0.5, count))


def frontier(r: Random, t: NodeTable) -> np.ndarray:
    return whole(r, len(t.parents), int(r.integers(0, 6)))


def of_values(r: Random) -> Arguments:
    t, k = tree(r), int(r.integers(0, 5))
    nodes = frontier(r, t)
    log_q = logs(r, len(nodes), k)
    if k and len(nodes) > 1 and log_q[0, 0] > -INF:
        nodes[-1] = len(t.parents)  # a candidate that is in the same call
    sources = whole(r, 3, len(nodes), k) if r.random() < 0.5 else np.zeros((0, 0), np.int64)
    entropy = np.where(r.random(len(nodes)) < 0.5, NAN, 1.0)
    return log_q, sources, r.normal(0, 2, (3, 5)), entropy, nodes, t.depth, t.score, 1e-3


def of_appended(r: Random) -> Arguments:
    t, k = tree(r), int(r.integers(0, 5))
    nodes = frontier(r, t)
    shape = len(nodes), k
    keep = r.random(shape) < 0.5 if r.random() < 0.5 else np.zeros((0, 0), bool)
    score = odd(r, *shape) if r.random() < 0.5 else np.zeros((0, 0))
    sources = whole(r, 3, *shape) if r.random() < 0.5 else np.zeros((0, 0), np.int64)
    entropy = r.random(len(nodes)) if r.random() < 0.5 else np.zeros(0)
    candidates = CandidateTable(whole(r, 9, *shape), logs(r, *shape), sources, 2)
    return t, nodes, candidates, keep, score, entropy, int(r.integers(-1, 3))


def of_kept(r: Random) -> Arguments:
    t = tree(r)
    return t, r.random(len(t.parents)) < 0.7


def of_calibration_examples(r: Random) -> Arguments:
    t, some = tree(r), tree(r)
    chosen = np.sort(r.permutation(len(some.parents))[: len(t.parents)])
    t = NodeTable._make(column[: len(chosen)] for column in t)._replace(number=chosen)
    accepted = (t.parents < 0) | (r.random(len(chosen)) < 0.4)
    return t, accepted, whole(r, 9, 40), some, 1e-3


def of_outcomes(r: Random) -> Arguments:
    t = tree(r)
    asked = int(r.integers(0, 4))
    k = int(r.integers(0, 3))
    count = len(t.parents)
    accepted = (t.parents < 0) | (r.random(count) < 0.6)
    note = RetrievalNote(whole(r, count, asked), r.random(asked), whole(r, 9, asked, k))
    return t, accepted, note, -1.0, 0.3


def of_promising(r: Random) -> Arguments:
    t, roots = tree(r), 2
    start = int(r.integers(0, len(t.row) + 1))
    price = PassPrice(curve(r), roots, 0.2, 1.0)
    return t, start, whole(r, 6, roots), 4, 3, -1.0, price, 4


def of_expanding(r: Random) -> Arguments:
    t = tree(r)
    nodes = frontier(r, t)
    below = r.random(len(nodes)) if r.random() < 0.5 else np.zeros(0)
    success = DraftSuccess(r.normal(0, 1, 5), 0.4, 0.2)
    step, price = DraftPrice(curve(r), 3, 2, 0.1), PassPrice(curve(r), 2, 0.1, 5.0)
    return t, nodes, below, success, 0.01, step, price


def of_judged(r: Random) -> Arguments:
    shape = int(r.integers(0, 5)), int(r.integers(0, 4))
    guide = logs(r, *shape) if r.random() < 0.5 else np.zeros((0, 0))
    return logs(r, *shape), guide, r.random(shape[0]), r.normal(0, 2, (shape[0], 4)), 0.5, 1e-4


def of_learn_hits(r: Random) -> Arguments:
    n, rows = int(r.integers(0, 6)), int(r.integers(1, 4))
    finds = []
    for _ in range(int(r.integers(0, 4))):
        f, k = int(r.integers(0, 5)), int(r.integers(0, 4))
        place = np.where(r.random((f, k)) < 0.6, -INF, NAN)
        x, guided = r.random((f, k, 4)), bool(r.random() < 0.5)
        finds.append((whole(r, 4, f), whole(r, 4, f, k), place, x, guided))
    judged = JudgedNodes(whole(r, 4, n), whole(r, 4, n), whole(r, rows, n))
    information = np.tile(3 * np.eye(4), (rows, 2, 1, 1))
    rates = HitRates(r.normal(0, 1, (rows, 2, 4)), information, r.random(rows))
    return finds, judged, rates, LearningRates(0.2, 4.0, 0.001, 0.05)


def of_merge(r: Random) -> Arguments:
    f, m = int(r.integers(0, 5)), int(r.integers(1, 12))
    found = r.random((f, m)) < 0.4
    log_q = np.where(found, -INF, logs(r, f, m, holes=(NAN,)))
    value, seen = (
        np.where(found, r.random((f, m)), 0.0),
        np.where(found, 0.1 * r.random((f, m)), 0.0),
    )
    return (
        whole(r, 6, f, m),
        log_q,
        value,
        seen,
        1 << whole(r, 4, m),
        int(r.integers(1, 8)),
        0.95,
        1e-4,
    )


def of_newton(r: Random) -> Arguments:
    width, count = int(r.integers(1, 6)), int(r.integers(0, 9))
    return (
        r.normal(0, 1, width),
        2 * np.eye(width),
        1.5,
        r.normal(0, 1, (count, width)),
        r.random(count) < 0.5,
        0.1,
        0.05,
    )


def of_hide(r: Random) -> Arguments:
    wide, deep, length, extra = (int(r.integers(0, 5)) for _ in range(4))
    bits = r.integers(-9, 9, (wide + extra, length + deep + extra)).astype(
        r.choice(np.array(["i2", "i4", "i8"]))
    )
    return bits, r.random((wide, deep)) < 0.5, length, -123


def of_laid(r: Random) -> Arguments:
    t = tree(r)
    nodes = r.permutation(len(t.parents))[:6]
    return (
        whole(r, 9, int(r.integers(0, 4))),
        nodes[:2] if r.random() < 0.5 else nodes[:0],
        nodes[2:],
        7,
        t.tokens,
        t.depth,
        t.parents,
    )


def of_unfed(r: Random) -> Arguments:
    t = tree(r)
    return t.parents, frontier(r, t), r.permutation(len(t.parents))[:3]


def of_shallow(r: Random) -> Arguments:
    t = tree(r)
    return frontier(r, t), t.depth, t.row, whole(r, 5, 2), float(r.choice([2.0, INF]))


def of_leading(r: Random) -> Arguments:
    count = int(r.integers(0, 60))
    return whole(r, 3, count), odd(r, count), int(r.integers(0, 6))


def of_layer(r: Random) -> Arguments:
    t = tree(r)
    nodes = frontier(r, t)
    return t.row, nodes, odd(r, len(nodes), int(r.integers(1, 9))), int(r.integers(0, 4))


def of_nodes_that_pay(r: Random) -> Arguments:
    t = tree(r)
    return t.score, t.row, 2, int(r.integers(0, len(t.row) + 1)), 5, r.random(2), 0.05


def of_largest(r: Random) -> Arguments:
    bits = r.integers(-32768, 32768, (int(r.integers(0, 5)), int(r.integers(1, 300)))).astype(
        np.int16
    )
    return (np.where((bits & 0x7FFF) > 0x7F80, 0, bits) if r.random() < 0.8 else bits,)


def of_entropies(r: Random) -> Arguments:
    width = int(r.integers(1, 400))
    found = r.normal(0, 4, (int(r.integers(0, 4)), width)).round(int(r.integers(0, 6)))
    found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
    found[r.random(found.shape) < 0.05 * r.integers(0, 20)] = -INF
    return found.astype(np.float32), int(r.integers(1, 2 * width))


def of_likeliest(r: Random) -> Arguments:
    values = odd(r, int(r.integers(0, 4)), int(r.integers(1, 60)))
    return np.clip(values, -1e30, 1e30).astype(r.choice(np.array(["f4", "f8"]))), int(
        r.integers(1, 9)
    )


def of_top_log_probs(r: Random) -> Arguments:
    """Return logits with ties, some rows with infinite ones or NaN; widths around a block's."""
    width = int(r.choice([r.integers(1, 20), r.integers(100, 300), r.integers(1000, 1400)]))
    logits = r.normal(0, r.choice([0.1, 3.0, 60.0]), (int(r.integers(0, 5)), width))
    logits = logits.round(int(r.integers(-1, 6)))
    logits[r.random(logits.shape) < 0.02 * r.integers(0, 49)] = -INF
    if r.random() < 0.3 and logits.size:
        logits[r.integers(len(logits)), r.integers(width)] = r.choice([INF, NAN, 3e38])
    found = logits.astype(np.float32)
    if r.random() < 0.5:
        found = (found.view(np.int32) >> 16).astype(np.int16)
    return found, int(r.choice([1, 3, 10, 100, 2000])), int(r.integers(1, 4))


def of_confidences(r: Random) -> Arguments:
    x = int(r.integers(1, 5))
    d = int(r.integers(1, 9))
    m = int(r.integers(0, 70))
    return odd(r, x, m), r.normal(0, 1, (d, x)), r.normal(0, 1, d), r.normal(0, 1, d), 0.3


def of_packed(r: Random) -> Arguments:
    t = tree(r, int(r.integers(1, 4)))
    rows = np.sort(r.permutation(5)[: (t.parents < 0).sum()])
    return rows[t.row], t.tokens, t.depth, t.parents, whole(r, 90, 5)


def of_followed(r: Random) -> Arguments:
    t = tree(r, int(r.integers(1, 4)))
    return t.parents, whole(r, 3, len(t.parents)), whole(r, 3, len(t.parents))


def of_path_slots(r: Random) -> Arguments:
    t = tree(r)
    return t.row, frontier(r, t), whole(r, 90, 3)


def of_move_slots(r: Random) -> Arguments:
    shape = tuple(r.integers(1, 5, 3).tolist())
    slots, width = int(r.integers(1, 9)), int(r.integers(0, 4))
    stored = r.integers(0, 255, (*shape, slots, width)).astype(np.uint8)
    rows = r.integers(0, shape[1], int(r.integers(0, slots + 1)))
    old, new = (r.permutation(slots)[: len(rows)] for _ in range(2))
    return stored, rows, old, new


MAKERS: dict[str, Callable[[Random], Arguments]] = {
    "appended": of_appended,
    "between": lambda r: (*curve(r), odd(r, 9)),
    "confidences": of_confidences,
    "entropies": of_entropies,
    "falling": lambda r: (odd(r, int(r.integers(0, 40))),),
    "followed": of_followed,
    "nodes_that_pay": of_nodes_that_pay,
    "gumbel": lambda r: (r.integers(0, 2**32, 5).astype(np.uint32), int(r.integers(0, 300))),
    "height": lambda r: (*curve(r), float(r.normal(5, 5))),
    "hide": of_hide,
    "judged": of_judged,
    "learn_hits": of_learn_hits,
    "kept": of_kept,
    "laid": of_laid,
    "largest": of_largest,
    "leading": of_leading,
    "leading_of_layer": of_layer,
    "calibration_examples": of_calibration_examples,
    "likeliest": of_likeliest,
    "merge": of_merge,
    "move_slots": of_move_slots,
    "newton": of_newton,
    "next_slots": lambda r: (whole(r, 4, int(r.integers(0, 9))), whole(r, 90, 4)),
    "odds": lambda r: (float(r.choice([-INF, 0.0, -0.3, -50.0])), 1e-4),
    "outcomes": of_outcomes,
    "packed": of_packed,
    "path_slots": of_path_slots,
    "paths": lambda r: (tree(r).parents[: int(r.integers(0, 30))],),
    "promising": of_promising,
    "ranked": lambda r: of_leading(r)[:2],
    "selected": lambda r: (tree(r).score, PassPrice(curve(r), 2, 0.1, 2.0)),
    "shallow": of_shallow,
    "top_log_probs": of_top_log_probs,
    "unfed": of_unfed,
    "values": of_values,
    "worth_expanding": of_expanding,
    "worth_verifying": lambda r: (
        odd(r, int(r.integers(0, 20))),
        PassPrice(curve(r), 2, 0.1, 2.0),
        4,
    ),
}


def results(function: Callable[..., Any], given: Arguments) -> list[Any]:
    """Return all results of a function, the arrays that it writes to among them."""
    given = tuple(each.copy() if isinstance(each, np.ndarray) else each for each in given)
    found = function(*given)
    return [*(found if isinstance(found, tuple) else (found,)), *given]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return all(map(same, one, other))
    a, b = np.asarray(one), np.asarray(other)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    nothing = (
        np.isnan(a) if a.dtype.kind == "f" else np.zeros(a.shape, bool)
    )  # the bits of NaN are left open
    return bool(np.array_equal(nothing, np.isnan(b) if b.dtype.kind == "f" else nothing)) and (
        np.where(nothing, 0, a).tobytes() == np.where(nothing, 0, b).tobytes()
    )


def check(name: str, seed: int) -> None:
    given = MAKERS[name](np.random.default_rng(seed))
    expected, found = (
        results(native.REFERENCES[name], given),
        results(getattr(native.core.loops, name), given),
    )
    for a, b in zip(expected, found, strict=True):
        assert same(a, b), (name, seed, a, b)


@pytest.mark.parametrize("name", MAKERS)
def test_a_loop_has_the_bits_of_its_reference(name: str) -> None:
    for seed in SEEDS:
        check(name, seed)


@pytest.mark.parametrize("name", ["confidences", "entropies", "gumbel", "largest", "top_log_probs"])
def test_simd_loops_have_the_same_bits_in_each_variant(variant: str, name: str) -> None:
    for seed in SEEDS:
        check(name, seed)


def test_all_loops_of_trees_are_checked() -> None:
    mine = {
        name
        for name, function in native.REFERENCES.items()
        if function.__module__.startswith("draftree.kernels.")
    }
    assert mine == MAKERS.keys()


def test_an_argument_of_another_type_is_refused_and_one_with_other_strides_is_read() -> None:
    score = np.arange(10.0)
    with pytest.raises(TypeError):
        score_ranking.falling(score.astype(np.float32))
    assert score_ranking.falling(score[::2]).tolist() == [4, 3, 2, 1, 0]


def test_columns_of_another_type_are_refused_and_with_other_strides_are_read() -> None:
    r = np.random.default_rng(0)
    nodes = tree(r)
    keep = np.ones(len(nodes.parents), np.bool_)
    strided = NodeTable._make(np.repeat(column, 2)[::2] for column in nodes)
    assert same(node_table.keep_nodes(strided, keep), (nodes, True))
    assert isinstance(node_table.keep_nodes(nodes, keep)[0], NodeTable)
    with pytest.raises(TypeError):
        node_table.keep_nodes(nodes._replace(score=nodes.tokens), keep)
    with pytest.raises(TypeError):
        node_table.keep_nodes(tuple(nodes)[:-1], keep)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        node_selection.select_nodes(
            nodes.score, PassPrice((nodes.tokens, nodes.score), 1, 1.0, 1.0)
        )
