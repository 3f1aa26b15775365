"""Drafts a chain for each request by draftree's own drafters, policies and learnt costs.

The drafter's state has a slot for each request, as in a batch of draftree's engine. A call first
learns what became of the chains of the last one. Then it frees the slots of requests that are gone,
starts those that are new, and drafts.

Shapes: R slots of the batch, S slots, F frontier nodes, K candidates, N nodes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs, CostSource
from draftree.costs.step_timings import DraftStep, StepTimes
from draftree.drafters.base import Drafter
from draftree.integrations.vllm.requests import RequestStep, Slots
from draftree.kernels.node_table import NodeTable
from draftree.metrics import Work
from draftree.models.kv_cache import SlotCache
from draftree.policies.base import Policy, RetrievalExpand
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates
from draftree.tree import AcceptResult, Candidates, Ints, SubtreeCandidates, Tree, TreeBudget

NO_TOKENS = np.zeros(0, np.int64)
NO_CACHE = cast(SlotCache, None)
NO_TAPS = HiddenStates({}, NO_TOKENS, NO_TOKENS, NO_TOKENS, NO_CACHE)
"""Placeholders for the cache and the hidden states, which drafters that read only text do not
use."""
MAX_SPARE_RATIO = 4
"""Largest ratio of all slots to used slots. Above it, the number of slots is reduced."""


@dataclass
class TextSearch(RetrievalExpand):
    """Give a policy access to a drafter that reads only text, and time its calls.

    Attributes:
        drafter: the drafter.
        state: state of the drafter, updated by each call.
        steps: sizes and times of the draft steps.
    """

    drafter: Drafter[Any]
    state: Any
    steps: list[DraftStep] = field(default_factory=list)

    @override
    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        start = time.perf_counter()
        candidates, self.state = self.drafter.expand(self.state, tree, frontier, k, Drawing())
        self.steps.append(DraftStep(len(frontier), time.perf_counter() - start))
        return candidates

    @override
    def find(self, tree: Tree, frontier: Ints, k: int) -> Candidates | None:
        return None

    @override
    def below(self, tree: Tree, frontier: Ints, k: int, deepest: Ints) -> SubtreeCandidates | None:
        start = time.perf_counter()
        found, self.state = self.drafter.below(self.state, tree, frontier, k, Drawing(), deepest)
        if found is not None:
            self.steps.append(DraftStep(len(frontier), time.perf_counter() - start))
        return found

    @property
    @override
    def searches(self) -> bool:
        return True


@dataclass(frozen=True)
class PendingChains:
    """Store the chains of one call until the next call shows which tokens were accepted.

    Attributes:
        tree: draft tree with a chain after each root; its `row` is the slot of a request.
        costs: costs that the policy has read.
        work: numbers of tokens and passes of the step.
        drafts: sizes and times of the draft steps.
        began: time at which the call began, by `time.perf_counter`.
        ended: time at which the call ended.
    """

    tree: Tree
    costs: Costs
    work: Work
    drafts: tuple[DraftStep, ...]
    began: float
    ended: float


@dataclass
class Figures:
    """Count the calls of a proposer and their results.

    Attributes:
        calls: number of calls.
        requests: number of times that a request was started, including resumed ones.
        resumed: number of times that a request was started again. This happens if its text does not
            continue the text for which tokens were drafted.
        drafted: number of drafted tokens.
        accepted: number of accepted drafted tokens.
        steps: number of verifications, counted for each request, including those without drafts.
        seconds: seconds spent in the proposer.
        timed: number of vLLM's steps whose times were used to learn costs.
    """

    calls: int = 0
    requests: int = 0
    resumed: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    seconds: float = 0.0
    timed: int = 0


class Chains:
    """Draft chains for the requests of vLLM, and learn from the accepted tokens.

    The object has a slot for each request, the states of drafter and policy, and the last step.

    Args:
        drafter: drafter that reads only text.
        policy: policy that chooses the lengths of the chains.
        costs: costs of a step, which are corrected by the time between two calls.
        longest: largest number of tokens in a chain.
        context: largest number of tokens in a text.
        vocab: number of token ids.
    """

    def __init__(
        self,
        drafter: Drafter[Any],
        policy: Policy,
        costs: CostSource,
        longest: int,
        context: int,
        vocab: int,
    ) -> None:
        self.drafter = drafter
        self.policy = policy
        self.costs = costs
        self.longest = longest
        self.context = context
        self.vocab = vocab
        self.slots, self.figures = Slots(), Figures()
        self._state: Any = None
        self._memory = policy.start()
        self._last: PendingChains | None = None

    def step(self, rows: Sequence[RequestStep], steady: bool = True) -> list[list[int]]:
        """Learn from the last step, and return a chain of token ids for each request.

        Args:
            rows: requests that got a token in the last step of vLLM.
            steady: whether no other request took part in this step, so that its time is the cost of
                the verification.
        """
        began = time.perf_counter()
        slots = self.slots.match(rows)
        slots = self._learn(rows, slots, began, steady)
        self._release([slot for slot in self.slots.live if slot not in slots])
        placed = self._begin(rows, slots)
        for slot, row in zip(placed, rows, strict=True):
            self.slots.texts[slot] = row.text
        chains = self._draft(rows, placed, began) if rows else []
        self.figures.calls += 1
        self.figures.seconds += time.perf_counter() - began
        return chains

    def _learn(
        self, rows: Sequence[RequestStep], slots: list[int | None], began: float, steady: bool
    ) -> list[int | None]:
        """Update drafter, policy and costs with the accept results of the last step's chains.

        Return the slots, with None for requests whose text does not continue the one for which was
        drafted.
        """
        last, self._last = self._last, None
        if last is None:
            return slots
        verdicts = {
            slot: _accepted_nodes(last.tree, slot, row)
            for row, slot in zip(rows, slots, strict=True)
            if slot is not None
        }
        followed = [slot for slot in slots if slot is None or verdicts[slot] is not None]
        known = [None if slot is None or verdicts[slot] is None else slot for slot in slots]
        self.figures.resumed += len(slots) - len(followed)
        judged = {slot: verdict for slot, verdict in verdicts.items() if verdict is not None}
        if not judged:
            return known
        tree = _of_rows(last.tree, np.array(sorted(judged), np.int64))
        place = {int(number): node for node, number in enumerate(tree.number)}
        order = [judged[int(row)] for row in tree.row[: tree.roots]]
        paths = tuple(np.array([place[number] for number in path], np.int64) for path, _ in order)
        verdict = AcceptResult(paths, np.array([bonus for _, bonus in order], np.int64))
        start = time.perf_counter()
        self._state = self.drafter.commit(self._state, tree, verdict, NO_TAPS)
        commit = time.perf_counter() - start
        work = last.work if last.work.paused else replace(last.work, rows=tree.roots)
        self._memory = self.policy.observe(self._memory, tree, verdict, work, last.costs)
        self.figures.steps += tree.roots
        self.figures.accepted += sum(map(len, paths))
        if (
            steady
            and len(judged) == len(rows) == last.tree.roots
            and all(
                row.has_verified(last.tree.tokens[last.tree.of_row(slot)[1:]])
                for row, slot in zip(rows, slots, strict=True)
                if slot is not None
            )
        ):
            self._time(last, began - last.ended, commit, sum(map(len, paths)) + tree.roots)
        return known

    def _time(self, last: PendingChains, seconds: float, commit: float, gained: int) -> None:
        """Learn costs from the time of one step of vLLM.

        Args:
            last: the step.
            seconds: time of the step without drafting.
            commit: time of the drafter's commit.
            gained: number of tokens that the step generated.
        """
        work, drafting = last.work, last.ended - last.began
        times = StepTimes(work.context, work.rows, work.fed, seconds)
        if not work.paused:
            whole = seconds + drafting
            times = replace(times, drafts=last.drafts, commit=commit, seconds=whole, gained=gained)
        self.costs.observe(times)
        self.figures.timed += 1

    def _release(self, gone: Sequence[int]) -> None:
        """Free the given slots, whose requests have ended or were preempted.

        The drafter may remember their texts.
        """
        if not gone:
            return
        for slot in gone:
            self.slots.texts[slot] = None
        lengths = np.array(
            [0 if text is None else len(text) for text in self.slots.texts], np.int64
        )
        self._state = self.drafter.truncate(self._state, lengths, np.array(gone, np.int64))

    def _begin(self, rows: Sequence[RequestStep], slots: Sequence[int | None]) -> list[int]:
        """Start new requests in free slots, and return the slot of each request."""
        live = [slot for slot in slots if slot is not None]
        placed = (
            self._resize(slots, len(rows))
            if len(rows) > len(self.slots.texts) or self._wasteful(rows)
            else list(slots)
        )
        free = iter([slot for slot, text in enumerate(self.slots.texts) if text is None])
        begun = [i for i, slot in enumerate(placed) if slot is None]
        for i in begun:
            placed[i] = next(free)
        found = cast(list[int], placed)
        if begun:
            self.figures.requests += len(rows) - len(live)
            committed, roots = self._committed_tokens(rows, found)
            which = np.array([found[i] for i in begun], np.int64)
            self._state = self.drafter.start(committed, roots, NO_TAPS, self._state, which)
        return found

    def _wasteful(self, rows: Sequence[RequestStep]) -> bool:
        return bool(rows) and len(self.slots.texts) > MAX_SPARE_RATIO * len(rows)

    def _resize(self, slots: Sequence[int | None], wanted: int) -> list[int | None]:
        """Move the continuing requests into new storage, and return the new slot of each request.

        Args:
            slots: the old slot of each request; None for a request without a slot.
            wanted: the smallest number of slots of the new storage.
        """
        size = 1 << (wanted - 1).bit_length()
        kept = [slot for slot in slots if slot is not None]
        chosen = np.array(kept + [-1] * (size - len(kept)), np.int64)
        if self._state is not None and self.slots.texts:
            self._state = self.drafter.select(self._state, chosen, NO_CACHE)
        self.slots.texts = [self.slots.texts[slot] for slot in kept] + [None] * (size - len(kept))
        place = {slot: i for i, slot in enumerate(kept)}
        return [None if slot is None else place[slot] for slot in slots]

    def _committed_tokens(
        self, rows: Sequence[RequestStep], slots: Sequence[int]
    ) -> tuple[list[Ints], Ints]:
        """Return the committed tokens of each slot, empty for free ones, and [S] the roots."""
        committed = [NO_TOKENS] * len(self.slots.texts)
        roots = np.zeros(len(committed), np.int64)
        for row, slot in zip(rows, slots, strict=True):
            committed[slot], roots[slot] = row.text[:-1], row.text[-1]
        return committed, roots

    def _draft(
        self, rows: Sequence[RequestStep], slots: Sequence[int], began: float
    ) -> list[list[int]]:
        context = max(len(row.text) for row in rows)
        costs = self.costs.at(context, len(rows))
        order = np.argsort(slots)
        roots = Tree.from_roots(
            np.array(slots, np.int64)[order], np.array([rows[i].text[-1] for i in order], np.int64)
        )
        depth = np.full(len(self.slots.texts), -1)
        for row, slot in zip(rows, slots, strict=True):
            depth[slot] = np.clip(self.context - len(row.text) - 1, 0, self.longest)
        paused = self.policy.pauses(self._memory, len(rows))
        search = TextSearch(self.drafter, self._state)
        grown = self.policy.draft(
            search, roots, costs, TreeBudget(depth, self.longest), self._memory
        )
        tree, chains = _chains(grown, self.vocab)
        self._state = search.state
        frontiers = tuple(step.tokens for step in search.steps)
        work = Work(frontiers, len(tree), len(rows), context, paused=paused)
        self.figures.drafted += tree.drafted
        self._last = PendingChains(
            tree, costs, work, tuple(search.steps), began, time.perf_counter()
        )
        by_slot = dict(zip(roots.row.tolist(), chains, strict=True))
        return [by_slot[slot] for slot in slots]


def _accepted_nodes(tree: Tree, slot: int, row: RequestStep) -> tuple[list[int], int] | None:
    """Return the numbers of the accepted nodes in a slot's chain, and the token after them.

    Return None if the text does not continue with tokens of the chain and one more token.
    """
    nodes = tree.of_row(slot)[1:]
    new = row.text[len(row.text) - row.new :]
    count = len(new) - 1  # the last one is the target's own
    if count > len(nodes) or not np.array_equal(tree.tokens[nodes[:count]], new[:count]):
        return None
    return tree.number[nodes[:count]].tolist(), int(new[-1])


def _of_rows(tree: Tree, rows: Ints) -> Tree:
    """Return the part of a tree that belongs to the given slots.

    The nodes keep their numbers, by which drafters and policies identify them.
    """
    keep = np.isin(tree.row, rows)
    if keep.all():
        return tree
    place = np.cumsum(keep) - 1
    parents = np.where(tree.parents < 0, -1, place[tree.parents])
    nodes = NodeTable._make(column[keep] for column in tree.nodes._replace(parents=parents))
    return replace(tree, nodes=nodes, whole=tree.whole or tree)


def _chains(tree: Tree, vocab: int) -> tuple[Tree, list[list[int]]]:
    """Reduce a tree to the best path after each root; return it, and the tokens of the paths.

    A path ends before a token that is not in the vocabulary.
    """
    keep, chains = np.zeros(len(tree), np.bool_), list[list[int]]()
    for root in range(tree.roots):
        node, chain = root, list[int]()
        keep[root] = True
        while (below := tree.children(node)).size:
            node = int(below[tree.score[below].argmax()])
            if not 0 <= tree.tokens[node] < vocab:
                break
            keep[node] = True
            chain.append(int(tree.tokens[node]))
        chains.append(chain)
    return (tree if keep.all() else tree.select(keep)), chains
