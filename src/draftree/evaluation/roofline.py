"""Roofline costs of machines that are not at hand, by name.

A pass over n tokens takes t₀ + w/B + kv/B + n · 2P/F seconds: launches, the weights w and the
context's keys and values at the bandwidth B, and the arithmetic of P weights at the rate F. A
target whose layers keep a state reads it in the pass, and reads and writes it in the commit, and
writes and reads a stash for each token: (3 · state + n · 2 · stash)/B more. The terms add up, as a
published fit has it, so that further nodes are never free. Everything that is counted by such costs
is a simulation, and says so.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from draftree.costs.curves import Costs, CostTable
from draftree.drafters._fused import FusedDrafter
from draftree.drafters.base import Drafter
from draftree.errors import UnknownName
from draftree.measure_costs import CANDIDATES, DRAFTED, FED, FED_WIDE, settled_costs
from draftree.policies.base import append
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.tree import Tree, Verdict
from draftree.utils.files import Entries, read_object, understood
from draftree.utils.progress import Tell, silent
from draftree.utils.validated_dataclass import Part, knob

FOLDER = Path(__file__).parents[1] / "machines"
CONTEXTS = (0, 8192)
"""Committed tokens at which a derived file has costs; they are linear between."""
READ = 8
"""Tokens of the prompt after which a drafter's pass is examined."""
LEAST = 1e-9
"""Seconds of what costs nothing: a cost is above 0."""


@dataclass(frozen=True)
class Drafting(Part):
    """Describe a drafter's work in a step independently of the machine and the target's size.

    Attributes:
        layers: weights that a draft step reads, in units of one layer of the target.
        heads: weights of LM heads that it reads, in units of the target's head.
        commit_layers: weights that a commit reads.
        commit_heads: weights of LM heads that a commit reads.
        later_layers: weights whose reading a commit postpones to the next draft step.
        later_heads: likewise, weights of LM heads.
        processor: {f: seconds} that its look-ups took on this machine's CPU for f frontier nodes;
            empty where there are none.
    """

    layers: float = knob(0.0, least=0)
    heads: float = knob(0.0, least=0)
    commit_layers: float = knob(0.0, least=0)
    commit_heads: float = knob(0.0, least=0)
    later_layers: float = knob(0.0, least=0)
    later_heads: float = knob(0.0, least=0)
    processor: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Self:
        """Return the instance that was saved by `asdict` as JSON."""
        return cls(
            **{**saved, "processor": {int(f): s for f, s in saved.get("processor", {}).items()}}
        )

    def seconds(self, f: int) -> float:
        """Return the seconds of look-ups over f nodes.

        They are linear between the measured widths, and constant beyond the widest.
        """
        widths = sorted(self.processor)
        return float(np.interp(f, widths, [self.processor[w] for w in widths])) if widths else 0.0


