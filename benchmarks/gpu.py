"""The speed of draftree on a GPU, in one command of some fifteen minutes: `make gpu`.

    python benchmarks/gpu.py --out gpu                    # gpu/table.md, gpu/measured-1b.json, …, gpu/report.json
    python benchmarks/gpu.py --out gpu --device cpu --small     # tiny sizes on a CPU, to see that it runs; says it is no GPU

It measures ceilings (copies, products); texts by plain decoding, by transformers' assisted
generation and by draftree, eagerly and with CUDA graphs, one and eight at a time, at temperatures 0
and 1, for the shapes of SmolLM2 and of Llamas of 1 and 8 billion parameters; seconds of a pass over
n tokens behind contexts, and of draft steps of one layer; attention by groups beside SDPA; and the
demo end to end. Each part is a line of a journal, so that a run of the same commit that was stopped
goes on with the next. The machine files are in the format of `draftree/machines`.

Weights are random, as timings need no trained ones. What is accepted is scripted by them: the
embedding outweighs what layers add to it, and the head has each token followed by the next id, in
the target as in a draft of one layer and in a head of EAGLE-3's kind; after one token of five the
draft guesses another one. Both programs draft a chain of four tokens with the draft model;
transformers' takes one text at a time. With the head, trees of EAGLE-2 grow, 59 nodes in five
layers.

Shapes: n tokens of a pass, H query heads, G key-value heads, S slots, D entries of a key.
"""

import argparse
import gc
import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import draftree
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.drafters.eagle3 import EAGLE3, EAGLE3Drafter, EAGLE3Layer
from draftree.engine import Engine, load
from draftree.errors import UserError
from draftree.evaluation.provenance import commit
from draftree.models.causal_lm import CausalLM
from draftree.models.forward_batch import ForwardBatch
from draftree.models.graph_capture import EagerCapture, Graphs
from draftree.models.grouped_attention import grouped_attention
from draftree.policies.chain import Chain
from draftree.policies.eagle2 import EAGLE2
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.kernel_choice import use_grouped_attention
from draftree.target.target import Target, resolve_device
from draftree.testing.fakes import PassRecorder
from draftree.utils.files import append, write_text
from draftree.utils.hardware import machine, time_interleaved, time_work

Sizes = tuple[int, int, int, int, int, int]
"""Layers, hidden size, feed-forward size, H, G, V."""
LONGEST = 2.0
"""Seconds in which the passes after one context are timed."""
SHAPES: Mapping[str, Sizes] = {
    "smollm2": (30, 576, 1536, 9, 3, 49_152),
    "1b": (16, 2048, 8192, 32, 8, 128_256),
    "8b": (32, 4096, 14_336, 32, 8, 128_256),
}
"""Those of SmolLM2-135M and of Llama 3."""
SMALL: Mapping[str, Sizes] = {"tiny": (2, 32, 64, 4, 2, 64)}
BATCHES, TEMPERATURES = (1, 8), (0.0, 1.0)
MODES = ("plain", "plain graphs", "assisted", "eager", "graphs", "tree eager", "tree graphs")
TOKENS = 96
"""Tokens that are written."""
DRAFTED = 4
"""Tokens of a chain that is drafted."""
READ = 64
"""Tokens of a prompt."""
TREE, DRAFT_VOCAB, SHARP = EAGLE2(nodes=59, depth=5), 32_000, 2.0
"""The tree of a head, the tokens that it can draft, and the scale of its queries and keys: each
place attends to itself."""
ADDED, SURE, WRONG = 0.003, 40.0, 5
"""The scale of what a layer adds to the embedding; the logit of the right token; the draft is wrong
after one token of five."""
WIDTHS, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (512, 4096, 16_384)
PROMPT = "Lena reads 12 pages every morning and 20 pages every evening. How many pages does she read in two weeks?"
TREES = ((4, 64), (16, 64), (64, 64), (64, 128))
"""n and D of the attentions that are compared."""
NAMES = {
    "smollm2": "SmolLM2's shape, 135 million",
    "1b": "Llama, 1 billion",
    "8b": "Llama, 8 billion",
    "tiny": "tiny",
}


