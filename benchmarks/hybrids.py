"""What trees cost on models that fold the text into a state: a pass by width, the share of the tree form, and decoding.

    python benchmarks/hybrids.py --model qwen3_5 --pairs 0 --out benchmarks/results/hybrids_qwen3_5.json
    python benchmarks/hybrids.py --model lfm2 --seconds 0 --out benchmarks/results/hybrids_lfm2_texts.json

Random weights of real shapes. One thread by default. A pass over a root and n − 1 children, behind
256 tokens, is timed beside transformers' own pass over one token and beside path rows, the way that
needs no mathematics (`tests/helpers/path_rows.py`), in turns. The tree form is what is done in the place of
the mixers' functions, and the fold of a step's root; its share of a pass is told. Then `pld` and
`suffix` with `yield` and plain decoding write the same texts, in turns, token by token. Each pair
is saved; a run of the same settings goes on behind those in its file, so that they can be measured
one at a time.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftree import loop
from draftree.batch import SequenceBatch
from draftree.engine import Engine, cache_of, default_acceptor, load
from draftree.evaluation.provenance import provenance
from draftree.models.causal_lm import CausalLM
from draftree.models.recurrent.replaced_functions import PassFunctions
from draftree.models.recurrent.state_cache import States
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import HiddenStateSpec, Target
from draftree.tree import AcceptResult, Candidates, Tree
from draftree.utils.files import write_text
from draftree.utils.hardware import time_interleaved

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from hybrids import OneByOne
from path_rows import PathRows

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "qwen3_5_text",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": True,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
            "layer_types": ["conv", "conv", "full_attention"] * 3
            + ["conv", "full_attention"] * 3
            + ["conv"],
        },
    ),
}
"""By name, `model_type` and the published shape; the vocabulary is an option."""
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
PATHS = (1, 4, 16)
"""Widths at which path rows are timed."""
DRAFTERS = ("pld", "suffix")


def built(name: str, vocab: int, dtype: torch.dtype) -> Target:
    """Return a random model of a shape."""
    kind, values = MODELS[name]
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **values, **ends, vocab_size=vocab), dtype=dtype
    )
    return Target(CausalLM(model.eval().requires_grad_(False)), name)


def star(width: int) -> Tree:
    """Return a root and its children."""
    tree, children = (
        Tree.from_roots(np.zeros(1, np.int64), np.ones(1, np.int64)),
        np.arange(width - 1),
    )
    if width == 1:
        return tree
    zeros = np.zeros(width - 1)
    return tree.append(
        np.zeros(width - 1, np.int64),
        children,
        zeros,
        zeros,
        Candidates(children[None], zeros[None]),
    )


def by_width(
    target: Target, context: int, seconds: float, rows_too: bool
) -> list[dict[str, float | None]]:
    """Return the milliseconds of tree passes, transformers' own pass, and path rows by width."""
    prompt = np.arange(context) % 1000
    cache = target.new_cache(1, context + 65)
    other = target.new_cache(1, context + 65)
    oracle = PathRows(target, 1)
    target.prefill(cache, [prompt], HiddenStateSpec())
    stock = OneByOne(target.decoder.model, prompt.tolist())
    works: list[Callable[[], Any]] = [partial(stock._read, [1])]
    works += [partial(target.verify, cache, star(n), HiddenStateSpec()) for n in WIDTHS]
    if rows_too:
        oracle.prefill(other, [prompt])
        works += [partial(oracle.verify, other, star(n)) for n in PATHS]
    own, *found = [1000 * s for s in time_interleaved(works, target.decoder.device, seconds)]
    paths = dict(zip(PATHS, found[len(WIDTHS) :], strict=False))
    told = zip(WIDTHS, found[: len(WIDTHS)], strict=True)
    return [
        {"width": n, "tree_ms": tree, "path_rows_ms": paths.get(n), "stock_one_token_ms": own}
        for n, tree in told
    ]


