"""Several drafters fused into one: what each proposes goes into one tree (docs/explanation/fusion.md).

The first part with a whole q, a trained drafter, is the guide, and its q is left as it is. A token
that another part finds gets the acceptance that such finds had so far, and the guide's other tokens
share what is left: with nothing found the candidates are the guide's own. Without a guide, all
parts' finds are judged.

Shapes: R slots, P parts, F frontier nodes, K candidates, X features, C distinct candidates of all
nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from draftree.drafters.base import Drafter, Method, replace_slots, select_slots
from draftree.errors import UserError
from draftree.kernels.merge_candidates import estimate_acceptance, judgements, merge
from draftree.models.kv_cache import SlotCache
from draftree.online_logistic import Logistic
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, HiddenStateSpec, Probes, Target
from draftree.tree import (
    AcceptResult,
    Bools,
    Candidates,
    Draw,
    Floats,
    Ints,
    SubtreeCandidates,
    Tree,
)

GUIDED_WEIGHTS = (1.0, 0.5, 1.0, 2.0)
"""Initial weights of `Find.x` for the log-odds of a retrieval hit's acceptance, with a guide.

A hit multiplies the odds that the guide gives to the token, as independent evidence would. The
factor is moderate: 2.7 for a hit with q = ½.
"""
UNGUIDED_WEIGHTS = (0.0, 1.0, 0.0, 2.0)
"""Initial weights of `Find.x` without a guide; the first estimate is the part's own q."""
PRIOR = 4.0
"""The number of examples of unit curvature that count as much as the initial weights."""
RECENT_HIT_WEIGHT, INITIAL_HIT_MEAN = 0.2, 0.5
"""Constants of the moving mean of a sequence's recent hits.

`RECENT_HIT_WEIGHT` is the weight of the newest hit, and `INITIAL_HIT_MEAN` the mean before any hit.
"""
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


@dataclass(frozen=True)
class HitRate:
    """Estimates of how often one part's candidates are accepted in a sequence.

    They are conditional on the acceptance of the parent.

    Attributes:
        beside: the model of acceptance for candidates that were proposed together with a guide.
        alone: the model of acceptance for candidates without a guide.
        recent: moving mean of how often this sequence's last candidates included the right token.
    """

    beside: Logistic = field(default_factory=lambda: Logistic.around(*GUIDED_WEIGHTS, prior=PRIOR))
    alone: Logistic = field(default_factory=lambda: Logistic.around(*UNGUIDED_WEIGHTS, prior=PRIOR))
    recent: float = INITIAL_HIT_MEAN


