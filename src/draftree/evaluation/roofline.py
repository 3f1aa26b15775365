"""Roofline costs of machines that are not at hand, by name.

A pass over n tokens takes t₀ + w/B + kv/B + n · 2P/F seconds: launches, the weights w and the
context's keys and values at the bandwidth B, and the arithmetic of P weights at the rate F. A
target whose layers keep a state reads it in the pass, and reads and writes it in the commit, and
writes and reads a stash for each token: (3 · state + n · 2 · stash)/B more. The terms add up, as a
published fit has it, so that further nodes are never free. Everything that is counted by such costs
is a simulation, and says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.drafters._fused import FusedDrafter
from draftree.drafters.base import Drafter
from draftree.errors import UnknownName
from draftree.measure_costs import (
    CANDIDATES,
    DRAFT_WIDTHS,
    reliable_costs,
)
from draftree.policies.base import append
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.tree import AcceptResult, Tree
from draftree.utils.files import Entries, as_user_error, read_object
from draftree.utils.progress_callback import Tell, ignore_progress
from draftree.utils.validated_dataclass import Part, knob

MACHINES_FOLDER = Path(__file__).parents[1] / "machines"
PROMPT_TOKENS = 8
"""Length in tokens of the prompt that is read before the weights of a draft step are counted."""
MIN_STORED_SECONDS = 1e-9
"""Seconds stored for a draft step that costs nothing. A stored cost has to be above 0."""


@dataclass(frozen=True)
class Drafting(Part):
    """Describe how many weights a drafter reads in a step, relative to the target's size.

    The description does not depend on the machine.

    Attributes:
        layers: number of weights that a draft step reads, divided by the weights of one target
            layer.
        heads: number of LM-head weights that a draft step reads, divided by the weights of the
            target's head.
        commit_layers: number of weights that a commit reads, in the unit of `layers`.
        commit_heads: number of LM-head weights that a commit reads, in the unit of `heads`.
        later_layers: number of weights that a commit leaves to the next draft step to read, in the
            unit of `layers`.
        later_heads: number of LM-head weights that a commit leaves to the next draft step, in the
            unit of `heads`.
        processor: {f: seconds} measured on this machine's CPU for the drafter's look-ups over f
            frontier nodes; empty for a drafter without look-ups.
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
        """Return an instance from the dictionary that `asdict` wrote as JSON."""
        return cls(
            **{**saved, "processor": {int(f): s for f, s in saved.get("processor", {}).items()}}
        )

    def seconds(self, f: int) -> float:
        """Return the seconds that look-ups over f frontier nodes take.

        The time is interpolated linearly between the measured numbers of nodes, and constant above
        the largest.
        """
        widths = sorted(self.processor)
        return float(np.interp(f, widths, [self.processor[w] for w in widths])) if widths else 0.0


@dataclass(frozen=True)
class Roofline(Part):
    """Store the figures from which the cost of a pass of a dense target on a machine is computed.

    Attributes:
        parameters: P, number of weights that take part in the matrix products of every token.
        weights: w, bytes of weights that one pass reads.
        kv: bytes of the keys and values of one token.
        bandwidth: B, memory bandwidth that is reached, in bytes per second.
        rate: F, arithmetic rate that is reached, in operations per second.
        launch: t₀, seconds that a pass spends on kernel launches and on communication between
            devices.
        overhead: o, seconds that the host spends in every step, also in plain decoding.
        layers: number of the target's layers.
        layer: number of weights in one layer.
        head: number of weights in the LM head.
        draft_bytes: bytes per weight of a drafter.
        state: bytes of the recurrent states of one sequence.
        stash: bytes of the state updates that a pass stores for each token until the commit.
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
        """Return sₜ(n), the seconds of a target pass over n tokens after `context` tokens.

        The host's overhead is included.
        """
        reading = (
            self.weights + self.kv * context + 3 * self.state + n * 2 * self.stash
        ) / self.bandwidth
        return self.overhead + self.launch + reading + n * 2 * self.parameters / self.rate

    def drafter_pass_seconds(self, layers: float, heads: float, f: int) -> float:
        """Return the seconds of a drafter's pass over f tokens.

        `layers` and `heads` are weights in units of a target layer and of the target's head.

        `layers` and `heads` are weights in units of a target layer and of the target's head.

        The launch time is that of the target times `layers` over the number of the target's layers.
        """
        parameters = layers * self.layer + heads * self.head
        launches = self.launch * layers / self.layers
        return (
            launches
            + parameters * self.draft_bytes / self.bandwidth
            + f * 2 * parameters / self.rate
        )

    def steps(self, work: Drafting) -> dict[int, float]:
        """Return {f: sₐ(f)}, the seconds of a draft step over f frontier nodes."""
        return {
            f: max(
                self.drafter_pass_seconds(work.layers, work.heads, f) + work.seconds(f),
                MIN_STORED_SECONDS,
            )
            for f in DRAFT_WIDTHS
        }

    def commit(self, work: Drafting) -> float:
        """Return the seconds that a drafter needs to commit one token."""
        return self.drafter_pass_seconds(work.commit_layers, work.commit_heads, 1)

    def catch_up(self, work: Drafting) -> float:
        """Return the seconds of the work that a drafter's commit leaves to the next draft step."""
        return self.drafter_pass_seconds(work.later_layers, work.later_heads, 1)


