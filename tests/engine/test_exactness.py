"""Every exact acceptor writes with the target's distribution, enumerated over every outcome of chance; wrong ones do not.

The first token of a text is certain here, so that the first tree, of up to two layers, costs no
more outcomes than it must.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from byte_vocabulary import byte_vocabulary
from chi_square import detectable_distance
from draftree.acceptors import block
from draftree.acceptors.base import Acceptor, proposal, ratio, residual
from draftree.acceptors.block import Block
from draftree.acceptors.match import Match
from draftree.acceptors.multiround import MultiRound
from draftree.acceptors.rejection import Rejection
from draftree.acceptors.traversal import Traversal
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.drafters._fused import FusedDrafter
from draftree.drafters.base import Drafter
from draftree.errors import UserError
from draftree.loop import Components, decode, decode_plain
from draftree.policies.base import Layered, Policy, append
from draftree.policies.chain import Chain
from draftree.policies.pct import PCT
from draftree.policies.static import Static
from draftree.policies.vct import VCT
from draftree.registry import check_exact
from draftree.request import Request, override_sampling
from draftree.sampling import keyed_noise
from draftree.sampling.distributions import Distributions
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.grammar import Constrained, Grammar
from draftree.sampling.keyed_noise import RandomSource
from draftree.sampling.params import Sampling
from draftree.target.target import HiddenStates
from draftree.testing import Branching, TableDrafter, outcomes, random_table, table_target
from draftree.tree import AcceptResult, Candidates, Draw, Floats, Ints, Tree
from draftree.utils.validated_dataclass import knob
from frequencies import goodness
from mistakes import Asking, RawBonus, Rounds, TwoDraws
from selection import one_in

COSTS = Costs({1: 0.1}, {1: 1.0})
PROMPT = (2, 1)
LENGTH = 4
"""Of a text: one certain token, and three in whose first step a tree may have two layers."""
Law = dict[tuple[int, ...], float]


def certain_first(table: Tensor) -> Tensor:
    """The table with token 0 certain after the prompt, and here and there a token that cannot come."""
    table = table.clone()
    for before, last in ((0, 2), (1, 2), (2, 0), (2, 2)):
        table[before, last, (before + last) % 3] = 0
    table[PROMPT] = torch.tensor([1.0, 0, 0])
    return table / table.sum(-1, keepdim=True)


def sparse(table: Tensor) -> Tensor:
    """A drafter's q [V, V], one token after each that cannot come."""
    q = table[1].clone()
    q[torch.arange(len(q)), torch.arange(len(q)) - 1] = 0
    return q / q.sum(-1, keepdim=True)


TABLE = certain_first(random_table(3, 4))
FAR, NEAR = sparse(random_table(3, 9)), torch.softmax(TABLE[0].clamp(min=1e-3).log() / 2, dim=-1)
FULL = random_table(3, 9)[1]


# What p must be, by the definitions of the processors.


@dataclass(frozen=True)
class Asked:
    """What a request asks for, and the same in other words.

    Attributes:
        sampling: what is common to all requests.
        processors: its own.
        formula: what they make of logits [V] after a text, written down anew.
        guides: those of them that are applied to drafts.
    """

    sampling: Sampling
    processors: tuple[LogitsProcessor, ...] = ()
    formula: Callable[[tuple[int, ...], Floats], Floats] = lambda text, logits: logits
    guides: tuple[LogitsProcessor, ...] = ()
    warped: Callable[[Floats], Floats] | None = None

    def p(self, text: tuple[int, ...], row: Tensor) -> Floats:
        """[V] the distribution after a text, from the table's row [V]."""
        with np.errstate(divide="ignore"):
            logits = self.formula(text, np.log(row.numpy()))
        return warped(logits, self.sampling) if self.warped is None else self.warped(logits)


def softmax(logits: Floats) -> Floats:
    e = np.exp(logits - logits.max())
    return e / e.sum()


