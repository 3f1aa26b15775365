"""Static trees: the shipped ones by what is known of them, and any by its definition."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree import registry
from draftree.errors import UnknownName, UserError
from draftree.policies.static import SHIPPED, Static
from grown_trees import always, grown, paths
from rules import Rule, following, levels

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "trees.json"
TREES: dict[str, list[list[int]]] = json.loads(SHIPPED.read_text())
COMPLETE = levels(0, 10, missing=0.0)


def in_order(tree: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Paths as nodes are numbered: the shorter ones first, then by ranks."""
    return sorted((tuple(path) for path in tree), key=lambda path: (len(path), path))


def saved(tree: object, folder: Path) -> str:
    (folder / "tree.json").write_text(json.dumps(tree))
    return str(folder / "tree.json")


# The shipped trees.


@pytest.mark.parametrize("name", TREES)
def test_a_shipped_tree_grows_in_full(name: str) -> None:
    tree = grown(Static(name), following(COMPLETE))
    assert paths(tree) == in_order(TREES[name])
    assert (
        tree.drafted
        == {"eagle1": 25, "hydra": 63, "medusa": 63, "token_recycling": 80, "smollm2": 32}[
            name.partition("/")[0]
        ]
    )


@pytest.mark.skipif(
    not REFERENCE.is_file(), reason="the trees read from the official codes are not here"
)
def test_all_published_trees_are_shipped_as_they_are() -> None:
    published = json.loads(REFERENCE.read_text())
    theirs = {
        name: in_order(tree) for name, tree in TREES.items() if not name.startswith("smollm2/")
    }
    assert theirs == {name: in_order(t) for name, t in published.items()}


def test_eagle1_is_the_papers() -> None:
    digits = (
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    )
    assert paths(grown(Static(), following(COMPLETE))) == [
        tuple(map(int, d)) for d in digits.split()
    ]


MEDUSA = {
    "mc_sim_7b_63": "10, 0: 10, 1: 7, 2: 3, 3: 2, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1, 00: 10, 01: 3, 02: 2, 03: 1, 04: 1, "
    "05: 1, 06: 1, 07: 1, 10: 2, 20: 1, 000: 2",
    "vicuna_7b_stage2": "10, 0: 10, 1: 5, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1, 7: 1, 00: 9, 01: 4, 02: 2, 03: 1, 04: 1, 05: 1, "
    "10: 3, 11: 1, 20: 1, 000: 4, 001: 1, 002: 1, 010: 1",
}
"""Children of the root, then of each path that has any, as read from the official code."""


@pytest.mark.parametrize("name", MEDUSA)
def test_medusas_have_the_official_numbers_of_children(name: str) -> None:
    found = Counter("".join(map(str, path[:-1])) for path in TREES[f"medusa/{name}"])
    root, *others = MEDUSA[name].split(", ")
    assert found == {"": int(root)} | {
        path: int(n) for path, n in (item.split(": ") for item in others)
    }


# What is asked for.


def test_only_nodes_with_children_are_expanded() -> None:
    asked: list[tuple[list[int], int]] = []
    grown(Static(), following(COMPLETE, asked))
    assert asked == [([0], 4), ([1, 2, 3, 4], 4), ([5, 6, 7, 8], 4), ([13], 4), ([21], 4)]
    rows: list[tuple[list[int], int]] = []
    grown(Static("medusa/mc_sim_7b_63"), following(COMPLETE, rows), depth=(2, 0, 9))
    assert [(len(frontier), k) for frontier, k in rows] == [(2, 10), (20, 10), (10, 10), (1, 10)], (
        "a tenth child once a row"
    )


def test_scores_are_values() -> None:
    tree = grown(Static(), always(0.5, 0.25, 0.125, 0.0625))
    of = dict(zip(paths(tree), np.exp(tree.score[1:]), strict=True))
    assert of[(0, 0, 0, 0, 1)] == pytest.approx(2**-6)
    assert of[(2, 1)] == pytest.approx(2**-5)


# Any tree, by its definition.

ranks = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


def present(path: tuple[int, ...], row: int, rule: Rule) -> bool:
    """Whether all candidates along a path are there."""
    return all(
        (q := rule((row, *path[:i])))[r : r + 1] and q[r] > -np.inf for i, r in enumerate(path)
    )


