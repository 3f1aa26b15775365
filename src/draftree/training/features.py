"""The target's internals for every sample, computed once and kept in safetensors shards.

A layer is a series of files of its own, so that another drafter that reads other layers adds to a folder what it lacks.

Shapes: T tokens of a sample, D hidden size, H key-value heads.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftree.boundary.files import existing, understood, whole
from draftree.data.samples import Sample, digest
from draftree.errors import UserError
from draftree.models.target import LAST, Needs, Target
from draftree.training.teacher import Features, padded, read

SHARD = 256
"""Samples in a file."""
TOGETHER = 16
"""Samples in a pass of the target."""


def series(needs: Needs, target: Target) -> dict[str, int]:
    """The names of the series a drafter needs, each with its layer counted from 0."""
    layers = int(target.decoder.config.num_hidden_layers)
    hidden = [target.decoder.hidden_index(layer) for layer in (*needs.hidden, LAST)]
    return {f"hidden.{i}": i for i in hidden} | {f"kv.{i % layers}": i % layers for i in needs.kv}


@dataclass(frozen=True)
class Shards:
    """Features kept on disk.

    Attributes:
        folder: of these samples and this target.
        target: whose they are.
        samples: all of them.
        needs: what is read.
    """

    folder: Path
    target: Target
    samples: Sequence[Sample]
    needs: Needs
    _open: dict[Path, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def at(cls, home: Path, target: Target, samples: Sequence[Sample], needs: Needs) -> "Shards":
        """The shards of some samples below a folder that may hold those of others too."""
        from draftree.formats.checkpoint import fingerprint

        return cls(home / f"{fingerprint(target.decoder.config)}-{digest(samples)}", target, samples, needs)

    @property
    def lacking(self) -> tuple[str, ...]:
        """The series of which not all files are there."""
        names = series(self.needs, self.target)
        return tuple(n for n in names if not all(self._file(n, s).is_file() for s in range(self._count)))

    @property
    def size(self) -> int:
        """Bytes that what is lacking will take."""
        decoder = self.target.decoder
        width = 0
        for name in self.lacking:
            shape = decoder.shapes[series(self.needs, self.target)[name]] if name.startswith("kv.") else None
            width += decoder.hidden if shape is None else shape.heads * (shape.key + shape.value)
        return width * decoder.dtype.itemsize * sum(len(s.tokens) for s in self.samples)

    @property
    def _count(self) -> int:
        return -(-len(self.samples) // SHARD)

    def _file(self, name: str, shard: int) -> Path:
        return self.folder / name / f"{shard:05}.safetensors"

    def check_room(self) -> None:
        """Refuses, before the work, a disk that is too small.

        Raises:
            UserError: it says how much is needed and how much is free.
        """
        home = existing(self.folder)
        free = shutil.disk_usage(home).free
        if self.size > free:
            raise UserError(f"features need {self.size / 1e9:.1f} GB in '{home}', free are {free / 1e9:.1f} GB")

    def fill(self, listen: Callable[[int, int], None] = lambda *_: None, rank: int = 0, world: int = 1) -> None:
        """Computes what is lacking; an interrupted run goes on with the files that are not there yet.

        Args:
            listen: told how many files of how many are done.
            rank: of this process, which does every `world`-th file.
            world: how many processes do this.
        """
        lacking, mine = self.lacking, range(rank, self._count, world)
        for done, shard in enumerate(mine, 1):
            if names := [n for n in lacking if not self._file(n, shard).is_file()]:
                self._write(shard, names)
            listen(done, len(mine))

    def _write(self, shard: int, names: Sequence[str]) -> None:
        found: dict[str, dict[str, Tensor]] = {n: {} for n in names}
        layers = series(self.needs, self.target)
        for i, features in self._read(range(shard * SHARD, min((shard + 1) * SHARD, len(self.samples)))):
            count = len(self.samples[i].tokens)
            by_index = {self.target.decoder.hidden_index(k): v for k, v in features.hidden.items()}
            by_layer = {k % int(self.target.decoder.config.num_hidden_layers): v for k, v in features.kv.items()}
            for name in names:
                if name.startswith("kv."):
                    keys, values = (t[0, :, :count].contiguous() for t in by_layer[layers[name]])
                    found[name] |= {f"{i}.k": keys, f"{i}.v": values}
                else:
                    found[name][str(i)] = by_index[layers[name]][0, :count].contiguous()
        for name, tensors in found.items():
            path = self._file(name, shard)
            with whole(path) as partial:
                save_file({k: t.cpu() for k, t in tensors.items()}, partial)

    def _read(self, chosen: range) -> Iterator[tuple[int, Features]]:
        """Each sample's features [1, …], from passes over samples of about the same length."""
        order = sorted(chosen, key=lambda i: len(self.samples[i].tokens))
        for at in range(0, len(order), TOGETHER):
            part = order[at : at + TOGETHER]
            ids = torch.from_numpy(padded([self.samples[i].tokens for i in part])).to(self.target.decoder.device)
            features = read(self.target, ids, self.needs)
            for row, i in enumerate(part):
                kv = {k: (keys[row : row + 1], values[row : row + 1]) for k, (keys, values) in features.kv.items()}
                yield i, Features({k: h[row : row + 1] for k, h in features.hidden.items()}, kv)

    def batch(self, chosen: Sequence[int]) -> Features:
        """The features of some samples, padded at the end."""
        decoder = self.target.decoder
        layers = int(decoder.config.num_hidden_layers)
        hidden = {
            k: self._padded([self._get(f"hidden.{decoder.hidden_index(k)}", i, str(i)) for i in chosen])
            for k in dict.fromkeys((*self.needs.hidden, LAST))
        }
        kv = {
            k: (
                self._padded([self._get(f"kv.{k % layers}", i, f"{i}.k").transpose(0, 1) for i in chosen]).transpose(1, 2),
                self._padded([self._get(f"kv.{k % layers}", i, f"{i}.v").transpose(0, 1) for i in chosen]).transpose(1, 2),
            )
            for k in self.needs.kv
        }
        return Features(hidden, kv)

    def _padded(self, parts: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).to(self.target.decoder.device)

    def _get(self, name: str, sample: int, key: str) -> Tensor:
        path = self._file(name, sample // SHARD)
        with understood(f"'{path}' does not hold these samples' features (without it they are computed anew)"):
            if path not in self._open:
                opened: Any = safe_open(path, framework="pt")
                self._open[path] = opened.__enter__()
            tensor: Tensor = self._open[path].get_tensor(key)
        return tensor