def warped(logits: Floats, sampling: Sampling) -> Floats:
    """Temperature, top-k, top-p, min-p and typical-p by their definitions, in this order."""
    x = softmax(logits / sampling.temperature)
    order = np.argsort(-x, kind="stable")
    if sampling.top_k:
        x[order[sampling.top_k :]] = 0
        x /= x.sum()
    x = beginning(x, order, sampling.top_p)
    x[x < sampling.min_p * x.max()] = 0
    x /= x.sum()
    if sampling.typical_p < 1:
        information = -np.log(np.where(x > 0, x, 1))
        strange = np.where(x > 0, abs(information - (x * information).sum()), np.inf)
        x = beginning(x, np.argsort(strange, kind="stable"), sampling.typical_p)
    return x


def beginning(x: Floats, order: Ints, mass: float) -> Floats:
    """The shortest beginning of an order that has a mass, normalised."""
    before = np.concatenate(([0.0], np.cumsum(x[order])[:-1]))
    x = x.copy()
    x[order[before >= mass]] = 0
    return x / x.sum()


class Frequent(LogitsProcessor):
    """A presence and a frequency penalty."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        count = torch.nn.functional.one_hot(input_ids, scores.shape[1]).sum(1).to(scores.dtype)
        return scores - 0.5 * (count > 0) - 0.4 * count


class Whole(LogitsProcessor):
    """Depends on every token of the text and on their order; changes the scores it is given."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[0, _hashed(input_ids[0].tolist()) % scores.shape[1]] += 1.5
        return scores


def _hashed(text: Sequence[int]) -> int:
    return sum((i + 1) * (t + 1) for i, t in enumerate(text)) // 2


def frequent(text: tuple[int, ...], logits: Floats) -> Floats:
    return np.array([x - 0.5 * (t in text) - 0.4 * text.count(t) for t, x in enumerate(logits)])


def whole(text: tuple[int, ...], logits: Floats) -> Floats:
    return logits + 1.5 * (np.arange(len(logits)) == _hashed(text) % len(logits))


def repeating(text: tuple[int, ...], logits: Floats) -> Floats:
    return np.array(
        [x * 1.8 if t in text else x for t, x in enumerate(logits)]
    )  # every logit is negative, or 0 or −∞


def biased(text: tuple[int, ...], logits: Floats) -> Floats:
    """+1.25 for token 1 after token 0, −0.75 for token 2 anywhere; exact in float32, which transformers has them in."""
    return logits + np.array([0, 1.25 * (text[-1] == 0), -0.75])


def unrepeated(text: tuple[int, ...], logits: Floats) -> Floats:
    pairs = set(itertools.pairwise(text))
    return np.array([-np.inf if (text[-1], t) in pairs else x for t, x in enumerate(logits)])


def suppressed(text: tuple[int, ...], logits: Floats) -> Floats:
    return np.array([-np.inf if t == 1 else x for t, x in enumerate(logits)])


def cool(logits: Floats) -> Floats:
    """Top-k before the temperature, which `Sampling` has after it."""
    kept = np.argsort(-logits, kind="stable")[:2]
    return softmax(np.where(np.isin(np.arange(len(logits)), kept), logits / 0.7, -np.inf))


REPEATING = (RepetitionPenaltyLogitsProcessor(1.8),)
BIASED = (SequenceBiasLogitsProcessor({(0, 1): 1.25, (2,): -0.75}),)
ASKED = {
    "t=0.3": Asked(Sampling(0.3)),
    "t=1": Asked(Sampling(1.0)),
    "t=1.7": Asked(Sampling(1.7)),
    "top-k": Asked(Sampling(1.0, top_k=2)),
    "top-p": Asked(Sampling(1.7, top_p=0.6)),
    "min-p": Asked(Sampling(1.0, min_p=0.3)),
    "typical-p": Asked(Sampling(1.0, typical_p=0.6)),
    "warpers": Asked(
        Sampling(1.0, warpers=(TopKLogitsWarper(2), TemperatureLogitsWarper(0.7))), warped=cool
    ),
    "repetition": Asked(Sampling(1.0), REPEATING, repeating),
    "frequency": Asked(Sampling(1.0), (Frequent(),), frequent),
    "whole text": Asked(Sampling(0.8), (Whole(),), whole),
    "bias": Asked(Sampling(1.3), BIASED, biased),
    "n-grams": Asked(Sampling(1.7), (NoRepeatNGramLogitsProcessor(2),), unrepeated),
    "suppressed": Asked(Sampling(1.0), (SuppressTokensLogitsProcessor([1]),), suppressed),
    "guided": Asked(Sampling(1.4, top_k=2), REPEATING, repeating, guides=REPEATING),
    "many": Asked(
        Sampling(1.4, top_k=2, top_p=0.9, min_p=0.05),
        (*BIASED, Whole()),
        lambda text, logits: whole(text, biased(text, logits)),
    ),
}


