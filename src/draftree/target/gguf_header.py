"""Parse and check the header of a GGUF file before another reader trusts its counts.

The layout is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian: magic, version, the
numbers of tensors and of entries, the entries, and for each tensor its name, dimensions, type and
offset.
"""

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

STRUCT_FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""The `struct` format of each type of value, by the type's number."""
TEXT, ARRAY, DIMENSIONS = 8, 9, 4
"""Type numbers of strings and of arrays.

`DIMENSIONS` is the largest number of a tensor's dimensions.
"""


@dataclass(frozen=True)
class Header:
    """Hold the entries of a file's header.

    Attributes:
        entries: numbers and texts by name; for a list, its length.
        tensors: the sizes of each tensor by name, the innermost dimension first.
        types: the number of each tensor's type, by name.
    """

    entries: dict[str, float | str] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)


class Reader:
    """Read values one after the other, without reading past the end of the file.

    Args:
        data: the bytes of the file.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4

    def skip(self, count: int) -> int:
        """Move past the next `count` bytes, and return their offset.

        Raises:
            ValueError: the file ends within them.
        """
        start = self._at
        if count > len(self._data) - start:
            raise ValueError(f"it ends at byte {len(self._data)}, within its header")
        self._at += count
        return start

    def number(self, form: str = "<Q") -> int:
        """Return the next integer."""
        return int(struct.unpack_from(form, self._data, self.skip(struct.calcsize(form)))[0])

    def text(self) -> str:
        """Return the next string."""
        count = self.number()
        start = self.skip(count)
        return self._data[start : start + count].decode("utf-8", "replace")

    def value(self) -> float | str:
        """Read a value's type and return the value: a number, a text, or a list's length.

        Raises:
            ValueError: the type is unknown, or the file ends within the value.
        """
        kind = self.number("<I")
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number("<I"), self.number()
            if inner == TEXT:
                for _ in range(count):  # `skip` stops at the file's end
                    self.skip(self.number())
            else:
                self.skip(count * struct.calcsize(form_of(inner)))
            return count
        form = form_of(kind)
        found: float = struct.unpack_from(form, self._data, self.skip(struct.calcsize(form)))[0]
        return found


def form_of(kind: int) -> str:
    """Return the `struct` format of a type.

    Raises:
        ValueError: the type is unknown.
    """
    if kind not in STRUCT_FORMATS:
        raise ValueError(f"an entry has type {kind}, allowed are those of GGUF")
    return STRUCT_FORMATS[kind]


def read_header(path: Path) -> Header:
    """Return the header of a file.

    Raises:
        ValueError: the header is invalid, or the file ends within it.
    """
    header = Header()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = Reader(data)
        if (version := reader.number("<I")) not in (2, 3):
            raise ValueError(f"its version is {version}, allowed are 2 and 3")
        tensors, entries = reader.number(), reader.number()
        for _ in range(entries):
            name = reader.text()
            header.entries[name] = reader.value()
        for _ in range(tensors):
            name = reader.text()
            if not 1 <= (count := reader.number("<I")) <= DIMENSIONS:
                raise ValueError(f"a tensor has {count} dimensions, allowed are 1 … {DIMENSIONS}")
            header.tensors[name] = tuple(reader.number() for _ in range(count))
            header.types[name] = reader.number("<I")
            reader.skip(8)  # offset
    return header
