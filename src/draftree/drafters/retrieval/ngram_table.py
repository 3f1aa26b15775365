"""An n-gram table in sorted arrays: built in bounded memory and read by memory maps.

A context is the n − 1 tokens before a token. As a number it is their ids side by side, `width` bits
each, the first the highest. On disk contexts are sorted and grouped by their first token, so that
only the rest of each is stored; ids are stored in 16 bits and, where the vocabulary needs more, a
further plane of 8 or 16. Successors are stored in the order of their contexts, the likeliest first.
For each context only their number is stored, with a running sum every 64 contexts.

Shapes: V vocabulary, C contexts, S successors, T tokens of a text, N nodes, F frontier nodes, K
candidates.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from draftree.errors import UserError, format_value
from draftree.native import Array
from draftree.tree import Floats, Ints
from draftree.utils.files import Entries, read_object

HEADER = "ngrams.json"
CONTEXTS_PER_SUM = 64
"""Number of contexts between two running sums."""
FULL_SHARE = 65535
"""The integer that represents the share 1."""


def width_of(vocab: int) -> int:
    """Return the number of bits of a token id."""
    return max(1, (vocab - 1).bit_length())


def check_context_size(n: int, vocab: int) -> None:
    """Raise a `UserError` if a context does not fit into 64 bits."""
    if (n - 1) * width_of(vocab) > 64:
        raise UserError(
            f"n is {n}, allowed with a vocabulary of {vocab:,} is at most {1 + 64 // width_of(vocab)}"
        )


class Table(NamedTuple):
    """Stored n-grams; the arrays are memory maps or in memory, and are never written to.

    Attributes:
        first: [V + 1] index of the first context that begins with each token.
        context_low: [C] the low 16 bits of the rest of each context.
        context_high: [C] the other bits of the rest of each context; [0] if there are none.
        size: [C] the number of successors of each context.
        sums: [C / 64 + 1] the number of successors of all contexts before each block of 64.
        token_low: [S] the low 16 bits of each successor.
        token_high: [S] the other bits of each successor; [0] if there are none.
        share: [S] the share of each successor among all tokens that followed the context in the
            corpus, as a multiple of 1/65,535.
    """

    first: Array
    context_low: Array
    context_high: Array
    size: Array
    sums: Array
    token_low: Array
    token_high: Array
    share: Array


@dataclass(frozen=True)
class Grams:
    """An n-gram table and its parameters.

    Attributes:
        table: the arrays.
        n: number of tokens of an n-gram.
        vocab: V, the size of the vocabulary.
    """

    table: Table
    n: int
    vocab: int

    def __len__(self) -> int:
        """Return the number of n-grams stored."""
        return len(self.table.share)

    @classmethod
    def none(cls, n: int, vocab: int) -> "Grams":
        """Return a table without n-grams."""
        check_context_size(n, vocab)
        small = {name: np.zeros(0, kind) for name, kind in kinds(n, vocab, 0).items()}
        return cls(
            table_of(
                small | {"first": np.zeros(vocab + 1, np.int64), "sums": np.zeros(1, np.int64)}
            ),
            n,
            vocab,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "Grams":
        """Return the datastore in a folder, as memory maps.

        Raises:
            UserError: there is no datastore, or a file is truncated.
        """
        header = Entries(read_object(folder / HEADER, "the header of n-grams"), folder / HEADER)
        n, vocab = header.get("n", Literal[2, 3, 4]), header.get("vocab", int, least=1)
        check_context_size(n, vocab)
        said = Entries(header.get("arrays", dict), f"'{folder / HEADER}': arrays")
        arrays = {}
        for name, kind in kinds(n, vocab, 0).items():
            wide, length = (*said.get(name, list), None, None)[:2]
            if wide not in (kind, *(("<u4",) if name == "size" else ())) or type(length) is not int:
                raise UserError(
                    f"'{folder / HEADER}': {name} is {format_value([wide, length])}, allowed is '{kind}' and a length"
                )
            file, bytes_ = folder / f"{name}.bin", length * np.dtype(wide).itemsize
            size = file.stat().st_size if file.exists() else -1
            if size != bytes_:
                raise UserError(f"'{file}' has {size:,} bytes, {HEADER} says {bytes_:,}")
            arrays[name] = np.memmap(file, wide, "r") if length else np.zeros(0, wide)
        table = table_of(arrays)
        if not _lengths_match(table, vocab):
            raise UserError(f"'{folder}' holds no n-grams: its arrays do not match each other")
        return cls(table, n, vocab)


def _lengths_match(table: Table, vocab: int) -> bool:
    """Return True if the lengths of the arrays are consistent.

    Their values are checked where they are used.
    """
    contexts, stored = len(table.size), len(table.share)
    sums = ((table.first, vocab, contexts), (table.sums, -(-contexts // CONTEXTS_PER_SUM), stored))
    return (
        len(table.context_low) == contexts
        and len(table.token_low) == stored
        and len(table.context_high) in (0, contexts)
        and len(table.token_high) in (0, stored)
        and all(
            len(a) == 1 + n and a[0] == 0 and a[-1] == end and bool((np.diff(a) >= 0).all())
            for a, n, end in sums
        )
    )


def table_of(arrays: dict[str, Array]) -> Table:
    """Return a table of the arrays, which become read-only."""
    views = {name: np.asarray(array) for name, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return Table(**views)


def kinds(n: int, vocab: int, most: int) -> dict[str, str]:
    """Return the dtype of each array of a table, by the name of the array.

    The dtypes of `context_high` and `token_high` depend on the number of bits to store. The dtype
    of `size` depends on `most`. The other dtypes are constant.

    Args:
        n: number of tokens of an n-gram.
        vocab: V, the size of the vocabulary.
        most: largest number of successors of a context.
    """

    def high(bits: int) -> str:
        return "<u1" if bits <= 24 else "<u2" if bits <= 32 else "<u4" if bits <= 48 else "<u8"

    rest, width = (n - 2) * width_of(vocab), width_of(vocab)
    return {
        "first": "<i8",
        "context_low": "<u2",
        "context_high": high(rest),
        "size": "<u1" if most < 256 else "<u4",
        "sums": "<i8",
        "token_low": "<u2",
        "token_high": high(width),
        "share": "<u2",
    }


def number_of(context: Ints, width: int) -> Any:
    """Return a context encoded as a number."""
    wanted = np.uint64(0)
    for token in context:
        wanted = wanted << np.uint64(width) | np.uint64(token)
    return wanted


def find_context(table: Table, context: Ints, width: int) -> int:
    """Return the index of a context in the table, −1 if it is not there."""
    if context[0] >= len(table.first) - 1:
        return -1
    low, end = table.first[context[0]], table.first[context[0] + 1]
    wanted = number_of(context[1:], width)
    high = end
    while low < high:
        middle = (low + high) // 2
        if planes(table.context_low, table.context_high, middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < end and planes(table.context_low, table.context_high, low) == wanted else -1


def planes(low: Array, high: Array, at: int) -> Any:
    """Return the value at an index that is stored in two planes, its low 16 bits and the others."""
    value = np.uint64(low[at])
    if len(high):
        value |= np.uint64(high[at]) << np.uint64(16)
    return value


def read_successors(
    table: Table, context: Ints, width: int, top: int, tokens: Ints, weights: Floats
) -> int:
    """Write the `top` most likely successors of a context into arrays; return their number."""
    place = find_context(table, context, width)
    if place < 0:
        return 0
    start = table.sums[place // 64]
    for i in range(place // 64 * 64, place):
        start += table.size[i]
    found = min(int(table.size[place]), top)
    for i in range(found):
        token = (
            np.int64(planes(table.token_low, table.token_high, start + i))
            if start + i < len(table.share)
            else -1
        )
        if not 0 <= token < len(table.first) - 1:  # of a broken file
            return i
        tokens[i] = token
        weights[i] = table.share[start + i] / 65535
    return found
