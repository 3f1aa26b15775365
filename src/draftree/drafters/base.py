"""Base classes of drafters, which propose candidate tokens.

A method's file holds its options, a frozen dataclass derived from `Method`, and the `Drafter` that
they open. State is passed and returned, never stored on the drafter, so one drafter serves many
sequences.

Shapes: R slots, N nodes, F frontier nodes, K candidates, T tokens, D hidden size, V vocabulary, B
batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, final, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from draftree.errors import UserError, shown
from draftree.formats.checkpoint import (
    ABOUT,
    FILES,
    Checkpoint,
    embedding_hash,
    fingerprint,
    shipped,
)
from draftree.models.fused_modules import accelerate
from draftree.models.graph_capture import Capture, Weights
from draftree.models.kv_cache import SlotCache
from draftree.models.load_options import DTypeName
from draftree.sampling.draft_sampling import Drawing
from draftree.target.device_tree import Layers
from draftree.target.target import Needs, Probes, Taps, Target, named
from draftree.tree import Below, Candidates, Ints, Tree, Verdict
from draftree.utils.files import understood
from draftree.utils.validated_dataclass import Knobs, Part, knob, real, several

State = TypeVar("State")
T = TypeVar("T")


def set_knobs(knobs: Any) -> str:
    """Return a method's name with the options that differ from the defaults: `PLD(ngram=2)`."""
    own = [f for f in fields(knobs) if f.repr and f.name != "checkpoint"]
    changed = [
        f"{f.name}={shown(getattr(knobs, f.name))}"
        for f in own
        if getattr(knobs, f.name) != f.default
    ]
    return f"{type(knobs).__name__}({', '.join(changed)})" if changed else type(knobs).__name__


