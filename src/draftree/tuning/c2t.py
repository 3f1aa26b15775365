"""Training of C2T's classifier on the trees that a drafter grows while the target writes (C2T, appendix B).

The target writes greedily after every prompt; before each of its steps EAGLE-2's complete tree is
drafted, of which only the best nodes are verified. Of every node the joint probability, the entropy
of the distribution it was drawn from and the depth are kept, and the label is whether the whole
path to it is what the target went on to write.

Shapes: N nodes of a tree, n entries (nodes of many trees), X features.
"""

import itertools
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from draftree.drafters.base import Drafter
from draftree.errors import UserError
from draftree.evaluation.provenance import command
from draftree.policies.c2t import CONFIG, Classifier, scale_joint
from draftree.target.target import Target
from draftree.training.base import LOG, Fitted, items
from draftree.tree import Bools, Floats
from draftree.tuning._tree_dataset import (
    MIN_ADAM_STEPS,
    Collected,
    Knobs,
    Nodes,
    collect,
    prompt_requests,
    provenance,
)
from draftree.tuning.base import Tuning
from draftree.utils.files import fill_folder, lock_file_in, lock_output
from draftree.utils.progress_callback import Tell, ignore_progress
from draftree.utils.validated_dataclass import Knobs as Checked
from draftree.utils.validated_dataclass import knob

ROUND = 100
"""Number of optimiser steps between two measurements."""
PATIENCE, RISE = 20, 5e-4
"""Training ends if the held-out AUC rises by at most `RISE` in `PATIENCE` rounds."""
WORSE = 2e-3
"""A round is not selected if its AUC is below the best one by more than this."""
NEAR = 0.01
"""Rounds whose recall is below the best one by at most this are considered equal.

Among them the one with the lowest positive rate is selected.
"""
MEASURED = 4096
"""Number of nodes whose confidence is computed at a time.

Intermediate results then fit in the processor's cache.
"""
PLAN, TREES = "training.json", "trees"


@dataclass(frozen=True)
class Hyperparameters(Checked):
    """The hyperparameters of training (appendix B.2).

    Attributes:
        epochs: number of passes over the entries; more if they have fewer than `Knobs.steps` steps.
        batch_size: number of entries in a step.
        lr: learning rate of Adam.
        held_out: fraction of the texts that is held out for measurements.
        seed: seed of the initial weights, the split and the order of entries.
    """

    epochs: int = knob(10, least=1)
    batch_size: int = knob(1024, least=1)
    lr: float = knob(1e-3, above=0)
    held_out: float = knob(0.05, above=0, below=1)  # c2t selects a round by the held-out texts
    seed: int = knob(0, least=0, most=2**64 - 1)

    @classmethod
    def of(cls, given: Mapping[str, Any], tuned: bool = False) -> Self:
        """Return the given hyperparameters, completed by those of the paper.

        The paper's values are those of appendix B.2, or of B.4 if a classifier is fine-tuned
        (`tuned`).

        Raises:
            UserError: a value is out of its range.
        """
        numbers = {"lr": 1e-4 if tuned else cls.lr} | {
            f.name: given[f.name] for f in fields(cls) if f.name in given
        }
        if float(numbers.get("epochs", math.inf)).is_integer():
            numbers["epochs"] = int(numbers["epochs"])
        return cls(**numbers)


@dataclass(frozen=True)
class Round:
    """Store figures of the fit after some steps.

    All figures but the loss are taken over all nodes of the trees of the held-out texts.

    Attributes:
        step: number of steps so far.
        loss: mean binary cross-entropy of the training nodes since the round before.
        auc: area under the ROC curve, see `auc`.
        recall: fraction of the accepted nodes with a confidence of at least 0.5.
        positive_rate: θ, the fraction of all nodes with a confidence of at least 0.5.
    """

    step: int
    loss: float
    auc: float
    recall: float
    positive_rate: float

    @property
    def summary(self) -> str:
        """Return the figures as one line of text."""
        rates = f"recall {self.recall:.3f}, positive rate {self.positive_rate:.4f}"
        return f"loss {self.loss:.3f}, held out: AUC {self.auc:.4f}, {rates}"


