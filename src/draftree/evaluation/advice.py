"""Recommend a drafter and policy for a target, machine and text, or plain decoding.

Half of the prompts, by their hash, choose among the pairings: the target writes them once, and all
pairings are counted along these texts by the costs of this machine. The other half judges the one
that was chosen, beside plain decoding and by the clock.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from draftree.engine import Engine
from draftree.errors import UserError
from draftree.evaluation import bootstrap, result_rows
from draftree.evaluation.bench import Bench
from draftree.evaluation.bootstrap import ResultRow
from draftree.evaluation.grid import Cell, PromptResult
from draftree.evaluation.trace_store import Recordings
from draftree.request import Request
from draftree.utils.progress_callback import Tell, ignore_progress

Pair = tuple[str, str]
"""Specs of a drafter and a policy."""
UNTRAINED_PAIRINGS: tuple[Pair, ...] = (("suffix", "yield"), ("pld", "trie"))
"""Pairings whose drafters need no training, so that they work with any target."""
MIN_PROMPTS = 4
"""Smallest number of different prompts for which advice is given."""


@dataclass(frozen=True)
class Verdict:
    """Store the result of `advise`: the chosen pairing and its measured figures.

    Attributes:
        chosen: the pairing with the most tokens per counted second on the first half of the
            prompts.
        counted: rows of counted figures on the first half, by pairing.
        judged: row of the chosen pairing on the second half, measured by the clock.
    """

    chosen: Pair
    counted: Mapping[Pair, ResultRow]
    judged: ResultRow

    @property
    def too_few(self) -> bool:
        """Return whether fewer prompts were judged than a verdict needs."""
        return bool(self.judged["prompts"] < bootstrap.MIN_PROMPTS)

    @property
    def speculate(self) -> bool | None:
        """Return whether drafting is faster than plain decoding; None if that is uncertain."""
        if self.too_few:
            return None
        low, high = self.judged["intervals"]["speedup"]
        return True if low > 1 else False if high < 1 else None

    def as_json(self) -> dict[str, Any]:
        """Return the figures as a dictionary with the names that the command line prints."""
        rows = [
            {"drafter": d, "policy": p, "interval": r["intervals"]["counted_speedup"]}
            | {name: r[name] for name in ("acceptance_length", "counted_speedup")}
            for (d, p), r in self.counted.items()
        ]
        names = ("speedup", "acceptance_length", "counted_speedup", "prompts", "same_output")
        found = {name: self.judged[name] for name in names} | {
            "interval": self.judged["intervals"]["speedup"]
        }
        return (
            {"speculate": self.speculate, "drafter": self.chosen[0], "policy": self.chosen[1]}
            | found
            | {"counted": rows}
        )


def split_in_halves(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Return two halves of the requests, divided by the hash of their prompts.

    The split does not depend on the order of the requests.
    """
    by_hash = sorted(requests, key=lambda r: hashlib.sha256(str(r.prompt).encode()).digest())
    return by_hash[::2], by_hash[1::2]


def candidate_pairings(drafters: Sequence[str], usual: Pair, given: bool) -> list[Pair]:
    """Return the pairs of drafter and policy to compare.

    Each named drafter is paired with the policies `yield` and `pct`. Without a named drafter, the
    usual pair and the usual drafter with `pct` are compared. The pairs `UNTRAINED_PAIRINGS` are
    added.

    Args:
        drafters: specs of the drafters that the user named.
        usual: default drafter and policy for the target.
        given: whether the user named a drafter.
    """
    own = (
        [(d, p) for d in drafters for p in ("yield", "pct")]
        if given
        else [usual, (usual[0], "pct")]
    )
    return list(dict.fromkeys([*own, *UNTRAINED_PAIRINGS]))


def advise(
    engines: Mapping[Pair, Engine],
    requests: Sequence[Request],
    seed: int = 0,
    tell: Tell = ignore_progress,
) -> Verdict:
    """Choose a drafter and a policy on one half of the requests, and time them on the other.

    The choice is made by estimated seconds: the work of each step times the measured costs.

    Args:
        engines: an engine for each pair of drafter and policy, with fixed costs.
        requests: greedy requests, at least `MIN_PROMPTS`.
        seed: seed of the bootstrap for the intervals.
        tell: called with the number of finished requests.

    Raises:
        UserError: there are fewer than `MIN_PROMPTS` different prompts.
    """
    if len({r.prompt for r in requests}) < MIN_PROMPTS:
        raise UserError(
            f"{len(requests)} prompts were given, needed are at least {MIN_PROMPTS} different ones that fit the context"
        )
    first, other = split_in_halves(requests)
    plain, whole = Cell(None, None, 0.0), len(first) + len(other)
    cells = {pair: Cell(*pair, 0.0) for pair in engines}
    with TemporaryDirectory() as folder:
        target, needs = (
            next(iter(engines.values())).target,
            [e.drafter.needs for e in engines.values()],
        )
        recordings = Recordings.open(Path(folder), target, needs)
        tell(0, "plain decoding", whole)
        recordings.record(first)
        work = Bench([plain, *cells.values()], engines, first, seed, recordings=recordings)
        done = list[dict[Cell, PromptResult]]()
        for i in range(len(first)):
            tell(i, "choosing", whole)
            done.append(work.prompt(i))
    rows = result_rows.result_rows(done, seed, None, work.prices)[1:]
    counted = dict(zip(engines, map(result_rows.without_clock_figures, rows), strict=True))
    chosen = max(counted, key=lambda pair: counted[pair]["counted_speedup"])
    live = Bench([plain, cells[chosen]], {chosen: engines[chosen]}, other, seed)
    live.warm()
    judged = list[dict[Cell, PromptResult]]()
    for i in range(len(other)):
        tell(len(first) + i, f"judging {' + '.join(chosen)}", whole)
        judged.append(live.prompt(i))
    tell(whole, "", whole)
    return Verdict(chosen, counted, result_rows.result_rows(judged, seed, None, live.prices)[1])


def format_verdict(verdict: Verdict, target: str) -> str:
    """Return a sentence that says whether to speculate with the target, and with which pairing."""
    row, (drafter, policy) = verdict.judged, verdict.chosen
    low, high = row["intervals"]["speedup"]
    speed = f"{row['speedup']:.2f} × [{low:.2f}, {high:.2f}] plain decoding's speed"
    figure = f"{speed} on {row['prompts']} prompts that had no part in the choice"
    how = f"--drafter {drafter} --policy {policy}"
    if verdict.too_few:
        needed = f"needed are {bootstrap.MIN_PROMPTS} (--limit {2 * bootstrap.MIN_PROMPTS})"
        return f"Too few prompts to say whether to speculate: {how} has {figure}, {needed}."
    if verdict.speculate:
        return f"Speculate with {how}: {figure}."
    if verdict.speculate is False:
        return (
            f"Do not speculate with {target} here: the best of what was tried, {how}, has {figure}."
        )
    return f"Not told apart: {how} has {figure}. More prompts (--limit) may decide; until then plain decoding is as good."
