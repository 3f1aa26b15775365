"""Training of C2T's classifier on the trees that a drafter grows while the target writes (C2T, appendix B).

The target writes greedily behind every prompt; before each of its steps EAGLE-2's complete tree is drafted, of which only
the best nodes are verified. Of every node the joint probability, the entropy of the distribution it was drawn from and the
depth are kept, and the label is whether the whole path to it is what the target went on to write.

Shapes: N nodes of a tree, n entries (nodes of many trees), X features.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from draftree.boundary.files import read_object, understood, whole, write_text
from draftree.boundary.knobs import check, knob, parsed
from draftree.costs import Costs
from draftree.data.prompts import encode
from draftree.data.rows import rows
from draftree.drafters.base import Drafter
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.evaluation.suites import content
from draftree.models.target import Target
from draftree.policies.base import Expand, Policy, fit
from draftree.policies.c2t import LEAST, Classifier, check_features, scaled
from draftree.policies.eagle2 import EAGLE2
from draftree.request import Emitted, Request
from draftree.tree import ENTROPY_TOP, Bools, Candidates, Floats, Ints, Room, Tree

VERIFIED = 60
"""Nodes of each complete tree that the target verifies; they only decide how fast it writes."""
STEPS = 4000
"""Adam steps at least: ten epochs may be a few hundred, and small nets are far from trained then."""
ROUND = 100
"""Steps between two measurements."""
PATIENCE, RISE = 20, 5e-4
"""Held-out AUC has stopped rising where so many rounds together brought no more."""
WORSE = 2e-3
"""Rounds whose AUC is lower than the best by more are not picked: their net tells less."""
NEAR = 0.01
"""Rounds whose recall is lower than the best by no more are alike; of those the least positive rate is picked."""
MEASURED = 4096
"""Nodes whose confidence is computed at a time, so that what is in between stays in the processor's cache."""
ABOUT, PLAN = "about.json", "training.json"


@dataclass(frozen=True)
class Knobs:
    """What `--set` sets.

    Attributes:
        features: P+H+d, P+H, P+d, H+d or P: joint probability, entropy, depth (table 1).
        log_joint: whether the net reads log P, which is ours and learns in a fifth of the steps, or P.
        hidden: units of the hidden layer (appendix B.3).
        entropy_top: M, how many of the likeliest tokens an entropy is taken over (table 6).
        depth: layers of the trees (11 in appendix B.1).
        width: candidates of a node and nodes expanded in a layer (10 in appendix B.1).
        tokens: the longest text behind a prompt.
        trees: so many trees are grown (8,880 in appendix B.1), if the texts have as many steps; 0 for as many as they have.
        positives: trees are grown beyond that until so many of their nodes are accepted (the paper's have 3.5 a tree).
        negatives: rejected nodes learnt for each accepted one, drawn once; all accepted ones are learnt. The paper samples
            negatives, too, and does not say how many: 3 is ours, and what a confidence means follows from it, see `C2T`.
        steps: Adam steps at least, however few the epochs come to; fewer if held-out AUC has stopped rising before: with
            log P it does within 4,000, with P within some 17,000.
        share: of the prompts that are used; by default all, and 0.1 for fine-tuning (appendix B.4).
    """

    features: str = "P+H+d"
    log_joint: bool = False
    hidden: int = knob(48, least=1)
    entropy_top: int = knob(ENTROPY_TOP, least=1)
    depth: int = knob(11, least=1)
    width: int = knob(10, least=1)
    tokens: int = knob(128, least=2)
    trees: int = knob(8880, least=0)
    positives: int = knob(31080, least=0)
    negatives: float = knob(3.0, above=0)
    steps: int = knob(5 * STEPS, least=1)
    share: float = knob(1.0, above=0, most=1)

    def __post_init__(self) -> None:
        check(self, "c2t: ")
        check_features(self.features)

    @classmethod
    def read(cls, items: Sequence[str], start: Classifier | None) -> Self:
        """The knobs set as key=value; the others are the paper's, or those of the classifier that is gone on with.

        Raises:
            UserError: a key or value is not allowed, or is another than that classifier's.
        """
        given = parsed(items, cls, "c2t's training")
        if start is None:
            return cls(**given)
        own: dict[str, Any] = {"features": start.features, "log_joint": start.log_joint, "hidden": len(start.hidden_bias),
                               "entropy_top": start.entropy_top}  # fmt: skip
        for key in own.keys() & given.keys():
            if given[key] != own[key]:
                raise UserError(f"c2t: {key} is {given[key]}, allowed is {own[key]}: the classifier begun with has it")
        usual: dict[str, Any] = {"share": 0.1}
        return cls(**usual | own | given)


