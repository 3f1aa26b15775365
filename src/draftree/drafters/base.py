"""The contract of a drafter: what proposes tokens.

A method's file holds its knobs, a frozen dataclass derived from `Method`, and the `Drafter` they open. State is passed
and returned, never stored on the drafter, so one drafter serves many sequences.

Shapes: R rows, N nodes, F frontier nodes, K candidates, T tokens, D hidden size, V vocabulary, B batch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from draftree.boundary.files import understood
from draftree.errors import UserError, shown
from draftree.formats.checkpoint import check_method, check_target, shipped
from draftree.models.target import Needs, Probes, Taps, Target
from draftree.sampling.drawing import Drawing
from draftree.tree import Candidates, Ints, Tree, Verdict

State = TypeVar("State")
T = TypeVar("T")


class Drafter(ABC, Generic[State]):
    """What proposes tokens after the nodes of a tree."""

    @property
    def needs(self) -> Needs:
        """Which of the target's internals it reads; none by default."""
        return Needs()

    @property
    def described(self) -> str:
        """What it is, in a line: tells apart drafters that cost or learn differently."""
        return type(self).__name__

    @property
    def remembers(self) -> bool:
        """Whether `carry` leaves later texts something to draft by; nothing by default."""
        return False

    @property
    def expands_paths(self) -> bool:
        """Whether nodes can be expanded together with nodes above them, in one pass; layer by layer by default."""
        return False

    @abstractmethod
    def start(
        self, prompts: Sequence[Ints], roots: Ints, taps: Taps, state: State | None = None, rows: Ints | None = None
    ) -> State:
        """The state once rows begin a text; other rows go on as they are.

        Args:
            prompts: [R] each row's committed token ids; none in a row that is free.
            roots: [R] each row's root.
            taps: of the prompt tokens the target was fed: all, or those behind a reused prefix.
            state: after the last step, where the rows that begin are truncated to that prefix; or what `carry` left of it.
            rows: [B] those that begin; all by default.
        """

    @abstractmethod
    def expand(self, state: State, tree: Tree, frontier: Ints, k: int, drawing: Drawing) -> tuple[Candidates, State]:
        """Up to K candidates after each node of the frontier [F]; nothing found is −∞, never an invented token."""

    @abstractmethod
    def commit(self, state: State, tree: Tree, verdict: Verdict, taps: Taps) -> State:
        """The state after a verdict.

        Args:
            tree: the verified tree.
            verdict: what of it was accepted.
            taps: of root and accepted nodes, row by row, after the target's cache was compacted.
        """

    @abstractmethod
    def truncate(self, state: State, lengths: Ints, rows: Ints | None = None) -> State:
        """The state as it was when rows had `lengths[r]` committed tokens, to be gone on from with `start`.

        Args:
            state: after the last step.
            lengths: [R] of each row.
            rows: [B] those that are cut; all by default. The others are left as they are.
        """

    def carry(self, state: State) -> State | None:
        """What a finished call leaves for later ones with other texts; nothing by default.

        It knows no rows: `start` is given it as it is, with any number of prompts. Whatever a drafter learns over a session
        passes through here, so that while rows are written none of them depends on its neighbours.
        """
        return None

    def probes(self, state: State) -> Probes | None:
        """Rows that should ride along in the next verification; none by default."""
        return None


def every(rows: Ints | None, count: int) -> Ints:
    """The rows that are named, or all R of them."""
    return np.arange(count) if rows is None else rows


def put(old: Sequence[T], rows: Ints, new: Sequence[T]) -> tuple[T, ...]:
    """[R] a value for each row: new ones [R] in some rows, the old ones in the others."""
    found = list(old)
    for row in rows.tolist():
        found[row] = new[row]
    return tuple(found)


