"""Score tokens or time passes with llama.cpp, in an environment that has `xllamacpp` and NumPy.

    python llama_worker.py score MODEL.gguf THREADS     # perplexity.py starts it
    python llama_worker.py time MODEL.gguf THREADS      # passes.py starts it

`score`: standard input is a JSON list of windows, each a list of token ids. Standard output is a
JSON list with the negative log-likelihood of each token of a window given those before it in the
same window, its first token left out.

`time`: answers the requests of passes.py, a line each.

The wheel of xllamacpp exports the C functions of llama.cpp, which are called here: its Python
classes give no logits of a prompt.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
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


LONGEST = 8448
"""Tokens of the cache when passes are timed: 8,192 of context, and a pass after them."""


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
        ("llama_synchronize", None, (c_void_p,)),
        ("llama_get_logits", POINTER(c_float), (c_void_p,)),
        ("llama_get_memory", c_void_p, (c_void_p,)),
        ("llama_memory_clear", None, (c_void_p, c_bool)),
        ("llama_memory_seq_rm", c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    found.llama_backend_init()
    return found


class Model:
    """A loaded model with a context.

    Args:
        path: a .gguf file.
        threads: threads of a pass.
        length: tokens that the cache holds.
        piece: tokens of a prompt that are read at a time; llama.cpp's own default is 512.
    """

    def __init__(self, path: str, threads: int, length: int, piece: int) -> None:
        self.llama = library()
        model = self.llama.llama_model_load_from_file(
            path.encode(), self.llama.llama_model_default_params()
        )
        params = self.llama.llama_context_default_params()
        params.first[:] = [length, length, piece]  # n_ctx, n_batch, n_ubatch
        self.context = self.llama.llama_init_from_model(model, params)
        if not self.context or self.llama.llama_n_ctx(self.context) < length:
            raise SystemExit(f"llama.cpp: no context of {length} tokens for {path}")
        self.llama.llama_set_n_threads(self.context, threads, threads)
        self.vocab = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(model))
        self.memory = self.llama.llama_get_memory(self.context)
        self._batch = self.llama.llama_batch_init(length, 0, 1)

    def decode(self, tokens: list[int], start: int, logits: bool) -> None:
        """Run a pass.

        Args:
            tokens: ids of one sequence.
            start: tokens before them in the cache.
            logits: of all tokens, or of the last one only.
        """
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = logits or i == len(tokens) - 1
        if status := self.llama.llama_decode(self.context, batch):
            raise SystemExit(f"llama.cpp: llama_decode returned {status}")
        self.llama.llama_synchronize(self.context)

    def forget(self, length: int = 0) -> None:
        """Remove all tokens from the cache but the first `length`."""
        if length:
            self.llama.llama_memory_seq_rm(self.memory, 0, length, -1)
        else:
            self.llama.llama_memory_clear(self.memory, True)


def scores(path: str, threads: int, windows: list[list[int]]) -> list[list[float]]:
    """Return the negative log-likelihoods of the tokens of each window but its first."""
    longest = max(map(len, windows))
    model, told = Model(path, threads, longest, longest), list[list[float]]()
    for tokens in windows:
        model.forget()
        model.decode(tokens, 0, logits=True)
        flat = model.llama.llama_get_logits(model.context)
        logits = np.ctypeslib.as_array(flat, (len(tokens), model.vocab))[:-1].astype(np.float64)
        largest = logits.max(1)
        whole = largest + np.log(np.exp(logits - largest[:, None]).sum(1))
        told.append((whole - logits[np.arange(len(tokens) - 1), tokens[1:]]).tolist())
    return told


def time_passes(path: str, threads: int, answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer the requests of passes.py: milliseconds of passes and prompts."""
    model = Model(path, threads, LONGEST, 512)
    filled = 0
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        prompt = "prompt" in request
        context = 0 if prompt else request["context"]
        count = request["prompt" if prompt else "tokens"]
        if filled != context or prompt:
            model.forget()
            if context:
                model.decode([i % model.vocab for i in range(context)], 0, logits=False)
            filled = context
        tokens = [(context + i) % model.vocab for i in range(count)]
        found = []
        for _ in range(request["repeats"]):
            start = time.perf_counter()
            model.decode(tokens, context, logits=not prompt)
            found.append(1000 * (time.perf_counter() - start))
            model.forget(context)
        answer({"ms": found})


def main() -> int:
    """Do what the first argument says; return the exit status."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints
    task, path, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if task == "score":
        json.dump(scores(path, threads, json.load(sys.stdin)), stdout)
    else:
        time_passes(
            path, threads, lambda reply: print("@" + json.dumps(reply), file=stdout, flush=True)
        )
    stdout.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
