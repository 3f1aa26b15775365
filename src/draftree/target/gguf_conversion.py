"""Convert a GGUF file once to a folder that transformers can load."""

import hashlib
import logging
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    TOKENIZER_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from draftree.errors import UserError, format_value
from draftree.models.architecture_checks import refuse_unsupported
from draftree.target.gguf_config import complete_config, end_tokens
from draftree.target.gguf_header import Header, read_header
from draftree.target.no_loading_bar import no_loading_bar
from draftree.utils.files import (
    as_user_error,
    cache_folder,
    lock_output,
    replace_folder,
    report_disk_errors,
)
from draftree.utils.hardware import return_memory

LOG = logging.getLogger("draftree")
MAGIC, LAYOUT = b"GGUF", 3
"""The first bytes of a GGUF file.

`LAYOUT` is the version of the converted folder, which is part of its name.
"""
REQUIRED_PACKAGES = ("gguf", "accelerate")
"""The packages with which transformers reads GGUF files."""


PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
"""The name of one part of a split file, in llama.cpp's format."""
LAYER_NAME_PATTERN = re.compile(r"blk\.(\d+)\.")
"""The beginning of the name of a layer's tensor; the group is the layer's index."""
COUNTS = (
    ".block_count",
    ".embedding_length",
    ".feed_forward_length",
    ".head_count",
    ".head_count_kv",
    ".key_length",
    ".value_length",
    ".vocab_size",
    ".expert_count",
    ".expert_feed_forward_length",
    ".dimension_count",
)
"""Endings of the names of entries that give a size or number of tensors."""
MAX_PARTS = 10_000
"""The largest number of parts that are looked for, because a file name may claim any number."""
MAX_EXTRA_VALUES = 1 << 12
"""Number of values that a model may have beyond the tensors of a file, such as buffers."""


def dequantise(path: Path) -> Path:
    """Return the folder of a GGUF file's dequantised weights, tokenizer and chat template.

    The folder is made once, in `targets` of the cache folder, and is named by a hash of the file's
    content. A second process that needs the same folder waits for the first.

    Args:
        path: the file, or any part of a split file. Weights of 16 or 32 bits keep their dtype, and
            quantised weights become float16 (decision 11).

    Raises:
        UserError: the file cannot be read, its header does not match its tensors, a part or package
            is missing, the architecture is not supported, or the disk is full.
    """
    with as_user_error(f"cannot read '{path}'"):
        parts = parts_of(path)
        stats = [part.stat() for part in parts]
        return _converted_folder(
            path, tuple(parts), tuple((file.st_size, file.st_mtime_ns) for file in stats)
        )


def parts_of(path: Path) -> list[Path]:
    """Return all files of a model, given the name of any of them.

    A file that was not split is returned alone.

    Raises:
        UserError: the message names a missing part.
    """
    if not (named := PART.fullmatch(path.name)) or not path.is_file():
        return [path]
    count = int(named["count"])
    if not 1 <= int(named["number"]) <= count:
        raise UserError(
            f"'{path}' is named as part {int(named['number'])} of {count}, allowed are 1 … {count}"
        )
    parts = [
        path.with_name(f"{named['name']}-{i + 1:05}-of-{count:05}.gguf")
        for i in range(min(count, MAX_PARTS))
    ]
    if missing := [part for part in parts if not part.is_file()]:
        raise UserError(
            f"'{missing[0]}' is missing: '{path.name}' is one of {count} parts, which must be in one folder"
        )
    return parts


@cache
def _converted_folder(
    path: Path, parts: tuple[Path, ...], stats: tuple[tuple[int, int], ...]
) -> Path:
    """Return the folder for files of given sizes and modification times, and make it if needed.

    The result is cached, because both weights and tokenizer need it.
    """
    headers = _read_headers(path, parts)  # before the slow hash of all bytes
    folder = dequantised_folder(parts)
    if not folder.is_dir():
        if missing := [name for name in REQUIRED_PACKAGES if find_spec(name) is None]:
            raise UserError(
                f"'{path}' needs the package '{missing[0]}': pip install 'draftree[gguf]'"
            )
        with lock_output(folder, wait=True):
            if not folder.is_dir():  # another process may have made it meanwhile
                LOG.info("dequantising '%s', once", path)
                _convert(path, parts, headers, folder)
                return_memory()  # the tensors of the file and of the model that was saved
    LOG.info("the target is '%s', dequantised: its weights are kept in %s", path.name, folder)
    return folder


