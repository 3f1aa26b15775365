"""C2T's tree on invented numbers, its classifier, and how that is trained."""

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree import registry
from draftree.engine import Engine, Generation
from draftree.errors import UserError
from draftree.policies.c2t import C2T, FEATURES, Classifier
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing, draw_candidates
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.params import Sampling
from draftree.testing.fakes import Always, Never, tiny_target
from draftree.training.base import Fitted
from draftree.tree import Candidates, Draw, Ints, Tree
from draftree.tuning import _tree_dataset, c2t
from draftree.tuning._tree_dataset import Collected, Knobs, Nodes, TreeRecorder
from draftree.tuning.c2t import Hyperparameters, Round, Training
from draftree.weights import demo_folder
from folders import target_folder
from grown_trees import always, grown, paths
from rules import Path as Tokens
from rules import Rule, following, levels


def net(
    p: float = 0.0, h: float = 0.0, d: float = 0.0, bias: float = 0.0, **known: Any
) -> Classifier:
    """C = sigmoid(p·P + h·H + d·d + bias): one hidden unit for each feature, none of which is ever below 0."""
    return Classifier(
        np.eye(3), np.zeros(3), np.array([p, h, d]), np.array(bias), **{"log_joint": False} | known
    )


@pytest.fixture
def using(tmp_path: Path) -> Callable[..., C2T]:
    """C2T with a classifier made by hand."""

    def made(classifier: Classifier, **knobs: Any) -> C2T:
        classifier.save(tmp_path / "classifier")
        return C2T(classifier=str(tmp_path / "classifier"), **knobs)

    return made


# The classifier.


def test_confidence_by_hand() -> None:
    # Two hidden units: h1 = relu(4 P − 1), h2 = relu(H − d); z = 2 h1 − h2 − 1.
    two = Classifier(np.array([[4.0, 0, 0], [0, 1, -1]]), np.array([-1.0, 0]), np.array([2.0, -1]), np.array(-1.0),
                     log_joint=False)  # fmt: skip
    of = lambda p, h, d: float(two.confidence(np.log([p]), np.array([h]), np.array([d]))[0])
    assert of(0.5, 2.0, 1.0) == 0.5  # h1 = 2 − 1 = 1, h2 = 2 − 1 = 1, z = 2 − 1 − 1 = 0
    assert of(0.25, 2.0, 1.0) == pytest.approx(1 / (1 + math.exp(2)))  # h1 = 0, h2 = 1, z = −2
    assert of(0.125, 2.0, 1.0) == of(0.25, 2.0, 1.0)  # h1 = relu(−.5) = 0 again
    assert of(0.5, 2.0, 3.0) == pytest.approx(1 / (1 + math.exp(-1)))  # h2 = relu(−1) = 0, z = 1
    assert of(1.0, 1e6, 1.0) == 0.0  # far away there is no overflow


def test_log_p_by_hand() -> None:
    # One unit: relu(ln P + 3), z = 1 − it; ln P is not taken below ln 10⁻¹² = −27.6.
    one = Classifier(
        np.array([[1.0]]), np.array([3.0]), np.array([-1.0]), np.array(1.0), "P", log_joint=True
    )
    of = lambda log_p: float(one.confidence(np.array([log_p]), np.zeros(1), np.ones(1))[0])
    assert of(-2.0) == 0.5  # relu(1) = 1, z = 0
    assert of(-1.0) == pytest.approx(1 / (1 + math.e))  # relu(2) = 2, z = −1
    steep = replace(
        one, hidden_weight=np.array([[-1.0]]), hidden_bias=np.zeros(1), output_bias=np.array(28.0)
    )
    low = [
        float(steep.confidence(np.array([x]), np.zeros(1), np.ones(1))[0])
        for x in (-27.0, -100.0, -np.inf)
    ]
    assert low == pytest.approx(
        [1 / (1 + math.exp(-1)), *[1 / (1 + math.exp(-(28 - 12 * math.log(10))))] * 2]
    )


@pytest.mark.parametrize("features", FEATURES)
def test_a_subset_reads_its_own_features(features: str) -> None:
    count = features.count("+") + 1
    part = Classifier(
        np.ones((1, count)), np.zeros(1), np.ones(1), np.zeros(()), features, log_joint=False
    )
    read = {
        "P": np.full((2, 3), 0.25),
        "H": np.array([[1.0], [2.0]]),
        "d": np.array([[3.0], [3.0]]),
    }
    found = part.confidence(np.log(read["P"]), read["H"], read["d"])
    z = sum(np.broadcast_to(read[name], (2, 3)) for name in features.split("+"))
    assert found == pytest.approx(1 / (1 + np.exp(-z)))
    assert found.shape == (2, 3)
    assert part.reads_entropy == ("H" in features)


def test_a_node_gets_the_same_confidence_alone_and_among_others() -> None:
    rng = np.random.default_rng(0)
    some = Classifier(
        rng.normal(size=(48, 3)),
        rng.normal(size=48),
        rng.normal(size=48),
        np.array(0.1),
        log_joint=True,
    )
    log_p = np.log(rng.random((7, 15)))
    entropy = rng.random((7, 1)) * 8
    depth = rng.integers(1, 11, (7, 1)).astype(np.float64)
    whole = some.confidence(log_p, entropy, depth)
    for i, j in np.ndindex(7, 15):
        assert (
            some.confidence(log_p[i : i + 1, j : j + 1], entropy[i : i + 1], depth[i : i + 1])[0, 0]
            == whole[i, j]
        )


def test_a_classifier_is_read_as_it_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=s).astype(np.float32).astype(np.float64) for s in ((5, 2), 5, 5, ())]
    Classifier(*weights, "P+d", 77, True, {"target": "demo"}).save(tmp_path)
    found = Classifier.load(tmp_path)
    assert (found.features, found.entropy_top, found.log_joint, found.trained_on) == (
        "P+d",
        77,
        True,
        {"target": "demo"},
    )
    for name, value in zip(
        ("hidden_weight", "hidden_bias", "output_weight", "output_bias"), weights, strict=True
    ):
        assert np.array_equal(getattr(found, name), value)