def wanted(
    asked: Asked,
    length: int = LENGTH,
    prompt: tuple[int, ...] = PROMPT,
    table: Tensor = TABLE,
    eos: int | None = None,
) -> Law:
    """The target's law of continuations, as a product of its rows."""
    found: Law = {}

    def extend(text: tuple[int, ...], probability: float) -> None:
        if len(text) == len(prompt) + length or (len(text) > len(prompt) and text[-1] == eos):
            found[text[len(prompt) :]] = probability
            return
        for token, x in enumerate(
            asked.p(text, table[text[-2] if len(text) > 1 else table.shape[1], text[-1]])
        ):
            if x:
                extend((*text, token), probability * float(x))

    extend(prompt, 1.0)
    return found


# What the loop writes.

Fake = Callable[[Branching], Drafter]


def tabled(q: Tensor) -> Fake:
    return lambda chance: TableDrafter(q, chance)


def request(asked: Asked, length: int = LENGTH) -> Request:
    return Request(PROMPT, length, processors=asked.processors, guides=asked.guides)


def law(
    policy: Policy,
    acceptor: Acceptor,
    drafter: Fake,
    asked: Asked,
    requests: Sequence[Request] = (),
    table: Tensor = TABLE,
) -> dict[tuple[int, ...], float]:
    """Of what the loop writes, over every outcome of the target's and the drafter's draws; several rows one after the other."""
    target, written = table_target(table, 8), list(requests) or [request(asked)]

    def run(chance: Branching) -> tuple[int, ...]:
        rows = SequenceBatch(target.new_cache(len(written), 8), lambda _: chance)
        parts = Components(target, drafter(chance), policy, acceptor, COSTS)
        for _ in decode(parts, rows, override_sampling(written, asked.sampling)):
            pass
        return tuple(itertools.chain(*rows.written))

    return outcomes(run)


def distance(a: Law, b: Law) -> float:
    """Total variation."""
    return 0.5 * sum(abs(a.get(t, 0) - b.get(t, 0)) for t in {*a, *b})


PATHS = [[0], [1], [0, 0], [0, 1]]
"""Two children of the root, the first with two children; `static` in the pairings."""
PAIRINGS: dict[str, tuple[Acceptor, Policy | None]] = {
    "match-chain": (Match(coupled=False), Chain(3)),
    "match-vct": (Match(coupled=False), VCT(2, 2)),
    "match-static": (Match(coupled=False), None),
    "match-pct": (Match(coupled=False), PCT(width=3, max_depth=3, ratio=0.2)),
    "match-coupled-vct": (Match(), VCT(2, 2)),
    "match-coupled-pct": (Match(), PCT(width=3, max_depth=3, ratio=0.2)),
    "match-sampled-pct": (
        Asking(Match(), Draw.WITHOUT_REPLACEMENT),
        PCT(width=2, max_depth=1, ratio=0.2),
    ),
    "rejection-chain": (Rejection(), Chain(2)),
    "block-chain": (Block(), Chain(2)),
    "multiround-static": (MultiRound(), None),
    "multiround-all": (MultiRound(), VCT(3, 1)),
    "multiround-repeating-vct": (MultiRound(True), VCT(2, 1)),
    "traversal-all": (Traversal(), VCT(3, 1)),
}
LARGE: dict[str, tuple[Acceptor, Policy | None]] = {
    "match-sampled-chain": (Asking(Match(), Draw.WITH_REPLACEMENT), Chain(2)),
    "match-sampled-static": (Asking(Match(), Draw.WITHOUT_REPLACEMENT), None),
    "rejection-static": (Rejection(), None),
    "block-static": (Block(), None),
    "traversal-chain": (Traversal(), Chain(2)),
    "traversal-static": (Traversal(), None),
    "multiround-chain": (MultiRound(), Chain(2)),
    "multiround-repeating-chain": (MultiRound(True), Chain(2)),
    "multiround-repeating-static": (MultiRound(True), None),
}
"""Those with many outcomes."""


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Static:
    path = tmp_path_factory.mktemp("trees") / "paths.json"
    path.write_text(json.dumps(PATHS))
    return Static(str(path))


