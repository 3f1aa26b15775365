"""GGUF files, dequantised once and kept as folders that transformers opens like any other."""

import hashlib
import logging
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from draftree.boundary.files import cache_folder, locked, understood, whole_folder
from draftree.errors import UserError, shown
from draftree.models.architectures import refuse_unsupported

LOG = logging.getLogger("draftree")
MAGIC, LAYOUT = b"GGUF", 1
"""The first bytes of such a file; the number of the way it is kept here, part of the folder's name."""
NEEDED = ("gguf", "accelerate")
"""The packages that transformers reads such a file with."""


def dequantised(path: Path) -> Path:
    """The folder of a GGUF file's weights, dequantised, with its tokenizer and chat template; made once, then kept.

    It lies in `targets` of the cache folder and is named by a hash of the file's content. A second process that wants the same
    one waits for the first.

    Args:
        path: of the file. Weights of 16 or 32 bits keep their dtype, quantised ones become float16 (decision 11).

    Raises:
        UserError: it cannot be read, is of an architecture that cannot be served, or a package is missing; or the disk is full.
    """
    with understood(f"cannot read '{path}'"):
        file = path.stat()
        return _kept(path, file.st_size, file.st_mtime_ns)


@cache
def _kept(path: Path, size: int, changed: int) -> Path:
    """The folder for a file of a size, changed at a time: asked for weights and for the tokenizer, it is looked up once."""
    with path.open("rb") as file:
        if (first := file.read(len(MAGIC))) != MAGIC:
            raise UserError(f"'{path}' is not a GGUF file: it begins with {shown(first)}, allowed is {MAGIC!r}")
        file.seek(0)
        folder = cache_folder() / "targets" / f"{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}-{LAYOUT}"
    if not folder.is_dir():
        if missing := [name for name in NEEDED if find_spec(name) is None]:
            raise UserError(f"'{path}' needs the package '{missing[0]}': pip install 'draftree[gguf]'")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, wait=True):
            if not folder.is_dir():  # another process may have made it meanwhile
                LOG.info("dequantising '%s', once", path)
                _convert(path, folder)
    LOG.info("the target is '%s', dequantised: its weights are kept in %s", path.name, folder)
    return folder


def _convert(path: Path, folder: Path) -> None:
    from gguf import GGUFReader

    with understood(f"cannot read '{path}' (broken, or of an architecture that transformers does not read)"):
        file = GGUFReader(path)
        kinds = {tensor.tensor_type.name for tensor in file.tensors}
        source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        config = AutoConfig.from_pretrained(**source)
        classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        refuse_unsupported(config, classes.get(type(config), None))
        auto: Any = AutoModelForCausalLM
        how = {"dtype": _dtype(kinds), "quantization_config": GgufConfig(dequantize=True), "output_loading_info": True}
        model, info = auto.from_pretrained(**source, config=config, **how)
        if missing := sorted(map(str, info["missing_keys"])):  # transformers would go on with random weights
            raise UserError(f"'{path}' lacks {len(missing)} tensors: {', '.join(missing[:4])}")
        tokenizer = AutoTokenizer.from_pretrained(**source) if "tokenizer.ggml.model" in file.fields else None
        with whole_folder(folder) as beside:
            model.save_pretrained(beside)
            if tokenizer is not None:
                tokenizer.save_pretrained(beside)


def _dtype(kinds: set[str]) -> torch.dtype:
    """The dtype for tensors of some kinds, by GGML's names: norms are F32 in any file."""
    if "BF16" in kinds:
        return torch.bfloat16
    return torch.float32 if kinds <= {"F32"} else torch.float16
