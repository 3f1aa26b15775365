"""The proposer for vLLM against a batch that shows it what vLLM does; with vLLM itself it is tested by `make test-engines`."""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import vllm_batch
from draftree.costs.step_costs import Costs
from draftree.costs.step_timings import StepTimes
from draftree.drafters.rest import REST, index_documents
from draftree.drafters.retrieval.chain_drafting import IndexedCorpus, draft_chains
from draftree.drafters.retrieval.datastore_drafter import tokenizer_hash
from draftree.drafters.suffix import Suffix
from draftree.errors import UnknownName, UserError
from draftree.formats.checkpoint import DRAFTREE_ENTRY
from draftree.integrations.vllm import Proposer, proposer
from draftree.integrations.vllm import costs as vllm_costs
from draftree.integrations.vllm import text_chains as own_chains
from draftree.integrations.vllm.chains import Chains
from draftree.integrations.vllm.options import open_corpus, open_drafter, open_policy
from draftree.integrations.vllm.requests import RequestStep, Slots
from draftree.integrations.vllm.text_chains import ALL_TIMED, TIMING_INTERVAL, TextChains
from vllm_batch import Batch, Request, vllm_config, written

VOCAB = 50
CHEAP = Costs({1: 1e-5}, {1: 1.0, 16: 1.1})
DEAR = Costs({1: 1e-5}, {1: 1.0, 16: 16.0})


class Recorded:
    """Fixed costs that record what they are told."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.seen = costs, list[StepTimes]()

    def at(self, context: int, rows: int) -> Costs:
        return replace(self.costs, context=context, rows=rows)

    def needs_plain_step(self) -> bool:
        return False

    def observe(self, step: StepTimes) -> None:
        self.seen.append(step)


def periodic(text: Sequence[int]) -> int:
    """Goes on with what followed the last two tokens the first time."""
    for i in range(len(text) - 2):
        if list(text[i : i + 2]) == list(text[-2:]):
            return text[i + 2]
    return (text[-1] * 7 + len(text)) % VOCAB


def aimless(text: Sequence[int]) -> int:
    """Repeats nothing for long."""
    return int(np.random.default_rng([len(text), *text[-3:]]).integers(VOCAB))


def deceptive(text: Sequence[int]) -> int:
    """Repeats every token, and seldom what followed it."""
    return len(text) * (len(text) // 5 + 1) % 5 if len(text) % 2 else (text[-1] + len(text)) % 5


def chains(drafter: str = "suffix", policy: str = "yield", costs: Costs = CHEAP) -> Chains:
    opened = open_drafter(drafter, VOCAB, lambda: None, "any")
    return Chains(opened, open_policy(policy, 8), Recorded(costs), 8, vllm_batch.CONTEXT, VOCAB)


def text_chains(
    costs: Costs = CHEAP, corpus: IndexedCorpus | None = None, vocab: int = VOCAB
) -> TextChains:
    corpus = corpus or IndexedCorpus.none()
    return TextChains(corpus, Recorded(costs), 8, vllm_batch.CONTEXT, vocab)


def proposing(found: Chains | TextChains) -> Any:
    """vLLM's call of a proposer that has these chains, with whatever it raises."""
    made: Any = SimpleNamespace(chains=found, _report=lambda: None)

    def fail(error: Exception) -> None:
        raise error

    made._fail = fail
    return lambda *args, **kwargs: Proposer.propose(made, *args, **kwargs)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, random.integers(2, 9)).tolist() * 2 for _ in range(count)]


def preempt_or_abort_sometimes(batch: Batch, random: np.random.Generator) -> None:
    """Preempt or abort a running request in one of ten calls."""
    if batch.running and random.random() < 0.1:
        some: Request = batch.running[int(random.integers(len(batch.running)))]
        (batch.preempt if random.random() < 0.7 else batch.abort)(some)


@pytest.fixture(autouse=True)
def vllm_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setattr(proposer, "step_costs", lambda *_: Recorded(CHEAP))


