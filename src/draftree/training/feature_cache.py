"""The target's hidden states along training texts, computed on demand or cached on disk.

Of kept ones a layer is a series of files of its own, so that another drafter that reads other
layers adds to a folder what it lacks.

Shapes: B batch, T tokens of a sample, D hidden size, H key-value heads.
"""

import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftree.data.samples import Sample, digest
from draftree.errors import UserError
from draftree.evaluation.provenance import fingerprint
from draftree.models.forward_batch import ForwardBatch
from draftree.models.model_runner import Outputs
from draftree.models.native_runner import NativeRunner
from draftree.models.one_pass_caches import KVCollector
from draftree.target.target import LAST, HiddenStateSpec, Target
from draftree.training.distributed import Processes
from draftree.utils.files import as_user_error, nearest_existing, replace_file
from draftree.utils.progress_callback import Tell, ignore_progress

SAMPLES_PER_FILE = 256
"""Number of samples in a file."""
SAMPLES_PER_PASS = 16
"""Number of samples in one pass of the target when files are computed."""


@dataclass(frozen=True)
class Features:
    """Store the target's hidden states, keys and values for a batch of texts.

    `hidden` has hidden states [B, T, D] by layer, including the last one. `kv` has keys and values
    [B, H, T, …] by layer.
    """

    hidden: dict[int, Tensor]
    kv: dict[int, tuple[Tensor, Tensor]]


@torch.no_grad()
def read_features(target: Target, ids: Tensor, needs: HiddenStateSpec) -> Features:
    """Run the target over texts [B, T], and return the features that `needs` names."""
    count = int(target.decoder.config.num_hidden_layers)
    layers = tuple(dict.fromkeys((*needs.hidden, LAST)))
    if isinstance(target.decoder.runner, NativeRunner) and not needs.kv:
        return Features(_read_natively(target, ids, layers), {})
    catcher = KVCollector({layer % count for layer in needs.kv})
    stack: Any = target.decoder.stack
    with target.decoder.hf.collect_hidden_states(layers) as hidden:
        stack(input_ids=ids, **target.decoder.hf.causal(ids, catcher))
    return Features(hidden, {layer: catcher.caught[layer % count] for layer in needs.kv})


def _read_natively(target: Target, ids: Tensor, layers: tuple[int, ...]) -> dict[int, Tensor]:
    """Return the hidden states [B, T, D] of texts [B, T] by layer, from a native pass."""
    rows, count = ids.shape
    cache = target.decoder.new_cache(rows, count)
    texts = list(ids.numpy())
    batch = ForwardBatch.chains(texts, np.zeros(rows, np.int64), ids.device)
    outputs = Outputs(layers, tokens=np.zeros(0, np.int64))
    found = target.decoder.runner.forward(batch, cache, outputs).hidden
    return {layer: hidden.view(rows, count, -1) for layer, hidden in found.items()}


