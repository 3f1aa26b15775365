"""Predict the speed of a pairing on a device from its costs, before a text is generated."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from draftree.cost_estimate import learnt_costs, target_size
from draftree.costs.step_costs import Costs
from draftree.drafters.base import Drafter
from draftree.policies._device_growth import DeviceGrowth
from draftree.policies.base import Policy
from draftree.registry import build
from draftree.target.quantization_support import count_parameters
from draftree.target.target import Target
from draftree.utils.hardware import machine

SHOWN_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of tokens for which the seconds of a target pass are shown."""
CACHED_TOKENS = 512
"""Number of tokens in the KV cache for all estimates."""
CHAINS = (1, 3, 5)
"""Lengths in tokens of the chains that are shown."""


@dataclass(frozen=True)
class Shape:
    """Store the costs of a draft tree, and the acceptance length that it needs to be faster.

    Attributes:
        name: name of the tree.
        nodes: number of nodes that the target verifies, including the root.
        seconds: seconds of a step: draft steps, target pass and commit.
        even: acceptance length at which drafting is as fast as plain decoding; above it, drafting
            is faster.
    """

    name: str
    nodes: int
    seconds: float
    even: float


@dataclass(frozen=True)
class ExpectedSpeed:
    """Store the expected speed of a target, a drafter and a policy on a device.

    Attributes:
        device: name of the device.
        memory: free and total bytes of a GPU's memory; None for the CPU.
        bandwidth: bytes that the device reads from memory per second.
        rate: multiply-add operations that the device does per second, in the target's dtype.
        overhead: seconds that a very small operation takes.
        dtype: dtype of the target.
        bytes: bytes of weights that a pass over one token reads.
        floor: seconds that reading these bytes takes.
        ridge: number of tokens in a pass at which arithmetic takes as long as reading the weights.
        recorded: whether passes over trees run as CUDA graphs.
        native: whether passes run native kernels.
        timings: number of timed steps by which the estimated costs are corrected; with 0 the costs
            below are only estimates.
        passes: seconds of a target pass by number of tokens.
        draft: seconds of a draft step over one token.
        shapes: costs of chains, and of the policy's tree if its size is fixed.
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
        """Return the report as a dictionary with its fields as keys."""
        return asdict(self)


def examine(target: Target, drafter: Drafter[Any], policy: str) -> ExpectedSpeed:
    """Estimate the costs of a drafter and a policy on the target's device.

    Only the device is timed, and only if this has not been done before. No text is generated.

    Args:
        target: the target.
        drafter: the drafter.
        policy: spec of the policy that grows the trees.
    """
    decoder = target.decoder
    learnt = learnt_costs(target, drafter)
    costs = learnt.at(CACHED_TOKENS, 1)
    speed = learnt.target.speed
    size = target_size(decoder)
    read = size.bytes + size.expert_bytes * size.routed / size.experts
    memory = torch.cuda.mem_get_info(decoder.device) if decoder.device.type == "cuda" else None
    plans = {f"chain of {n}": DeviceGrowth(n, 1) for n in CHAINS}
    grown: Policy = build("policy", policy).for_target_size(count_parameters(decoder.model))
    if grown.plan is not None:
        plans[policy] = grown.plan
    return ExpectedSpeed(
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
        passes={n: costs.target_seconds(n) for n in SHOWN_WIDTHS},
        draft=costs.draft_seconds(1),
        shapes=tuple(_shape(costs, *named) for named in plans.items()),
    )


def _shape(costs: Costs, name: str, plan: DeviceGrowth) -> Shape:
    drafted = [plan.max_drafted_nodes(depth) for depth in range(plan.depth + 1)]
    layers = np.diff(drafted)[:-1]  # of which the best are drafted below
    frontiers = np.array(
        [1, *(layers if plan.frontier is None else np.minimum(layers, plan.frontier))], np.float64
    )
    nodes = drafted[-1] if plan.nodes is None else min(plan.nodes, drafted[-1])
    seconds = (
        float(costs.drafts(frontiers).sum())
        + costs.commit
        + costs.catch_up
        + costs.overhead
        + costs.target_seconds(nodes + 1)
    )
    return Shape(name, nodes + 1, seconds, seconds / costs.token)