@pytest.mark.parametrize("drafter", ["suffix", "pld", "aded", "suffix+pld", "suffix+aded+pld"])
@pytest.mark.parametrize("policy", ["yield", "chain:length=3"])
def test_texts_stay_and_drafts_are_accepted(drafter: str, policy: str) -> None:
    found = chains(drafter, policy)
    batch = Batch(proposing(found), periodic, rows=3, chunk=5)
    asked = prompts(6)
    requests = [batch.add(prompt, 30) for prompt in asked]
    batch.run()
    assert [r.output for r in requests] == [written(periodic, prompt, 30) for prompt in asked]
    assert sum(r.accepted for r in requests) > 60
    assert max(len(chain) for proposed in batch.proposals for chain in proposed) <= (
        3 if policy != "yield" else 8
    )


@pytest.mark.parametrize("known", [True, False])
def test_texts_stay_with_the_proposers_own_chains(known: bool) -> None:
    """With a corpus of what the target writes, more drafts are accepted, and most at the start."""
    asked = prompts(6)
    texts = [np.array([*prompt, *written(periodic, prompt, 30)]) for prompt in asked]
    corpus = IndexedCorpus.of(index_documents(texts, VOCAB)) if known else None
    batch = Batch(proposing(text_chains(corpus=corpus)), periodic, rows=3, chunk=5)
    requests = [batch.add(prompt, 30) for prompt in asked]
    batch.run()
    assert [r.output for r in requests] == [written(periodic, prompt, 30) for prompt in asked]
    accepted = sum(r.accepted for r in requests)
    assert accepted > (125 if known else 60)
    assert max(len(chain) for proposed in batch.proposals for chain in proposed) <= 8


@pytest.mark.parametrize("cut", [1000, 2])
def test_the_proposers_own_chains_follow_their_requests(cut: int) -> None:
    """Whatever happens to rows: they move, are preempted, aborted, and their drafts are cut."""
    found = text_chains()
    batch = Batch(proposing(found), periodic, rows=4, chunk=6, cut=cut)
    requests = [batch.add(prompt, 40) for prompt in prompts(9)]
    requests.append(batch.add(requests[0].text, 40))  # the same text twice
    random = np.random.default_rng(1)
    for _ in range(300):
        batch.step()
        running = [tuple(r.text) for r in batch.running if not r.unread]
        texts = [tuple(each.text.tolist()) for each in found._requests]
        assert set(running) <= set(texts)
        assert [tuple(text.tolist()) for text in found.slots.texts if text is not None] == texts
        assert all(each.begun < len(each.text) for each in found._requests)
        preempt_or_abort_sometimes(batch, random)
    assert not batch.running
    assert found.figures.resumed == 0
    assert found.figures.accepted == sum(r.accepted for r in requests) > 100
    found.step([])
    assert not found._requests
    assert not found.slots.live


@pytest.mark.parametrize("cut", [1000, 2])
def test_the_drafter_has_read_just_the_text(cut: int) -> None:
    """Whatever happens to rows: they move, are preempted, aborted, and their drafts are cut."""
    found = chains()
    batch = Batch(proposing(found), periodic, rows=4, chunk=6, cut=cut)
    requests = [batch.add(prompt, 40) for prompt in prompts(9)]
    requests.append(batch.add(requests[0].text, 40))  # the same text twice
    random = np.random.default_rng(1)
    for _ in range(300):
        batch.step()
        read = {tuple(found.slots.texts[slot][:-1]) for slot in found.slots.live}  # type: ignore[index]
        assert {tuple(found._state.texts[slot]) for slot in found.slots.live} == read
        assert len(found.slots.live) == sum(not r.unread for r in batch.running) + _finished(
            batch, found
        )
        preempt_or_abort_sometimes(batch, random)
    assert not batch.running
    assert found.figures.resumed == 0


def _finished(batch: Batch, found: Chains) -> int:
    """Requests that the last call still saw, and that have ended since."""
    running = {tuple(r.text) for r in batch.running}
    return sum(tuple(found.slots.texts[slot]) not in running for slot in found.slots.live)  # type: ignore[arg-type]


