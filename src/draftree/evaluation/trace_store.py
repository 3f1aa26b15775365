"""A folder of recordings of a target: texts, hidden states, keys and values.

`recording.json` says whose they are, `texts.jsonl` holds a line for each text, `taps/` a file with
the hidden states, keys and values along each. What is missing is recorded when it is asked for;
what is there needs no pass of the target.

Shapes: T tokens of one text, D hidden size, H key-value heads.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftree.engine import generate_plain
from draftree.errors import UserError
from draftree.evaluation.provenance import fingerprint
from draftree.evaluation.replay_target import ReplayTarget
from draftree.evaluation.target_trace import Recording, TokenText
from draftree.models.hf_runner import UNNORMED
from draftree.request import Request
from draftree.target.target import LAST, HiddenStateSpec, Target
from draftree.utils.files import (
    Entries,
    append,
    as_user_error,
    check_value,
    read_object,
    replace_file,
    write_text,
)
from draftree.utils.progress_callback import Tell, ignore_progress

FORMAT = 1
TEXTS_PER_BATCH = 8
"""Number of texts that the target generates in one batch."""
METADATA_FILE = "recording.json"


@dataclass(frozen=True)
class Recordings:
    """Manage the recordings of one target in a folder.

    Attributes:
        folder: the folder.
        target: the recorded target.
        needs: layers whose hidden states, keys and values are recorded for drafters. The last
            hidden state is always included, because the target's logits are computed from it.
        texts: generated tokens by the key of their request; see `key`.
    """

    folder: Path
    target: Target
    needs: HiddenStateSpec
    texts: dict[str, list[int]] = field(default_factory=dict)
    _newest: dict[str, ReplayTarget] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: Path, target: Target, needs: Sequence[HiddenStateSpec]) -> Self:
        """Open the recordings in a folder, and create the folder if it does not exist.

        Raises:
            UserError: the folder contains recordings of another target, or other files.
        """
        _check_folder(folder, target)
        index = target.decoder.hidden_index
        layers = {
            layer if layer == UNNORMED else index(layer)
            for some in needs
            for layer in (*some.hidden, LAST)
        }
        kv = {layer for some in needs for layer in some.kv}
        lines, texts = folder / "texts.jsonl", dict[str, list[int]]()
        if lines.is_file():
            for line in lines.read_text("utf-8", errors="replace").splitlines():
                with suppress(
                    UserError
                ):  # of a line that was broken off, the text is written again
                    texts |= _parse_line(line, target.decoder.vocab)
        return cls(folder, target, HiddenStateSpec(tuple(sorted(layers)), tuple(sorted(kv))), texts)

    @property
    def bytes_per_token(self) -> int:
        """Return the number of bytes that the recording of one token takes on disk."""
        decoder, size = self.target.decoder, torch.finfo(self.target.decoder.dtype).bits // 8
        kv = sum(
            s.heads * (s.key + s.value) for s in (decoder.shapes[layer] for layer in self.needs.kv)
        )
        return size * (len(self.needs.hidden) * decoder.hidden_size + kv)

    def missing(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests whose text or needed tensors are not recorded."""
        return [
            r
            for r in requests
            if (k := key(r)) not in self.texts or not self._names() <= self._stored_tensor_names(k)
        ]

    def record(self, requests: Sequence[Request], tell: Tell = ignore_progress) -> None:
        """Generate missing texts with the target, and record the hidden states of each in one pass.

        After an interruption, the same call resumes the work.
        """
        unwritten = sorted(
            (r for r in requests if key(r) not in self.texts), key=lambda r: len(r.prompt)
        )
        for at in range(0, len(unwritten), TEXTS_PER_BATCH):
            some = unwritten[at : at + TEXTS_PER_BATCH]
            for request, tokens in zip(some, generate_plain(self.target, some).tokens, strict=True):
                self.texts[key(request)] = tokens
                append(self.folder / "texts.jsonl", json.dumps([key(request), tokens]) + "\n")
            tell(at + len(some), "writing", 2 * len(requests))
        for i, request in enumerate(requests):
            self._record_text(request)
            tell(len(requests) + i + 1, "reading", 2 * len(requests))

    def recording(self, request: Request) -> Recording:
        """Load the recording of a request's text.

        Raises:
            UserError: the request was not recorded.
        """
        if self.missing([request]):
            raise UserError(
                f"'{self.folder}' holds no recording of request {request.number} with these settings"
            )
        with as_user_error(f"'{self._file(key(request))}' is not a recording"):
            tensors = load_file(self._file(key(request)), device=str(self.target.decoder.device))
            text, decoder = self._text(request), self.target.decoder
            cache = self.target.new_cache(1, len(text.tokens) if self.needs.kv else 1)
            for layer in self.needs.kv:
                for stored, name in zip(cache.layer(layer), ("keys", "values"), strict=True):
                    place = stored[0, :, : len(text.tokens)]
                    place.copy_(_of_shape(tensors[f"{name}.{layer}"], place.shape, stored.dtype))
            wanted = (len(text.tokens), decoder.hidden_size)
            hidden = {
                decoder.hidden_index(layer): _of_shape(
                    tensors[f"hidden.{layer}"], wanted, decoder.dtype
                )
                for layer in self.needs.hidden
            }
        return Recording(self.target, (text,), hidden, cache)

    def source(self, request: Request) -> ReplayTarget:
        """Return a target that replays a request's recorded text; the newest one is cached."""
        if (k := key(request)) not in self._newest:
            self._newest.clear()
            self._newest[k] = ReplayTarget(self.recording(request))
        return self._newest[k]

    @torch.inference_mode()
    def _record_text(self, request: Request) -> None:
        """Run one pass over a text, and save the tensors that drafters need."""
        file, text = self._file(key(request)), self._text(request)
        cache = self.target.new_cache(1, len(text.tokens))
        hidden = self.target.prefill(cache, [text.tokens], self.needs).hidden_states.hidden
        tensors = {f"hidden.{layer}": h.contiguous() for layer, h in hidden.items()}
        for layer in self.needs.kv:
            keys, values = (t[0, :, : len(text.tokens)].contiguous() for t in cache.layer(layer))
            tensors |= {f"keys.{layer}": keys, f"values.{layer}": values}
        with as_user_error(f"cannot read '{file}'"):
            earlier = load_file(file) if file.is_file() else {}
        file.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(file) as part:
            save_file({n: t.cpu() for n, t in (earlier | tensors).items()}, part)

    def _text(self, request: Request) -> TokenText:
        return TokenText(
            np.array([*request.prompt, *self.texts[key(request)]], np.int64), len(request.prompt)
        )

    def _file(self, name: str) -> Path:
        return self.folder / "taps" / f"{name}.safetensors"

    def _names(self) -> set[str]:
        return {f"hidden.{layer}" for layer in self.needs.hidden} | {
            f"{part}.{layer}" for layer in self.needs.kv for part in ("keys", "values")
        }

    def _stored_tensor_names(self, name: str) -> set[str]:
        """Return the names of the tensors in a text's file; only the header of the file is read."""
        with suppress(OSError, ValueError), self._file(name).open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            return set(header)
        return set()


