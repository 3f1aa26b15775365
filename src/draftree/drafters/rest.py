"""REST: continuations of the last tokens in a corpus (He et al. 2024)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from typing_extensions import override

from draftree.drafters.base import Drafter, select_slots
from draftree.drafters.retrieval.continuation_trie import (
    PrefixTree,
    best_children,
    build_trie,
    context_of,
    follow,
)
from draftree.drafters.retrieval.datastore_drafter import (
    DatastoreMethod,
    Documents,
    fits_vocabulary,
)
from draftree.drafters.retrieval.suffix_array import (
    END,
    Corpus,
    continuations,
    join_documents,
    search,
    suffix_array,
)
from draftree.drafters.retrieval.text_drafter import NO_TEXT, Texts, extend_texts, truncate_texts
from draftree.errors import UnknownName, UserError
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, Target
from draftree.tree import AcceptResult, Candidates, Ints, Tree
from draftree.utils.files import as_user_error
from draftree.utils.validated_dataclass import knob

TOKENS_FILE, SUFFIXES_FILE = "tokens.npy", "suffixes.npy"
"""The files of a datastore.

`TOKENS_FILE` contains uint32 tokens, with a separator after each document. `SUFFIXES_FILE` contains their
suffix array.
"""
NO_NODES = np.zeros(0, np.int64)
EMPTY = PrefixTree(NO_NODES, np.zeros(0), NO_NODES, NO_NODES)
NOTHING_FOUND = PrefixTree(
    np.full(1, END), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64)
)
"""A trie that consists of a root without children."""


@final
@dataclass(frozen=True)
class REST(DatastoreMethod):
    """Retrieval-based speculative decoding.

    Attributes:
        datastore: the folder of a datastore, or a file of REST's official code (.idx).
        longest: largest length of the suffix of the text that is searched for; shorter suffixes are
            tried after it.
        shortest: smallest length of such a suffix. If it is not found, nothing is drafted.
        continuation: number of tokens after a match that are counted.
        nodes: number of nodes of the trie of continuations; the most frequent nodes are kept.
        matches: largest number of matches that are counted, evenly spread over all matches.
    """

    longest: int = 16
    shortest: int = knob(2, least=1)
    continuation: int = knob(10, least=1)
    nodes: int = knob(64, least=1)
    matches: int = knob(5000, least=1)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest < self.shortest:
            raise UserError(
                f"rest: longest is {self.longest}, allowed is at least shortest, {self.shortest}"
            )

    @classmethod
    @override
    def build(
        cls,
        documents: Documents,
        vocab: int,
        folder: Path,
        settings: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        for key in settings:
            raise UnknownName("setting of a datastore for 'rest'", key, ())
        read = [document.astype(np.uint32) for document in documents if len(document)]
        if not read:
            raise UserError("the corpus is empty: it has 0 tokens, at least 1 is needed")
        corpus = index_documents(read, vocab, tell)
        np.save(folder / TOKENS_FILE, corpus.tokens)
        np.save(folder / SUFFIXES_FILE, corpus.suffixes)
        return {}

    @override
    def open(self, target: Target) -> "RESTDrafter":
        if Path(self.datastore).is_file():
            return RESTDrafter(
                self, read_official(Path(self.datastore), target), target.decoder.vocab
            )
        if (folder := self.store(target)) is None:
            raise UserError(
                f"'rest' needs a datastore: build one (draftree datastore build --kind rest --target {target.name} --data … "
                "--out FOLDER) and name its folder, or use rest:datastore=FOLDER"
            )
        return RESTDrafter(self, (load_corpus(folder),), target.decoder.vocab)

    @override
    def example(self, target: Target) -> "RESTDrafter":
        few = min(target.decoder.vocab, 61)  # few enough tokens that every pair occurs
        drawn = np.random.default_rng(5).integers(0, few, (30, 200))
        return RESTDrafter(
            self, (index_documents(list(drawn), target.decoder.vocab),), target.decoder.vocab
        )


@final
@dataclass(frozen=True)
class RESTState:
    """The state: texts, and the tries that have been found in the present step.

    Attributes:
        texts: the committed tokens of each sequence.
        trie: the continuations of each root's context, and of the contexts of nodes outside of
            these tries, in one table.
        at: for the first nodes of the step's tree, the number of the trie node that corresponds; −1
            for none.
    """

    texts: Texts
    trie: PrefixTree = EMPTY
    at: Ints = field(default_factory=lambda: NO_NODES)


@final
class RESTDrafter(Drafter[RESTState]):
    """Drafts continuations of the last tokens of the text, which it finds in a datastore.

    The continuations form a trie, from which the tree's tokens are taken. The datastore is searched
    once per sequence and step, as in REST. Another drafter may have proposed a node that is not in
    the trie. If that node is expanded, the datastore is also searched for the tokens up to it, and
    its children come from the trie that is found.

    Args:
        knobs: the options of the method.
        corpora: the corpora to search, which are treated as one corpus.
        vocab: V, the size of the target's vocabulary.
    """

    knobs: REST
    searches = True

    def __init__(self, knobs: REST, corpora: Sequence[Corpus], vocab: int) -> None:
        self.knobs = knobs
        self._corpora = corpora
        self._vocab = vocab
        for corpus in corpora:  # load native code before the first step
            build_trie(self._behind(corpus, (0, 0, 1)), 1)
        self.expand(
            RESTState((np.zeros(1, np.int64),)),
            Tree.from_roots(*np.zeros((2, 1), np.int64)),
            np.arange(1),
            1,
            Drawing(),
        )

    @property
    @override
    def description(self) -> str:
        size = sum(len(corpus.tokens) for corpus in self._corpora)
        return f"{replace(self.knobs, datastore='')}, {size} tokens"  # without its path

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: RESTState | None = None,
        rows: Ints | None = None,
    ) -> RESTState:
        return RESTState(tuple(prompts))

    @override
    def expand(
        self, state: RESTState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, RESTState]:
        trie = state.trie
        at = follow(state.at, tree.tokens, tree.parents, trie)
        if (unknown := frontier[at[frontier] < 0]).size:
            found = [self.retrieve(self._context(state, tree, node)) for node in unknown.tolist()]
            trie, begin = join_tries([trie, *found])
            at[unknown] = begin[1:]
        return Candidates(*best_children(trie, at[frontier], k)), replace(state, trie=trie, at=at)

    def retrieve(self, context: Ints) -> PrefixTree:
        """Return the trie of continuations of the longest suffix of a context that is found.

        If no suffix is found, the trie consists of a root only.
        """
        knobs = self.knobs
        ranges = [
            search(c.tokens, c.suffixes, context, knobs.longest, knobs.shortest)
            for c in self._corpora
        ]
        longest = max(n for n, _, _ in ranges)
        if not longest:
            return NOTHING_FOUND
        rows = [
            self._behind(c, r)
            for c, r in zip(self._corpora, ranges, strict=True)
            if r[0] == longest
        ]
        return build_trie(rows[0] if len(rows) == 1 else merge_continuations(rows), knobs.nodes)

    def _behind(self, corpus: Corpus, found: tuple[int, int, int]) -> Ints:
        """Return M continuations of at most L tokens, [M, L], after matches in a corpus.

        Args:
            corpus: the corpus.
            found: length of the match; begin and end of the matches in the suffix array.
        """
        length, low, high = found
        knobs = self.knobs
        rows = continuations(
            corpus.tokens, corpus.suffixes, low, high, length, knobs.continuation, knobs.matches
        )
        return np.where(rows < self._vocab, rows, END)  # a broken file may hold any token

    def _context(self, state: RESTState, tree: Tree, node: int) -> Ints:
        return context_of(
            state.texts[int(tree.row[node])], tree.tokens, tree.parents, node, self.knobs.longest
        )

    @override
    def commit(
        self, state: RESTState, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> RESTState:
        return RESTState(extend_texts(state.texts, tree, verdict))

    @override
    def truncate(self, state: RESTState, lengths: Ints, rows: Ints | None = None) -> RESTState:
        return RESTState(truncate_texts(state.texts, lengths, rows))

    @override
    def select(self, state: RESTState, rows: Ints, cache: SlotCache) -> RESTState:
        return RESTState(select_slots(state.texts, rows, NO_TEXT))


def join_tries(tries: Sequence[PrefixTree]) -> tuple[PrefixTree, Ints]:
    """Return one table of several tries in order, and the number of each trie's first node."""
    begin = np.cumsum([0, *(len(t.tokens) for t in tries[:-1])])
    moved = [t._replace(first=t.first + at) for t, at in zip(tries, begin, strict=True)]
    return PrefixTree(*(np.concatenate(column) for column in zip(*moved, strict=True))), begin


