"""What happens to one sequence changes neither the text, nor the acceptance length, nor the drafting of the others.

https://github.com/vllm-project/vllm/issues/57941: a draft model with a shorter context than the
target's. https://github.com/NVIDIA/TensorRT-LLM/pull/3456: sequences that leave a batch out of
order.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from architectures import VOCAB
from draftree.acceptors.base import Acceptor
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import UNIT_COSTS
from draftree.drafters.base import Drafter
from draftree.drafters.lm import LMDrafter
from draftree.engine import Engine, generate_plain
from draftree.errors import DraftreeWarning, UserError
from draftree.loop import Components, State, admit, release, step
from draftree.registry import build as part
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from kind_models import TRAINED, expected, fresh, target
from selection import one_in

Run = tuple[dict[int, list[int]], dict[int, list[tuple[int, int, int]]]]
CONTEXT = 24
PROMPTS = ([7, 5, 9, 5, 9, 11], [3, 8], [4, 9, 2, 30, 31, 5])
LONG = [
    int(i)
    for i in torch.randint(3, VOCAB, (CONTEXT + 6,), generator=torch.Generator().manual_seed(1))
]


@pytest.fixture(scope="module")
def llama() -> Target:
    return target("llama")


def short(name: str, to: Target) -> Drafter[Any]:
    """A drafter whose context is shorter than the target's."""
    drafter: Any
    if name == "lm":
        drafter = LMDrafter(target("llama", max_position_embeddings=CONTEXT))
    else:
        drafter = fresh(name, to)
        drafter.model.double()
        drafter.decoder.context = CONTEXT
    return drafter


def run(
    to: Target,
    drafter: Drafter[Any],
    requests: Sequence[Request],
    leaves: int = -1,
    policy: str = "eagle2",
) -> Run:
    """Texts and verified steps of each sequence, by its number; one may be cancelled after two steps."""
    rule: Acceptor = part(
        "acceptor", "greedy" if all(r.sampling.greedy for r in requests) else "match"
    )
    rows, state = SequenceBatch(to.new_cache(len(requests), 64)), State()
    parts = Components(to, drafter, part("policy", policy), rule, UNIT_COSTS)
    _, state = admit(parts, rows, requests, state)
    texts = dict(enumerate(rows.written))
    taken = 0
    while rows.live.size:
        _, state = step(parts, rows, state)
        taken += 1
        if taken == 2 and leaves in rows.live:
            state = release(parts, rows, leaves, state)
    steps: dict[int, list[tuple[int, int, int]]] = {}
    for one in rows.stats.steps:
        steps.setdefault(one.sequence, []).append((one.accepted, one.nodes, one.depth))
    return texts, steps


def alone(
    to: Target, drafter: Drafter[Any], requests: Sequence[Request], policy: str = "eagle2"
) -> Run:
    """The same, each sequence in a batch of its own."""
    texts, steps = {}, {}
    for number, request in enumerate(requests):
        text, mine = run(to, drafter, [request], policy=policy)
        texts[number], steps[number] = text[0], mine.get(0, [])
    return texts, steps


@pytest.mark.parametrize(
    ("name", "policy"), one_in(2, ["lm", "vdm", "edd", "glide"], ["eagle2", "chain", "pct"])
)
def test_a_sequence_beyond_the_drafters_context_takes_no_drafts_from_others(
    name: str, policy: str, llama: Target
) -> None:
    drafter = short(name, llama)
    requests = [
        Request(PROMPTS[0], 12),
        Request(LONG, 12),
        Request(LONG[: CONTEXT - 6], 16),
        Request(PROMPTS[1], 12),
    ]
    texts, steps = run(llama, drafter, requests, policy=policy)
    assert (texts, steps) == alone(llama, drafter, requests, policy)
    assert all(nodes == 0 for _, nodes, _ in steps[1]), "it was never drafted for"
    assert any(nodes for _, nodes, _ in steps[2]), (
        "it was drafted for, as long as the context reached"
    )
    assert steps[2][-1][1] == 0
    assert all(nodes for _, nodes, _ in steps[0][:-1])
    assert texts[1] == expected(llama, [LONG], 12)[0]


