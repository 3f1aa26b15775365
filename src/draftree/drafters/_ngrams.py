"""N-grams as sorted arrays: built from a corpus in bounded memory, opened as memory maps, looked up compiled; and what a text
adds to them.

A context is the n − 1 tokens before a token. As a number it is their ids side by side, `width` bits each, the first the
highest. On disk contexts are sorted and grouped by their first token, so that only the rest of each is stored; ids are
stored in 16 bits and, where the vocabulary needs more, a further plane of 8 or 16. Successors lie behind one another in
the order of their contexts, the likeliest first, and of each context only how many there are is stored, with a running
sum every 64 contexts.

Shapes: V vocabulary, C contexts, S successors, T tokens of a text, N nodes, F frontier nodes, K candidates.
"""

import json
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftree.compiled import compiled
from draftree.errors import UserError, shown
from draftree.files import Entries, read_object
from draftree.tree import Floats, Ints

Array = NDArray[Any]

HEADER = "ngrams.json"
BLOCK = 64
"""Contexts between two running sums."""
FULL = 65535
"""What a share of 1 is stored as."""
PIECE = 1 << 22
"""N-grams that are sorted at a time; a build takes some 700 MB with two threads."""
EVERY = 1024
"""Of a sorted run, every so-manieth context is looked at to cut runs into ranges of equal size."""


def width_of(vocab: int) -> int:
    """Bits of a token id."""
    return max(1, (vocab - 1).bit_length())


def check(n: int, vocab: int) -> None:
    """Raises UserError where a context does not fit 64 bits."""
    if (n - 1) * width_of(vocab) > 64:
        raise UserError(f"n is {n}, allowed with a vocabulary of {vocab:,} is at most {1 + 64 // width_of(vocab)}")


# Storage.