@dataclass(frozen=True)
class Plan:
    """How it is learnt (appendix B.2).

    Attributes:
        epochs: passes over the entries; more where they come to fewer than `Knobs.steps`.
        batch_size: entries in a step.
        lr: learning rate of Adam.
        held_out: share of the texts that is measured on.
        seed: of the first weights, the split and the order.
    """

    epochs: int = knob(10, least=1)
    batch_size: int = knob(1024, least=1)
    lr: float = knob(1e-3, above=0)
    held_out: float = knob(0.05, above=0, below=1)  # c2t picks by what is held out
    seed: int = knob(0, least=0, most=2**64 - 1)

    def __post_init__(self) -> None:
        check(self)


# Trees and labels.


@dataclass(frozen=True)
class Nodes:
    """Entries of the data set, tree by tree, roots not among them.

    Attributes:
        joint: [n] P, the product of q along the path.
        entropy: [n] H in nats.
        depth: [n] d, 1 behind the root.
        accepted: [n] the label.
        tree: [n] a tree's number.
    """

    joint: Floats
    entropy: Floats
    depth: Floats
    accepted: Bools
    tree: Ints

    def __len__(self) -> int:
        return len(self.joint)

    @property
    def log_p(self) -> Floats:
        """[n] log P."""
        return np.log(np.maximum(self.joint, np.exp(LEAST)))

    @property
    def trees(self) -> int:
        """How many there are."""
        return len(np.unique(self.tree))

    def take(self, which: Ints | Bools) -> "Nodes":
        """Some entries."""
        return Nodes(*(getattr(self, f.name)[which] for f in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence["Nodes"]) -> "Nodes":
        """Those of several texts; trees are numbered on."""
        first = np.cumsum([0, *(part.trees for part in parts)])
        numbered = [replace(part, tree=part.tree + n) for part, n in zip(parts, first, strict=False)]
        return cls(*(np.concatenate([getattr(part, f.name) for part in numbered]) for f in fields(cls)))

    def sampled(self, negatives: float, rng: np.random.Generator) -> "Nodes":
        """All accepted nodes, and for each of them `negatives` others."""
        wrong = np.flatnonzero(~self.accepted)
        count = min(len(wrong), round(negatives * int(self.accepted.sum())))
        return self.take(np.sort(np.concatenate((np.flatnonzero(self.accepted), rng.choice(wrong, count, replace=False)))))


def labels(tree: Tree, text: Sequence[int]) -> Bools:
    """[N] whether a node's whole path is what was written.

    Args:
        tree: of one row.
        text: what the target wrote behind its root; nodes beyond its end are not accepted.
    """
    right: Bools = tree.depth == 0
    for depth, token in enumerate(text[: int(tree.depth.max())], 1):
        layer = np.flatnonzero(tree.depth == depth)
        right[layer] = right[tree.parents[layer]] & (tree.tokens[layer] == token)
    return right


class Recorder(Policy):
    """Drafts EAGLE-2's complete trees of one row, keeps them, and lets the best nodes of each be verified.

    Args:
        knobs: depth and width.
        tops: each M that entropies are taken for; that of the knobs by default.
    """

    def __init__(self, knobs: Knobs, tops: Sequence[int] = ()) -> None:
        self._complete = knobs.width + (knobs.depth - 1) * knobs.width**2
        self._grown = EAGLE2(self._complete, knobs.depth, knobs.width)
        self._tops = tops or (knobs.entropy_top,)
        self.written: list[int] = []
        self.drafts: list[tuple[int, Tree, Floats]] = []

    def tell(self, events: Sequence[Emitted]) -> None:
        """Takes down what was written."""
        for event in events:
            self.written += event.tokens

    def draft(self, expand: Expand, tree: Tree, costs: Costs, room: Room, memory: Any) -> Tree:
        assert tree.roots == 1
        after = np.zeros((len(self._tops), 1 + self._complete))  # the entropy of the distribution behind each node

        def listened(tree: Tree, frontier: Ints, k: int) -> Candidates:
            found = expand(tree, frontier, k)
            after[:, frontier] = [found.entropy(top) for top in self._tops]
            return found

        whole = self._grown.draft(listened, tree, costs, Room(room.depth, self._complete), memory)
        self.drafts.append((len(self.written), whole, after[:, whole.parents]))
        return fit(whole, min(VERIFIED, room.nodes))

    def nodes(self, top: int = 0) -> Nodes:
        """The entries of all trees drafted so far; a tree's depth has room for no more than what was still written.

        Args:
            top: which M's entropy they have, by its place.
        """
        parts = [NONE]
        for at, tree, entropy in self.drafts:
            assert tree.tokens[0] == self.written[at - 1]
            joint, depth, right = np.exp(tree.score), tree.depth.astype(np.float64), labels(tree, self.written[at:])
            parts.append(Nodes(joint[1:], entropy[top, 1:], depth[1:], right[1:], np.zeros(tree.drafted, np.int64)))
        return Nodes.joined(parts)


NONE = Nodes(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.bool_), np.zeros(0, np.int64))