class Choice(LogitsProcessor):
    """A rule that leaves one token, at some lengths of the text."""

    def __init__(self, lengths: range) -> None:
        self.lengths = lengths

    def forced(self, ids: list[int]) -> int | None:
        """The only token after a text."""
        return (3 * len(ids) + 4) % VOCAB if len(ids) in self.lengths else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self.forced(input_ids[0].tolist())
        if token is None:
            return scores
        one = torch.full_like(scores, -torch.inf)
        one[:, token] = scores[:, token]
        return one


@pytest.mark.parametrize(
    ("name", "sampling"),
    one_in(
        2,
        ["eagle", "vdm", "medusa", "eagle3:draft_vocab=20", "dflash"],
        [Sampling(), Sampling(temperature=0.9, seed=3)],
    ),
    ids=str,
)
def test_a_sequence_that_has_one_choice_changes_nothing_for_others(
    name: str, sampling: Sampling, llama: Target
) -> None:
    drafter = fresh(name, llama)
    rule = Choice(range(8, 14))
    bound = Request(
        PROMPTS[0], 12, sampling=sampling, processors=(rule,), guides=(rule,), forced=rule.forced
    )
    requests = [
        Request(PROMPTS[1], 12, sampling=sampling),
        bound,
        Request(PROMPTS[2], 12, sampling=sampling),
    ]
    both = run(llama, drafter, requests)
    assert both == alone(llama, drafter, requests)
    assert both[0][1][2:8] == [(3 * n + 4) % VOCAB for n in range(8, 14)]
    assert sum(accepted for accepted, _, _ in both[1][1]) >= 4, (
        "what is forced is drafted and accepted"
    )


@pytest.mark.parametrize(
    ("name", "leaves"), one_in(2, ["eagle", "vdm", "hydra", "suffix", "dflash", "mtp"], [0, 1])
)
def test_a_sequence_that_ends_or_is_cancelled_changes_nothing_for_others(
    name: str, leaves: int, llama: Target
) -> None:
    drafter = part("drafter", "suffix").open(llama) if name == "suffix" else fresh(name, llama)
    requests = [Request(PROMPTS[0], 12), Request(PROMPTS[1], 5), Request(PROMPTS[2], 14)]
    texts, steps = run(llama, drafter, requests, leaves)
    own, mine = alone(llama, drafter, requests)
    for number in {0, 1, 2} - {leaves}:
        assert (texts[number], steps[number]) == (own[number], mine[number])


def test_acceptance_lengths_are_told_by_sequence(llama: Target) -> None:
    rows, state = SequenceBatch(llama.new_cache(2, 64)), State()
    drafter = LMDrafter(llama)
    parts = Components(
        llama, drafter, part("policy", "chain:length=3"), part("acceptor", "greedy"), UNIT_COSTS
    )
    _, state = admit(parts, rows, [Request(PROMPTS[0], 9), Request(PROMPTS[1], 9)], state)
    while rows.live.size:
        _, state = step(parts, rows, state)
    lengths = rows.stats.acceptance_lengths
    assert lengths.keys() == {0, 1}
    assert all(length > 2 for length in lengths.values()), "a target that drafts for itself"
    state = release(parts, rows, 0, state)
    _, state = admit(parts, rows, [Request(PROMPTS[2], 9)], state)
    while rows.live.size:
        _, state = step(parts, rows, state)
    assert rows.stats.acceptance_lengths.keys() == {0, 1, 2}, (
        "a row that is used again is another sequence"
    )