class Table(NamedTuple):
    """Stored n-grams; memory maps or arrays, never written to.

    Attributes:
        first: [V + 1] where the contexts begin that start with a token.
        context_low, context_high: [C] the rest of each context, its lowest 16 bits and the others ([0] if there are none).
        size: [C] how many successors it has.
        sums: [C / 64 + 1] how many successors all contexts before a block have.
        token_low, token_high: [S] the successors.
        share: [S] of 65,535, each one's share of all that followed its context in the corpus.
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
    """A table and what it holds.

    Attributes:
        table: the arrays.
        n: tokens of an n-gram.
        vocab: V.
    """

    table: Table
    n: int
    vocab: int

    def __len__(self) -> int:
        """How many n-grams are stored."""
        return len(self.table.share)

    @classmethod
    def none(cls, n: int, vocab: int) -> "Grams":
        """A table without n-grams."""
        check(n, vocab)
        small = {name: np.zeros(0, kind) for name, kind in _kinds(n, vocab, 0).items()}
        return cls(_table(small | {"first": np.zeros(vocab + 1, np.int64), "sums": np.zeros(1, np.int64)}), n, vocab)

    @classmethod
    def of(cls, documents: Iterable[Ints], plan: "Plan") -> "Grams":
        """A table in memory, for small corpora."""
        with tempfile.TemporaryDirectory() as folder:
            build(documents, plan, Path(folder), lambda _: None)
            mapped = cls.opened(Path(folder))
            table = _table({name: np.array(array) for name, array in mapped.table._asdict().items()})
        return cls(table, plan.n, plan.vocab)

    @classmethod
    def opened(cls, folder: Path) -> "Grams":
        """The datastore in a folder, as memory maps.

        Raises:
            UserError: there is none, or it is cut short.
        """
        header = Entries(read_object(folder / HEADER, "the header of n-grams"), folder / HEADER)
        n, vocab = header.get("n", Literal[2, 3, 4]), header.get("vocab", int, least=1)
        check(n, vocab)
        said = Entries(header.get("arrays", dict), f"'{folder / HEADER}': arrays")
        arrays = {}
        for name, kind in _kinds(n, vocab, 0).items():
            wide, length = (*said.get(name, list), None, None)[:2]
            if wide not in (kind, *(("<u4",) if name == "size" else ())) or type(length) is not int:
                raise UserError(f"'{folder / HEADER}': {name} is {shown([wide, length])}, allowed is '{kind}' and a length")
            file, bytes_ = folder / f"{name}.bin", length * np.dtype(wide).itemsize
            size = file.stat().st_size if file.exists() else -1
            if size != bytes_:
                raise UserError(f"'{file}' has {size:,} bytes, {HEADER} says {bytes_:,}")
            arrays[name] = np.memmap(file, wide, "r") if length else np.zeros(0, wide)
        table = _table(arrays)
        if not _fit(table, vocab):
            raise UserError(f"'{folder}' holds no n-grams: its arrays do not fit each other")
        return cls(table, n, vocab)


def _fit(table: Table, vocab: int) -> bool:
    """Whether arrays are as long as each other says; what they hold is looked at where it is used."""
    contexts, stored = len(table.size), len(table.share)
    sums = ((table.first, vocab, contexts), (table.sums, -(-contexts // BLOCK), stored))
    return (
        len(table.context_low) == contexts
        and len(table.token_low) == stored
        and len(table.context_high) in (0, contexts)
        and len(table.token_high) in (0, stored)
        and all(len(a) == 1 + n and a[0] == 0 and a[-1] == end and bool((np.diff(a) >= 0).all()) for a, n, end in sums)
    )


def _table(arrays: dict[str, Array]) -> Table:
    """All of them read-only, so that they are of one type for the compiler."""
    views = {name: np.asarray(array) for name, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return Table(**views)


def _kinds(n: int, vocab: int, most: int) -> dict[str, str]:
    """The type of each array: none is larger than the ids and the longest row ask for."""

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


# Building.


class Run(NamedTuple):
    """Distinct n-grams in the order of context and token: three arrays [S] of one length."""

    context: Array
    token: Array
    times: Array


def contexts(text: Ints, n: int, width: int) -> Array:
    """[T − n + 1] the context before each token from the n-th on, as numbers."""
    ids = text.astype(np.uint64)
    found = np.zeros(max(0, len(text) - n + 1), np.uint64)
    for i in range(n - 1):
        found = found << np.uint64(width) | ids[i : i + len(found)]
    return found


def summed(run: Run, n: int, width: int) -> Run:
    """The run in order, equal n-grams added up."""
    if n * width <= 64:
        order = np.argsort(run.context << np.uint64(width) | run.token.astype(np.uint64))
    else:
        order = np.lexsort((run.token, run.context))
    context, token = run.context[order], run.token[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (context[1:] != context[:-1]) | (token[1:] != token[:-1])
    starts = np.flatnonzero(new)
    count = np.add.reduceat(run.times[order], starts) if starts.size else run.times[:0]
    return Run(context[starts], token[starts], count)


@dataclass(frozen=True)
class Plan:
    """How a table is built.

    Attributes:
        n: tokens of an n-gram, 2 to 4.
        vocab: V.
        top: successors kept of each context, the likeliest; 0 keeps all.
        threshold: n-grams counted fewer times are left out. What is left out still counts in the shares of the others.
        piece: n-grams sorted at a time.
    """

    n: int
    vocab: int
    top: int = 12
    threshold: int = 1
    piece: int = PIECE

    @property
    def width(self) -> int:
        return width_of(self.vocab)


def build(documents: Iterable[Ints], plan: Plan, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Writes a table's files; memory is bounded by `plan.piece`, the vocabulary and the number of threads.

    Pieces of the corpus are sorted and written as runs, and the runs merged range by range; both by several threads.

    Args:
        documents: token ids of one after another; no n-gram runs from one into the next.
        plan: how.
        folder: where.
        tell: told what it is doing.

    Returns:
        Figures of what was counted and written.

    Raises:
        UserError: there is not one n-gram in the corpus, or an id is not below the vocabulary.
    """
    check(plan.n, plan.vocab)
    seen = Seen()
    with tempfile.TemporaryDirectory(dir=folder) as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        work = Work(pool, plan, Path(scratch), tell)
        runs = list(work.ordered(work.sorted, _pieces(documents, plan, seen), "sorting piece {}"))
        if not seen.grams:
            raise UserError(f"the corpus is empty: none of {seen.documents:,} documents has {plan.n} tokens")
        with Writing(folder, plan) as out:
            ranges = _ranges(runs, plan)
            for rows in work.ordered(work.merged, ((runs, r) for r in ranges), f"merging part {{}} of {len(ranges)}"):
                out.write(rows)
    return seen.figures() | out.finish()