def test_of_fifty_requests_a_fifth_aborted_nothing_is_left() -> None:
    found = chains("suffix+pld")
    batch = Batch(proposing(found), periodic, rows=50)
    requests = [batch.add(prompt, 25) for prompt in prompts(50)]
    for _ in range(3):
        batch.step()
    for request in requests[::5]:
        batch.abort(request)
    batch.run()
    batch.add([1, 2], 1)
    batch.run()
    assert len(found.slots.live) == 1  # the last request: no call has come after it
    assert len(found.slots.texts) == len(found._state.trust[0].recent) == 1
    assert found.figures.requests == 51


def test_rows_are_known_by_the_whole_text() -> None:
    """Not by length and last tokens alone: prompts of a template end alike."""
    end = list(range(30))
    slots = Slots()
    slots.texts = [np.array([7, *end]), None, np.array([8, *end])]
    rows = [RequestStep(np.array([start, *end, 5]), 1) for start in (8, 9, 7, 7)]
    assert slots.match(rows) == [2, None, 0, None]


@pytest.mark.parametrize("made", [chains, text_chains])
def test_nothing_is_proposed_where_nothing_pays(made: Any) -> None:
    """A token that costs as much as a step is worth a try now and then, no more."""
    batch = Batch(proposing(made(costs=DEAR)), aimless, rows=1)
    batch.add(prompts(1)[0], 200)
    batch.run()
    assert sum(len(p[0]) for p in batch.proposals) < 12


def test_acceptance_is_learnt() -> None:
    """Drafts that look as good as before are taken for what they were worth; without learning there are 234."""
    batch = Batch(
        proposing(chains("pld", costs=Costs({1: 1e-5}, {1: 1.0, 16: 4.0}))), deceptive, rows=1
    )
    batch.add([1, 2, 3], 120)
    batch.run()
    lengths = [len(p[0]) for p in batch.proposals]
    assert sum(lengths[:20]) > 5
    assert sum(lengths[-60:]) < 100


