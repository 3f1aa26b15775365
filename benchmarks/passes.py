"""Time forward passes by number of tokens: of kernels, variants, commits and other programs, in turns.

    python benchmarks/passes.py --dtype bfloat16 --variant avx2 --checkout ../before --out passes.json
    python benchmarks/passes.py --dtype bfloat16 --variant avx2 --program 'prototype=./gemm_avx2' --out paired.json
    python benchmarks/passes.py --quantize int4 --llama ENV/bin/python --prompt 2000 --out l.json
    python benchmarks/passes.py --context 0 8000 --tokens 16 --out far.json
    python benchmarks/passes.py --shape llama-1b --quantize int4 --tokens 1 8 16 --out shapes.json

Every way is a process of its own, which loads the target once and then waits. In each round every
way answers in turn, so that a change of the machine's speed affects all of them; the others are
idle meanwhile. Figures are medians over the rounds, in milliseconds. `native` is the default
kernels, `stock` is torch's; a checkout runs with the Python of its `.venv`. llama.cpp has files of
the same weights: one in the dtype that is asked for, and with four bits one in Q4_0, whose head is
in Q8_0. A program prints lines `NAME n=TOKENS … X ms`, as the prototypes of kernels do. The floor
is the larger of two times: the bytes over the speed at which this machine reads memory, and the
operations over the speed at which it multiplies.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

TOKENS = (1, 2, 4, 8, 16, 32, 64)
NATIVE: dict[str, Any] = {"exactness": "bits", "compile": True}
STOCK: dict[str, Any] = {"kernels": "stock", "exactness": "ties", "compile": False}
SHAPES: dict[str, dict[str, int]] = {
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "llama-3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""Shapes of larger models, whose weights are random; all have 128,256 tokens and one matrix for
embedding and head."""
PRINTED = re.compile(r"^(?P<name>\S*) *n= *(?P<tokens>\d+) .*?(?P<ms>[\d.]+) ms", re.MULTILINE)
"""A line of a program: a name, the number of tokens, milliseconds."""


@dataclass(frozen=True)
class Way:
    """Describe how passes are computed.

    Attributes:
        options: options of `Target.load`.
        variant: variant of the native kernels; empty for the fastest.
        checkout: folder of another commit with its own environment; None for this one.
        program: another engine, as a command that answers the same requests.
    """

    options: dict[str, Any] = field(default_factory=dict)
    variant: str = ""
    checkout: Path | None = None
    program: tuple[str, ...] = ()

    @property
    def python(self) -> str:
        """Return the interpreter that runs it."""
        return (
            sys.executable
            if self.checkout is None
            else str(self.checkout / ".venv" / "bin" / "python")
        )


def ways(args: argparse.Namespace) -> dict[str, Way]:
    """Return the ways that are asked for, by name."""
    found = {"native": Way(NATIVE)}
    if args.stock:
        found["stock"] = Way(STOCK)
    found |= {f"native {variant}": Way(NATIVE, variant) for variant in args.variant}
    found |= {kind: Way({"quantize": kind, "compile": True}) for kind in args.quantize}
    found |= {
        f"{kind} {variant}": Way({"quantize": kind, "compile": True}, variant)
        for kind in args.quantize
        for variant in args.variant
    }
    found |= {
        f"checkout {folder.name}": Way(NATIVE, checkout=folder.absolute())
        for folder in args.checkout
    }
    return found


def llama_ways(target: str, dtype: str, quantize: Sequence[str], python: Path) -> dict[str, Way]:
    """Return llama.cpp's ways; its files are written to build/gguf.

    Args:
        target: a Llama without biases.
        dtype: the type of the first file.
        quantize: kinds of draftree's ways; with "int4", a second file has Q4_0.
        python: interpreter of an environment that has `xllamacpp`.
    """
    import torch

    from draftree import Target
    from perplexity import write_gguf

    folder = Path("build", "gguf")
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = Target.load(target, dtype="float32", compile=False).decoder.model
    found = {}
    for kind in [{"float32": "F32", "bfloat16": "BF16"}[dtype], *["Q4_0"] * ("int4" in quantize)]:
        file = folder / f"{kind}.gguf"
        with torch.inference_mode():
            write_gguf(model, file, kind)
        worker = str(Path(__file__).with_name("llama_worker.py"))
        command = (str(python), worker, "time", str(file), str(torch.get_num_threads()))
        found[f"llama.cpp {kind}"] = Way(program=command)
    return found


