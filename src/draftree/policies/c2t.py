"""C2T: keep the nodes that a small classifier of probability, entropy and depth expects to be accepted.

The net is computed on the host, where trees are stored: 200 weights take less time than the
call of a framework.

Shapes: X features, D hidden units.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, final

import numpy as np
from safetensors.numpy import load_file, save_file
from typing_extensions import override

from draftree.errors import UnknownName, UserError
from draftree.kernels.node_classifier import confidences
from draftree.policies.base import Layered, append, path_log_q, top
from draftree.target.target_names import DEMO, missing_package, shipped_folder
from draftree.tree import ENTROPY_TOP, Candidates, Floats, Ints, Tree
from draftree.utils.files import Entries, as_user_error, fill_folder, read_object
from draftree.utils.validated_dataclass import knob

FEATURES = ("P+H+d", "P+H", "P+d", "H+d", "P")
"""The sets of features that a classifier may read (C2T, table 1).

P is the joint probability, H the entropy, and d the depth.
"""
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TENSORS = ("hidden_weight", "hidden_bias", "output_weight", "output_bias")
MIN_LOG_JOINT = math.log(1e-12)
"""The smallest log P that a net reads; smaller values are raised to it."""


@dataclass(frozen=True, eq=False)
class Classifier:
    """The classifier F of C2T, eq. 4: a ReLU layer, a linear layer and a sigmoid (section 4.1).

    Attributes:
        hidden_weight: [D, X] weights of the ReLU layer.
        hidden_bias: [D] biases of the ReLU layer.
        output_weight: [D] weights of the linear layer.
        output_bias: [] bias of the linear layer.
        features: the names of the features, in the order of the inputs.
        entropy_top: M, the number of most likely tokens over which the entropy was summed in
            training.
        log_joint: whether the net reads log P instead of P, which is not in the paper. Most P are
            so close to 0 that a net distinguishes them only after very many training steps. With
            log P it needs a fifth of the steps; it decodes no better in the end.
        trained_on: a description of the training data and the quality reached.
    """

    hidden_weight: Floats
    hidden_bias: Floats
    output_weight: Floats
    output_bias: Floats
    features: str = "P+H+d"
    entropy_top: int = ENTROPY_TOP
    log_joint: bool = False
    trained_on: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads_entropy(self) -> bool:
        """Return whether the entropy must be computed."""
        return "H" in self.features

    def confidence(self, log_p: Floats, entropy: Floats, depth: Floats | Ints) -> Floats:
        """Return the confidence C in [0, 1] of some nodes, in the shape of `log_p`.

        Each node is computed independently of the other nodes, whereas the rounding of a matrix
        product depends on its shape. A sequence therefore gets the same tree alone and in a batch.

        Args:
            log_p: log P, the sum of log q along the path (eq. 1).
            entropy: H in nats, of the distribution that the node was drawn from (eq. 3); it is
                broadcast to the shape of `log_p`.
            depth: d, which is 1 for children of the root; it is broadcast to the shape of `log_p`.
        """
        read = {"P": scale_joint(log_p, self.log_joint), "H": entropy, "d": depth}
        x = np.empty((len(self._names), *log_p.shape))
        for i, name in enumerate(self._names):
            x[i] = read[name]
        return confidences(x.reshape(len(x), -1), *self._weights).reshape(log_p.shape)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.features.split("+"))

    @cached_property
    def _weights(self) -> tuple[Floats, Floats, Floats, float]:
        """Return hidden weight and bias, output weight and bias, as the kernel reads them."""
        hidden, bias, output = map(
            np.ascontiguousarray, (self.hidden_weight, self.hidden_bias, self.output_weight)
        )
        return hidden, bias, output, float(self.output_bias)

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` into a folder."""
        tensors = {name: np.array(getattr(self, name), np.float32, order="C") for name in TENSORS}
        config = {
            "policy": "c2t",
            "features": self.features,
            "hidden": len(self.hidden_bias),
            "entropy_top": self.entropy_top,
            "log_joint": self.log_joint,
            "trained_on": dict(self.trained_on),
        }
        with fill_folder(folder, last=CONFIG) as beside:
            save_file(tensors, beside / WEIGHTS)
            (beside / CONFIG).write_text(json.dumps(config, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return the classifier that is stored in a folder.

        Raises:
            UserError: the folder contains no classifier, or its files do not match each other.
        """
        config = Entries(read_object(folder / CONFIG, "a classifier's config"), folder / CONFIG)
        if config.values.get("policy") != "c2t":
            raise UserError(
                f"'{folder}' is not a classifier's folder: its {CONFIG} does not say policy 'c2t'"
            )
        check_features(features := config.get("features", str))
        hidden, inputs = config.get("hidden", int, least=1), features.count("+") + 1
        top, log_joint = (
            config.get("entropy_top", int, least=1),
            config.get("log_joint", bool, False),
        )
        trained_on = config.get("trained_on", dict, {})
        with as_user_error(f"cannot read '{folder / WEIGHTS}'"):
            tensors = {
                name: value.astype(np.float64)
                for name, value in load_file(folder / WEIGHTS).items()
            }
        wanted = {
            "hidden_weight": (hidden, inputs),
            "hidden_bias": (hidden,),
            "output_weight": (hidden,),
            "output_bias": (),
        }
        found = {name: value.shape for name, value in tensors.items()}
        if found != wanted:
            raise UserError(f"'{folder}' has tensors {found}, allowed for its config are {wanted}")
        if not all(np.isfinite(value).all() for value in tensors.values()):
            raise UserError(f"'{folder}' has weights that are not finite")
        return cls(
            **tensors,
            features=features,
            entropy_top=top,
            log_joint=log_joint,
            trained_on=trained_on,
        )


def scale_joint(log_p: Floats, log_joint: bool) -> Floats:
    """Return the joint probability in the form that the classifier reads.

    With `log_joint` this is max(log p, log 10⁻¹²), otherwise p.
    """
    return np.maximum(log_p, MIN_LOG_JOINT) if log_joint else np.exp(log_p)


def check_features(features: str) -> None:
    """Check that a set of features is one of the paper's.

    Raises:
        UnknownName: the set is not in the paper; the message lists the allowed sets.
    """
    if features not in FEATURES:
        raise UnknownName("features", features, FEATURES)


@final
@dataclass(frozen=True)
class C2T(Layered):
    """Classifier-based tree (algorithm 1).

    Attributes:
        beta: the smallest confidence of a candidate that is kept (0.2 to 0.9 in the paper, mostly
            0.5). A confidence is not a probability of acceptance. The classifier was trained with
            three rejected nodes for each accepted one, whereas whole trees of the demo have about
            190, so that 0.5 means 1.6 %. The paper does not give its ratio; with another ratio, the
            same β means another probability.
        width: the number of most likely candidates after each node that the classifier rates (the
            first TopK of section 4.2.2; 15).
        layer_top: the largest number of nodes kept in a layer, the most confident first (the second
            TopK; 15); None keeps all.
        depth: number of layers (10 in the paper).
        classifier: the folder of a classifier, as written by `draftree train c2t`, or the name of a
            target for which a classifier is shipped; by default that of the demo.
        chain: whether to draft a chain: only the most likely candidate is considered, and drafting
            ends at the first candidate that is not kept (section 5.5).
        raw: the features that are computed from the unconditioned q when drafts are conditioned on
            the target's noise (`match` above temperature 0): P, H, both (P+H), or none. Candidates
            are always chosen by the conditioned q.
    """

    beta: float = knob(0.5, least=0, most=1)
    width: int = knob(15, least=1)
    layer_top: int | None = knob(15, least=1)
    depth: int = knob(10, least=1, deepest=True)
    classifier: str = ""
    chain: bool = False
    raw: Literal["none", "P", "H", "P+H"] = "none"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.net  # a wrong folder is reported at once

    @cached_property
    def net(self) -> Classifier:
        """Return the classifier."""
        name = self.classifier or DEMO
        if told := missing_package(name):
            raise UserError(told)
        return Classifier.load(shipped_folder(name, "c2t") or Path(name))

    @property
    @override
    def candidates(self) -> int:
        return 1 if self.chain else self.width

    @override
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        plain = candidates if self.raw == "none" else candidates.raw
        p, h = (plain if name in self.raw else candidates for name in ("P", "H"))
        score = path_log_q(tree, frontier, p)
        entropy = (
            h.entropy(self.net.entropy_top) if self.net.reads_entropy else np.zeros(len(frontier))
        )
        confidence = self.net.confidence(score, entropy[:, None], tree.depth[frontier][:, None] + 1)
        ranked = np.where(candidates.log_q > -np.inf, confidence, -np.inf)
        keep = ranked >= self.beta
        if self.layer_top is not None:
            keep &= top(tree, frontier, ranked, self.layer_top)
        return append(tree, frontier, candidates, keep, score, entropy)
