"""The search for a static tree: acceptance by rank and depth, the two searches, the size, and the command.

Shapes: M roots, D depths, K ranks.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from draftree import Request, load
from draftree.cli.app import main
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.data.prompts import encode, question
from draftree.drafters.base import Drafter
from draftree.errors import NotANumber, UserError
from draftree.evaluation.target_trace import TokenText
from draftree.evaluation.teacher_forcing import greedy_answers, take_evenly
from draftree.policies.static import Static
from draftree.registry import part
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStateSpec, Target
from draftree.testing.fakes import Always, Never, Scripted, Sometimes, tiny_target
from draftree.tree import Candidates, Floats, Tree
from draftree.tuning import base
from draftree.tuning._static_tree_search import (
    Forests,
    RankTree,
    Shape,
    expected_tau,
    fastest_tree,
    greedy_tree,
    make_search,
    step_seconds,
)
from draftree.tuning.static import (
    MISSED,
    UNKNOWN,
    Acceptance,
    RankedTexts,
    Settings,
    StaticTreeSearch,
    converge,
    rank_texts,
    tree_file,
)
from draftree.utils.validated_dataclass import parse_options as parsed_knobs
from folders import target_folder

TABLE = np.array([[0.6, 0.3], [0.5, 0.2]])
"""Products: (0) .6, (1) .3, (0, 0) .6 · .5 = .3, (0, 1) .12, (1, 0) .15, (1, 1) .06."""


# The searches.


def test_greedy_adds_the_largest_product_and_of_equal_ones_the_shorter_path() -> None:
    assert greedy_tree(TABLE, 6) == ((0,), (1,), (0, 0), (1, 0), (0, 1), (1, 1))
    assert greedy_tree(TABLE, 3) == ((0,), (1,), (0, 0))
    assert greedy_tree(TABLE, 99) == greedy_tree(TABLE, 6)


def test_the_dynamic_programme_by_hand() -> None:
    # V(1, 1) = .5, V(1, 2) = .5 + .2 = .7. With rank 0 alone, B(0, 1, n) = .6 · (1 + V(1, n − 1)) =
    # .6, .9, 1.02. With rank 1: n = 1: .6; n = 2: .9, as .3 · 1 + .6 = .9 is no more; n = 3:
    # max(1.02, .3 + .9, .3 · 1.5 + .6) = 1.2; n = 4: max(1.02, .3 + 1.02, .45 + .9, .51 + .6) =
    # 1.35.
    plan = Forests.solve(TABLE, 4)
    assert plan.values == pytest.approx([0, 0.6, 0.9, 1.2, 1.35])
    assert plan.tree(2) == ((0,), (0, 0))
    assert plan.tree(3) == ((0,), (1,), (0, 0))
    assert plan.tree(4) == ((0,), (1,), (0, 0), (1, 0))


def test_expected_by_hand() -> None:
    assert expected_tau((), TABLE) == 1
    assert expected_tau(((0,), (1,), (0, 0), (1, 0)), TABLE) == pytest.approx(
        1 + 0.6 + 0.3 + 0.3 + 0.15
    )
    assert expected_tau(greedy_tree(TABLE, 6), TABLE) == pytest.approx(2.53)


@pytest.mark.parametrize("search", ["greedy", "sequoia"])
def test_a_rank_may_be_better_than_the_one_before_it(search: str) -> None:
    # (1) .5, (1, 0) .45, (0) .2, (0, 0) .18; what never happens is no node.
    table = np.array([[0.2, 0.5], [0.9, 0.0]])
    grow = make_search(search, table, 9)
    assert [set(grow(n)) for n in (1, 2, 3)] == [{(1,)}, {(1,), (1, 0)}, {(0,), (1,), (1, 0)}]
    assert set(grow(9)) == {(0,), (1,), (0, 0), (1, 0)}


def closed(nodes: int, depth: int, width: int) -> list[frozenset[tuple[int, ...]]]:
    """All trees of so many nodes, by adding every possible child to every tree that is one node smaller."""
    trees = {frozenset[tuple[int, ...]]()}
    for _ in range(nodes):
        grown = set()
        for tree in trees:
            parents = [p for p in ((), *tree) if len(p) < depth]
            grown |= {
                tree | {(*p, r)} for p in parents for r in range(width) if (*p, r) not in tree
            }
        trees = grown
    return list(trees)


SHAPES = {
    (depth, width): [closed(n, depth, width) for n in range(1, 5)]
    for depth, width in [(1, 4), (2, 2), (2, 3), (3, 2)]
}


@given(st.data(), st.sampled_from(sorted(SHAPES)))
def test_no_tree_is_expected_to_give_more(data: st.DataObject, shape: tuple[int, int]) -> None:
    table = data.draw(arrays(np.float64, shape, elements=st.floats(0, 1)))
    table = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    plan, order = Forests.solve(table, 4), greedy_tree(table, 4)
    for n, trees in enumerate(SHAPES[shape], 1):
        best = max((expected_tau(tuple(tree), table) for tree in trees), default=0.0)
        for found in (plan.tree(n), order[:n]):
            assert expected_tau(found, table) == pytest.approx(best)
            assert len(found) <= n


@given(
    arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 5)), elements=st.floats(0, 1)),
    st.integers(1, 40),
)
def test_greedy_and_dynamic_programme_agree(table: Floats, nodes: int) -> None:
    table = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    plan, order = Forests.solve(table, nodes), greedy_tree(table, nodes)
    for n in range(nodes + 1):
        found = plan.tree(n)
        assert len(set(found)) == len(found) <= n
        assert max(map(len, found), default=0) <= len(table)
        assert {path[:-1] for path in found} <= {(), *found}
        assert expected_tau(found, table) == pytest.approx(expected_tau(order[:n], table))
        assert expected_tau(found, table) == pytest.approx(1 + plan.values[n])


def test_large_trees_are_planned() -> None:
    table = 0.7 * 0.3 ** np.arange(10) * np.linspace(1, 0.6, 10)[:, None]
    found = Forests.solve(table, 128).tree(128)
    assert len(found) == 128
    assert expected_tau(found, table) == pytest.approx(expected_tau(greedy_tree(table, 128), table))


# Acceptance.

SEEN = Acceptance(
    np.array([[0, 1, MISSED], [MISSED, 0, 0], [1, UNKNOWN, UNKNOWN], [0, 0, 0]]), width=2
)


def test_acceptance_by_hand() -> None:
    # Depth 1: four places, rank 0 twice, rank 1 once. Depth 2: the second root's draft has failed,
    # the third's text has ended; ranks 1 and 0. Depth 3: of the first and the last root, rank 0
    # once.
    assert SEEN.places.tolist() == [4, 2, 2]
    assert SEEN.table.tolist() == [[0.5, 0.25], [0.5, 0.5], [0.5, 0.0]]


@given(arrays(np.int64, st.tuples(st.integers(1, 30), st.just(3)), elements=st.integers(-1, 1)))
def test_expectation_for_the_complete_tree_is_what_happened(found: np.ndarray) -> None:
    seen = Acceptance(found, width=2)
    complete: RankTree = tuple(
        path for d in (1, 2, 3) for path in itertools.product(range(2), repeat=d)
    )
    lengths = (found >= 0).cumprod(axis=1).sum(axis=1)
    assert expected_tau(complete, seen.table) == pytest.approx(1 + lengths.mean())
    assert (seen.table.sum(axis=1) <= 1 + 1e-12).all()


# Decoding with a tree along the texts.

LINES = np.array(
    [
        [0, 0, 1],
        [0, 1, 0],
        [1, 0, 0],
        [0, 0, MISSED],
        [0, MISSED, UNKNOWN],
        [MISSED, UNKNOWN, UNKNOWN],
    ]
)
"""Tokens of ranks 0, 0, 1, 0, 0, and none; every line begins a token later than the one before it.
"""


def test_decoding_along_a_text_by_hand() -> None:
    driven = RankedTexts([LINES, LINES[3:]], width=2)
    assert driven.everywhere.places[0] == 9
    # With (0), (0, 0) the first text takes three tokens (0, 0 and the target's own), then three (0,
    # 0 and its own) from the fourth line on; the second text, which begins there, takes three too:
    # nine tokens in three steps.
    seen, tau = driven.simulate_decoding(((0,), (0, 0)))
    assert (seen.ranks.tolist(), tau) == (
        [LINES[0].tolist(), LINES[3].tolist(), LINES[3].tolist()],
        3.0,
    )
    # With (0) alone: lines 0, 2 (rank 1: one token), 3, 5 and, in the second text, 3, 5.
    seen, tau = driven.simulate_decoding(((0,),))
    assert (seen.ranks.tolist(), tau) == (LINES[[0, 2, 3, 5, 3, 5]].tolist(), 9 / 6)
    # What reaches beyond a text's end gives no more than its tokens.
    assert RankedTexts([LINES[:1]], 2).simulate_decoding(((0,), (0, 0)))[1] == 1.0


def test_a_tree_is_settled_on_for_its_own_roots() -> None:
    # The text: two easy tokens (ranks 0, 0), a hard one (rank 1), again and again. Over all tokens
    # rank 0 is right twice as often; but behind (0), (0, 0) and the hard token every root is easy.
    ranks = np.array([0, 0, 1] * 20 + [0, 0])
    driven = RankedTexts([np.stack([ranks[i : i + 2] for i in range(60)])], width=2)
    assert driven.everywhere.table[0] == pytest.approx([2 / 3, 1 / 3])
    costs = Costs({1: 0.01}, {1: 1.0})
    choose = lambda table: Shape.of(greedy_tree(table, 2), table, costs)
    plan, seen, tau = converge(driven, choose, costs)
    assert set(plan.paths) == {(0,), (0, 0)}
    assert (plan.tau, tau) == (3.0, 3.0)
    assert seen.table.tolist() == [[1.0, 0.0], [1.0, 0.0]]


# Measuring.

PROMPTS = [[3, 17, 40, 8, 22], [50, 2, 9]]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def texts(target: Target) -> list[TokenText]:
    return greedy_answers(target, PROMPTS[:1], 20) + greedy_answers(target, PROMPTS[1:], 14)


def proposed(
    target: Target,
    drafter: Drafter,
    text: TokenText,
    row: int,
    root: int,
    chain: Sequence[int],
    width: int,
) -> Candidates:
    """What a drafter proposes after a chain when it has read the text before it at once."""
    rows: list[np.ndarray] = [text.tokens[:root]] * (row + 1)
    verified = target.prefill(target.new_cache(row + 1, 64), rows, drafter.needs)
    state = drafter.start(rows, np.full(row + 1, chain[0]), verified.hidden_states)
    tree = Tree.from_roots(np.array([row]), np.array(chain[:1]))
    for node, token in enumerate([*chain[1:], 0]):
        found, state = drafter.expand(state, tree, np.array([node]), width, Drawing())
        tree = tree.append(np.array([node]), np.array([token]), np.zeros(1), np.zeros(1), found)
    return found


def looked_up(
    target: Target, drafter: Drafter, texts: Sequence[TokenText], depth: int, width: int
) -> list[list[int]]:
    """The ranks, every place by itself."""
    found = []
    for row, text in enumerate(texts):
        tokens, last = text.tokens.tolist(), len(text.tokens) - 1
        choice = [
            int(
                target.prefill(
                    target.new_cache(1, 64), [text.tokens[: n + 1]], HiddenStateSpec()
                ).logits.argmax()
            )
            for n in range(last)
        ]
        for root in range(text.start, last):
            line = [UNKNOWN] * depth
            for d in range(min(depth, last - root)):
                at = root + d
                candidates = proposed(
                    target, drafter, text, row, root, tokens[root : at + 1], width
                )
                offered = candidates.tokens[0, np.isfinite(candidates.log_q[0])].tolist()
                line[d] = offered.index(choice[at]) if choice[at] in offered else MISSED
                if choice[at] != tokens[at + 1]:
                    break
            found.append(line)
    return found


@pytest.mark.parametrize(("depth", "width"), [(6, 3), (6, 2), (3, 1), (1, 3)])
def test_the_ranks_of_a_script_are_found(
    target: Target, texts: list[TokenText], depth: int, width: int
) -> None:
    script = Sometimes([t.tokens for t in texts], target.decoder.vocab)
    wanted = []
    for row, text in enumerate(texts):
        last = len(text.tokens) - 1
        for root in range(text.start, last):
            places = [
                script.place(row, root + d) if root + d <= last else UNKNOWN
                for d in range(1, depth + 1)
            ]
            wanted.append([MISSED if p is None or p >= width else p for p in places])
    found = rank_texts(target, script, texts, depth, width).everywhere.ranks
    assert found.tolist() == wanted
    assert {MISSED, 0} <= set(np.unique(found).tolist())


def test_perfect_and_wrong_drafters_have_certain_acceptance(
    target: Target, texts: list[TokenText]
) -> None:
    plans, vocab = [t.tokens for t in texts], target.decoder.vocab
    always = rank_texts(target, Always(plans, vocab), texts, 4, 3)
    assert always.everywhere.table.tolist() == [[1.0, 0.0, 0.0]] * 4
    never = rank_texts(target, Never(plans, vocab), texts, 4, 3)
    assert not never.everywhere.table.any()
    assert never.everywhere.places[1:].tolist() == [0, 0, 0], (
        "nothing is drafted below a draft that cannot be right"
    )
    with pytest.raises(UserError, match="none of the drafter's candidates"):
        tree_file(Settings(), never, Costs({1: 0.1}, {1: 1.0}))


@pytest.mark.parametrize("name", ["eagle", "edd", "medusa", "glide"])
def test_a_drafter_sees_what_it_sees_in_decoding(
    target: Target, texts: list[TokenText], name: str
) -> None:
    drafter = part("drafter", name)().example(target)
    found = rank_texts(target, drafter, texts[:1], 6, 30).everywhere.ranks
    assert found.tolist() == looked_up(target, drafter, texts[:1], 6, 30)
    assert len(np.unique(found)) > 2


def test_behind_what_the_target_would_not_have_said_nothing_is_known(
    target: Target, texts: list[TokenText]
) -> None:
    """Texts are read as they are: one token of the target's answer is another."""
    tokens = texts[0].tokens.copy()
    tokens[9] = (tokens[9] + 1) % 61
    read = [TokenText(tokens, 5)]
    script: Scripted = Sometimes([tokens], target.decoder.vocab)
    found = rank_texts(target, script, read, 6, 5).everywhere.ranks
    assert found.tolist() == looked_up(target, script, read, 6, 5)
    assert found[0, 3] != UNKNOWN, "tokens 6, 7, 8 and then the target's choice after 8 are known"
    assert found[0, 4:].tolist() == [UNKNOWN] * 2