def in_turns(i: int, name: str) -> Iterator[Any]:
    """What is asked, with some pairings: with all of them one request, the others with every third; by hand with all."""
    for j, pairing in enumerate(PAIRINGS):
        due = name == "many" or (i + j) % 3 == 0
        yield pytest.param(name, pairing, marks=() if due else pytest.mark.long)


@pytest.mark.parametrize(
    ("name", "pairing"), [p for i, name in enumerate(ASKED) for p in in_turns(i, name)]
)
def test_output_has_the_targets_distribution(name: str, pairing: str, static: Static) -> None:
    acceptor, policy = PAIRINGS[pairing]
    assert law(policy or static, acceptor, tabled(FAR), ASKED[name]) == pytest.approx(
        wanted(ASKED[name]), abs=1e-12
    )


@pytest.mark.parametrize("pairing", LARGE)
@pytest.mark.parametrize(
    "name", [n if n == "many" else pytest.param(n, marks=pytest.mark.long) for n in ASKED]
)
def test_output_of_larger_trees_has_the_targets_distribution(
    name: str, pairing: str, static: Static
) -> None:
    acceptor, policy = LARGE[pairing]
    assert law(policy or static, acceptor, tabled(FAR), ASKED[name]) == pytest.approx(
        wanted(ASKED[name]), abs=1e-12
    )


@pytest.mark.long
@pytest.mark.parametrize("pairing", [*PAIRINGS, *LARGE])
@pytest.mark.parametrize("name", ["t=1", "many"])
def test_output_of_a_full_and_close_q_has_the_targets_distribution(
    name: str, pairing: str, static: Static
) -> None:
    acceptor, policy = {**PAIRINGS, **LARGE}[pairing]
    assert law(policy or static, acceptor, tabled(NEAR), ASKED[name]) == pytest.approx(
        wanted(ASKED[name]), abs=1e-12
    )


@pytest.mark.filterwarnings("ignore:the drafter's output is not finite")
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("name", ["t=1", pytest.param("many", marks=pytest.mark.long)])
def test_output_has_the_targets_distribution_where_q_is_not_finite(
    name: str, pairing: str, static: Static
) -> None:
    """After one token or two nothing is found, and what is drafted after the others is drawn as ever."""
    acceptor, policy = PAIRINGS[pairing]
    for wrong in (torch.nan, torch.inf, 0.0):
        q = FAR.clone()
        q[0] = wrong
        q[1, 2] = torch.nan
        got = law(policy or static, acceptor, tabled(q), ASKED[name])
        assert got == pytest.approx(wanted(ASKED[name]), abs=1e-12)


def test_plain_decoding_has_the_targets_distribution() -> None:
    target, asked = table_target(TABLE), ASKED["many"]

    def run(chance: Branching) -> tuple[int, ...]:
        rows = SequenceBatch(target.new_cache(1, 8), lambda _: chance)
        for _ in decode_plain(
            target, Match(), rows, override_sampling([request(asked)], asked.sampling)
        ):
            pass
        return tuple(rows.written[0])

    assert outcomes(run) == pytest.approx(wanted(asked), abs=1e-12)


def test_first_token_has_the_targets_distribution() -> None:
    asked, table = ASKED["whole text"], random_table(3, 4)
    got = law(Chain(2), Rejection(), tabled(FAR), asked, [request(asked, 3)], table)
    assert len({t[0] for t in got}) == 3
    assert got == pytest.approx(wanted(asked, 3, table=table), abs=1e-12)


