"""Choose the kernels of a loaded target by its options and the machine."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from draftree.models.accelerate_dispatch import is_spread
from draftree.models.backend_names import GROUPED
from draftree.models.causal_lm import CausalLM
from draftree.models.cpu_linear import TIMED_BATCH_SIZES, round_head, use_kernels
from draftree.models.forward_batch import ForwardBatch
from draftree.models.fused_cpu_modules import replace_modules
from draftree.models.graph_capture import Capture, EagerCapture, Graphs
from draftree.models.model_runner import ModelRunner
from draftree.native import GENERIC, OFF, variant
from draftree.target.load_options import Loading
from draftree.utils.hardware import second_is_faster

MIN_PARAMETERS = 32_000_000
"""Number of weights from which on a model uses native kernels by default.

Packing the weights takes seconds.
"""


def choose_kernels(decoder: CausalLM, loading: Loading) -> bool:
    """Choose the kernels of a loaded model; return whether its passes use native ones.

    Args:
        decoder: the model, on its final device.
        loading: the options. By default a large model uses native kernels if they support it. The
            variant `GENERIC` is timed against the model's own layers first, and is used only if it
            is faster.
    """
    if is_spread(decoder.model):
        return False
    native = loading.compile
    if native is None:
        large = sum(p.numel() for p in decoder.model.parameters()) >= MIN_PARAMETERS
        native = large and loading.kernels is None and loading.attn_implementation is None
    native = native and decoder.use_native_kernels()
    if native and loading.compile is None and variant() == GENERIC and not _is_faster(decoder):
        decoder.runner, native = decoder.hf, False
    if native and loading.quantize == "int4":
        round_head(decoder.hf.model)
    inside = {part for layer in decoder.layers for part in layer.modules()} if native else set()
    model = decoder.hf.model  # a copy that shares the weights if layers have recurrent states
    use_kernels(model, loading.kernels or ("native" if native else None), inside)
    replace_modules(model, loading.kernels, inside)
    return native


def computes_bfloat16_fast(native: bool = True) -> bool:
    """Return whether a pass in bfloat16 takes no longer than one in float32 on this CPU.

    The native kernels of x86 multiply bfloat16 weights as fast as float32 ones, and read half of
    the bytes. PyTorch's kernels need instructions for bfloat16.

    Args:
        native: whether native kernels run the model, if there are any.
    """
    able = torch.cpu.get_capabilities()
    return (native and variant() not in (GENERIC, OFF)) or bool(
        able.get("amx_bf16") or able.get("avx512_bf16")
    )


@torch.inference_mode()
def _is_faster(decoder: CausalLM) -> bool:
    """Return whether passes with native kernels take less time on this machine."""
    cache = decoder.new_cache(1, max(TIMED_BATCH_SIZES))
    starts = cache.lengths.copy()
    batches = [
        ForwardBatch.chains([np.zeros(n, np.int64)], starts, decoder.device)
        for n in TIMED_BATCH_SIZES
    ]

    def passes(runner: ModelRunner) -> Callable[[], Any]:
        return lambda: [runner.forward(batch, cache) for batch in batches]

    about = {
        "model": repr(decoder.layers),
        "dtype": str(decoder.dtype),
        "tried": str(TIMED_BATCH_SIZES),
    }
    return second_is_faster("layers", about, lambda: (passes(decoder.hf), passes(decoder.runner)))


def select_capture(model: PreTrainedModel, asked: bool | None) -> Capture:
    """Return the default way to run a model's passes: recorded on a single GPU, else eagerly.

    Args:
        model: the model, on its devices.
        asked: False to run eagerly; True and None record on a single GPU.
    """
    devices = {p.device for p in model.parameters()}
    one_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
    return Graphs() if one_gpu and asked is not False else EagerCapture()


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model to grouped attention if `sdpa` would copy its keys and values.

    The model must have been loaded by draftree.
    """
    config: Any = model.config.get_text_config(decoder=True)
    heads, shared = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if config._attn_implementation == "sdpa" and isinstance(shared, int) and shared != heads:
        model.set_attn_implementation(GROUPED)
