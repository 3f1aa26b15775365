"""A trained drafter on disk: weights in the layout their kind is published in, and a `config.json`.

What draftree has to know stands in that config under `draftree`: the method, its knobs, the target's name and a hash of
the target's config. A published checkpoint has no such entry; each method recognises its own.

Shapes: V vocabulary, D hidden size.
"""

import hashlib
import json
import pickle
import typing
import warnings
from collections.abc import Callable, Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from draftree.boundary import files
from draftree.boundary.files import Entries, filled, read_object, understood
from draftree.demo import demo_folder
from draftree.errors import DraftreeWarning, UserError, shown
from draftree.models.target import Target

ABOUT = "draftree"
"""The entry of `config.json` that is ours."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def shipped(method: str, checkpoint: str, target: Target) -> Path:
    """The folder of a checkpoint, by default the one shipped for the demo target.

    Raises:
        UserError: no checkpoint was named and none is shipped for this target.
    """
    if checkpoint:
        return Path(checkpoint)
    if target.name != "demo" or not demo_folder(method).is_dir():
        raise UserError(
            f"no '{method}' is shipped for target '{target.name}': train one (draftree train {method} --target … --data … "
            f"--out FOLDER) and name its folder, or use {method}:checkpoint=FOLDER"
        )
    return demo_folder(method)


def read_config(folder: Path) -> dict[str, Any]:
    """What `config.json` says.

    Raises:
        UserError: there is none, or it is not an object.
    """
    return read_object(folder / CONFIG, "a drafter's config")


def about(folder: Path) -> dict[str, Any]:
    """What the config says to draftree; nothing for a published checkpoint.

    Raises:
        UserError: the folder has no config, or what it says is no object.
    """
    said: dict[str, Any] = Entries(read_config(folder), folder / CONFIG).get(ABOUT, dict, {})
    return said


def kept(folder: Path, method: type) -> dict[str, Any]:
    """The knobs that a checkpoint fixes; none for a published one.

    Args:
        folder: of the checkpoint.
        method: the dataclass of knobs, whose fields' types they must have.

    Raises:
        UserError: a knob is of another type.
    """
    said, hints = Entries(about(folder), f"'{folder / CONFIG}': {ABOUT}"), typing.get_type_hints(method)
    return {f.name: said.get(f.name, hints[f.name]) for f in fields(method) if f.name in said.values and f.name != "checkpoint"}


def fingerprint(config: PreTrainedConfig) -> str:
    """A hash of what in a target's config decides whether a drafter fits; it does not change with transformers' version."""
    keys = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "tie_word_embeddings")  # fmt: skip
    values = {k: getattr(config, k, None) for k in keys}
    rope = getattr(config, "rope_parameters", None) or {}
    values["rope_theta"] = rope.get("rope_theta")
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def note(method: str, knobs: Any, target: Target) -> dict[str, Any]:
    """The entry of the config that is ours."""
    own = {f.name: getattr(knobs, f.name) for f in fields(knobs) if f.compare and f.name != "checkpoint"}
    return {"drafter": method, "target": target.name, "target_hash": fingerprint(target.decoder.config), **own}


def check_method(folder: Path, method: str) -> None:
    """Refuses another method's checkpoint.

    Raises:
        UserError: it holds another method.
    """
    said = about(folder)
    if said.get("drafter", method) != method:
        raise UserError(f"'{folder}' holds a drafter '{said['drafter']}', asked for was '{method}'")


def check_target(folder: Path, target: Target) -> None:
    """Warns of a checkpoint that was trained for another target."""
    said = about(folder)
    if said.get("target_hash", fingerprint(target.decoder.config)) != fingerprint(target.decoder.config):
        warnings.warn(
            f"'{folder}' was trained for target '{said.get('target')}', whose config is another", DraftreeWarning, stacklevel=2
        )


@dataclass(frozen=True)
class Stored:
    """A checkpoint as it lay on disk, so that it can be written back bit for bit.

    Attributes:
        file: the name of its weights' file.
        config: its config.
        tensors: all of them, in the dtypes they were stored in; empty for a drafter that was never stored.
    """

    file: str = WEIGHTS
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def read_tensors(
    folder: Path, files: tuple[str, ...] = (WEIGHTS, "pytorch_model.bin"), wanted: Callable[[str], bool] = lambda _: True
) -> Stored:
    """The config and tensors of a checkpoint; pickled files are read as weights only.

    Args:
        folder: where it lies.
        files: names of weights' files, the first found is read; an index of shards beside it is followed.
        wanted: which names are read; a whole target's checkpoint may hold a drafter's among its own.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    config = read_config(folder)
    for name in files:
        index = folder / f"{name}.index.json"
        parts = {folder / name} if (folder / name).is_file() else set()
        if index.is_file():
            parts = {folder / part for key, part in _shards(index).items() if wanted(key)}
        if parts:
            return Stored(name, config, {k: v for part in sorted(parts) for k, v in _tensors(part, wanted).items()})
    raise UserError(f"'{folder}' has no weights: a file {' or '.join(files)} was expected")


def _shards(index: Path) -> dict[str, str]:
    """Which file each tensor lies in."""
    found: dict[str, str] = Entries(read_object(index, "an index of shards"), index).get("weight_map", dict[str, str])
    return found