@dataclass(frozen=True)
class Machine:
    """Describe the costs of one target on one machine.

    Attributes:
        name: name of the machine's file, without `.json`.
        table: costs on the machine with the drafter `ONE_LAYER`.
        roofline: figures from which the costs of other drafters are computed; None if only the
            target's cost curve was published.
    """

    name: str
    table: CostTable
    roofline: Roofline | None

    @classmethod
    def load(cls, name: str) -> Self:
        """Return the machine with the given name.

        Raises:
            UnknownName: no machine has this name.
            UserError: the machine's file cannot be read.
        """
        if name not in machine_names():
            raise UnknownName("machine", name, machine_names())
        path = MACHINES_FOLDER / f"{name}.json"
        entries = Entries(read_object(path, "a machine's costs"), path)
        saved, about = (
            entries.get("roofline", dict, {}),
            Entries(entries.get("about", dict), f"'{path}': about"),
        )
        for entry in ("device", "kind"):
            about.get(entry, str)
        with as_user_error(f"'{path}' is not a machine's costs"):
            return cls(name, CostTable.load(path), Roofline(**saved) if saved else None)

    @property
    def summary(self) -> str:
        """Return the machine's description in one line."""
        return f"{self.table.about['device']} ({self.table.about['kind']})"

    def costs(self, work: Drafting) -> CostTable:
        """Return this machine's cost table with the draft and commit costs of the given drafter."""
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
        steps = {
            f: max(passes * entry.draft_seconds(f) + work.seconds(f), MIN_STORED_SECONDS)
            for f in DRAFT_WIDTHS
        }
        return replace(entry, draft=steps)


def machine_names() -> list[str]:
    """Return the names of all machines."""
    return sorted(path.stem for path in MACHINES_FOLDER.glob("*.json"))


def count_draft_reads(
    target: Target, drafter: Drafter[Any], tell: Tell = ignore_progress
) -> Drafting:
    """Count the weights that a drafter reads in the second draft step of a tree and in a commit.

    Parts of the drafter that look up continuations are timed on this machine, unless their times
    have been learnt before.
    """
    layer, head = _sizes(target)
    step, commit, later = _weight_reads(target, drafter)
    parts = drafter.parts if isinstance(drafter, FusedDrafter) else (drafter,)
    seconds = dict.fromkeys(DRAFT_WIDTHS, 0.0)
    for part in (part for part in parts if part.searches):
        timed = min(reliable_costs(target, part, tell).entries, key=lambda e: e.context)
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
    """Return the number of weights in the target's first layer and in its LM head."""
    decoder = target.decoder
    return sum(
        p.numel() for p in decoder.layers[0].parameters()
    ), decoder.vocab * decoder.hidden_size


GEMM_FUNCTIONS = ("linear", "_linear_pointwise", "addmm")
"""Names of the functions that multiply activations by a weight matrix: torch's `linear`, oneDNN's
fused variant, and `addmm`, which GPT-2's layers call."""


class _Reading(TorchFunctionMode):
    """Count the weights of all linear layers that are called, and those of LM heads separately.

    A layer counts as an LM head if its output is wider than `widest`, the largest dimension of a
    weight in the target's layers.
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
        if getattr(func, "__name__", "").partition(".")[0] in GEMM_FUNCTIONS:
            rows = args[1] if func is torch.addmm else args[0]
            if made.shape[-1] > self.widest:
                self.heads += rows.shape[-1] * made.shape[-1]
            else:
                self.layers += rows.shape[-1] * made.shape[-1]
        return made


def _weight_reads(target: Target, drafter: Drafter[Any]) -> tuple[_Reading, _Reading, _Reading]:
    """Return the weights read by a draft step, by the commit of a root, and by postponed work.

    The draft step expands a child of the root. A drafter that proposes several depths in one step
    reads nothing there. In this case the step that expands the root is counted instead.
    """
    widest = max(max(p.shape) for p in target.decoder.layers[0].parameters())
    first, step, commit, later = (_Reading(widest) for _ in range(4))
    zero = np.zeros(1, np.int64)
    prompt = np.arange(PROMPT_TOKENS) % target.decoder.vocab
    cache = target.new_cache(1, 2 * PROMPT_TOKENS)
    state = drafter.flush(
        drafter.start([prompt], zero, target.prefill(cache, [prompt], drafter.needs).hidden_states)
    )
    root = Tree.from_roots(zero, zero)
    with first:
        candidates, state = drafter.expand(state, root, zero, CANDIDATES, Drawing())
    tree = append(root, zero, candidates)
    if len(tree) > 1:
        with step:
            _, state = drafter.expand(state, tree, np.array([1]), CANDIDATES, Drawing())
    hidden_states = target.verify(cache, root, drafter.needs, drafter.probes(state)).hidden_states
    nothing = AcceptResult((np.zeros(0, np.int64),), np.ones(1, np.int64))
    target.commit(cache, root, nothing)
    with commit:
        state = drafter.commit(state, root, nothing, hidden_states)
    with later:
        drafter.flush(state)
    return (step if step.layers or step.heads else first), commit, later