@pytest.mark.parametrize(
    "acceptor",
    [
        Match(coupled=False),
        pytest.param(Rejection(), marks=pytest.mark.long),  # as Block() with one draft
        Block(),
        MultiRound(),
    ],
    ids=str,
)
def test_rows_of_unequal_texts_are_independent_and_exact(acceptor: Acceptor) -> None:
    asked = ASKED["whole text"]
    rows = [request(asked), replace(request(asked, 3), prompt=(0, *PROMPT), number=1)]
    both = itertools.product(wanted(asked).items(), wanted(asked, 3, (0, *PROMPT)).items())
    expected = {(*a, *b): x * y for (a, x), (b, y) in both}
    policy = VCT(2, 1) if isinstance(acceptor, MultiRound) else Chain(2)
    assert law(policy, acceptor, tabled(FAR), asked, rows) == pytest.approx(expected, abs=1e-12)


# Drafters that search, alone and mixed with those that draw.


class Searching(Drafter[None]):
    """Proposes the two tokens that come next in the order of ids, whatever it is asked for; after token 2 nothing."""

    searches = True

    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: None = None,
        rows: Ints | None = None,
    ) -> None:
        return None

    def expand(
        self, state: None, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, None]:
        last = tree.tokens[frontier][:, None]
        tokens, log_q = (
            (last + np.array([[1, 2]])) % 3,
            np.where(last < 2, np.log([[0.6, 0.3]]), -np.inf),
        )
        return Candidates(tokens[:, :k], log_q[:, :k]), None

    def commit(
        self, state: None, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> None:
        return None

    def truncate(self, state: None, lengths: Ints, rows: Ints | None = None) -> None:
        return None


class Mixed(Drafter[None]):
    """Searches in one layer and draws in the other.

    Args:
        searched: the layer in which it searches.
        q: [V, V] what it draws from otherwise.
        chance: what it draws with.
    """

    def __init__(self, searched: int, q: Tensor, chance: RandomSource) -> None:
        self._searched = searched
        self._search = Searching()
        self._draw = TableDrafter(q, chance)

    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: None = None,
        rows: Ints | None = None,
    ) -> None:
        return None

    def expand(
        self, state: None, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, None]:
        drafter = self._search if tree.depth[frontier[0]] == self._searched else self._draw
        return drafter.expand(None, tree, frontier, k, drawing)

    def commit(
        self, state: None, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> None:
        return None

    def truncate(self, state: None, lengths: Ints, rows: Ints | None = None) -> None:
        return None


DRAFTERS: dict[str, Fake] = {
    "searching": lambda chance: Searching(),
    "searching, then drawing": lambda chance: Mixed(0, FAR, chance),
    "drawing, then searching": lambda chance: Mixed(1, FAR, chance),
    "fused": lambda chance: FusedDrafter([Searching(), TableDrafter(FAR, chance)]),
    "fused searching": lambda chance: FusedDrafter([Searching(), Searching()]),
}
RULES: dict[str, tuple[Acceptor, Policy | None]] = {
    "match": (Match(coupled=False), None),
    "rejection": (Rejection(), Chain(2)),
    "block": (Block(), Chain(2)),
    "multiround": (MultiRound(), None),
    "multiround-repeating": (MultiRound(True), VCT(2, 1)),
}


@pytest.mark.parametrize(
    ("name", "drafter", "rule"), one_in(2, ["t=1", "many"], list(DRAFTERS), list(RULES))
)
def test_output_of_searching_drafters_has_the_targets_distribution(
    name: str, drafter: str, rule: str, static: Static
) -> None:
    acceptor, policy = RULES[rule]
    assert law(policy or static, acceptor, DRAFTERS[drafter], ASKED[name]) == pytest.approx(
        wanted(ASKED[name]), abs=1e-12
    )


# A grammar, whose texts end early and whose forced tokens are drafted without asking.

WRITTEN = [b"a", b"b", b"ab", b""]
EOS = 3
PATTERN = "a(ba|ab)b*"
LETTERS = ["".join(x) for n in range(4) for x in itertools.product("ab", repeat=n)]


def allowed(text: tuple[int, ...], logits: Floats) -> Floats:
    """The tokens behind the prompt after which some completion matches; EOS where the text does. By trying all."""
    if EOS in text[len(PROMPT) :]:  # only drafted, never written
        return np.where(np.arange(len(logits)) == EOS, logits, -np.inf)
    said = b"".join(WRITTEN[t] for t in text[len(PROMPT) :]).decode()
    fits = [
        any(re.fullmatch(PATTERN, said + w.decode() + more) for more in LETTERS)
        for w in WRITTEN[:EOS]
    ]
    fits.append(re.fullmatch(PATTERN, said) is not None)
    return np.where(fits, logits, -np.inf)


@pytest.mark.parametrize("forced", [False, True], ids=["", "forced"])
@pytest.mark.parametrize("guided", [False, True], ids=["", "guided"])
@pytest.mark.parametrize("rule", RULES)
def test_output_in_a_grammar_has_the_targets_distribution(
    rule: str, guided: bool, forced: bool, static: Static
) -> None:
    vocabulary = byte_vocabulary(WRITTEN, (EOS,))
    grammar = Constrained(Grammar.regex(PATTERN, canonical=False), vocabulary, len(PROMPT))
    asked = Asked(Sampling(1.0), (grammar,), allowed)
    table = random_table(4, 5)
    q = random_table(4, 6)[0]
    q = q * torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1]]).repeat(
        2, 1
    )  # two tokens after each, one of them mostly forbidden
    q = q / q.sum(-1, keepdim=True)
    acceptor, policy = RULES[rule]
    made = Request(
        PROMPT,
        LENGTH,
        frozenset({EOS}),
        processors=(grammar,),
        guides=(grammar,) if guided else (),
        forced=grammar.forced_token if forced else None,
    )
    expected = wanted(asked, table=table, eos=EOS)
    assert {len(t) for t in expected} == {3, 4}
    assert law(policy or static, acceptor, tabled(q), asked, [made], table) == pytest.approx(
        expected, abs=1e-12
    )


