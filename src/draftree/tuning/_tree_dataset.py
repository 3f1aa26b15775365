"""Draft trees along the target's texts, each node labelled accepted or not (C2T, appendix B.1).

Shapes: N nodes of a tree, n entries (nodes of many trees).
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from draftree.costs.step_costs import Costs
from draftree.data.prompts import encode
from draftree.data.readers import read_rows
from draftree.drafters.base import Drafter, Trainable
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.evaluation.provenance import fingerprint
from draftree.evaluation.suites import content
from draftree.policies.base import Expand, Policy, fit
from draftree.policies.c2t import MIN_LOG_JOINT, Classifier, check_features
from draftree.policies.eagle2 import EAGLE2
from draftree.request import Emitted, Request
from draftree.target.target import Target
from draftree.tree import ENTROPY_TOP, Bools, Candidates, Floats, Ints, Tree, TreeBudget
from draftree.utils.files import as_user_error, read_object, replace_file, write_text
from draftree.utils.progress_callback import Tell, ignore_progress
from draftree.utils.validated_dataclass import check_fields, knob, parse_options

VERIFIED = 60
"""Number of nodes of each complete tree that the target verifies.

It only determines how fast the texts are generated.
"""
MIN_ADAM_STEPS = 4000
"""Smallest number of Adam steps of a complete training.

Ten epochs may have only a few hundred steps, after which small nets are far from trained.
"""
METADATA_FILE = "about.json"


@dataclass(frozen=True)
class Knobs:
    """The options for collecting trees and training the net.

    Attributes:
        features: the features that the net reads: P+H+d, P+H, P+d, H+d or P, with the joint
            probability P, the entropy H and the depth d (table 1).
        log_joint: whether the net reads log P instead of P. The paper reads P; with log P the net
            learns in a fifth of the steps.
        hidden: number of units of the hidden layer (appendix B.3).
        entropy_top: M, the number of most likely tokens over which an entropy is computed (table
            6).
        depth: number of layers of the trees (11 in appendix B.1).
        width: number of candidates of a node and of nodes expanded in a layer (10 in appendix B.1).
        tokens: largest number of tokens that are generated after a prompt.
        trees: number of trees to collect (8,880 in appendix B.1). Each decoding step gives one
            tree, so that there may be fewer. 0 collects the trees of all steps.
        positives: number of accepted nodes that must be reached, for which more than `trees` trees
            may be collected. (In the paper a tree has 3.5 accepted nodes.)
        negatives: number of rejected nodes to learn from for each accepted one. They are drawn
            once, and all accepted nodes are used. The paper also samples rejected nodes but does
            not give the ratio. The default of 3 is our choice, and the meaning of a confidence
            depends on it, see `C2T`.
        steps: smallest number of Adam steps, even if the epochs have fewer. Training stops earlier
            if the held-out AUC no longer rises, which takes about 4,000 steps with log P and 17,000
            with P.
        share: fraction of the prompts to use; by default all, and 0.1 for fine-tuning (appendix
            B.4).
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
    steps: int = knob(5 * MIN_ADAM_STEPS, least=1)
    share: float = knob(1.0, above=0, most=1)

    def __post_init__(self) -> None:
        check_fields(self, "c2t: ")
        check_features(self.features)

    @classmethod
    def read(cls, items: Sequence[str], start: Classifier | None) -> Self:
        """Return the options given as key=value, with defaults for the others.

        The defaults are those of the paper, or those of the classifier `start` whose training
        continues.

        Raises:
            UserError: a key or value is not allowed, or a value differs from that of `start`.
        """
        given = parse_options(items, cls, "'c2t'")
        if start is None:
            return cls(**given)
        own: dict[str, Any] = {
            "features": start.features,
            "log_joint": start.log_joint,
            "hidden": len(start.hidden_bias),
            "entropy_top": start.entropy_top,
        }
        for key in own.keys() & given.keys():
            if given[key] != own[key]:
                raise UserError(
                    f"c2t: {key} is {given[key]}, allowed is {own[key]}: the classifier of --init-from has it"
                )
        return cls(**{"share": 0.1} | own | given)