def model(sizes: Sizes, context: int, device: torch.device, layers: int = 0) -> CausalLM:
    """Return a Llama of random weights, with all its layers or a few."""
    count, hidden, wide, heads, groups, vocab = sizes
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers or count,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=context,
        attn_implementation="sdpa",
    )
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device("meta"):
        made = LlamaForCausalLM(config).to(dtype)
    made = made.to_empty(device=device)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(0, 0.02)
    made.model.rotary_emb = type(made.model.rotary_emb)(config).to(
        device
    )  # its frequencies are no parameters
    if device.type == "cuda":
        use_grouped_attention(made)  # as `load` does there
    return CausalLM(made.requires_grad_(False))


def passes(decoder: CausalLM, widths: tuple[int, ...], context: int) -> dict[int, float]:
    """Return the seconds of a pass over n tokens after a context, by n."""
    cache = decoder.new_cache(1, context + max(widths))
    cache.lengths[:] = context  # the cache holds zeros, which take as long as any text

    def once(n: int) -> None:
        places = context + np.arange(n)
        seen = np.tri(n, dtype=np.bool_)
        feed = ForwardBatch.from_sequences(
            [np.arange(n) % decoder.vocab],
            [places],
            cache.lengths.copy(),
            [seen],
            [places],
            decoder.device,
        )
        decoder.forward(feed, cache)

    with torch.inference_mode():
        return dict(
            zip(
                widths,
                time_interleaved([partial(once, n) for n in widths], decoder.device, LONGEST),
                strict=True,
            )
        )


def curves(sizes: Sizes, context: int, widths: tuple[int, ...], device: torch.device) -> Any:
    """Measure target passes after a context, and draft steps of one layer and its head.

    The result is an entry of a machine file.
    """
    room = context + 2 * max(widths)
    free_texts()
    target = passes(model(sizes, room, device), widths, context)
    draft = passes(
        model(sizes, room, device, layers=1), tuple(w for w in widths if w <= 32), context
    )
    return asdict(Costs(draft, target, 0.0, context))