class Drafter(ABC, Generic[State]):
    """Proposes tokens after the nodes of a tree.

    Attributes:
        knobs: the options of its method, if it has any.
        ahead: how many layers of a tree one pass gives; with most drafters only the next one. See
            `passes`.
        expands_paths: whether nodes can be expanded in one pass together with nodes above them, and
            not only layer by layer.
        remembers: whether `carry` returns a state, so that drafts may depend on earlier calls.
        searches: whether it finds candidates in text, without a forward pass.
        sends_probes: whether `probes` returns extra tokens for a verification.
    """

    knobs: "Method | None" = None
    ahead: int = 1
    expands_paths: bool = False
    searches: bool = False
    remembers: bool = False
    sends_probes: bool = False

    @property
    def needs(self) -> Needs:
        """Return the target's internals that it reads; none by default."""
        return Needs()

    @property
    def replayable(self) -> bool:
        """Return True if a known text determines all that the drafter reads of the target.

        Rejected tokens must play no part in it.
        """
        return not (self.sends_probes or self.needs.top)

    @property
    def described(self) -> str:
        """Return a line that distinguishes drafters of different costs or training."""
        return repr(self.knobs) if self.knobs else type(self).__name__

    def __repr__(self) -> str:
        """Return the drafter's spec, without options that have their defaults."""
        described = self.described
        knobs: Any = self.knobs
        if knobs is not None:  # in short: without the options that have their defaults
            whole = repr(replace(knobs, checkpoint="") if "checkpoint" in vars(knobs) else knobs)
            described = described.replace(whole, set_knobs(knobs))
        return f"<drafter {described}>"

    @property
    def language_model(self) -> Target | None:
        """Return the drafter's model, if it is a language model with its own tokenizer."""
        return None

    @abstractmethod
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        taps: Taps,
        state: State | None = None,
        rows: Ints | None = None,
    ) -> State:
        """Return the state after some sequences begin a text; the others stay unchanged.

        Args:
            prompts: [R] committed token ids of each sequence; none for a free slot.
            roots: [R] the root of each.
            taps: hidden states of the prompt tokens that the target was fed: all tokens, or those
                after a reused prefix.
            state: the state after the last step, in which the sequences that begin are truncated to
                that prefix; or what `carry` returned.
            rows: [B] the sequences that begin; all by default.
        """

    @abstractmethod
    def expand(
        self, state: State, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, State]:
        """Return up to K candidates after each node of the frontier [F], and the new state.

        Missing candidates have log q = −∞; tokens are never made up.
        """

    def find(
        self, state: State, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates | None, State]:
        """Return the candidates of `expand` that need no forward pass (retrieval hits), or None.

        A node whose children are retrieval hits only has not been read by the model: nothing below
        it is expanded in this step.
        """
        return None, state

    def below(
        self, state: State, tree: Tree, frontier: Ints, k: int, drawing: Drawing, deepest: Ints
    ) -> tuple[Below | None, State]:
        """Return the retrieval hits of all layers below the frontier [F] at once.

        Return None if they are requested layer by layer.

        Args:
            state: see `find`.
            tree: see `find`.
            frontier: [F] see `find`.
            k: see `find`.
            drawing: see `find`.
            deepest: [R] the largest depth of a node of each sequence.
        """
        return None, state

    def passes(self, state: State, tree: Tree, frontier: Ints) -> int:
        """Return how many nodes a pass would be fed to `expand` the frontier [F]; all by default.

        A drafter that computed several layers in one pass returns 0 if nothing is left to compute.
        Such an expansion is no draft step and costs nothing, so that policies may request as many
        candidates as they like.
        """
        return len(frontier)

    def layers(self, state: State, roots: Tree, depth: Ints) -> Layers | None:
        """Return the passes of `expand` for nodes that only the device knows.

        Return None if the drafter does not support that.

        Args:
            state: the state before the step.
            roots: trees that consist of a root only.
            depth: [R] the largest depth of each sequence's tree; −1 for sequences without a root.
        """
        return None

    @abstractmethod
    def commit(self, state: State, tree: Tree, verdict: Verdict, taps: Taps) -> State:
        """Return the state after a verification.

        Args:
            state: the state before the step's draft was verified.
            tree: the verified tree.
            verdict: the accept result.
            taps: hidden states of root and accepted nodes, sequence by sequence, after the target's
                cache was compacted; `taps.top` covers all nodes.
        """

    def caught_up(self, state: State) -> State:
        """Run the work that `start` and `commit` postponed, and return the state.

        `expand` does it first. By default nothing is postponed. The network's pass over committed
        tokens waits until something is drafted, because one pass over the tokens of several steps
        takes no longer than a pass over the tokens of one step. So a step without a draft costs
        nothing, and neither does a prompt.
        """
        return state

    @abstractmethod
    def truncate(self, state: State, lengths: Ints, rows: Ints | None = None) -> State:
        """Return the state from when sequences had `lengths[r]` tokens; `start` goes on from it.

        Args:
            state: the state after the last step.
            lengths: [R] number of tokens of each sequence.
            rows: [B] the sequences to cut; all by default. The others are left unchanged.
        """

    def select(self, state: State, rows: Ints, cache: SlotCache) -> State | None:
        """Return the state with sequences in other slots, between two steps.

        Return None where that cannot be done, as by default. The texts are then read anew where a
        batch grows or shrinks.

        Args:
            state: the state after the last step.
            rows: [R'] the old slot of each new one; −1 for a free slot.
            cache: the target's KV cache with the new slots.
        """
        return None

    def carry(self, state: State) -> State | None:
        """Return the part of a finished call's state that later calls begin with; None by default.

        It does not depend on sequences: `start` is given it with any number of prompts. Whatever a
        drafter learns over a session passes through here, so that no sequence depends on others
        that run with it.
        """
        return None

    def probes(self, state: State) -> Probes | None:
        """Return the probes to compute in the next verification; none by default."""
        return None


def every(rows: Ints | None, count: int) -> Ints:
    """Return the slots that are given, or all R of them."""
    return np.arange(count) if rows is None else rows


def put(old: Sequence[T], rows: Ints | None, new: Sequence[T]) -> tuple[T, ...]:
    """Return a tuple [R] with new values for the given sequences and old ones for the others."""
    found = list(old)
    for row in every(rows, len(found)).tolist():
        found[row] = new[row]
    return tuple(found)


