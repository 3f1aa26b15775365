"""Do texts differ from what the model writes by itself? In bfloat16, beside transformers' own speculative ways.

    python benchmarks/bits.py --target smollm2 --suite spec_bench.jsonl --limit 20 --exactness bits --out bits.json
    python benchmarks/bits.py … --exactness ties --out ties.json          # the same with transformers' sdpa

Greedy texts are compared with stock `generate` of the same model object, alone, those at
temperature 1 with plain decoding of the same seed (transformers draws otherwise). With `--rows`
draftree writes so many texts in one batch, whatever their lengths, and stock `generate` pads them
to one length beside the texts that it writes alone. Of a text that differs it is told where, and
how far apart the two tokens' logits stood, in units in the last place. Prompts are spread evenly
over the suite; a run that was stopped goes on.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from draftree import Request, Sampling, Target
from draftree.cli.arguments import quiet
from draftree.data.prompts import encode
from draftree.engine import Engine, load, plain
from draftree.evaluation import suites
from draftree.evaluation.provenance import provenance
from draftree.evaluation.result_rows import save
from draftree.evaluation.teacher_forcing import evenly_spread
from draftree.utils.files import append, write_text
from peers import Way, speculative, theirs

DRAFTERS, POLICIES = ("pld", "suffix", "edd"), ("chain", "eagle2", "yield")
Batch = Callable[[list[Request]], list[list[int]]]
"""Writes the texts of some requests."""


def ours(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """Return the tokens that draftree generates in one batch, without reusing earlier caches."""
    return engine.write(requests, reuse=False).tokens


def one_by_one(way: Way, requests: list[Request]) -> list[list[int]]:
    """Return the tokens that a way for single requests generates."""
    return [way(request)[0] for request in requests]


def padded(target: Target, requests: list[Request]) -> list[list[int]]:
    """Return what transformers' `generate` generates for a batch padded on the left."""
    prompts = [torch.tensor(request.prompt) for request in requests]
    ids, seen = (
        pad_sequence(some, batch_first=True, padding_side="left")
        for some in (prompts, map(torch.ones_like, prompts))
    )
    eos = requests[0].eos
    count = requests[0].max_new_tokens
    model = target.decoder.model
    stop: dict[str, Any] = {"eos_token_id": sorted(eos), "pad_token_id": min(eos, default=0)}
    rows = model.generate(ids, attention_mask=seen, max_new_tokens=count, do_sample=False, **stop)[
        :, ids.shape[1] :
    ].tolist()  # type: ignore[operator]
    ends = (next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in rows)
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def ways(
    target: Target, temperature: float, assistant: str | None, pairs: list[str], rows: int
) -> dict[str, Batch]:
    """Return every way by its name."""
    alone = {} if temperature else speculative(target, assistant)
    found: dict[str, Batch] = {name: partial(one_by_one, way) for name, way in alone.items()}
    if rows > 1 and not temperature:
        found["transformers: generate, padded"] = partial(padded, target)
    for pair in pairs or [f"{d} {p}" for d in DRAFTERS for p in POLICIES]:
        drafter, policy = pair.split(" ")
        found[f"draftree: {pair}"] = partial(ours, load(target, drafter, policy))
    return found


def apart(target: Target, request: Request, wanted: list[int], found: list[int]) -> dict[str, Any]:
    """Return the first token that differs, and how many ulps its logit was below the wanted one."""
    at = next(
        (i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
        min(len(wanted), len(found)),
    )
    if at == min(len(wanted), len(found)):
        return {"token": at, "behind": None}
    with torch.inference_mode():
        logits = target.decoder.model(torch.tensor([[*request.prompt, *wanted[:at]]])).logits[0, -1]
    one, other = logits[wanted[at]], logits[found[at]]
    unit = torch.finfo(logits.dtype).eps * 2.0 ** float(torch.floor(torch.log2(one.abs().float())))
    return {"token": at, "behind": round(float((one - other).float() / unit), 1)}


def compared(
    target: Target, requests: list[Request], every: dict[str, Batch], own: Batch
) -> Iterator[tuple[int, str, Any]]:
    """Yield for each way and request None if the text is the same, otherwise where it differs."""
    wanted = own(requests)
    for name, way in every.items():
        for request, known, found in zip(requests, wanted, way(requests), strict=True):
            yield (
                request.number,
                name,
                None if found == known else apart(target, request, known, found),
            )


def main() -> None:
    """Generate and compare texts, then print and save the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--suite", required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1, help="texts of a batch")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--exactness", choices=("bits", "ties"), default="bits")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="by default where it is faster"
    )
    parser.add_argument("--quantize", choices=("int4",))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--assistant", help="what `draftree export vdm --standalone` writes")
    parser.add_argument("--pair", action="append", default=[], metavar="'DRAFTER POLICY'")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    quiet()
    how = {"compile": args.compile, "quantize": args.quantize}
    target = Target.load(args.target, dtype=args.dtype, exactness=args.exactness, **how)
    prompts = evenly_spread(suites.load(args.suite).prompts, args.limit)
    sampling = Sampling(temperature=args.temperature, seed=1)
    encoded = (encode(target.tokenizer, p.content) for p in prompts)
    requests = [
        Request(ids, args.max_new_tokens, target.eos, i, sampling=sampling)
        for i, ids in enumerate(encoded)
    ]
    every = ways(target, args.temperature, args.assistant, args.pair, args.rows)
    own = (
        (lambda some: plain(target, some).tokens)
        if args.temperature
        else partial(one_by_one, partial(theirs, target))
    )
    kept = args.out.with_name(args.out.name + ".partial")
    done = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
    whole = len(done) // (len(every) * args.rows)  # batches; one that was broken off is begun anew
    del done[whole * len(every) * args.rows :]
    write_text(kept, "".join(json.dumps(line) + "\n" for line in done))
    for at in range(whole * args.rows, len(requests), args.rows):
        for line in compared(target, requests[at : at + args.rows], every, own):
            done.append(line)
            append(kept, json.dumps(line) + "\n")
            print(
                f"{len(done)} of {len(requests) * len(every)}: {line[1]}, {line[2] or 'the same'}",
                flush=True,
            )
    rows = []
    for name in every:
        found = [where for _, way, where in done if way == name and where is not None]
        behind = sorted(w["behind"] for w in found if w["behind"] is not None)
        rows.append({"way": name, "texts": len(requests), "differ": len(found), "behind": behind})
        print(f"{name:40} {len(found):3} of {len(requests)} differ, behind by {behind}")
    asked = {
        name: getattr(args, name)
        for name in ("suite", "max_new_tokens", "exactness", "temperature", "rows")
    }
    save({"provenance": provenance(target, 1) | asked, "rows": rows}, args.out)
    kept.unlink()


if __name__ == "__main__":
    main()