def spoilt(config: dict[str, Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(said))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            "config.json' is not a classifier's config: No such file",
        ),
        (spoilt({"policy": None}), "does not say policy 'c2t'"),
        (spoilt({"features": "P+h+d"}), r"unknown features 'P\+h\+d'.*did you mean 'P\+H\+d'"),
        (spoilt({"hidden": 4}), r"allowed for its config are .*\(4, 3\)"),
        (spoilt({"hidden": True}), "hidden is True, allowed is a whole number"),
        (spoilt({"entropy_top": 0}), "entropy_top is 0, allowed is a whole number"),
        (
            lambda folder: (folder / "model.safetensors").write_text("no"),
            "cannot read .*model.safetensors",
        ),
        (lambda folder: net(p=math.nan).save(folder), "not finite"),
    ],
)
def test_invalid_classifiers_are_refused(
    tmp_path: Path, spoil: Callable[[Path], None], told: str
) -> None:
    net().save(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=told):
        C2T(classifier=str(tmp_path))


# The tree, by hand.


def test_confident_nodes_stay_and_are_expanded(using: Callable[..., C2T]) -> None:
    # z = 16 P − d after q = .6, .3, .05; a node stays where z ≥ 0 (C ≥ .5), and only then is
    # drafted behind. d = 1: P .6 → 8.6, .3 → 3.8, .05 → −.2 is left out. d = 2: .36 → 3.76, .18 →
    # .88, .03 → −1.52 | .18 → .88, .09 → −.56, .015 → −1.76. d = 3: .216 → .456, .108 → −1.27, … |
    # .108 → −1.27, … | .108, … d = 4: .1296 → −1.93, so that nothing is left to be drafted behind.
    asked: list[list[int]] = []
    tree = grown(using(net(p=16, d=-1), width=3), always(0.6, 0.3, 0.05, asked=asked))
    assert paths(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    assert asked == [[0], [1, 2], [3, 4, 5], [6]]
    assert np.exp(tree.score[1:]) == pytest.approx([0.6, 0.3, 0.36, 0.18, 0.18, 0.216]), (
        "the score stays the path's log q"
    )


def test_beta_decides(using: Callable[..., C2T]) -> None:
    # C ≥ .9 where z ≥ ln 9 = 2.197: of the above 8.6, 3.8 and 3.76.
    assert paths(grown(using(net(p=16, d=-1), width=3, beta=0.9), always(0.6, 0.3, 0.05))) == [
        (0,),
        (1,),
        (0, 0),
    ]
    assert grown(using(net(p=16, d=-1), beta=1.0), always(0.6, 0.3)).drafted == 0
    assert (
        grown(
            using(net(p=16, d=-1), beta=0.0, width=2, depth=3, layer_top=None), always(0.6, 0.3)
        ).drafted
        == 2 + 4 + 8
    )


def test_a_confidence_of_exactly_beta_stays(using: Callable[..., C2T]) -> None:
    # z = 2 − d is 0 in layer 2, where C is .5 (algorithm 1, line 14 removes C < β), and −1 in layer
    # 3.
    asked: list[list[int]] = []
    assert paths(grown(using(net(d=-1, bias=2), width=1), always(1.0, asked=asked))) == [
        (0,),
        (0, 0),
    ]
    assert asked == [[0], [1], [2]]
    assert paths(
        grown(using(net(d=-1, bias=2), width=1, beta=np.nextafter(0.5, 1)), always(1.0))
    ) == [(0,)]


def test_width_and_depth_end_the_tree(using: Callable[..., C2T]) -> None:
    tree = grown(using(net(bias=9), width=2, depth=2), always(0.5, 0.3, 0.2))
    assert paths(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_layer_keeps_its_most_confident(using: Callable[..., C2T]) -> None:
    # As above; layer 2 has 3.76 and twice .88, of which the first is kept.
    first = using(net(p=16, d=-1), width=3, layer_top=2)
    assert paths(grown(first, always(0.6, 0.3, 0.05))) == [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
    assert paths(grown(using(net(p=16, d=-1), width=3, layer_top=1), always(0.6, 0.3, 0.05))) == [
        (0,),
        (0, 0),
        (0, 0, 0),
    ]
    every = using(net(p=16, d=-1), width=3, layer_top=None)
    assert paths(grown(every, always(0.6, 0.3, 0.05))) == [
        (0,),
        (1,),
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 0, 0),
    ]


def with_entropy(rule: Callable[[Tokens], list[float]]) -> Any:
    """A drafter that proposes tokens 0, 1, … and has whole distributions; `rule` gives q of each token after a path."""

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        q = np.array([rule(tuple(tree.tokens[tree.path(int(n))[1:]].tolist())) for n in frontier])
        log_q = np.log(q)
        return Candidates(
            np.tile(np.arange(q.shape[1]), (len(q), 1))[:, :k],
            log_q[:, :k],
            torch.from_numpy(log_q),
        )

    return expand


def test_the_second_pruning_is_by_confidence_and_of_each_row(using: Callable[..., C2T]) -> None:
    # After token 1 the distribution is flat (H = ln 2 = .693), else H(.9, .1) = .325. With z = 10 H
    # the children of the unlikely token 1 are more confident than those of token 0; of these two
    # ties the layer keeps the first ones.
    expand = with_entropy(lambda path: [0.5, 0.5] if path == (1,) else [0.9, 0.1])
    tree = grown(using(net(h=10), width=2, depth=2, layer_top=2), expand, depth=(9, 9))
    assert paths(tree, 0) == paths(tree, 1) == [(0,), (1,), (1, 0), (1, 1)]
    assert tree.entropy[tree.of_row(0)] == pytest.approx([0, 0.325, 0.325, 0.693, 0.693], abs=1e-3)


def test_the_entropy_is_taken_over_what_the_classifier_learnt_with(
    using: Callable[..., C2T],
) -> None:
    # Four tokens of 1/4: H = ln 4 = 1.386 over all, ½ ln 4 = .693 over two. z = H − 1.
    expand = with_entropy(lambda path: [0.25] * 4)
    at = lambda top: grown(using(net(h=1, bias=-1, entropy_top=top), depth=1), expand).drafted
    assert (at(4), at(2), at(1000)) == (4, 0, 4)
    blind = Classifier(np.ones((1, 1)), np.zeros(1), np.ones(1), np.zeros(()), "P")
    assert grown(using(blind, depth=1), expand).entropy.tolist() == [0] * 5, (
        "what is not read is not computed"
    )


def test_the_chain_ends_at_the_first_that_is_left_out(using: Callable[..., C2T]) -> None:
    # z = 16 · .6^d − d: 8.6, 3.76, .456, −1.93.
    asked: list[tuple[list[int], int]] = []
    tree = grown(
        using(net(p=16, d=-1), chain=True),
        following(lambda path: np.log([0.6, 0.3]).tolist(), asked),
    )
    assert paths(tree) == [(0,), (0, 0), (0, 0, 0)]
    assert asked == [([0], 1), ([1], 1), ([2], 1), ([3], 1)]
    assert grown(using(net(bias=9), chain=True), always(0.6)).depth.max() == 10


# Against algorithm 1 over again.


def wanted(rule: Rule, root: int, policy: C2T, room: int) -> list[Tokens]:
    """The paths kept in one row, layer by layer."""
    kept: list[Tokens] = []
    layer: list[tuple[float, Tokens]] = [(0.0, ())]
    for depth in range(1, min(policy.depth, room) + 1):
        found = []
        for value, path in layer:
            for token, log_q in enumerate(rule((root, *path))[: policy.candidates]):
                confidence = policy.net.confidence(
                    np.array([value + log_q]), np.zeros(1), np.array([float(depth)])
                )[0]
                if log_q > -math.inf and confidence >= policy.beta:
                    found.append((confidence, value + log_q, (*path, token)))
        if policy.layer_top is not None:
            best = sorted(range(len(found)), key=lambda i: -found[i][0])[: policy.layer_top]
            found = [found[i] for i in sorted(best)]
        layer = [(value, path) for _, value, path in found]
        kept += [path for _, path in layer]
    return kept


knobs = st.fixed_dictionaries(
    {
        "beta": st.sampled_from([0.0, 0.2, 0.5, 0.8]),
        "width": st.integers(1, 5),
        "layer_top": st.none() | st.integers(1, 6),
        "depth": st.integers(1, 4),
        "chain": st.booleans(),
    }
)


@settings(max_examples=60)
@given(
    knobs,
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.integers(0, 99),
    st.integers(0, 3),
)
def test_the_tree_is_the_algorithms(
    tmp_path_factory: Any, knobs: dict[str, Any], rooms: list[int], seed: int, low: int
) -> None:
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("net")
    Classifier(
        rng.normal(size=(4, 3)), rng.normal(size=4), 3 * rng.normal(size=4), np.array(rng.normal())
    ).save(folder)
    policy, rule = C2T(**knobs, classifier=str(folder)), levels(seed, 5, low)
    tree = grown(policy, following(rule), depth=rooms)
    assert (tree.score[tree.roots :] <= tree.score[tree.parents[tree.roots :]]).all()
    for row, room in enumerate(rooms):
        assert paths(tree, row) == wanted(rule, row, policy, room), (
            "a row's tree does not depend on the others"
        )


def test_room_for_nodes_keeps_the_likeliest(using: Callable[..., C2T]) -> None:
    assert paths(grown(using(net(bias=9), width=2, depth=3), always(0.6, 0.3), nodes=3)) == [
        (0,),
        (1,),
        (0, 0),
    ]


def test_sampled_draws_are_judged_by_the_q_they_were_drawn_from(using: Callable[..., C2T]) -> None:
    log_probs = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    drawn = Candidates(
        np.array([[1, 0]]), log_probs.numpy()[:, [1, 0]], log_probs, Draw.WITHOUT_REPLACEMENT
    )
    tree = grown(using(net(p=16, d=-1), depth=1), lambda *_: drawn)
    assert (tree.tokens[1:].tolist(), tree.draw) == ([1, 0], Draw.WITHOUT_REPLACEMENT)


def test_features_may_be_those_of_q_without_the_targets_noise(using: Callable[..., C2T]) -> None:
    # q is flat, and the noise says token 2: given it, q(2) = .98 and H is small; without it, q(2) =
    # 1/4 and H = ln 4 = 1.386.
    flat, given = (
        torch.full((1, 4), 0.25, dtype=torch.float64).log(),
        torch.tensor([[0.01, 0.005, 0.98, 0.005]]).double().log(),
    )
    coupled = Candidates(
        np.array([[2, 0]]), given.numpy()[:, [2, 0]], given, Draw.COUPLED, unconditioned=flat
    )
    grow = lambda raw, candidates=coupled, **z: grown(
        using(net(**z), depth=1, raw=raw), lambda *_: candidates
    )
    of_p = {"p": 4.0, "bias": -2.0}  # P ≥ ½
    assert [grow(raw, **of_p).tokens[1:].tolist() for raw in ("none", "H", "P", "P+H")] == [
        [2],
        [2],
        [],
        [],
    ]
    of_h = {"h": 1.0, "bias": -1.0}  # H ≥ 1
    assert [grow(raw, **of_h).tokens[1:].tolist() for raw in ("none", "P", "H", "P+H")] == [
        [],
        [],
        [2, 0],
        [2, 0],
    ]
    assert np.exp(grow("P", bias=9).score[1:]) == pytest.approx([0.25, 0.25])
    assert np.exp(grow("H", bias=9).score[1:]) == pytest.approx([0.98, 0.01])
    plain = replace(coupled, unconditioned=None)
    assert grow("P+H", plain, **of_p).tokens[1:].tolist() == [2], "without noise there is one q"
    assert replace(coupled, log_q=np.array([[0.0, -np.inf]])).raw.log_q[0, 1] == -np.inf, (
        "what is missing stays so"
    )


def test_drafters_say_what_q_was_before_the_noise() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    drawing = Drawing(
        Draw.COUPLED, [Sampling(temperature=0.5, seed=3)], Keyed(3, np.array([4]), np.array([9]))
    )
    found = draw_candidates(logits, 4, drawing, np.zeros(3, np.int64), np.arange(3))
    whole = torch.log_softmax(logits.double() / 0.5, dim=-1)
    assert found.raw.log_probs is found.unconditioned
    assert found.raw.log_q == pytest.approx(np.take_along_axis(whole.numpy(), found.tokens, axis=1))
    assert found.log_probs is not None
    assert not torch.allclose(found.log_probs, whole)
    assert found.raw.last(2).entropy() == pytest.approx(found.last(2).raw.entropy())
    assert (
        draw_candidates(logits, 4, Drawing(), np.zeros(3, np.int64), np.arange(3)).unconditioned
        is None
    )


# Shipped classifiers.


def test_a_shipped_one_goes_by_its_targets_name() -> None:
    assert repr(C2T(classifier="demo").net) == repr(C2T().net)
    with pytest.raises(UserError, match="nobody"):
        C2T(classifier="nobody")


def test_the_shipped_one_was_trained_and_is_small() -> None:
    said = Classifier.load(demo_folder("c2t"))
    assert (said.features, len(said.hidden_bias), said.entropy_top) == ("P+H+d", 48, 1000)
    assert said.trained_on["recall"] > 0.7 > 10 * said.trained_on["positive_rate"]
    told = json.loads((demo_folder("c2t") / "training.json").read_text())
    assert told["command"].startswith("draftree train c2t --drafter eagle")
    [kept] = [r for r in told["history"] if r["step"] == told["step"]]
    assert (kept["auc"], kept["recall"]) == (said.trained_on["auc"], said.trained_on["recall"])
    assert said.trained_on["to_the_end"] is told["to_the_end"] is True


# Labels and trees.


def test_only_what_the_target_went_on_to_write_is_accepted() -> None:
    # Behind the root: 7 and 8; behind 7: 1 and 2; behind 8: 2 again; behind (7, 2): 5; behind that:
    # 6.
    tree = Tree.from_roots(np.array([0]), np.array([9]))
    for parents, tokens in (([0, 0], [7, 8]), ([1, 1, 2], [1, 2, 2]), ([4], [5]), ([6], [6])):
        nothing = np.zeros(len(tokens))
        tree = tree.append(
            np.array(parents),
            np.array(tokens),
            nothing,
            nothing,
            Candidates(tree.tokens[:0], nothing),
        )
    written = _tree_dataset.label_nodes(tree, [7, 2, 5])
    # 7 is right and 8 its wrong sibling; (7, 1) and (8, 2) are wrong, the latter although its token
    # is; the text ends at 5.
    assert written.tolist() == [True, True, False, False, True, False, True, False]
    assert _tree_dataset.label_nodes(tree, [8, 1]).tolist() == [True, False, True] + [False] * 5
    assert _tree_dataset.label_nodes(tree, []).tolist() == [True] + [False] * 7


def text_of(target: Any, tokens: int) -> tuple[Request, list[int]]:
    request = Request([3, 4, 5], tokens)
    plain = Engine(target, Always([[]], 61), C2T()).plain([request]).tokens[0]
    return request, [*request.prompt, *plain]


def test_complete_trees_are_recorded_before_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    request, plan = text_of(target, 12)
    monkeypatch.setattr(_tree_dataset, "VERIFIED", 2)  # of the three right nodes two are verified
    recorder = TreeRecorder(Knobs(depth=3, width=2), [5])
    done = Engine(target, Always([plan], 61), recorder).write([request], on_tokens=recorder.tell)
    assert recorder.written == done.tokens[0] == plan[3:]
    [nodes] = recorder.nodes()
    # Behind the prompt's token each step writes 3: trees with room for 10, 7, 4 and 1 layers;
    # complete are 2 + 4 + 4 nodes.
    assert np.bincount(nodes.tree).tolist() == [10, 10, 10, 2]
    assert np.bincount(nodes.tree, nodes.accepted).tolist() == [3, 3, 3, 1], "verified or not"
    assert nodes.depth[:10].tolist() == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    # q falls by e from token to token: over the five likeliest tokens of 61, each with q = e^−i (1
    # − 1/e).
    q = np.exp(-np.arange(61.0)) / np.exp(-np.arange(61.0)).sum()
    assert nodes.entropy == pytest.approx(-(q[:5] * np.log(q[:5])).sum())
    assert nodes.joint[:6] == pytest.approx(
        [q[0], q[1], q[0] ** 2, q[0] * q[1], q[0] * q[1], q[1] ** 2]
    )


def test_a_text_without_trees_has_no_entries() -> None:
    target = tiny_target()
    recorder = TreeRecorder(Knobs(), [1000])
    Engine(target, Never([[]], 61), recorder).write([Request([3], 1)], on_tokens=recorder.tell)
    assert len(recorder.nodes()[0]) == 0


# Learning.


def from_roots(count: int, seed: int) -> Nodes:
    """Trees of 100 nodes, of which those with P > .5 behind a flat distribution are accepted."""
    rng = np.random.default_rng(seed)
    joint = rng.random(count)
    entropy = 8 * rng.random(count)
    depth = rng.integers(1, 12, count).astype(np.float64)
    return Nodes(joint, entropy, depth, (joint > 0.5) & (entropy > 3), np.arange(count) // 100)


FAST, SHORT = Hyperparameters(batch_size=128, lr=1e-2), Knobs(steps=300)


def test_a_planted_rule_is_found() -> None:
    found, rounds = c2t.learn(from_roots(4000, 0), from_roots(1000, 1), SHORT, FAST)
    auc, recall, positive_rate = c2t.evaluate_classifier(found, from_roots(4000, 2))
    assert min(auc, recall) > 0.9
    assert positive_rate < 0.35, "5/16 are accepted"
    again, _ = c2t.learn(from_roots(4000, 0), from_roots(1000, 1), SHORT, FAST)
    assert np.array_equal(found.hidden_weight, again.hidden_weight), "the seed decides all"
    kept = c2t.pick_round(rounds)
    assert c2t.evaluate_classifier(found, from_roots(1000, 1)) == (
        kept.auc,
        kept.recall,
        kept.positive_rate,
    )


def test_without_the_entropy_the_planted_rule_is_not_found() -> None:
    blind, _ = c2t.learn(
        from_roots(4000, 0), from_roots(1000, 1), replace(SHORT, features="P+d"), FAST
    )
    auc, recall, positive_rate = c2t.evaluate_classifier(blind, from_roots(4000, 2))
    assert auc < 0.95
    assert recall < 0.9 or positive_rate > 0.45


def test_auc_by_hand() -> None:
    accepted = np.array([True, False, True, False, False])
    # Of six pairs: .9 is above all three rejected; .5 above .1, equal to .5 (a half), below .7.
    assert c2t.auc(np.array([0.9, 0.7, 0.5, 0.5, 0.1]), accepted) == pytest.approx((3 + 1.5) / 6)
    assert c2t.auc(np.array([0.1, 0.7, 0.1, 0.5, 0.3]), accepted) == 0
    assert c2t.auc(np.ones(5), accepted) == c2t.auc(np.arange(5.0), accepted | True) == 0.5


def test_epochs_are_few_steps_so_steps_are_counted() -> None:
    # 1,000 entries in batches of 128 are 8 steps, ten epochs 80.
    assert c2t.last_step(1000, Knobs(), FAST) == 20_000
    assert c2t.last_step(1000, Knobs(steps=79), FAST) == 80
    assert c2t.last_step(1000, Knobs(steps=79), replace(FAST, epochs=20)) == 160
    _, rounds = c2t.learn(
        from_roots(4000, 0), from_roots(1000, 1), Knobs(steps=250), replace(FAST, epochs=1)
    )
    assert [r.step for r in rounds] == [100, 200, 250]


def rounds_of(*auc: float) -> list[Round]:
    return [Round(100 * i, 0.0, x, 0.5, 0.1) for i, x in enumerate(auc, 1)]


def test_auc_rises_until_many_rounds_bring_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c2t, "PATIENCE", 3)
    monkeypatch.setattr(c2t, "RISE", 0.01)
    assert c2t.is_auc_rising(rounds_of(0.9, 0.9, 0.9)), "nothing is known yet"
    assert not c2t.is_auc_rising(rounds_of(0.9, 0.9, 0.9, 0.905))
    assert c2t.is_auc_rising(rounds_of(0.9, 0.8, 0.92, 0.8))
    assert not c2t.is_auc_rising(rounds_of(0.92, 0.8, 0.92, 0.925)), "the best of all before counts"
    _, rounds = c2t.learn(from_roots(4000, 0), from_roots(1000, 1), Knobs(steps=10**6), FAST)
    assert not c2t.is_auc_rising(rounds)
    assert c2t.is_auc_rising(rounds[:-1]), "it ends at once"


def test_a_run_says_whether_it_was_trained_to_the_end() -> None:
    learnt = from_roots(4000, 0)
    texts = [from_roots(4000, 0)]
    plan = Hyperparameters()
    ended = lambda rounds, knobs=Knobs(steps=1): c2t.summarise(texts, learnt, knobs, plan, rounds)
    rising = rounds_of(*np.linspace(0.5, 0.99, 40))
    short = ended(rising[:-1])
    whole = ended(rising)
    flat = ended(rounds_of(*[0.9] * 30))
    assert [end.figures["to_the_end"] for end in (short, whole, flat)] == [False, True, True]
    assert short.lines[1] == "not trained to the end: after 3,900 steps held-out AUC may still rise"
    assert whole.lines[1] == "trained to the end: 4,000 steps, after which held-out AUC still rose"
    assert flat.lines[1] == "trained to the end: 3,000 steps, after which held-out AUC rose no more"


def test_fine_tuning_begins_with_the_weights() -> None:
    few = Knobs(hidden=12, steps=1)
    start, _ = c2t.learn(from_roots(4000, 0), from_roots(1000, 1), few, replace(FAST, epochs=5))
    near, _ = c2t.learn(
        from_roots(1000, 3), from_roots(1000, 1), few, Hyperparameters(epochs=1, lr=1e-9), start
    )
    for name in ("hidden_weight", "hidden_bias", "output_weight", "output_bias"):
        assert getattr(near, name) == pytest.approx(getattr(start, name), abs=1e-6)
    tuned, _ = c2t.learn(
        from_roots(1000, 3), from_roots(1000, 1), few, Hyperparameters(epochs=1), start
    )
    assert not np.array_equal(tuned.hidden_weight, start.hidden_weight)


def test_rounds_are_picked_by_recall_and_then_by_positive_rate() -> None:
    of = lambda *figures, auc=(0.9, 0.9, 0.9): (
        c2t.pick_round([Round(i, 0.0, auc[i - 1], *f) for i, f in enumerate(figures, 1)]).step
    )
    assert of((0.90, 0.1), (0.95, 0.3), (0.93, 0.1)) == 2, "two points are more than alike"
    assert of((0.95, 0.3), (0.945, 0.2), (0.93, 0.1)) == 2
    assert of((0.95, 0.2), (0.96, 0.2), (0.96, 0.2)) == 1
    assert of((1.0, 0.9), (0.6, 0.1), (0.59, 0.1), auc=(0.5, 0.9, 0.899)) == 2, (
        "a net that accepts everything tells nothing"
    )


def test_all_accepted_nodes_and_some_others_are_learnt() -> None:
    nodes = from_roots(4000, 0)
    right = int(nodes.accepted.sum())
    some = nodes.sample_rejected(1.5, np.random.default_rng(0))
    assert (int(some.accepted.sum()), len(some)) == (right, right + round(1.5 * right))
    assert len(nodes.sample_rejected(1e6, np.random.default_rng(0))) == len(nodes)


def test_whole_texts_are_held_out() -> None:
    texts = [replace(from_roots(300, i), depth=np.full(300, float(i))) for i in range(30)]
    learnt, held = c2t.split(texts, Hyperparameters(held_out=0.05))
    assert len(np.unique(held.depth)) == 2, "5 % of 30, rounded up"
    assert not set(learnt.depth) & set(held.depth)
    assert (learnt.trees, held.trees) == (28 * 3, 2 * 3)


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(target_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts of several forms."""
    found = [{"question": "abcabc", "answer": "a"}, {"prompt": "xyz"}, {"turns": ["one one one", "two"]}, {"text": "hello"},
             {"messages": [{"role": "user", "content": "lalala"}, {"role": "assistant", "content": "no"}]}]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return tmp_path / "prompts.jsonl"


SMALL = (
    "--set",
    "depth=4",
    "--set",
    "width=2",
    "--set",
    "tokens=12",
    "--set",
    "hidden=6",
    "--epochs",
    "3",
    "--set",
    "steps=150",
)


def test_a_classifier_is_trained_and_used(
    draftree, folder: str, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    drafter = f"lm:model={folder}"  # the target itself: the likeliest path is always right
    args = "--target", folder, "--drafter", drafter, "--data", data, "--out", out, *SMALL
    status, shown, err = draftree("train", "c2t", *args, "--json")
    assert (status, err) == (0, "")
    said = json.loads(shown)
    assert (said["policy"], said["texts"], len(said["rounds"]), said["to_the_end"]) == (
        "c2t",
        5,
        2,
        False,
    )
    assert 0 < said["accepted"] < said["nodes"]
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "training.json",
    ]
    told = json.loads((out / "training.json").read_text())
    assert (told["lr"], told["batch_size"], told["held_out"], told["epochs"], told["hidden"]) == (
        1e-3,
        1024,
        0.05,
        3,
        6,
    )
    assert [r["step"] for r in told["history"]] == [100, 150]
    assert (told["steps"], told["to_the_end"]) == (150, False)
    assert Classifier.load(out).trained_on["to_the_end"] is False
    status, shown, _ = draftree("generate", "abcabc", "--target", folder, "--drafter", drafter, "--policy",
                                f"c2t:beta=0,classifier={out}", "--max-new-tokens", 24, "--baseline", "--json")  # fmt: skip
    assert json.loads(shown)["baseline"]["same_output"] is True
    # A finished folder is not trained into again; another may begin with it.
    assert draftree("train", "c2t", *args)[0] == 2
    other = tmp_path / "tuned"
    again = (
        "--target",
        folder,
        "--drafter",
        drafter,
        "--data",
        data,
        "--out",
        other,
        *SMALL,
        "--set",
        "share=1",
    )
    status, shown, _ = draftree("train", "c2t:negatives=2", *again, "--init-from", out)
    assert status == 0
    assert "recall" in shown
    assert "not trained to the end: after 150 steps" in shown
    told = json.loads((other / "training.json").read_text())
    assert (told["lr"], told["hidden"], told["negatives"]) == (1e-4, 6, 2.0)


def test_an_interrupted_run_goes_on(
    folder: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(out: str, *more: str) -> Fitted:
        knobs = Knobs.read([*(k for k in SMALL if "=" in k), *more], None)
        return Training(f"lm:model={folder}", knobs).fit(folder, [data], tmp_path / out)

    whole = run("whole")
    calls = list[int]()
    write = Engine.write

    def counted(self: Engine, *args: Any, **kwargs: Any) -> Generation:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(1)
        return write(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "write", counted)
    with pytest.raises(KeyboardInterrupt):
        run("again")
    assert len(list((tmp_path / "again" / "trees").glob("*.npz"))) == 2
    with pytest.raises(UserError, match="holds trees with depth=4: continue with the same"):
        run("again", "depth=3")
    calls[:] = [1, 1, 1]  # three more texts, and none of the first two again
    assert run("again") == whole
    assert len(calls) == 6
    assert (
        Classifier.load(tmp_path / "again").output_bias
        == Classifier.load(tmp_path / "whole").output_bias
    )


def test_kept_trees_serve_another_classifier(
    folder: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Training(
        f"lm:model={folder}", Knobs(depth=4, width=2, tokens=12, steps=1), trees=tmp_path / "kept"
    )
    trained = first.fit(folder, [data], tmp_path / "a")
    monkeypatch.setattr(Engine, "write", None)
    few = lambda out, least: replace(
        first, knobs=replace(first.knobs, features="P", trees=4, positives=least)
    ).fit(folder, [data], tmp_path / out)
    second, third = few("b", 0), few("c", trained.figures["accepted"])
    assert (second.figures["trees"], trained.figures["trees"] > 4) == (4, True)
    assert third.figures["trees"] == trained.figures["trees"], (
        "too few are accepted, so that more trees are taken"
    )
    assert Classifier.load(tmp_path / "b").features == "P"


def test_default_training_options_are_the_papers() -> None:
    assert Hyperparameters.of({}) == Hyperparameters(10, 1024, 1e-3, 0.05, 0)
    assert Hyperparameters.of({}, tuned=True) == Hyperparameters(lr=1e-4)
    assert Hyperparameters.of(
        {"lr": 0.5, "epochs": 3.0, "batch_size": 7}, tuned=True
    ) == Hyperparameters(3, 7, 0.5)
    start = Classifier(np.ones((6, 1)), np.zeros(6), np.ones(6), np.zeros(()), "P", 77, False)
    assert Knobs.read([], None) == Knobs(share=1.0)
    assert Knobs.read(["tokens=9"], start) == Knobs("P", False, 6, 77, tokens=9, share=0.1)


MISTAKES = {
    "no drafter": ([], {"--drafter": None}, "needs --drafter"),
    "no such drafter": ([], {"--drafter": "eagel"}, "did you mean 'eagle'"),
    "an option of drafters": (["--bf16"], {}, "train c2t was given --bf16, allowed are --batch-size"),
    "half an epoch": (["--epochs", "1.5"], {}, "epochs is 1.5, allowed is a whole number of at least 1"),
    "no batch": (["--batch-size", "0"], {}, "--batch-size is 0"),
    "no rate": (["--lr", "0"], {}, "lr is 0.0"),
    "nothing held out": (["--held-out", "0"], {}, "--held-out is 0.0"),
    "unknown knob": (["--set", "hiden=3"], {}, "did you mean 'hidden'"),
    "no value": (["--set", "hidden"], {}, "--set is 'hidden', allowed is KEY=VALUE"),
    "not a number": (["--set", "hidden=x"], {}, "c2t: hidden is 'x'"),
    "no hidden units": (["--set", "hidden=0"], {}, "hidden is 0, allowed"),
    "no negatives": (["--set", "negatives=0"], {}, "negatives is 0.0"),
    "no steps": (["--set", "steps=0"], {}, "steps is 0, allowed is a whole number of at least 1"),
    "fewer than none": (["--set", "positives=-1"], {}, "positives is -1"),
    "no share": (["--set", "share=2"], {}, "share is 2.0"),
    "unknown features": (["--set", "features=P+H+D"], {}, "did you mean 'P+H+d'"),
    "no classifier": (["--init-from", "none"], {}, "init-from is 'none', but there is no such file or folder"),
    "another size": (["--init-from", str(demo_folder("c2t")), "--set", "hidden=6"], {}, "hidden is 6, allowed is 48"),
    "no data": ([], {"--data": "none.jsonl"}, "none.jsonl"),
    "one prompt": ([], {"--data": "one.jsonl"}, "at least 2 are needed"),
    "no room": (["--set", "tokens=500"], {}, "context of 160 with 500 new tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_in_one_line(
    draftree, folder: str, data: Path, tmp_path: Path, monkeypatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.jsonl").write_text('{"prompt": "alone"}\n')
    given, other, told = MISTAKES[case]
    usual: dict[str, Any] = {"--target": folder, "--drafter": "pld", "--data": data, "--out": "out"}
    options = [
        part for key, value in (usual | other).items() if value is not None for part in (key, value)
    ]
    status, out, err = draftree("train", "c2t", *options, *given)
    assert (status, out) == (2, "")
    assert told in err
    assert len(err.splitlines()) == 1


def test_a_drafter_is_trained_without_a_drafter(draftree, data: Path, tmp_path: Path) -> None:
    status, _, err = draftree(
        "train", "edd", "--drafter", "edd", "--data", data, "--out", tmp_path / "out"
    )
    assert (status, len(err.splitlines())) == (2, 1)
    assert "train edd was given --drafter, allowed are" in err
    status, _, err = draftree(
        "train", "edd", "--costs", data, "--data", data, "--out", tmp_path / "out"
    )
    assert (status, len(err.splitlines())) == (2, 1)
    assert "was given --costs, allowed are" in err


def test_a_policy_is_named_where_it_was_meant(draftree, data: Path, tmp_path: Path) -> None:
    status, _, err = draftree("train", "stattic", "--data", data, "--out", tmp_path / "out")
    assert status == 2
    assert "'stattic'" in err
    assert "did you mean 'static'" in err


def test_where_nothing_is_accepted_there_is_nothing_to_learn(tmp_path: Path) -> None:
    wrong = replace(from_roots(300, 0), accepted=np.zeros(300, np.bool_))
    with pytest.raises(UserError, match="of the 300 drafted nodes to learn none was accepted"):
        c2t.learn(wrong, from_roots(300, 1), Knobs(), Hyperparameters())
    kept = Collected(tmp_path / "trees", {"depth": 3})
    kept.begin()
    assert kept[0] is None


# The recipes.


@pytest.fixture
def recipe() -> Callable[[str], Any]:
    return importlib.import_module


def test_the_ablations_refuse_a_classifier_that_was_stopped_early(
    recipe: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ablations, note = recipe("c2t_ablations"), tmp_path / "features-PHd" / "training.json"
    note.parent.mkdir()
    monkeypatch.setattr(ablations, "grow", lambda args: None)
    monkeypatch.setattr(
        ablations, "draftree", lambda *command: pytest.fail("nothing is trained or decoded")
    )
    monkeypatch.setattr("sys.argv", ["x", "--data", "d", "--suite", "s", "--work", str(tmp_path)])
    history = [{"step": 240, "auc": 0.9}]
    for from_roots in (
        {"to_the_end": False, "history": history},
        {"history": [{"epoch": 10}]},
        {"history": history},
    ):
        note.write_text(json.dumps(from_roots))
        assert ablations.main() == 2
        told = capsys.readouterr().err
        assert "features-PHd' is not trained: it was stopped after" in told
        assert len(told.splitlines()) == 1
    assert ablations.checked(demo_folder("c2t"))["to_the_end"] is True


def test_the_ablations_set_what_the_paper_sets(recipe: Callable[[str], Any]) -> None:
    every = list(recipe("c2t_ablations").settings())
    assert {48, *(s["hidden"] for s in every if "hidden" in s)} == {2, 6, 12, 24, 36, 48}
    assert {1000, *(s["entropy_top"] for s in every if "entropy_top" in s)} == {
        100,
        500,
        1000,
        10_000,
    }
    assert [s["features"] for s in every if "features" in s] == list(FEATURES)
    for setting in every:
        Knobs.read([f"{k}={v}" for k, v in setting.items()], None)
    for line in (line for lines in recipe("c2t_tables").TABLES.values() for line in lines):
        registry.build("policy", line.policy.replace("TUNED", str(demo_folder("c2t"))))


def test_recall_before_and_after_tuning(recipe: Callable[[str], Any]) -> None:
    """A net that accepts P ≥ .2 recalls what one of P ≥ .6 does not; a text counts by its nodes."""
    texts = recipe("c2t_texts")

    class Net:
        def __init__(self, least: float) -> None:
            self.least = least

        def confidence(self, log_p: Any, entropy: Any, depth: Any) -> Any:
            return np.where(np.exp(log_p) >= self.least, 0.9, 0.1)

    of = lambda joint, accepted: Nodes(
        np.array(joint), np.ones(4), np.ones(4), np.array(accepted), np.zeros(4, np.int64)
    )
    one = of([0.9, 0.5, 0.3, 0.1], [True, True, False, False])
    found = texts.recall_gain(Net(0.6), Net(0.2), [one] * 8)
    assert found["recall"] == [0.5, 1.0]
    assert found["positive rate"] == [0.25, 0.75]
    assert (found["gain"], found["verdict"]) == ([0.5, 0.5], "holds")
    assert texts.recall_gain(Net(0.2), Net(0.6), [one] * 8)["verdict"] == "fails"
    assert texts.recall_gain(Net(0.2), Net(0.2), [one] * 8)["verdict"] == "ties"
    assert texts.recall_gain(Net(0.6), Net(0.2), [one] * 7)["verdict"] == "too few prompts"


def test_nets_of_other_texts_stand_beside_the_right_curve(recipe: Callable[[str], Any]) -> None:
    texts = recipe("c2t_texts")
    row = lambda net, beta, accepted, nodes: {
        "policy": f"c2t:classifier=work/{net},beta={beta}",
        "per_prompt": {"steps": [1, 1], "accepted": [accepted] * 2, "nodes": [nodes] * 2},
    }
    rows = [row("right", 0.3, 3, 40), row("right", 0.7, 1, 10), row("other", 0.5, 2, 30)]
    rows += [row("other", 0.3, 3, 60), row("other", 0.7, 1, 15), row("tuned", 0.5, 2, 30)]
    [other, tuned] = texts.compare({"rows": [{"policy": None}, *rows]})
    assert (other["net"], other["share"]) == ("other", pytest.approx([1.5] * 3))
    assert (tuned["net"], tuned["share"]) == ("tuned", pytest.approx([1.0] * 3))


def test_nodes_at_equal_tau_by_hand(recipe: Callable[[str], Any]) -> None:
    equal = recipe("equal_tau")
    # τ is (accepted / steps) + 1. The curve has 10 nodes at τ = 2 and 40 at τ = 4: halfway,
    # geometrically, 20 at τ = 3.
    row = lambda accepted, nodes: {
        "per_prompt": {"steps": [1, 1], "accepted": [accepted] * 2, "nodes": [nodes] * 2}
    }
    curve = [row(3, 40), row(1, 10)]
    found = equal.Share.of(row(2, 15), curve, np.random.default_rng(0))
    assert (found.whole, found.low, found.high, found.reached) == pytest.approx(
        (0.75, 0.75, 0.75, 1)
    )
    assert str(found.inverse) == "1.33 [1.33, 1.33]"
    assert str(equal.Share.of(row(4, 15), curve, np.random.default_rng(0))) == "beyond the curve"


def test_every_curve_of_a_result_at_equal_tau(
    recipe: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = recipe("equal_tau")
    rng = np.random.default_rng(0)
    steps = rng.integers(10, 30, 10)

    def row(policy: str | None, accepted: int, nodes: int) -> dict[str, Any]:
        each = {"steps": steps.tolist()}
        each |= {"accepted": (accepted * steps).tolist(), "nodes": (nodes * steps).tolist()}
        return {"drafter": "d", "policy": policy, "temperature": 0.0, "per_prompt": each}

    rows = [row(None, 0, 0), row("e:nodes=10", 1, 10), row("e:nodes=40", 3, 40)]
    rows += [row("e:nodes=9,depth=2", 1, 9), row("x:beta=0.5", 2, 15), row("chain", 4, 5)]
    found = equal.every({"rows": rows}, "r")
    assert [(f["policy"], f["beside"], f["share"]) for f in found] == [
        ("x:beta=0.5", "e:nodes=…", [0.75, 0.75, 0.75])
    ], "one setting of another depth is no point of the curve, and a chain of τ 5 is beyond it"
    other = {**rows[4], "temperature": 1.0}
    assert len(equal.every({"rows": [*rows, other]}, "r")) == 1, "a curve is of one temperature"
    for wrong, why in (
        ([{"drafter": "d"}], "no figures of each prompt"),
        ([rows[1], rows[4]], "two settings"),
        (
            [{**rows[1], "per_prompt": {k: v[:7] for k, v in rows[1]["per_prompt"].items()}}],
            "7 prompts",
        ),
    ):
        with pytest.raises(UserError, match=why):
            equal.every({"rows": wrong}, "r")
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    some = [results / f"{name}.json" for name in ("paper_edd", "timed", "gpu_h100", "avx2")]
    assert equal.all_of(some, tmp_path / "all.json") == 0
    assert {r["result"] for r in json.loads((tmp_path / "all.json").read_text())["rows"]} == {
        "paper_edd"
    }
    told = capsys.readouterr().err
    assert all(name in told for name in ("timed", "gpu_h100", "avx2"))


def test_the_saved_nodes_at_equal_tau_are_what_the_results_say(
    recipe: Callable[[str], Any],
) -> None:
    equal = recipe("equal_tau")
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    saved = json.loads((results / "equal_tau.json").read_text("utf-8"))
    again = equal.every(equal.read_result(results / "paper_edd.json"), "paper_edd")
    assert again == [r for r in saved["rows"] if r["result"] == "paper_edd"]
    named = {r["result"] for r in saved["rows"]}
    left_out = {name for names in saved["provenance"]["left out"].values() for name in names}
    assert not named & left_out
    assert named | left_out <= {path.stem for path in results.glob("*.json")}
