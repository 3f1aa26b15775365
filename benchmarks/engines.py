"""Other engines as ways of writing, on the same weights at the bits of their file: OpenVINO GenAI and llama.cpp.

Each is used where its package is installed (`openvino-genai`, `llama-cpp-python`); both read a file .gguf as it is and write
greedily, plain and with their own prompt lookup.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftree import Request

Way = Callable[[Request], list[int]]


def engines(file: Path) -> dict[str, Way]:
    """The ways of every engine that is installed, by name."""
    found: dict[str, Way] = {}
    if find_spec("openvino_genai"):
        found |= {
            f"OpenVINO GenAI: {name}": _openvino(file, lookup) for name, lookup in (("plain", False), ("prompt lookup", True))
        }
    if find_spec("llama_cpp"):
        found |= {
            f"llama.cpp: {name}": _llama_cpp(file, lookup) for name, lookup in (("plain", False), ("prompt lookup", True))
        }
    return found


def _openvino(file: Path, lookup: bool) -> Way:
    import openvino as ov  # type: ignore[import-not-found,unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found,unused-ignore]

    more: dict[str, Any] = {"prompt_lookup": True} if lookup else {}
    pipeline: Any = genai.LLMPipeline(str(file), "CPU", INFERENCE_NUM_THREADS=torch.get_num_threads(), **more)

    def write(request: Request) -> list[int]:
        config: Any = genai.GenerationConfig(max_new_tokens=request.max_new_tokens, do_sample=False)
        config.set_eos_token_id(min(request.eos, default=-1))
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        return list(pipeline.generate(ov.Tensor(np.array([request.prompt])), config).tokens[0])

    return write


def _llama_cpp(file: Path, lookup: bool) -> Way:
    from llama_cpp import Llama  # type: ignore[import-not-found,unused-ignore]
    from llama_cpp.llama_speculative import (  # type: ignore[import-not-found,unused-ignore]
        LlamaPromptLookupDecoding,
    )

    threads = torch.get_num_threads()
    guess = LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=5) if lookup else None
    model: Any = Llama(
        str(file), n_ctx=4096, n_threads=threads, n_threads_batch=threads, draft_model=guess, verbose=False, logits_all=lookup
    )

    def write(request: Request) -> list[int]:
        model.reset()
        written: list[int] = []
        for token in model.generate(list(request.prompt), temp=0.0, repeat_penalty=1.0):
            if token in request.eos or len(written) == request.max_new_tokens:
                break
            written.append(int(token))
        return written

    return write