def _parse_line(line: str, vocab: int) -> dict[str, list[int]]:
    """Return {key: tokens} from a line of `texts.jsonl`.

    Raises:
        UserError: the line is incomplete, or contains tokens outside the target's vocabulary.
    """
    with as_user_error("the line is not a key and its tokens"):
        key, tokens = json.loads(line)
    check_value(key, str, "the key")
    if any(token >= vocab for token in check_value(tokens, list[int], "a token", least=0)):
        raise UserError(f"a token is {max(tokens)}, allowed are those below {vocab}")
    return {key: tokens}


def key(request: Request) -> str:
    """Return the name under which a request is recorded: a hash of 24 hexadecimal digits.

    The hash covers everything that determines the text: prompt, token limit and end tokens, and for
    a sampled text also the request's number and sampling settings.
    """
    sampling = request.sampling
    drawn = "" if sampling.greedy else f"{sampling} {request.number}"
    asked = f"{request.prompt} {request.max_new_tokens} {sorted(request.eos)} {drawn}"
    return hashlib.sha256(asked.encode()).hexdigest()[:24]


def _of_shape(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor after checking its shape and dtype.

    Raises:
        ValueError: the tensor has another shape or dtype.
    """
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"a tensor is {tensor.dtype} {list(tensor.shape)}, allowed is {dtype} {list(shape)}"
        )
    return tensor


def target_hashes(target: Target) -> dict[str, str]:
    """Return a dict: hashes of a target's `weights` and `tokenizer`, and its `dtype`."""
    vocabulary = sorted(target.tokenizer.get_vocab().items())
    told = json.dumps([vocabulary, target.tokenizer.chat_template])
    return {
        "weights": fingerprint(target.decoder.model),
        "tokenizer": hashlib.sha256(told.encode()).hexdigest()[:16],
        "dtype": str(target.decoder.dtype).removeprefix("torch."),
    }


def _check_folder(folder: Path, target: Target) -> None:
    about, mine = folder / METADATA_FILE, target_hashes(target)
    if not about.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(
                f"'{folder}' holds no {METADATA_FILE}, allowed is a folder of recordings, an empty or a new one"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_text(
            about, json.dumps({"format": FORMAT, "target": target.name, **mine}, indent=1) + "\n"
        )
    saved = Entries(read_object(about, "the head of a folder of recordings"), about)
    if (version := saved.get("format", int)) != FORMAT:
        raise UserError(f"'{folder}' holds recordings of format {version}, allowed is {FORMAT}")
    for name, value in mine.items():
        if (theirs := saved.get(name, str)) != value:
            told = f"its {name} is {theirs}, this target's is {value}"
            raise UserError(
                f"'{folder}' was recorded with another target ('{saved.get('target', str)}'): {told}"
            )
