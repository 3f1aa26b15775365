"""Count the n-grams of a corpus in bounded memory."""

import json
import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftree.drafters.retrieval.ngram_table import (
    CONTEXTS_PER_SUM,
    FULL_SHARE,
    HEADER,
    Grams,
    check_context_size,
    kinds,
    table_of,
    width_of,
)
from draftree.errors import UserError
from draftree.native import Array
from draftree.tree import Ints
from draftree.utils.validated_dataclass import Knobs, knob

PIECE = 1 << 22
"""Number of n-grams that are sorted at a time; a build needs about 700 MB with two threads."""
SAMPLE_INTERVAL = 1024
"""Sampling interval of the contexts of a sorted run.

The samples are used to cut runs into ranges of about equal size.
"""


class Counts(NamedTuple):
    """Distinct n-grams, sorted by context and token: arrays [S] of contexts, tokens and counts."""

    context: Array
    token: Array
    times: Array


def concatenate(runs: Iterable[Counts]) -> Counts:
    """Return the concatenation of runs, which is not sorted."""
    return Counts(*(np.concatenate(column) for column in zip(*runs, strict=True)))


def contexts(text: Ints, n: int, width: int) -> Array:
    """Return the context before each token from the n-th on, encoded as numbers [T − n + 1]."""
    ids = text.astype(np.uint64)
    found = np.zeros(max(0, len(text) - n + 1), np.uint64)
    for i in range(n - 1):
        found = found << np.uint64(width) | ids[i : i + len(found)]
    return found