def picked(values: Sequence[T], rows: Ints, empty: T) -> tuple[T, ...]:
    """Return the values of selected sequences [R'], and `empty` where the index is −1."""
    return tuple(values[row] if row >= 0 else empty for row in rows.tolist())


class Method(Part, ABC):
    """Options of a method: its configuration, command-line spec and repr.

    Implementations are frozen dataclasses.

    Attributes:
        own_policy: a spec of the policy that it is published with, if draftree takes that one for
            it on a GPU.
    """

    own_policy: ClassVar[str | None] = None

    @abstractmethod
    def open(self, target: Target) -> Drafter[Any]:
        """Return the drafter for a target.

        Raises:
            UserError: the checkpoint is missing or does not fit the target.
        """

    @abstractmethod
    def example(self, target: Target) -> Drafter[Any]:
        """Return a small drafter that fits the target, for the conformance suite.

        Its weights are random, or it has none.
        """


@dataclass(frozen=True)
class Batch:
    """Text to train on, with the outputs of the frozen target.

    Attributes:
        tokens: [B, T] ids, padded at the end.
        learn: [B, T] whether the token is to be predicted (a response token, not padding, not the
            first).
        hidden: the hidden states of each layer needed, [B, T, D].
        kv: the keys and values that the target caches, for each layer needed, [B, H, T, width]
            each.
        target: returns the target's logits [M, V] after the tokens marked in a mask [B, T]; with
            ids [V′] it returns only their logits, [M, V′].
        generators: a generator for each sample, for random numbers of the objective. It depends on
            seed, step and sample only, so that a batch may be divided among processes.
        count: learnt tokens that the loss is divided by: those of the whole global batch, for each
            process. A process's own sum over this count, averaged over processes, is the mean over
            all tokens.
        shared: a generator for random numbers of a whole step. It depends on seed and step only, so
            that all parts of a batch draw the same numbers.
    """

    tokens: Tensor
    learn: Tensor
    hidden: dict[int, Tensor]
    kv: dict[int, tuple[Tensor, Tensor]]
    target: "Logits"
    generators: tuple[torch.Generator, ...]
    count: float
    shared: torch.Generator = field(default_factory=torch.Generator)


class Logits(Protocol):
    """The target's logits at marked positions."""

    def __call__(self, at: Tensor, ids: Tensor | None = None, /) -> Tensor:
        """Return logits after states, of some tokens or of all."""
        ...


