"""Embed a trained small Llama, and drafters of it, in the shape of a large one: its acceptance at the large one's cost.

    python recipes/widen.py --out wide --shape 200m --drafter edd --drafter eagle
    draftree generate "What is 17 + 25?" --target wide/target --drafter wide/edd

A toy's forward pass is mostly dispatch, so its time hardly depends on how many tokens are fed, and
that hides what ways of growing a tree differ in. What is written here computes the small model's
logits with the large one's arithmetic:

- the residual stream of d channels becomes one of D = W · d, the new ones 0. RMSNorm's mean square
  is then 1/W of what it was: eps is divided by W, the norms' weights by √W. √W is a power of two,
  so this rounds nothing; what differs is the order of the sums in norms and matrix products;
- further attention heads and MLP units are random, and what they say is multiplied by 0 (columns of
  o_proj and down_proj); the trained query heads stay with their key-value heads;
- further layers, of which all o_proj and down_proj are 0, stand before the trained ones, so that a
  hidden state counted from the end, as drafters read it, is still the same;
- a larger vocabulary: every embedding holds 2⁻²⁰ in one new channel. Its square is lost in the
  rounding of the norms' sums and no layer writes to it, so behind the last norm it is above 0
  whatever was read. The LM head's new rows read nothing but this channel, times −2⁶⁰: their logits
  are far below all others, and they take no part in p or q. Embedding and head are not tied then.
  float16 cannot hold such numbers.

Heads are as many times more as the stream is wider unless said otherwise; their width and the
context do not change. Shapes for `--shape`, with the demo target: 200m (200,303,104 parameters), 1b
(999,393,280), 7b (6,737,233,920; as many as Llama-2-7B in as many layers, in a stream of 2,048
channels instead of 4,096, with more MLP units instead).
"""

import argparse
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from draftree.cli.terminal import progress
from draftree.drafters.eagle3 import LAYER_IDS
from draftree.errors import UnknownName, UserError
from draftree.formats.checkpoint import CONFIG, DRAFTREE_ENTRY, WEIGHTS, Checkpoint, fingerprint
from draftree.weights import demo_folder

FLOOR, DEPTH = 2.0**-20, -(2.0**60)
"""What every embedding holds in the channel that new rows of the LM head read, and their weight for
it."""
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
METHODS = ("edd", "eagle", "eagle3", "mtp", "vdm")
BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
AXES = {
    "q_proj": "qd",
    "k_proj": "kd",
    "v_proj": "kd",
    "o_proj": "dq",
    "gate_proj": "id",
    "up_proj": "id",
    "down_proj": "di",
    "embed_tokens": "vd",
    "lm_head": "vd",
    "fc": "dp",
    "eh_proj": "dp",
}
"""The axes of each weight: d the stream, p two of them (embedding, feature), q queries, k keys, i MLP units, v vocabulary.

EAGLE-3's layer reads p instead of d, its `fc` t, three streams, and its head writes w, a vocabulary
of its own."""
READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
LAYER = re.compile(r"((?:model\.)?layers\.)(\d+)\.(.+)")


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, named as in its config."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The sizes in a `config.json`; every query has keys of its own where it does not say otherwise.

        Raises:
            UserError: one is missing.
        """
        said: dict[str, Any] = {"num_key_value_heads": config.get("num_attention_heads")} | dict(
            config
        )
        names = [f.name for f in fields(cls)]
        if missing := [n for n in names if not isinstance(said.get(n), int)]:
            raise UserError(
                f"config.json has no {', '.join(missing)}: only targets of Llama's shape can be widened"
            )
        return cls(**{n: said[n] for n in names})

    @property
    def group(self) -> int:
        """How many query heads share a key-value head."""
        return self.num_attention_heads // self.num_key_value_heads


SHAPES: dict[str, dict[str, int]] = {
    "200m": {"hidden_size": 512, "intermediate_size": 4864, "num_hidden_layers": 24},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 3840,
        "num_hidden_layers": 24,
        "vocab_size": 32000,
    },
    "7b": {
        "hidden_size": 2048,
        "intermediate_size": 31552,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
}
"""Of models with as many parameters, as near as the demo target's width allows."""


