"""What a pass over a few tokens costs: with the chosen kernels, with torch's own, and bit for bit, beside its matrix products.

    python benchmarks/passes.py --target smollm2 --dtype float32 --out passes.json

Stock is torch's kernels, ours the faster linear layers, bits the same bit for bit, compiled as machine code. One process,
all ways of one width in turns; the floor is the larger of bytes over the speed at which this machine reads
memory and operations over that at which it multiplies, measured in the same run.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftree.boundary.machine import interleaved
from draftree.cli.terminal import progress
from draftree.errors import UserError
from draftree.evaluation.profile import Ceilings
from draftree.evaluation.provenance import provenance
from draftree.models.feed import Feed
from draftree.models.native_linear import NativeLinear
from draftree.models.target import Target

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
WAYS: dict[str, dict[str, Any]] = {
    "stock": {"kernels": "stock", "exactness": "ties"},
    "ours": {"exactness": "ties", "compile": False},
    "bits": {"exactness": "bits", "compile": False},
    "compiled": {"exactness": "bits", "compile": True},
}
"""Ways of loading a target."""


def passes(target: Target, context: int) -> Callable[[int], Callable[[], Any]]:
    """A pass over a chain of n tokens behind a context, for any n."""
    decoder = target.decoder
    cache, ids = decoder.new_cache(1, context + max(WIDTHS)), np.arange(context + max(WIDTHS)) % decoder.vocab
    decoder.forward(cache, Feed.chains([ids[:context]], cache.lengths.copy(), decoder.device))
    cache.keep(0, np.arange(context))
    return lambda n: partial(
        decoder.forward, cache, Feed.chains([ids[context : context + n]], cache.lengths.copy(), decoder.device)
    )


def products(target: Target, n: int) -> Callable[[], None]:
    """The matrix products of a pass over n tokens, by the kernels of its layers."""
    layers = [m for m in target.decoder.model.modules() if isinstance(m, nn.Linear)]
    return multiplied([(layer.in_features, layer.forward) for layer in layers], n, target.decoder.dtype)


def multiplied(layers: list[tuple[int, Callable[[Tensor], Tensor]]], n: int, dtype: torch.dtype) -> Callable[[], None]:
    """Linear layers one after the other, each given with the entries of its rows."""
    rows = {w: torch.ones(1, n, w, dtype=dtype) for w, _ in layers}

    def work() -> None:
        for wide, layer in layers:
            layer(rows[wide])

    return work


def tiled(target: Target) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
    """The matrix products of a pass of compiled layers: by the same code, those of one input together as there."""
    found: list[tuple[int, Callable[[Tensor], Tensor]]] = []
    for layer in target.decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for several in (
            (attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,),
        ):  # fmt: skip
            found.append((several[0].in_features, NativeLinear(torch.cat([linear.weight for linear in several]))))
    head = target.decoder.model.get_output_embeddings()
    return [*found, (head.in_features, NativeLinear(head.weight))]


@torch.inference_mode()
def main() -> int:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--target", default="smollm2")
    ap.add_argument("--dtype", choices=("float32", "bfloat16"))
    ap.add_argument("--context", type=int, default=256)
    ap.add_argument("--quantize", action="append", default=[], choices=("int8", "int4"), help="also with rounded weights")
    ap.add_argument("--seconds", type=float, default=6.0, help="for each width, all ways together")
    ap.add_argument("--out", type=Path, required=True)
    args = ap.parse_args()
    try:
        asked = WAYS | {kind: {"quantize": kind, "compile": False} for kind in args.quantize}
        asked |= {"compiled int4": {"quantize": "int4", "compile": True}} if "int4" in args.quantize else {}
        targets = {name: Target.load(args.target, args.dtype, **how) for name, how in asked.items()}
    except UserError as error:
        print(f"passes: {error}", file=sys.stderr)
        return 2
    ways, decoder = {name: passes(t, args.context) for name, t in targets.items()}, targets["ours"].decoder
    ceilings, rows, laid_out = Ceilings.measured(decoder), list[dict[str, float]](), tiled(targets["compiled"])
    with progress("timing passes", len(WIDTHS)) as tell:
        for i, n in enumerate(WIDTHS):
            ours = multiplied(laid_out, n, decoder.dtype)
            works = [*(way(n) for way in ways.values()), products(targets["ours"], n), ours]
            found = dict(
                zip([*ways, "products", "compiled products"], interleaved(works, decoder.device, args.seconds), strict=True)
            )
            found["floor"] = ceilings.floor(decoder, n, args.context)
            rows.append({"width": n} | {name: round(1000 * s, 2) for name, s in found.items()})
            tell(i + 1)
    first = rows[0]
    for row in rows:
        row |= {"ours over stock": row["ours"] / row["stock"], "ours over products": row["ours"] / row["products"]}
        row |= {"over one token": row["ours"] / first["ours"], "bits over one token": row["bits"] / first["bits"]}
        row |= {"compiled over products": row["compiled"] / row["compiled products"]}
        row |= {
            "compiled over ours": row["compiled"] / row["ours"],
            "compiled over one token": row["compiled"] / first["compiled"],
        }
    about = provenance(targets["compiled"], 0) | {"context": args.context}
    args.out.write_text(json.dumps({"rows": rows, "provenance": about}, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{name} {value:.{0 if name == 'width' else 2}f}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