def ceilings(size: int, device: torch.device) -> dict[str, float]:
    """Measure bytes per second of a copy, reads and writes counted, and operations per second.

    The operations are those of a product of two square matrices.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    one = torch.ones(size, size, dtype=dtype, device=device)
    other = torch.empty_like(one)
    copying, product = time_interleaved(
        [lambda: other.copy_(one), lambda: torch.mm(one, one, out=other)], device, LONGEST
    )
    return {
        "copy_bytes_per_second": 2 * one.numel() * one.element_size() / copying,
        "operations_per_second": 2 * size**3 / product,
    }


def attention(context: int, device: torch.device) -> list[dict[str, Any]]:
    """Time grouped attention and transformers' SDPA with a mask.

    There are 32 query heads in groups of 4.
    """
    found, layer = [], torch.nn.Module()
    layer.num_key_value_groups = 4
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for n, width in TREES:
        q, k = (
            torch.randn(1, heads, s, width, dtype=dtype, device=device)
            for heads, s in ((32, n), (8, context))
        )
        mask = torch.zeros(1, 1, n, context, dtype=dtype, device=device)
        mask[..., context - n :] = torch.full((n, n), torch.finfo(dtype).min, device=device).triu(1)
        ways: tuple[Any, ...] = grouped_attention, sdpa_attention_forward
        ours, theirs = time_interleaved(
            [partial(way, layer, q, k, k, mask) for way in ways], device, LONGEST
        )
        found.append(
            {"tokens": n, "head": width, "context": context, "grouped": ours, "sdpa": theirs}
        )
    return found


@torch.no_grad()
def scripted(sizes: Sizes, context: int, device: torch.device) -> tuple[Any, Any]:
    """Return a target and a draft of one layer, by whose weights the acceptance is scripted."""
    made: Any = model(sizes, context, device).model
    draft: Any = model(sizes, context, device, layers=1).model
    for each in (made, draft):
        each.generation_config.eos_token_id = None
        for layer in each.model.layers:
            layer.self_attn.o_proj.weight.mul_(ADDED)
            layer.mlp.down_proj.weight.mul_(ADDED)
    table = made.model.embed_tokens.weight.normal_(0, 1)
    for each in (made, draft):
        each.model.norm.weight.fill_(1)
        each.lm_head.weight.copy_(table.roll(1, 0) * (SURE / table.shape[1]))
    draft.model.embed_tokens.weight.copy_(table)
    draft.model.embed_tokens.weight[::WRONG] = table.roll(2, 0)[::WRONG]
    return made, draft


@torch.no_grad()
def scripted_head(target: Target) -> EAGLE3Drafter:
    """Return a head of EAGLE-3's kind with scripted weights.

    Its attention passes on a part of its own position's embedding, and all else adds nothing.
    """
    vocab = target.decoder.vocab
    with target.decoder.device:  # where its random weights are made
        drafter = EAGLE3(draft_vocab=DRAFT_VOCAB if vocab > DRAFT_VOCAB else 0).example(target)
    assert isinstance(drafter, EAGLE3Drafter)
    net, config = drafter.model, target.decoder.config
    layer, groups = net.midlayer, config.num_key_value_heads
    wide, each = (
        config.hidden_size // config.num_attention_heads,
        config.num_attention_heads // groups,
    )
    for weight in (
        net.fc.weight,
        layer.mlp.down_proj.weight,
        *(p.weight for p in _projections(layer)),
    ):
        weight.zero_()
    for head in range(config.num_attention_heads):
        rows, part = (
            slice(head * wide, (head + 1) * wide),
            slice(head // each * wide, (head // each + 1) * wide),
        )
        torch.nn.init.eye_(layer.self_attn.q_proj.weight[rows, part]).mul_(SHARP)
        if head % each == 0:
            torch.nn.init.eye_(layer.self_attn.k_proj.weight[part, part]).mul_(SHARP)
            torch.nn.init.eye_(layer.self_attn.v_proj.weight[part, part])
            torch.nn.init.eye_(layer.self_attn.o_proj.weight[part, rows])
    net.lm_head.weight[1::WRONG] = (
        0  # else the target's: after one token of five, the right one is not among the likeliest
    )
    return drafter


def _projections(layer: EAGLE3Layer) -> list[torch.nn.Linear]:
    attention = layer.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]


@final
class Texts:
    """Generate texts with the models of a shape in every mode.

    Models and their CUDA graphs are made once.

    Args:
        name: name of the shape.
        small: whether it is a tiny one, for a CPU.
        device: where the models are.
    """

    def __init__(self, name: str, small: bool, device: torch.device) -> None:
        self._device, self._sizes = device, (SMALL if small else SHAPES)[name]
        self._tokens, self._read = (12, 6) if small else (TOKENS, READ)
        self._made, self._draft = scripted(self._sizes, 4 * (self._tokens + self._read), device)
        recording = Graphs() if device.type == "cuda" else Graphs(PassRecorder())
        ways = {
            "graphs": (recording, recording.of(self._draft)),
            "eager": (EagerCapture(), EagerCapture()),
        }
        self._engines = dict[tuple[str, bool], Engine]()
        for mode, (of_target, of_draft) in ways.items():
            target, draft = (
                Target(CausalLM(m, capture=way), name)
                for m, way in ((self._made, of_target), (self._draft, of_draft))
            )
            self._engines[mode, False] = load(target, draft, Chain(length=DRAFTED))
            self._engines[mode, True] = load(target, scripted_head(target), TREE)

    def cell(self, mode: str, temperature: float, batch: int) -> dict[str, Any]:
        """Return tokens per second, tokens per pass, and the number of graphs recorded meanwhile.

        The text is written twice, and the second time counts: graphs depend on its length.
        `first_seconds` is the time of the first one. Assisted generation has figures for a single
        text only.
        """
        most = min(self._sizes[-1], DRAFT_VOCAB) - self._tokens
        prompts = np.random.default_rng(0).integers(0, most, (batch, self._read))
        sampling, found = (
            Sampling(temperature=temperature),
            {"mode": mode, "temperature": temperature, "batch": batch},
        )
        requests = [Request(prompt.tolist(), self._tokens, sampling=sampling) for prompt in prompts]
        if mode == "assisted":  # which takes one text at a time
            return found | (
                assisted(self._made, self._draft, requests[0], self._device) if batch == 1 else {}
            )
        engine = self._engines["graphs" if "graphs" in mode else "eager", "tree" in mode]
        write: Callable[..., Any] = (
            engine.plain if "plain" in mode else partial(engine.write, reuse=False)
        )
        begun = time.perf_counter()
        write(requests)  # what is recorded or set up at first
        before, start = engine.target.decoder.capture.recordings, time.perf_counter()
        written = write(requests)
        seconds = time.perf_counter() - start
        told = {
            "per_second": batch * self._tokens / seconds,
            "per_pass": written.stats.acceptance_length,
            "first_seconds": start - begun,
        }
        return found | told | {"recorded": engine.target.decoder.capture.recordings - before}


HELD: dict[tuple[str, bool, torch.device], Texts] = {}
"""The writer of the shape that was measured last."""


def texts(name: str, small: bool, device: torch.device) -> Texts:
    """Return the writer of a shape; the last one's memory is freed before."""
    if (key := (name, small, device)) not in HELD:
        free_texts()
        HELD[key] = Texts(name, small, device)
    return HELD[key]


