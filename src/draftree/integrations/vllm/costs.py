"""Learnt costs of a model inside vLLM: an estimate, corrected by the time of each step."""

from functools import partial
from typing import Any

import numpy as np
import torch

from draftree.cost_estimate import LOOKUP_SIZE, OPERATIONS
from draftree.costs.cost_model import Size
from draftree.costs.machine_probe import machine_speed
from draftree.costs.online_costs import LOOKUPS, Learner, OnlineCosts
from draftree.utils.hardware import machine, measurement_path


def step_costs(vllm_config: Any, drafter: str, version: str) -> OnlineCosts:
    """Return the costs of steps in vLLM on this machine.

    They are corrected while requests run, and the corrections are stored in files for the next
    start.

    Args:
        vllm_config: configuration object of vLLM.
        drafter: description of the drafter of the proposer.
        version: version of vLLM.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    device, dtype = torch.device(str(vllm_config.device_config.device)), model.dtype
    about = machine(device) | {
        "vllm": version,
        "model": str(model.model),
        "dtype": str(dtype),
        "quantization": str(model.quantization),
        "eager": str(model.enforce_eager),
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
    }
    speed = partial(machine_speed, device, dtype)
    size = target_size(model.hf_text_config, dtype.itemsize, int(parallel.tensor_parallel_size))
    drafts = dict.fromkeys(("draft", *LOOKUPS), LOOKUP_SIZE)
    of_draft = about | {"drafter": drafter}
    return OnlineCosts(
        Learner(measurement_path("costs-vllm", about), about, {"target": size}, speed),
        Learner(measurement_path("costs-vllm-drafter", of_draft), of_draft, drafts, speed),
    )


def target_size(config: Any, width: int, devices: int = 1) -> Size:
    """Estimate the bytes and operations of a dense decoder's pass from its config.

    Errors of the estimate are corrected later by measured times. An entry with a value for each
    layer, as in Gemma 3n's config, counts by its mean.

    Args:
        config: config of the text model.
        width: bytes per weight.
        devices: number of devices that share a layer.
    """

    def number(*names: str, default: int = 1) -> int:
        return next(
            (int(np.mean(value)) for name in names if (value := getattr(config, name, None))),
            default,
        )

    hidden, layers = number("hidden_size", "n_embd"), number("num_hidden_layers", "n_layer")
    heads = number("num_attention_heads", "n_head")
    stored, head = (
        number("num_key_value_heads", default=heads),
        number("head_dim", default=hidden // heads),
    )
    inner = number("intermediate_size", "n_inner", default=4 * hidden)
    weights = (
        layers * hidden * (2 * (heads + stored) * head + 3 * inner) + number("vocab_size") * hidden
    )
    return Size(
        weights=weights / devices,
        bytes=weights * width / devices,
        kv_bytes=2.0 * layers * stored * head * width / devices,
        attention=2.0 * layers * heads * head / devices,
        operations=float(OPERATIONS * layers),
    )
