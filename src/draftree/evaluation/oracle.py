"""Upper bound on the speed of any policy with a drafter: an oracle that knows the text.

The oracle knows before each step how long a prefix of what the target will write stands token for
token among the drafter's eight likeliest, and drafts as much of it as pays: a chain of depth d
costs d · sₐ(1) + sₜ(1 + d), or d/k draft steps where one tells k layers, and writes d + 1 tokens.
It divides the text so that the sum of all steps is least. A policy that drafts at most eight
children of a node, by draft steps, and no deeper than `MAX_REACH`, does no better over this drafter;
the commit is not counted.

Shapes: R texts, T tokens of one text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.drafters.base import Drafter
from draftree.errors import UserError
from draftree.evaluation import step_codec
from draftree.evaluation.bootstrap import rate, ratio_bounds, samples
from draftree.evaluation.target_trace import TokenText
from draftree.evaluation.teacher_forcing import Source
from draftree.sampling.draft_sampling import Drawing
from draftree.tree import AcceptResult, Candidates, Floats, Ints, Tree
from draftree.utils.files import Entries

ORACLE_CANDIDATES = 8
"""Number of the drafter's likeliest candidates among which the oracle may find the right token."""
NO_DEPTHS: Ints = np.zeros(0, np.int64)
MAX_REACH = 24
"""Largest reach that is searched for, in tokens."""


@torch.inference_mode()
def correct_tokens(
    source: Source, drafter: Drafter[Any], texts: Sequence[TokenText], carried: Any = None
) -> tuple[list[Ints], Any]:
    """Return the number of tokens in a row that a drafter proposes correctly after each root.

    A token is correct if it is among the `ORACLE_CANDIDATES` candidates. The first value is a list
    with an array [T − start − 1] for each text. The second value is the memory that the drafter
    carries to the next texts.

    Args:
        source: a target, or a recording of these texts.
        drafter: drafter that proposes candidates as long as the text's next token is among them.
        texts: the texts, all in one batch; the first root of each is its first new token.
        carried: memory of earlier texts, as this function returned it; None at first.
    """
    cache = source.new_cache(len(texts), max(len(t.tokens) for t in texts) + MAX_REACH)
    prompts = [t.tokens[: t.start] for t in texts]
    hidden_states = source.prefill(cache, prompts, drafter.needs).hidden_states
    state = drafter.start(
        prompts, np.array([t.tokens[t.start] for t in texts]), hidden_states, carried
    )
    found: list[list[int]] = [[] for _ in texts]
    for at in range(max(len(t.tokens) - t.start - 1 for t in texts)):
        live = np.array(
            [r for r, t in enumerate(texts) if t.start + at < len(t.tokens) - 1], np.int64
        )
        behind = [texts[r].tokens[texts[r].start + at :] for r in live.tolist()]
        tree, state = _follow_correct_drafts(drafter, state, live, behind)
        for row in live.tolist():
            found[row].append(int(tree.depth[tree.of_row(row)].max()))
        verified = source.verify(cache, tree, drafter.needs, drafter.probes(state))
        verdict = AcceptResult(
            (np.zeros(0, np.int64),) * len(live), np.array([tokens[1] for tokens in behind])
        )
        source.commit(cache, tree, verdict)
        roots = np.arange(len(live))
        state = drafter.commit(state, tree, verdict, verified.hidden_states.take(roots))
    return [np.array(row, np.int64) for row in found], drafter.carry(state)


def _follow_correct_drafts(
    drafter: Drafter[Any], state: Any, live: Ints, behind: Sequence[Ints]
) -> tuple[Tree, Any]:
    """Return a tree with the tokens that the drafter proposes correctly, as one chain per sequence.

    `behind` holds the tokens of each live sequence from its root on. The second value is the
    drafter's new state.
    """
    tree = Tree.from_roots(live, np.array([tokens[0] for tokens in behind]))
    frontier = np.arange(len(live))
    for depth in range(1, MAX_REACH + 1):
        candidates, state = drafter.expand(state, tree, frontier, ORACLE_CANDIDATES, Drawing())
        rows = np.searchsorted(live, tree.row[frontier])
        nexts = np.array(
            [behind[i][depth] if depth < len(behind[i]) else -1 for i in rows.tolist()], np.int64
        )
        right = ((candidates.tokens == nexts[:, None]) & np.isfinite(candidates.log_q)).any(axis=1)
        if not right.any():
            break
        tokens, nothing = nexts[right], np.zeros(int(right.sum()))
        known = Candidates(tokens[:, None], nothing[:, None], draw=candidates.draw)
        tree = tree.append(frontier[right], tokens, nothing, nothing, known)
        frontier = np.arange(len(tree) - len(tokens), len(tree))
    return tree, state


@dataclass(frozen=True)
class Division:
    """Store the oracle's steps in one text: depths, their seconds, and plain decoding's."""

    depths: tuple[int, ...]
    seconds: float
    plain: float


