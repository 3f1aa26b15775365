"""TALON: layers gated by confidence under a budget, against the paper's equations on plain lists."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_opttree import likely

from draftree.policies.talon import TALON
from grown_trees import always, grown, paths
from rules import Path, Rule, following


def layered(rule: Rule, nodes: int, width: int, mu: float, depth: int) -> dict[Path, float]:
    """Equations 5, 3 and 4 as they stand, layer by layer."""
    found: dict[Path, float] = {}
    layer: list[Path] = [()]
    for d in range(depth):
        pool = {
            (*path, token): (found[path] if path else 1.0) * math.exp(log_q)
            for path in layer
            for token, log_q in enumerate(rule((0, *path)))
            if log_q > -math.inf
        }
        kept = sorted(pool, key=lambda path: (-pool[path], path))
        kept = (
            kept[:width]
            if d == 0
            else [path for path in kept if pool[path] >= mu * max(pool.values())]
        )
        layer = kept[: nodes - len(found)]
        found |= {path: pool[path] for path in layer}
        if not layer:
            break
    return found


@given(
    st.integers(0, 999),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from([0.03, 0.3, 0.9]),
    st.integers(1, 5),
)
def test_the_equations_over_again(seed: int, nodes: int, width: int, mu: float, depth: int) -> None:
    rule = likely(seed, 5)
    tree = grown(TALON(nodes, width, mu, depth), following(rule))
    wanted = {path: math.log(p) for path, p in layered(rule, nodes, width, mu, depth).items()}
    assert dict(zip(paths(tree), tree.score[1:], strict=True)) == pytest.approx(wanted)


def test_a_sure_drafter_gets_a_chain_and_an_unsure_one_a_wide_layer() -> None:
    sure = grown(TALON(12, 2, 0.1), always(0.95, 0.02))
    assert (sure.depth.max(), sure.drafted) == (11, 12)
    unsure = grown(TALON(12, 2, 0.1), always(0.3, 0.3, 0.2))
    assert (unsure.depth.max(), unsure.drafted) == (3, 12)


def test_the_first_layer_is_wide_however_sure() -> None:
    assert paths(grown(TALON(4, 3, 0.5), always(0.99, 0.005, 0.005))) == [(0,), (1,), (2,), (0, 0)]