class Trainable(Drafter[State]):
    """A drafter with weights.

    Args:
        knobs: the options of its method.
        model: its network.
        target: the target that it drafts for.
        stored: the checkpoint of its weights; for a new drafter, the initial content of its own.
    """

    knobs: "TrainableMethod"
    model: nn.Module

    def __init__(
        self, knobs: "TrainableMethod", model: nn.Module, target: Target, stored: Checkpoint
    ) -> None:
        self.knobs = knobs
        self.model = model.eval()
        self._target = target
        self._stored = stored

    @cached_property
    def capture(self) -> Capture:
        """Return how its passes over trees are recorded: as the target's are."""
        return self._target.decoder.capture.of(self.model)

    @cached_property
    def recorded_weights(self) -> Weights:
        """Return the weights that its passes read."""
        outer: Any = self._target.decoder.model
        return Weights(self.model, outer.get_input_embeddings(), outer.get_output_embeddings())

    def use_kernels(self, target: Target) -> None:
        """Run the network on the same kernels as the target; it cannot be trained after that."""
        accelerate(self.model, target.loading.kernels, bool(target.decoder.native_kinds))

    @property
    def _like(self) -> Tensor:
        """Return a weight of the network; the results have its dtype and device."""
        return next(self.model.parameters())

    @property
    @override
    def described(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        other = f" in {self.knobs.dtype}" if self.knobs.dtype else ""
        return f"{replace(self.knobs, checkpoint='')}, {size} parameters{other}"  # where its folder lies does not matter

    @property
    def decodes_otherwise(self) -> str:
        """Return why drafts in decoding may differ from the training forward, in words.

        By default they may not differ.
        """
        return ""

    def study(self, counts: Ints) -> None:
        """Read the data's token counts [V] (learnt tokens) before training; nothing by default."""

    def settle(self, texts: Sequence[Ints]) -> Mapping[str, Any]:
        """Choose values for the options that depend on a measurement of the target.

        This happens before training. By default there are no such options.

        Args:
            texts: token ids of the texts that it will learn from; the same texts give the same
                numbers.

        Returns:
            The options that were chosen, with their values. `knobs` do not change; a checkpoint
            stores the values.
        """
        return {}

    @abstractmethod
    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        """Return draft logits [B, T, V] after each token, as decoding would compute them.

        Decoding drafts in blocks of that length and phase.
        """

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Return the training objective of a batch.

        It is a sum over the learnt tokens of the batch, divided by `batch.count`.
        """

    @property
    def settled(self) -> "TrainableMethod":
        """Return the options with the numbers that `settle` measured.

        The checkpoint stores them.
        """
        return self.knobs

    @final
    def save(self, folder: Path) -> None:
        """Write a checkpoint: `config.json` and the weights.

        It has the layout in which weights of this kind are published.
        """
        made_for = {
            "target": self._target.name,
            "target_hash": fingerprint(self._target.decoder.config),
        }
        made_for["embedding_hash"] = embedding_hash(self._target)
        self.write(folder, {ABOUT: {"drafter": self.knobs.kind()} | made_for | self.settled.fixed})

    def write(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the result of `published`, with `about` added to the config."""
        tensors = {self._stored.name(key): value for key, value in self.model.state_dict().items()}
        config, tensors = self.published(self._stored.config, tensors)
        self._stored.write(folder, config | about, tensors)

    def published(
        self, config: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors as published checkpoints have them; by default unchanged.

        Args:
            config: of the checkpoint it comes from.
            tensors: the network's, under their names on disk.
        """
        return config, tensors


def _warms_up(value: Any) -> bool:
    return real(value) and value >= 0 and (value <= 1 or value % 1 == 0)


def _betas(value: Any) -> bool:
    return several(value, lambda beta: real(beta) and 0 <= beta < 1) and len(value) == 2


@dataclass(frozen=True)
class Recipe(Knobs):
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

    epochs: float = knob(1.0, above=0)
    batch_size: int = knob(8, least=1)
    lr: float = knob(1e-4, above=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    floor: float = knob(0.05, least=0, most=1)
    warmup: float = knob(0, rule=("a whole number of steps, or a share of all below 1", _warms_up))
    betas: tuple[float, float] = knob((0.9, 0.999), rule=("two numbers in [0, 1)", _betas))
    weight_decay: float = knob(0.01, least=0)
    clip: float = knob(1.0, above=0)
    clip_by: Literal["norm", "value"] = "norm"
    max_tokens: int = knob(512, least=2)


def plan_text(plan: Mapping[str, Any]) -> str:
    """Return the numbers of a training run, by the names of the options that set them."""
    return ", ".join(f"{k} {number_text(v)}" for k, v in plan.items() if v not in ("", None))


def number_text(value: Any) -> str:
    """Return a number, or several, as an option takes them."""
    if isinstance(value, tuple | list):
        return " ".join(map(number_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@final
@dataclass(frozen=True, kw_only=True)
class Stage(Recipe):
    """A stage of training with the numbers of the method's paper or of its official code.

    Attributes:
        name: the name by which the stage is chosen.
        data: what it learns from.
        loss: the default objective, in words.
        source: the source of the numbers.
        ours: names of the numbers that the source leaves open.
    """

    name: str = "training"
    data: str = "chats"
    loss: str
    source: str
    ours: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainableMethod(Method):
    """Options of a method that is trained.

    A checkpoint fixes all of them except its own path and those in `chosen`.

    Attributes:
        stages: how it is trained; each stage goes on from the weights of the one before.
        files: the possible names of its weights' files, draftree's own first.
        formats: the layouts of other programs in which `draftree export` writes it.
        chosen: names of the options that a checkpoint does not fix: they control how the weights
            are used.
        checkpoint: its folder; the shipped one by default, for the demo target.
        dtype: the dtype in which it drafts; the target's by default.
        named: the options that were set by name, even to their defaults; not an option itself.
    """

    stages: ClassVar[tuple[Stage, ...]]
    files: ClassVar[tuple[str, ...]] = FILES
    formats: ClassVar[tuple[str, ...]] = ()
    chosen: ClassVar[tuple[str, ...]] = ()

    checkpoint: str = ""
    dtype: DTypeName | None = field(default=None, kw_only=True, repr=False)
    named: frozenset[str] = field(default=frozenset(), kw_only=True, repr=False, compare=False)

    @classmethod
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        """Return whether a folder looks like a published checkpoint of this method.

        It is called for folders that do not name their method.

        Args:
            config: contents of its `config.json`.
            keys: the names of its tensors.
        """
        return False

    @property
    def fixed(self) -> dict[str, Any]:
        """Return the options that a checkpoint fixes."""
        left = ("checkpoint", "dtype", "named", *self.chosen)
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left}

    @final
    def open(self, target: Target) -> "Trainable[Any]":
        """Return the drafter of the checkpoint, with all options that were set.

        Raises:
            UserError: the checkpoint is missing, does not fit the target, or fixes an option to
                another value.
        """
        drafter, defaults = self.restored(target), {f.name: f.default for f in fields(self)}
        for key, fixed in drafter.knobs.fixed.items():
            asked = getattr(self, key)
            if asked != fixed and (asked != defaults[key] or key in self.named):
                told = f"{type(self).__name__.lower()}: {key} is {shown(asked)}, allowed is {shown(fixed)}"
                raise UserError(f"{told}: '{drafter.knobs.checkpoint}' fixes it")
        drafter.use_kernels(target)
        return drafter

    @final
    def restored(self, target: Target) -> "Trainable[Any]":
        """Return the drafter of the checkpoint.

        Options that the checkpoint fixes are taken from it.

        Raises:
            UserError: the checkpoint is missing or does not fit the target.
        """
        stored = Checkpoint.at(shipped(self.kind(), self.checkpoint, target))
        stored.check_method(self.kind())
        with understood(f"the drafter in '{stored.folder}' cannot be used"):
            hints = get_type_hints(type(self))
            fixed = stored.knobs({name: hints[name] for name in self.fixed})
            drafter = replace(self, checkpoint=str(stored.folder), **fixed).read(stored, target)
            _as_precise(drafter.model, named(self.dtype) or target.decoder.dtype)
            drafter.model.to(target.decoder.device)
        stored.check_target(target)
        return drafter

    @final
    def fresh(self, target: Target) -> "Trainable[Any]":
        """Return a drafter to be trained for a target, in float32.

        Raises:
            UserError: the target lacks something the method reads.
        """
        drafter = self.new(target)
        drafter.model.to(target.decoder.device)
        return drafter

    @final
    @override
    def example(self, target: Target) -> "Trainable[Any]":
        drafter = self.fresh(target)
        _as_precise(drafter.model, named(self.dtype) or target.decoder.dtype)
        return drafter

    @abstractmethod
    def read(self, stored: Checkpoint, target: Target) -> "Trainable[Any]":
        """Return the drafter that a checkpoint holds.

        It has these options where neither its weights nor a published config fix others.

        Args:
            stored: the checkpoint with its config; its tensors are not loaded yet.
            target: the target that it drafts for; the network is moved to its device and dtype
                later.

        Raises:
            UserError: the checkpoint is broken or does not fit the target.
        """

    @abstractmethod
    def new(self, target: Target) -> "Trainable[Any]":
        """Return a float32 drafter to be trained; it is brought to the target's device afterwards.

        Raises:
            UserError: the target lacks something the method reads.
        """


def _as_precise(model: nn.Module, dtype: torch.dtype) -> None:
    """Give weights a dtype; `to` would also round rotary frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
