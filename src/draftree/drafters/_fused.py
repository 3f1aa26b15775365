"""Several drafters fused into one: what each proposes goes into one tree (docs/explanation/fusion.md).

The first part with a whole q, a trained drafter, is the guide, and its q is left as it is. A token
that another part finds gets the acceptance that such finds had so far, and the guide's other tokens
share what is left: with nothing found the candidates are the guide's own. Without a guide, all
parts' finds are judged.

Shapes: R slots, P parts, F frontier nodes, K candidates, X features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from draftree.drafters.base import Drafter, Method, slots_or_all
from draftree.errors import UserError
from draftree.kernels.hit_acceptance import (
    HitRates,
    JudgedNodes,
    LearningRates,
    estimate_acceptance,
    learn_hits,
)
from draftree.kernels.merge_candidates import merge
from draftree.models.kv_cache import SlotCache
from draftree.online_logistic import CURVATURE, FORGETTING_RATE
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, HiddenStateSpec, Probes, Target
from draftree.tree import (
    AcceptResult,
    Candidates,
    Draw,
    Floats,
    Ints,
    SubtreeCandidates,
    Tree,
)

GUIDED_WEIGHTS = (1.0, 0.5, 1.0, 2.0)
"""Initial weights of `RetrievalHits.x` for the log-odds of a hit's acceptance, with a guide.

A hit multiplies the odds that the guide gives to the token, as independent evidence would. The
factor is moderate: 2.7 for a hit with q = ½.
"""
UNGUIDED_WEIGHTS = (0.0, 1.0, 0.0, 2.0)
"""Initial weights of `RetrievalHits.x` without a guide; the first estimate is the part's own q."""
PRIOR = 4.0
"""The number of examples of unit curvature that count as much as the initial weights."""
RECENT_HIT_WEIGHT, INITIAL_HIT_MEAN = 0.2, 0.5
"""Constants of the moving mean of a sequence's recent hits.

`RECENT_HIT_WEIGHT` is the weight of the newest hit, and `INITIAL_HIT_MEAN` the mean before any hit.
"""
LEARNING = LearningRates(RECENT_HIT_WEIGHT, PRIOR, FORGETTING_RATE, CURVATURE)
"""Constants by which the acceptance of hits is learnt."""
PROBABILITY_MARGIN = 1e-4
"""Probabilities are clipped to this distance from 0 and 1 before the weights learn from them."""
NO_GUIDE_LOG_Q = np.zeros((0, 0))
"""Stands for the guide's log q where there is no guide."""
MAX_HIT_MASS, MIN_HIT_VALUE = 1 - 1e-3, 1e-300
"""Bounds of the estimated values of retrieval hits.

`MAX_HIT_MASS` bounds the sum over all hits after a node, so that some probability is left for the guide's
tokens. `MIN_HIT_VALUE` is the smallest value of a hit.
"""


@final
@dataclass(frozen=True)
class Fused(Method):
    """Drafters whose candidates go into one tree; a spec joins them with `+`.

    Attributes:
        parts: the options of the drafters, which are called parts. Among candidates of equal q,
            those of earlier parts come first.
    """

    parts: tuple[Method, ...]

    def open(self, target: Target) -> "FusedDrafter":
        return FusedDrafter([part.open(target) for part in self.parts])

    def example(self, target: Target) -> "FusedDrafter":
        return FusedDrafter([part.example(target) for part in self.parts])


def initial_rates(rows: int) -> HitRates:
    """Return the acceptance of a part's hits in R sequences before anything is learnt."""
    weights = np.array([UNGUIDED_WEIGHTS, GUIDED_WEIGHTS])
    information = np.tile(PRIOR * np.eye(weights.shape[1]), (rows, 2, 1, 1))
    return HitRates(np.tile(weights, (rows, 1, 1)), information, np.full(rows, INITIAL_HIT_MEAN))


