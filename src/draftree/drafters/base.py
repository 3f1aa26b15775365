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

from draftree.drafters.neural.native_drafter_layers import accelerate
from draftree.errors import UserError, format_value
from draftree.formats.checkpoint import (
    DRAFTREE_ENTRY,
    WEIGHT_FILES,
    Checkpoint,
    embedding_hash,
    fingerprint,
    resolve_checkpoint,
)
from draftree.models.graph_capture import Capture, Weights
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.device_tree import Layers
from draftree.target.load_options import DTypeName
from draftree.target.target import HiddenStates, HiddenStateSpec, Probes, Target, parse_dtype
from draftree.tree import AcceptResult, Candidates, Ints, SubtreeCandidates, Tree
from draftree.utils.files import as_user_error
from draftree.utils.validated_dataclass import Knobs, Part, is_finite, is_list_of, knob

State = TypeVar("State")
T = TypeVar("T")


def set_knobs(knobs: Any) -> str:
    """Return a method's name with those options that differ from their defaults: `PLD(ngram=2)`."""
    own = [f for f in fields(knobs) if f.repr and f.name != "checkpoint"]
    changed = [
        f"{f.name}={format_value(getattr(knobs, f.name))}"
        for f in own
        if getattr(knobs, f.name) != f.default
    ]
    return f"{type(knobs).__name__}({', '.join(changed)})" if changed else type(knobs).__name__


