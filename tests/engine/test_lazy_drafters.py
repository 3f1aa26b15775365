"""Drafters read what was committed when they are asked for drafts, and not before; asking takes one transfer to the host."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from architectures import target
from drafting import perturbed
from draftree.drafters import hydra
from draftree.drafters.base import Drafter, Trainable
from draftree.drafters.neural import feature_drafter
from draftree.registry import part
from draftree.sampling import draft_sampling
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.tree import Ints, Tree
from forests import NOISE, attach, grown, random_forest, some_verdict, texts, worst

METHODS = ("eagle", "eagle3", "mtp", "hydra", "medusa", "glide", "edd", "vdm")
READERS = ("eagle", "eagle3", "mtp", "hydra")
"""Those that pass what was committed through layers of their own."""


def drafter_of(method: str, t: Target) -> Trainable[Any]:
    return perturbed(part("drafter", method)(), t)


class Text:
    """Rows that are written step by step with a drafter's state, along random paths."""

    def __init__(
        self, t: Target, drafter: Drafter[Any], lengths: Sequence[int], seed: int = 0
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.target = t
        self.drafter = drafter
        self.committed, self.roots = (
            texts(lengths, self.rng),
            self.rng.integers(3, 60, len(lengths)),
        )
        self.cache = t.new_cache(len(lengths), 8)
        hidden_states = t.prefill(self.cache, self.committed, drafter.needs).hidden_states
        self.state = drafter.start(self.committed, self.roots, hidden_states)

    def step(self, tree: Tree, expand: Sequence[Sequence[int]]) -> None:
        """Drafts after some frontiers of a tree, and commits its deepest paths."""
        for frontier in expand:
            _, self.state = self.drafter.expand(self.state, tree, np.array(frontier), 2, Drawing())
        verified = self.target.verify(self.cache, tree, self.drafter.needs)
        verdict = some_verdict(tree, self.rng)
        self.target.commit(self.cache, tree, verdict)
        kept = np.concatenate([verdict.committed_nodes(root) for root in range(tree.roots)])
        with without_passes(self.drafter):
            self.state = self.drafter.commit(
                self.state, tree, verdict, verified.hidden_states.take(kept)
            )
        self.committed = grown(self.committed, tree, verdict)
        self.roots[tree.row[: tree.roots]] = verdict.bonus

    def bare(self, live: Sequence[int]) -> None:
        """A step in which nothing is drafted."""
        self.step(Tree.from_roots(np.array(live), self.roots[list(live)]), [])

    def bush(self) -> Tree:
        """Every row's root with two children, and a grandchild of the first."""
        rows = len(self.roots)
        parents = [*range(rows), *range(rows), *range(rows, 2 * rows)]
        return attach(
            Tree.from_roots(np.arange(rows), self.roots),
            parents,
            self.rng.integers(3, 60, len(parents)).tolist(),
        )

    def drafts(self, tree: Tree, frontiers: Sequence[Ints], state: Any = None) -> Tensor:
        """[F, V] q after the nodes of some frontiers; the text's own state goes on from there."""
        found = []
        state = self.state if state is None else state
        for frontier in frontiers:
            candidates, state = self.drafter.expand(state, tree, frontier, 2, Drawing())
            assert candidates.log_probs is not None
            found.append(candidates.log_probs.exp())
        return torch.cat(found)

    def fresh(self) -> Any:
        """The state of a drafter that reads the whole text now."""
        rows = len(self.roots)
        hidden_states = self.target.prefill(
            self.target.new_cache(rows, 8), self.committed, self.drafter.needs
        ).hidden_states
        return self.drafter.start(self.committed, self.roots, hidden_states)


def layers_of(tree: Tree) -> list[Ints]:
    """Its nodes by depth."""
    return [np.flatnonzero(tree.depth == d) for d in range(int(tree.depth.max()) + 1)]


def networks(drafter: Drafter[Any]) -> list[nn.Module]:
    """What a draft pass runs through: the model's transformer layers, or whatever computes its attention."""
    assert isinstance(drafter, Trainable)
    return [
        m
        for m in drafter.model.modules()
        if type(m).__name__.endswith(("DecoderLayer", "EAGLE3Layer", "GlimpseLayer"))
    ]


@contextmanager
def passes(drafter: Drafter[Any]) -> Iterator[Counter[str]]:
    """Counts the passes through a drafter's layers."""
    found: Counter[str] = Counter()
    hooks = [
        m.register_forward_hook(lambda *_: found.update(["passes"])) for m in networks(drafter)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def without_passes(drafter: Drafter[Any]) -> Iterator[None]:
    with passes(drafter) as found:
        yield
    assert not found, "a commit ran the draft model"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [1, 3])
def test_steps_without_drafts_leave_the_state_of_a_fresh_start(method: str, rows: int) -> None:
    """Some that draft nothing, one that drafts and accepts, and again some that do not."""
    t = target("llama")
    text = Text(t, drafter_of(method, t), [6, 4, 9][:rows])
    with passes(text.drafter) as found:
        for _ in range(3):
            text.bare(range(rows))
        assert not found
    for last in (False, True):
        tree = text.bush()
        mine, fresh = (
            text.drafts(tree, layers_of(tree)),
            text.drafts(tree, layers_of(tree), text.fresh()),
        )
        assert worst(mine, fresh) < NOISE
        if not last:
            text.step(tree, [f.tolist() for f in layers_of(tree)])
            text.bare(range(rows))


@pytest.mark.parametrize("method", READERS)
def test_rows_that_are_not_drafted_for_wait(method: str) -> None:
    """Another row is drafted for in each step; in the last a row's root comes when others' nodes lie in scratch already."""
    t = target("llama")
    text = Text(t, drafter_of(method, t), [6, 4, 9])
    for row in (1, 0, 1, 2):
        tree = text.bush()
        text.step(tree, [f[tree.row[f] == row].tolist() for f in layers_of(tree)])
    tree = text.bush()
    wanted = text.drafts(tree, layers_of(tree), text.fresh())
    roots, children, grandchildren = layers_of(tree)
    late = [roots[[0, 2]], children[tree.row[children] != 1], np.append(roots[1], grandchildren[0])]
    late += [children[tree.row[children] == 1], grandchildren[1:]]
    order = np.argsort(np.concatenate(late))
    assert (
        worst(text.drafts(tree, late)[order], wanted[np.argsort(np.concatenate(layers_of(tree)))])
        < NOISE
    )


def waiting(method: str) -> Text:
    """Rows of which the first has waited for six steps."""
    t = target("llama")
    text = Text(t, drafter_of(method, t), [6, 4, 9])
    for live in ([0, 1, 2], [0, 2], [0, 2], [0], [0], [0]):
        text.bare(live)
    return text


@pytest.mark.parametrize(("method", "reading"), [("hydra", 2), ("peagle", 3)])
def test_a_long_wait_is_read_in_parts(
    method: str, reading: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six that wait; a root's pair and seven slots behind it."""
    text = waiting(method)
    tree = text.bush()
    whole = text.drafts(tree, layers_of(tree))
    monkeypatch.setattr(hydra if method == "hydra" else feature_drafter, "CHUNK", 3)
    with passes(text.drafter) as found:
        parts = text.drafts(tree, layers_of(tree))
    assert found["passes"] == reading
    assert worst(parts, whole) < NOISE
    assert worst(parts, text.drafts(tree, layers_of(tree), text.fresh())) < NOISE


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_single_layer_computes_keys_and_values_alone_after_a_long_wait(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = waiting(method)
    tree = text.bush()
    monkeypatch.setattr(feature_drafter, "MAX_PENDING_PAIRS", 100)
    along = text.drafts(tree, layers_of(tree))
    monkeypatch.setattr(feature_drafter, "MAX_PENDING_PAIRS", 8)
    with passes(text.drafter) as found:
        stored = text.drafts(tree, layers_of(tree))
    assert found["passes"] == 3, "the layer ran to its end for the tree alone"
    assert worst(stored, along) < NOISE
    assert worst(stored, text.drafts(tree, layers_of(tree), text.fresh())) < NOISE


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "peagle", "edd", "dflash"])
def test_a_prompt_is_read_when_something_is_drafted(method: str) -> None:
    t = target("llama")
    drafter, read = drafter_of(method, t), list[int]()
    borrowed = set(t.decoder.model.modules())
    for linear in (
        m for m in drafter.model.modules() if isinstance(m, nn.Linear) and m not in borrowed
    ):
        linear.register_forward_hook(lambda *_: read.append(1))
    Text(t, drafter, [2])  # what is looked up once for a model
    read.clear()
    text = Text(t, drafter, [12, 4])
    text.bare([0, 1])
    text.state = drafter.truncate(text.state, np.array([8, 5]))
    assert not read
    text.drafts(text.bush(), [np.arange(2)])
    assert read


@pytest.mark.parametrize("method", READERS)
def test_a_draft_step_is_one_pass(method: str) -> None:
    """Whatever waits goes with the roots: steps of d layers take d passes, and Hydra's one."""
    t = target("llama")
    text = Text(t, drafter_of(method, t), [6, 4])
    for waiting in (0, 2):
        for _ in range(waiting):
            text.bare([0, 1])
        tree = text.bush()
        for depth, frontier in enumerate(layers_of(tree)):
            with passes(text.drafter) as found:
                _, text.state = text.drafter.expand(text.state, tree, frontier, 2, Drawing())
            first = waiting > 0 if method == "hydra" else True  # its start reads the whole prompt
            assert found["passes"] == (first if depth == 0 else method != "hydra")
        text.step(tree, [])


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_paths_may_be_asked_for_at_once(method: str) -> None:
    """Nodes whose paths were not expanded before are fed behind them; asking again, in any order, feeds nothing."""
    t, rng = target("llama"), np.random.default_rng(3)
    text = Text(t, drafter_of(method, t), [6, 4])
    text.bare([0, 1])
    tree = random_forest(2, 14, rng)
    wanted = text.drafts(tree, layers_of(tree))[np.argsort(np.concatenate(layers_of(tree)))]
    mixed = rng.permutation(len(tree))
    assert worst(text.drafts(tree, [mixed]), wanted[mixed]) < NOISE
    deepest = np.flatnonzero(tree.depth == tree.depth.max())
    assert worst(text.drafts(tree, [deepest]), wanted[deepest]) < NOISE
    _, state = text.drafter.expand(text.state, tree, mixed, 2, Drawing())
    again = rng.permutation(len(tree))
    with passes(text.drafter) as found:
        assert worst(text.drafts(tree, [again], state), wanted[again]) < NOISE
    assert not found


def transfers(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what makes the host wait for a device, or would if tensors lay on one."""
    found: Counter[str] = Counter()

    def counting(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return stock(self, *args, **kwargs)

        return counted

    for name in (
        "cpu",
        "item",
        "tolist",
        "nonzero",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
    ):
        monkeypatch.setattr(Tensor, name, counting(name, getattr(Tensor, name)))
    return found


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_a_draft_step_takes_one_transfer(
    method: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_sampling, "on_host", lambda values: False)
    t = target("llama")
    text = Text(t, drafter_of(method, t), [6, 4][:rows])
    text.bare(range(rows))
    tree = text.bush()
    text.drafts(tree, layers_of(tree)[:1])  # what is looked up once for a model
    found = transfers(monkeypatch)
    for frontier in layers_of(tree):
        found.clear()
        _, text.state = text.drafter.expand(text.state, tree, frontier, 2, Drawing())
        assert found == {"cpu": 1}


def test_the_count_of_transfers_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, found = torch.arange(3), transfers(monkeypatch)
    if tensor.sum() > 0 and int(tensor.max()) and tensor.tolist():
        np.asarray(tensor)
    assert {"__bool__", "__int__", "tolist", "__array__"} <= found.keys()