class Method(ABC):
    """A method's knobs: configuration, command-line spec and repr at once. Implementations are frozen dataclasses."""

    @abstractmethod
    def open(self, target: Target) -> Drafter[Any]:
        """The drafter for a target.

        Raises:
            UserError: the checkpoint is missing or does not fit the target.
        """

    @abstractmethod
    def example(self, target: Target) -> Drafter[Any]:
        """A small drafter of random or no weights that fits the target, for the conformance suite."""

    @classmethod
    def kind(cls) -> str:
        """The method's name."""
        return cls.__name__.lower()

    @classmethod
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        """Whether a folder that does not name its method holds a published checkpoint of this one.

        Args:
            config: what its `config.json` says.
            keys: the names of its tensors.
        """
        return False


@dataclass(frozen=True)
class Batch:
    """Text to train on, with what the frozen target says of it.

    Attributes:
        tokens: [B, T] ids, padded at the end.
        learn: [B, T] whether the token is one to be predicted (a response token, not padding, not the first).
        hidden: for each layer needed, [B, T, D].
        kv: for each layer needed, the keys and values the target caches, [B, H, T, width] each.
        target: the target's logits [M, V] after the tokens marked in a mask [B, T]; only those are computed.
        generators: one for each sample, for whatever the objective draws; it follows from the seed, the step and the
            sample alone, so that a batch may be cut among processes.
        count: learnt tokens that the loss is divided by: those of the whole global batch, for each process. A process's
            own sum over this count, averaged over processes, is the mean over all tokens.
        shared: a generator for what is drawn once for a whole step; it follows from the seed and the step alone, so that all
            the parts a batch is cut into draw the same.
    """

    tokens: Tensor
    learn: Tensor
    hidden: dict[int, Tensor]
    kv: dict[int, tuple[Tensor, Tensor]]
    target: Callable[[Tensor], Tensor]
    generators: tuple[torch.Generator, ...]
    count: float
    shared: torch.Generator = field(default_factory=torch.Generator)

    @property
    def logits(self) -> Tensor:
        """[B, T, V] the target's after every token."""
        whole: Tensor = self.target(torch.ones_like(self.learn))
        return whole.view(*self.tokens.shape, -1)


class Trainable(Drafter[State]):
    """A drafter with weights.

    Attributes:
        knobs: of its method.
        model: its weights.
    """

    knobs: "TrainableMethod"
    model: nn.Module

    @property
    def described(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        return f"{replace(self.knobs, checkpoint='')}, {size} parameters"  # where its folder lies does not matter

    def study(self, counts: Ints) -> None:
        """Takes what it has to know of the data before training: how often each token is learnt, [V]. Nothing by default."""

    def settle(self, texts: Sequence[Ints]) -> Mapping[str, Any]:
        """Puts numbers to the knobs that are left to a measurement of the target, before it is trained; none by default.

        Args:
            texts: those it will learn from, token ids of each; the same ones give the same numbers.

        Returns:
            The knobs that were settled; `knobs` stay as they were asked for, a checkpoint names the numbers.
        """
        return {}

    @abstractmethod
    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        """Draft logits [B, T, V] after each token, as decoding would give them in blocks of a length and phase."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The training objective of a batch: a sum over its learnt tokens, divided by `batch.count`."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes a checkpoint: `config.json` and weights, in the layout its kind of weights is published in."""


@dataclass(frozen=True)
class Recipe:
    """The numbers by which weights are learnt; the optimiser is AdamW.

    Attributes:
        epochs: passes over the data.
        batch_size: samples in a step, of all processes together.
        lr: the learning rate.
        schedule: of the rate: `constant`, or `cosine` or `linear` down to `floor`.
        floor: the share of the rate with which such a schedule ends.
        warmup: steps in which the rate rises linearly; below 1, their share of all steps.
        betas: by which AdamW's two moments decay.
        weight_decay: share of the rate by which AdamW shrinks weights.
        clip: bound of the gradient.
        clip_by: what is bounded: the `norm` of all weights' gradient, or each `value` of it.
        max_tokens: longest sample.

    Raises:
        UserError: one of them is not a number that can be used.
    """

    epochs: float = 1.0
    batch_size: int = 8
    lr: float = 1e-4
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    floor: float = 0.05
    warmup: float = 0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float = 1.0
    clip_by: Literal["norm", "value"] = "norm"
    max_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("epochs", "lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}, allowed is a finite number above 0")
        for name, low in {"batch_size": 1, "max_tokens": 2}.items():
            if getattr(self, name) < low:
                raise UserError(f"{name} is {getattr(self, name)}, allowed is a whole number of at least {low}")
        if not 0 <= self.warmup < math.inf or (self.warmup > 1 and self.warmup % 1):
            raise UserError(f"warmup is {self.warmup}, allowed is a whole number of steps, or a share of all below 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas is {' '.join(map(str, self.betas))}, allowed are two numbers in [0, 1)")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"weight_decay is {self.weight_decay}, allowed is a finite number of at least 0")
        if not 0 <= self.floor <= 1:
            raise UserError(f"floor is {self.floor}, allowed is a number in [0, 1]")
        for name, known in {"schedule": ("constant", "cosine", "linear"), "clip_by": ("norm", "value")}.items():
            if getattr(self, name) not in known:
                raise UserError(f"{name} is '{getattr(self, name)}', allowed are {', '.join(known)}")