class Drafter(ABC, Generic[State]):
    """Proposes tokens after the nodes of a tree.

    Attributes:
        knobs: the options of the drafter's method, if it has any.
        ahead: number of tree layers that one pass computes; 1 for most drafters. See `passes`.
        expands_paths: whether one pass can expand nodes of different layers, a node and its
            ancestors included. If not, nodes are expanded layer by layer.
        remembers: whether `carry` returns a state, so that drafts may depend on earlier calls.
        searches: whether the drafter finds its candidates in text, without a forward pass.
        sends_probes: whether `probes` returns extra tokens for a verification.
    """

    knobs: "Method | None" = None
    ahead: int = 1
    expands_paths: bool = False
    searches: bool = False
    remembers: bool = False
    sends_probes: bool = False

    @property
    def needs(self) -> HiddenStateSpec:
        """Return the internals of the target that the drafter reads; by default none."""
        return HiddenStateSpec()

    @property
    def replayable(self) -> bool:
        """Return whether a known text determines everything that the drafter reads of the target.

        This is false if the drafter reads values that depend on rejected tokens.
        """
        return not (self.sends_probes or self.needs.top)

    @property
    def description(self) -> str:
        """Return a line of text that differs for drafters of different cost or training."""
        return repr(self.knobs) if self.knobs else type(self).__name__

    def __repr__(self) -> str:
        """Return the drafter's spec, without options that have their defaults."""
        described = self.description
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
        hidden_states: HiddenStates,
        state: State | None = None,
        rows: Ints | None = None,
    ) -> State:
        """Return the state after some sequences have begun a text; other sequences do not change.

        Args:
            prompts: [R] committed token ids of each sequence; empty for a free slot.
            roots: [R] token id of each sequence's root.
            hidden_states: the target's hidden states of the prompt tokens that the target has read:
                all tokens, or the tokens after a reused prefix.
            state: the state after the last step, in which the sequences that begin are truncated to
                the reused prefix; or the result of `carry`.
            rows: [B] the slots of the sequences that begin; by default all.
        """

    @abstractmethod
    def expand(
        self, state: State, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, State]:
        """Return up to K candidates after each node of the frontier [F], and the new state.

        Unused places have log q = −∞. A drafter never fills them with arbitrary tokens.
        """

    def find(
        self, state: State, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates | None, State]:
        """Return the candidates of `expand` that need no forward pass (retrieval hits), or None.

        The model does not read a node whose children are all retrieval hits. Therefore no node
        below it is expanded by the model in this step.
        """
        return None, state

    def below(
        self, state: State, tree: Tree, frontier: Ints, k: int, drawing: Drawing, deepest: Ints
    ) -> tuple[SubtreeCandidates | None, State]:
        """Return the retrieval hits of all layers below the frontier [F] at once.

        Return None if the drafter supports only requests for one layer at a time.

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
        """Return the number of nodes that the model must read to expand the frontier; by default F.

        A drafter that has computed several layers in one pass returns 0 if nothing is left to
        compute. Such an expansion is not counted as a draft step and costs nothing, so that
        policies may request any number of candidates.
        """
        return len(frontier)

    def layers(self, state: State, roots: Tree, depth: Ints) -> Layers | None:
        """Return the passes of `expand` for trees that are built on the device.

        Return None if the drafter does not support such trees.

        Args:
            state: the state before the step.
            roots: trees that consist of a root only.
            depth: [R] the largest depth of each sequence's tree; −1 for sequences without a root.
        """
        return None

    @abstractmethod
    def commit(
        self, state: State, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> State:
        """Return the state after a verification.

        Args:
            state: the state after drafting, before the verification.
            tree: the verified tree.
            verdict: the accept result.
            hidden_states: the target's hidden states of root and accepted nodes, sequence by
                sequence. The target's cache has already been compacted. `hidden_states.top` covers
                all nodes.
        """

    def flush(self, state: State) -> State:
        """Run the work that `start` and `commit` have postponed, and return the new state.

        `expand` calls this method first. By default no work is postponed. A drafter may postpone
        its pass over committed tokens until it drafts, because one pass over the tokens of several
        steps takes no longer than a pass over the tokens of one step. A prompt or a step without a
        draft then costs nothing.
        """
        return state

    @abstractmethod
    def truncate(self, state: State, lengths: Ints, rows: Ints | None = None) -> State:
        """Return the state cut back to the first `lengths[r]` tokens of each sequence r.

        `start` continues from that state.

        Args:
            state: the state after the last step.
            lengths: [R] number of tokens of each sequence.
            rows: [B] the slots of the sequences to cut; by default all. Other sequences do not
                change.
        """

    def select(self, state: State, rows: Ints, cache: SlotCache) -> State | None:
        """Return the state with the sequences moved to other slots, between two steps.

        Return None if the drafter cannot move them, which is the default. When the batch grows or
        shrinks, the texts are then read again.

        Args:
            state: the state after the last step.
            rows: [R'] the old slot of each new slot; −1 for a slot that is to be free.
            cache: the target's KV cache with the new slots.
        """
        return None

    def carry(self, state: State) -> State | None:
        """Return the part of a finished call's state that later calls begin with; by default None.

        It does not depend on sequences: `start` accepts it with any number of prompts. All that a
        drafter learns across calls is returned here, so that no sequence depends on the sequences
        that run with it.
        """
        return None

    def probes(self, state: State) -> Probes | None:
        """Return extra tokens for the next verification pass, or None (the default).

        They are computed, but never committed.
        """
        return None


def slots_or_all(rows: Ints | None, count: int) -> Ints:
    """Return the given slots `rows`, or all slots 0 … `count` − 1 if `rows` is None."""
    return np.arange(count) if rows is None else rows


def replace_slots(old: Sequence[T], rows: Ints | None, new: Sequence[T]) -> tuple[T, ...]:
    """Return a tuple [R] with new values for the given slots and old values for the others."""
    found = list(old)
    for row in slots_or_all(rows, len(found)).tolist():
        found[row] = new[row]
    return tuple(found)


def select_slots(values: Sequence[T], rows: Ints, empty: T) -> tuple[T, ...]:
    """Return a tuple with the value of each slot in `rows`, and `empty` where `rows` is −1."""
    return tuple(values[row] if row >= 0 else empty for row in rows.tolist())


class Method(Part, ABC):
    """Options of a method: its configuration, command-line spec and repr.

    Implementations are frozen dataclasses.

    Attributes:
        own_policy: the spec of the policy with which the method was published, if draftree uses
            that policy by default on a GPU.
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

        The drafter has random weights, or no weights.
        """


@dataclass(frozen=True)
class Batch:
    """Texts to train on, with the outputs of the frozen target.

    Attributes:
        tokens: [B, T] ids, padded at the end.
        learn: [B, T] whether the token is a training label (a response token that is neither
            padding nor the first token).
        hidden: the target's hidden states [B, T, D], keyed by layer.
        kv: the target's cached keys and values, [B, H, T, width] each, keyed by layer.
        target: returns the target's logits [M, V] after the M tokens that are marked in a mask [B,
            T]. With ids [V′] it returns only the logits of these ids, [M, V′].
        generators: [B] a random generator for each sample, for draws in the objective. It depends
            only on seed, step and sample, so that a batch may be divided among processes.
        count: number of labels by which the loss is divided. It is the same in each process: the
            number in the global batch, divided by the number of processes. The mean of the
            processes' losses is then the mean over all labels.
        shared: a random generator for draws that all samples of a step share. It depends only on
            seed and step, so that all processes draw the same numbers.
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
    """A function that returns the target's logits at marked positions."""

    def __call__(self, at: Tensor, ids: Tensor | None = None, /) -> Tensor:
        """Return the target's logits [M, V] after M marked tokens of a batch.

        Args:
            at: [B, T] marks the M tokens.
            ids: [V′] token ids; if given, only their logits are returned, [M, V′].
        """
        ...