def enlarged(small: Shape, wanted: Mapping[str, int]) -> Shape:
    """The shape that is asked for; heads grow with the stream, and so do MLP units.

    Raises:
        UserError: the small one cannot be embedded in it.
    """
    d, got = small.hidden_size, wanted.get("hidden_size", small.hidden_size)
    allowed = [d * 4**k for k in range(5)]
    if got not in allowed:
        raise UserError(
            f"hidden is {got}, allowed is the target's times a power of 4: {', '.join(map(str, allowed))}"
        )
    grow = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
    large = replace(small, **{k: getattr(small, k) * (got // d) for k in grow} | dict(wanted))
    for f in fields(large):
        if (asked := getattr(large, f.name)) < (least := getattr(small, f.name)):
            raise UserError(f"{f.name} is {asked}, allowed is at least the target's: {least}")
    queries, keys = large.num_attention_heads, large.num_key_value_heads
    least = small.num_key_value_heads * math.ceil(small.group / max(large.group, 1))
    if queries % keys or keys < least:
        raise UserError(
            f"{queries} heads read {keys} key-value heads, allowed are divisors of {queries} of at least {least}"
        )
    if got % queries:
        raise UserError(
            f"num_attention_heads is {queries}, transformers allows divisors of the hidden size: {got}"
        )
    if large.vocab_size > small.vocab_size and got == d:
        raise UserError(
            f"a vocabulary of {large.vocab_size} needs a wider stream, got hidden {got}: allowed is {4 * d} or more"
        )
    return large


class Widening:
    """Embeds tensors of one shape in another.

    Args:
        small: the trained shape.
        large: the one that is written.
        config: of the small model.
        dtype: of what is written.
        seed: of what is drawn.
    """

    def __init__(
        self, small: Shape, large: Shape, config: Mapping[str, Any], dtype: torch.dtype, seed: int
    ) -> None:
        self.small = small
        self.large = large
        self.dtype = dtype
        self.ratio = large.hidden_size // small.hidden_size
        self.more = large.num_hidden_layers - small.num_hidden_layers
        self.deviation = float(config.get("initializer_range", 0.02))
        self.width = int(config.get("head_dim") or small.hidden_size // small.num_attention_heads)
        self.padded_vocab = large.vocab_size > small.vocab_size
        self.random = torch.Generator().manual_seed(seed)
        d, wide = small.hidden_size, large.hidden_size
        self.sizes = {
            "d": wide,
            "p": 2 * wide,
            "t": 3 * wide,
            "i": large.intermediate_size,
            "v": large.vocab_size,
            "q": large.num_attention_heads * self.width,
            "k": large.num_key_value_heads * self.width,
        }
        q, k, source = heads(small, large)
        everything = {
            "d": torch.arange(d),
            "p": torch.cat([n * wide + torch.arange(d) for n in range(2)]),
            "t": torch.cat([n * wide + torch.arange(d) for n in range(3)]),
            "i": torch.arange(small.intermediate_size),
            "v": torch.arange(small.vocab_size),
        }
        self.places = everything | {"q": self._channels(q), "k": self._channels(k)}
        self.copied = self._channels(source)

    def _channels(self, heads: Sequence[int]) -> Tensor:
        return (torch.tensor(heads)[:, None] * self.width + torch.arange(self.width)).flatten()

    def axes(self, name: str, old: Tensor) -> str:
        """The axes of a tensor.

        Raises:
            UserError: no Llama has a tensor of this name.
        """
        part = name.split(".")[-2]
        if "norm" in part:
            return "d"
        if part not in AXES:
            raise UserError(
                f"tensor '{name}' is not known: only models of Llama's layers can be widened"
            )
        if name.startswith("midlayer.") and part in ("q_proj", "k_proj", "v_proj"):
            return (AXES[part][0] + "p")[: old.dim()]
        if part == "fc" and old.shape[-1] == 3 * self.small.hidden_size:
            return "dt"
        return ("wd" if part == "lm_head" and len(old) != self.small.vocab_size else AXES[part])[
            : old.dim()
        ]

    def idle(self, name: str, old: Tensor) -> Tensor:
        """A weight or bias that costs what a trained one costs and adds nothing to the stream.

        Raises:
            UserError: no Llama has a tensor of this name.
        """
        part, axes = name.split(".")[-2], self.axes(name, old)
        if "norm" in part:
            return torch.full((self.sizes["d"],), 1 / math.sqrt(self.ratio), dtype=self.dtype)
        size = [len(old) if axis == "w" else self.sizes[axis] for axis in axes]
        if part in READERS and old.dim() == 2:
            return (torch.randn(size, generator=self.random) * self.deviation).to(self.dtype)
        return torch.zeros(size, dtype=self.dtype)

    def trained(self, name: str, old: Tensor) -> Tensor:
        """A trained tensor in its place among idle entries."""
        if (
            not old.is_floating_point()
        ):  # EAGLE-3's vocabulary: ids, and one entry for each of the target's tokens
            return (
                torch.cat((old, old.new_zeros(self.sizes["v"] - len(old))))
                if name == "t2d"
                else old
            )
        new = self.idle(name, old)
        part = name.split(".")[-2]
        axes = self.axes(name, old)
        old = old.to(self.dtype)
        if "norm" in part:
            old = old / math.sqrt(self.ratio)
        if axes[0] == "k":
            old = old[self.copied]
        if old.dim() == 1:
            new[self.places[axes]] = old
            return new
        rows, columns = (torch.arange(len(old)) if a == "w" else self.places[a] for a in axes)
        new[rows] = 0  # what is trained reads nothing of the new channels
        new[rows[:, None], columns] = old
        return self._floored(part, new) if self.padded_vocab else new

    def _floored(self, part: str, new: Tensor) -> Tensor:
        """With the channel that makes the logits of new rows of the vocabulary low."""
        channel = self.small.hidden_size  # the first new one
        if part == "embed_tokens":
            new[:, channel] = FLOOR
        elif part == "lm_head" and len(new) == self.sizes["v"]:
            new[self.small.vocab_size :, channel] = DEPTH
        elif (
            part in ("fc", "eh_proj") and new.shape[1] == self.sizes["p"]
        ):  # a drafter's prediction of the feature takes it from the embedding
            new[channel, channel] = 1
        return new

    def parts(self, tensors: Mapping[str, Tensor], whole: bool) -> Iterator[dict[str, Tensor]]:
        """The widened tensors a layer at a time: first what is no layer, then idle layers, then trained ones.

        Args:
            tensors: of a model or a drafter.
            whole: whether it is the target, which alone gets more layers; a drafter's may be
                numbered behind them (MTP).
        """
        split = {key: LAYER.fullmatch(key) for key in tensors}
        yield {
            key: self.trained(key, tensors[key]) for key, found in split.items() if found is None
        }
        layers: dict[int, list[str]] = {}
        for key, found in split.items():
            if found is not None:
                layers.setdefault(int(found[2]), []).append(key)
        for n in range(self.more if whole else 0):
            yield {_numbered(key, n): self.idle(key, tensors[key]) for key in layers[0]}
        for n, keys in sorted(layers.items()):
            at = n + self.more if whole or n >= self.small.num_hidden_layers else n
            yield {_numbered(key, at): self.trained(key, tensors[key]) for key in keys}

    def config(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """The config of what is written."""
        sizes = {f.name: getattr(self.large, f.name) for f in fields(self.large)}
        changed = {
            "num_hidden_layers": layers,
            "head_dim": self.width,
            "rms_norm_eps": config["rms_norm_eps"] / self.ratio,
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False))
            and not self.padded_vocab,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        return {k: v for k, v in config.items() if k != "torch_dtype"} | sizes | changed


def heads(small: Shape, large: Shape) -> tuple[list[int], list[int], list[int]]:
    """Where each trained query head goes, where key-value heads go, and which trained one each of these is.

    Query head h reads key-value head h // group, before and after; where fewer share one than
    before, it is there twice.
    """
    copies = math.ceil(small.group / large.group)
    pairs = [divmod(h, small.group) for h in range(small.num_attention_heads)]
    queries = [(k * copies + i // large.group) * large.group + i % large.group for k, i in pairs]
    keys = list(range(small.num_key_value_heads * copies))
    return queries, keys, [k // copies for k in keys]


def _numbered(key: str, layer: int) -> str:
    return LAYER.sub(lambda found: f"{found[1]}{layer}.{found[3]}", key)


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A whole model's tensors with an LM head of their own."""
    return {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}


def place(target: str) -> Path:
    """The folder of a small target.

    Raises:
        UserError: it is none, or not a Llama's.
    """
    folder = demo_folder() if target == "demo" else Path(target)
    kind = Checkpoint.at(folder).config.get("model_type")
    if kind != "llama":
        raise UserError(f"target '{target}' is of type {kind}, allowed is llama")
    return folder


def drafter_folder(name: str, target: str) -> Path:
    """The folder of a drafter that was trained for the target: one that is shipped for the demo, or any other.

    Raises:
        UserError: there is none, or its method is none of those that can be widened.
    """
    shipped = target == "demo" and not Path(name).is_dir()
    if shipped and not demo_folder(name).is_dir():
        raise UnknownName("drafter that can be widened", name, METHODS)
    folder = demo_folder(name) if shipped else Path(name)
    said = Checkpoint.at(folder).about
    if (method := said.get("drafter")) not in METHODS:
        raise UserError(
            f"'{name}' is a drafter '{method}', allowed are {', '.join(METHODS)} as draftree writes them"
        )
    if said.get("target_hash") != fingerprint(AutoConfig.from_pretrained(place(target))):
        raise UserError(
            f"'{name}' was trained for target '{said.get('target')}', allowed is one for '{target}'"
        )
    return folder


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes its name when it is complete."""
    home = folder.with_name(folder.name + ".partial")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    yield home
    home.rename(folder)


def copy_beside(source: Path, home: Path) -> None:
    """Copies tokenizer, chat template and generation config, where they are there."""
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, home / name)


def write_target(
    folder: Path, source: Path, widening: Widening, tell: Callable[[int], None] = lambda _: None
) -> int:
    """Writes a target layer by layer, and returns how many parameters it has."""
    config, tensors = Checkpoint.at(source).config, Checkpoint.at(source).load_tensors().tensors
    if config.get("tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)  # some files hold a copy
    if widening.padded_vocab:
        tensors = untied(tensors)
    layers = widening.large.num_hidden_layers
    count = 0
    size = 0
    shards = dict[str, str]()
    with unfinished(folder) as home:
        for i, part in enumerate(widening.parts(tensors, whole=True), 1):
            name = f"model-{i:05}-of-{1 + layers:05}.safetensors"
            save_file(part, home / name, metadata={"format": "pt"})
            shards |= dict.fromkeys(part, name)
            count += sum(t.numel() for t in part.values())
            size += sum(t.nbytes for t in part.values())
            tell(i)
        index = {"metadata": {"total_size": size}, "weight_map": shards}
        (home / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=1) + "\n")
        copy_beside(source, home)
        (home / CONFIG).write_text(json.dumps(widening.config(config, layers), indent=2) + "\n")
    return count


def write_drafter(folder: Path, source: Path, widening: Widening, target: Path) -> int:
    """Writes a drafter of a widened target, and returns how many parameters it has.

    Raises:
        UserError: its layer is not of the target's shape.
    """
    stored = Checkpoint.at(source).load_tensors()
    own = replace(Shape.of(stored.config), num_hidden_layers=widening.small.num_hidden_layers)
    if own != widening.small:
        raise UserError(
            f"the drafter in '{source}' has the sizes {own}, allowed are its target's: {widening.small}"
        )
    whole = "model.embed_tokens.weight" in stored.tensors
    tensors = untied(stored.tensors) if whole and widening.padded_vocab else stored.tensors
    new = {
        key: value for part in widening.parts(tensors, whole=False) for key, value in part.items()
    }
    said = stored.config[DRAFTREE_ENTRY] | {
        "target": str(target),
        "target_hash": fingerprint(AutoConfig.from_pretrained(target)),
    }
    ids = {
        key: [i + widening.more for i in stored.config[key]]
        for key in (LAYER_IDS,)
        if key in stored.config
    }
    for entry in ("hidden_layer", "low", "middle", "high"):
        if (
            said.get(entry) or -1
        ) >= 0:  # counted from the first layer, and there are more before it now
            said[entry] += widening.more
    layers = widening.large.num_hidden_layers if said["drafter"] == "mtp" else 1
    with unfinished(folder) as home:
        save_file(new, home / WEIGHTS, metadata={"format": "pt"})
        copy_beside(source, home)
        config = widening.config(stored.config, layers) | ids | {DRAFTREE_ENTRY: said}
        (home / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return sum(t.numel() for t in new.values())


def widen(
    out: Path,
    target: str = "demo",
    drafters: Sequence[str] = (),
    wanted: Mapping[str, int] = {},
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, int]:
    """Writes a widened target and its drafters.

    Args:
        out: the target is written to `out`/target, a drafter to `out`/its method.
        target: `demo`, or a folder with a Llama.
        drafters: methods whose drafters are shipped for the demo, or folders.
        wanted: sizes, named as in `Shape`; the others follow.
        dtype: of what is written.
        seed: of the weights that contribute nothing.

    Returns:
        The parameters of each folder written.

    Raises:
        UserError: the target or a drafter cannot be widened so, or there is such a folder.
    """
    source = place(target)
    config, homes = Checkpoint.at(source).config, [drafter_folder(d, target) for d in drafters]
    small = Shape.of(config)
    large = enlarged(small, wanted)
    if dtype == torch.float16 and large.vocab_size > small.vocab_size:
        raise UserError(
            "float16 cannot hold the logits of a larger vocabulary, allowed are float32, float64, bfloat16"
        )
    chosen = {str(Checkpoint.at(home).about["drafter"]): home for home in homes}
    for name in ("target", *chosen):
        if (out / name).exists():
            raise UserError(f"'{out / name}' is there: name another folder, or remove it")
    counts = {}
    with progress("widening", large.num_hidden_layers + 1) as tell:
        counts["target"] = write_target(
            out / "target", source, Widening(small, large, config, dtype, seed), tell
        )
    for method, home in chosen.items():
        widening = Widening(small, large, Checkpoint.at(home).config, dtype, seed)
        counts[method] = write_drafter(out / method, home, widening, out / "target")
    return counts


OPTIONS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--target", default="demo", help="demo, or a folder with a Llama")
    ap.add_argument(
        "--drafter",
        action="append",
        default=[],
        help="one that is shipped for the demo, or a folder",
    )
    ap.add_argument("--shape", choices=SHAPES, help="sizes to begin with")
    for option in OPTIONS:
        ap.add_argument(f"--{option.replace('_', '-')}", type=int)
    ap.add_argument("--dtype", choices=DTYPES, default="float32")
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    given = {
        size: value
        for option, size in OPTIONS.items()
        if (value := getattr(args, option)) is not None
    }
    wanted = SHAPES.get(args.shape, {}) | given
    try:
        counts = widen(args.out, args.target, args.drafter, wanted, DTYPES[args.dtype], args.seed)
    except UserError as error:
        raise SystemExit(f"widen: {error}") from None
    for name, count in counts.items():
        print(f"{args.out / name}: {count:,} parameters")


if __name__ == "__main__":
    main()