def free_texts() -> None:
    """Free the memory of the writer that is held."""
    HELD.clear()
    gc.collect()


def cell(
    name: str, small: bool, device: torch.device, mode: str, temperature: float, batch: int
) -> dict[str, Any]:
    """Return a cell of the table."""
    return texts(name, small, device).cell(mode, temperature, batch)


def assisted(made: Any, draft: Any, request: Request, device: torch.device) -> dict[str, float]:
    """Run transformers' assisted generation of one text."""
    passes, ids = list[int](), torch.tensor([request.prompt], device=device)
    settings = {"num_assistant_tokens": DRAFTED, "num_assistant_tokens_schedule": "constant"}
    for key, value in (settings | {"assistant_confidence_threshold": 0.0}).items():
        setattr(draft.generation_config, key, value)
    how = {"attention_mask": torch.ones_like(ids), "assistant_model": draft, "pad_token_id": 0}
    count = request.max_new_tokens
    drawn: dict[str, Any] = (
        {"do_sample": False} if request.sampling.greedy else {"do_sample": True, "top_k": 0}
    )
    generate = partial(made.generate, ids, max_new_tokens=count, **drawn, **how)
    ours = made.config._attn_implementation
    made.set_attn_implementation("sdpa")
    generate()
    hook = made.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        seconds = time_work(generate, device)
    finally:
        hook.remove()
        made.set_attn_implementation(ours)
    return {"per_second": count / seconds, "per_pass": count / len(passes)}


HEADS = (
    "model",
    "texts",
    "temperature",
    "plain, tokens/s",
    "plain, graphs",
    "assisted",
    "eager",
    "graphs",
    "trees, eager",
    "trees, graphs",
    "graphs over assisted",
    "tokens a pass",
    "of assisted",
    "of trees",
    "plain over the floor",
    "with graphs",
    "a step over the floor",
    "of trees",
)


