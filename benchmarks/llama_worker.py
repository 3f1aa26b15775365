"""Score tokens with llama.cpp; perplexity.py starts it with the interpreter of an environment that has `xllamacpp` and NumPy.

python llama_worker.py MODEL.gguf THREADS

Standard input is a JSON list of windows, each a list of token ids. Standard output is a JSON list
with the negative log-likelihood of each token of a window given those before it in the same window,
its first token left out. The wheel of xllamacpp exports the C functions of llama.cpp, which are
called here: its Python classes give no logits of a prompt.
"""

import ctypes
import json
import os
import sys
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_uint32,
    c_void_p,
)
from typing import Any

import numpy as np

SIZE = 2048
"""Bytes that hold the parameters of any version; they are passed in memory, so more do no harm."""


class Params(Structure):
    """Parameters of a model or context, whose first entries are known."""

    _fields_ = (("first", c_uint32 * 3), ("others", c_int8 * SIZE))


class Batch(Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


def library() -> Any:
    """Return the C functions of the installed xllamacpp."""
    from xllamacpp import xllamacpp  # type: ignore[import-not-found,unused-ignore]

    found = ctypes.CDLL(xllamacpp.__file__)
    for name, result, arguments in (
        ("llama_model_default_params", Params, ()),
        ("llama_context_default_params", Params, ()),
        ("llama_model_load_from_file", c_void_p, (c_char_p, Params)),
        ("llama_init_from_model", c_void_p, (c_void_p, Params)),
        ("llama_n_ctx", c_uint32, (c_void_p,)),
        ("llama_set_n_threads", None, (c_void_p, c_int32, c_int32)),
        ("llama_model_get_vocab", c_void_p, (c_void_p,)),
        ("llama_vocab_n_tokens", c_int32, (c_void_p,)),
        ("llama_batch_init", Batch, (c_int32, c_int32, c_int32)),
        ("llama_decode", c_int32, (c_void_p, Batch)),
        ("llama_get_logits", POINTER(c_float), (c_void_p,)),
        ("llama_get_memory", c_void_p, (c_void_p,)),
        ("llama_memory_clear", None, (c_void_p, c_bool)),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    found.llama_backend_init()
    return found


def scores(path: str, threads: int, windows: list[list[int]]) -> list[list[float]]:
    """Return the negative log-likelihoods of the tokens of each window but its first."""
    llama, longest = library(), max(map(len, windows))
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.first[:] = [longest] * 3  # n_ctx, n_batch, n_ubatch
    context = llama.llama_init_from_model(model, params)
    if not context or llama.llama_n_ctx(context) < longest:
        raise SystemExit(f"llama.cpp: no context of {longest} tokens for {path}")
    llama.llama_set_n_threads(context, threads, threads)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch, told = llama.llama_batch_init(longest, 0, 1), list[list[float]]()
    for tokens in windows:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        if status := llama.llama_decode(context, batch):
            raise SystemExit(f"llama.cpp: llama_decode returned {status}")
        flat = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(tokens), vocab))
        logits = flat[:-1].astype(np.float64)
        largest = logits.max(1)
        whole = largest + np.log(np.exp(logits - largest[:, None]).sum(1))
        told.append((whole - logits[np.arange(len(tokens) - 1), tokens[1:]]).tolist())
    return told


def main() -> int:
    """Score the windows of standard input; return the exit status."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints
    json.dump(scores(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)), answer)
    answer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