@dataclass
class Seen:
    """What was read of a corpus."""

    documents: int = 0
    tokens: int = 0
    grams: int = 0

    def figures(self) -> dict[str, Any]:
        return {"documents": self.documents, "tokens": self.tokens, "grams": self.grams}


def _pieces(documents: Iterable[Ints], plan: Plan, seen: Seen) -> Iterator[Run]:
    """The corpus's n-grams, a number of documents at a time (a long one in parts), each counted once."""
    waiting: list[tuple[Array, Array]] = []
    size = 0
    for document in documents:
        seen.documents += 1
        seen.tokens += len(document)
        ids = np.asarray(document)
        if ids.size and not 0 <= ids.min() <= ids.max() < plan.vocab:
            raise UserError(f"document {seen.documents} has token {ids.max()}, allowed are 0 … {plan.vocab - 1}")
        for start in range(0, max(0, len(ids) - plan.n + 1), plan.piece):
            part = ids[start : start + plan.piece + plan.n - 1]
            waiting.append((contexts(part, plan.n, plan.width), part[plan.n - 1 :].astype(np.uint32)))
            size += len(waiting[-1][1])
            seen.grams += len(waiting[-1][1])
            if size >= plan.piece:
                yield _joined(waiting)
                waiting, size = [], 0
    if size:
        yield _joined(waiting)


def _joined(parts: Sequence[tuple[Array, Array]]) -> Run:
    context, token = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Run(context, token, np.ones(len(token), np.int64))


class Rows(NamedTuple):
    """What is stored of a range of contexts: [C] contexts and how many successors each has, [S] tokens and shares."""

    context: Array
    size: Array
    token: Array
    share: Array
    distinct: int


@dataclass(frozen=True)
class Work:
    """The threads' part of a build.

    Attributes:
        pool: of threads; numpy sorts without holding the interpreter.
        plan: how.
        scratch: where runs lie.
        tell: told of progress.
    """

    pool: ThreadPoolExecutor
    plan: Plan
    scratch: Path
    tell: Callable[[str], None]

    def ordered(self, job: Callable[[Any], Any], items: Iterable[Any], saying: str) -> Iterator[Any]:
        """The results in order; no more items are drawn than there are threads for."""
        waiting: deque[Future[Any]] = deque()
        for number, item in enumerate(items, 1):
            self.tell(saying.format(number))
            waiting.append(self.pool.submit(job, item))
            if len(waiting) > (os.cpu_count() or 1):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def sorted(self, run: Run) -> "Sorted":
        """A sorted run on disk."""
        made = summed(run, self.plan.n, self.plan.width)
        files = []
        for array in made:
            handle, file = tempfile.mkstemp(dir=self.scratch)
            with os.fdopen(handle, "wb") as out:
                array.tofile(out)
            files.append((file, array.dtype))
        return Sorted(files, made.context[::EVERY].copy())

    def merged(self, job: tuple[Sequence["Sorted"], tuple[int, int | None]]) -> Rows:
        """What is stored of the contexts in a range."""
        runs, (low, high) = job
        joined = Run(*(np.concatenate(column) for column in zip(*(run.part(low, high) for run in runs), strict=True)))
        return kept(summed(joined, self.plan.n, self.plan.width), self.plan)


class Sorted(NamedTuple):
    """A run on disk: a file and type for each of its arrays, and every so-manieth of its contexts."""

    files: Sequence[tuple[str, Any]]
    sample: Array

    def part(self, low: int, high: int | None) -> Run:
        """The contexts of a range. Only for so long is anything mapped, so that no more of it lies in memory."""
        maps = [np.memmap(file, kind, "r") for file, kind in self.files]
        start = int(np.searchsorted(maps[0], np.uint64(low)))
        end = len(maps[0]) if high is None else int(np.searchsorted(maps[0], np.uint64(high)))
        return Run(*(np.array(column[start:end]) for column in maps))