@dataclass(frozen=True)
class RetrievalHits:
    """Store the candidates of one of the fused drafters until it is known which are accepted.

    Attributes:
        part: the index of the drafter among the fused ones.
        guided: whether there was a guide, which is the first drafter that computes q for the whole
            vocabulary.
        numbers: [F] the numbers of the frontier's nodes.
        tokens: [F, K] token ids.
        place: [F, K] marks: −∞ where there is a candidate, NaN where there is none.
        guide: [F, K] the guide's q of each candidate; 0 without a guide.
        x: [F, K, X] the features from which acceptance is estimated: 1, the log-odds of the
            drafter's q, the log-odds of the guide's q, and the share of recent candidates that were
            accepted.
        value: [F, K] the estimated probability of acceptance.
    """

    part: int
    guided: bool
    numbers: Ints
    tokens: Ints
    place: Floats
    guide: Floats
    x: Floats
    value: Floats

    @property
    def judged(self) -> tuple[Ints, Ints, Floats, Floats, bool]:
        """Return the hits in the form that `learn_hits` takes."""
        return self.numbers, self.tokens, self.place, self.x, self.guided


@dataclass(frozen=True)
class FusedState:
    """The state of fused drafters.

    Attributes:
        parts: [P] the state of each part.
        trust: [P] how often the hits of each part are accepted, for each slot. In the result of
            `carry` there is one slot, which stands for all.
        finds: the candidates that were proposed in this step.
        searched: the results of the last search: a map from node number to place in the frontier,
            and the candidates of each part that searches.
    """

    parts: tuple[Any, ...]
    trust: tuple[HitRates, ...]
    finds: tuple[RetrievalHits, ...] = ()
    searched: tuple[Mapping[int, int], Mapping[int, Candidates]] = ({}, {})

    @property
    def together(self) -> tuple[HitRates, ...]:
        """Return the trust in each part [P], averaged over all sequences, for one slot."""
        return tuple(map(_average_rates, self.trust))


