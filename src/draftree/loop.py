"""The loop: draft → grow → verify → accept → commit, and the plain baseline it is compared with.

Sequences come and go between two steps: `admit` starts requests, `step` continues the running ones,
and `release` frees a slot.

Shapes: R slots, B slots that begin, N nodes.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from draftree.acceptors.base import Acceptor
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs, CostSource
from draftree.costs.step_timings import StepTimes
from draftree.drafters.base import Drafter
from draftree.drafting.postponed import MAX_UNREAD_STEPS, PlainStep, join_steps
from draftree.drafting.states import release_slot, select_drafter_state, start_drafter
from draftree.drafting.step import Drafting
from draftree.models.forward_batch import Chunk
from draftree.policies.base import Policy
from draftree.request import Emitted, Request
from draftree.sampling.distributions import Distributions
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, HiddenStateSpec, Read, Target, VerificationResult
from draftree.tree import AcceptResult, Ints, Tree
from draftree.utils.profiler import phase


@dataclass(frozen=True)
class Components:
    """A target with the drafter, policy and acceptor that speed it up.

    Attributes:
        target: the model whose output is generated.
        drafter: proposes tokens.
        policy: builds draft trees from the proposed tokens.
        acceptor: decides which drafted tokens are accepted.
        costs: seconds of a draft step and of a target pass on this machine; they are updated with
            the measured times of each step.
    """

    target: Target
    drafter: Drafter[Any]
    policy: Policy
    acceptor: Acceptor
    costs: CostSource


@dataclass(frozen=True)
class State:
    """The state of the drafter after a step, and the state that the policy has learnt.

    `step` takes a state and returns the next one.

    Attributes:
        drafter: the drafter's state.
        policy: the policy's memory.
        unread: the last steps without drafts, which the drafter has not read.
    """

    drafter: Any = None
    policy: Any = None
    unread: tuple[PlainStep, ...] = ()


def decode(
    parts: Components, rows: SequenceBatch, requests: Sequence[Request], state: State = State()
) -> Iterator[tuple[list[Emitted], State]]:
    """Generate the target's own output, several tokens per pass.

    Yield the new tokens of each step and the state after it.
    """
    events, state = admit(parts, rows, requests, state)
    yield events, state
    while rows.live.size:
        events, state = step(parts, rows, state)
        yield events, state


def admit(
    parts: Components, rows: SequenceBatch, requests: Sequence[Request], state: State = State()
) -> tuple[list[Emitted], State]:
    """Read the prompts of requests into free slots and choose the first token of each.

    Sequences in other slots are not affected.

    Args:
        parts: the target with its drafter, policy and acceptor.
        rows: the batch, which has a free slot for each request.
        requests: the requests. Each text is the same as it would be alone.
        state: the state after the last step, or that of an earlier batch, or an empty one.

    Returns:
        The first token of each request, and the next state.
    """
    begun, events, hidden_states = prefill(
        parts.target, parts.acceptor, parts.drafter.needs, rows, requests
    )
    return events, start(parts, rows, begun, hidden_states, state)


def start(
    parts: Components, rows: SequenceBatch, begun: Ints, hidden_states: HiddenStates, state: State
) -> State:
    """Let the drafter read the prompts of sequences that begin, and return the next state.

    `hidden_states` are the target's hidden states of all prompt tokens that the drafter has not
    read.
    """
    state = catch_up(parts, rows, state)
    drafter = start_drafter(parts.drafter, rows, hidden_states, state.drafter, begun)
    return State(drafter, parts.policy.start() if state.policy is None else state.policy)


def step(parts: Components, rows: SequenceBatch, state: State) -> tuple[list[Emitted], State]:
    """Draft, verify and commit a tree for every running sequence; at least one must run."""
    events, state, _ = step_and_read(parts, rows, state, ())
    return events, state


def step_and_read(
    parts: Components, rows: SequenceBatch, state: State, chunks: Sequence[Chunk]
) -> tuple[list[Emitted], State, Read | None]:
    """Run `step`, and read parts of other sequences' prompts in the same target pass.

    Args:
        parts: the target with its drafter, policy and acceptor.
        rows: the batch; at least one sequence must run.
        state: the state after the last step.
        chunks: parts of the prompts in seated slots, which are slots whose prompt is being read.

    Returns:
        The new tokens, the next state, and the results for the chunks; None if there are none.
    """
    if not parts.drafter.sends_probes and (
        parts.policy.pauses(state.policy, rows.live.size)
        or (not chunks and parts.costs.needs_plain_step())
    ):
        return _step_without_drafts(parts, rows, state, chunks)
    state = catch_up(parts, rows, state)
    target = parts.target
    drafter = parts.drafter
    policy = parts.policy
    acceptor = parts.acceptor
    beside, start = sum(len(chunk.tokens) for chunk in chunks), time.perf_counter()
    prices = prices_of_step(parts.costs, rows, beside)
    target.read_anew(rows.cache, rows.committed, rows.live)
    drawing = rows.drawing(acceptor.draw)
    draft = Drafting(
        drafter, state.drafter, rows, target.decoder.vocab, drawing, target.decoder.capture
    )
    roots = Tree.from_roots(rows.live, rows.last[rows.live])
    with phase("grow"):
        grown = draft.grow(policy, roots, prices, rows.room(target), state.policy)
    drafted = time.perf_counter()
    probes = draft.probes()
    tree, verified = draft.verify(target, grown, probes, chunks)
    drafted = drafted if draft.drafted is None else draft.drafted
    p = rows.distributions(tree, verified, acceptor.keeps_text)
    with phase("accept"):
        verdict = acceptor.accept(tree, p, rows.chance)
    target.commit(rows.cache, tree, verdict)
    checked = time.perf_counter()
    draft.commit(tree, verdict, verified.hidden_states)
    committed = time.perf_counter()
    work = rows.work(draft.frontiers, tree, probes, draft.finds)
    with phase("grow"):
        memory = policy.observe(state.policy, tree, verdict, work, prices)
    ended = time.perf_counter()
    rows.clock(draft=ended - checked + drafted - start, verify=checked - drafted)
    parts.costs.observe(
        draft.times(work, verdict, checked - drafted, committed - checked, ended - start, beside)
    )
    for chunk in chunks:
        rows.follow(chunk.sequence)
    return rows.emit(target, tree, p, verdict, probes), State(draft.state, memory), verified.read


def prices_of_step(costs: CostSource, rows: SequenceBatch, beside: int) -> Costs:
    """Return the costs of a step whose pass also reads `beside` prompt tokens."""
    running = rows.live.size
    if not beside:
        return costs.at(rows.context, running)
    later = running + len(rows.seated)
    plain = costs.expected(rows.context, later).token * running / later
    return costs.expected(rows.context, running).beside(beside / running, plain)


def _step_without_drafts(
    parts: Components, rows: SequenceBatch, state: State, chunks: Sequence[Chunk]
) -> tuple[list[Emitted], State, Read | None]:
    """Run one step of `step_and_read` without drafts.

    Such a step runs while the policy pauses drafting, or to time a plain pass. The drafter reads
    its tokens later: before the next step with drafts, or when a sequence begins or ends.
    """
    needs, running = parts.drafter.needs, rows.live.size
    capture = parts.target.decoder.capture
    recordings = capture.recordings
    parts.target.read_anew(rows.cache, rows.committed, rows.live)
    start = time.perf_counter()
    roots, verified, p, verdict = _verify_roots(parts.target, parts.acceptor, rows, needs, chunks)
    seconds = time.perf_counter() - start
    prices, work = parts.costs.at(rows.context, running), rows.work((), roots, paused=True)
    memory = parts.policy.observe(state.policy, roots, verdict, work, prices)
    beside = sum(len(chunk.tokens) for chunk in chunks)
    recorded = capture.recordings > recordings
    parts.costs.observe(
        StepTimes(
            work.context,
            running,
            work.fed,
            seconds,
            seconds=seconds,
            gained=running,
            recorded=recorded,
            beside=beside,
        )
    )
    rows.clock(verify=seconds)
    for chunk in chunks:
        rows.follow(chunk.sequence)
    events = rows.emit(parts.target, roots, p, verdict)
    unread = (*state.unread, PlainStep(roots, verdict, verified.hidden_states))
    state = State(state.drafter, memory, unread)
    if rows.live.size < running or len(unread) == MAX_UNREAD_STEPS:
        state = catch_up(parts, rows, state)
    return events, state, verified.read


def catch_up(parts: Components, rows: SequenceBatch, state: State) -> State:
    """Let the drafter read the last steps without drafts, and return the next state."""
    if not state.unread:
        return state
    start, vocab = time.perf_counter(), parts.target.decoder.vocab
    draft = Drafting(parts.drafter, state.drafter, rows, vocab, Drawing())
    draft.commit(*join_steps(state.unread))
    rows.mark_unread_by_drafter()
    rows.clock(draft=time.perf_counter() - start)
    return State(draft.state, state.policy)


def read_chunks(parts: Components, rows: SequenceBatch, chunks: Sequence[Chunk]) -> Read:
    """Read chunks of prompts in a step that generates no sequence.

    Args:
        parts: the target with its drafter, policy and acceptor.
        rows: the batch.
        chunks: parts of the prompts in seated slots, which are slots whose prompt is being read.
    """
    found = parts.target.read(rows.cache, parts.drafter.needs, chunks)
    for chunk in chunks:
        rows.follow(chunk.sequence)
    return found


def begin(
    parts: Components,
    rows: SequenceBatch,
    begun: Ints,
    logits: Tensor,
    hidden_states: HiddenStates,
    state: State,
) -> tuple[list[Emitted], State]:
    """Choose the first token after prompts that the target has read, and let the drafter read them.

    Args:
        parts: the target with its drafter, policy and acceptor.
        rows: the batch; the prompts are in seated slots.
        begun: [B] these slots, in ascending order.
        logits: [B, V] the target's logits after each prompt.
        hidden_states: the target's hidden states of all prompt tokens, slot by slot.
        state: the state after the last step.
    """
    rows.begin(begun, own_noise=not parts.acceptor.keeps_text)
    events = _first_tokens(
        parts.target, parts.acceptor, rows, begun, VerificationResult(logits, hidden_states)
    )
    return events, start(parts, rows, begun, hidden_states, state)


def release(parts: Components, rows: SequenceBatch, row: int, state: State) -> State:
    """Free a slot, even if its text has not ended; `admit` may give it to another request."""
    state = catch_up(parts, rows, state)
    rows.leave(row)
    return State(release_slot(parts.drafter, rows, state.drafter, row), state.policy)


def select(
    parts: Components, rows: SequenceBatch, chosen: Ints, state: State
) -> tuple[SequenceBatch, State] | None:
    """Return a batch of another size with the same sequences.

    Args:
        parts: the target with its drafter, policy and acceptor.
        rows: the present batch.
        chosen: [R'] the old slot of each new slot, −1 for a slot that is to be free.
        state: the state after the last step.

    Returns:
        The new batch and its state, or None if the drafter cannot change the batch.
    """
    state = catch_up(parts, rows, state)
    new = rows.select(chosen)
    drafter = select_drafter_state(parts.drafter, rows, state.drafter, chosen, new.cache)
    return None if drafter is None else (new, State(drafter, state.policy))


def decode_plain(
    target: Target, acceptor: Acceptor, rows: SequenceBatch, requests: Sequence[Request]
) -> Iterator[list[Emitted]]:
    """Yield the tokens of plain decoding, one per pass, as the baseline.

    It uses the same target, cache and choice of tokens as speculative decoding.
    """
    _, events, _ = prefill(target, acceptor, HiddenStateSpec(), rows, requests)
    yield events
    while rows.live.size:
        yield plain_step(target, acceptor, rows)


def plain_step(target: Target, acceptor: Acceptor, rows: SequenceBatch) -> list[Emitted]:
    """Generate one token without drafts for every running sequence; at least one must run."""
    start = time.perf_counter()
    target.read_anew(rows.cache, rows.committed, rows.live)
    roots, _, p, verdict = _verify_roots(target, acceptor, rows, HiddenStateSpec(), ())
    rows.clock(verify=time.perf_counter() - start)
    rows.work((), roots)
    return rows.emit(target, roots, p, verdict)


def _verify_roots(
    target: Target,
    acceptor: Acceptor,
    rows: SequenceBatch,
    needs: HiddenStateSpec,
    chunks: Sequence[Chunk],
) -> tuple[Tree, VerificationResult, Distributions, AcceptResult]:
    """Run a target pass over the root of every running sequence, and choose the next tokens.

    Args:
        target: the target.
        acceptor: chooses the tokens.
        rows: the batch of sequences.
        needs: the hidden states to return.
        chunks: parts of other sequences' prompts that the same pass reads.
    """
    roots = Tree.from_roots(rows.live, rows.last[rows.live])
    verified = target.verify(rows.cache, roots, needs, None, chunks)
    p = rows.distributions(roots, verified, acceptor.keeps_text)
    with phase("accept"):
        verdict = acceptor.accept(roots, p, rows.chance)
    target.commit(rows.cache, roots, verdict)
    return roots, verified, p, verdict


def prefill(
    target: Target,
    acceptor: Acceptor,
    needs: HiddenStateSpec,
    rows: SequenceBatch,
    requests: Sequence[Request],
) -> tuple[Ints, list[Emitted], HiddenStates]:
    """Read prompts and choose the token after each; return slots, tokens and hidden states.

    The last token of each prompt is treated as a draft tree that consists of its root.
    """
    begun = rows.admit(requests, own_noise=not acceptor.keeps_text)
    verified = target.prefill(
        rows.cache, [np.array(r.prompt, np.int64) for r in requests], needs, begun
    )
    return begun, _first_tokens(target, acceptor, rows, begun, verified), verified.hidden_states


def _first_tokens(
    target: Target,
    acceptor: Acceptor,
    rows: SequenceBatch,
    begun: Ints,
    verified: VerificationResult,
) -> list[Emitted]:
    """Choose the token after each prompt, and emit it.

    Args:
        target: the target.
        acceptor: chooses the tokens.
        rows: the batch of sequences.
        begun: [B] the slots of the sequences whose prompts have been read.
        verified: contains the logits [B, V] after the prompts.
    """
    roots = Tree.from_roots(begun, rows.last[begun].copy())
    p = rows.distributions(roots, verified, acceptor.keeps_text)
    return rows.emit(target, roots, p, acceptor.accept(roots, p, rows.chance), step=False)