def pick_round(rounds: Sequence[Round]) -> Round:
    """Return the round whose classifier is used (appendix B.2).

    Only rounds whose AUC is close to the best one are considered, because a net that has learnt
    nothing may accept every node and so have a recall of 1. Among these, the rounds whose recall is
    within one point of the best are compared. The one with the lowest positive rate is returned, or
    the first of several.
    """
    learnt = [r for r in rounds if r.auc >= max(r.auc for r in rounds) - WORSE]
    best = max(r.recall for r in learnt)
    return min(
        (r for r in learnt if r.recall >= best - NEAR), key=lambda r: (r.positive_rate, r.step)
    )


def is_auc_rising(rounds: Sequence[Round]) -> bool:
    """Return whether the held-out AUC still rises.

    It rises if the last `PATIENCE` rounds exceed the best earlier round by more than `RISE`.
    """
    before, last = rounds[:-PATIENCE], rounds[-PATIENCE:]
    return not before or max(r.auc for r in last) > max(r.auc for r in before) + RISE


def evaluate_classifier(net: Classifier, held: Nodes) -> tuple[float, float, float]:
    """Return AUC, and recall and positive rate at a confidence of 0.5, for held-out nodes."""
    log_p, parts = held.log_p, [slice(i, i + MEASURED) for i in range(0, len(held), MEASURED)]
    found = np.concatenate(
        [net.confidence(log_p[p], held.entropy[p], held.depth[p]) for p in parts]
    )
    return (
        auc(found, held.accepted),
        float((found >= 0.5)[held.accepted].mean()),
        float((found >= 0.5).mean()),
    )


def auc(confidence: Floats, accepted: Bools) -> float:
    """Return the area under the ROC curve of confidences.

    Of all pairs of an accepted and a rejected node, this is the fraction in which the accepted node
    has the higher confidence. Ties count half.

    Args:
        confidence: [n] the confidences.
        accepted: [n] the labels. If all labels are equal, there are no pairs, and the result is ½.
    """
    place = np.unique(confidence, return_inverse=True)[1]
    right, wrong = np.bincount(place, accepted), np.bincount(place, ~accepted)
    pairs = right.sum() * wrong.sum()
    return float(right @ (np.cumsum(wrong) - wrong / 2) / pairs) if pairs else 0.5


