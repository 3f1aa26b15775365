"""Predict the speed of a pairing on a device from its costs, before a text is generated."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from draftree.cost_estimate import learnt_costs, target_size
from draftree.costs.curves import Costs
from draftree.drafters.base import Drafter
from draftree.models.quantization_support import count_parameters
from draftree.policies._device_growth import Plan
from draftree.policies.base import Policy
from draftree.registry import build
from draftree.target.target import Target
from draftree.utils.hardware import machine

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens of the passes that are shown."""
CONTEXT = 512
"""Tokens in the KV cache."""
CHAINS = (1, 3, 5)
"""Lengths of the chains that are shown."""


@dataclass(frozen=True)
class Shape:
    """Store a tree, and the acceptance length above which it is faster than plain decoding.

    Attributes:
        name: name of the tree.
        nodes: nodes that are verified, including the root.
        seconds: seconds of a step: its draft steps and its pass.
        even: acceptance length at which it is as fast as plain decoding.
    """

    name: str
    nodes: int
    seconds: float
    even: float


@dataclass(frozen=True)
class Expected:
    """Store the figures of a device, and of a drafter and policy on it.

    Attributes:
        device: its name.
        memory: free bytes and all bytes of its memory; None where it is the host's.
        bandwidth: bytes that it reads per second.
        rate: multiply-add operations per second, in the target's dtype.
        overhead: seconds of a small operation.
        dtype: dtype of the target.
        bytes: bytes of the weights that a pass over one token reads.
        floor: seconds in which they are read.
        ridge: number of tokens at which computing takes as long as reading.
        recorded: whether passes over trees are CUDA graphs.
        native: whether they run native kernels.
        timings: number of timed steps by which the passes below are corrected; 0 where they are
            estimates.
        passes: seconds by number of tokens.
        draft: seconds of a draft step over one token.
        shapes: chains, and the tree of the policy.
        lengths: acceptance lengths for which a speed-up is shown.
    """

    device: str
    memory: tuple[int, int] | None
    bandwidth: float
    rate: float
    overhead: float
    dtype: str
    bytes: float
    floor: float
    ridge: float
    recorded: bool
    native: bool
    timings: int
    passes: dict[int, float]
    draft: float
    shapes: tuple[Shape, ...]
    lengths: tuple[float, ...] = (2.0, 3.0, 4.0)

    def as_json(self) -> dict[str, Any]:
        """Return the report by the names of its parts."""
        return asdict(self)


def examine(target: Target, drafter: Drafter[Any], policy: str) -> Expected:
    """Estimate what to expect of a drafter and policy on a device.

    Only the device is timed, and only once.

    Args:
        target: the target.
        drafter: the drafter.
        policy: spec of the policy that grows the trees.
    """
    decoder = target.decoder
    learnt = learnt_costs(target, drafter)
    costs = learnt.at(CONTEXT, 1)
    speed = learnt.target.speed
    size = target_size(decoder)
    read = size.bytes + size.expert_bytes * size.routed / size.experts
    memory = torch.cuda.mem_get_info(decoder.device) if decoder.device.type == "cuda" else None
    plans = {f"chain of {n}": Plan(n, 1) for n in CHAINS}
    grown: Policy = build("policy", policy).sized(count_parameters(decoder.model))
    if grown.plan is not None:
        plans[policy] = grown.plan
    return Expected(
        device=machine(decoder.device)["device"],
        memory=memory,
        bandwidth=speed.bandwidth,
        rate=speed.rate,
        overhead=speed.overhead,
        dtype=str(decoder.dtype).removeprefix("torch."),
        bytes=read,
        floor=read / speed.bandwidth,
        ridge=read / speed.bandwidth * speed.rate / size.weights,
        recorded=decoder.capture.ladder.few,
        native=bool(decoder.native_kinds),
        timings=learnt.target.models["target"].correction.timings,
        passes={n: costs.target_seconds(n) for n in WIDTHS},
        draft=costs.draft_seconds(1),
        shapes=tuple(_shape(costs, *named) for named in plans.items()),
    )


def _shape(costs: Costs, name: str, plan: Plan) -> Shape:
    drafted = [plan.drafted(depth) for depth in range(plan.depth + 1)]
    layers = np.diff(drafted)[:-1]  # of which the best are drafted below
    frontiers = np.array(
        [1, *(layers if plan.frontier is None else np.minimum(layers, plan.frontier))], np.float64
    )
    nodes = drafted[-1] if plan.nodes is None else min(plan.nodes, drafted[-1])
    seconds = (
        float(costs.drafts(frontiers).sum())
        + costs.commit
        + costs.catch_up
        + costs.target_seconds(nodes + 1)
    )
    return Shape(name, nodes + 1, seconds, seconds / costs.token)