def merge_continuations(rows: Sequence[Ints]) -> Ints:
    """Join arrays of continuations from several corpora, and sort the rows by their tokens."""
    whole = np.concatenate(rows)
    return whole[np.lexsort(whole.T[::-1])]


def index_documents(
    documents: list[Any], vocab: int, tell: Callable[[str], None] = lambda _: None
) -> Corpus:
    """Return the corpus that consists of the given documents."""
    tokens = join_documents(documents)
    tell(f"sorting {len(tokens):,} suffixes")
    return Corpus(tokens, suffix_array(tokens, vocab))


def load_corpus(folder: Path) -> Corpus:
    """Return the corpus of a datastore.

    Raises:
        UserError: the files are broken.
    """
    corpus = Corpus(map_array(folder / TOKENS_FILE), map_array(folder / SUFFIXES_FILE))
    if len(corpus.suffixes) > len(corpus.tokens):
        raise UserError(
            f"'{folder}' has {len(corpus.suffixes)} suffixes, allowed are at most its {len(corpus.tokens)} tokens"
        )
    return corpus


def map_array(path: Path) -> Any:
    """Return an array of a datastore, mapped from disk.

    Raises:
        UserError: the file is missing or broken.
    """
    with as_user_error(f"cannot read '{path}' of the datastore"):
        found = np.load(path, mmap_mode="r")
    if (
        found.ndim != 1
        or found.dtype.kind not in "ui"
        or not found.dtype.isnative
        or not len(found)
    ):
        raise UserError(
            f"'{path}' holds {found.dtype} {list(found.shape)}, "
            "allowed is a one-dimensional array of integers in this machine's byte order"
        )
    return np.asarray(found)