# A worker, which also runs with the packages of another commit.


def serve(target_name: str, options: dict[str, Any]) -> None:
    """Load a target, then answer requests, one JSON object on a line each."""
    import numpy as np
    import torch

    from draftree.target.target import HiddenStateSpec, Target

    target = Target.load(target_name, **options)
    decoder = target.decoder
    caches: dict[int, Any] = {}

    def cache_after(context: int) -> Any:
        if context not in caches:
            cache = caches[context] = decoder.new_cache(1, context + 256)
            if context:
                target.prefill(cache, [np.arange(context) % decoder.vocab], HiddenStateSpec())
        return caches[context]

    def time_pass(tokens: int, context: int) -> Callable[[], Any]:
        cache = cache_after(context)
        ids = (np.arange(tokens) + context) % decoder.vocab
        starts = cache.lengths.copy()
        try:
            from draftree.models.forward_batch import ForwardBatch
        except ImportError:  # an earlier commit
            from draftree.models.feed import Feed

            feed = Feed.chains([ids], starts, decoder.device)
            return lambda: decoder.forward(cache, feed)
        batch = ForwardBatch.chains([ids], starts, decoder.device)
        return lambda: decoder.forward(batch, cache)

    def time_prompt(tokens: int) -> Callable[[], Any]:
        ids = np.arange(tokens) % decoder.vocab
        return lambda: target.prefill(decoder.new_cache(1, tokens + 8), [ids], HiddenStateSpec())

    def describe(contexts: list[int]) -> dict[str, Any]:
        from draftree.evaluation.provenance import provenance
        from draftree.evaluation.step_profile import Ceilings

        ceilings = Ceilings.measure(decoder)
        floors = {
            label(n, context, contexts): 1000 * ceilings.floor(decoder, n, context)
            for context in contexts
            for n in TOKENS
        }
        told = provenance(target, 0) | {"ceilings": asdict(ceilings)}
        return {"provenance": told, "floors": floors}

    from time import perf_counter

    answer({"ready": True})
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            if "describe" in request:
                answer(describe(request["describe"]))
                continue
            work = (
                time_prompt(request["prompt"])
                if "prompt" in request
                else time_pass(request["tokens"], request["context"])
            )
            seconds = []
            for _ in range(request["repeats"]):
                start = perf_counter()
                work()
                seconds.append(perf_counter() - start)
            answer({"ms": [1000 * s for s in seconds]})


def label(tokens: int, context: int, contexts: Sequence[int]) -> str:
    """Return the name of a row."""
    return str(tokens) if len(contexts) == 1 else f"{tokens} after {context}"


def answer(reply: dict[str, Any]) -> None:
    """Write a line for the process that asked."""
    print("@" + json.dumps(reply), flush=True)


# The process that sends requests.


class Worker:
    """Run a process that times passes in one way."""

    def __init__(self, way: Way, target: str, dtype: str | None) -> None:
        options = {
            **way.options,
            **({"dtype": dtype} if dtype and "quantize" not in way.options else {}),
        }
        command = way.program or [
            way.python,
            __file__,
            "--serve",
            json.dumps([target, options]),
        ]
        env = {**os.environ, **({"DRAFTREE_NATIVE": way.variant} if way.variant else {})}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer to a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                found: dict[str, Any] = json.loads(line[1:])
                return found
        raise SystemExit(self._process.wait() or 1)  # it has said why

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def worker(way: Way, target: str, dtype: str | None) -> Iterator[Worker]:
    """Provide a worker and end it afterwards."""
    started = Worker(way, target, dtype)
    try:
        yield started
    finally:
        started.close()