class Broken(Drafter[Any]):
    """Drafts as another drafter, and raises an exception for one sequence.

    Args:
        drafter: the other one.
        method: that raises.
        first: the token that the sequence begins with.
        steps: committed steps of the sequence before that.
        times: how often it raises.
        error: what it raises.
    """

    def __init__(
        self,
        drafter: Drafter[Any],
        method: str,
        first: int,
        steps: int = 2,
        times: int = 10**9,
        error: Exception | None = None,
    ) -> None:
        self.drafter = drafter
        self.method = method
        self.first = first
        self.steps = steps
        self.times = times
        self.error = error or ValueError("a bug")
        self.row = -1
        self.done = 0
        for name in ("ahead", "expands_paths", "searches", "remembers", "sends_probes"):
            setattr(self, name, getattr(drafter, name))

    @property
    def needs(self) -> Any:
        return self.drafter.needs

    @property
    def description(self) -> str:
        return "Broken"

    def fail(self, method: str, rows: Any) -> None:
        if method == self.method and self.row in rows and self.done >= self.steps and self.times:
            self.times -= 1
            raise self.error

    def start(
        self, prompts: Any, roots: Any, hidden_states: Any, state: Any = None, rows: Any = None
    ) -> Any:
        begun = range(len(prompts)) if rows is None else rows.tolist()
        for row in begun:
            if [*prompts[row][:1].tolist(), roots[row]][0] == self.first:
                self.row, self.done = row, 0
            elif row == self.row:
                self.row = -1
        self.fail("start", begun)
        return self.drafter.start(prompts, roots, hidden_states, state, rows)

    def expand(self, state: Any, tree: Any, frontier: Any, k: int, drawing: Any) -> Any:
        self.fail("expand", tree.row[frontier])
        return self.drafter.expand(state, tree, frontier, k, drawing)

    def find(self, state: Any, tree: Any, frontier: Any, k: int, drawing: Any) -> Any:
        self.fail("find", tree.row[frontier])
        return self.drafter.find(state, tree, frontier, k, drawing)

    def below(
        self, state: Any, tree: Any, frontier: Any, k: int, drawing: Any, deepest: Any
    ) -> Any:
        self.fail("below", tree.row[frontier])
        return self.drafter.below(state, tree, frontier, k, drawing, deepest)

    def passes(self, state: Any, tree: Any, frontier: Any) -> int:
        self.fail("passes", tree.row[frontier])
        return self.drafter.passes(state, tree, frontier)

    def commit(self, state: Any, tree: Any, verdict: Any, hidden_states: Any) -> Any:
        self.fail("commit", tree.row)
        state = self.drafter.commit(state, tree, verdict, hidden_states)
        self.done += self.row in tree.row
        return state

    def truncate(self, state: Any, lengths: Any, rows: Any = None) -> Any:
        self.fail("truncate", range(len(lengths)) if rows is None else rows)
        return self.drafter.truncate(state, lengths, rows)

    def select(self, state: Any, rows: Any, cache: Any) -> Any:
        self.fail("select", rows)
        if (found := self.drafter.select(state, rows, cache)) is not None and self.row >= 0:
            self.row = next((new for new, old in enumerate(rows.tolist()) if old == self.row), -1)
        return found

    def probes(self, state: Any) -> Any:
        self.fail("probes", [self.row])
        return self.drafter.probes(state)

    def carry(self, state: Any) -> Any:
        self.fail("carry", [self.row])
        return self.drafter.carry(state)


def opened(name: str, to: Target) -> Drafter[Any]:
    """A drafter with random weights, or one that searches."""
    return fresh(name, to) if name.partition(":")[0] in TRAINED else part("drafter", name).open(to)


BATCH = [Request(PROMPTS[0], 14), Request(PROMPTS[2], 14), Request([*PROMPTS[0], 3], 14)]
SAMPLED = [
    Request(r.prompt, 14, number=i, sampling=Sampling(0.9, seed=3)) for i, r in enumerate(BATCH)
]


def raising() -> Iterator[Any]:
    """Every drafter × method × sampling; every method with one drafter, and every second drafter, are always tried."""
    for number, name in enumerate((*TRAINED, "pld", "suffix", "lookahead", "lm:demo")):
        for method in ("expand", "commit", "start", "passes"):
            for kind, requests in (("greedy", BATCH), ("sampled", SAMPLED)):
                always = (
                    method == "expand"
                    and kind == ("greedy" if name != "vdm" else "sampled")
                    and number % 2
                ) or (name == "eagle" and kind == "greedy")
                marks = () if always else pytest.mark.long
                yield pytest.param(
                    name, method, requests, id=f"{name}-{method}-{kind}", marks=marks
                )