def test_the_acceptance_of_own_chains_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without learning, more tokens are drafted in vain, because matches continue otherwise."""

    def in_vain() -> int:
        found = text_chains(costs=Costs({1: 1e-5}, {1: 1.0, 16: 4.0}))
        batch = Batch(proposing(found), deceptive, rows=1)
        batch.add([1, 2, 3], 120)
        batch.run()
        return found.figures.drafted - found.figures.accepted

    learnt = in_vain()
    monkeypatch.setattr(
        own_chains, "learn_chains", lambda _, __, recent, *known: (*known[:2], recent)
    )
    assert learnt < in_vain() / 2


@pytest.mark.parametrize("made", [chains, text_chains])
def test_lengths_follow_the_costs(made: Any) -> None:
    lengths = []
    for costs in (CHEAP, Costs({1: 1e-5}, {1: 1.0, 4: 1.1, 5: 9.0, 16: 99.0})):
        batch = Batch(proposing(made(costs=costs)), periodic, rows=1)
        batch.add([1, 2, 3, 4, 5, 6, 7] * 3, 100)
        batch.run()
        lengths.append(max(len(p[0]) for p in batch.proposals))
    assert lengths == [8, 3]


@pytest.mark.parametrize("made", [chains, text_chains])
def test_steps_are_timed_where_the_same_requests_go_on(made: Any) -> None:
    found = made()
    batch = Batch(proposing(found), periodic, rows=2, chunk=4)
    batch.add([1, 2] * 2, 99)
    batch.step()
    batch.step()
    costs: Any = found.costs
    assert len(costs.seen) == 1
    assert costs.seen[0].sequences == 1
    assert costs.seen[0].tokens == 1 + len(batch.proposals[0][0])
    batch.add([3, 4] * 6, 50)
    batch.step()  # a prompt is read meanwhile
    batch.step()
    assert len(costs.seen) == 1
    batch.step()  # the new request begins
    assert len(costs.seen) == 1
    batch.step()
    assert len(costs.seen) == 2
    assert costs.seen[1].sequences == 2


def test_a_batch_in_which_searching_costs_too_much_is_paused() -> None:
    found = chains(costs=replace(CHEAP, overhead=1.0))
    batch = Batch(proposing(found), aimless, rows=4)
    for prompt in prompts(4):
        batch.add(prompt, 160)
    batch.run()
    costs: Any = found.costs
    whole = [times for times in costs.seen if times.sequences == 4]
    paused = [times.seconds == 0 for times in whole]
    assert sum(paused) > len(paused) / 3
    assert not any(paused[:60])
    assert not any(times.drafts or times.commit for times in whole if not times.seconds)
    lengths = [sum(map(len, p)) for p in batch.proposals]
    assert sum(length > 0 for length in lengths) < len(lengths) * 2 / 3
    for text, read in zip(found.slots.texts, found._state.texts, strict=True):
        assert text is None or read.tolist() == text[:-1].tolist()


def test_own_chains_time_few_steps_once_costs_are_known() -> None:
    found = text_chains()
    batch = Batch(proposing(found), aimless, rows=1)
    batch.add(prompts(1)[0], ALL_TIMED + 120)
    batch.run()
    costs: Any = found.costs
    later = found.figures.calls - ALL_TIMED
    assert later > 80
    assert len(costs.seen) == found.figures.timed
    assert ALL_TIMED - 2 <= found.figures.timed - later // TIMING_INTERVAL <= ALL_TIMED + 1


@pytest.mark.parametrize("made", [chains, text_chains])
def test_steps_without_a_part_of_a_chain_are_not_timed(made: Any) -> None:
    """Where vLLM drops drafted tokens, as a grammar may, the time is not that of the whole chain.

    Whether the third token was verified is not known, because the target's own takes its place.
    """
    longest = []
    for cut in (1000, 2):
        found = made()
        batch = Batch(proposing(found), periodic, rows=2, cut=cut)
        for prompt in prompts(2):
            batch.add(prompt, 100)
        batch.run()
        assert max(len(chain) for proposed in batch.proposals for chain in proposed) == 8
        costs: Any = found.costs
        longest.append(max((times.tokens for times in costs.seen), default=0))
    assert longest[0] > 2 * (1 + 3) >= longest[1]


def test_requests_go_on_after_steps_without_a_call() -> None:
    """vLLM does not call the proposer while a request is near the end of its context."""
    found = text_chains()
    one, other = ([*range(start, start + 4)] * 4 for start in (0, 10))
    found.step([RequestStep(np.array(text), 1) for text in (one, other)])
    one, other = [*one, 20], [*other, 21]
    found.step([RequestStep(np.array(text), 1) for text in (one, other)])
    first = found._requests
    recent, ids = [each.recent for each in first], [id(each) for each in first]
    later = [[*other, 30, 31, 32], [*one, 40, 41]]
    found.step([RequestStep(np.array(text), 1) for text in later])
    assert [id(each) for each in found._requests] == ids[::-1]
    assert [each.recent for each in found._requests] == recent[::-1], "nothing is learnt"
    assert [each.text.tolist() for each in found._requests] == later
    assert (found.figures.requests, found.figures.resumed, found.figures.steps) == (2, 0, 2)
    assert not len(found.outputs.tokens), "unfinished outputs are not remembered"
    found.step([RequestStep(np.array([*later[0], 5]), 1), RequestStep(np.array([7, *later[0]]), 1)])
    assert [id(each) in ids for each in found._requests] == [True, False]


def test_nothing_is_searched_where_even_accepted_tokens_would_not_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = list[int]()

    def recorded(*args: Any) -> Any:
        searched.append(len(args[0]))
        return draft_chains(*args)

    monkeypatch.setattr(own_chains, "draft_chains", recorded)
    counts = []
    for costs in (DEAR, Costs({1: 1e-5}, {1: 1.0, 2: 3.0, 16: 3.0})):
        batch = Batch(proposing(text_chains(costs=costs)), periodic, rows=1)
        batch.add(prompts(1)[0], 20)
        batch.run()
        counts.append(len(searched))
    assert counts[0] == 0
    assert counts[1] > 0, "one token would not pay, three would"


def test_own_chains_end_before_tokens_that_are_not_in_the_vocabulary() -> None:
    text = [1, 2, 45, 3] * 4
    for vocab, chain in ((50, [1, 2, 45, 3, 1, 2, 45, 3]), (40, [1, 2])):
        found = text_chains(vocab=vocab)
        assert found.step([RequestStep(np.array(text), 1)]) == [chain]
        assert found.figures.drafted == len(chain)


@pytest.mark.parametrize("made", [chains, text_chains])
def test_other_outputs_are_remembered(made: Any) -> None:
    """A request is drafted by what an earlier one has written."""
    prompt = [11, 12]
    found = made()
    batch = Batch(proposing(found), aimless, rows=1)
    requests = [batch.add(prompt, 30), batch.add(prompt, 30)]
    batch.run()
    assert requests[0].accepted < 3
    assert requests[1].accepted > 20


def test_a_text_that_went_another_way_begins_anew() -> None:
    found = chains()
    text = [1, 2, 3, 4] * 4
    found.step([RequestStep(np.array(text), 1)])
    found.step([RequestStep(np.array([*text, 40, 41, 42]), 3)])  # nobody proposed 40, 41
    assert found.figures.resumed == 1
    assert found.slots.live == [0]
    assert found._state.texts[0].tolist() == [*text, 40, 41]


def test_own_chains_begin_anew_after_a_text_that_went_another_way() -> None:
    found = text_chains()
    text = [1, 2, 3, 4] * 4
    found.step([RequestStep(np.array(text), 1)])
    found.step([RequestStep(np.array([*text, 40, 41, 42]), 3)])  # nobody proposed 40, 41
    assert found.figures.resumed == 1
    assert found.figures.requests == 2
    assert found._requests[0].text.tolist() == [*text, 40, 41, 42]
    assert found._requests[0].begun == len(text) + 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"drafter": "sufix"}, "did you mean 'suffix'"),
        ({"drafter": "suffix", "policy": "yeild"}, "did you mean 'yield'"),
        ({"policy": "yield"}, "needs option 'drafter'"),
        ({"drafter": "suffix", "datastore": "any"}, "exclude each other"),
        ({"datastore": "nowhere"}, "datastore 'nowhere' does not exist"),
        ({"datastore": ""}, "config.json"),
        ({"datastore": 3}, "allowed is"),
        ({"draftr": "suffix"}, "did you mean 'drafter'"),
        ({"drafter": "eagle3"}, "allowed are those that read text alone"),
        ({"drafter": "suffix+lookahead"}, "allowed are those that read text alone"),
        ({"drafter": "suffix+token_recycling"}, "allowed are those that read text alone"),
        ({"drafter": "rest"}, "'rest' needs a datastore"),
        ({"drafter": 3}, "allowed is none or a text"),
        ({"report": "/"}, "'/' is a folder, allowed is a file"),
    ],
)
def test_mistakes_in_options_are_told_at_the_start(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        Proposer(vllm_config(**options))
    assert told in str(error.value)
    with pytest.raises(UnknownName):
        Proposer(vllm_config(other=1))


def test_another_version_is_refused_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.40.1"))
    batch = Batch(Proposer(vllm_config()).propose, periodic)
    request = batch.add([1, 2, 3] * 3, 20)
    batch.run()
    assert request.accepted == 0
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "draftree proposes nothing: vLLM is 0.40.1, tested is 0.32.x (any_version: true tries it)"
    ]
    assert Proposer(vllm_config(any_version=True)).chains is not None


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        (
            {"pipeline_parallel_size": 2, "world_size": 2},
            "pipeline_parallel_size is 2, allowed is 1",
        ),
        (
            {"distributed_executor_backend": "external_launcher", "world_size": 4},
            "external_launcher has 4 processes, allowed is 1",
        ),
        ({"distributed_executor_backend": "external_launcher"}, None),
        ({"distributed_executor_backend": "mp", "world_size": 4}, None),
    ],
)
def test_ways_of_running_that_would_change_texts_are_refused_with_one_line(
    parallel: dict[str, Any], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = vllm_config(any_version=True)
    vars(config.parallel_config).update(parallel)
    made = Proposer(config)
    assert (made.chains is None) == (told is not None)
    logged = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert logged == ([] if told is None else [f"draftree proposes nothing: {told}"])


def test_nothing_is_raised_into_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure costs the drafts of one call, three end drafting."""
    made = Proposer(vllm_config())
    assert made.propose([[1], [2]], None, None) == [[], []]
    assert made.chains is not None
    batch = Batch(made.propose, periodic)
    batch.add([1, 2, 3] * 3, 20)
    batch.run()
    assert any(chain for proposed in batch.proposals for chain in proposed)
    monkeypatch.setattr(TextChains, "step", lambda *_, **__: 1 / 0)
    request = batch.add([1, 2, 3] * 3, 20)
    batch.run()
    assert request.output == written(periodic, [1, 2, 3] * 3, 20)
    assert made.chains is None
    assert caplog.records[-1].getMessage() == "draftree has stopped proposing: it failed 3 times"
    assert len(caplog.records) <= 5


