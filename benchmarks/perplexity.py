"""Perplexity of a Llama model at four bits, beside llama.cpp's types of the same weights on the same tokens.

    python benchmarks/perplexity.py --target smollm2 --suite spec_bench.jsonl --llama ENV/bin/python --out perplexity.json
    python benchmarks/perplexity.py … --shuffle 1 --out shuffled.json    # weights that no file has rounded

llama.cpp runs in an environment of its own, with `xllamacpp` and NumPy. Its files are written here
from the target's weights in float32, with the types that llama-quantize chooses for such sizes:
linear layers in Q4_0 or Q4_1, the embedding, which is the head too, in Q8_0.

Weights of a .gguf file in Q4_1 lie on the grid of draftree's four bits, which reproduce them.
`--shuffle` reorders the entries of the residual stream, of values and of gated layers. The model
is the same function, but its groups of 32 weights are others, and rounding them costs what it
costs for weights that were never rounded.

The text is the prompts of a suite, in windows of equal length. A token is scored given those before
it in its window; the first has no score.
"""

import argparse
import json
import math
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM

from draftree import Target
from draftree.cli.arguments import quiet
from draftree.data.prompts import encode
from draftree.evaluation import suites
from draftree.evaluation.provenance import provenance
from draftree.evaluation.result_rows import save
from draftree.evaluation.teacher_forcing import take_evenly
from draftree.models.cpu_linear import KernelLinear
from draftree.models.forward_batch import ForwardBatch
from draftree.models.int4_linear import GROUP, Int4Linear
from draftree.models.native_linear import NativeLinear
from draftree.native.transformer_kernels import INT8_GROUP

Scores = NDArray[np.float64]
"""Negative log-likelihoods [W, n] of the tokens of W windows."""
FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
"""The types of linear layers in llama.cpp's files."""
EMBEDDING = {"F32": "F32", "BF16": "BF16", "Q4_1": "Q8_0", "Q4_0": "Q8_0"}
"""The type of the embedding and head beside them."""
REFERENCE = "llama.cpp: Q4_0"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Names of a layer's modules in a .gguf file."""


def windows_of(target: Target, suite: str, count: int, length: int) -> list[list[int]]:
    """Return windows of the text, each of one token more than is scored.

    Raises:
        SystemExit: the suite is too short.
    """
    prompts = suites.load(suite).prompts
    ids = [
        t for p in take_evenly(prompts, len(prompts)) for t in encode(target.tokenizer, p.content)
    ]
    if len(ids) < count * (length + 1):
        raise SystemExit(
            f"suite '{suite}' has {len(ids)} tokens, {count * (length + 1)} are needed"
        )
    return [ids[i * (length + 1) : (i + 1) * (length + 1)] for i in range(count)]


def scores(target: Target, windows: Sequence[Sequence[int]]) -> Scores:
    """Return what the target gives each token of the windows."""
    decoder, told = target.decoder, []
    for tokens in windows:
        cache = decoder.new_cache(1, len(tokens))
        batch = ForwardBatch.chains([np.array(tokens)], cache.lengths.copy(), decoder.device)
        with torch.inference_mode():
            logits = decoder.forward(batch, cache).logits[:-1].double()
        wanted = torch.tensor(tokens[1:])[:, None]
        told.append(-logits.log_softmax(-1).gather(1, wanted)[:, 0].numpy())
    return np.array(told)