@dataclass(frozen=True)
class Nodes:
    """Entries of the data set, tree by tree, without roots.

    Attributes:
        joint: [n] P, the product of q along the path.
        entropy: [n] H in nats.
        depth: [n] d, which is 1 for children of the root.
        accepted: [n] the label.
        tree: [n] the number of the node's tree.
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
        """Return log P [n], bounded below by `MIN_LOG_JOINT`."""
        return np.log(np.maximum(self.joint, np.exp(MIN_LOG_JOINT)))

    @property
    def trees(self) -> int:
        """Return the number of trees."""
        return len(np.unique(self.tree))

    def take(self, which: Ints | Bools) -> "Nodes":
        """Return the entries that an index or a mask selects."""
        return Nodes(*(getattr(self, f.name)[which] for f in fields(self)))

    @classmethod
    def concatenate(cls, parts: Sequence["Nodes"]) -> "Nodes":
        """Return the entries of several texts, with trees numbered consecutively."""
        first = np.cumsum([0, *(part.trees for part in parts)])
        numbered = [
            replace(part, tree=part.tree + n) for part, n in zip(parts, first, strict=False)
        ]
        return cls(
            *(np.concatenate([getattr(part, f.name) for part in numbered]) for f in fields(cls))
        )

    def sample_rejected(self, negatives: float, rng: np.random.Generator) -> "Nodes":
        """Return all accepted nodes, and `negatives` random rejected nodes for each of them."""
        right, wrong = np.flatnonzero(self.accepted), np.flatnonzero(~self.accepted)
        chosen = rng.choice(wrong, self.sampling(negatives) - len(right), replace=False)
        return self.take(np.sort(np.concatenate((right, chosen))))

    def sampling(self, negatives: float) -> int:
        """Return the number of nodes that `sample_rejected` returns."""
        right = int(self.accepted.sum())
        return min(len(self), right + round(negatives * right))


def label_nodes(tree: Tree, text: Sequence[int]) -> Bools:
    """Return [N] whether the whole path to a node is what the target generated.

    Args:
        tree: the tree of one sequence.
        text: the tokens that the target generated after the root. Nodes beyond its end count as
            rejected.
    """
    right: Bools = tree.depth == 0
    for depth, token in enumerate(text[: int(tree.depth.max())], 1):
        layer = np.flatnonzero(tree.depth == depth)
        right[layer] = right[tree.parents[layer]] & (tree.tokens[layer] == token)
    return right


class TreeRecorder(Policy):
    """A policy that drafts EAGLE-2's complete trees of one sequence and records them.

    The best nodes of each tree are verified.

    Args:
        knobs: the options; they give depth and width.
        tops: the numbers M of most likely tokens for which entropies are computed.
    """

    def __init__(self, knobs: Knobs, tops: Sequence[int]) -> None:
        self._complete = knobs.width + (knobs.depth - 1) * knobs.width**2
        self._grown = EAGLE2(self._complete, knobs.depth, knobs.width)
        self._tops = tops
        self.written: list[int] = []
        self.drafts: list[tuple[int, Tree, Floats]] = []

    def tell(self, events: Sequence[Emitted]) -> None:
        """Append the newly generated tokens to `written`."""
        for event in events:
            self.written += event.tokens

    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        assert tree.roots == 1
        after = np.zeros(
            (len(self._tops), 1 + self._complete)
        )  # the entropy of the distribution after each node

        def expand_and_record(tree: Tree, frontier: Ints, k: int) -> Candidates:
            found = expand(tree, frontier, k)
            after[:, frontier] = [found.entropy(top) for top in self._tops]
            return found

        whole = self._grown.draft(
            expand_and_record, tree, costs, TreeBudget(room.depth, self._complete), memory
        )
        self.drafts.append((len(self.written), whole, after[:, whole.parents]))
        return fit(whole, min(VERIFIED, room.nodes))

    def nodes(self) -> list[Nodes]:
        """Return, for each M, the entries of all trees drafted so far.

        The depth of a tree is bounded by the number of tokens that were still to be generated.
        """
        parts = [[NO_NODES] for _ in self._tops]
        for at, tree, entropies in self.drafts:
            assert tree.tokens[0] == self.written[at - 1]
            joint = np.exp(tree.score)
            depth = tree.depth.astype(np.float64)
            right = label_nodes(tree, self.written[at:])
            for of_top, entropy in zip(parts, entropies, strict=True):
                of_top.append(
                    Nodes(
                        joint[1:],
                        entropy[1:],
                        depth[1:],
                        right[1:],
                        np.zeros(tree.drafted, np.int64),
                    )
                )
        return list(map(Nodes.concatenate, parts))


NO_NODES = Nodes(
    np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.bool_), np.zeros(0, np.int64)
)


@dataclass(frozen=True)
class Collected:
    """The entries of each text in a folder, so that an interrupted run can continue.

    Attributes:
        folder: the folder with one file per text.
        about: the values on which the entries depend.
    """

    folder: Path
    about: Mapping[str, Any]

    def begin(self) -> None:
        """Create the folder, or check that its entries were made with the same values.

        Raises:
            UserError: the folder contains entries made with other values.
        """
        path = self.folder / METADATA_FILE
        if path.is_file():
            before = read_object(
                path, "a note of the trees beside it (without it they are grown anew)"
            )
            if different := [
                name for name, value in self.about.items() if before.get(name) != value
            ]:
                was = ", ".join(f"{name}={before.get(name)}" for name in different)
                raise UserError(
                    f"'{self.folder}' holds trees with {was}: continue with the same options, or use another folder"
                )
            return
        write_text(path, json.dumps(dict(self.about), indent=1) + "\n")

    def __getitem__(self, text: int) -> Nodes | None:
        path = self._path(text)
        if not path.is_file():
            return None
        told = f"'{path}' does not hold a text's trees (without it they are grown anew)"
        with as_user_error(told), path.open("rb") as file, np.load(file) as found:
            return Nodes(
                *(found[f.name].astype(getattr(NO_NODES, f.name).dtype) for f in fields(Nodes))
            )

    def __setitem__(self, text: int, nodes: Nodes) -> None:
        narrow = {
            "joint": np.float32,
            "entropy": np.float32,
            "depth": np.int16,
            "accepted": np.bool_,
            "tree": np.int32,
        }
        with replace_file(self._path(text)) as partial, partial.open("wb") as file:
            np.savez_compressed(
                file, **{name: getattr(nodes, name).astype(kind) for name, kind in narrow.items()}
            )

    def _path(self, text: int) -> Path:
        return self.folder / f"{text:06}.npz"


def grow_entries(
    target: Target, drafter: Drafter[Any], request: Request, knobs: Knobs, tops: Sequence[int]
) -> list[Nodes]:
    """Return the entries of one text, for each M in `tops`."""
    recorder = TreeRecorder(knobs, tops)
    Engine(target, drafter, recorder).write([request], on_tokens=recorder.tell)
    return recorder.nodes()


def collect(
    target: Target,
    drafter: Drafter[Any],
    requests: Sequence[Request],
    knobs: Knobs,
    kept: Collected,
    tell: Tell = ignore_progress,
) -> list[Nodes]:
    """Return the entries of each text, until `knobs.trees` and `knobs.positives` are reached.

    Texts whose entries are already stored are not generated again.

    Args:
        target: generates the texts.
        drafter: drafts the trees.
        requests: one for each text.
        knobs: the options of the trees.
        kept: the stored entries; new ones are added.
        tell: called with the number of finished texts and of trees.
    """
    found: list[Nodes] = []
    trees = positives = 0
    for number, request in enumerate(requests):
        left = knobs.trees - trees if knobs.trees and positives >= knobs.positives else math.inf
        if left <= 0:
            break
        nodes = kept[number]
        if nodes is None:
            [kept[number]] = grow_entries(target, drafter, request, knobs, [knobs.entropy_top])
            nodes = kept[number]  # in the precision of the stored file
            assert nodes is not None
        found.append(nodes.take(nodes.tree < left))
        trees += found[-1].trees
        positives += int(found[-1].accepted.sum())
        tell(number + 1, f"growing trees: {trees:,}", len(requests))
    return found


def prompt_requests(
    target: Target, data: Sequence[Path], knobs: Knobs
) -> tuple[list[Request], int]:
    """Return a request for each prompt that fits the context, and the number of other prompts.

    Raises:
        UserError: a row of the data is not a prompt, or too few prompts fit.
    """
    asked = [
        encode(target.tokenizer, content(row, where))
        for path in data
        for row, where in read_rows(path)
    ]
    fit_in = [ids for ids in asked if ids and len(ids) + knobs.tokens <= target.decoder.context]
    used = fit_in[: math.ceil(knobs.share * len(fit_in))]
    if len(used) < 2:
        raise UserError(
            f"of {len(asked)} prompts {len(used)} are used and fit the target's context of {target.decoder.context} with "
            f"{knobs.tokens} new tokens; at least 2 are needed, one to learn and one to measure on"
        )
    return [Request(ids, knobs.tokens, target.eos, i) for i, ids in enumerate(used)], len(
        asked
    ) - len(fit_in)


def provenance(
    target: Target, drafter: Drafter[Any], spec: str, requests: Sequence[Request], knobs: Knobs
) -> dict[str, Any]:
    """Return all values on which the collected trees depend."""
    weights = fingerprint(drafter.model) if isinstance(drafter, Trainable) else ""
    grown = {name: getattr(knobs, name) for name in ("depth", "width", "entropy_top", "tokens")}
    models = {
        "target": fingerprint(target.decoder.model),
        "drafter": f"{spec}: {drafter.description}",
        "weights": weights,
    }
    digest = hashlib.sha256(json.dumps([list(r.prompt) for r in requests]).encode()).hexdigest()[
        :16
    ]
    return models | grown | {"prompts": digest}