@dataclass(frozen=True)
class Roofline(Part):
    """Store the figures of a dense target on a machine, in weights, bytes and seconds.

    Attributes:
        parameters: P, weights that every token is multiplied with.
        weights: w, bytes of weights that a pass reads.
        kv: bytes of one token's keys and values.
        bandwidth: B, achieved bytes per second.
        rate: F, achieved operations per second.
        launch: t₀, seconds of kernel launches and of communication between devices.
        overhead: o, seconds of the host in every step, also in plain decoding.
        layers: layers of the target.
        layer: weights of one layer.
        head: weights of the LM head.
        draft_bytes: bytes of one weight of a drafter.
        state: bytes of a sequence's recurrent states.
        stash: bytes of a token's state updates in a scratch slot.
    """

    parameters: float = knob(above=0)
    weights: float = knob(above=0)
    kv: float = knob(least=0)
    bandwidth: float = knob(above=0)
    rate: float = knob(above=0)
    launch: float = knob(least=0)
    overhead: float = knob(least=0)
    layers: int = knob(least=1)
    layer: float = knob(above=0)
    head: float = knob(above=0)
    draft_bytes: float = knob(2.0, above=0)
    state: float = knob(0.0, least=0)
    stash: float = knob(0.0, least=0)

    def target(self, n: int, context: int) -> float:
        """Return sₜ(n) after `context` tokens, with the host's overhead."""
        reading = (
            self.weights + self.kv * context + 3 * self.state + n * 2 * self.stash
        ) / self.bandwidth
        return self.overhead + self.launch + reading + n * 2 * self.parameters / self.rate

    def drafted(self, layers: float, heads: float, f: int) -> float:
        """Return the seconds of a drafter's pass over f tokens.

        Launch time counts in proportion to the target's layers.
        """
        parameters = layers * self.layer + heads * self.head
        launches = self.launch * layers / self.layers
        return (
            launches
            + parameters * self.draft_bytes / self.bandwidth
            + f * 2 * parameters / self.rate
        )

    def entries(self, work: Drafting) -> tuple[Costs, ...]:
        """Return the costs of a drafter on this machine."""
        found = []
        for context in CONTEXTS:
            target = {n: self.target(n, context) for n in (*FED, *FED_WIDE)}
            found.append(
                Costs(
                    self.steps(work),
                    target,
                    self.commit(work),
                    context,
                    catch_up=self.catch_up(work),
                )
            )
        return tuple(found)

    def steps(self, work: Drafting) -> dict[int, float]:
        """Return sₐ of a drafter."""
        return {
            f: max(self.drafted(work.layers, work.heads, f) + work.seconds(f), LEAST)
            for f in DRAFTED
        }

    def commit(self, work: Drafting) -> float:
        """Return the seconds of a drafter's commit of one token."""
        return self.drafted(work.commit_layers, work.commit_heads, 1)

    def catch_up(self, work: Drafting) -> float:
        """Return the seconds of the work that a drafter's commit postpones."""
        return self.drafted(work.later_layers, work.later_heads, 1)


ONE_LAYER = Drafting(layers=1, heads=1)
"""The drafter that the files' own draft curves are for: one of the target's layers, and a head of
its width."""


@dataclass(frozen=True)
class Machine:
    """Describe a machine with a target on it.

    Attributes:
        name: name of its file.
        table: its costs with a drafter of one layer.
        roofline: figures from which other drafters' costs are derived; None where only the target's
            curve was published.
    """

    name: str
    table: CostTable
    roofline: Roofline | None

    @classmethod
    def load(cls, name: str) -> Self:
        """Return the machine of that name.

        Raises:
            UnknownName: there is none.
            UserError: its file cannot be read.
        """
        if name not in names():
            raise UnknownName("machine", name, names())
        path = FOLDER / f"{name}.json"
        entries = Entries(read_object(path, "a machine's costs"), path)
        saved, about = (
            entries.get("roofline", dict, {}),
            Entries(entries.get("about", dict), f"'{path}': about"),
        )
        for entry in ("device", "kind"):
            about.get(entry, str)
        with understood(f"'{path}' is not a machine's costs"):
            return cls(name, CostTable.load(path), Roofline(**saved) if saved else None)

    @property
    def summary(self) -> str:
        """Return the machine's description in one line."""
        return f"{self.table.about['device']} ({self.table.about['kind']})"

    def costs(self, work: Drafting) -> CostTable:
        """Return the costs of a drafter here: its draft steps, and the target's curves."""
        about = {**self.table.about, "machine": self.name}
        entries = tuple(self._entry(entry, work) for entry in self.table.entries)
        return CostTable(entries, about)

    def _entry(self, entry: Costs, work: Drafting) -> Costs:
        if self.roofline is not None:
            commit, catch_up = self.roofline.commit(work), self.roofline.catch_up(work)
            return replace(entry, draft=self.roofline.steps(work), commit=commit, catch_up=catch_up)
        passes = (
            1.0 if work.layers or work.heads else 0.0
        )  # the assumed draft step represents any network
        steps = {f: max(passes * entry.draft_seconds(f) + work.seconds(f), LEAST) for f in DRAFTED}
        return replace(entry, draft=steps)