@dataclass(frozen=True)
class Collected:
    """The entries of each text in a folder, so that an interrupted run goes on behind the last one.

    Attributes:
        folder: of them.
        about: what they depend on.
    """

    folder: Path
    about: Mapping[str, Any]

    def begin(self) -> None:
        """Makes the folder.

        Raises:
            UserError: it holds those of other trees.
        """
        path = self.folder / ABOUT
        if path.is_file():
            before = read_object(path, "a note of the trees beside it (without it they are grown anew)")
            if different := [name for name, value in self.about.items() if before.get(name) != value]:
                was = ", ".join(f"{name}={before.get(name)}" for name in different)
                raise UserError(f"'{self.folder}' holds trees with {was}: go on with the same, or use another folder")
            return
        write_text(path, json.dumps(dict(self.about), indent=1) + "\n")

    def __getitem__(self, text: int) -> Nodes | None:
        path = self._path(text)
        if not path.is_file():
            return None
        told = f"'{path}' does not hold a text's trees (without it they are grown anew)"
        with understood(told), path.open("rb") as file, np.load(file) as found:
            return Nodes(*(found[f.name].astype(getattr(NONE, f.name).dtype) for f in fields(Nodes)))

    def __setitem__(self, text: int, nodes: Nodes) -> None:
        narrow = {"joint": np.float32, "entropy": np.float32, "depth": np.int16, "accepted": np.bool_, "tree": np.int32}
        with whole(self._path(text)) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **{name: getattr(nodes, name).astype(kind) for name, kind in narrow.items()})

    def _path(self, text: int) -> Path:
        return self.folder / f"{text:06}.npz"


def grown(target: Target, drafter: Drafter[Any], request: Request, knobs: Knobs, tops: Sequence[int] = ()) -> list[Nodes]:
    """The entries of one text, for each M of `tops`, or for that of the knobs."""
    recorder = Recorder(knobs, tops)
    Engine(target, drafter, recorder).write([request], on_tokens=recorder.tell)
    return [recorder.nodes(i) for i in range(len(tops or (knobs.entropy_top,)))]


def collect(
    target: Target,
    drafter: Drafter[Any],
    requests: Sequence[Request],
    knobs: Knobs,
    kept: Collected,
    listen: Callable[[int, int], None] = lambda *_: None,
) -> list[Nodes]:
    """The entries of each text, as far as `knobs.trees` and `knobs.positives` reach; those already kept are not grown again.

    Args:
        target: writes.
        drafter: grows the trees.
        requests: one for each text.
        knobs: of the trees.
        kept: where they are kept.
        listen: told how many texts are done, and how many trees there are.
    """
    found: list[Nodes] = []
    trees = positives = 0
    for number, request in enumerate(requests):
        left = knobs.trees - trees if knobs.trees and positives >= knobs.positives else math.inf
        if left <= 0:
            break
        nodes = kept[number]
        if nodes is None:
            [kept[number]] = grown(target, drafter, request, knobs)
            nodes = kept[number]  # in the precision in which it is kept
            assert nodes is not None
        found.append(nodes.take(nodes.tree < left))
        trees += found[-1].trees
        positives += int(found[-1].accepted.sum())
        listen(number + 1, trees)
    return found


# Learning.


@dataclass(frozen=True)
class Round:
    """What some steps came to on the texts held out, every node of their trees counted.

    Attributes:
        step: how many steps were made.
        loss: mean binary cross-entropy of what was learnt since the round before.
        auc: how often an accepted node's confidence is above a rejected one's.
        recall: of the accepted nodes, the share with a confidence of at least 0.5.
        positive_rate: θ, of all nodes the share with such a confidence.
    """

    step: int
    loss: float
    auc: float
    recall: float
    positive_rate: float


def picked(rounds: Sequence[Round]) -> Round:
    """The round whose classifier is kept: by recall, then by positive rate (appendix B.2), of those that tell the most.

    Among the rounds of nearly the best AUC (a net that has learnt nothing yet may accept everything, at a recall of 1) those
    whose recall is within one point of the best, and of these the one of the least positive rate, the first of equals.
    """
    learnt = [r for r in rounds if r.auc >= max(r.auc for r in rounds) - WORSE]
    best = max(r.recall for r in learnt)
    return min((r for r in learnt if r.recall >= best - NEAR), key=lambda r: (r.positive_rate, r.step))