def dequantised_folder(parts: tuple[Path, ...]) -> Path:
    """Return the path of a GGUF file's dequantised folder, even if it does not exist yet."""
    name = _digest(parts, tuple((file.st_size, file.st_mtime_ns) for file in map(Path.stat, parts)))
    return cache_folder() / "targets" / f"{name[:32]}-{LAYOUT}"


@cache
def _digest(parts: tuple[Path, ...], stats: tuple[tuple[int, int], ...]) -> str:
    """Return the SHA-256 hash of the contents of files, as hexadecimal digits.

    The result is cached. `stats`, the files' sizes and times, is only a part of the cache's key.
    """
    hashed = hashlib.sha256()
    for part in parts:
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                hashed.update(block)
    return hashed.hexdigest()


def _read_headers(path: Path, parts: Sequence[Path]) -> list[Header]:
    """Return the headers of files, and refuse headers that do not match each other or the tensors.

    Raises:
        UserError: the message names the file and the entry.
    """
    headers = list[Header]()
    for part in parts:
        with part.open("rb") as file:
            if (first := file.read(len(MAGIC))) != MAGIC:
                raise UserError(
                    f"'{part}' is not a GGUF file: it begins with {format_value(first)}, allowed is {MAGIC!r}"
                )
        with as_user_error(f"cannot read '{part}', which is broken"):
            headers.append(read_header(part))
    _check_parts(parts, headers)
    _check_header(
        path,
        headers[0].entries,
        {name: sizes for header in headers for name, sizes in header.tensors.items()},
    )
    return headers


def _convert(path: Path, parts: Sequence[Path], headers: Sequence[Header], folder: Path) -> None:
    """Convert a GGUF file to a model folder; join the parts of a split file first."""
    with as_user_error(
        f"cannot read '{path}' (broken, or of an architecture that transformers does not read)"
    ):
        from draftree.target.gguf_reader import FastReader

        readers = [FastReader(part) for part in parts]
        with TemporaryDirectory(
            dir=folder.parent, prefix=f".{folder.name}.", suffix=".partial"
        ) as beside:
            scratch = Path(beside)
            if len(parts) > 1:
                path = scratch / "joined.gguf"
                with report_disk_errors(folder):
                    _join(path, readers)
                readers = [FastReader(path)]
            _dequantise(path, readers[0], headers, folder, scratch)


def _check_parts(parts: Sequence[Path], headers: Sequence[Header]) -> None:
    """Refuse files that are not all parts of one file.

    Raises:
        UserError: the message names the file.
    """
    names, total = set[str](), _number(headers[0], "split.tensors.count")
    for number, (part, header) in enumerate(zip(parts, headers, strict=True)):
        count = _number(header, "split.count") or 1
        own = _number(header, "split.no") or 0
        if count != len(parts) or own != number:
            told = f"'{part}' is part {own + 1} of {count} by its header, allowed is part {number + 1} of {len(parts)}"
            named = (
                "" if len(parts) > 1 else ": a part is found by its name, NAME-00001-of-00002.gguf"
            )
            raise UserError(told + named)
        if (of_all := _number(header, "split.tensors.count")) != total:
            raise UserError(
                f"'{part}' belongs to a model of {of_all} tensors, '{parts[0].name}' to one of {total}"
            )
        if double := sorted(names & header.tensors.keys()):
            raise UserError(
                f"'{part}' has tensor {double[0]}, which another part has, too: it belongs to another model"
            )
        names |= header.tensors.keys()
    if total is not None and total != len(names):
        raise UserError(
            f"'{parts[0]}' and its other parts have {len(names)} tensors, allowed are {total}"
        )


def _number(header: Header, name: str) -> int | None:
    value = header.entries.get(name)
    return int(value) if isinstance(value, int) else None


def _check_header(
    path: Path, header: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]
) -> None:
    """Refuse a header whose sizes differ from the tensors' sizes, before a model is built.

    Raises:
        UserError: the message names the entry.
    """
    arch = header.get("general.architecture")
    if not isinstance(arch, str):
        raise UserError(
            f"'{path}': general.architecture is missing, allowed is the name of an architecture"
        )

    def refuse(name: str, allowed: object) -> NoReturn:
        raise UserError(
            f"'{path}': {name} is {format_value(header[name])}, allowed by its tensors is {allowed}"
        )

    most = max((size for sizes in tensors.values() for size in sizes), default=0)
    for name, value in header.items():
        if (
            name.startswith(f"{arch}.")
            and name.endswith(COUNTS)
            and isinstance(value, int)
            and not 0 <= value <= most
        ):
            refuse(name, f"at most {most}")
    blocks = {int(found[1]) for name in tensors if (found := LAYER_NAME_PATTERN.match(name))}
    if (name := f"{arch}.block_count") in header and blocks and header[name] != max(blocks) + 1:
        refuse(name, max(blocks) + 1)
    if (embedding := tensors.get("token_embd.weight")) is not None:
        width, rows = (*embedding, 1)[:2]
        for entry, size in ((f"{arch}.embedding_length", width), (f"{arch}.vocab_size", rows)):
            if entry in header and header[entry] != size:
                refuse(entry, size)
        if header.get("tokenizer.ggml.tokens", 0) > rows:
            raise UserError(
                f"'{path}' has {header['tokenizer.ggml.tokens']} tokens, allowed by its tensors are {rows}"
            )