@pytest.mark.parametrize(("name", "method", "requests"), list(raising()))
def test_a_sequence_whose_drafter_raises_is_decoded_plainly(
    name: str, method: str, requests: list[Request], llama: Target
) -> None:
    """The others keep text, acceptance length and drafts; the exception is told in one warning."""
    drafter = LMDrafter(llama) if name == "lm:demo" else opened(name, llama)
    want, steps = alone(llama, drafter, requests)
    with pytest.warns(DraftreeWarning) as told:
        found, mine = run(
            llama, Broken(drafter, method, PROMPTS[2][0], steps=2 * (method != "start")), requests
        )
    assert found == want
    assert [mine[0], mine[2]] == [steps[0], steps[2]]
    if method != "start":
        assert mine[1][:2] == steps[1][:2]
    assert all(depth == 0 for _, _, depth in mine[1][(method != "start") * 3 :])
    assert [str(w.message) for w in told] == [
        "the drafter failed, and the text continues without drafts: ValueError: a bug (Broken)"
    ]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("pld", "expand"),
        ("pld+vdm", "find"),
        ("pld+vdm", "below"),
        ("eagle+suffix", "commit"),
        ("lookahead", "probes"),
    ],
)
def test_searches_and_probes_that_raise(name: str, method: str, llama: Target) -> None:
    drafter = Broken(part("drafter", name).example(llama), method, PROMPTS[2][0])
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DraftreeWarning
        )  # not every drafter is asked by every method
        found = run(llama, drafter, BATCH, policy="yield")[0]
    assert found == dict(enumerate(generate_plain(llama, BATCH).tokens))


@pytest.mark.parametrize("method", ["expand", "passes", "commit"])
def test_what_is_raised_once_takes_no_drafts(method: str, llama: Target) -> None:
    drafter = opened("vdm", llama)
    want = alone(llama, drafter, BATCH)
    with pytest.warns(
        DraftreeWarning, match=r"^the drafter failed, and it is asked again: no network \(Broken\)"
    ):
        assert (
            run(
                llama,
                Broken(drafter, method, PROMPTS[2][0], times=1, error=UserError("no network")),
                BATCH,
            )
            == want
        )


@pytest.mark.parametrize(
    ("name", "method"),
    one_in(2, ["eagle", "suffix"], ["start", "expand", "commit", "truncate", "carry", "select"]),
)
def test_engines_whose_drafter_raises_write_on(name: str, method: str, llama: Target) -> None:
    """Lists, single texts and submitted requests alike; a later text is drafted for again."""
    want, drafter = (
        generate_plain(llama, BATCH).tokens,
        Broken(opened(name, llama), method, PROMPTS[2][0], steps=0),
    )
    engine = Engine(llama, drafter, part("policy", "eagle2"), costs=UNIT_COSTS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DraftreeWarning)
        assert engine.write(BATCH).tokens == want
        assert [engine.write([r]).tokens[0] for r in BATCH] == want
        handles = [engine.submit(r) for r in BATCH]
        assert [h.result().tokens for h in handles] == want
        assert engine.write([BATCH[0]]).stats.steps[0].nodes, "another text is drafted for"
    assert all(issubclass(w.category, DraftreeWarning) for w in told)
    assert [h.error for h in handles] == [None] * 3


def test_an_exception_that_is_no_error_ends_the_call(llama: Target) -> None:
    drafter = Broken(opened("vdm", llama), "expand", PROMPTS[2][0], times=1)
    drafter.error = KeyboardInterrupt()  # type: ignore[assignment]
    engine = Engine(llama, drafter, part("policy", "eagle2"), costs=UNIT_COSTS)
    with pytest.raises(KeyboardInterrupt):
        engine.write(BATCH)
    assert engine.write(BATCH).tokens == generate_plain(llama, BATCH).tokens


def test_fused_drafters_search_for_no_token_that_is_forced(llama: Target) -> None:
    """What a neighbour has to write next is not searched for, as it would not be if it were alone."""
    drafter, asked = part("drafter", "pld+vdm").example(llama), list[list[int]]()
    search = drafter.find
    drafter.find = lambda state, tree, frontier, k, drawing: (
        asked.append(tree.row[frontier].tolist()) or search(state, tree, frontier, k, drawing)
    )
    rule = Choice(range(100))
    bound = Request(PROMPTS[0], 6, processors=(rule,), guides=(rule,), forced=rule.forced)
    texts, _ = run(llama, drafter, [bound, Request(PROMPTS[2], 6)], policy="yield")
    assert asked
    assert all(0 not in rows for rows in asked)
    assert texts[1] == expected(llama, [PROMPTS[2]], 6)[0]
