"""Read the fields and tensors of a GGUF file in less time than the package `gguf`.

`gguf.GGUFReader` makes two NumPy arrays for each token of the vocabulary, and `gguf.dequantize` takes
16 rows at a time. Imported only where `gguf` is needed.
"""

import math
import struct
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from numpy.typing import NDArray

Array = NDArray[Any]
MAX_JOINED_ROWS = 64
"""The largest number of rows that are joined to one before `gguf` dequantises 16 at a time."""
PARSED_TYPES = frozenset(GGUFReader.gguf_scalar_to_np) | {GGUFValueType.STRING}
"""Types of a list's values that are parsed here; lists of lists are left to `gguf`."""


class FastReader(GGUFReader):
    """Read a GGUF file as `gguf.GGUFReader` does, but parse lists without an array for each value.

    A string of a list is a `memoryview` of the file here, which has the methods of an array of
    bytes that readers use: `list`, `bytes`, `tobytes`, `nbytes`. All else is as in `GGUFReader`.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Return a value's size in bytes, its parts, the indices of its data, and its types."""
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            whole: tuple[int, list[Any], list[int], list[GGUFValueType]]
            whole = super()._get_field_parts(orig_offs, raw_type)
            return whole
        inner = self._get(orig_offs, "<u4")
        length = self._get(orig_offs + 4, "<u8")
        count = int(length[0])
        if int(inner[0]) not in PARSED_TYPES or not count:
            whole = super()._get_field_parts(orig_offs, raw_type)
            return whole
        kind = GGUFValueType(int(inner[0]))
        start = orig_offs + 12
        if kind == GGUFValueType.STRING:
            size, parts = self._strings(start, count)
            data = list(range(3, 3 + 2 * count, 2))
        else:
            values = self._get(start, self.gguf_scalar_to_np[kind], count)
            size, parts = values.nbytes, list(values.reshape(-1, 1))
            data = list(range(2, 2 + count))
        return 12 + size, [inner, length, *parts], data, [GGUFValueType.ARRAY, kind]

    def _strings(self, start: int, count: int) -> tuple[int, list[memoryview]]:
        """Return the size in bytes of some strings, and for each its length and its bytes.

        Raises:
            ValueError: the file ends within them.
        """
        bytes_of_file = self.data.data
        length_at = struct.Struct("<Q").unpack_from
        parts = list[memoryview]()
        at = start
        for _ in range(count):
            try:
                (length,) = length_at(bytes_of_file, at)
            except struct.error as error:
                raise ValueError(f"it ends at byte {len(bytes_of_file)}") from error
            text = bytes_of_file[at + 8 : at + 8 + length]
            if len(text) != length:
                raise ValueError(f"it ends at byte {len(bytes_of_file)}")
            parts += bytes_of_file[at : at + 8], text
            at += 8 + length
        return at - start, parts


def dequantise_in_large_groups(data: Array, kind: GGMLQuantizationType) -> Array:
    """Return the values of a tensor as `gguf.dequantize` does, in groups of up to 1,024 rows.

    `gguf` takes 16 rows at a time. A block's values depend on the block alone, so they have the
    same bits.

    Args:
        data: the blocks, [rows, bytes of a row]; values of F32 and F16.
        kind: the type of the tensor.
    """
    rows = math.prod(data.shape[:-1])
    joined = math.gcd(rows, MAX_JOINED_ROWS) if data.dtype == np.uint8 else 1
    plain = np.asarray(data)  # slices of a memory map are slow
    if joined == 1:
        values: Array = gguf.quants.dequantize(plain, kind)
        return values
    values = gguf.quants.dequantize(plain.reshape(rows // joined, -1), kind)
    return values.reshape(*data.shape[:-1], -1)