def rises(rounds: Sequence[Round]) -> bool:
    """Whether held-out AUC still rises: the last `PATIENCE` rounds brought more than `RISE` over all before."""
    before, last = rounds[:-PATIENCE], rounds[-PATIENCE:]
    return not before or max(r.auc for r in last) > max(r.auc for r in before) + RISE


def measured(net: Classifier, held: Nodes) -> tuple[float, float, float]:
    """AUC, and recall and positive rate at a confidence of 0.5."""
    log_p, parts = held.log_p, [slice(i, i + MEASURED) for i in range(0, len(held), MEASURED)]
    found = np.concatenate([net.confidence(log_p[p], held.entropy[p], held.depth[p]) for p in parts])
    return auc(found, held.accepted), float((found >= 0.5)[held.accepted].mean()), float((found >= 0.5).mean())


def auc(confidence: Floats, accepted: Bools) -> float:
    """The share of pairs of an accepted and a rejected node whose confidences are in that order, ties counted half.

    Args:
        confidence: [n].
        accepted: [n]; where all or none are, there is nothing to tell apart, and it is ½.
    """
    place = np.unique(confidence, return_inverse=True)[1]
    right, wrong = np.bincount(place, accepted), np.bincount(place, ~accepted)
    pairs = right.sum() * wrong.sum()
    return float(right @ (np.cumsum(wrong) - wrong / 2) / pairs) if pairs else 0.5


def learn(
    learnt: Nodes,
    held: Nodes,
    knobs: Knobs,
    plan: Plan,
    start: Classifier | None = None,
    listen: Callable[[Round], None] = lambda _: None,
) -> tuple[Classifier, list[Round]]:
    """Trains a classifier; returns the picked round's, and what each round came to.

    Args:
        learnt: entries of the texts to learn; negatives are drawn from them here.
        held: all entries of the others.
        knobs: features, size, M, negatives, steps.
        plan: of learning.
        start: what it begins with; random weights by default.
        listen: told of each round.

    Raises:
        UserError: no node was accepted, or training diverged.
    """
    for name, nodes in (("to learn", learnt), ("held out", held)):
        if not nodes.accepted.any():
            raise UserError(f"of the {len(nodes)} drafted nodes {name} none was accepted; at least 1 is needed: use more data")
    rng = np.random.default_rng([plan.seed, 1])
    sampled = learnt.sampled(knobs.negatives, rng)
    inputs = _inputs(sampled, knobs)
    scale = Scale(inputs.mean(0), np.maximum(inputs.std(0), 1e-6))
    x, y = torch.from_numpy((inputs - scale.mean) / scale.deviation).float(), torch.from_numpy(sampled.accepted).float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        net = nn.Sequential(nn.Linear(x.shape[1], knobs.hidden), nn.ReLU(), nn.Linear(knobs.hidden, 1))
    if start is not None:
        _fill(net, start, scale)
    optimizer = torch.optim.Adam(net.parameters(), lr=plan.lr)
    batches, steps = _shuffled(len(x), plan.batch_size, rng), full(len(x), knobs, plan)
    rounds, nets = list[Round](), list[Classifier]()
    for done in range(0, steps, ROUND):
        step = min(done + ROUND, steps)
        loss = _pass(net, optimizer, x, y, itertools.islice(batches, step - done))
        if not math.isfinite(loss):
            raise UserError(f"training diverged: the loss is {loss} after {step} steps; try a smaller lr")
        nets.append(_numpy(net, knobs, scale))
        rounds.append(Round(step, loss, *measured(nets[-1], held)))
        listen(rounds[-1])
        if not rises(rounds):
            break
    return nets[rounds.index(picked(rounds))], rounds


def full(entries: int, knobs: Knobs, plan: Plan) -> int:
    """Steps of a training that does not end before: the plan's epochs, and no fewer than `knobs.steps`."""
    return max(plan.epochs * math.ceil(entries / plan.batch_size), knobs.steps)


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each feature, [X]: a net learns faster from features of one size.

    It is a part of the first layer: W (x − m) / s + b = (W / s) x + (b − (W / s) m).
    """

    mean: Floats
    deviation: Floats


def _inputs(nodes: Nodes, knobs: Knobs) -> Floats:
    """[n, X] features."""
    read = {"P": scaled(nodes.log_p, knobs.log_joint), "H": nodes.entropy, "d": nodes.depth}
    return np.stack([read[name] for name in knobs.features.split("+")], axis=1)


def _shuffled(entries: int, batch_size: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Batches of entries' numbers, epoch by epoch without end."""
    while True:
        yield from torch.from_numpy(rng.permutation(entries)).split(batch_size)


