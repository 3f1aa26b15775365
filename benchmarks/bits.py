"""Do texts differ from what the model writes by itself? In bfloat16, beside transformers' own speculative ways.

    python benchmarks/bits.py --target smollm2 --suite spec_bench.jsonl --limit 20 --exactness bits --out bits.json
    python benchmarks/bits.py … --exactness ties --out ties.json          # the same with transformers' sdpa
    python benchmarks/bits.py … --variant avx2 --out avx2.json            # with other native kernels

Greedy texts are compared with stock `generate` of the same model object, alone. Where native
kernels run, at four bits and at temperature 1, they are compared with plain decoding of the same
seed, alone: transformers' modules round otherwise than native kernels, torch's four-bit layers
have other bits in passes of another width, and transformers draws otherwise. With
`--rows` draftree writes so many texts in one batch, whatever their lengths, plain ones too, and
stock `generate` pads them to one length beside the texts that it writes alone. Of a text that
differs it is told where, and how far apart the two tokens' logits stood, in units in the last
place. Prompts are spread evenly over the suite; a run that was stopped goes on with the same
settings.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from draftree import Request, Sampling, Target, native
from draftree.cli.arguments import quiet
from draftree.data.prompts import encode
from draftree.engine import Engine, generate_plain, load
from draftree.evaluation import suites
from draftree.evaluation.provenance import commit, fingerprint, provenance
from draftree.evaluation.result_rows import save
from draftree.evaluation.teacher_forcing import take_evenly
from draftree.models.forward_batch import ForwardBatch
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


def plainly(target: Target, requests: list[Request]) -> list[list[int]]:
    """Return the tokens of plain decoding in one batch."""
    return generate_plain(target, requests).tokens


def plainly_alone(target: Target, requests: list[Request]) -> list[list[int]]:
    """Return the tokens of plain decoding of each text alone."""
    return [plainly(target, [request])[0] for request in requests]


def stock(target: Target, temperature: float) -> bool:
    """Return whether texts are compared with those of stock `generate`."""
    four = target.loading.quantize == "int4"
    return not temperature and not target.decoder.native_kinds and not four


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
    found: dict[str, Batch] = {}
    if stock(target, temperature):
        alone = speculative(target, assistant)
        found = {name: partial(one_by_one, way) for name, way in alone.items()}
        if rows > 1:
            found["transformers: generate, padded"] = partial(padded, target)
    elif rows > 1:
        found["draftree: plain"] = partial(plainly, target)
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
    ids = np.array([*request.prompt, *wanted[:at]])
    with torch.inference_mode():
        cache = target.decoder.new_cache(1, len(ids))
        batch = ForwardBatch.chains([ids], cache.lengths.copy(), target.decoder.device)
        logits = target.decoder.forward(batch, cache).logits[-1]
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


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
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
    parser.add_argument("--variant", choices=(*native.available(), native.OFF))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--assistant", help="what `draftree export vdm --standalone` writes")
    parser.add_argument("--pair", action="append", default=[], metavar="'DRAFTER POLICY'")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def finished_lines(kept: Path, about: Mapping[str, str]) -> list[Any]:
    """Return what a stopped run of the same settings has kept; nothing if the settings differ."""
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
    return lines[1:] if lines[:1] == [about] else []


def main() -> None:
    """Generate and compare texts, then print and save the result."""
    args = arguments()
    if args.variant not in (None, native.variant()):  # it is chosen when draftree is imported
        os.environ[native.VARIABLE] = args.variant
        os.execv(sys.executable, [sys.executable, *sys.argv])
    quiet()
    how = {"compile": args.compile, "quantize": args.quantize}
    target = Target.load(args.target, dtype=args.dtype, exactness=args.exactness, **how)
    prompts = take_evenly(suites.load(args.suite).prompts, args.limit)
    sampling = Sampling(temperature=args.temperature, seed=1)
    encoded = (encode(target.tokenizer, p.content) for p in prompts)
    requests = [
        Request(ids, args.max_new_tokens, target.eos, i, sampling=sampling)
        for i, ids in enumerate(encoded)
    ]
    every = ways(target, args.temperature, args.assistant, args.pair, args.rows)
    if stock(target, args.temperature):
        own: Batch = partial(one_by_one, partial(theirs, target))
    else:
        own = partial(plainly_alone, target)
    kept = args.out.with_name(args.out.name + ".partial")
    about = {k: str(v) for k, v in vars(args).items() if k != "out"}
    about |= {"weights": fingerprint(target.decoder.model), "kernels": native.variant()}
    about |= {"commit": str(commit())}
    done = finished_lines(kept, about)
    whole = len(done) // (len(every) * args.rows)  # batches; one that was broken off is begun anew
    del done[whole * len(every) * args.rows :]
    write_text(kept, "".join(json.dumps(line) + "\n" for line in (about, *done)))
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