def scores_of_llama(python: Path, file: Path, windows: Sequence[Sequence[int]]) -> Scores:
    """Return what llama.cpp gives each token of the windows."""
    worker = Path(__file__).with_name("llama_worker.py")
    done = subprocess.run(
        [python, worker, "score", file, str(torch.get_num_threads())],
        input=json.dumps(windows), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return np.array(json.loads(done.stdout))


def shuffle(model: LlamaForCausalLM, seed: int) -> None:
    """Reorder a model's weights, which leaves it the same function up to rounding.

    The entries of the residual stream, the gated entries of each layer and, alike in all heads, the
    entries of a value are put in another order. Queries and keys keep theirs, in which their
    rotation pairs them.
    """
    config, random = model.config, torch.Generator().manual_seed(seed)

    def order(size: int) -> Tensor:
        return torch.randperm(size, generator=random)

    stream = order(config.hidden_size)
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight[:, stream]
    if not config.tie_word_embeddings:
        model.lm_head.weight.data = model.lm_head.weight[:, stream]
    model.model.norm.weight.data = model.model.norm.weight[stream]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        gated, head = order(config.intermediate_size), order(config.head_dim)
        values, outputs = (
            (torch.arange(heads)[:, None] * config.head_dim + head).flatten()
            for heads in (config.num_key_value_heads, config.num_attention_heads)
        )
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data = norm.weight[stream]
        for linear in (attention.q_proj, attention.k_proj):
            linear.weight.data = linear.weight[:, stream]
        attention.v_proj.weight.data = attention.v_proj.weight[values][:, stream]
        attention.o_proj.weight.data = attention.o_proj.weight[stream][:, outputs]
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.data = linear.weight[gated][:, stream]
        mlp.down_proj.weight.data = mlp.down_proj.weight[stream][:, gated]
    model.tie_weights()


def tensors(model: LlamaForCausalLM) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the tensors of a .gguf file, in which the entries of queries and keys lie in pairs."""
    config = model.config
    paired = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    yield "token_embd.weight", model.model.embed_tokens.weight.numpy()
    yield "output_norm.weight", model.model.norm.weight.numpy()
    if not config.tie_word_embeddings:
        yield "output.weight", model.lm_head.weight.numpy()
    for i, layer in enumerate(model.model.layers):
        for name, short in NAMES.items():
            weight = layer.get_submodule(name).weight
            if heads := paired.get(short):
                weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            yield f"blk.{i}.{short}.weight", weight.contiguous().numpy()


def write_gguf(model: LlamaForCausalLM, path: Path, kind: str) -> None:
    """Write a model without its vocabulary.

    Args:
        model: in float32, without biases.
        path: the new file.
        kind: the type of its linear layers, a key of `FILE_TYPES`.
    """
    config, writer = model.config, GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_tokenizer_model("no_vocab")
    for name, weight in tensors(model):
        of_head = name in ("token_embd.weight", "output.weight")
        to = GGMLQuantizationType[
            "F32" if weight.ndim == 1 else EMBEDDING[kind] if of_head else kind
        ]
        writer.add_tensor(name, quants.quantize(weight, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bits_of_type(kind: str) -> float:
    """Return the bits of a weight in a type of llama.cpp."""
    block, size = quants.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return 8 * size / block


def bits_of_layers(target: Target) -> float:
    """Return the bits of a weight in a target's linear layers, the head left out."""
    found = {
        4 + 2 * 16 / GROUP if isinstance(m, Int4Linear) else 8.0 * m.weight.element_size()
        for m in target.decoder.stack.modules()
        if isinstance(m, Int4Linear | torch.nn.Linear)
    }
    return max(found)


def bits_of_head(target: Target) -> float:
    """Return the bits of a weight in a target's LM head."""
    model: Any = target.decoder.model
    head = model.get_output_embeddings()
    kernel = head.kernel if isinstance(head, KernelLinear) else None
    if isinstance(kernel, NativeLinear) and kernel.eight_bits:
        return 8 + 32 / INT8_GROUP
    return 8.0 * head.weight.element_size()


def row(way: str, bits: tuple[float, float], found: Scores, reference: Scores) -> dict[str, Any]:
    """Return the perplexity of a way, and its quotient with the reference's.

    The interval is the middle 95 % of 2,000 samples of windows.
    """
    apart = (found - reference).mean(1)
    samples = np.random.default_rng(1).integers(len(apart), size=(2000, len(apart)))
    low, high = np.quantile(np.exp(apart[samples].mean(1)), (0.025, 0.975))
    return {
        "way": way,
        "bits of layers": bits[0],
        "bits of head": bits[1],
        "perplexity": round(math.exp(found.mean()), 4),
        "quotient [95 %]": f"{math.exp(apart.mean()):.3f} [{low:.3f}, {high:.3f}]",
    }


def measured(
    source: str,
    folder: Path,
    windows: list[list[int]],
    model: LlamaForCausalLM,
    python: Path,
    kinds: Sequence[str],
) -> tuple[list[dict[str, Any]], Target]:
    """Return the rows of all ways, and the target at four bits.

    Args:
        source: what draftree loads.
        folder: for llama.cpp's files.
        windows: of the text.
        model: the same weights in float32.
        python: the interpreter that has `xllamacpp`.
        kinds: types of llama.cpp's files beside that of the reference.
    """
    found: dict[str, tuple[tuple[float, float], Scores]] = {}
    for kind in (*kinds, REFERENCE.split()[-1]):
        write_gguf(model, folder / f"{kind}.gguf", kind)
        of_kind = scores_of_llama(python, folder / f"{kind}.gguf", windows)
        found[f"llama.cpp: {kind}"] = (bits_of_type(kind), bits_of_type(EMBEDDING[kind])), of_kind
        print(f"llama.cpp: {kind}", math.exp(of_kind.mean()), flush=True)
    for name, how in {
        "bfloat16": {"compile": True},
        "4 bits": {"compile": True, "quantize": "int4"},
        "4 bits, native kernels off": {"compile": False, "quantize": "int4"},
    }.items():
        target = Target.load(source, dtype="bfloat16", **how)
        bits = bits_of_layers(target), bits_of_head(target)
        found[f"draftree: {name}"] = bits, scores(target, windows)
        print(f"draftree: {name}", math.exp(found[f"draftree: {name}"][1].mean()), flush=True)
    rows = [row(way, bits, each, found[REFERENCE][1]) for way, (bits, each) in found.items()]
    return rows, target


def main() -> None:
    """Measure, print and save the perplexities."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2", help="a Llama with tied or own head")
    parser.add_argument("--suite", required=True)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument(
        "--length", type=int, default=500, help="tokens that are scored of a window"
    )
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="reorder the weights")
    parser.add_argument("--type", action="append", choices=list(FILE_TYPES)[:-1])
    parser.add_argument("--llama", type=Path, required=True, help="interpreter that has xllamacpp")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    quiet()
    target = Target.load(args.target, dtype="float32", compile=False)
    windows = windows_of(target, args.suite, args.windows, args.length)
    model: Any = target.decoder.model
    with tempfile.TemporaryDirectory() as kept, torch.inference_mode():
        source, folder = args.target, Path(kept)
        if args.shuffle is not None:
            shuffle(model, args.shuffle)
            source = str(folder / "shuffled")
            model.save_pretrained(source)
            target.tokenizer.save_pretrained(source)
        kinds = args.type if args.type is not None else ["BF16", "Q4_1"]
        rows, four = measured(source, folder, windows, model, args.llama, kinds)
    asked = {
        name: getattr(args, name) for name in ("target", "suite", "windows", "length", "shuffle")
    }
    ask = "from importlib.metadata import version; print(version('xllamacpp'))"
    engine = subprocess.run([args.llama, "-c", ask], stdout=subprocess.PIPE, text=True, check=True)
    others = {"xllamacpp": engine.stdout.strip(), "gguf": version("gguf")}
    told = provenance(four, args.shuffle or 0) | {"asked": asked, "engines": others}
    told["target"]["name"] = args.target
    save({"provenance": told, "rows": rows}, args.out)
    for each in rows:
        print(*each.values(), sep="\t")


if __name__ == "__main__":
    main()