def test_a_target_without_numbers_is_refused(
    target: Target, texts: list[TokenText], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = target.verify

    def broken(*args, **more):
        verified = verify(*args, **more)
        verified.logits[:] = float("nan")
        return verified

    monkeypatch.setattr(target, "verify", broken)
    with pytest.raises(NotANumber):
        rank_texts(target, Always([t.tokens for t in texts], 61), texts, 2, 2)


# The size.


def test_seconds_of_a_step_by_hand() -> None:
    # Drafted from: the root; two nodes of depth 1; one of depth 2. Verified: 5 nodes and the root.
    costs = Costs({1: 0.1, 2: 0.15}, {1: 1.0, 6: 1.5}, commit=0.05)
    tree: RankTree = ((0,), (1,), (0, 0), (1, 0), (0, 0, 0))
    assert step_seconds(tree, costs) == pytest.approx(0.1 + 0.15 + 0.1 + 1.5 + 0.05)


@pytest.mark.parametrize("search", ["greedy", "sequoia"])
def test_the_size_by_hand(search: str) -> None:
    # A draft step costs .2, a pass 1 + .1 for each node. τ of a chain is 1.8, 2.44, and the third
    # node adds .1: 1.8 / (.2 + 1.1) = 1.385; 1.9 / (.2 + 1.2) = 1.357; 2.44 / (.4 + 1.2) = 1.525;
    # 2.54 / (.4 + 1.3) = 1.494.
    table = np.array([[0.8, 0.1], [0.8, 0.1]])
    plan = fastest_tree(search, table, Costs({1: 0.2}, {1: 1.0, 2: 1.1}))
    assert plan.paths == ((0,), (0, 0))
    assert (plan.tau, plan.speedup, plan.depth) == pytest.approx((2.44, 1.525, 2))
    # Draft steps of .7: 1.8 / (.7 + 1.1) = 1 is more than 2.44 / (1.4 + 1.2) = .938.
    plan = fastest_tree(search, table, Costs({1: 0.7}, {1: 1.0, 2: 1.1}))
    assert (plan.paths, plan.depth) == (((0,),), 1)
    assert plan.speedup == pytest.approx(1.0)
    # Nodes for nothing: all that ever come right, here 2 + 4.
    assert len(fastest_tree(search, table, Costs({1: 0.01}, {1: 1.0})).paths) == 6


@pytest.mark.parametrize("search", ["greedy", "sequoia"])
def test_no_other_size_or_depth_is_faster(search: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        table = rng.dirichlet([3.0, 1.0, 1.0, 2.0], size=4)[:, :3]
        costs = Costs(
            {1: rng.uniform(0.02, 0.5), 8: 0.5},
            {1: 1.0, 16: rng.uniform(1, 2), 32: 4.0},
            commit=0.1,
        )
        best = fastest_tree(search, table, costs, most=30)
        others = [
            Shape.of(make_search("greedy", table[:d], 30)(n), table, costs).speedup
            for d in range(1, 5)
            for n in range(1, 31)
        ]
        assert best.speedup >= max(others) * (1 - 1e-12)
        assert best.tau == pytest.approx(expected_tau(best.paths, table))


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(target_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture
def asked(tmp_path: Path, folder: str) -> list[str]:
    """A command: the target drafts for itself, so that its first candidate is always right."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "yes " * 4},
            ]
        }
        for i in range(6)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    costs = {
        "draft": {"1": 0.2},
        "target": {"1": 1.0, "2": 1.1},
        "commit": 0.0,
        "context": 0,
        "rows": 1,
    }
    (tmp_path / "costs.json").write_text(json.dumps({"entries": [costs], "about": {}}))
    return ["train", "static", "--target", folder, "--drafter", f"lm:model={folder}", "--data", str(tmp_path / "chats.jsonl"),
            "--out", str(tmp_path / "tree.json"), "--costs", str(tmp_path / "costs.json")]  # fmt: skip


def told(capfd: pytest.CaptureFixture[str], args: Sequence[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(args)
    out, err = capfd.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.parametrize("more", [(), ("--set", "search=greedy")])
def test_the_command_writes_a_tree(
    asked: list[str],
    folder: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    more: tuple[str, ...],
) -> None:
    knobs = ("--set", "depth=4", "--set", "width=3", "--set", "tokens=12", "--set", "prompts=5")
    status, out, err = told(capfd, [*asked, *knobs, *more, "--json"])
    assert (status, err) == (0, "")
    found = json.loads(out)
    file = json.loads((tmp_path / "tree.json").read_text())
    assert {**file, "out": str(tmp_path / "tree.json")} == found
    table = np.array(found["acceptance"])
    assert table[:, 0] == pytest.approx(1.0)
    # Each depth adds one token for .2 + .1 s: 5 / (1 + 4 · .3) is the most.
    assert found["paths"] == [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
    assert (found["tau"], found["nodes"], found["depth"]) == (5, 4, 4)
    assert found["decoded_tau"] == pytest.approx(11 / 3), (
        "11 tokens follow the first of each answer: 5, 5 and 1 of them"
    )
    assert found["speedup"] == pytest.approx(5 / 2.2)
    assert found["drafter"] == f"lm:model={folder}"
    assert Static(str(tmp_path / "tree.json")).children.tolist() == [[1], [2], [3], [4], [0]]


def test_texts_are_read_as_they_are(asked: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = told(capfd, [*asked, "--set", "answers=false", "--set", "depth=2", "--json"])
    found = json.loads(out)
    assert status == 0
    assert found["places"][0] <= 6 * 16, "six times 'yes yes yes yes ' and what ends it, 17 tokens"
    assert found["acceptance"][0][0] == 1.0
    assert found["places"][1] < found["places"][0], "the target would have gone on otherwise"


def test_the_last_line_tells_what_was_found_and_the_tree_is_used(
    asked: list[str], folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, out, err = told(
        capfd, [*asked, "--set", "nodes=2", "--set", "depth=3", "--set", "tokens=8"]
    )
    assert (status, err) == (0, "")
    # 3 / (2 · .2 + 1.2) = 1.875; of the 7 tokens after an answer's first, steps take 3, 3 and 1.
    last = "tree.json: expected τ 3.00 (decoding along the data 2.33), 2 nodes, depth 2, predicted speed-up 1.88"
    assert out.splitlines()[-1].endswith(last)
    engine = load(folder, f"lm:model={folder}", f"static:paths={tmp_path / 'tree.json'}")
    request = Request(encode(engine.tokenizer, question("7?")), 12, engine.eos)
    done = engine.write([request])
    assert done.tokens == engine.plain([request]).tokens
    assert {s.nodes for s in done.stats.steps[:-1]} == {2}


MISTAKES: dict[str, tuple[list[str], str]] = {
    "knob": (["--set", "node=3"], "did you mean 'nodes'"),
    "no value": (["--set", "nodes"], "allowed is KEY=VALUE"),
    "value": (["--set", "nodes=many"], "nodes is 'many', allowed is a whole number or auto"),
    "nodes": (["--set", "nodes=0"], "nodes is 0, allowed is auto or 1 …"),
    "too many": (
        ["--set", "nodes=4", "--set", "width=1", "--set", "depth=3"],
        "auto or 1 … 3, with depth 3 and width 1",
    ),
    "search": (["--set", "search=beam"], "allowed is greedy or sequoia"),
    "depth": (["--set", "depth=0"], "depth is 0"),
    "tokens": (["--set", "tokens=1"], "tokens is 1"),
    "option": (["--lr", "0.1", "--bf16"], "was given --lr, --bf16, allowed are"),
    "drafter": (["--drafter", "medusb"], "did you mean 'medusa'"),
    "long": (["--set", "tokens=160"], "no prompt in"),
    "data": (["--data", "none.jsonl"], "none.jsonl"),
    "costs": (["--costs", "none.json"], "none.json"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_told_in_one_line_and_leave_nothing(
    case: str, asked: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    status, out, err = told(capfd, [*asked, *MISTAKES[case][0]])
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert MISTAKES[case][1] in err
    assert sorted(tmp_path.iterdir()) == before


def test_a_drafter_must_be_named_and_no_file_is_overwritten(
    asked: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    at = asked.index("--drafter")
    status, _, err = told(capfd, asked[:at] + asked[at + 2 :])
    assert (status, err.count("\n")) == (2, 1)
    assert "needs --drafter" in err
    (tmp_path / "tree.json").write_text("[[0]]")
    status, _, err = told(capfd, asked)
    assert (status, err.count("\n")) == (2, 1)
    assert "exists; --force overwrites it" in err
    assert (tmp_path / "tree.json").read_text() == "[[0]]"


def test_knobs_may_stand_in_the_spec() -> None:
    parsed = lambda items: Settings(**parsed_knobs(items, Settings, "'static'"))
    assert parsed(["nodes=auto", "search=greedy", "answers=false"]) == Settings(
        "greedy", answers=False
    )
    assert parsed(["nodes=7"]).nodes == 7


def test_a_tree_is_found_from_python(asked: list[str], folder: str, tmp_path: Path) -> None:
    told: list[str] = []
    search = StaticTreeSearch(
        f"lm:model={folder}",
        Settings(depth=2, width=2, tokens=8, nodes=2),
        CostTable.load(tmp_path / "costs.json"),
    )
    tell = lambda done, remark="", of=None: told.append(remark)
    found = search.fit(
        Target.load(folder), [tmp_path / "chats.jsonl"], tmp_path / "found.json", tell
    )
    assert (found.figures["nodes"], found.figures["paths"]) == (
        2,
        json.loads((tmp_path / "found.json").read_text())["paths"],
    )
    assert list(dict.fromkeys(told)) == [
        "loading", "answering", "running the drafter on", "measuring the cost of a step", "searching",
    ]  # fmt: skip
    with pytest.raises(UserError, match="exists, allowed is a new file"):
        search.fit("none", [], tmp_path / "found.json")


def test_tunable_policies_are_found_by_name() -> None:
    assert [base.part(name).options >= {"drafter"} for name in base.tunable_policies()] == [
        True,
        True,
    ]


def test_prompts_are_spread() -> None:
    assert take_evenly(range(10), 5) == [0, 2, 4, 6, 8]
    assert take_evenly(range(3), 5) == [0, 1, 2]
    assert take_evenly([], 5) == []