# Pruning on what was drawn.


@dataclass(frozen=True)
class Dropping(Layered):
    """Has some children of each node and drops the unlikely ones, by their own and their siblings' draws."""

    width: int = 2
    depth: int = knob(1, deepest=True)

    @property
    def candidates(self) -> int:
        return self.width

    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        return append(tree, frontier, candidates, candidates.log_q > np.log(0.3))


@pytest.mark.parametrize(
    ("kind", "policy"),
    [(Draw.WITHOUT_REPLACEMENT, Dropping(2, 2)), (Draw.WITH_REPLACEMENT, Dropping(2, 1))],
    ids=str,
)
def test_match_survives_pruning_on_draws(kind: Draw, policy: Policy) -> None:
    asked = ASKED["many"]
    assert law(policy, Asking(Match(), kind), tabled(FAR), asked) == pytest.approx(
        wanted(asked), abs=1e-12
    )


@pytest.mark.parametrize("rule", [Rejection(), Block(), MultiRound()], ids=str)
def test_pruning_on_draws_is_refused_and_would_be_wrong(rule: Acceptor) -> None:
    """The counterexample of the design: q = (.9, .1), p = (.5, .5), drawn tokens of q < .3 are dropped; A comes with .55."""
    with pytest.raises(UserError, match="prunes on what was drawn; allowed: match"):
        check_exact(Dropping(1), rule)
    q, table = torch.tensor([[0.9, 0.1]] * 2, dtype=torch.float64), torch.full((3, 2, 2), 0.5)
    asked = Asked(Sampling(1.0))
    plain_request = [Request((0,), 3)]  # of three tokens the second is drafted
    got = law(Dropping(1), rule, tabled(q), asked, plain_request, table)
    assert sum(x for text, x in got.items() if text[1] == 0) == pytest.approx(0.55, abs=1e-12)
    assert sum(x for text, x in got.items() if text[0] == 0) == pytest.approx(0.5, abs=1e-12)
    kept = law(Chain(1), rule, tabled(q), asked, plain_request, table)
    assert sum(x for text, x in kept.items() if text[1] == 0) == pytest.approx(0.5, abs=1e-12)


# What must make the enumeration fail.