def names() -> list[str]:
    """Return the names of all machines."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def varied(table: CostTable, slope: float = 1.0, overhead: float = 0.0) -> CostTable:
    """Return a cost table for a machine with other costs of further tokens or more host time.

    Args:
        table: the table to change.
        slope: factor for what a pass over n tokens costs beyond a pass over one token.
        overhead: seconds added to every pass of the target, those of plain decoding included.
    """

    def bent(entry: Costs) -> Costs:
        one = entry.token
        return replace(
            entry, target={n: one + slope * (s - one) + overhead for n, s in entry.target.items()}
        )

    told = {"slope": f"{slope:g}", "overhead": f"{overhead:g}"}
    return CostTable(tuple(map(bent, table.entries)), {**table.about, **told})


def drafting(target: Target, drafter: Drafter[Any], tell: Tell = silent) -> Drafting:
    """Return what a drafter reads in the second draft step of a tree and in its commit.

    Look-ups are timed here unless their time is known.
    """
    layer, head = _sizes(target)
    step, commit, later = _read(target, drafter)
    parts = drafter.parts if isinstance(drafter, FusedDrafter) else (drafter,)
    seconds = dict.fromkeys(DRAFTED, 0.0)
    for part in (part for part in parts if part.searches):
        timed = min(settled_costs(target, part, tell).entries, key=lambda e: e.context)
        seconds = {f: s + timed.draft_seconds(f) for f, s in seconds.items()}
    return Drafting(
        step.layers / layer,
        step.heads / head,
        commit.layers / layer,
        commit.heads / head,
        later.layers / layer,
        later.heads / head,
        seconds if any(seconds.values()) else {},
    )


def _sizes(target: Target) -> tuple[int, int]:
    """Return the weights of one of a target's layers, and of its LM head."""
    decoder = target.decoder
    return sum(p.numel() for p in decoder.layers[0].parameters()), decoder.vocab * decoder.hidden


MULTIPLIED = ("linear", "_linear_pointwise", "addmm")
"""Names of the functions that multiply rows by a weight: torch's own, oneDNN's, and that of GPT-2's
layers."""


class _Reading(TorchFunctionMode):
    """Sum the weights of all linear layers that are called, with those of LM heads apart.

    A layer counts as LM head where its output is wider than that of any other layer.
    """

    def __init__(self, widest: int) -> None:
        super().__init__()
        self.widest = widest
        self.layers = 0
        self.heads = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").partition(".")[0] in MULTIPLIED:
            rows = args[1] if func is torch.addmm else args[0]
            if made.shape[-1] > self.widest:
                self.heads += rows.shape[-1] * made.shape[-1]
            else:
                self.layers += rows.shape[-1] * made.shape[-1]
        return made


def _read(target: Target, drafter: Drafter[Any]) -> tuple[_Reading, _Reading, _Reading]:
    """Return the weights read by a draft step, by the commit of a root, and by postponed work.

    The draft step is the one after the root's children. It is that of the root for a drafter that
    proposes several depths in one step.
    """
    widest = max(max(p.shape) for p in target.decoder.layers[0].parameters())
    first, step, commit, later = (_Reading(widest) for _ in range(4))
    zero = np.zeros(1, np.int64)
    prompt = np.arange(READ) % target.decoder.vocab
    cache = target.new_cache(1, 2 * READ)
    state = drafter.caught_up(
        drafter.start([prompt], zero, target.prefill(cache, [prompt], drafter.needs).taps)
    )
    root = Tree.planted(zero, zero)
    with first:
        candidates, state = drafter.expand(state, root, zero, CANDIDATES, Drawing())
    tree = append(root, zero, candidates)
    if len(tree) > 1:
        with step:
            _, state = drafter.expand(state, tree, np.array([1]), CANDIDATES, Drawing())
    taps = target.verify(cache, root, drafter.needs, drafter.probes(state)).taps
    nothing = Verdict((np.zeros(0, np.int64),), np.ones(1, np.int64))
    target.commit(cache, root, nothing)
    with commit:
        state = drafter.commit(state, root, nothing, taps)
    with later:
        drafter.caught_up(state)
    return (step if step.layers or step.heads else first), commit, later


def derived(name: str) -> dict[str, Any]:
    """Return the contents of a derived machine's file, computed from the roofline stored there."""
    machine = Machine.load(name)
    assert machine.roofline is not None
    entries = [asdict(entry) for entry in machine.roofline.entries(ONE_LAYER)]
    file = {
        "entries": entries,
        "about": dict(machine.table.about),
        "roofline": asdict(machine.roofline),
    }
    found: dict[str, Any] = json.loads(json.dumps(file))
    return found