def table(done: Mapping[str, Any], shapes: Mapping[str, Sizes], about: Mapping[str, str]) -> str:
    """Return the cells as a table for the docs.

    Ratios are to plain decoding, to assisted generation, and to reading all weights once.
    """
    rows = [HEADS, ("---",) * len(HEADS)]
    for name, sizes in shapes.items():
        each = 4 if about["small"] == "True" else 2
        floor = each * multiplied(sizes) / done["ceilings"]["copy_bytes_per_second"]
        for batch in BATCHES:
            for temperature in TEMPERATURES:
                cells = {
                    mode: done[f"texts {name} × {batch}, temperature {temperature:g}, {mode}"]
                    for mode in MODES
                }
                rows.append(
                    (NAMES[name], str(batch), f"{temperature:g}", *_figures(cells, batch, floor))
                )
    told = f"{about['device']}, torch {about['torch']}, by `make gpu`: random weights, scripted acceptance."
    return "\n".join([told, "", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _figures(cells: Mapping[str, Any], batch: int, floor: float) -> tuple[str, ...]:
    """Return the figures of a row, with a dash where assisted generation has none."""
    speed = {mode: cell.get("per_second") for mode, cell in cells.items()}

    def ratio(mode: str, other: str) -> str:
        return f"{speed[mode] / speed[other]:.2f}" if speed[mode] and speed[other] else "–"

    theirs = cells["assisted"].get("per_pass")
    steps = [cells[mode]["per_pass"] * batch / speed[mode] for mode in ("graphs", "tree graphs")]
    return (
        f"{speed['plain']:.0f}",
        *(ratio(mode, "plain") for mode in MODES[1:]),
        ratio("graphs", "assisted"),
        f"{cells['graphs']['per_pass']:.2f}",
        f"{theirs:.2f}" if theirs else "–",
        f"{cells['tree graphs']['per_pass']:.2f}",
        *(f"{batch / speed[mode] / floor:.2f}" for mode in MODES[:2]),
        *(f"{step / floor:.2f}" for step in steps),
    )


def multiplied(sizes: Sizes) -> int:
    """Return the number of weights that a pass multiplies by, all of which it reads."""
    layers, hidden, wide, heads, groups, vocab = sizes
    return (
        layers * (2 * hidden * hidden * (heads + groups) // heads + 3 * hidden * wide)
        + vocab * hidden
    )


def demo(device: torch.device, tokens: int) -> dict[str, Any]:
    """Return tokens per second of the demo, plain and drafted, and whether both texts agree."""
    engine = load("demo", device=device)
    ids = engine.tokenizer(PROMPT)["input_ids"]
    requests = [Request(ids, tokens, engine.target.eos)]
    engine.write(requests, reuse=False)  # what is compiled or measured on first use
    start = time.perf_counter()
    drafted = engine.write(requests, reuse=False)
    between = time.perf_counter()
    alone = engine.plain(requests)
    count, seconds = drafted.stats.new_tokens, (between - start, time.perf_counter() - between)
    found = {
        "tokens": count,
        "drafted_per_second": count / seconds[0],
        "plain_per_second": count / seconds[1],
    }
    return found | {
        "acceptance_length": drafted.stats.acceptance_length,
        "same_text": drafted.tokens == alone.tokens,
    }


def parts(device: torch.device, small: bool) -> dict[str, Callable[[], Any]]:
    """Return every part by its name, the short ones first."""
    shapes, widths, contexts = (SMALL, (1, 4), (16, 64)) if small else (SHAPES, WIDTHS, CONTEXTS)
    found: dict[str, Callable[[], Any]] = {
        "ceilings": partial(ceilings, 256 if small else 8192, device)
    }
    found["demo"] = partial(demo, device, 8 if small else 256)
    for name in shapes:
        for batch, temperature, mode in itertools.product(BATCHES, TEMPERATURES, MODES):
            told = f"texts {name} × {batch}, temperature {temperature:g}, {mode}"
            found[told] = partial(cell, name, small, device, mode, temperature, batch)
    for context in contexts:
        if context >= max(n for n, _ in TREES):
            found[f"attention {context}"] = partial(attention, context, device)
        for name, sizes in shapes.items():
            found[f"{name} {context}"] = partial(curves, sizes, context, widths, device)
    return found


def main() -> None:
    """Measure what the journal lacks, and write the machine files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument(
        "--only",
        metavar="REGEX",
        help="only parts whose names match; nothing but the journal is written",
    )
    args = parser.parse_args()
    try:
        device = resolve_device(args.device)
    except UserError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    version = {"draftree": draftree.__version__, "commit": str(commit())}
    about = machine(device) | {"small": str(args.small)} | version
    journal = args.out / "journal.jsonl"
    lines = (
        [json.loads(line) for line in journal.read_text().splitlines()] if journal.is_file() else []
    )
    done = {line["part"]: line["found"] for line in lines if line["about"] == about}
    if device.type != "cuda":
        print(f"this is no GPU ({about['device']}): the figures are a CPU's")
    every = {
        name: part
        for name, part in parts(device, args.small).items()
        if re.search(args.only or "", name)
    }
    for i, (name, measure) in enumerate(every.items(), 1):
        if name not in done:
            start = time.perf_counter()
            done[name] = json.loads(json.dumps(measure()))
            append(journal, json.dumps({"part": name, "about": about, "found": done[name]}) + "\n")
            print(f"{i} of {len(every)}: {name}, {time.perf_counter() - start:.0f} s", flush=True)
    if args.only:
        return
    told = {
        "kind": "measured",
        "source": "benchmarks/gpu.py, Llama shapes of random weights",
        "threads": about["threads"],
    }
    told |= {
        "torch": about["torch"],
        "assumptions": "a draft step is one layer and one head; a commit costs nothing",
    }
    for name in SMALL if args.small else SHAPES:
        entries = [done[part] for part in every if part.startswith(f"{name} ")]
        path = args.out / f"measured-{name}.json"
        write_text(
            path,
            json.dumps(
                {"entries": entries, "about": {**told, "device": f"{about['device']}, {name}"}},
                indent=1,
            ),
        )
        CostTable.load(path)  # as `--machine` and `--costs` read it
    made = table(done, SMALL if args.small else SHAPES, about)
    write_text(args.out / "table.md", made)
    print(made)
    write_text(
        args.out / "report.json", json.dumps({"provenance": about, "parts": done}, indent=1) + "\n"
    )
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