def learn(
    learnt: Nodes,
    held: Nodes,
    knobs: Knobs,
    plan: Hyperparameters,
    start: Classifier | None = None,
    tell: Tell = ignore_progress,
) -> tuple[Classifier, list[Round]]:
    """Train a classifier; return that of the selected round, and the figures of all rounds.

    Args:
        learnt: entries of the training texts; rejected nodes are sampled from them.
        held: all entries of the held-out texts.
        knobs: the options; they give features, size, M, negatives and steps.
        plan: the hyperparameters.
        start: the classifier to start from; random weights by default.
        tell: called with a line of text for each round.

    Raises:
        UserError: no node was accepted, or training diverged.
    """
    for name, nodes in (("to learn", learnt), ("held out", held)):
        if not nodes.accepted.any():
            raise UserError(
                f"of the {len(nodes)} drafted nodes {name} none was accepted; at least 1 is needed: use more data"
            )
    rng = np.random.default_rng([plan.seed, 1])
    sampled = learnt.sample_rejected(knobs.negatives, rng)
    read = {
        "P": scale_joint(sampled.log_p, knobs.log_joint),
        "H": sampled.entropy,
        "d": sampled.depth,
    }
    inputs = np.stack([read[name] for name in knobs.features.split("+")], axis=1)
    scale = mean, deviation = inputs.mean(0), np.maximum(inputs.std(0), 1e-6)
    x, y = (
        torch.from_numpy((inputs - mean) / deviation).float(),
        torch.from_numpy(sampled.accepted).float(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        net = nn.Sequential(
            nn.Linear(x.shape[1], knobs.hidden), nn.ReLU(), nn.Linear(knobs.hidden, 1)
        )
    if start is not None:
        _fill(net, start, scale)
    optimizer = torch.optim.Adam(net.parameters(), lr=plan.lr)
    batches, steps = _shuffled_batches(len(x), plan.batch_size, rng), last_step(len(x), knobs, plan)
    rounds, nets = list[Round](), list[Classifier]()
    for done in range(0, steps, ROUND):
        step = min(done + ROUND, steps)
        loss = _pass(net, optimizer, x, y, itertools.islice(batches, step - done))
        if not math.isfinite(loss):
            raise UserError(
                f"training diverged: the loss is {loss} after {step} steps; try a smaller lr"
            )
        nets.append(_numpy(net, knobs, scale))
        rounds.append(Round(step, loss, *evaluate_classifier(nets[-1], held)))
        tell(step, rounds[-1].summary, steps)
        if not is_auc_rising(rounds):
            break
    return nets[rounds.index(pick_round(rounds))], rounds


def last_step(entries: int, knobs: Knobs, plan: Hyperparameters) -> int:
    """Return the number of steps of a training that does not stop early.

    These are the steps of the plan's epochs, and at least `knobs.steps`.
    """
    return max(plan.epochs * math.ceil(entries / plan.batch_size), knobs.steps)


Scale = tuple[Floats, Floats]
"""Mean and standard deviation of each feature, [X] each.

A net learns faster from features of equal size. In the result the scaling is part of the first
layer: W (x − m) / s + b = (W / s) x + (b − (W / s) m).
"""


def _shuffled_batches(
    entries: int, batch_size: int, rng: np.random.Generator
) -> Iterator[torch.Tensor]:
    """Yield batches of entry numbers in random order, epoch by epoch, without end."""
    while True:
        yield from torch.from_numpy(rng.permutation(entries)).split(batch_size)


def _pass(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    batches: Iterable[torch.Tensor],
) -> float:
    """Run an optimiser step for each batch; return the mean loss over their entries."""
    total, entries = 0.0, 0
    for batch in batches:
        loss = nn.functional.binary_cross_entropy_with_logits(net(x[batch])[:, 0], y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, entries = total + float(loss.detach()) * len(batch), entries + len(batch)
    return total / entries


def _numpy(net: nn.Sequential, knobs: Knobs, scale: Scale) -> Classifier:
    first, bias, last, last_bias = (p.detach().double().numpy().copy() for p in net.parameters())
    first /= scale[1]
    read = knobs.features, knobs.entropy_top, knobs.log_joint
    return Classifier(first, bias - first @ scale[0], last[0], last_bias[0], *read)


def _fill(net: nn.Sequential, start: Classifier, scale: Scale) -> None:
    bias = start.hidden_bias + start.hidden_weight @ scale[0]
    given = start.hidden_weight * scale[1], bias, start.output_weight[None], start.output_bias[None]
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), given, strict=True):
            parameter.copy_(torch.from_numpy(value))


def summarise(
    texts: Sequence[Nodes],
    learnt: Nodes,
    knobs: Knobs,
    plan: Hyperparameters,
    rounds: Sequence[Round],
) -> Fitted:
    """Return the result of a run: its figures, and a text about the selected round and the ending.

    A run is complete if the held-out AUC has stopped rising, or if it had the paper's epochs and at
    least `MIN_ADAM_STEPS` steps.

    Args:
        texts: entries of each generated text.
        learnt: entries of the training texts, before rejected nodes are sampled.
        knobs: the options of the trees and the net.
        plan: the hyperparameters.
        rounds: the figures of all rounds.
    """
    best = pick_round(rounds)
    steps = rounds[-1].step
    entries = learnt.sampling(knobs.negatives)
    nodes = sum(map(len, texts))
    trees = sum(t.trees for t in texts)
    accepted = sum(int(t.accepted.sum()) for t in texts)
    usual = last_step(
        entries, replace(knobs, steps=MIN_ADAM_STEPS), replace(plan, epochs=Hyperparameters.epochs)
    )
    to_the_end = not is_auc_rising(rounds) or steps >= usual
    ending = f"not trained to the end: after {steps:,} steps held-out AUC may still rise"
    if to_the_end:
        still = "still rose" if is_auc_rising(rounds) else "rose no more"
        ending = f"trained to the end: {steps:,} steps, after which held-out AUC {still}"
    line = (
        f"step {best.step:,} of {steps:,}, {best.summary}; {entries:,} entries of {trees:,} trees ({accepted:,} of {nodes:,} "
        "nodes accepted)"
    )
    figures = {
        "policy": "c2t",
        "texts": len(texts),
        "trees": trees,
        "nodes": nodes,
        "accepted": accepted,
        "entries": entries,
        "rounds": [asdict(r) for r in rounds],
        "step": best.step,
        "to_the_end": to_the_end,
    }
    return Fitted(figures, [line, ending])


def split(texts: Sequence[Nodes], plan: Hyperparameters) -> tuple[Nodes, Nodes]:
    """Return the entries to learn from and the held-out entries.

    Whole texts are held out, because the trees of one text are similar.

    Raises:
        UserError: only one text has trees.
    """
    with_trees = [t for t in texts if len(t)]
    if len(with_trees) < 2:
        raise UserError(
            f"{len(with_trees)} texts have trees, at least 2 are needed: one to learn and one to measure on"
        )
    order = np.random.default_rng([plan.seed, 0]).permutation(len(with_trees)).tolist()
    count = min(len(order) - 1, math.ceil(plan.held_out * len(order)))
    held, learnt = (
        [with_trees[i] for i in sorted(part)] for part in (order[:count], order[count:])
    )
    return Nodes.concatenate(learnt), Nodes.concatenate(held)


@dataclass(frozen=True)
class Training(Tuning):
    """Trains the classifier that `c2t` prunes with, on the trees of a drafter.

    Attributes:
        drafter: the spec of the drafter that drafts the trees.
        knobs: the options of the trees and the net.
        plan: the hyperparameters of training.
        start: the classifier to start from; random weights by default.
        trees: the folder in which the trees are stored and kept. By default they are stored in the
            output folder until the run has ended.
    """

    options: ClassVar[frozenset[str]] = frozenset(
        {"drafter", "init_from", "features", *(f.name for f in fields(Hyperparameters))}
    )

    drafter: str
    knobs: Knobs = field(default_factory=Knobs)
    plan: Hyperparameters = field(default_factory=Hyperparameters)
    start: Classifier | None = None
    trees: Path | None = None

    @classmethod
    @override
    def of(cls, spec: str, knobs: Sequence[str], options: Mapping[str, Any]) -> Self:
        start = Classifier.load(options["init_from"]) if options.get("init_from") else None
        trees = Path(options["features"]) if options.get("features") else None
        return cls(
            options["drafter"],
            Knobs.read(items(spec, knobs), start),
            Hyperparameters.of(options, start is not None),
            start,
            trees,
        )

    @override
    def check(self, out: Path) -> None:
        if (out / CONFIG).is_file() and not (out / TREES).is_dir():  # they are removed last
            raise UserError(
                f"'{out}' holds a finished classifier: name another folder to train into"
            )

    @override
    def tune(
        self, target: Target, drafter: Drafter[Any], data: Sequence[Path], out: Path, tell: Tell
    ) -> Fitted:
        knobs, plan = self.knobs, self.plan
        requests, too_long = prompt_requests(target, data, knobs)
        if too_long:
            LOG.info("prompts left out, too long for the target's context: %d", too_long)
        kept = Collected(
            self.trees or out / TREES, provenance(target, drafter, self.drafter, requests, knobs)
        )
        kept.begin()
        with lock_output(kept.folder, lock_file_in(kept.folder)):
            texts = collect(target, drafter, requests, knobs, kept, tell)
        learnt, held = split(texts, plan)
        net, rounds = learn(learnt, held, knobs, plan, self.start, tell)
        end = summarise(texts, learnt, knobs, plan, rounds)
        figures = {k: v for k, v in end.figures.items() if k not in ("policy", "rounds")}
        said = {"target": target.name, "drafter": self.drafter, **figures}
        best = {
            name: getattr(pick_round(rounds), name) for name in ("auc", "recall", "positive_rate")
        }
        note = {
            "command": command(),
            **asdict(plan),
            **asdict(knobs),
            **said,
            "skipped_too_long": too_long,
            "data": kept.about["prompts"],
            "ending": end.lines[1],
            "history": end.figures["rounds"],
            "held_out_trees": held.trees,
        }
        with fill_folder(out, last=CONFIG) as folder:
            replace(net, trained_on=said | best).save(folder)
            (folder / PLAN).write_text(json.dumps(note, indent=1) + "\n")
        if self.trees is None:
            shutil.rmtree(kept.folder)
        return end
