"""What a GPU makes of the passes that trees need, in one command of some eight minutes: `make gpu`.

    python benchmarks/gpu.py --out gpu                    # gpu/measured-1b.json, gpu/measured-8b.json, gpu/report.json
    python benchmarks/gpu.py --out gpu --device cpu --small     # tiny sizes on a CPU, to see that it runs; says it is no GPU

It measures ceilings (copies, products), seconds of a pass over n tokens behind contexts for Llama shapes of 1B and 8B, random
weights, draft steps of one layer, the tree kernel beside SDPA, and the demo end to end. Each part is a line of a journal, so
that a run that was stopped goes on with the next part. The machine files are in the format of `draftree/machines`.

Shapes: n tokens of a pass, H query heads, G key-value heads, S slots, D entries of a key.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftree.boundary.files import append, write_text
from draftree.boundary.machine import interleaved, machine
from draftree.costs.curves import Costs, CostTable
from draftree.engine import load
from draftree.errors import UserError
from draftree.models.decoder import Decoder
from draftree.models.forward_batch import ForwardBatch
from draftree.models.target import usable
from draftree.request import Request

LONGEST = 2.0
"""Seconds in which the passes behind one context are timed."""
SHAPES: Mapping[str, tuple[int, int, int, int, int, int]] = {
    "1b": (16, 2048, 8192, 32, 8, 128_256),
    "8b": (32, 4096, 14_336, 32, 8, 128_256),
}
"""Layers, hidden size, feed-forward size, H, G, V: those of Llama 3."""
SMALL: Mapping[str, tuple[int, int, int, int, int, int]] = {"tiny": (2, 32, 64, 4, 2, 64)}
WIDTHS, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (512, 4096, 16_384)
PROMPT = "Lena reads 12 pages every morning and 20 pages every evening. How many pages does she read in two weeks?"
TREES = ((1, 64), (16, 64), (64, 64), (64, 128))
"""n and D of the attentions that are compared."""


def model(sizes: tuple[int, int, int, int, int, int], context: int, device: torch.device, layers: int = 0) -> Decoder:
    """A Llama of random weights, of all its layers or a few."""
    count, hidden, wide, heads, groups, vocab = sizes
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers or count,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=context, attn_implementation="sdpa",
    )  # fmt: skip
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device("meta"):
        made = LlamaForCausalLM(config).to(dtype)
    made = made.to_empty(device=device)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(0, 0.02)
    made.model.rotary_emb = type(made.model.rotary_emb)(config).to(device)  # its frequencies are no parameters
    return Decoder(made.requires_grad_(False))


def passes(decoder: Decoder, widths: tuple[int, ...], context: int) -> dict[int, float]:
    """Seconds of a pass over n tokens behind so many."""
    cache = decoder.new_cache(1, context + max(widths))
    cache.lengths[:] = context  # of zeros: what lies there takes as long as any text

    def once(n: int) -> None:
        places = context + np.arange(n)
        seen = np.tri(n, dtype=np.bool_)
        feed = ForwardBatch.packed(
            [np.arange(n) % decoder.vocab], [places], cache.lengths.copy(), [seen], [places], decoder.device
        )
        decoder.forward(feed, cache)

    with torch.inference_mode():
        return dict(zip(widths, interleaved([partial(once, n) for n in widths], decoder.device, LONGEST), strict=True))


def curves(sizes: tuple[int, int, int, int, int, int], context: int, widths: tuple[int, ...], device: torch.device) -> Any:
    """A target's passes behind a context, and draft steps of one layer and its head, as an entry of a machine file."""
    room = context + 2 * max(widths)
    target = passes(model(sizes, room, device), widths, context)
    draft = passes(model(sizes, room, device, layers=1), tuple(w for w in widths if w <= 32), context)
    return asdict(Costs(draft, target, 0.0, context))