@final
@dataclass(frozen=True, kw_only=True)
class Stage(Recipe):
    """How a method is trained where nothing else is asked for: as its paper says, or its official code.

    Attributes:
        name: of the stage, by which it is chosen.
        data: what it learns from.
        loss: the objective by default, in words.
        source: where the numbers stand.
        ours: names of the numbers that the source leaves open.
    """

    name: str = "training"
    data: str = "chats"
    loss: str
    source: str
    ours: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainableMethod(Method):
    """The knobs of a method that is trained.

    Attributes:
        stages: how it is trained; each stage goes on from the weights of the one before.
        checkpoint: its folder; the shipped one by default, for the demo target.
        given: the knobs that were set by name, be it to their defaults.
    """

    stages: ClassVar[tuple[Stage, ...]]

    checkpoint: str = ""
    given: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def of(cls, knobs: Mapping[str, Any]) -> Self:
        """The method with some knobs set, which remembers which they were."""
        method = cls(**knobs)
        object.__setattr__(method, "given", frozenset(knobs))
        return method

    @final
    def open(self, target: Target) -> "Trainable[Any]":
        """The drafter of the checkpoint; none of the knobs that were set is passed over.

        Raises:
            UserError: the checkpoint is missing, does not fit the target, or fixes a knob to another value.
        """
        drafter = self.restored(target)
        for knob in fields(self):
            asked, fixed = getattr(self, knob.name), getattr(drafter.knobs, knob.name)
            if knob.name != "checkpoint" and asked != fixed and (asked != knob.default or knob.name in self.given):
                name, where = type(self).__name__.lower(), drafter.knobs.checkpoint
                raise UserError(f"{name}: {knob.name} is {shown(asked)}, allowed is {shown(fixed)}: '{where}' fixes it")
        return drafter

    @final
    def restored(self, target: Target) -> Trainable[Any]:
        """The drafter of the checkpoint, its knobs what the checkpoint says where they are fixed by it.

        Raises:
            UserError: the checkpoint is missing or does not fit the target.
        """
        folder = shipped(self.kind(), self.checkpoint, target)
        check_method(folder, self.kind())
        with understood(f"the drafter in '{folder}' cannot be used"):
            drafter = self.read(folder, target)
        check_target(folder, target)
        return drafter

    @abstractmethod
    def read(self, folder: Path, target: Target) -> Trainable[Any]:
        """The drafter in a checkpoint folder.

        Raises:
            UserError: it is broken or does not fit the target.
        """

    @abstractmethod
    def fresh(self, target: Target) -> Trainable[Any]:
        """A drafter to be trained for a target.

        Raises:
            UserError: the target lacks something the method reads.
        """

    def example(self, target: Target) -> Drafter[Any]:
        drafter = self.fresh(target)
        drafter.model.to(target.decoder.dtype)
        return drafter

    @abstractmethod
    def resume(self, folder: Path, target: Target) -> Self:
        """These knobs with those a checkpoint folder fixes."""
