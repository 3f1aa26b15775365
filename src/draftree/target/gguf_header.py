"""Parse and check the header of a GGUF file before another reader trusts its counts.

The layout is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian: magic, version, the
numbers of tensors and of entries, the entries, and for each tensor its name, dimensions, type and
offset.
"""

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

FORMS = {
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
"""The form of a value, by the number of its type."""
TEXT, ARRAY, DIMENSIONS = 8, 9, 4
"""Types of a text and of an array; the most dimensions of a tensor."""


@dataclass(frozen=True)
class Header:
    """Hold the entries of a file's header.

    Attributes:
        entries: numbers and texts by name, and of lists their lengths.
        tensors: the sizes of each tensor by name, the innermost first.
        types: the number of each tensor's type by name.
    """

    entries: dict[str, float | str] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)


class Reader:
    """Read values one after the other, none beyond the end of the file.

    Args:
        data: the file's bytes.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4

    def skip(self, count: int) -> int:
        """Return the offset of the next bytes, and move past them.

        Raises:
            ValueError: the file ends before.
        """
        start = self._at
        if count > len(self._data) - start:
            raise ValueError(f"it ends at byte {len(self._data)}, within its header")
        self._at += count
        return start

    def number(self, form: str = "<Q") -> int:
        """Return the next whole number."""
        return int(struct.unpack_from(form, self._data, self.skip(struct.calcsize(form)))[0])

    def text(self) -> str:
        """Return the next text."""
        count = self.number()
        start = self.skip(count)
        return self._data[start : start + count].decode("utf-8", "replace")

    def value(self) -> float | str:
        """Return the next value after its type: a number or a text, and of a list its length.

        Raises:
            ValueError: there is no such type, or the file ends before.
        """
        kind = self.number("<I")
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number("<I"), self.number()
            if inner == TEXT:
                for _ in range(count):  # at most until the file ends
                    self.skip(self.number())
            else:
                self.skip(count * struct.calcsize(form_of(inner)))
            return count
        form = form_of(kind)
        found: float = struct.unpack_from(form, self._data, self.skip(struct.calcsize(form)))[0]
        return found


def form_of(kind: int) -> str:
    """Return the form of a value of a type.

    Raises:
        ValueError: there is no such type.
    """
    if kind not in FORMS:
        raise ValueError(f"an entry has type {kind}, allowed are those of GGUF")
    return FORMS[kind]


def read_header(path: Path) -> Header:
    """Return a file's header.

    Raises:
        ValueError: it is broken, or does not end within the file.
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
