"""Read and write a drafter checkpoint: weights in their published layout and `config.json`.

What draftree has to know stands in that config under `draftree`: the method, its knobs, the
target's name and a hash of the target's config. A published checkpoint has no such entry; each
method recognises its own.

Shapes: V vocabulary, D hidden size.
"""

import hashlib
import json
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar, final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from draftree.errors import DraftreeWarning, UserError, format_value
from draftree.target.target import Target
from draftree.target.target_names import missing_package, shipped_folder
from draftree.utils import files
from draftree.utils.files import Entries, as_user_error, fill_folder, read_object

DRAFTREE_ENTRY = "draftree"
"""The name of the entry in `config.json` that only draftree uses."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"
WEIGHT_FILES = (WEIGHTS, "pytorch_model.bin")
"""The usual names of weight files."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of attention and feed-forward layers, which may have biases."""
M = TypeVar("M", bound=nn.Module)


def resolve_checkpoint(method: str, checkpoint: str, target: Target) -> Path:
    """Return the folder of a checkpoint; by default the one that is shipped for the target.

    Raises:
        UserError: no checkpoint was named and none is shipped for this target.
    """
    if checkpoint:
        return Path(checkpoint)
    if (folder := shipped_folder(target.name, method)) is None:
        if told := missing_package(target.name):
            raise UserError(told)
        raise UserError(
            f"no '{method}' is shipped for target '{target.name}': train one (draftree train {method} --target … --data … "
            f"--out FOLDER) and name its folder, or use {method}:checkpoint=FOLDER"
        )
    return folder