def fastest_division(reach: Ints, start: int, costs: Costs | CostTable, ahead: int = 1) -> Division:
    """Return the division of a text into steps that takes the fewest seconds.

    Args:
        reach: [M] number of tokens that the drafter proposes correctly after each root; see
            `correct_tokens`.
        start: position of the first root in the text, which is also the number of tokens before it.
        costs: costs of draft steps and target passes.
        ahead: number of depths for which one draft step proposes tokens.
    """
    count = len(reach)
    least = np.zeros(count + 1)
    choice = np.zeros(count, np.int64)
    plain = 0.0
    for i in range(count - 1, -1, -1):
        here = costs.at(start + i, 1)
        depths = np.arange(min(int(reach[i]), count - 1 - i) + 1)
        total: Floats = (
            -(-depths // ahead) * here.draft_seconds(1)
            + here.targets((1 + depths).astype(np.float64))
            + least[i + 1 + depths]
        )
        choice[i] = int(total.argmin())
        least[i] = total[choice[i]]
        plain += here.token
    return Division(tuple(_steps(choice)), float(least[0]), plain)


def _steps(choice: Ints) -> Iterator[int]:
    at = 0
    while at < len(choice):
        yield int(choice[at])
        at += int(choice[at]) + 1


def encode_reach(
    drafter: str, temperature: float, starts: Sequence[int], reach: Sequence[Ints], ahead: int = 1
) -> dict[str, Any]:
    """Return a drafter's reach in the form in which a result stores it.

    Other costs can be applied to it later; see `row`.

    Args:
        drafter: spec of the drafter.
        temperature: temperature of the texts.
        starts: [P] position of each text's first root.
        reach: [P] for each text, the number of tokens that the drafter proposes correctly after
            every root; see `correct_tokens`.
        ahead: number of depths for which one draft step proposes tokens.
    """
    coded = {
        "lengths": list(map(len, reach)),
        "reach": step_codec.encode_runs(np.concatenate([*reach, NO_DEPTHS]).tolist()),
    }
    return {
        "drafter": drafter,
        "temperature": temperature,
        "ahead": ahead,
        "starts": list(starts),
    } | coded


def row(
    saved: Mapping[str, Any], costs: Costs | CostTable, seed: int, overlap: float | None = None
) -> dict[str, Any]:
    """Compute the oracle's metrics for the given costs, and return them together with `saved`.

    The metrics are the acceptance length, the mean depth of a step, the speed-up over plain
    decoding with its bootstrap interval, and Leviathan's speed-up.

    Args:
        saved: the oracle's log as `encode_reach` returns it: for each root, the number of tokens
            that the drafter proposes correctly.
        costs: costs of draft steps and target passes.
        seed: seed of the bootstrap.
        overlap: the drafter's overlap Σ min(p, q), for Leviathan's formula; None if it is unknown.

    Raises:
        UserError: an entry of `saved` is missing or invalid, or the lengths of entries do not match
            each other.
    """
    entries = Entries(saved, "the oracle's log")
    lengths = entries.get("lengths", list[int], least=0)
    all_of_them = step_codec.decode_runs(
        entries.get("reach", list[int]), sum(lengths), "the oracle's log"
    )
    starts = entries.get("starts", list[int], least=0)
    if sum(lengths) != len(all_of_them) or len(starts) != len(lengths):
        raise UserError("the oracle's log is inconsistent: its lengths do not match its reach")
    parts = np.split(np.array(all_of_them, np.int64), np.cumsum(lengths)[:-1])
    ahead = entries.get("ahead", int, 1, least=1)
    found = [
        fastest_division(reach, start, costs, ahead)
        for reach, start in zip(parts, starts, strict=True)
    ]
    depths, everyone = [d for division in found for d in division.depths], np.arange(len(found))
    seconds, plain = (np.array([getattr(d, name) for d in found]) for name in ("seconds", "plain"))
    return {
        **saved,
        "acceptance_length": float(np.mean(depths)) + 1 if depths else 1.0,
        "depth_per_step": float(np.mean(depths)) if depths else 0.0,
        "counted_speedup": float(rate(plain, seconds, everyone)) if depths else 1.0,
        "interval": ratio_bounds([plain], [seconds], samples(len(found), seed)),
        "leviathan": None if overlap is None else leviathan(overlap, costs.ratio),
    }


def leviathan(overlap: float, cost_ratio: float, most: int = 64) -> float:
    """Return the largest speed-up of chains of a fixed length γ by Leviathan's formula.

    The formula is (1 − aᵞ⁺¹) / ((1 − a)(γ c + 1)), from theorem 3.8 of their paper of 2023.

    Args:
        overlap: a, the probability that a drafted token is accepted.
        cost_ratio: c = sₐ/sₜ, the seconds of a draft step over those of a target pass, for one
            token each. A target pass is assumed to cost the same for every number of tokens.
        most: largest γ that is tried.
    """
    gamma = np.arange(most + 1)
    tokens = gamma + 1.0 if overlap >= 1 else (1 - overlap ** (gamma + 1.0)) / (1 - overlap)
    return float((tokens / (gamma * cost_ratio + 1)).max())


def free_passes(acceptance_length: float, drafts: float, cost_ratio: float) -> float:
    """Return τ / (1 + drafts · sₐ/sₜ), the speed-up if a tree costs no more than a token.

    A target pass over a whole tree is assumed to cost the same as a pass over a single token. τ is
    `acceptance_length`, `drafts` the number of draft steps before a pass, and sₐ/sₜ is
    `cost_ratio`.
    """
    return acceptance_length / (1 + drafts * cost_ratio)