def _check_size(path: Path, model: PreTrainedModel, headers: Sequence[Header]) -> None:
    """Refuse a header that describes a larger model than the tensors can fill.

    Raises:
        UserError: the message names both numbers of weights.
    """
    sizes = {name: math.prod(each) for header in headers for name, each in header.tensors.items()}
    stored = sum(sizes.values())
    if "output.weight" not in sizes:
        stored += sizes.get("token_embd.weight", 0)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > stored + MAX_EXTRA_VALUES:
        raise UserError(
            f"'{path}' has a header for {wanted} weights, allowed by its tensors are {stored}"
        )


def _join(out: Path, readers: Sequence[Any]) -> None:
    """Write the parts of a split file as a single file."""
    from gguf import GGUFWriter

    from draftree.target.gguf_tensors import architecture_of, copy_fields

    writer = GGUFWriter(out, architecture_of(readers[0]))
    copy_fields(writer, readers[0])
    every = [tensor for reader in readers for tensor in reader.tensors]
    for tensor in every:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in every:
        writer.write_tensor_data(tensor.data)
    writer.close()


def _dequantise(
    path: Path, reader: Any, headers: Sequence[Header], folder: Path, scratch: Path
) -> None:
    """Write the folder of one file's weights and tokenizer.

    Args:
        path: the file.
        reader: `FastReader` of the file.
        headers: the headers of the file, or of the parts from which it was joined.
        folder: the new folder.
        scratch: folder for temporary files.
    """
    from draftree.target.gguf_tensors import (
        architecture_of,
        dtype_of,
        read_by_transformers,
        read_tensors,
        rotary_tensors,
        write_config_file,
    )

    source = _source(path)
    described, values = source, dict[str, Any]()
    if not (alone := read_by_transformers(architecture_of(reader))):
        values = write_config_file(scratch / "config.gguf", reader)
        described = _source(scratch / "config.gguf")
    config = AutoConfig.from_pretrained(**described)
    complete_config(path, config, headers[0].entries, rotary_tensors(reader))
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    kind = classes.get(type(config), None)
    refuse_unsupported(config, kind)
    with torch.device("meta"):
        model = kind(config)
    _check_size(path, model, headers)
    dtype = dtype_of(headers)
    how: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True}
    auto: Any = AutoModelForCausalLM
    with no_loading_bar():
        if alone:
            how["quantization_config"] = GgufConfig(dequantize=True)
            model, info = auto.from_pretrained(**source, **how)
        else:
            tensors = read_tensors(path, reader, values, model, dtype)
            model, info = kind.from_pretrained(None, state_dict=tensors, **how)
            del tensors
    if missing := sorted(map(str, info["missing_keys"])):  # transformers would use random weights
        raise UserError(f"'{path}' lacks {len(missing)} tensors: {', '.join(missing[:4])}")
    words = "tokenizer.ggml.model" in headers[0].entries
    tokenizer = _tokenizer_class(config).from_pretrained(**source) if words else None
    ends = end_tokens(headers[0].entries, {} if tokenizer is None else tokenizer.get_vocab())
    model.generation_config.eos_token_id = ends or model.generation_config.eos_token_id
    with replace_folder(folder) as beside:
        model.save_pretrained(beside)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)


def _source(path: Path) -> dict[str, Any]:
    """Return the arguments with which transformers finds a GGUF file."""
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}


def _tokenizer_class(config: PreTrainedConfig) -> Any:
    """Return the class that `AutoTokenizer` would choose after it had read the config once more."""
    classes: Any = TOKENIZER_MAPPING
    kind = classes.get(type(config), PreTrainedTokenizerFast)
    return kind if issubclass(kind, PreTrainedTokenizerFast) else AutoTokenizer