@final
class FusedDrafter(Drafter[FusedState]):
    """Drafters that expand the same nodes; their candidates are merged.

    The drafters are called parts. The first part that computes q for the whole vocabulary, such as
    a trained drafter, is the guide. Candidates of the other parts, such as retrieval hits, are
    valued by their estimated acceptance.

    Raises:
        UserError: more than one of the drafters sends probes with a verification.
    """

    remembers = True  # how often each part was right

    def __init__(self, parts: Sequence[Drafter[Any]]) -> None:
        self.parts = tuple(parts)
        self.expands_paths = all(part.expands_paths for part in self.parts)
        self.searches = all(part.searches for part in self.parts)
        self.ahead = max(part.ahead for part in self.parts)
        self._probing = [i for i, part in enumerate(self.parts) if part.sends_probes]
        self.sends_probes = bool(self._probing)
        if len(self._probing) > 1:
            both = " and ".join(f"'{self.parts[i].description}'" for i in self._probing)
            raise UserError(
                f"{both} cannot be fused: each adds probes to the target's pass, allowed is one with probes"
            )

    @property
    def needs(self) -> HiddenStateSpec:
        every = [part.needs for part in self.parts]
        hidden, kv = (
            (layer for needs in every for layer in needs.hidden),
            (layer for needs in every for layer in needs.kv),
        )
        return HiddenStateSpec(
            tuple(dict.fromkeys(hidden)),
            tuple(dict.fromkeys(kv)),
            max(needs.top for needs in every),
        )

    @property
    def description(self) -> str:
        return " + ".join(part.description for part in self.parts)

    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: FusedState | None = None,
        rows: Ints | None = None,
    ) -> FusedState:
        before = (None,) * len(self.parts) if state is None else state.parts
        known = (initial_rates(1),) * len(self.parts) if state is None else state.together
        inner = [
            part.start(prompts, roots, select_hidden_states(part, hidden_states), s, rows)
            for part, s in zip(self.parts, before, strict=True)
        ]
        known = tuple(rates._replace(recent=np.full(1, INITIAL_HIT_MEAN)) for rates in known)
        if state is None or len(state.trust[0].recent) != len(
            prompts
        ):  # what `carry` returns has one slot, which represents all
            every = np.zeros(len(prompts), np.int64)
            return FusedState(tuple(inner), _select_rates(known, every))
        return FusedState(tuple(inner), _replace_rates(state.trust, rows, known))

    def find(
        self, state: FusedState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates | None, FusedState]:
        """Return the retrieval hits of the parts that search, before the guide has run.

        The guide is the trained drafter. The probabilities of the hits come from the acceptance
        model for hits without a guide. `expand` does not search again for the same nodes.
        """
        if (
            self.searches or drawing.kind.is_sampled
        ):  # samples of one part are not merged with others
            return None, state
        inner, proposed = list(state.parts), dict[int, Candidates]()
        for i, part in enumerate(self.parts):
            if part.searches:
                proposed[i], inner[i] = part.expand(state.parts[i], tree, frontier, k, drawing)
        places = dict(zip(tree.number[frontier].tolist(), range(len(frontier)), strict=True))
        finds = self._finds(state, tree, frontier, proposed, None)
        state = FusedState(tuple(inner), state.trust, (*state.finds, *finds), (places, proposed))
        return (merge_hits(None, finds, k) if finds else None), state

    def below(
        self, state: FusedState, tree: Tree, frontier: Ints, k: int, drawing: Drawing, deepest: Ints
    ) -> tuple[SubtreeCandidates | None, FusedState]:
        """Return the candidates of the searching part, if exactly one part searches; else None.

        They are valued in the same way as in `find`.
        """
        searching = [i for i, part in enumerate(self.parts) if part.searches]
        if self.searches or drawing.kind.is_sampled or len(searching) != 1:
            return None, state
        (i,), inner = searching, list(state.parts)
        found, inner[i] = self.parts[i].below(state.parts[i], tree, frontier, k, drawing, deepest)
        if found is None:
            return None, state
        if not found.nodes.size:
            return replace(found, alone=False), replace(state, parts=tuple(inner))
        find = _find(i, found.candidates, None, found.nodes, state.trust[i], found.rows)
        cut = MAX_HIT_MASS / np.maximum(find.value.sum(axis=1, keepdims=True), MAX_HIT_MASS)
        log_q = np.where(
            found.candidates.log_q > -np.inf,
            np.log(np.maximum(find.value * cut, MIN_HIT_VALUE)),
            -np.inf,
        )
        own = Candidates(found.candidates.tokens, log_q, source=(1 << i) - 1)
        return replace(found, candidates=own, alone=False), replace(
            state, parts=tuple(inner), finds=(*state.finds, find)
        )

    def passes(self, state: FusedState, tree: Tree, frontier: Ints) -> int:
        """Return the number of nodes that models must read, which is the largest of all parts.

        Parts that only search are ignored if another part has a model.
        """
        asked = [i for i, part in enumerate(self.parts) if self.searches or not part.searches]
        return max(self.parts[i].passes(state.parts[i], tree, frontier) for i in asked)

    def expand(
        self, state: FusedState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, FusedState]:
        """Return the merged candidates of all parts.

        Random samples are never merged; they come from the first part that can draw samples.
        """
        inner, proposed = list(state.parts), dict[int, Candidates]()
        places, found = state.searched
        at = [places.get(number, -1) for number in tree.number[frontier].tolist()]
        for i, part in enumerate(self.parts):
            if i in found and -1 not in at:
                candidates = found[i].share_lists(np.array(at))
            else:
                candidates, inner[i] = part.expand(state.parts[i], tree, frontier, k, drawing)
            proposed[i] = replace(candidates, source=(1 << i) - 1)
            if (
                candidates.draw.is_sampled
            ):  # candidates of other parts were not drawn from the same q
                return proposed[i], replace(state, parts=tuple(inner))
        guide = next((i for i, candidates in proposed.items() if candidates.logs is not None), None)
        finds = self._finds(state, tree, frontier, proposed, guide)
        state = replace(state, parts=tuple(inner), finds=(*state.finds, *finds))
        best = (
            merge_hits(None if guide is None else proposed[guide], finds, k)
            if finds
            else proposed[guide or 0]
        )
        return replace(
            best, finite=all(candidates.finite for candidates in proposed.values())
        ), state

    def _finds(
        self,
        state: FusedState,
        tree: Tree,
        frontier: Ints,
        proposed: Mapping[int, Candidates],
        guide: int | None,
    ) -> list[RetrievalHits]:
        """Return the candidates of all parts except the guide, as retrieval hits.

        Parts that propose no token are left out.

        Args:
            state: the state of the drafter.
            tree: the tree so far.
            frontier: [F] the nodes that are expanded.
            proposed: the candidates of each part, by the index of the part.
            guide: the index of the guide; None if there is no guide.
        """
        guiding = None if guide is None else proposed[guide]
        nodes, rows = tree.number[frontier], tree.row[frontier]
        return [
            _find(i, candidates, guiding, nodes, state.trust[i], rows)
            for i, candidates in proposed.items()
            if i != guide and (candidates.log_q > -np.inf).any()
        ]

    def commit(
        self, state: FusedState, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> FusedState:
        inner = [
            part.commit(s, tree, verdict, select_hidden_states(part, hidden_states))
            for part, s in zip(self.parts, state.parts, strict=True)
        ]
        kept = verdict.nodes
        nexts = np.append(tree.tokens[kept[1:]], 0)
        ends = np.cumsum([1 + len(path) for path in verdict.paths]) - 1
        nexts[ends] = verdict.bonus
        judged = JudgedNodes(tree.number[kept], nexts, tree.row[kept])
        trust = list(state.trust)
        for i in {find.part for find in state.finds}:
            mine = [find.judged for find in state.finds if find.part == i]
            trust[i] = HitRates(*learn_hits(mine, judged, trust[i], LEARNING))
        return FusedState(tuple(inner), tuple(trust))

    def flush(self, state: FusedState) -> FusedState:
        return replace(
            state,
            parts=tuple(part.flush(s) for part, s in zip(self.parts, state.parts, strict=True)),
        )

    def truncate(self, state: FusedState, lengths: Ints, rows: Ints | None = None) -> FusedState:
        inner = [
            part.truncate(s, lengths, rows) for part, s in zip(self.parts, state.parts, strict=True)
        ]
        return FusedState(tuple(inner), _replace_rates(state.trust, rows, state.together))

    def select(self, state: FusedState, rows: Ints, cache: SlotCache) -> FusedState | None:
        inner = [
            part.select(s, rows, cache) for part, s in zip(self.parts, state.parts, strict=True)
        ]
        if any(s is None for s in inner):
            return None
        return FusedState(tuple(inner), _select_rates(state.trust, rows, state.together))

    def carry(self, state: FusedState) -> FusedState:
        inner = [part.carry(s) for part, s in zip(self.parts, state.parts, strict=True)]
        return FusedState(tuple(inner), state.together)

    def probes(self, state: FusedState) -> Probes | None:
        return (
            self.parts[self._probing[0]].probes(state.parts[self._probing[0]])
            if self._probing
            else None
        )


def select_hidden_states(part: Drafter[Any], hidden_states: HiddenStates) -> HiddenStates:
    """Return the hidden states that a part needs; a part that needs none may get all of them."""
    wanted = part.needs.hidden
    if not wanted or len(wanted) == len(hidden_states.hidden):
        return hidden_states
    return replace(hidden_states, hidden={layer: hidden_states.hidden[layer] for layer in wanted})


def _find(
    part: int,
    found: Candidates,
    guide: Candidates | None,
    numbers: Ints,
    rates: HitRates,
    rows: Ints,
) -> RetrievalHits:
    """Return a part's candidates with their estimated acceptance.

    Args:
        part: the number of the part.
        found: the candidates of the part.
        guide: the candidates of the guide, if there is one.
        numbers: [F] the numbers of the frontier's nodes.
        rates: how often the part's hits are accepted.
        rows: [F] the slot of each node.
    """
    log_q = NO_GUIDE_LOG_Q if guide is None else guide.log_of(found.tokens)
    recent, weights = rates.recent[rows], rates.weights[rows, int(guide is not None)]
    x, value, theirs, place = estimate_acceptance(
        np.ascontiguousarray(found.log_q),
        log_q,
        recent,
        weights,
        INITIAL_HIT_MEAN,
        PROBABILITY_MARGIN,
    )
    return RetrievalHits(
        part,
        guide is not None,
        numbers,
        np.ascontiguousarray(found.tokens),
        place,
        theirs,
        x,
        value,
    )


def merge_hits(guide: Candidates | None, finds: Sequence[RetrievalHits], k: int) -> Candidates:
    """Return the K best candidates of each node in descending order of q.

    Candidates of equal q are ordered by part, and then by their rank within the part.

    A token that several parts propose becomes one candidate. If retrieval found it, its q is the
    largest of the estimated values. A noisy-or would count the same evidence twice, because parts
    that search the same text have the same evidence. The guide's q is not added, because the value
    was estimated from it.

    Args:
        guide: the candidates of the guide, if there is one.
        finds: the candidates of the other parts; at least one entry.
        k: the number of candidates per node.
    """
    listed = [(f.tokens, f.place, f.value, f.guide, 1 << f.part) for f in finds]
    if guide is not None:
        before, nothing = (
            sum((1 << f.part) <= guide.source for f in finds),
            np.zeros(guide.tokens.shape),
        )
        own = np.where(guide.log_q > -np.inf, guide.log_q, np.nan)
        listed.insert(before, (guide.tokens, own, nothing, nothing, guide.source + 1))
    if len(listed) == 1:
        token, log_q, value, seen, bit = listed[0]
        bits = np.full(token.shape[1], bit)
    else:
        bits = np.repeat([part[-1] for part in listed], [part[0].shape[1] for part in listed])
        token, log_q, value, seen = (
            np.concatenate([part[i] for part in listed], axis=1) for i in range(4)
        )
    tokens, values, sources = merge(
        np.ascontiguousarray(token), log_q, value, seen, bits, k, MAX_HIT_MASS, PROBABILITY_MARGIN
    )
    if guide is None:
        return Candidates(tokens, values, sources=sources)
    return replace(guide, tokens=tokens, log_q=values, sources=sources, source=0, draw=Draw.POINT)


def _average_rates(rates: HitRates) -> HitRates:
    """Return the average over sequences, as the rates of one sequence.

    Each sequence's weights count in proportion to the sequence's information matrix.
    """
    if len(rates.recent) == 1:
        return rates
    information = rates.information.sum(axis=0)
    weighted = (rates.information @ rates.weights[..., None]).sum(axis=0)
    weights = np.linalg.solve(information, weighted)[..., 0]
    mean = information / len(rates.recent)
    return HitRates(weights[None], mean[None], rates.recent.mean(keepdims=True))


def _select_rates(
    trust: Sequence[HitRates], rows: Ints, empty: Sequence[HitRates] | None = None
) -> tuple[HitRates, ...]:
    """Return the rates of selected slots; where `rows` is −1, those of `empty`, of one slot."""
    if empty is None:
        return tuple(HitRates(*(column[rows] for column in rates)) for rates in trust)
    return tuple(
        HitRates(*(np.concatenate(columns)[rows] for columns in zip(rates, one, strict=True)))
        for rates, one in zip(trust, empty, strict=True)
    )


def _replace_rates(
    trust: Sequence[HitRates], rows: Ints | None, new: Sequence[HitRates]
) -> tuple[HitRates, ...]:
    """Return the rates with the given slots, by default all, set to those of `new`, of one slot."""
    count = len(trust[0].recent)
    chosen = np.arange(count)
    chosen[slots_or_all(rows, count)] = -1
    return _select_rates(trust, chosen, new)