def pretending(chance: Branching) -> Drafter:
    """Hands over its likeliest tokens as if they were draws."""
    return Pretending(FULL)


class Pretending(Searching):
    """The likeliest tokens of q [V, V], said to be draws of it."""

    def __init__(self, q: Tensor) -> None:
        self._q = TableDrafter(q)

    def expand(
        self, state: None, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, None]:
        found, _ = self._q.expand(
            None, tree, frontier, k, replace(drawing, kind=Draw.POINT, noise=None)
        )
        return replace(found, draw=drawing.kind), None


MISTAKES: dict[str, tuple[Acceptor, Policy, str]] = {
    "bonus without processors, top-k": (RawBonus(), Chain(1), "top-k"),
    "bonus without processors, cold": (RawBonus(), VCT(2, 1), "t=0.3"),
    "bonus without processors, bias": (RawBonus(), VCT(2, 1), "bias"),
    "bonus without processors, by rejection": (Rounds("raw bonus"), VCT(2, 1), "many"),
    "two draws": (TwoDraws(), VCT(2, 1), "t=1"),
    "q = 1 on drawn children": (Rounds("q = 1"), Chain(1), "t=1.7"),
    "bonus of all of p after a mismatch": (Rounds("bonus of all of p"), VCT(2, 1), "t=1"),
    "residual without the token alone": (Rounds("residual without the token"), Chain(1), "t=1.7"),
    "residual not normalised": (Rounds("residual not normalised", True), VCT(2, 1), "t=1.7"),
    "residual of another q": (Rounds("q of another node"), VCT(2, 1), "t=1"),
    "drawn without, believed with replacement": (Rounds(believed=True), VCT(2, 1), "t=1"),
    "drawn with, believed without replacement": (
        Rounds(replacement=True, believed=False),
        VCT(2, 1),
        "t=1",
    ),
    "multiround told with replacement": (
        Asking(MultiRound(True), Draw.WITHOUT_REPLACEMENT),
        VCT(2, 1),
        "t=1",
    ),
    "multiround told without replacement": (
        Asking(MultiRound(), Draw.WITH_REPLACEMENT),
        VCT(2, 1),
        "t=1",
    ),
}


@pytest.mark.parametrize("rule", [Rejection(), Block(), MultiRound()], ids=str)
def test_likeliest_tokens_handed_over_as_draws_are_noticed(rule: Acceptor) -> None:
    got = law(Chain(2), rule, pretending, ASKED["t=1"])
    assert distance(got, wanted(ASKED["t=1"])) > 0.02


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name: str, record_property: Callable[[str, object], None]) -> None:
    wrong, policy, asked = MISTAKES[name]
    got = law(policy, wrong, tabled(FULL), ASKED[asked])
    assert sum(got.values()) == pytest.approx(1)
    record_property("distance", far := distance(got, wanted(ASKED[asked])))
    assert far > 0.02


@pytest.mark.parametrize("replacement", [False, True])
def test_the_same_rule_without_a_mistake_is_exact(replacement: bool) -> None:
    got = law(VCT(2, 1), Rounds(replacement=replacement), tabled(FULL), ASKED["many"])
    assert got == pytest.approx(wanted(ASKED["many"]), abs=1e-12)


def test_a_rule_for_point_candidates_is_exact_for_drawn_ones() -> None:
    """With q = 1 in the residual too, a rule is exact whatever tokens it is given: it is `match`, asked child by child."""
    got = law(VCT(2, 1), Rounds("one-hot"), tabled(FULL), ASKED["many"])
    assert got == pytest.approx(wanted(ASKED["many"]), abs=1e-12)


def token_wise(tree: Tree, chain: list[int], i: int, p: Distributions, weight: float) -> float:
    here = p(chain[i - 1])
    return min(1.0, ratio(here, proposal(tree, chain[i], len(here)), int(tree.tokens[chain[i]])))