@given(
    st.lists(ranks, min_size=1, max_size=12),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(0, 99),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.2, 0.7]),
    st.sampled_from([2, 5, 9, 99]),
)
def test_the_tree_is_its_paths_less_what_is_missing(
    folder: Path,
    some: list[list[int]],
    rooms: list[int],
    seed: int,
    width: int,
    missing: float,
    nodes: int,
) -> None:
    tree = in_order({tuple(path[:n]) for path in some for n in range(1, len(path) + 1)})
    rule = levels(seed, width, missing=missing)
    found = grown(Static(saved(tree[::-1], folder)), following(rule), depth=rooms, nodes=nodes)
    for row, room in enumerate(rooms):
        assert paths(found, row) == [
            p for p in tree[:nodes] if len(p) <= room and present(p, row, rule)
        ]


def test_a_missing_candidate_takes_what_is_below_it_and_shifts_no_rank(tmp_path: Path) -> None:
    tree = [[0], [1], [2], [0, 0], [1, 0], [2, 1]]
    rule = lambda path: [-1.0, -np.inf, -1.0] if path == (0,) else [-1.0] * 3
    assert paths(grown(Static(saved(tree, tmp_path)), following(rule))) == [
        (0,),
        (2,),
        (0, 0),
        (2, 1),
    ]


def test_its_shape_does_not_depend_on_what_was_drawn() -> None:
    assert not Static().prunes_on_draws
    for seed in range(5):
        drawn = following(levels(seed, 4, missing=0.0))
        assert paths(grown(Static(), drawn)) == in_order(TREES["eagle1/mc_sim_7b_63"])
        few = grown(Static(), drawn, nodes=6)
        assert paths(few) == [(0,), (1,), (2,), (3,), (0, 0), (0, 1)], (
            "where not all have room, the first stay"
        )


# What is wrong.


def test_a_spec_names_a_tree_or_a_file(tmp_path: Path) -> None:
    assert registry.build("policy", "static") == Static("eagle1/mc_sim_7b_63")
    assert registry.build("policy", "static:paths=medusa/vicuna_7b_stage2") == Static(
        "medusa/vicuna_7b_stage2"
    )
    file = saved([[1], [0]], tmp_path)
    assert paths(grown(registry.build("policy", f"static:paths={file}"), always(0.5, 0.4))) == [
        (0,),
        (1,),
    ]


def test_a_file_may_say_more_than_its_paths(tmp_path: Path) -> None:
    file = saved({"paths": [[0], [0, 1]], "tau": 1.5, "drafter": "eagle"}, tmp_path)
    assert paths(grown(Static(file), always(0.5, 0.4))) == [(0,), (0, 1)]


def test_an_unknown_tree_is_told_with_the_nearest() -> None:
    with pytest.raises(
        UnknownName,
        match=r"unknown tree .* 'medusa/mc_sim_7b': known are .*did you mean 'medusa/mc_sim_7b_63'",
    ):
        Static("medusa/mc_sim_7b")


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ([[0], [0, 1, 2]], r"path \[0, 1, 2\] without its beginning \[0, 1\]"),
        ([[1, 0]], r"path \[1, 0\] without its beginning \[1\]"),
        ([], r"holds \[\], allowed is"),
        ({"a": [[0]]}, r"holds \{.*allowed is a JSON list"),
        ({"paths": []}, r"holds \[\], allowed is a JSON list"),
        ({"paths": {"0": 1}}, r"holds \{.*allowed is a JSON list"),
        ({"paths": [[0], 3]}, "has path 3, allowed"),
        ([[0], []], r"has path \[\], allowed"),
        ([[0], 3], "has path 3, allowed"),
        ([[-1]], r"has path \[-1\], allowed"),
        ([[0.0]], r"has path \[0\.0\], allowed"),
        ([[True]], r"has path \[True\], allowed"),
    ],
)
def test_invalid_trees_are_refused(tree: object, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        Static(saved(tree, tmp_path))


@pytest.mark.parametrize("content", [b"[[0]", b"\xff\xfe"])
def test_a_file_that_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_bytes(content)
    with pytest.raises(
        UserError, match=r"tree\.json' is not a tree, a JSON list of lists of ranks: "
    ):
        Static(str(tmp_path / "tree.json"))