class Trainable(Drafter[State]):
    """A drafter with weights.

    Args:
        knobs: the options of the drafter's method.
        model: the draft network.
        target: the target for which tokens are drafted.
        stored: the checkpoint of the weights; for a new drafter, the initial content of the
            checkpoint that will be saved.
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
        """Return how the drafter's passes are captured as CUDA graphs; the target decides it."""
        return self._target.decoder.capture.of(self.model)

    @cached_property
    def recorded_weights(self) -> Weights:
        """Return the weights that captured passes read.

        They include the target's embedding and head.
        """
        outer: Any = self._target.decoder.model
        return Weights(self.model, outer.get_input_embeddings(), outer.get_output_embeddings())

    def use_kernels(self, target: Target) -> None:
        """Run the network on the same kernels as the target; it cannot be trained afterwards."""
        accelerate(self.model, target.loading.kernels, bool(target.decoder.native_kinds))

    @property
    def _like(self) -> Tensor:
        """Return a weight of the network, whose dtype and device new tensors shall have."""
        return next(self.model.parameters())

    @property
    @override
    def description(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        other = f" in {self.knobs.dtype}" if self.knobs.dtype else ""
        return f"{replace(self.knobs, checkpoint='')}, {size} parameters{other}"  # without its path

    @property
    def decodes_otherwise(self) -> str:
        """Return why drafting may give other results than the forward pass in training.

        The text is empty if the results are always the same, which is the default.
        """
        return ""

    def fit_vocabulary(self, counts: Ints) -> None:
        """Read the number of occurrences [V] of each token as a label, before training.

        By default nothing is done.
        """

    def resolve_auto(self, texts: Sequence[Ints]) -> Mapping[str, Any]:
        """Choose the values of options that depend on a measurement of the target.

        It runs before training. By default there are no such options.

        Args:
            texts: token ids of training texts; the same texts give the same values.

        Returns:
            The chosen options with their values. `knobs` does not change; the checkpoint stores the
            values.
        """
        return {}

    @abstractmethod
    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        """Return draft logits [B, T, V] after each token, equal to those computed in decoding.

        Args:
            batch: the texts.
            block: number of tokens that are drafted in one block.
            phase: index that the first token of a text has within its block, 0 … block − 1.
        """

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Return the training objective of a batch.

        It is the sum over the labels of the batch, divided by `batch.count`.
        """

    @property
    def resolved_knobs(self) -> "TrainableMethod":
        """Return the options, with the values that `resolve_auto` has chosen.

        The checkpoint stores them.
        """
        return self.knobs

    @final
    def save(self, folder: Path) -> None:
        """Write a checkpoint: `config.json` and the weights.

        The checkpoint has the layout in which weights of this method are published.
        """
        made_for = {
            "target": self._target.name,
            "target_hash": fingerprint(self._target.decoder.config),
        }
        made_for["embedding_hash"] = embedding_hash(self._target)
        self.write(
            folder,
            {
                DRAFTREE_ENTRY: {"drafter": self.knobs.kind()}
                | made_for
                | self.resolved_knobs.checkpoint_options
            },
        )

    def write(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the result of `to_published_layout`, with `about` added to the config."""
        tensors = {self._stored.name(key): value for key, value in self.model.state_dict().items()}
        config, tensors = self.to_published_layout(self._stored.config, tensors)
        self._stored.write(folder, config | about, tensors)

    def to_published_layout(
        self, config: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors in the form of published checkpoints; by default unchanged.

        Args:
            config: the config of the checkpoint that the weights were loaded from.
            tensors: the network's tensors, under their names in the checkpoint.
        """
        return config, tensors


def _is_warmup(value: Any) -> bool:
    return is_finite(value) and value >= 0 and (value <= 1 or value % 1 == 0)


def _betas(value: Any) -> bool:
    return is_list_of(value, lambda beta: is_finite(beta) and 0 <= beta < 1) and len(value) == 2


@dataclass(frozen=True)
class Recipe(Knobs):
    """The hyperparameters of training; the optimiser is AdamW.

    Attributes:
        epochs: number of passes over the data.
        batch_size: number of samples in a step, over all processes together.
        lr: the peak learning rate.
        schedule: the course of the learning rate: `constant`, or a `cosine` or `linear` decay to
            `floor`.
        floor: the final learning rate of a decay, as a fraction of `lr`.
        warmup: number of steps in which the learning rate rises linearly; below 1, a fraction of
            all steps.
        betas: decay rates of AdamW's two moments.
        weight_decay: weight decay of AdamW, which is multiplied by the learning rate.
        clip: bound of the gradient.
        clip_by: the bounded quantity: the `norm` of the whole gradient, or the absolute `value` of
            each entry.
        max_tokens: length in tokens at which samples are cut.

    Raises:
        UserError: a value is not allowed.
    """

    epochs: float = knob(1.0, above=0)
    batch_size: int = knob(8, least=1)
    lr: float = knob(1e-4, above=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    floor: float = knob(0.05, least=0, most=1)
    warmup: float = knob(0, rule=("a whole number of steps, or a share of all below 1", _is_warmup))
    betas: tuple[float, float] = knob((0.9, 0.999), rule=("two numbers in [0, 1)", _betas))
    weight_decay: float = knob(0.01, least=0)
    clip: float = knob(1.0, above=0)
    clip_by: Literal["norm", "value"] = "norm"
    max_tokens: int = knob(512, least=2)


def plan_text(plan: Mapping[str, Any]) -> str:
    """Return the numbers of a training run as text, under the names of their options."""
    return ", ".join(f"{k} {number_text(v)}" for k, v in plan.items() if v not in ("", None))


def number_text(value: Any) -> str:
    """Return one or several numbers in the form in which an option accepts them."""
    if isinstance(value, tuple | list):
        return " ".join(map(number_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@final
@dataclass(frozen=True, kw_only=True)
class Stage(Recipe):
    """A stage of training with the numbers of the method's paper or of its official code.

    Attributes:
        name: the name by which the stage is chosen.
        data: the kind of training data: `chats` or `text`.
        loss: a description of the default objective.
        source: the place in the paper or code that gives the numbers.
        ours: names of the numbers that the source does not give, chosen by draftree.
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
        stages: the stages of training; each stage continues from the weights of the stage before.
        files: the possible names of the files with weights, draftree's own name first.
        formats: the layouts of other programs that `draftree export` can write.
        chosen: names of the options that a checkpoint does not fix: they control how the weights
            are used.
        checkpoint: the folder of the checkpoint; by default the shipped one, for the demo target.
        dtype: the dtype of the draft network; by default that of the target.
        named: names of the options that the user set, even to their defaults; not an option itself.
    """

    stages: ClassVar[tuple[Stage, ...]]
    files: ClassVar[tuple[str, ...]] = WEIGHT_FILES
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
            config: contents of the folder's `config.json`.
            keys: the names of the checkpoint's tensors.
        """
        return False

    @property
    def checkpoint_options(self) -> dict[str, Any]:
        """Return the options that a checkpoint fixes, with their values."""
        left = ("checkpoint", "dtype", "named", *self.chosen)
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left}

    @final
    def open(self, target: Target) -> "Trainable[Any]":
        """Return the drafter that the checkpoint contains, with the options that the user set.

        Raises:
            UserError: the checkpoint is missing, does not fit the target, or fixes an option to
                another value.
        """
        drafter, defaults = self.load_drafter(target), {f.name: f.default for f in fields(self)}
        for key, fixed in drafter.knobs.checkpoint_options.items():
            asked = getattr(self, key)
            if asked != fixed and (asked != defaults[key] or key in self.named):
                told = f"{type(self).__name__.lower()}: {key} is {format_value(asked)}, allowed is {format_value(fixed)}"
                raise UserError(f"{told}: '{drafter.knobs.checkpoint}' fixes it")
        drafter.use_kernels(target)
        return drafter

    @final
    def load_drafter(self, target: Target) -> "Trainable[Any]":
        """Return the drafter that the checkpoint contains.

        Options that the checkpoint fixes are taken from it, even if the user set others.

        Raises:
            UserError: the checkpoint is missing or does not fit the target.
        """
        stored = Checkpoint.at(resolve_checkpoint(self.kind(), self.checkpoint, target))
        stored.check_method(self.kind())
        with as_user_error(f"the drafter in '{stored.folder}' cannot be used"):
            hints = get_type_hints(type(self))
            fixed = stored.knobs({name: hints[name] for name in self.checkpoint_options})
            drafter = replace(self, checkpoint=str(stored.folder), **fixed).read(stored, target)
            _as_precise(drafter.model, parse_dtype(self.dtype) or target.decoder.dtype)
            drafter.model.to(target.decoder.device)
        stored.check_target(target)
        return drafter

    @final
    def fresh(self, target: Target) -> "Trainable[Any]":
        """Return a new drafter for training, in float32 and on the target's device.

        Raises:
            UserError: the target lacks something that the method reads.
        """
        drafter = self.new(target)
        drafter.model.to(target.decoder.device)
        return drafter

    @final
    @override
    def example(self, target: Target) -> "Trainable[Any]":
        drafter = self.fresh(target)
        _as_precise(drafter.model, parse_dtype(self.dtype) or target.decoder.dtype)
        return drafter

    @abstractmethod
    def read(self, stored: Checkpoint, target: Target) -> "Trainable[Any]":
        """Build the drafter from the weights of a checkpoint.

        These options apply where neither the weights nor a published config fix other values.

        Args:
            stored: the checkpoint with its config; its tensors are not loaded yet.
            target: the target for which tokens are drafted. The network is moved to its device and
                dtype later.

        Raises:
            UserError: the checkpoint is broken or does not fit the target.
        """

    @abstractmethod
    def new(self, target: Target) -> "Trainable[Any]":
        """Return a new float32 drafter for training; the caller moves it to the target's device.

        Raises:
            UserError: the target lacks something that the method reads.
        """


def _as_precise(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters to a dtype; `to` would also round the rotary frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