def printed_times(command: str) -> dict[tuple[str, int], float]:
    """Run a program; return the milliseconds that it prints, by name and number of tokens."""
    text = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    return {
        (line["name"], int(line["tokens"])): float(line["ms"]) for line in PRINTED.finditer(text)
    }


def random_model(shape: str) -> str:
    """Return the folder of a model with random weights, which is written the first time."""
    folder = Path("build", "shapes", shape)
    if not (folder / "config.json").is_file():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            **SHAPES[shape], vocab_size=128256, tie_word_embeddings=True, dtype=torch.bfloat16
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.to_empty(device="cpu").to(torch.bfloat16)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.fill_(1) if "norm" in name else weight.normal_(0, 0.02, generator=generator)
        model.tie_weights()
        model.save_pretrained(folder)
    return str(folder)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return rows of medians in milliseconds, and what they were measured on."""
    target = random_model(args.shape) if args.shape else args.target
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    found = ways(args)
    if args.llama is not None:
        found |= llama_ways(target, args.dtype or "bfloat16", args.quantize, args.llama)
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(worker(way, target, args.dtype))
            for name, way in found.items()
        }
        about = workers["native"].ask(describe=args.context)
        for _ in range(args.rounds):
            for context, tokens in product(args.context, args.tokens):
                row = label(tokens, context, args.context)
                for name, each in workers.items():
                    reply = each.ask(tokens=tokens, context=context, repeats=args.repeats + 1)
                    times[row, name] += reply["ms"][1:]  # the first one finds cold caches
            for program in args.program:
                prefix, _, command = program.partition("=")
                for (name, tokens), ms in printed_times(command).items():
                    if tokens in args.tokens:
                        row = label(tokens, args.context[0], args.context)
                        times[row, f"{prefix} {name}".strip()].append(ms)
            for tokens in args.prompt:
                for name, each in workers.items():
                    times[f"prompt {tokens}", name] += each.ask(prompt=tokens, repeats=1)["ms"]
    rows: dict[str, dict[str, Any]] = {}
    for (width, name), ms in times.items():
        figures = rows.setdefault(width, {"width": int(width) if width.isdigit() else width})
        figures[name] = round(median(ms), 2)
    for width, figures in rows.items():
        if width in about["floors"]:
            figures["floor"] = round(about["floors"][width], 2)
    return {
        "rows": list(rows.values()),
        "provenance": about["provenance"] | {"context": args.context, "rounds": args.rounds},
    }


def main() -> int:
    """Measure, save the result and print it."""
    if sys.argv[1:2] == ["--serve"]:
        serve(*json.loads(sys.argv[2]))
        return 0
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--target", default="smollm2")
    ap.add_argument(
        "--shape",
        choices=SHAPES,
        help="random weights in the shape of a larger model, instead of a target",
    )
    ap.add_argument("--dtype", choices=("float32", "bfloat16"))
    ap.add_argument("--context", type=int, nargs="+", default=[256])
    ap.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    ap.add_argument(
        "--prompt", type=int, nargs="*", default=[], help="also read prompts of so many tokens"
    )
    ap.add_argument("--stock", action="store_true", help="also with torch's kernels")
    ap.add_argument(
        "--variant",
        action="append",
        default=[],
        help="also with another variant of the native kernels",
    )
    ap.add_argument(
        "--quantize",
        action="append",
        default=[],
        choices=("int8", "int4"),
        help="also with rounded weights",
    )
    ap.add_argument(
        "--checkout",
        action="append",
        default=[],
        type=Path,
        help="also another commit, in a folder with a .venv",
    )
    ap.add_argument(
        "--llama",
        type=Path,
        metavar="PYTHON",
        help="also llama.cpp, with an interpreter that has `xllamacpp` and NumPy",
    )
    ap.add_argument(
        "--program", action="append", default=[], help="NAME=COMMAND that prints milliseconds"
    )
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--repeats", type=int, default=3, help="passes of a way in each round")
    ap.add_argument("--out", type=Path, required=True)
    args = ap.parse_args()
    result = measure(args)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