@dataclass(frozen=True)
class RetrievalHits:
    """Candidates that one part proposes for a frontier, stored until the accept result is known.

    Attributes:
        part: the number of the part.
        guided: whether there was a guide, which is the first part that computes q for the whole
            vocabulary.
        numbers: [F] the numbers of the frontier's nodes.
        tokens: [F, K] token ids.
        place: [F, K] −∞ where there is a candidate, NaN elsewhere.
        guide: [F, K] the guide's q of each candidate; 0 without a guide.
        x: [F, K, X] the features from which acceptance is estimated: 1, the log-odds of the part's
            q, the log-odds of the guide's q, and the recent success.
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


@dataclass(frozen=True)
class FusedState:
    """The state of fused drafters.

    Attributes:
        parts: [P] the state of each part.
        trust: [R][P] the trust in each part for each slot. In the result of `carry` there is one
            slot, which stands for all.
        finds: the candidates that were proposed in this step.
        searched: the results of the last search: a map from node number to place in the frontier,
            and the candidates of each part that searches.
    """

    parts: tuple[Any, ...]
    trust: tuple[tuple[HitRate, ...], ...]
    finds: tuple[RetrievalHits, ...] = ()
    searched: tuple[Mapping[int, int], Mapping[int, Candidates]] = ({}, {})

    @property
    def together(self) -> tuple[HitRate, ...]:
        """Return the trust in each part [P], averaged over all sequences."""
        return tuple(_average_trust(rows) for rows in zip(*self.trust, strict=True))


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
        known = (HitRate(),) * len(self.parts) if state is None else state.together
        inner = [
            part.start(prompts, roots, select_hidden_states(part, hidden_states), s, rows)
            for part, s in zip(self.parts, before, strict=True)
        ]
        fresh = (tuple(replace(trust, recent=INITIAL_HIT_MEAN) for trust in known),) * len(prompts)
        if state is None or len(state.trust) != len(
            prompts
        ):  # what `carry` returns has one slot, which represents all
            return FusedState(tuple(inner), fresh)
        return FusedState(tuple(inner), replace_slots(state.trust, rows, fresh))

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
        find = _find(
            i,
            found.candidates,
            None,
            found.nodes,
            [state.trust[row][i] for row in found.rows.tolist()],
        )
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
        """Return the candidates of all parts except the guide.

        Parts that propose no token are left out.
        """
        rows, found = tree.row[frontier].tolist(), []
        for i, candidates in proposed.items():
            if i != guide and (candidates.log_q > -np.inf).any():
                trust = [state.trust[row][i] for row in rows]
                found.append(
                    _find(
                        i,
                        candidates,
                        None if guide is None else proposed[guide],
                        tree.number[frontier],
                        trust,
                    )
                )
        return found

    def commit(
        self, state: FusedState, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> FusedState:
        inner = [
            part.commit(s, tree, verdict, select_hidden_states(part, hidden_states))
            for part, s in zip(self.parts, state.parts, strict=True)
        ]
        trust = list(state.trust)
        for root in range(tree.roots):
            row, kept = int(tree.row[root]), verdict.committed_nodes(root)
            nexts = np.concatenate((tree.tokens[kept[1:]], verdict.bonus[root : root + 1]))
            finds = [[f for f in state.finds if f.part == i] for i in range(len(inner))]
            trust[row] = tuple(
                _update_trust(known, mine, tree.number[kept], nexts) if mine else known
                for known, mine in zip(trust[row], finds, strict=True)
            )
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
        return FusedState(
            tuple(inner), replace_slots(state.trust, rows, (state.together,) * len(lengths))
        )

    def select(self, state: FusedState, rows: Ints, cache: SlotCache) -> FusedState | None:
        inner = [
            part.select(s, rows, cache) for part, s in zip(self.parts, state.parts, strict=True)
        ]
        if any(s is None for s in inner):
            return None
        return FusedState(tuple(inner), select_slots(state.trust, rows, state.together))

    def carry(self, state: FusedState) -> FusedState:
        inner = [part.carry(s) for part, s in zip(self.parts, state.parts, strict=True)]
        return FusedState(tuple(inner), (state.together,))

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
    part: int, found: Candidates, guide: Candidates | None, numbers: Ints, trust: Sequence[HitRate]
) -> RetrievalHits:
    """Return a part's candidates with their estimated acceptance.

    Args:
        part: the number of the part.
        found: the candidates of the part.
        guide: the candidates of the guide, if there is one.
        numbers: [F] the numbers of the frontier's nodes.
        trust: [F] the trust in the part for each node's sequence.
    """
    log_q = NO_GUIDE_LOG_Q if guide is None else guide.log_of(found.tokens)
    recent = np.array([t.recent for t in trust])
    weights = np.array([t.alone.weights if guide is None else t.beside.weights for t in trust])
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


def _update_trust(
    trust: HitRate, finds: Sequence[RetrievalHits], kept: Ints, nexts: Ints
) -> HitRate:
    """Return the trust in a part after a step of its sequence.

    Args:
        trust: the trust before the step.
        finds: the candidates of the part in this step.
        kept: [n] numbers of the root and the accepted nodes.
        nexts: [n] the token that the target chose after each of these nodes. It decides about all
            candidates after these nodes, even those that were not verified. Nothing is learnt from
            candidates after other nodes.
    """
    recent = trust.recent
    beside = trust.beside
    alone = trust.alone
    examples: dict[bool, list[tuple[Floats, Bools]]] = {}
    for f in finds:
        x, right, recent = judgements(
            f.numbers, f.place, f.tokens, f.x, kept, nexts, recent, RECENT_HIT_WEIGHT
        )
        if len(right):
            examples.setdefault(f.guided, []).append((x, right))
    for guided, several in examples.items():
        x, true = (
            several[0] if len(several) == 1 else map(np.concatenate, zip(*several, strict=True))
        )
        beside, alone = (beside.learn(x, true), alone) if guided else (beside, alone.learn(x, true))
    return HitRate(beside, alone, recent)


def _average_trust(rows: Sequence[HitRate]) -> HitRate:
    """Return the average over sequences of the trust in one part.

    Each sequence's weights count in proportion to the sequence's information matrix.
    """
    if len(rows) == 1:
        return rows[0]
    beside, alone = (_mean([getattr(row, name) for row in rows]) for name in ("beside", "alone"))
    return HitRate(beside, alone, float(np.mean([row.recent for row in rows])))


def _mean(several: Sequence[Logistic]) -> Logistic:
    information = np.sum([each.information for each in several], axis=0)
    weights = np.linalg.solve(
        information, np.sum([each.information @ each.weights for each in several], axis=0)
    )
    return replace(several[0], weights=weights, information=information / len(several))
