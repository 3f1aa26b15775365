"""C2T's classifier: a net of two layers on a node's joint probability, entropy and depth, and the folder it lies in.

It is computed in numpy: trees are on the host, and a net of 200 weights is done before a framework's call has begun.

Shapes: X features, D hidden units.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.numpy import load_file, save_file

from draftree.errors import UnknownName, UserError
from draftree.files import Entries, filled, read_object, understood
from draftree.tree import ENTROPY_TOP, Floats

FEATURES = ("P+H+d", "P+H", "P+d", "H+d", "P")
"""What a classifier may read (C2T, table 1): joint probability, entropy, depth."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, eq=False)
class Classifier:
    """F of C2T, eq. 4: a ReLU layer, a linear one, a sigmoid (section 4.1).

    Attributes:
        hidden_weight: [D, X].
        hidden_bias: [D].
        output_weight: [D].
        output_bias: [].
        features: which features there are, in this order.
        entropy_top: M, how many of the likeliest tokens the entropy it has learnt from was taken over.
        log_joint: whether the net reads log P, which is ours, instead of P. Most P are so close to 0 that a net tells them
            apart only after very many steps; by log P it learns in a fifth of them, and decodes no better in the end.
        trained_on: what it was trained on, and how well; for people.
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
        """Whether the entropy has to be computed at all."""
        return "H" in self.features

    def confidence(self, log_p: Floats, entropy: Floats, depth: Floats) -> Floats:
        """C in [0, 1] of some nodes, in the shape of `log_p`.

        The arithmetic of a node is the same whatever stands beside it (a matrix product would round by its shape), so
        that a row gets the same tree alone and among others.

        Args:
            log_p: log P, the sum of log q along the path (eq. 1).
            entropy: H in nats of the distribution the node was drawn from (eq. 3); broadcast against `log_p`.
            depth: d, 1 for children of the root; broadcast against `log_p`.
        """
        read = {"P": scaled(log_p, self.log_joint), "H": entropy, "d": depth}
        hidden = self.hidden_bias
        for name, weight in zip(self.features.split("+"), self.hidden_weight.T, strict=True):
            hidden = hidden + read[name][..., None] * weight
        logit = (np.maximum(hidden, 0) * self.output_weight).sum(-1) + self.output_bias
        return np.asarray(np.broadcast_to(0.5 * (1 + np.tanh(logit / 2)), log_p.shape))  # the sigmoid, without overflow

    def save(self, folder: Path) -> None:
        """Writes `config.json` and `model.safetensors`."""
        tensors = {name: np.array(getattr(self, name), np.float32, order="C") for name in TENSORS}
        said = {"policy": "c2t", "features": self.features, "hidden": len(self.hidden_bias), "entropy_top": self.entropy_top,
                "log_joint": self.log_joint, "trained_on": dict(self.trained_on)}  # fmt: skip
        with filled(folder, last=CONFIG) as beside:
            save_file(tensors, beside / WEIGHTS)
            (beside / CONFIG).write_text(json.dumps(said, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The classifier in a folder.

        Raises:
            UserError: there is none, or its parts do not fit each other.
        """
        said = _config(folder)
        with understood(f"cannot read '{folder / WEIGHTS}'"):
            tensors = {name: value.astype(np.float64) for name, value in load_file(folder / WEIGHTS).items()}
        hidden, inputs = said["hidden"], said["features"].count("+") + 1
        wanted = {"hidden_weight": (hidden, inputs), "hidden_bias": (hidden,), "output_weight": (hidden,), "output_bias": ()}
        found = {name: value.shape for name, value in tensors.items()}
        if found != wanted:
            raise UserError(f"'{folder}' has tensors {found}, allowed for its config are {wanted}")
        if not all(np.isfinite(value).all() for value in tensors.values()):
            raise UserError(f"'{folder}' has weights that are not finite")
        known = said["features"], said["entropy_top"], said["log_joint"], said["trained_on"]
        weights = [tensors[name] for name in TENSORS]
        return cls(weights[0], weights[1], weights[2], weights[3], *known)


LEAST = math.log(1e-12)
TENSORS = ("hidden_weight", "hidden_bias", "output_weight", "output_bias")


def _config(folder: Path) -> dict[str, Any]:
    """What the config says, its values checked."""
    said = Entries(read_object(folder / CONFIG, "a classifier's config"), folder / CONFIG)
    if said.values.get("policy") != "c2t":
        raise UserError(f"'{folder}' is not a classifier's folder: its {CONFIG} does not say policy 'c2t'")
    check_features(said.get("features", str))
    return {
        "features": said.get("features", str), "hidden": said.get("hidden", int, least=1),
        "entropy_top": said.get("entropy_top", int, least=1), "log_joint": said.get("log_joint", bool, False),
        "trained_on": said.get("trained_on", dict, {}),
    }  # fmt: skip


def scaled(log_p: Floats, log_joint: bool) -> Floats:
    """The joint probability as a net reads it: its logarithm, not below that of 10⁻¹², or itself."""
    return np.maximum(log_p, LEAST) if log_joint else np.exp(log_p)


def check_features(features: str) -> None:
    """Refuses a set of features that is none of the paper's.

    Raises:
        UnknownName: it names them.
    """
    if features not in FEATURES:
        raise UnknownName("features", features, FEATURES)
