"""Search the options of a policy on half of the prompts, and test them on the other half.

The target writes every text once; each setting is then replayed along them and counted by the costs
of a machine.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from draftree.engine import Engine
from draftree.errors import UnknownName, UserError
from draftree.evaluation import bootstrap, result_rows
from draftree.evaluation.advice import MIN_PROMPTS, split_in_halves
from draftree.evaluation.bench import Bench
from draftree.evaluation.bootstrap import Ratio, ResultRow, paired_ratio
from draftree.evaluation.grid import Cell
from draftree.evaluation.resume import files_of
from draftree.evaluation.trace_store import Recordings, key, target_hashes
from draftree.policies.base import Policy
from draftree.registry import build
from draftree.request import Request
from draftree.utils.files import as_user_error
from draftree.utils.progress_callback import Tell, ignore_progress
from draftree.utils.validated_dataclass import Range

SPREAD, LEAST_SPREAD = 4, 8
"""Limits of the values that are tried. The upper limit of an integer option is `SPREAD` times its
default, and at least `LEAST_SPREAD`. A real option ranges from its default divided by `SPREAD`² to
its default times `SPREAD`²."""
Space = dict[str, tuple[str, Any, Any]]
"""Values to try by option: (`whole`, lower limit, upper limit) for integers, (`share`, lower limit,
upper limit) for real numbers, or (`choice`, list of values, None)."""


def search_space(policy: Policy, named: Sequence[str] = ()) -> Space:
    """Return the options of a policy that can be searched and the values to try for each.

    The values depend on each option's type, range and current value.

    Args:
        policy: policy whose current option values are the centre of the search.
        named: names of the options to search; all by default.

    Raises:
        UserError: a named option cannot be searched, or the policy has no option that can.
    """
    found, hints = Space(), get_type_hints(type(policy))
    for f in fields(policy):  # type: ignore[arg-type]  # every policy is a dataclass
        value = getattr(policy, f.name)
        bounds = f.metadata.get("range", Range())
        hint = hints[f.name]
        if isinstance(value, bool):
            found[f.name] = "choice", [False, True], None
        elif get_origin(hint) is Literal:
            found[f.name] = "choice", list(get_args(hint)), None
        elif isinstance(value, int):
            top = min(bounds.most, bounds.below - 1, max(SPREAD * value, LEAST_SPREAD))
            found[f.name] = "whole", int(max(1, bounds.least)), int(top)
        elif isinstance(value, float) and value > 0:
            low = max(value / SPREAD**2, bounds.least, math.nextafter(bounds.above, math.inf))
            top = min(value * SPREAD**2, bounds.most, math.nextafter(bounds.below, -math.inf))
            found[f.name] = "share", low, top
    for name in named:
        if name not in found:
            raise UnknownName("option that can be searched", name, found)
    chosen = {name: it for name, it in found.items() if not named or name in named}
    if not chosen:
        raise UserError(
            f"policy '{type(policy).__name__.lower()}' has no option that can be searched"
        )
    return chosen


def spec(name: str, knobs: Mapping[str, Any]) -> str:
    """Return the spec `name:option=value,…` of a policy."""
    return f"{name}:{','.join(f'{k}={v}' for k, v in knobs.items())}" if knobs else name


@dataclass(frozen=True)
class SearchResult:
    """Store the result of a search for the options of a policy.

    Attributes:
        policy: spec of the setting that was fastest on the first half of the prompts.
        default: spec of the initial setting.
        searched: metrics on the first half, by spec, for `policy` and `default`.
        judged: metrics on the second half, by spec, for `policy` and `default`.
        beside: tokens per counted second of `policy` over those of `default`, on the second half.
        trials: number of settings tried.
    """

    policy: str
    default: str
    searched: Mapping[str, ResultRow]
    judged: Mapping[str, ResultRow]
    beside: Ratio
    trials: int

    @property
    def better(self) -> bool:
        """Return whether the best setting is faster: the interval of `beside` is above 1.

        With too few prompts for a verdict the result is false.
        """
        return self.beside.low > 1 and not self.beside.few

    def as_json(self) -> dict[str, Any]:
        """Return the result as a dictionary with the names that the command line prints."""
        names = ("acceptance_length", "nodes_per_step", "counted_speedup", "prompts")
        rows = {
            half: {
                s: {n: r[n] for n in names} | {"interval": r["intervals"]["counted_speedup"]}
                for s, r in found.items()
            }
            for half, found in (("searched", self.searched), ("judged", self.judged))
        }
        told = {
            "policy": self.policy,
            "default": self.default,
            "trials": self.trials,
            "keep_default": not self.better,
        }
        return told | rows | {"beside_default": asdict(self.beside)}

    def recommendation(self) -> str:
        """Return in words whether to use the best setting or to keep the default."""
        figure = f"{self.beside.value:.3f} × [{self.beside.low:.3f}, {self.beside.high:.3f}] the default's speed, counted"
        if self.policy == self.default:
            return f"Keep the default: none of {self.trials} settings was faster on the half that was searched."
        if self.beside.few:
            needed = f"needed are {bootstrap.MIN_PROMPTS} (--limit {2 * bootstrap.MIN_PROMPTS})"
            return f"Keep the default: too few prompts to judge {self.policy}, which has {figure}, {needed}."
        if self.better:
            return (
                f"Use --policy {self.policy}: {figure}, on prompts that had no part in the search."
            )
        return f"Keep the default: {self.policy} has {figure} on the other half, an interval that includes 1 or lies below."


@dataclass(frozen=True)
class OptionSearch:
    """Search for the values of a policy's options that give the highest counted speed-up.

    Attributes:
        engine: engine with the drafter, the initial policy and the costs.
        drafter: spec of the drafter.
        policy: spec of the initial policy.
        recordings: recorded texts of all requests, which are replayed.
        temperature: temperature of the requests.
        seed: seed of the texts, of the search and of the intervals.
    """

    engine: Engine
    drafter: str
    policy: str
    recordings: Recordings
    temperature: float = 0.0
    seed: int = 0

    def row(self, policy: str, requests: Sequence[Request]) -> ResultRow:
        """Replay the recorded texts of requests with a policy, and return its metrics.

        The row has no metrics that are measured by the clock.

        Args:
            policy: spec of the policy.
            requests: the requests, which must all be recorded.
        """
        cells = [Cell(None, None, self.temperature), Cell(self.drafter, policy, self.temperature)]
        engines = {
            (self.drafter, policy): replace(self.engine, policy=build("policy", policy), learned={})
        }
        work = Bench(cells, engines, requests, self.seed, recordings=self.recordings)
        return result_rows.without_clock_figures(
            result_rows.result_rows(
                [work.prompt(i) for i in range(len(requests))], self.seed, None, work.prices
            )[1]
        )

    def run(
        self,
        requests: Sequence[Request],
        trials: int,
        storage: Path | None = None,
        named: Sequence[str] = (),
        tell: Tell = ignore_progress,
    ) -> SearchResult:
        """Search settings on one half of the requests, and measure the best on the other half.

        Args:
            requests: the requests, which must all be recorded.
            trials: number of settings to try, including those that `storage` already contains.
            storage: file in which Optuna stores the search, so that it can be resumed; None for no
                file.
            named: names of the options to search. By default all options are searched that can be
                and that the policy's spec does not set.
            tell: called with the number of settings tried so far.

        Raises:
            UserError: there are too few requests, or Optuna is not installed.
        """
        if len({r.prompt for r in requests}) < MIN_PROMPTS:
            raise UserError(
                f"{len(requests)} prompts were given, needed are at least {MIN_PROMPTS} different ones"
            )
        name, _, fixed = self.policy.partition(":")
        known = {item.partition("=")[0] for item in fixed.split(",") if item}
        tried = {k: v for k, v in search_space(self.engine.policy, named).items() if k not in known}
        if not tried:
            raise UserError(
                f"policy '{self.policy}' fixes all its options: there is nothing to search"
            )
        base = dict(item.split("=", 1) for item in fixed.split(",") if item)
        first, other = split_in_halves(requests)
        study = self._study(first, tried, storage)
        done = dict[str, ResultRow]()

        def value(trial: Any) -> float:
            of = spec(
                name,
                base | {knob: _suggest_value(trial, knob, *how) for knob, how in tried.items()},
            )
            if of not in done:
                done[of] = self.row(of, first)
            trial.set_user_attr("spec", of)
            return float(done[of]["counted_speedup"] or 0.0)

        def num_finished() -> int:
            return sum(bool(t.state.is_finished()) for t in study.trials)

        if not study.trials:
            study.enqueue_trial({knob: getattr(self.engine.policy, knob) for knob in tried})
        tell(num_finished(), "", trials)
        while num_finished() < trials:
            study.optimize(value, n_trials=1)
            tell(num_finished(), f"best {study.best_value:.3f}", trials)
        done[self.policy] = default = self.row(self.policy, first)
        best = study.best_trial.user_attrs["spec"]
        if study.best_value <= float(default["counted_speedup"] or 0.0):
            best = self.policy
        searched = {
            s: done.get(s) or self.row(s, first) for s in dict.fromkeys((best, self.policy))
        }
        judged = {s: self.row(s, other) for s in searched}
        beside = paired_ratio(judged[best], judged[self.policy], seed=self.seed).inverse
        return SearchResult(best, self.policy, searched, judged, beside, num_finished())

    def _study(self, requests: Sequence[Request], tried: Space, storage: Path | None) -> Any:
        """Open or create the Optuna study of this search.

        The study's name is a hash of target, drafter and its files, policy, options, costs, seed,
        temperature and requests.
        """
        try:
            import optuna
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ModuleNotFoundError as error:
            raise UserError(
                f"searching needs the package '{error.name}': pip install 'draftree[tune]'"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        costs = asdict(self.engine.costs) if self.engine.costs is not None else None
        about = [
            target_hashes(self.engine.target),
            self.drafter,
            self.policy,
            tried,
            costs,
            self.seed,
            self.temperature,
            *files_of(self.drafter),
            *map(key, requests),
        ]
        name = hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:16]
        with warnings.catch_warnings(), as_user_error(f"'{storage}' cannot be used as --storage"):
            warnings.simplefilter("ignore")
            kept = None if storage is None else JournalStorage(JournalFileBackend(str(storage)))
            sampler = optuna.samplers.TPESampler(seed=self.seed)
            return optuna.create_study(
                storage=kept,
                study_name=name,
                sampler=sampler,
                direction="maximize",
                load_if_exists=True,
            )


def _suggest_value(trial: Any, knob: str, kind: str, low: Any, high: Any) -> Any:
    if kind == "choice":
        return trial.suggest_categorical(knob, low)
    return (
        trial.suggest_int(knob, low, high, log=True)
        if kind == "whole"
        else trial.suggest_float(knob, low, high, log=True)
    )