def sum_equal_ngrams(run: Counts, n: int, width: int) -> Counts:
    """Return the run in sorted order, with the counts of equal n-grams added up."""
    if n * width <= 64:
        order = np.argsort(run.context << np.uint64(width) | run.token.astype(np.uint64))
    else:
        order = np.lexsort((run.token, run.context))
    context, token = run.context[order], run.token[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (context[1:] != context[:-1]) | (token[1:] != token[:-1])
    starts = np.flatnonzero(new)
    count = np.add.reduceat(run.times[order], starts) if starts.size else run.times[:0]
    return Counts(context[starts], token[starts], count)


@dataclass(frozen=True)
class GramSettings(Knobs):
    """The settings for building an n-gram table.

    Attributes:
        n: number of tokens of an n-gram, 2 to 4.
        vocab: V, the size of the vocabulary.
        top: number of most likely successors stored for each context; 0 stores all.
        threshold: smallest count of an n-gram that is stored. N-grams that are not stored still
            count in the shares of the others.
        piece: number of n-grams that are sorted at a time.
    """

    n: int = knob(least=2, most=4)
    vocab: int = knob(least=1)
    top: int = knob(12, least=0)
    threshold: int = knob(1, least=0)
    piece: int = PIECE

    @property
    def width(self) -> int:
        """Return the number of bits of a token id."""
        return width_of(self.vocab)


def build_ngram_table(
    documents: Iterable[Ints], plan: GramSettings, folder: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Write the files of an n-gram table.

    Memory is bounded by `plan.piece`, the vocabulary and the number of threads. Several threads
    sort pieces of the corpus and write them as runs, and then merge the runs range by range.

    Args:
        documents: token ids of one document after another; no n-gram crosses the end of a document.
        plan: the settings.
        folder: the folder to which the files are written.
        tell: called with messages about the progress.

    Returns:
        The numbers of documents, tokens and n-grams that were read and written.

    Raises:
        UserError: the corpus has no n-gram, or an id is not in the vocabulary.
    """
    check_context_size(plan.n, plan.vocab)
    read = Counter(documents=0, tokens=0, grams=0)
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        work = Threads(pool, plan, Path(scratch), tell)
        runs = list(
            work.map_in_order(work.sort_run, _pieces(documents, plan, read), "sorting piece {}")
        )
        if not read["grams"]:
            raise UserError(
                f"the corpus is empty: none of {read['documents']:,} documents has {plan.n} tokens"
            )
        ranges = _ranges(runs, plan)
        with ExitStack() as files:
            out = TableWriter(folder, plan, files)
            for rows in work.map_in_order(
                work.merge_runs, ((runs, r) for r in ranges), f"merging part {{}} of {len(ranges)}"
            ):
                out.write(rows)
    return dict(read) | out.finish()


def grams_of(documents: Iterable[Ints], plan: GramSettings) -> Grams:
    """Return an n-gram table in memory, for small corpora."""
    with tempfile.TemporaryDirectory() as folder:
        build_ngram_table(documents, plan, Path(folder), lambda _: None)
        mapped = Grams.from_folder(Path(folder))
        table = table_of({name: np.array(array) for name, array in mapped.table._asdict().items()})
    return Grams(table, plan.n, plan.vocab)


def _pieces(documents: Iterable[Ints], plan: GramSettings, read: Counter[str]) -> Iterator[Counts]:
    """Yield the n-grams of the corpus in pieces, each n-gram of a piece once with its count.

    A piece is a number of documents, or a part of a long one.

    Args:
        documents: the documents of the corpus.
        plan: the settings of the build.
        read: counters of documents, tokens and n-grams, which are updated.
    """
    waiting = list[Counts]()
    size = 0
    for document in documents:
        read.update(documents=1, tokens=len(document))
        ids = np.asarray(document)
        if ids.size and not 0 <= ids.min() <= ids.max() < plan.vocab:
            raise UserError(
                f"document {read['documents']} has token {ids.max()}, allowed are 0 … {plan.vocab - 1}"
            )
        for start in range(0, max(0, len(ids) - plan.n + 1), plan.piece):
            part = ids[start : start + plan.piece + plan.n - 1]
            grams = len(part) - plan.n + 1
            token = part[plan.n - 1 :].astype(np.uint32)
            waiting.append(
                Counts(contexts(part, plan.n, plan.width), token, np.ones(grams, np.int64))
            )
            size += grams
            read.update(grams=grams)
            if size >= plan.piece:
                yield concatenate(waiting)
                waiting, size = [], 0
    if size:
        yield concatenate(waiting)


class TablePart(NamedTuple):
    """A range of contexts in the stored form.

    It has [C] contexts, the number of successors of each context, and the tokens and shares [S] of
    all successors.
    """

    context: Array
    size: Array
    token: Array
    share: Array
    distinct: int


@dataclass(frozen=True)
class Threads:
    """Sort and merge n-gram counts in a thread pool, as an external merge sort.

    Attributes:
        pool: the thread pool; NumPy releases the interpreter lock while it sorts.
        plan: the settings of the build.
        scratch: temporary folder of the sorted runs.
        tell: called with progress messages.
    """

    pool: ThreadPoolExecutor
    plan: GramSettings
    scratch: Path
    tell: Callable[[str], None]

    def map_in_order(
        self, job: Callable[[Any], Any], items: Iterable[Any], saying: str
    ) -> Iterator[Any]:
        """Yield the results of a job in the order of the items.

        Only as many items are taken in advance as there are threads.
        """
        waiting: deque[Future[Any]] = deque()
        for number, item in enumerate(items, 1):
            self.tell(saying.format(number))
            waiting.append(self.pool.submit(job, item))
            if len(waiting) > (os.cpu_count() or 1):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def sort_run(self, run: Counts) -> "SortedRun":
        """Sort a run and write it to disk."""
        made = sum_equal_ngrams(run, self.plan.n, self.plan.width)
        files = []
        for array in made:
            handle, file = tempfile.mkstemp(dir=self.scratch)
            with os.fdopen(handle, "wb") as out:
                array.tofile(out)
            files.append((file, array.dtype))
        return SortedRun(files, made.context[::SAMPLE_INTERVAL].copy())

    def merge_runs(self, job: tuple[Sequence["SortedRun"], tuple[int, int | None]]) -> TablePart:
        """Return the contexts in a range, merged from all runs, in the stored form."""
        runs, (low, high) = job
        whole = concatenate(run.part(low, high) for run in runs)
        return select_successors(sum_equal_ngrams(whole, self.plan.n, self.plan.width), self.plan)


class SortedRun(NamedTuple):
    """Refer to n-gram counts on disk that are sorted by context.

    It has the file and dtype of each array of `Counts`, and every `SAMPLE_INTERVAL`-th context.
    """

    files: Sequence[tuple[str, Any]]
    sample: Array

    def part(self, low: int, high: int | None) -> Counts:
        """Return the n-grams whose contexts are in a range.

        Files are mapped only during the call, so that they do not stay in memory.
        """
        maps = [np.memmap(file, kind, "r") for file, kind in self.files]
        start = int(np.searchsorted(maps[0], np.uint64(low)))
        end = len(maps[0]) if high is None else int(np.searchsorted(maps[0], np.uint64(high)))
        return Counts(*(np.array(column[start:end]) for column in maps))


def _ranges(runs: Sequence[SortedRun], plan: GramSettings) -> list[tuple[int, int | None]]:
    """Return ranges of contexts that have about `plan.piece` entries each, over all runs."""
    sample = np.sort(np.concatenate([run.sample for run in runs]))
    cuts = np.unique(sample[:: max(1, plan.piece // SAMPLE_INTERVAL)])[1:].tolist()
    return list(zip([0, *cuts], [*cuts, None], strict=True))


def select_successors(run: Counts, plan: GramSettings) -> TablePart:
    """Return the most likely successors of each context.

    Among equally likely ones the lower id comes first.
    """
    new = np.ones(len(run.context), np.bool_)
    new[1:] = run.context[1:] != run.context[:-1]
    starts, group = np.flatnonzero(new), np.cumsum(new) - 1
    if not starts.size:
        return TablePart(
            run.context, run.times.astype(np.uint32), run.token, np.zeros(0, np.uint16), 0
        )
    share = run.times / np.add.reduceat(run.times, starts)[group]
    order = np.lexsort((run.token, -run.times, group))
    keep = run.times[order] >= plan.threshold
    if plan.top:
        keep &= np.arange(len(order)) - starts[group] < plan.top
    order = order[keep]
    count = np.bincount(group[order], minlength=len(starts))
    stored = np.maximum(1, np.rint(share[order] * FULL_SHARE)).astype(np.uint16)
    return TablePart(
        run.context[starts][count > 0], count[count > 0], run.token[order], stored, len(run.context)
    )


class TableWriter:
    """Writes a table range by range."""

    def __init__(self, folder: Path, plan: GramSettings, files: ExitStack) -> None:
        self.folder = folder
        self.plan = plan
        self.distinct = 0
        self.kinds = kinds(plan.n, plan.vocab, plan.top or FULL_SHARE)
        self.first = np.zeros(plan.vocab + 1, np.int64)
        self.files = {
            name: files.enter_context(open(folder / f"{name}.bin", "wb"))  # noqa: SIM115
            for name in self.kinds
        }

    def write(self, rows: TablePart) -> None:
        """Append a range of contexts."""
        bits = np.uint64((self.plan.n - 2) * self.plan.width)
        self.distinct += rows.distinct
        self.first[1:] += np.bincount(
            (rows.context >> bits).astype(np.int64), minlength=self.plan.vocab
        )
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
        """Write the remaining files, and return numbers of entries and bytes."""
        size = np.fromfile(self.folder / "size.bin", self.kinds["size"])
        blocks = (
            np.add.reduceat(size, np.arange(0, len(size), CONTEXTS_PER_SUM), dtype=np.int64)
            if size.size
            else np.zeros(0)
        )
        np.cumsum(self.first).astype("<i8").tofile(self.folder / "first.bin")
        np.concatenate(([0], np.cumsum(blocks))).astype("<i8").tofile(self.folder / "sums.bin")
        space = {name: (self.folder / f"{name}.bin").stat().st_size for name in self.kinds}
        arrays = {
            name: (kind, space[name] // np.dtype(kind).itemsize)
            for name, kind in self.kinds.items()
        }
        header = {
            "n": self.plan.n,
            "vocab": self.plan.vocab,
            "top": self.plan.top,
            "threshold": self.plan.threshold,
        }
        (self.folder / HEADER).write_text(json.dumps(header | {"arrays": arrays}, indent=1))
        return {
            "n": self.plan.n,
            "distinct": self.distinct,
            "stored": arrays["share"][1],
            "contexts": len(size),
            "bytes": sum(space.values()),
        }