def ceilings(size: int, device: torch.device) -> dict[str, float]:
    """Bytes a second of a copy, which reads and writes, and operations a second of a product of two squares."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    one = torch.ones(size, size, dtype=dtype, device=device)
    other = torch.empty_like(one)
    copying, product = interleaved([lambda: other.copy_(one), lambda: torch.mm(one, one, out=other)], device, LONGEST)
    return {
        "copy_bytes_per_second": 2 * one.numel() * one.element_size() / copying,
        "operations_per_second": 2 * size**3 / product,
    }


def attention(context: int, device: torch.device) -> list[dict[str, Any]]:
    """The tree kernel beside SDPA with a mask, for 32 query heads in groups of 4."""
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from draftree.kernels.tree_attention import tree_attention

    found = []
    for n, width in TREES:
        q, k = (torch.randn(1, heads, s, width, dtype=torch.bfloat16, device=device) for heads, s in ((32, n), (8, context)))
        mask = torch.zeros(1, 1, n, context, dtype=torch.bfloat16, device=device)
        mask[..., context - n :] = torch.full((n, n), torch.finfo(torch.bfloat16).min, device=device).triu(1)
        works: list[Callable[[], Any]] = [
            lambda q=q, k=k, mask=mask: tree_attention(q, k, k, mask, q.shape[3] ** -0.5),
            lambda q=q, k=k, mask=mask: sdpa(q, k, k, attn_mask=mask, enable_gqa=True),
        ]
        ours, theirs = interleaved(works, device, LONGEST)
        found.append({"tokens": n, "head": width, "context": context, "tree_kernel": ours, "sdpa": theirs})
    return found


def demo(device: torch.device, tokens: int) -> dict[str, Any]:
    """Tokens a second of the demo, plain and drafted, and whether both texts are the same."""
    engine = load("demo", device=device)
    ids = engine.tokenizer(PROMPT)["input_ids"]
    requests = [Request(ids, tokens, engine.target.eos)]
    engine.write(requests, reuse=False)  # what is compiled or measured on first use
    start = time.perf_counter()
    drafted = engine.write(requests, reuse=False)
    between = time.perf_counter()
    alone = engine.plain(requests)
    count, seconds = drafted.stats.new_tokens, (between - start, time.perf_counter() - between)
    found = {"tokens": count, "drafted_per_second": count / seconds[0], "plain_per_second": count / seconds[1]}
    return found | {"acceptance_length": drafted.stats.acceptance_length, "same_text": drafted.tokens == alone.tokens}


def parts(device: torch.device, small: bool) -> dict[str, Callable[[], Any]]:
    """Every part by its name, the short ones first."""
    shapes, widths, contexts = (SMALL, (1, 4), (16, 32)) if small else (SHAPES, WIDTHS, CONTEXTS)
    found: dict[str, Callable[[], Any]] = {"ceilings": partial(ceilings, 256 if small else 8192, device)}
    found["demo"] = partial(demo, device, 8 if small else 256)
    for context in contexts:
        if device.type == "cuda":
            found[f"attention {context}"] = partial(attention, context, device)
        for name, sizes in shapes.items():
            found[f"{name} {context}"] = partial(curves, sizes, context, widths, device)
    return found


def main() -> None:
    """Measures what the journal lacks, and writes the machine files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    args = parser.parse_args()
    try:
        device = usable(args.device)
    except UserError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    about = machine(device) | {"small": str(args.small)}
    journal = args.out / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.is_file() else []
    done = {line["part"]: line["found"] for line in lines if line["about"] == about}
    if device.type != "cuda":
        print(f"this is no GPU ({about['device']}): the figures are a CPU's")
    every = parts(device, args.small)
    for i, (name, measure) in enumerate(every.items(), 1):
        if name not in done:
            start = time.perf_counter()
            done[name] = json.loads(json.dumps(measure()))
            append(journal, json.dumps({"part": name, "about": about, "found": done[name]}) + "\n")
            print(f"{i} of {len(every)}: {name}, {time.perf_counter() - start:.0f} s", flush=True)
    told = {"kind": "measured", "source": "benchmarks/gpu.py, Llama shapes of random weights", "threads": about["threads"]}
    told |= {"torch": about["torch"], "assumptions": "a draft step is one layer and one head; a commit costs nothing"}
    for name in SMALL if args.small else SHAPES:
        entries = [done[part] for part in every if part.startswith(f"{name} ")]
        path = args.out / f"measured-{name}.json"
        write_text(path, json.dumps({"entries": entries, "about": {**told, "device": f"{about['device']}, {name}"}}, indent=1))
        CostTable.load(path)  # as `--machine` and `--costs` read it
    write_text(args.out / "report.json", json.dumps({"provenance": about, "parts": done}, indent=1) + "\n")
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