def pad(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return [B, T] arrays of different lengths, padded with zeros at the end."""
    found: np.ndarray = pad_sequence(
        [torch.from_numpy(row) for row in rows], batch_first=True
    ).numpy()
    return found


@dataclass(frozen=True)
class Shards:
    """Manage features that are stored on disk.

    Attributes:
        folder: folder for these samples and this target.
        target: target that computes the features.
        samples: all samples of the run.
        needs: layers whose hidden states, keys and values are needed.
    """

    folder: Path
    target: Target
    samples: Sequence[Sample]
    needs: HiddenStateSpec
    _open: dict[Path, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def at(
        cls, home: Path, target: Target, samples: Sequence[Sample], needs: HiddenStateSpec
    ) -> "Shards":
        """Return the features of some samples, in a subfolder of `home`.

        `home` may also contain features of other samples and targets.
        """
        whose = fingerprint(
            target.decoder.model
        )  # and not its config, which an adapter or a rounding leaves as it is
        return cls(home / f"{whose}-{digest(samples)}", target, samples, needs)

    @property
    def lacking(self) -> tuple[str, ...]:
        """Return the names of the layers' subfolders in which files are missing."""
        hidden, kv = (
            (self._hidden_state_folder(layer) for layer in (*self.needs.hidden, LAST)),
            map(self._kv, self.needs.kv),
        )
        names = dict.fromkeys((*hidden, *kv))
        return tuple(
            n for n in names if not all(self._file(n, s).is_file() for s in range(self._count))
        )

    @property
    def size(self) -> int:
        """Return the size of the missing files in bytes."""
        decoder = self.target.decoder
        width = 0
        for kind, layer in (name.split(".") for name in self.lacking):
            shape = decoder.shapes[int(layer)] if kind == "kv" else None
            width += (
                decoder.hidden_size if shape is None else shape.heads * (shape.key + shape.value)
            )
        return width * decoder.dtype.itemsize * sum(len(s.tokens) for s in self.samples)

    def _hidden_state_folder(self, layer: int) -> str:
        """Return the name of the subfolder for a hidden state."""
        return f"hidden.{self.target.decoder.hidden_index(layer)}"

    def _kv(self, layer: int) -> str:
        """Return the name of the subfolder for a layer's keys and values."""
        return f"kv.{layer % int(self.target.decoder.config.num_hidden_layers)}"

    @property
    def _count(self) -> int:
        return -(-len(self.samples) // SAMPLES_PER_FILE)

    def _file(self, name: str, shard: int) -> Path:
        return self.folder / name / f"{shard:05}.safetensors"

    def fill(self, processes: Processes, tell: Tell = ignore_progress) -> None:
        """Compute and write the missing files; each process handles a part of them.

        An interrupted run continues with the files that do not exist yet.

        Args:
            processes: processes of the run.
            tell: called with the number of files that this process has written, and the number of
                all its files.

        Raises:
            UserError: there is too little free disk space, or the processes see different folders.
        """
        with processes.share_errors():
            home = nearest_existing(self.folder)
            if self.size > (free := shutil.disk_usage(home).free):
                raise UserError(
                    f"features need {self.size / 1e9:.1f} GB in '{home}', free are {free / 1e9:.1f} GB"
                )
        with processes.alone(self.folder), processes.share_errors():
            lacking, mine = self.lacking, range(processes.rank, self._count, processes.world)
            for done, shard in enumerate(mine, 1):
                if names := [n for n in lacking if not self._file(n, shard).is_file()]:
                    self._write(shard, names)
                tell(done, "caching features", len(mine))
        with processes.share_errors():
            if self.lacking:
                raise UserError(
                    f"'{self.folder}' lacks files of other processes: all machines must share the folder"
                )

    def _write(self, shard: int, names: Sequence[str]) -> None:
        chosen, found = (
            range(shard * SAMPLES_PER_FILE, min((shard + 1) * SAMPLES_PER_FILE, len(self.samples))),
            defaultdict[str, dict[str, Tensor]](dict),
        )
        order = sorted(
            chosen, key=lambda i: len(self.samples[i].tokens)
        )  # passes are over samples of about the same length
        for at in range(0, len(order), SAMPLES_PER_PASS):
            part = order[at : at + SAMPLES_PER_PASS]
            ids = torch.from_numpy(pad([self.samples[i].tokens for i in part])).to(
                self.target.decoder.device
            )
            features = read_features(self.target, ids, self.needs)
            for row, i in enumerate(part):
                count = len(self.samples[i].tokens)
                for layer, states in features.hidden.items():
                    found[self._hidden_state_folder(layer)][str(i)] = (
                        states[row, :count].cpu().contiguous()
                    )
                for layer, pair in features.kv.items():
                    tensors = {
                        f"{i}.{name}": t[row, :, :count].cpu().contiguous()
                        for name, t in zip("kv", pair, strict=True)
                    }
                    found[self._kv(layer)].update(tensors)
        for name in names:
            with replace_file(self._file(name, shard)) as partial:
                save_file(found[name], partial)

    def batch(self, chosen: Sequence[int]) -> Features:
        """Load the features of the given samples, padded at the end."""

        def of_layer(layer: int, name: str) -> Tensor:
            shape = self.target.decoder.shapes[layer]
            width = shape.key if name == "k" else shape.value
            parts = [
                self._get(self._kv(layer), i, f"{i}.{name}", (shape.heads, -1, width)).transpose(
                    0, 1
                )
                for i in chosen
            ]
            return self._pad(parts).transpose(1, 2)

        hidden = {
            layer: self._pad(
                [
                    self._get(
                        self._hidden_state_folder(layer),
                        i,
                        str(i),
                        (-1, self.target.decoder.hidden_size),
                    )
                    for i in chosen
                ]
            )
            for layer in dict.fromkeys((*self.needs.hidden, LAST))
        }
        return Features(
            hidden, {layer: (of_layer(layer, "k"), of_layer(layer, "v")) for layer in self.needs.kv}
        )

    def _pad(self, parts: list[Tensor]) -> Tensor:
        return pad_sequence(parts, batch_first=True).to(self.target.decoder.device)

    def _get(self, name: str, sample: int, key: str, shape: tuple[int, ...]) -> Tensor:
        """Load a tensor of one sample, and check its shape and dtype.

        `name` is the subfolder of its layer. In `shape`, −1 stands for the number of the sample's
        tokens.
        """
        path = self._file(name, sample // SAMPLES_PER_FILE)
        with as_user_error(
            f"'{path}' does not hold these samples' features (without it they are computed anew)"
        ):
            if path not in self._open:
                opened: Any = safe_open(path, framework="pt")
                self._open[path] = opened.__enter__()
            tensor: Tensor = self._open[path].get_tensor(key)
            wanted, dtype = (
                [len(self.samples[sample].tokens) if n < 0 else n for n in shape],
                self.target.decoder.dtype,
            )
            if list(tensor.shape) != wanted or tensor.dtype != dtype:
                raise ValueError(
                    f"{key} is {tensor.dtype} {list(tensor.shape)}, allowed is {dtype} {wanted}"
                )
        return tensor