def test_the_report_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposer, "REPORT_SECONDS", 0.0)
    made = Proposer(vllm_config(report=str(tmp_path / "figures.json")))
    batch = Batch(made.propose, periodic)
    request = batch.add([1, 2, 3] * 3, 20)
    batch.run()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["accepted"] == request.accepted
    assert figures["requests"] == figures["live"] == 1


def test_a_report_that_cannot_be_written_costs_no_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(proposer, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(proposer, "write_text", full)
    made = Proposer(vllm_config(report=str(tmp_path / "figures.json")))
    batch = Batch(made.propose, periodic)
    request = batch.add([1, 2, 3] * 3, 20)
    batch.run()
    assert request.accepted > 5
    assert (made.chains is None, made._failures) == (False, 0)
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert told == ["draftree cannot write its report: [Errno 28] No space left on device"]


def test_a_datastore_for_another_tokenizer_is_refused(tmp_path: Path) -> None:
    corpus = np.array([1, 5, 9, 13, 17, 21, 25, 29, 33], np.int64)
    REST.build([corpus], VOCAB, tmp_path, {}, lambda _: None)
    note = {"drafter": "rest", "tokenizer": "abc", "vocab": VOCAB}
    (tmp_path / "config.json").write_text(json.dumps({DRAFTREE_ENTRY: note}))
    tokenizer: Any = SimpleNamespace(is_fast=False, get_vocab=dict, get_added_vocab=dict)
    with pytest.raises(UserError, match="another"):
        open_drafter(f"rest:datastore={tmp_path}", VOCAB, lambda: tokenizer, "any")
    with pytest.raises(UserError, match="another"):
        open_corpus(str(tmp_path), VOCAB, lambda: tokenizer, "any")
    note["tokenizer"] = tokenizer_hash(tokenizer)
    (tmp_path / "config.json").write_text(json.dumps({DRAFTREE_ENTRY: note}))
    with pytest.raises(UserError, match="vocabulary"):
        open_corpus(str(tmp_path), VOCAB - 1, lambda: tokenizer, "any")
    found = open_corpus(str(tmp_path), VOCAB, lambda: tokenizer, "any")
    chains = text_chains(corpus=found).step([RequestStep(np.array([2, 5, 9]), 1)])
    assert chains == [[13, 17, 21, 25, 29, 33]]


def test_the_size_of_a_model_is_read_from_its_config() -> None:
    size = vllm_costs.target_size(vllm_config(vocab=50).model_config.hf_text_config, 2)
    layer = 16 * 16 * 4 + 3 * 16 * 32
    assert size.weights == 2 * layer + 50 * 16
    assert size.bytes == 2 * size.weights
    assert (
        vllm_costs.target_size(
            SimpleNamespace(n_embd=8, n_layer=1, n_head=1, vocab_size=4), 2, 2
        ).weights
        == 528
    )


def test_entries_with_a_value_for_each_layer_count_by_their_mean() -> None:
    """Gemma 3n's `intermediate_size` is a list."""
    text = vllm_config().model_config.hf_text_config
    sizes = []
    for inner in (32, [24, 40]):
        text.intermediate_size = inner
        sizes.append(vllm_costs.target_size(text, 2))
    assert sizes[0] == sizes[1]


def test_the_drafters_own_knobs_count() -> None:
    drafter: Any = open_drafter("suffix:longest=5", VOCAB, lambda: None, "any")
    assert drafter.knobs == Suffix(longest=5)