def _tensors(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    with understood(f"cannot read '{path}'"):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {key: _plain(file.get_tensor(key), key, path) for key in file.keys() if wanted(key)}  # noqa: SIM118
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # torch's own text shows how to load it anyway
            told = "is broken, or holds more than tensors, and nothing else is read from a pickled file"
            raise UserError(f"'{path}' {told}") from error
        if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
            raise UserError(f"'{path}' holds {shown(found)}, allowed are named tensors alone")
        return {key: _plain(value, key, path) for key, value in found.items() if wanted(key)}


def _plain(value: Tensor, key: str, path: Path) -> Tensor:
    """A tensor that any network can be filled with."""
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_complex() or value.is_quantized:
        kind = f"{value.dtype}, {value.layout} on {value.device}"
        raise UserError(f"'{path}' has tensor {key} of {kind}, allowed are numbers that lie there one by one")
    return value


FILES = (WEIGHTS, "pytorch_model.bin", "medusa_lm_head.pt", "medusa_lm_head.safetensors", "hydra_lm_head.pt",
         "hydra_lm_head.safetensors")  # fmt: skip
"""What the weights of published drafters are called."""


def tensor_names(folder: Path) -> frozenset[str]:
    """The names of a checkpoint's tensors, none of them loaded unless the file is a pickled one.

    Raises:
        UserError: a file cannot be read.
    """
    found: set[str] = set()
    for name in FILES:
        if (index := folder / f"{name}.index.json").is_file():
            found |= set(_shards(index))
        elif (path := folder / name).is_file() and name.endswith(".safetensors"):
            found |= files.tensor_names(path)
        elif path.is_file():
            found |= set(_tensors(path, lambda _: True))
    return frozenset(found)


M = TypeVar("M", bound=nn.Module)


def furnished(
    make: Callable[[], M],
    stored: Stored,
    where: Path,
    optional: Set[str] = frozenset(),
    name: Callable[[str], str] = lambda key: key,
) -> M:
    """A network with a checkpoint's tensors.

    It is laid out without memory first, so that sizes that a config makes up are refused before anything is as large.

    Args:
        make: gives the network.
        stored: what was read.
        where: for errors.
        optional: published names that may be missing, or be there without a place in the module.
        name: the published name of a parameter or buffer of the module; its own by default.

    Raises:
        UserError: it names missing, foreign and mis-shaped tensors.
    """
    with torch.device("meta"):
        _fitting(make(), stored, where, optional, name)
    module = make()
    fill(module, stored, where, optional, name)
    return module


def fill(
    module: nn.Module,
    stored: Stored,
    where: Path,
    optional: Set[str] = frozenset(),
    name: Callable[[str], str] = lambda key: key,
) -> None:
    """Copies a checkpoint's tensors into a network whose sizes are not the config's; see `furnished`."""
    module.load_state_dict(_fitting(module, stored, where, optional, name), strict=False)


def _fitting(
    module: nn.Module, stored: Stored, where: Path, optional: Set[str], name: Callable[[str], str]
) -> dict[str, Tensor]:
    """A checkpoint's tensors under the module's names."""
    own = {name(key): (key, value) for key, value in module.state_dict().items()}
    missing = sorted(set(own) - set(stored.tensors) - optional)
    foreign = sorted(set(stored.tensors) - set(own) - optional)
    shared = {k: v for k, v in stored.tensors.items() if k in own}
    bent = [f"{k} {list(v.shape)} (allowed {list(own[k][1].shape)})" for k, v in shared.items() if v.shape != own[k][1].shape]
    odd = [f"{k} of {v.dtype}" for k, v in shared.items() if v.is_floating_point() is not own[k][1].is_floating_point()]
    for kind, names in (("missing", missing), ("foreign", foreign), ("mis-shaped", bent), ("mistyped", odd)):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise UserError(f"'{where}' has {kind} tensors: {', '.join(names[:4])}{more}")
    return {own[k][0]: v for k, v in shared.items()}


def write(folder: Path, stored: Stored, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Writes a checkpoint, each tensor in the dtype it was stored in (float16 for new ones).

    Args:
        folder: is made.
        stored: what was read; its tensors that have no place in `state` are written back as they were.
        state: the module's tensors.
        config: the whole `config.json`.
    """
    tensors = dict(stored.tensors)
    for key, value in state.items():
        now, before = value.detach().cpu(), stored.tensors.get(key)
        if before is None:
            tensors[key] = now.to(torch.float16 if now.is_floating_point() else now.dtype).contiguous().clone()
        elif not torch.equal(before.to(now.dtype), now):  # else the stored bits are kept: a narrower target rounded them
            tensors[key] = now.to(before.dtype).contiguous().clone()
    with filled(folder, last=CONFIG) as beside:
        if stored.file.endswith(".safetensors"):
            save_file(tensors, beside / stored.file, metadata={"format": "pt"})
        else:
            torch.save(tensors, beside / stored.file)
        (beside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def check_sizes(config: dict[str, Any], folder: Path, method: str, target: Target) -> None:
    """Refuses a checkpoint whose vocabulary or hidden size is not the target's.

    Raises:
        UserError: it names what was got and what is allowed.
    """
    for key, wanted in (("vocab_size", target.decoder.vocab), ("hidden_size", target.decoder.hidden)):
        if config.get(key) != wanted:
            raise UserError(f"'{method}' in '{folder}' has {key} {config.get(key)}, allowed is the target's: {wanted}")
