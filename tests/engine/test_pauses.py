"""Steps without the drafter: when a policy pauses, and what the drafter reads afterwards."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftree.acceptors.greedy import Greedy
from draftree.batch import SequenceBatch
from draftree.costs.cost_model import Size, Speed, curve_points
from draftree.costs.online_costs import Learner, OnlineCosts
from draftree.costs.step_costs import Costs
from draftree.costs.step_timings import DraftStep, StepTimes
from draftree.drafters.suffix import Suffix, SuffixDrafter
from draftree.drafting.postponed import MAX_UNREAD_STEPS, PlainStep, join_steps
from draftree.engine import Engine, generate_plain
from draftree.loop import Components, State, admit, release, step
from draftree.metrics import Work
from draftree.models.kv_cache import SlotCache
from draftree.policies import _pausing
from draftree.policies._pausing import Trial, Trials
from draftree.policies.chain import Chain
from draftree.policies.yield_ import Yield
from draftree.request import Request
from draftree.target.target import HiddenStates
from draftree.testing import Never, tiny_target
from draftree.testing.pauses import Pausing
from draftree.tree import AcceptResult, Ints, Tree

NO_PATH = np.zeros(0, np.int64)


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def plain(rows: Ints, tokens: Ints, after: Ints, position: int) -> PlainStep:
    """Return a step whose hidden state and likeliest token of each root are ten times its token."""
    hidden = {2: torch.from_numpy(10.0 * tokens)[:, None]}
    cache = SlotCache([], 3, torch.float32, torch.device("cpu"))
    states = HiddenStates(
        hidden, rows, np.full(len(rows), position), tokens, cache, top=hidden[2].long()
    )
    verdict = AcceptResult((NO_PATH,) * len(rows), after)
    return PlainStep(Tree.from_roots(rows, tokens), verdict, states)


def test_steps_without_drafts_are_joined_to_an_accepted_chain() -> None:
    steps = [
        plain(ints(0, 2), ints(5, 7), ints(6, 8), 4),
        plain(ints(0, 2), ints(6, 8), ints(9, 3), 5),
        plain(ints(2), ints(3), ints(4), 6),  # the text in slot 0 has ended
    ]
    tree, verdict, states = join_steps(steps)
    assert tree.roots == 2
    assert tree.row.tolist() == [0, 2, 0, 2, 2]
    assert tree.tokens.tolist() == [5, 7, 6, 8, 3]
    assert tree.parents.tolist() == [-1, -1, 0, 1, 3]
    assert tree.depth.tolist() == [0, 0, 1, 1, 2]
    assert [path.tolist() for path in verdict.paths] == [[2], [3, 4]]
    assert verdict.bonus.tolist() == [9, 4]
    assert states.positions.tolist() == [4, 4, 5, 5, 6]
    assert states.tokens.tolist() == tree.tokens.tolist()
    assert states.hidden[2][:, 0].tolist() == [50, 70, 60, 80, 30]
    assert states.top is not None
    assert states.top[:, 0].tolist() == [50, 70, 60, 80, 30]


def test_one_step_is_joined_to_itself() -> None:
    tree, verdict, _ = join_steps([plain(ints(1), ints(5), ints(6), 4)])
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([5], [-1])
    assert (verdict.bonus.tolist(), verdict.paths[0].tolist()) == ([6], [])


def trial(*profits: float, rows: int = 8) -> Trials:
    found = Trials()
    for profit in profits:
        found = found.after(rows, profit)
    return found


def test_drafting_pauses_after_a_trial_without_profit_and_longer_after_the_next() -> None:
    steps = _pausing.FIRST_TRIAL // 8
    assert not trial(*[-0.1] * (steps - 1)).paused(8)
    trials = trial(*[-0.1] * steps)
    for length in (_pausing.FIRST_PAUSE_STEPS, *[_pausing.MAX_PAUSE_STEPS] * 2):
        for _ in range(length):
            assert trials.paused(8)
            trials = trials.after(8, 99.0)  # a paused step has no profit
        assert not trials.paused(8)
        for _ in range(_pausing.TRIAL // 8):
            assert not trials.paused(8)
            trials = trials.after(8, -0.1)
    assert trials.paused(8)


def test_drafting_goes_on_where_it_pays_and_pauses_where_it_no_longer_does() -> None:
    trials = trial(*[0.5] * 100)
    assert not trials.paused(8)
    count = 0
    while not trials.paused(8):
        trials, count = trials.after(8, -0.5), count + 1
    assert 20 < count < 100, "the mean is over recent steps"


def test_a_trial_that_succeeds_is_followed_by_a_first_pause() -> None:
    trials = trial(*[-1.0] * (_pausing.FIRST_TRIAL // 8))
    for _ in range(_pausing.FIRST_PAUSE_STEPS):
        trials = trials.after(8, 0.0)
    for _ in range(_pausing.TRIAL // 8):
        trials = trials.after(8, 0.5)
    assert trials.by_size[8] == Trial(0.5, _pausing.TRIAL // 8)


def test_batches_of_other_sizes_have_trials_of_their_own_and_a_single_sequence_has_none() -> None:
    trials = trial(*[-1.0] * 100, rows=7)
    assert [trials.paused(rows) for rows in (1, 2, 4, 5, 8, 9)] == [False] * 3 + [True] * 2 + [
        False
    ]
    assert not trial(*[-1.0] * 1000, rows=1).paused(1)


def costs_with(overhead: float, rows: int) -> Costs:
    return Costs({1: 1e-3}, {1: 1.0, 2: 1.1}, rows=rows, overhead=overhead)


@pytest.mark.parametrize(("overhead", "paused"), [(0.0, False), (0.2, True)])
def test_yield_pauses_where_its_work_costs_more_than_drafts_gain(
    overhead: float, paused: bool
) -> None:
    policy = Yield()
    memory: Any = policy.start()
    roots = Tree.from_roots(np.arange(4), np.arange(4))
    verdict = AcceptResult((NO_PATH,) * 4, np.arange(4))
    work = Work((), 4, 4, 100, finds=1)
    for _ in range(_pausing.FIRST_TRIAL // 4):
        assert not policy.pauses(memory, 4)
        memory = policy.observe(memory, roots, verdict, work, costs_with(overhead, 4))
    assert policy.pauses(memory, 4) is paused
    if paused:
        never: Any = None  # calling it raises
        room: Any = None
        assert policy.draft(never, roots, costs_with(overhead, 4), room, memory) is roots
        after = policy.observe(memory, roots, verdict, replace(work, finds=0), costs_with(0.2, 4))
        assert after.trials.by_size[4].left == memory.trials.by_size[4].left - 1
        assert after.idle == memory.idle


TARGET = tiny_target(context=400)
PROMPTS = ([3, 7, 11, 3, 7], [5, 9], [2, 4, 6, 8])


def test_a_batch_in_which_nothing_is_found_is_written_without_the_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [Request(list(p), 300, number=i) for i, p in enumerate(PROMPTS)]
    expected = generate_plain(TARGET, requests).tokens
    drafter = Never([[*p, *t] for p, t in zip(PROMPTS, expected, strict=True)], 61)
    commits = list[int]()
    commit = Never.commit

    def counted(self: Never, state: Any, tree: Tree, *rest: Any) -> Any:
        commits.append(len(tree))
        return commit(self, state, tree, *rest)

    monkeypatch.setattr(Never, "commit", counted)
    costs = Costs({1: 1e-3}, {1: 1.0, 2: 1.2}, commit=0.5, rows=3)
    found = Engine(TARGET, drafter, Yield(), costs=costs).write(requests)
    assert found.tokens == expected
    assert sum(commits) >= 3 * 299, "the drafter has read every token"
    assert len(commits) < 299 / 2
    assert max(commits) <= 3 * MAX_UNREAD_STEPS
    paused = [work.paused for work in found.stats.work]
    assert sum(paused) > 299 / 2
    assert not any(paused[: _pausing.FIRST_TRIAL // 3])


def test_the_drafter_has_read_everything_when_a_sequence_begins_ends_or_is_released() -> None:
    drafter = SuffixDrafter(Suffix())
    rows = SequenceBatch(TARGET.new_cache(3, 8))
    parts = Components(TARGET, drafter, Pausing(Chain()), Greedy(), costs_with(0.0, 3))

    def read(state: State) -> None:
        assert not state.unread
        for row in rows.live.tolist():
            assert state.drafter.texts[row].tolist() == rows.committed[row].tolist()

    def until_unread(state: State) -> State:
        while not state.unread:
            _, state = step(parts, rows, state)
        return state

    _, state = admit(
        parts, rows, [Request(list(p), 90, number=i) for i, p in enumerate(PROMPTS[:2])]
    )
    state = until_unread(state)
    rows.mark_read_by_drafter()
    _, state = admit(parts, rows, [Request(list(PROMPTS[2]), 12)], state)
    read(state)
    assert rows.mark_read_by_drafter(), "the next draft step reads the pause, too"
    state = release(parts, rows, 1, until_unread(state))
    read(state)
    while rows.live.size > 1:
        live = rows.live.size
        _, state = step(parts, rows, state)
    assert live == 2
    read(state)


# Costs.


def test_curves_of_a_batch_have_a_point_at_every_step_of_the_kernels() -> None:
    points = curve_points(8)
    assert {1.0, 8.0, 9.0, 16.0, 17.0, 1024.0} <= set(points)
    assert list(points) == sorted(points)
    assert curve_points(1)[-1] == 128
    assert {1.0, 3.0, 8.0, 9.0, 256.0} <= set(curve_points(3))
    assert curve_points(64)[-1] == 64 * 128


def test_a_step_of_the_kernels_is_learnt_in_a_batch() -> None:
    true = lambda n: 0.005 if n <= 8 else 0.007
    flat = Size(seconds=0.005)
    speed = Speed(1e10, 1e12, 1e-6)
    names = ("draft", "commit", "find", "overhead")
    costs = OnlineCosts(
        Learner(None, {}, {"target": flat}, lambda: speed),
        Learner(None, {}, dict.fromkeys(names, Size(seconds=1e-5)), lambda: speed),
    )
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.choice([8, 9, 10, 12, 16]))
        costs.observe(StepTimes(100, 8, n, true(n), seconds=true(n)))
    learnt = costs.at(100, 8)
    for n in (8, 9, 16):
        assert learnt.target_seconds(n / 8) == pytest.approx(true(n), rel=0.1)


def test_the_work_beside_passes_is_learnt_as_overhead() -> None:
    speed = Speed(1e10, 1e12, 1e-6)
    names = ("draft", "commit", "find", "overhead")
    costs = OnlineCosts(
        Learner(None, {}, {"target": Size(seconds=0.005)}, lambda: speed),
        Learner(None, {}, dict.fromkeys(names, Size(seconds=3e-5)), lambda: speed),
    )
    draft = DraftStep(4, 0.001)
    times = StepTimes(100, 4, 6, 0.005, (draft, draft), 2, 0.0004, 0.0002, seconds=0.0084)
    assert times.overhead == pytest.approx(0.0008)
    assert StepTimes(100, 4, 6, 0.005).overhead == 0, "the seconds of the step are not known"
    for _ in range(60):
        costs.observe(times)
    learnt = costs.at(100, 4)
    assert learnt.overhead == pytest.approx(0.0008, rel=0.1)
    assert learnt.find == pytest.approx(0.0002, rel=0.1)
    assert learnt.commit == pytest.approx(0.0002, rel=0.1)
    assert learnt.drafting(Work((), 4, 4, 100, finds=1)) == pytest.approx(0.0012, rel=0.1)
    assert learnt.drafting(Work((), 4, 4, 100, paused=True)) == 0
