"""Write a .gguf file again with unquantised weights, so that llama.cpp is measured at the precision of the others.

    python benchmarks/unquantised.py MODEL.Q4_1.gguf OUT.gguf [--type BF16|F16|F32]

Matrices get the type, vectors stay in float32. All other fields of the header are kept.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants

FILE_TYPES = {
    "BF16": LlamaFileType.MOSTLY_BF16,
    "F16": LlamaFileType.MOSTLY_F16,
    "F32": LlamaFileType.ALL_F32,
}


def convert(source: Path, out: Path, kind: str) -> None:
    """Write the file.

    Args:
        source: a .gguf file of any type.
        out: the new file.
        kind: type of the matrices, a key of `FILE_TYPES`.
    """
    reader = GGUFReader(source)
    fields = reader.fields
    writer = GGUFWriter(out, fields["general.architecture"].contents())
    for name, field in fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in reader.tensors:
        weights: Any = quants.dequantize(tensor.data, tensor.tensor_type)
        to = GGMLQuantizationType[kind if weights.ndim > 1 else "F32"]
        data = quants.quantize(weights.astype(np.float32), to)
        writer.add_tensor(tensor.name, data, raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    """Convert the file that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=FILE_TYPES, default="BF16")
    asked = parser.parse_args()
    convert(asked.source, asked.out, asked.type)
    return 0


if __name__ == "__main__":
    sys.exit(main())