def _pass(
    net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, batches: Iterable[torch.Tensor]
) -> float:
    """A step for each batch; returns the mean loss of their entries."""
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
    first /= scale.deviation
    known = knobs.features, knobs.entropy_top, knobs.log_joint
    return Classifier(first, bias - first @ scale.mean, last[0], last_bias[0], *known)


def _fill(net: nn.Sequential, start: Classifier, scale: Scale) -> None:
    bias = start.hidden_bias + start.hidden_weight @ scale.mean
    given = start.hidden_weight * scale.deviation, bias, start.output_weight[None], start.output_bias[None]
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), given, strict=True):
            parameter.copy_(torch.from_numpy(value))


@dataclass(frozen=True)
class Trained:
    """What a run came to.

    Attributes:
        texts: how many the target wrote.
        trees: grown before their steps.
        nodes: of these trees.
        accepted: of these nodes.
        entries: learnt, after negative sampling.
        rounds: what each came to.
        step: after which the classifier that is kept was measured.
        to_the_end: whether held-out AUC had stopped rising, or the paper's epochs and `STEPS` steps were made.
    """

    texts: int
    trees: int
    nodes: int
    accepted: int
    entries: int
    rounds: tuple[Round, ...]
    step: int
    to_the_end: bool

    @property
    def kept(self) -> Round:
        """The figures of the classifier that was saved."""
        return next(r for r in self.rounds if r.step == self.step)

    @property
    def ending(self) -> str:
        """How far it was trained, in words."""
        end = f"{self.rounds[-1].step:,} steps"
        if not self.to_the_end:
            return f"not trained to the end: after {end} held-out AUC may still rise"
        return f"trained to the end: {end}, after which held-out AUC {'still rose' if rises(self.rounds) else 'rose no more'}"


def prompts(target: Target, data: Sequence[Path], knobs: Knobs) -> tuple[list[Request], int]:
    """A request for each prompt that fits, and how many do not.

    Raises:
        UserError: a row is no prompt, or too few fit.
    """
    asked = [encode(target.tokenizer, content(row, where)) for path in data for row, where in rows(path)]
    fit_in = [ids for ids in asked if ids and len(ids) + knobs.tokens <= target.decoder.context]
    used = fit_in[: math.ceil(knobs.share * len(fit_in))]
    if len(used) < 2:
        raise UserError(
            f"of {len(asked)} prompts {len(used)} are used and fit the target's context of {target.decoder.context} with "
            f"{knobs.tokens} new tokens; at least 2 are needed, one to learn and one to measure on"
        )
    return [Request(ids, knobs.tokens, target.eos, i) for i, ids in enumerate(used)], len(asked) - len(fit_in)


def split(texts: Sequence[Nodes], plan: Plan) -> tuple[Nodes, Nodes]:
    """The entries to learn and those held out: whole texts, because trees of one text are alike.

    Raises:
        UserError: there is only one text with trees.
    """
    with_trees = [t for t in texts if len(t)]
    if len(with_trees) < 2:
        raise UserError(f"{len(with_trees)} texts have trees, at least 2 are needed: one to learn and one to measure on")
    order = np.random.default_rng([plan.seed, 0]).permutation(len(with_trees)).tolist()
    count = min(len(order) - 1, math.ceil(plan.held_out * len(order)))
    held, learnt = ([with_trees[i] for i in sorted(part)] for part in (order[:count], order[count:]))
    return Nodes.joined(learnt), Nodes.joined(held)


def summed(texts: Sequence[Nodes], learnt: Nodes, knobs: Knobs, plan: Plan, rounds: Sequence[Round]) -> Trained:
    accepted, entries = sum(int(t.accepted.sum()) for t in texts), entries_of(learnt, knobs)
    nodes, trees = sum(map(len, texts)), sum(t.trees for t in texts)
    usual = full(entries, replace(knobs, steps=STEPS), replace(plan, epochs=Plan.epochs))
    to_the_end = not rises(rounds) or rounds[-1].step >= usual
    return Trained(len(texts), trees, nodes, accepted, entries, tuple(rounds), picked(rounds).step, to_the_end)


def entries_of(learnt: Nodes, knobs: Knobs) -> int:
    """How many are learnt after negative sampling."""
    right = int(learnt.accepted.sum())
    return right + min(len(learnt) - right, round(knobs.negatives * right))


def digest(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