def unweighted(tree: Tree, chain: list[int], i: int, p: Distributions, weight: float) -> Tensor:
    here = p(chain[i])
    return here if i == len(chain) - 1 else residual(here, proposal(tree, chain[i + 1], len(here)))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("_prefix_acceptance", token_wise), ("_block_residual", unweighted)],
    ids=["h", "residual"],
)
def test_a_mistake_in_block_verification_is_noticed(
    name: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, name, wrong)
    got = law(Chain(2), Block(), tabled(FULL), ASKED["t=1"])
    assert sum(got.values()) == pytest.approx(1)
    assert distance(got, wanted(ASKED["t=1"])) > 0.02


# With keyed noise, which cannot be enumerated: many requests of one seed.

EVEN = torch.full((3, 2, 2), 0.5, dtype=torch.float64)
SKEWED = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
TRIALS = 2000
"""A test of so many texts of 4 tokens finds a total variation of 0.083 between their 16 laws with
probability 0.99."""
LEVEL = 1e-3
BATCH = 250


def keyed(acceptor: Acceptor, policy: Policy, trials: int = TRIALS) -> list[list[int]]:
    """Texts of as many requests, four fair coins each, drafted by who expects the last one to come again."""
    written, target = [], table_target(EVEN, 8)
    for first in range(0, trials, BATCH):
        requests = [Request((0,), 4, number=i) for i in range(first, first + BATCH)]
        rows, parts = (
            SequenceBatch(target.new_cache(BATCH, 8)),
            Components(target, TableDrafter(SKEWED), policy, acceptor, COSTS),
        )
        for _ in decode(parts, rows, override_sampling(requests, Sampling(1.0, seed=5))):
            pass
        written += rows.written
    return written


def fair(texts: Sequence[Sequence[int]]) -> float:
    """The p-value of all 16 texts being equally likely."""
    count = Counter(map(tuple, texts))
    return goodness(
        [count[text] for text in itertools.product(range(2), repeat=4)], [1 / 16] * 16
    ).p_value


KEYED: dict[str, tuple[Acceptor, Policy]] = {
    "match": (Match(), VCT(2, 2)),
    "match-one": (Match(), Chain(3)),
    "rejection": (Rejection(), Chain(3)),
    "block": (Block(), Chain(3)),
    "multiround": (MultiRound(), VCT(2, 2)),
    "multiround-repeating": (MultiRound(True), VCT(2, 2)),
}


@pytest.mark.parametrize("rule", KEYED)
def test_texts_of_keyed_noise_have_the_targets_distribution(rule: str) -> None:
    assert detectable_distance(TRIALS, 15, LEVEL) == pytest.approx(0.083, abs=1e-3)
    assert fair(keyed(*KEYED[rule])) > LEVEL


def test_block_verification_needs_fresh_noise_where_a_place_is_drafted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = keyed_noise.Keyed._place

    def without_step(self: keyed_noise.Keyed, row: int, depth: int, kind: int) -> keyed_noise.Place:
        first, second, place, _, last = right(self, row, depth, kind)
        return first, second, place, 0, last

    monkeypatch.setattr(keyed_noise.Keyed, "_place", without_step)
    assert fair(keyed(*KEYED["block"])) < 1e-9
    assert fair(keyed(*KEYED["rejection"])) > LEVEL, (
        "it looks at no draft behind the first that it rejects"
    )


@pytest.mark.parametrize(
    "policy",
    [Chain(2), VCT(2, 2), PCT(width=2, max_depth=3, ratio=0.2)],
    ids=lambda p: type(p).__name__,
)
def test_match_with_coupled_drafts_writes_the_very_text_of_plain_decoding(policy: Policy) -> None:
    asked, target = ASKED["many"], table_target(random_table(3, 4), 8)
    requests = [Request(PROMPT, LENGTH, number=i, processors=asked.processors) for i in range(100)]
    requests = override_sampling(requests, replace(asked.sampling, seed=3))
    alone, rows = SequenceBatch(target.new_cache(100, 8)), SequenceBatch(target.new_cache(100, 8))
    for _ in decode_plain(target, Match(), alone, requests):
        pass
    for _ in decode(Components(target, TableDrafter(FULL), policy, Match(), COSTS), rows, requests):
        pass
    assert rows.written == alone.written
    assert len({tuple(t) for t in rows.written}) > 5
    assert sum(s.accepted for s in rows.stats.steps) > 30