def fingerprint(config: PreTrainedConfig) -> str:
    """Return a hash of the entries of a target's config on which a drafter depends.

    It does not change with the version of transformers.
    """
    keys = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "tie_word_embeddings",
    )
    values = {k: getattr(config, k, None) for k in keys}
    rope = getattr(config, "rope_parameters", None) or {}
    values["rope_theta"] = rope.get("rope_theta")
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def embedding_hash(target: Target) -> str:
    """Return a hash of some vectors of a target's embedding.

    It uses the 8 leading bits of each value, so that it is the same in every dtype.
    """
    outer: Any = target.decoder.model
    weight: Tensor = outer.get_input_embeddings().weight
    if weight.is_meta:
        return ""
    some = weight[:: max(1, len(weight) // 256)].detach().cpu().to(torch.bfloat16).contiguous()
    return hashlib.sha256(some.view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def sizes(target: Target) -> dict[str, int]:
    """Return a dict of the config entries in which a drafter must agree with its target."""
    return {"vocab_size": target.decoder.vocab, "hidden_size": target.decoder.hidden_size}


@final
@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it is stored on disk, so that it can be written back bit for bit.

    For a new drafter it contains the initial config.

    Attributes:
        config: the content of `config.json`.
        folder: the folder of its files.
        file: the name of the weight file.
        tensors: the tensors in their stored dtypes; empty before they are loaded, and for a drafter
            that was never stored.
        name: maps the name of a tensor in the drafter's network to its name on disk; the same by
            default.
    """

    config: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    file: str = WEIGHTS
    tensors: dict[str, Tensor] = field(default_factory=dict)
    name: Callable[[str], str] = str

    @classmethod
    def at(cls, folder: Path) -> Self:
        """Return the checkpoint of a folder, without its tensors.

        Raises:
            UserError: the config is missing, or is not an object.
        """
        return cls(read_object(folder / CONFIG, "a drafter's config"), folder)

    @property
    def about(self) -> dict[str, Any]:
        """Return the config entry that only draftree uses; it is empty for a published checkpoint.

        Raises:
            UserError: the entry is not an object.
        """
        said: dict[str, Any] = Entries(self.config, self.folder / CONFIG).get(
            DRAFTREE_ENTRY, dict, {}
        )
        return said

    def knobs(self, hints: Mapping[str, Any]) -> dict[str, Any]:
        """Return the drafter's options that the checkpoint sets; none for a published one.

        Args:
            hints: the types of all options of the method.

        Raises:
            UserError: an option has another type.
        """
        said = Entries(self.about, f"'{self.folder / CONFIG}': {DRAFTREE_ENTRY}")
        return {name: said.get(name, hint) for name, hint in hints.items() if name in said.values}

    def check_method(self, method: str) -> None:
        """Refuse a checkpoint of another method.

        Raises:
            UserError: the checkpoint belongs to another method.
        """
        if (found := self.about.get("drafter", method)) != method:
            raise UserError(f"'{self.folder}' holds a drafter '{found}', needed is '{method}'")

    def check_target(self, target: Target) -> None:
        """Warn if the checkpoint was trained for another target."""
        own = {
            "target_hash": fingerprint(target.decoder.config),
            "embedding_hash": embedding_hash(target),
        }
        for key, other in (
            ("target_hash", "config is another"),
            ("embedding_hash", "embedding is another"),
        ):
            if own[key] and self.about.get(key, own[key]) != own[key]:
                told = f"'{self.folder}' was trained for target '{self.about.get('target')}', whose {other}"
                warnings.warn(told, DraftreeWarning, stacklevel=2)
                return

    def check_sizes(self, method: str, found: Mapping[str, Any], wanted: Mapping[str, int]) -> None:
        """Refuse a checkpoint whose sizes differ from the target's sizes.

        Args:
            method: the name of the method, for the error.
            found: the checkpoint's sizes, among other entries.
            wanted: the target's sizes.

        Raises:
            UserError: the message gives the size and the allowed one.
        """
        for key, size in wanted.items():
            if found.get(key) != size:
                raise UserError(
                    f"'{method}' in '{self.folder}' has {key} {found.get(key)}, allowed is the target's: {size}"
                )

    def load_tensors(
        self, files: tuple[str, ...] = WEIGHT_FILES, wanted: Callable[[str], bool] = lambda _: True
    ) -> Self:
        """Return the checkpoint with its tensors; pickled files are read only as weights.

        Args:
            files: names of weight files; the first existing one is read, or the shards of its
                index.
            wanted: returns whether a tensor with a given name is read. The checkpoint of a whole
                target may contain a drafter's tensors too.

        Raises:
            UserError: no such file exists, or it cannot be read.
        """
        for name in files:
            index = self.folder / f"{name}.index.json"
            parts = {self.folder / name} if (self.folder / name).is_file() else set()
            if index.is_file():
                parts = {self.folder / part for key, part in _shards(index).items() if wanted(key)}
            if parts:
                tensors = {
                    k: v for part in sorted(parts) for k, v in _tensors(part, wanted).items()
                }
                return replace(self, file=name, tensors=tensors)
        raise UserError(f"'{self.folder}' has no weights: a file {' or '.join(files)} was expected")

    def network(self, make: Callable[[], M], optional: Set[str] = frozenset()) -> M:
        """Return a network with the checkpoint's tensors.

        The network is first built without memory. Wrong sizes in a config are then refused before
        memory is allocated for them.

        Args:
            make: builds the network.
            optional: published names of tensors that may be missing, or may exist without a
                counterpart in the network.

        Raises:
            UserError: the message names missing tensors, unknown tensors, and tensors of the wrong
                shape.
        """
        with torch.device("meta"):
            self._fitting(self._with_biases(make()), optional)
        network = self._with_biases(make())
        self.fill(network, optional)
        return network

    def _with_biases(self, network: M) -> M:
        """Add biases to the projections of each layer, if the checkpoint has them.

        Configs have one entry for several projections (`attention_bias`), or none at all (Qwen2).
        """
        for prefix, block in network.named_modules():
            own = [
                part for part in PROJECTIONS if isinstance(getattr(block, part, None), nn.Linear)
            ]
            there = {part: self.name(f"{prefix}.{part}.bias") in self.tensors for part in own}
            if not any(there.values()):
                continue
            for part, has_bias in there.items():
                linear = getattr(block, part)
                if has_bias is (linear.bias is None):
                    linear.bias = (
                        nn.Parameter(linear.weight.new_zeros(linear.out_features))
                        if has_bias
                        else None
                    )
        return network

    def fill(self, network: nn.Module, optional: Set[str] = frozenset()) -> None:
        """Copy the checkpoint's tensors into a network that exists already.

        MTP uses it directly, because its network is built from the target and not from the
        checkpoint. `network` says which tensors may be missing or unknown, and what is refused.
        """
        network.load_state_dict(self._fitting(network, optional), strict=False)

    def _fitting(self, network: nn.Module, optional: Set[str]) -> dict[str, Tensor]:
        """Return the tensors by the names that they have in the network."""
        own = {self.name(key): (key, value) for key, value in network.state_dict().items()}
        missing = sorted(set(own) - set(self.tensors) - optional)
        foreign = sorted(set(self.tensors) - set(own) - optional)
        both = {k: (v, own[k][1]) for k, v in self.tensors.items() if k in own}
        bent = [
            f"{k} {list(v.shape)} (allowed {list(o.shape)})"
            for k, (v, o) in both.items()
            if v.shape != o.shape
        ]
        odd = [
            f"{k} of {v.dtype}"
            for k, (v, o) in both.items()
            if v.is_floating_point() is not o.is_floating_point()
        ]
        for kind, names in (
            ("missing", missing),
            ("foreign", foreign),
            ("mis-shaped", bent),
            ("mistyped", odd),
        ):
            if names:
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                raise UserError(f"'{self.folder}' has {kind} tensors: {', '.join(names[:4])}{more}")
        return {own[k][0]: v for k, (v, _) in both.items()}

    def write(self, folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the checkpoint with other values, each tensor in the dtype in which it was stored.

        New tensors are written in float16.

        Args:
            folder: the new folder.
            config: the whole `config.json`.
            tensors: the new values by their names on disk; a loaded tensor that is not among them
                is written back unchanged.
        """
        every = dict(self.tensors)
        for key, value in tensors.items():
            now, before = value.detach().cpu(), self.tensors.get(key)
            if before is None:
                every[key] = (
                    now.to(torch.float16 if now.is_floating_point() else now.dtype)
                    .contiguous()
                    .clone()
                )
            elif not torch.equal(
                before.to(now.dtype), now
            ):  # else keep the stored bits, which a narrower target rounded
                every[key] = now.to(before.dtype).contiguous().clone()
        with fill_folder(folder, last=CONFIG) as beside:
            if self.file.endswith(".safetensors"):
                save_file(every, beside / self.file, metadata={"format": "pt"})
            else:
                torch.save(every, beside / self.file)
            (beside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def tensor_names(folder: Path, names: Collection[str]) -> frozenset[str]:
    """Return the names of a folder's tensors; only pickled files must be loaded for this.

    Args:
        folder: the folder of the files.
        names: names of weight files; an index of shards is followed.

    Raises:
        UserError: a file cannot be read.
    """
    found: set[str] = set()
    for name in names:
        if (index := folder / f"{name}.index.json").is_file():
            found |= set(_shards(index))
        elif (path := folder / name).is_file() and name.endswith(".safetensors"):
            found |= files.tensor_names(path)
        elif path.is_file():
            found |= set(_tensors(path, lambda _: True))
    return frozenset(found)


def _shards(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by the tensor's name."""
    found: dict[str, str] = Entries(read_object(index, "an index of shards"), index).get(
        "weight_map", dict[str, str]
    )
    return found


def _tensors(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    with as_user_error(f"cannot read '{path}'"):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {
                    key: _as_plain_tensor(file.get_tensor(key), key, path)
                    for key in file.keys()  # noqa: SIM118
                    if wanted(key)
                }
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # torch's message shows an unsafe way
            told = "is broken, or holds more than tensors, and nothing else is read from a pickled file"
            raise UserError(f"'{path}' {told}") from error
        if not isinstance(found, dict) or not all(
            isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()
        ):
            raise UserError(f"'{path}' holds {format_value(found)}, allowed are only named tensors")
        return {
            key: _as_plain_tensor(value, key, path) for key, value in found.items() if wanted(key)
        }


def _as_plain_tensor(value: Tensor, key: str, path: Path) -> Tensor:
    """Convert a tensor to a plain one that any network can copy."""
    if (
        value.layout is not torch.strided
        or value.device.type != "cpu"
        or value.is_complex()
        or value.is_quantized
    ):
        kind = f"{value.dtype}, {value.layout} on {value.device}"
        raise UserError(
            f"'{path}' has tensor {key} of {kind}, allowed are dense numbers without quantisation"
        )
    return value
