"""The rejection acceptors on the demo target: frequencies of what they emit are p's, by χ²; with mistakes they are not.

One tree of all that can be drafted is verified in one pass. Then drafts are drawn and accepted many
thousand times over, through the drawing's and the acceptors' own code and keyed noise, each time as
another request.

Shapes: C nodes of that tree, V tokens that can come anywhere in it, N nodes of a drawn forest, R
trials in one forest.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from chi_square import ChiSquare, detectable_distance
from draftree.acceptors import block
from draftree.acceptors.base import Acceptor, proposal, ratio
from draftree.acceptors.block import Block
from draftree.acceptors.match import Match
from draftree.acceptors.multiround import MultiRound
from draftree.acceptors.rejection import Rejection
from draftree.costs.step_costs import Costs
from draftree.drafters.edd import EDD
from draftree.policies.base import Policy, append
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.sampling.distributions import Distributions
from draftree.sampling.draft_sampling import Drawing, draw_candidates
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.tree import Candidates, Draw, Ints, Tree, TreeBudget
from frequencies import goodness
from mistakes import Asking, RawBonus, Rounds, TwoDraws

QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"
ANSWER = "Jane has 3"
"""The demo's beginning of one, after which drafter and target differ by a total variation of a
half."""
SAMPLING = Sampling(temperature=1.0, top_k=6, seed=17)
DEPTH = 3
FEW = 5_000
MANY = 50_000
LEVEL = 1e-3
BATCH = 250
COSTS = Costs({1: 0.1}, {1: 1.0})


@dataclass(frozen=True)
class Known:
    """All that can happen in a step of up to three drafts.

    Attributes:
        p: [C, V] the target's distribution after each node; node 0 is the root.
        q: [C, V] the drafter's, 0 after the last layer.
        raw: [C, V] the target's logits before the request's processors.
        child: [C, V] the node that a token leads to, −1 where it is never drafted.
    """

    p: Tensor
    q: Tensor
    raw: Tensor
    child: Ints

    @cached_property
    def law(self) -> dict[tuple[int, ...], float]:
        """Of the first two tokens, or of the first alone where what comes after it is not known."""
        law: dict[tuple[int, ...], float] = {}
        for first in self.p[0].nonzero()[:, 0].tolist():
            chance, node = float(self.p[0, first]), int(self.child[0, first])
            second = (
                {(first,): chance}
                if node < 0
                else {(first, i): chance * x for i, x in enumerate(self.p[node].tolist())}
            )
            law |= {text: x for text, x in second.items() if x}
        return law


@dataclass(frozen=True)
class After:
    """p after the nodes of a drawn forest, each of which is a known one; what acceptors ask of `Distributions`."""

    of: Known
    place: Ints
    known: ClassVar[None] = None  # nobody has asked what the target chooses

    def __call__(self, node: int) -> Tensor:
        return self.of.p[self.place[node]]

    def greedy(self, node: int) -> bool:
        return False

    def sample_token(self, node: int, choose: Callable[[Tensor], int]) -> int:
        return choose(self(node).log())

    def raw(self, node: int) -> Tensor:
        return self.of.raw[self.place[node]]


@pytest.fixture(scope="module")
def known() -> Known:
    target = Target.load("demo")
    drafter = EDD().open(target)
    asked = [{"role": "user", "content": QUESTION}]
    text = (
        target.tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        + ANSWER
    )
    ids = np.array(target.tokenizer(text, add_special_tokens=False).input_ids, np.int64)
    prompt, root = ids[:-1], ids[-1:]
    cache = target.new_cache(1, 512)
    verified = target.prefill(cache, [prompt], drafter.needs)
    state = drafter.start([prompt], root, verified.hidden_states)
    tree = Tree.from_roots(np.zeros(1, np.int64), root)
    frontier = np.zeros(1, np.int64)
    q = []
    for _ in range(DEPTH):
        found, state = drafter.expand(
            state, tree, frontier, SAMPLING.top_k, Drawing(settings=[SAMPLING])
        )
        q.append(found.log_probs.double().exp())
        before, tree = len(tree), append(tree, frontier, found)
        frontier = np.arange(before, len(tree))
    logits = target.verify(cache, tree, drafter.needs).logits
    p = Distributions(logits, lambda node: SAMPLING.processors)
    return compact(tree, torch.stack([p(n) for n in range(len(tree))]), torch.cat(q), logits)


def compact(tree: Tree, p: Tensor, q: Tensor, raw: Tensor) -> Known:
    """The same over the tokens that can come, numbered anew; a token that never comes costs time alone."""
    q = torch.cat((q, torch.zeros(len(p) - len(q), p.shape[1])))
    tokens = ((p > 0) | (q > 0)).any(0).nonzero()[:, 0]
    child = np.full((len(p), len(tokens)), -1)
    child[tree.parents[1:], np.searchsorted(tokens.numpy(), tree.tokens[1:])] = np.arange(
        1, len(tree)
    )
    return Known(p[:, tokens], q[:, tokens], raw[:, tokens].double(), child)


def frequencies(known: Known, policy: Policy, acceptor: Acceptor, trials: int) -> ChiSquare:
    """The test of the first two tokens of so many trials; where a step gives but one, p itself says what comes after it."""
    counts: Counter[tuple[int, ...]] = Counter()
    later = np.random.default_rng(3)
    for first in range(0, trials, BATCH):
        for text, node in step(known, policy, acceptor, np.arange(first, first + BATCH)):
            if len(text) == 1 and node >= 0:
                text = (*text, int(later.choice(len(known.p[node]), p=known.p[node].numpy())))
            counts[text[:2]] += 1
    texts = sorted({*counts, *known.law})
    return goodness([counts[text] for text in texts], [known.law.get(text, 0.0) for text in texts])


def step(
    known: Known, policy: Policy, acceptor: Acceptor, trials: Ints
) -> list[tuple[tuple[int, ...], int]]:
    """What one step of each trial emits, and the known node after it, −1 where there is none."""
    rows, zero = np.arange(len(trials)), np.zeros(len(trials), np.int64)
    noise = Keyed(SAMPLING.seed, trials, zero)
    place = zero

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        nonlocal place
        place = placed(known, tree, place)
        log_q = known.q[place[frontier]].log()
        return draw_candidates(
            log_q, k, Drawing(acceptor.draw, noise=noise), tree.row[frontier], tree.depth[frontier]
        )

    tree = policy.draft(
        expand, Tree.from_roots(rows, zero), COSTS, TreeBudget(np.full(len(rows), DEPTH), 99), None
    )
    place = placed(known, tree, place)
    verdict = acceptor.accept(tree, After(known, place), noise)
    found = []
    for path, root, bonus in zip(verdict.paths, rows.tolist(), verdict.bonus.tolist(), strict=True):
        last = place[path[-1]] if path.size else place[root]
        found.append(((*tree.tokens[path].tolist(), bonus), int(known.child[last, bonus])))
    return found


def placed(known: Known, tree: Tree, place: Ints) -> Ints:
    """[N] which known node each one is, given it for the first of them."""
    for depth in range(1, DEPTH + 1):
        new = np.flatnonzero(tree.depth[len(place) :] == depth) + len(place)
        place = np.concatenate((place, known.child[place[tree.parents[new]], tree.tokens[new]]))
    return place


RULES: dict[str, tuple[Policy, Acceptor]] = {
    "rejection": (Chain(3), Rejection()),
    "block": (Chain(3), Block()),
    "multiround": (VCT(2, 2), MultiRound()),
    "multiround-all": (VCT(6, 1), MultiRound()),
    "multiround-repeating": (VCT(2, 2), MultiRound(True)),
    "match": (VCT(2, 2), Match()),
}
SUBTLE = "drawn with, believed without replacement"
"""Matters only where a sibling is drawn a second time: found among many trials, not among few."""
MISTAKES: dict[str, tuple[Policy, Acceptor]] = {
    "bonus without processors": (VCT(2, 1), RawBonus()),
    "bonus without processors, by rejection": (VCT(2, 1), Rounds("raw bonus")),
    "two draws": (VCT(2, 1), TwoDraws()),
    "q = 1 on drawn children": (VCT(2, 1), Rounds("q = 1")),
    "bonus of all of p after a mismatch": (VCT(2, 1), Rounds("bonus of all of p")),
    "residual without the token alone": (Chain(1), Rounds("residual without the token")),
    "residual of another q": (VCT(2, 1), Rounds("q of another node")),
    "residual not normalised": (VCT(4, 1), Rounds("residual not normalised", True)),
    "drawn without, believed with replacement": (
        VCT(4, 1),
        Asking(MultiRound(True), Draw.WITHOUT_REPLACEMENT),
    ),
    SUBTLE: (VCT(4, 1), Asking(MultiRound(), Draw.WITH_REPLACEMENT)),
}


@pytest.mark.parametrize("rule", RULES)
def test_frequencies_of_two_tokens_are_the_targets(rule: str, known: Known) -> None:
    """A total variation of 0.057 between laws of two tokens would be found with probability 0.99."""
    found = frequencies(known, *RULES[rule], FEW)
    assert found.dof == 25
    assert detectable_distance(FEW, found.dof, LEVEL) == pytest.approx(0.057, abs=1e-3)
    assert found.p_value > LEVEL


@pytest.mark.parametrize("mistake", sorted(MISTAKES.keys() - {SUBTLE}))
def test_frequencies_of_a_mistake_are_not(mistake: str, known: Known) -> None:
    assert frequencies(known, *MISTAKES[mistake], FEW).p_value < LEVEL


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
def test_frequencies_of_many_trials_are_the_targets(rule: str, known: Known) -> None:
    """A total variation of 0.018 between laws of two tokens would be found with probability 0.99."""
    found = frequencies(known, *RULES[rule], MANY)
    assert detectable_distance(MANY, found.dof, LEVEL) == pytest.approx(0.018, abs=1e-3)
    assert found.p_value > LEVEL


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_many_trials_of_a_mistake_are_not(mistake: str, known: Known) -> None:
    assert frequencies(known, *MISTAKES[mistake], MANY).p_value < LEVEL


def test_mistakes_in_block_verification_are_noticed(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_one_token(
        tree: Tree, chain: list[int], i: int, p: Distributions, weight: float
    ) -> float:
        here = p(chain[i - 1])
        return min(
            1.0, ratio(here, proposal(tree, chain[i], len(here)), int(tree.tokens[chain[i]]))
        )

    monkeypatch.setattr(block, "_prefix_acceptance", of_one_token)
    assert frequencies(known, Chain(3), Block(), FEW).p_value < LEVEL


def test_the_power_is_what_it_is_said_to_be(known: Known) -> None:
    """Of wrong laws as far away as is said, 99 in 100 are found, and of the right one 1 in 1000 is."""
    generator, p = np.random.default_rng(1), np.array(list(known.law.values()))
    far = detectable_distance(FEW, len(p) - 1, LEVEL)
    # The error that is hardest to find, by Cauchy and Schwarz: of the same share everywhere, up in
    # one half, down in the other.
    sign = np.where(np.cumsum(p) <= 0.5, 1.0, -1.0)
    wrong = p * (1 + 2 * far * sign)
    wrong /= wrong.sum()
    drawn_wrong = generator.multinomial(FEW, wrong, size=2000)
    found = sum(goodness(counts, p).p_value < LEVEL for counts in drawn_wrong) / len(drawn_wrong)
    false = (
        sum(
            goodness(counts, p).p_value < 0.05
            for counts in generator.multinomial(FEW, p, size=2000)
        )
        / 2000
    )
    assert found == pytest.approx(0.99, abs=0.01)
    assert false == pytest.approx(0.05, abs=0.015)
