"""Build a transformers model from a GGUF file, with the tables of transformers and `gguf`.

transformers' own loader reads the file anew for the config, the tokenizer's class and the tensors,
and makes a table of names for each module of the model. Here one reader serves all, and there is
one table. Tensors are transformed by transformers' processors (`TENSOR_PROCESSORS`), so the weights
have the bits of transformers' loader. Nothing of either package is replaced. Imported only where
`gguf` is needed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    get_tensor_name_map,
)
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    load_gguf_checkpoint,
)

from draftree.errors import UserError
from draftree.target.gguf_config import FREQUENCIES, LONG_FACTORS, SHORT_FACTORS
from draftree.target.gguf_header import Header
from draftree.target.gguf_reader import dequantise_in_large_groups
from draftree.tree import Floats

LISTS = ("tokens", "scores", "token_type", "merges", "precompiled_charsmap")
"""Lists of the tokenizer; of these, a config can depend only on the number of tokens."""
OWN_FIELDS = ("GGUF.", "split.", "general.architecture", "general.alignment")
"""Beginnings of the names of fields that a new file has of its own, or for its parts."""


def architecture_of(reader: GGUFReader) -> str:
    """Return llama.cpp's name of the architecture."""
    return str(reader.fields["general.architecture"].contents())


def read_by_transformers(architecture: str) -> bool:
    """Return whether transformers reads an architecture without the package `gguf`.

    Such an architecture has a mapping of its own, with other transformations of tensors.
    """
    try:
        from transformers.integrations.gguf import GGUF_ARCHS
    except ImportError:  # an older transformers reads all files with `gguf`
        return False
    return architecture in GGUF_ARCHS


def copy_fields(writer: GGUFWriter, reader: GGUFReader, without: tuple[str, ...] = ()) -> None:
    """Copy the fields of a file to a new one, except those named in `without`."""
    for name, field in reader.fields.items():
        if name.startswith(OWN_FIELDS) or name in without:
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)


def write_config_file(out: Path, reader: GGUFReader) -> dict[str, Any]:
    """Write a small GGUF file that describes the same config; return the config's values.

    transformers reads it at once, because it lacks the vocabulary, and each of its tensors has one
    value. A config depends on the tensors' names alone.

    Args:
        out: the new file.
        reader: reader of the original file.
    """
    architecture = architecture_of(reader)
    sized = f"{architecture}.vocab_size" in reader.fields
    without = tuple(f"tokenizer.ggml.{name}" for name in (LISTS if sized else LISTS[1:]))
    writer = GGUFWriter(out, architecture)
    copy_fields(writer, reader, without)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values: dict[str, Any] = load_gguf_checkpoint(out)["config"]
    return values


def read_tensors(
    path: Path,
    reader: GGUFReader,
    values: dict[str, Any],
    model: PreTrainedModel,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the dequantised tensors of a file by transformers' names.

    Tensors for which the model has no name are left out, such as those of rotary frequencies.

    Args:
        path: the file.
        reader: reader of the file.
        values: the config's values, see `write_config_file`.
        model: the model that is to have the tensors, of which only the names are read.
        dtype: dtype of the tensors.

    Raises:
        ValueError: `gguf` does not know the architecture.
        UserError: the file has a bias that the model lacks.
    """
    architecture = architecture_of(reader)
    known = {name: key for key, name in MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        raise ValueError(f"the package 'gguf' does not know the architecture '{architecture}'")
    kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = kind(config=values)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    names = map_names(model, processor, get_tensor_name_map(known[architecture], layers))
    made: dict[str, Any] = {"config": values, "tensors": {}}
    for tensor in reader.tensors:
        result = processor.process(
            weights=dequantise_in_large_groups(
                tensor.data, GGMLQuantizationType(tensor.tensor_type)
            ),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters=made,
        )
        if result.name in names:
            # A copy, because values of F32 and F16 are views of the read-only file.
            made["tensors"][names[result.name]] = torch.from_numpy(np.copy(result.weights)).to(
                dtype
            )
        elif result.name is not None and result.name.endswith(".bias"):
            lacks = f"which a {type(model).__name__} of this config lacks"
            raise UserError(f"'{path}' has tensor {tensor.name}, {lacks}")
    tensors: dict[str, Tensor] = made["tensors"]
    return tensors


def rotary_tensors(reader: GGUFReader) -> dict[str, Floats]:
    """Return the tensors of a file by which rotary frequencies are divided, by their names."""
    return {
        tensor.name: np.array(tensor.data, np.float64).reshape(-1)
        for tensor in reader.tensors
        if tensor.name in (FREQUENCIES, LONG_FACTORS, SHORT_FACTORS)
    }


def dtype_of(headers: Sequence[Header]) -> torch.dtype:
    """Return the dtype for the tensors of a file.

    F32 tensors decide only if all tensors are F32, because norms are F32 in any file.
    """
    kinds = {GGMLQuantizationType(kind).name for each in headers for kind in each.types.values()}
    if "BF16" in kinds:
        return torch.bfloat16
    return torch.float32 if kinds <= {"F32"} else torch.float16


def map_names(
    module: torch.nn.Module, processor: TensorProcessor, table: Any, prefix: str = ""
) -> dict[str, str]:
    """Return a dict from the names of tensors in a GGUF file to their names in the model.

    A file may come from a part of the model. Each tensor is therefore looked up by its name
    relative to every module that contains it. If several tensors get one GGUF name, that of the
    outer module is used, as in transformers' function `get_gguf_hf_weights_map`, which makes a new
    table for each module.

    Args:
        module: the model or a part of it.
        processor: transformers' processor for the architecture, which may know further names.
        table: the table of `gguf` for the architecture.
        prefix: name of the part, with a dot at its end.
    """
    names = dict[str, str]()
    for own in module.state_dict():
        name = processor.preprocess_name(own)
        stem, dot, ending = name.rpartition(".")
        if ending not in ("weight", "bias"):
            stem, dot, ending = name, "", ""
        if (stored := table.get_name(stem)) is not None:
            names[stored + dot + ending] = prefix + name
        else:
            processor.perform_fallback_tensor_mapping(names, dot + ending, prefix, name)
    for child, inner in module.named_children():
        names = map_names(inner, processor, table, f"{prefix}{child}.") | names
    return names