def tree_form(target: Target, context: int, rounds: int) -> list[dict[str, float]]:
    """Return the share of a pass and its commit spent on the tree form, medians by width."""
    spent, plain = (
        [0.0],
        {name: vars(PassFunctions)[name] for name in ("conv", "delta", "ssd", "s6")},
    )

    def timed(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - start

    keep = States.keep
    found = []
    begun = target.new_cache(1, context + 65)
    target.prefill(begun, [np.arange(context) % 1000], HiddenStateSpec())
    for name, work in plain.items():
        setattr(
            PassFunctions, name, lambda *args, _work=work, **kwargs: timed(_work, *args, **kwargs)
        )
    setattr(States, "keep", lambda *args: timed(keep, *args))  # noqa: B010
    try:
        for width in WIDTHS[::2]:
            shares, tree = [], star(width)
            for _ in range(rounds):
                cache = begun.copy_sequences(np.zeros(1, np.int64))
                spent[0], start = 0.0, time.perf_counter()
                target.verify(cache, tree, HiddenStateSpec())
                target.commit(
                    cache, tree, AcceptResult((np.zeros(0, np.int64),), np.ones(1, np.int64))
                )
                shares.append(spent[0] / (time.perf_counter() - start))
            found.append({"width": width, "share": statistics.median(shares)})
    finally:
        for name, work in plain.items():
            setattr(PassFunctions, name, work)
        setattr(States, "keep", keep)  # noqa: B010
    return found


def pair(
    target: Target, engines: dict[str, Engine], new: int, number: int, temperature: float
) -> dict[str, dict[str, Any]]:
    """Compare the seconds of one text with and without drafts, and whether the texts are the same.

    Ratios are of wall time and of processor time.

    Plain decoding and the drafters take turns, token by token, so that other work on the machine
    affects all alike.
    """
    draw = np.random.default_rng(number)
    asked = [
        Request(
            draw.integers(3, 1000, 64).tolist(),
            new,
            sampling=Sampling(temperature=temperature, seed=number),
        )
    ]
    rows = SequenceBatch(cache_of(target, asked))
    runs = {
        "plain": (rows, loop.decode_plain(target, default_acceptor(temperature == 0), rows, asked))
    }
    runs |= {name: engine.begin(asked, reuse=False) for name, engine in engines.items()}
    going, seconds = list(runs), {name: np.zeros(2) for name in runs}
    while going:
        name = min(draw.permutation(going).tolist(), key=lambda n: len(runs[n][0].written[0]))
        start = np.array([time.perf_counter(), time.process_time()])
        if next(runs[name][1], None) is None:
            going.remove(name)
        seconds[name] += np.array([time.perf_counter(), time.process_time()]) - start
    found = {}
    for name in engines:
        clock, processor = (seconds[name] / seconds["plain"]).tolist()
        same, length = runs[name][0].written == rows.written, runs[name][0].stats.acceptance_length
        found[name] = {
            "clock": clock,
            "processor": processor,
            "acceptance_length": length,
            "same": same,
        }
    return found


def decoding(
    target: Target, new: int, temperature: float, done: list[Any], pairs: int
) -> Iterator[list[Any]]:
    """Yield the pairs of texts done so far after each one, with those of an earlier run first."""
    short = [Request(list(range(3, 67)), 4)]
    for name in DRAFTERS:  # measured, and compiled where that is the first run after the installation, before the first text
        load(target, name, "yield").write(short)
    engines = {name: load(target, name, "yield") for name in DRAFTERS}
    for number in range(len(done), pairs):
        done = [*done, pair(target, engines, new, number, temperature)]
        print(number, done[-1], file=sys.stderr, flush=True)
        yield done


def summary(done: list[Any]) -> dict[str, dict[str, Any]]:
    """Return medians over the pairs, and each pair's figures, by drafter."""
    by = {
        name: {key: [each[name][key] for each in done] for key in done[0][name]}
        for name in DRAFTERS
    }
    return {
        n: {f"{k}_median": statistics.median(f[k]) for k in ("clock", "processor")} | f
        for n, f in by.items()
    }


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time a model of a real shape, random weights.")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="The file to write.")
    add("--model", default="qwen3_5", choices=MODELS)
    add("--vocab", type=int, default=65536, help="Size of the vocabulary.")
    add("--dtype", default="float32", help="float32 or bfloat16.")
    add("--context", type=int, default=256, help="Tokens before a pass.")
    add("--seconds", type=float, default=120, help="Of all timed passes; 0 leaves them out.")
    add("--rounds", type=int, default=7, help="Passes of which the tree form's share is taken.")
    add("--new", type=int, default=256, help="Tokens of a text.")
    add("--pairs", type=int, default=10, help="Of texts, with those in the file; 0 for none.")
    add("--temperature", type=float, default=0.0, help="Of the texts.")
    add("--threads", type=int, default=1, help="Of torch.")
    add("--path-rows", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    """Time a model of a real shape with random weights."""
    asked = options()
    torch.set_num_threads(asked.threads)
    target = built(asked.model, asked.vocab, getattr(torch, asked.dtype))
    settings = ("model", "vocab", "dtype", "context", "threads")
    told: dict[str, Any] = {name: getattr(asked, name) for name in settings}
    if asked.seconds:
        told["passes"] = by_width(target, asked.context, asked.seconds, asked.path_rows)
        print(json.dumps(told["passes"], indent=1), file=sys.stderr, flush=True)
        told["tree_form"] = tree_form(target, asked.context, asked.rounds)
        print(json.dumps(told["tree_form"]), file=sys.stderr, flush=True)
    written = json.loads(asked.out.read_text()) if asked.out.exists() else {}

    def save(**more: Any) -> None:
        result = {"provenance": provenance(target, 0), **told, **more}
        write_text(asked.out, json.dumps(result, indent=1) + "\n")

    if not asked.pairs:
        return save()
    told |= {"temperature": asked.temperature, "new": asked.new}
    same = all(written.get(key) == value for key, value in told.items())
    done = written.get("pairs", []) if same else []
    for each in decoding(target, asked.new, asked.temperature, done, asked.pairs):
        save(decoding=summary(each), pairs=each)


if __name__ == "__main__":
    main()