def _ranges(runs: Sequence[Sorted], plan: Plan) -> list[tuple[int, int | None]]:
    """Ranges of contexts with some `plan.piece` entries of all runs each."""
    sample = np.sort(np.concatenate([run.sample for run in runs]))
    cuts = np.unique(sample[:: max(1, plan.piece // EVERY)])[1:].tolist()
    return list(zip([0, *cuts], [*cuts, None], strict=True))


def kept(run: Run, plan: Plan) -> Rows:
    """The likeliest successors of each context, of equally likely ones the lower id first."""
    new = np.ones(len(run.context), np.bool_)
    new[1:] = run.context[1:] != run.context[:-1]
    starts, group = np.flatnonzero(new), np.cumsum(new) - 1
    if not starts.size:
        return Rows(run.context, run.times.astype(np.uint32), run.token, np.zeros(0, np.uint16), 0)
    share = run.times / np.add.reduceat(run.times, starts)[group]
    order = np.lexsort((run.token, -run.times, group))
    keep = run.times[order] >= plan.threshold
    if plan.top:
        keep &= np.arange(len(order)) - starts[group] < plan.top
    order = order[keep]
    count = np.bincount(group[order], minlength=len(starts))
    stored = np.maximum(1, np.rint(share[order] * FULL)).astype(np.uint16)
    return Rows(run.context[starts][count > 0], count[count > 0], run.token[order], stored, len(run.context))


class Writing:
    """A table being written, range by range."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan, self.distinct = folder, plan, 0
        self.kinds = _kinds(plan.n, plan.vocab, plan.top or FULL)
        self.first = np.zeros(plan.vocab + 1, np.int64)
        self.files = {name: open(folder / f"{name}.bin", "wb") for name in self.kinds}  # noqa: SIM115

    def __enter__(self) -> "Writing":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files.values():
            file.close()

    def write(self, rows: Rows) -> None:
        """Adds a range behind those before."""
        bits = np.uint64((self.plan.n - 2) * self.plan.width)
        self.distinct += rows.distinct
        self.first[1:] += np.bincount((rows.context >> bits).astype(np.int64), minlength=self.plan.vocab)
        rest = rows.context & ((np.uint64(1) << bits) - np.uint64(1))
        self._planes("context", rest, int(bits))
        self._planes("token", rows.token, self.plan.width)
        self._put("size", rows.size)
        self._put("share", rows.share)

    def _planes(self, name: str, values: Array, bits: int) -> None:
        self._put(f"{name}_low", values & values.dtype.type(0xFFFF))
        if bits > 16:
            self._put(f"{name}_high", values >> values.dtype.type(16))

    def _put(self, name: str, values: Array) -> None:
        values.astype(self.kinds[name]).tofile(self.files[name])

    def finish(self) -> dict[str, Any]:
        """Writes what is known at the end; figures of what was written."""
        size = np.fromfile(self.folder / "size.bin", self.kinds["size"])
        blocks = np.add.reduceat(size, np.arange(0, len(size), BLOCK), dtype=np.int64) if size.size else np.zeros(0)
        np.cumsum(self.first).astype("<i8").tofile(self.folder / "first.bin")
        np.concatenate(([0], np.cumsum(blocks))).astype("<i8").tofile(self.folder / "sums.bin")
        space = {name: (self.folder / f"{name}.bin").stat().st_size for name in self.kinds}
        arrays = {name: (kind, space[name] // np.dtype(kind).itemsize) for name, kind in self.kinds.items()}
        header = {"n": self.plan.n, "vocab": self.plan.vocab, "top": self.plan.top, "threshold": self.plan.threshold}
        (self.folder / HEADER).write_text(json.dumps(header | {"arrays": arrays}, indent=1))
        return {
            "n": self.plan.n,
            "distinct": self.distinct,
            "stored": arrays["share"][1],
            "contexts": len(size),
            "bytes": sum(space.values()),
        }


# What a text adds.


class Memory(NamedTuple):
    """Increments of earlier texts, by n-gram.

    Attributes:
        context: [C] in order, as numbers.
        start: [C + 1] where the successors of each begin.
        token: [S] in order within a context.
        times: [S] how many increments each got.
        widest: successors of the context that has most.
    """

    context: Array
    start: Array
    token: Array
    times: Array
    widest: int

    @classmethod
    def empty(cls) -> "Memory":
        return cls(np.zeros(0, np.uint64), np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), 0)

    def plus(self, texts: Iterable["Adapted"], n: int, width: int, most: int) -> "Memory":
        """With the increments of finished texts; more than `most` of one n-gram make no difference to its weight."""
        runs = [Run(np.repeat(self.context, np.diff(self.start)), self.token, self.times)]
        for text in texts:
            times = text.times[n - 1 :]
            there = times > 0
            runs.append(Run(contexts(text.tokens, n, width)[there], text.tokens[n - 1 :][there], times[there].astype(np.int64)))
        run = summed(Run(*(np.concatenate(column) for column in zip(*runs, strict=True))), n, width)
        context, start = np.unique(run.context, return_index=True)
        start = np.append(start, len(run.token)).astype(np.int64)
        widest = int(np.diff(start).max(initial=0))
        return Memory(context, start, run.token, np.minimum(run.times, most), widest)


class Adapted(NamedTuple):
    """A row's text with the increments of its n-grams, and an index of their contexts.

    Attributes:
        tokens: [T] the text, the root at its end.
        times: [T] how many increments the n-gram got that ends here.
        heads: [power of 2] the last place of each bucket of contexts, −1 for none.
        before: [T] the place before this one in its bucket.
    """

    tokens: Ints
    times: Array
    heads: Array
    before: Array

    @classmethod
    def empty(cls) -> "Adapted":
        none = np.zeros(0, np.int32)
        return cls(np.zeros(0, np.int64), none, np.full(256, -1, np.int32), none)

    def plus(self, tokens: Ints, n: int) -> "Adapted":
        """With further tokens behind, and no increments for them yet. The arrays here stay as they are."""
        old, new = len(self.tokens), len(tokens)
        text = np.concatenate((self.tokens, tokens))
        before = np.concatenate((self.before, np.full(new, -1, np.int32)))
        times = np.concatenate((self.times, np.zeros(new, np.int32)))
        if len(text) > len(self.heads):
            heads = np.full(1 << (2 * len(text)).bit_length(), -1, np.int32)
            index(text, heads, before, 0, n)
        else:
            heads = self.heads.copy()
            index(text, heads, before, old, n)
        return Adapted(text, times, heads, before)

    def incremented(self, since: int, n: int) -> "Adapted":
        """With one increment more for each n-gram that lies behind place `since` (Algorithm 2, lines 2-13)."""
        times = self.times.copy()
        times[max(0, since) + n - 1 :] += 1
        return self._replace(times=times)


@compiled
def bucket(text: Ints, at: int, n: int, size: int) -> int:
    """Of the context before place `at`; `size` is a power of 2."""
    mixed = np.uint64(0)
    for i in range(at - n + 1, at):
        mixed = (mixed ^ np.uint64(text[i])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return int(mixed & np.uint64(size - 1))


@compiled
def index(text: Ints, heads: Array, before: Array, start: int, n: int) -> None:
    """Enters the contexts of the places from `start` on."""
    for at in range(max(start, n - 1), len(text)):
        slot = bucket(text, at, n, len(heads))
        before[at] = heads[slot]
        heads[slot] = at


# Looking up.


@compiled
def _place(table: Table, context: Ints, width: int) -> int:
    """Which context of the table it is, −1 for none."""
    if context[0] >= len(table.first) - 1:
        return -1
    low, end = table.first[context[0]], table.first[context[0] + 1]
    wanted = np.uint64(0)
    for i in range(1, len(context)):
        wanted = wanted << np.uint64(width) | np.uint64(context[i])
    high = end
    while low < high:
        middle = (low + high) // 2
        if _planes(table.context_low, table.context_high, middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < end and _planes(table.context_low, table.context_high, low) == wanted else -1


@compiled
def _planes(low: Array, high: Array, at: int) -> Any:
    """A value of two planes."""
    value = np.uint64(low[at])
    if len(high):
        value |= np.uint64(high[at]) << np.uint64(16)
    return value


@compiled
def _added(tokens: Ints, times: Ints, found: int, token: int, more: int) -> int:
    """Adds increments to a token, found before or new; returns how many tokens there are."""
    for i in range(found):
        if tokens[i] == token:
            times[i] += more
            return found
    tokens[found], times[found] = token, more
    return found + 1


@compiled
def _context(out: Ints, text: Ints, node: int, tokens: Ints, parents: Ints) -> bool:
    """Fills in the tokens that end with a node; False where the text is too short. The root stands at the text's end."""
    at = len(text) - 2
    for i in range(len(out) - 1, -1, -1):
        if node >= 0:
            out[i] = tokens[node]
            node = parents[node]
        elif at >= 0:
            out[i] = text[at]
            at -= 1
        else:
            return False
    return True


@compiled
def _stored(table: Table, context: Ints, width: int, top: int, tokens: Ints, weights: Floats) -> int:
    """Fills in the successors of a context in the table, the likeliest `top`; returns how many."""
    place = _place(table, context, width)
    if place < 0:
        return 0
    start = table.sums[place // 64]
    for i in range(place // 64 * 64, place):
        start += table.size[i]
    found = min(int(table.size[place]), top)
    for i in range(found):
        token = np.int64(_planes(table.token_low, table.token_high, start + i)) if start + i < len(table.share) else -1
        if not 0 <= token < len(table.first) - 1:  # of a broken file
            return i
        tokens[i] = token
        weights[i] = table.share[start + i] / 65535
    return found


@compiled
def _earlier(memory: Memory, context: Ints, width: int, tokens: Ints, times: Ints, found: int) -> int:
    """Adds the increments of earlier texts."""
    wanted = np.uint64(0)
    for i in range(len(context)):
        wanted = wanted << np.uint64(width) | np.uint64(context[i])
    place = np.searchsorted(memory.context, wanted)
    if place < len(memory.context) and memory.context[place] == wanted:
        for i in range(memory.start[place], memory.start[place + 1]):
            found = _added(tokens, times, found, memory.token[i], memory.times[i])
    return found


@compiled
def _here(text: Adapted, context: Ints, tokens: Ints, times: Ints, found: int) -> int:
    """Adds the increments of the row's own text."""
    n = len(context) + 1
    at = text.heads[bucket(context, n - 1, n, len(text.heads))]
    while at >= 0:
        same = text.times[at] > 0
        for i in range(n - 1):
            same = same and text.tokens[at - n + 1 + i] == context[i]
        if same:
            found = _added(tokens, times, found, text.tokens[at], text.times[at])
        at = text.before[at]
    return found


@compiled
def successors(
    table: Table,
    memory: Memory,
    text: Adapted,
    frontier: Ints,
    tokens: Ints,
    parents: Ints,
    k: int,
    n: int,
    width: int,
    top: int,
    increment: float,
    cap: float,
) -> tuple[Ints, Floats]:
    """What may follow nodes of one row.

    The weight of an n-gram is its share in the table (0 if it is not there) plus its increments, at most `cap` if it has
    any; q is its weight divided by those of all, what the table has pruned included.

    Args:
        frontier: [F] nodes.
        tokens, parents: [N] of the tree.
        k: likeliest successors wanted.
        n: tokens of an n-gram.
        width: bits of an id.
        top: successors of a context that are read from the table.
        increment, cap: Algorithm 2.

    Returns:
        [F, K] tokens and log q, the likeliest first, of equals the lower id; −∞ behind the last.
    """
    found_tokens, log_q = np.zeros((len(frontier), k), np.int64), np.full((len(frontier), k), -np.inf)
    most = min(top, len(table.share)) + memory.widest + len(text.tokens)
    context, weights = np.empty(n - 1, np.int64), np.empty(most)
    ids, times = np.empty(most, np.int64), np.empty(most, np.int64)
    for row in range(len(frontier)):
        if not _context(context, text.tokens, frontier[row], tokens, parents):
            continue
        stored = _stored(table, context, width, top, ids, weights)
        pruned = max(0.0, 1 - weights[:stored].sum()) if stored else 0.0
        times[:stored] = 0
        found = _earlier(memory, context, width, ids, times, stored)
        found = _here(text, context, ids, times, found)
        for i in range(found):
            weight = weights[i] if i < stored else 0.0
            weights[i] = min(weight + increment * times[i], cap) if times[i] else weight
        whole = pruned + weights[:found].sum()
        for j in range(min(k, found)):
            best = j
            for i in range(j + 1, found):
                if weights[i] > weights[best] or (weights[i] == weights[best] and ids[i] < ids[best]):
                    best = i
            found_tokens[row, j], log_q[row, j] = ids[best], np.log(weights[best] / whole)
            ids[best], weights[best] = ids[j], weights[j]
    return found_tokens, log_q
