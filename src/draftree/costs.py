"""What a draft step and a target pass cost on this machine, measured and kept on disk.

A cost depends on the device, the dtype, both models and how many tokens are fed; on a GPU a pass over 16 tokens
costs what one token costs, on a CPU it may cost three times as much. Policies read the curves through `Costs`.
"""

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from draftree.drafters.base import Drafter
from draftree.errors import UserError
from draftree.sampling import Drawing
from draftree.target import Target
from draftree.tree import Candidates, Tree, Verdict

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of tokens fed at which a pass is timed."""
CANDIDATES = 5
"""How many a timed draft step proposes after each node."""


@dataclass(frozen=True)
class Costs:
    """Seconds by how many tokens are fed, linear between the measured widths and beyond them.

    Attributes:
        draft: {f: sₐ(f)}, a draft step over f frontier nodes.
        target: {n: sₜ(n)}, a target pass over n = 1 + γ tokens.
        commit: seconds of the drafter's commit of one token.
        about: what was measured, where.
    """

    draft: Mapping[int, float]
    target: Mapping[int, float]
    commit: float = 0.0
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, curve in (("draft", self.draft), ("target", self.target)):
            if not curve or any(not s > 0 for s in curve.values()):
                raise UserError(f"costs: '{name}' is {dict(curve)}, allowed are widths with seconds above 0")

    @cached_property
    def ratio(self) -> float:
        """sₐ/sₜ for one token each, as PCT reads it (EDD + PCT, section 4.1: 1.1 ms / 29.8 ms for a 7B)."""
        return self.draft_seconds(1) / self.target_seconds(1)

    def draft_seconds(self, tokens: float) -> float:
        """sₐ(tokens)."""
        return _between(self.draft, tokens)

    def target_seconds(self, tokens: float) -> float:
        """sₜ(tokens), where the root is one of them."""
        return _between(self.target, tokens)

    def save(self, path: Path) -> None:
        """Writes the curves as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".partial")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote.

        Raises:
            UserError: the file is not one of these.
        """
        try:
            raw = json.loads(path.read_text())
            curves = {k: {int(w): float(s) for w, s in raw[k].items()} for k in ("draft", "target")}
            return cls(curves["draft"], curves["target"], float(raw.get("commit", 0.0)), raw.get("about", {}))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"'{path}' is not a costs file as `draftree costs --out` writes it: {error}") from error


def _between(curve: Mapping[int, float], tokens: float) -> float:
    widths = sorted(curve)
    seconds = [curve[w] for w in widths]
    if tokens <= widths[-1] or len(widths) == 1:
        return float(np.interp(tokens, widths, seconds))
    slope = (seconds[-1] - seconds[-2]) / (widths[-1] - widths[-2])
    return seconds[-1] + max(slope, 0.0) * (tokens - widths[-1])


def median_seconds(work: Callable[[], Any], device: torch.device, at_least: int = 7, budget: float = 0.3) -> float:
    """The median wall time of some work, after a warm-up; as many runs as the budget of seconds holds."""

    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(2):
        work()
    synchronise()
    seconds: list[float] = []
    while len(seconds) < at_least or (sum(seconds) < budget and len(seconds) < 4 * at_least):
        start = time.perf_counter()
        work()
        synchronise()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def machine(device: torch.device) -> dict[str, str]:
    """What decides the speed of a pass besides the models."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {"device": chip, "threads": str(torch.get_num_threads()), "torch": str(torch.__version__)}


def _processor() -> str:
    try:
        names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        return names[0].split(":", 1)[1].strip()
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def store(about: Mapping[str, str]) -> Path:
    """Where the costs of one pairing on one machine are kept; `DRAFTREE_CACHE` moves the folder."""
    home = Path(os.environ.get("DRAFTREE_CACHE") or Path.home() / ".cache" / "draftree")
    key = hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode()).hexdigest()[:16]
    return home / "costs" / f"{key}.json"


def identity(target: Target, drafter: Drafter[Any]) -> dict[str, str]:
    """What the costs of a pairing depend on."""
    decoder = target.decoder
    shape = {k: str(getattr(decoder.config, k, "")) for k in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")}
    attention = str(decoder.config._attn_implementation)
    return {
        **machine(decoder.device), **shape, "dtype": str(decoder.dtype), "attention": attention,
        "target": target.name, "drafter": drafter.described,
    }  # fmt: skip


def measured(target: Target, drafter: Drafter[Any], refresh: bool = False) -> Costs:
    """The costs of a pairing on this machine: read from disk, or timed once and kept."""
    about = identity(target, drafter)
    path = store(about)
    if path.is_file() and not refresh:
        return Costs.load(path)
    costs = measure(target, drafter)
    costs.save(path)
    return costs


def measure(target: Target, drafter: Drafter[Any], context: int = 128) -> Costs:
    """Times draft step, target pass and commit behind a text of `context` tokens."""
    device, vocab = target.decoder.device, target.decoder.vocab
    context = min(context, max(1, target.decoder.context - max(WIDTHS) - 1))
    prompt, one = np.arange(context) % vocab, np.zeros(1, np.int64)
    cache = target.new_cache(1, context + 2 * max(WIDTHS))
    verified = target.prefill(cache, [prompt], drafter.needs)
    planted, nothing = Tree.planted(one, one), Verdict((one[:0],), one)
    _, state = drafter.expand(drafter.start([prompt], one, verified.taps), planted, one, CANDIDATES, Drawing())
    trees = {n: _star(planted, n, vocab) for n in (*WIDTHS, *(f + 1 for f in WIDTHS))}

    def timed(work: Callable[..., Any], *arguments: Any) -> float:
        return median_seconds(partial(work, *arguments), device)

    passes = {n: timed(target.verify, cache, trees[n], drafter.needs) for n in WIDTHS}
    steps = {f: timed(drafter.expand, state, trees[f + 1], np.arange(1, f + 1), CANDIDATES, Drawing()) for f in WIDTHS}
    taps = target.verify(cache, planted, drafter.needs).taps
    target.commit(cache, planted, nothing)

    def commit() -> None:
        drafter.truncate(drafter.commit(state, planted, nothing, taps), np.array([context]))

    return Costs(steps, passes, timed(commit), identity(target, drafter))


def _star(planted: Tree, nodes: int, vocab: int) -> Tree:
    """A root with nodes − 1 children."""
    tokens, zero = np.arange(nodes - 1) % vocab, np.zeros(nodes - 1)
    return planted.append(np.zeros(nodes - 1, np.int64), tokens, zero, zero, Candidates(tokens[None], zero[None]))
