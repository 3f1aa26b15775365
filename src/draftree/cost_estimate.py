"""Estimate the costs of a target and its drafter from bytes and FLOPs; open their cost files."""

from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from draftree.costs.cost_model import Size
from draftree.costs.machine_probe import machine_speed
from draftree.costs.online_costs import LOOKUPS, Learner, OnlineCosts
from draftree.drafters._fused import FusedDrafter
from draftree.drafters.base import Drafter
from draftree.drafters.neural.native_drafter_layers import layer_kinds
from draftree.models.causal_lm import CausalLM
from draftree.models.cpu_linear import packed_shapes
from draftree.models.fused_cpu_modules import replaced_kinds
from draftree.target.quantization_support import count_parameters, packed_bits, packed_weights
from draftree.target.target import Target
from draftree.utils.hardware import machine, measurement_path

OPERATIONS = 40
"""Number of small operations in a layer that torch computes."""
RECORDED_OPERATIONS = 10
"""Number of small operations that take as long as a layer replayed from a CUDA graph.

During a replay the host launches no operation.
"""
FUSED_OPERATIONS = 2
"""Number of small operations in a layer that one native call computes."""
LOOKUP_SIZE = Size(seconds=3e-5)
"""Estimated cost of a draft step, a commit or a retrieval that needs no network."""
_LEARNERS: dict[str, Learner] = {}


def learnt_costs(target: Target, drafter: Drafter[Any]) -> OnlineCosts:
    """Return the costs that have been learnt on this machine for a target with a drafter.

    Engines of one process share them. This function measures nothing: before the first steps, the
    costs are an estimate (`costs.cost_model`).
    """
    decoder = target.decoder
    about = cost_key(target)
    of_draft = about | {"drafter": drafter.description}
    draft = draft_size(drafter, decoder)
    sizes = {"draft": draft, **dict.fromkeys(LOOKUPS, LOOKUP_SIZE)}
    return OnlineCosts(
        _learner("costs-target", about, {"target": target_size(decoder)}, decoder),
        _learner("costs-drafter", of_draft, sizes, decoder),
    )


def cost_key(target: Target) -> dict[str, str]:
    """Return a dict from names to the values on which a target's costs depend.

    The values describe hardware, model, dtype, kernels, threads and versions.
    """
    decoder = target.decoder
    shape = {
        k: str(getattr(decoder.config, k, ""))
        for k in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
    }
    shape["parameters"] = str(count_parameters(decoder.model))
    return {
        **machine(decoder.device),
        **shape,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "attention": str(decoder.config._attn_implementation),
        "target": target.name,
        "packed": " ".join(packed_shapes(decoder.hf.model)),
        "between": " ".join(replaced_kinds(decoder.hf.model)),
        "compiled": " ".join(decoder.native_kinds) or "graphs" * decoder.capture.ladder.few,
        "draftree": version("draftree"),
    }


def target_size(decoder: CausalLM) -> Size:
    """Return the amount of data and arithmetic of one target pass."""
    layers = int(decoder.config.num_hidden_layers)
    return _network_size(decoder, decoder.model, 0, 0, layers, _operations(decoder))


def _operations(decoder: CausalLM) -> int:
    """Return the number of small operations in one layer of a decoder."""
    if decoder.native_kinds:
        return FUSED_OPERATIONS
    return RECORDED_OPERATIONS if decoder.capture.ladder.few else OPERATIONS


def draft_size(drafter: Drafter[Any], decoder: CausalLM) -> Size:
    """Return the amount of data and arithmetic of one draft step.

    Args:
        drafter: the drafter; the parts of fused drafters are added up.
        decoder: the target's decoder. Its LM head is counted for a drafter that has no head.
    """
    parts = drafter.parts if isinstance(drafter, FusedDrafter) else (drafter,)
    size = Size()
    for part in parts:
        network = getattr(part, "model", None) or getattr(
            getattr(part, "decoder", None), "model", None
        )
        if part.searches or not isinstance(network, nn.Module):
            size += LOOKUP_SIZE
            continue
        widest = max((p.shape[0] for p in network.parameters() if p.dim() == 2), default=0)
        head = 0 if widest > decoder.vocab // 8 else decoder.vocab * decoder.hidden_size
        layers = max(int(getattr(getattr(network, "config", None), "num_hidden_layers", 1) or 1), 1)
        own = getattr(part, "decoder", None)
        each = (
            FUSED_OPERATIONS
            if layer_kinds(network)
            else OPERATIONS
            if own is None
            else _operations(own)
        )
        size += _network_size(decoder, network, head, head * decoder.dtype.itemsize, layers, each)
    return size


def _network_size(
    decoder: CausalLM, network: nn.Module, head: int, head_bytes: float, layers: int, each: int
) -> Size:
    config = decoder.config

    def number(name: str, default: int) -> int:
        try:
            return int(getattr(config, name, None) or default)
        except RuntimeError:  # transformers raises it if the layers differ in this value
            return default

    experts = next((p.shape[0] for p in network.parameters() if p.dim() == 3), 1)
    routed = min(number("num_experts_per_tok", 1), experts)
    weights = float(head)
    read = float(head_bytes)
    of_experts = 0.0
    for p in _matmul_parameters(network):
        count = p.numel() * (
            2 if p.dtype is torch.uint8 else 1
        )  # a byte holds two four-bit weights
        if p.dim() == 3:
            weights += count * routed / experts
            of_experts += p.nbytes
        elif p.dim() == 2:
            weights += count
            read += p.nbytes
    bits = packed_bits(decoder.model.config)
    for packed in packed_weights(network):
        weights += packed.nbytes * 8 / bits
        read += packed.nbytes
    heads = number("num_attention_heads", 1)
    width = number("head_dim", decoder.hidden_size // heads)
    stored = number("num_key_value_heads", heads)
    return Size(
        weights=weights,
        bytes=read,
        expert_bytes=of_experts,
        experts=experts,
        routed=routed,
        kv_bytes=float(2 * layers * stored * width * decoder.dtype.itemsize),
        attention=float(2 * layers * heads * width),
        operations=float(each * layers),
    )


def _matmul_parameters(network: nn.Module) -> Iterator[nn.Parameter]:
    """Yield each parameter of a network once, except those of embeddings.

    Embeddings are looked up and not multiplied.
    """
    seen = set[int]()
    for module in network.modules():
        if not isinstance(module, nn.Embedding):
            for p in module.parameters(recurse=False):
                if id(p) not in seen:
                    seen.add(id(p))
                    yield p


def _learner(
    kind: str, about: Mapping[str, str], sizes: Mapping[str, Size], decoder: CausalLM
) -> Learner:
    path = measurement_path(kind, about)
    if str(path) not in _LEARNERS:
        _LEARNERS[str(path)] = Learner(
            path, about, sizes, partial(machine_speed, decoder.device, decoder.dtype)
        )
    return _LEARNERS[str(path)]