def read_official(path: Path, target: Target) -> tuple[Corpus, ...]:
    """Return the chunks of a file written by REST's official code, mapped from disk.

    Each chunk has a uint32 with the number of bytes of its tokens, the tokens, a uint32 with the
    number of bytes of the suffix array, and the suffix array as int32, all little-endian. Every
    token has one suffix. The sizes therefore determine whether tokens are uint16 or, as in the
    branch `llama3`, int32. The file does not mark the ends of documents.

    Raises:
        UserError: the file has another format, or contains tokens outside of the target's
            vocabulary.
    """
    whole = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    found = []
    at = 0
    while at < len(whole):
        tokens, at = _part(whole, at, path)
        suffixes, at = _part(whole, at, path)
        width = 4 * len(tokens) // max(len(suffixes), 1)
        if width not in (2, 4) or len(suffixes) % 4 or len(tokens) * 4 != width * len(suffixes):
            raise UserError(
                f"'{path}' is not a datastore of REST's code: {len(tokens)} bytes of tokens and {len(suffixes)} of suffixes "
                "are neither 2 + 4 nor 4 + 4 for each token"
            )
        corpus = Corpus(tokens.view("<u2" if width == 2 else "<i4"), suffixes.view("<i4"))
        last = int(corpus.suffixes[-1])  # position of the largest token
        if not 0 <= last < len(corpus.tokens):
            raise UserError(
                f"'{path}' is not a datastore of REST's code: suffix {last} of {len(corpus.tokens)} tokens"
            )
        fits_vocabulary(path, int(corpus.tokens[last]) + 1, target)
        found.append(corpus)
    if not found:
        raise UserError(f"'{path}' is not a datastore of REST's code: it is empty")
    return tuple(found)


def _part(whole: Any, at: int, path: Path) -> tuple[Any, int]:
    """Return the bytes of a part, whose size is stored before it, and the next part's offset."""
    begin = at + 4
    end = begin + (
        int.from_bytes(whole[at:begin].tobytes(), "little") if begin <= len(whole) else len(whole)
    )
    if end > len(whole):
        raise UserError(
            f"'{path}' is not a datastore of REST's code: a part ends at byte {end}, the file at {len(whole)}"
        )
    return np.asarray(whole[begin:end]), end
