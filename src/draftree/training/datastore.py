"""Build the datastores of drafters that need no training."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import draftree
from draftree.data.corpus import Documents, files
from draftree.data.readers import Skipped
from draftree.drafters.retrieval.datastore_drafter import DatastoreMethod, tokenizer_hash
from draftree.errors import UnknownName, UserError
from draftree.evaluation.provenance import command, commit
from draftree.formats.checkpoint import CONFIG, DRAFTREE_ENTRY
from draftree.registry import parts
from draftree.target.load_options import Source
from draftree.target.target import tokenizer_of
from draftree.utils.files import check_writable, replace_folder
from draftree.utils.progress_callback import Tell, ignore_progress

MEGA = 1_000_000


def kinds() -> dict[str, type[DatastoreMethod]]:
    """Return the drafter methods that search a datastore, by name."""
    return {
        name: method
        for name, method in parts("drafter").items()
        if issubclass(method, DatastoreMethod)
    }


@dataclass(frozen=True)
class CorpusFiles:
    """The files of a corpus, and how they are encoded.

    Attributes:
        target: target whose tokenizer encodes the corpus.
        data: files and folders.
        source: options for loading the target's tokenizer.
        skipped: counter of unreadable rows, which are left out. If it is None, an unreadable row
            raises an error.
    """

    target: str
    data: Sequence[Path]
    source: Source = field(default_factory=Source)
    skipped: Skipped | None = None


def create_datastore(
    kind: str,
    corpus: CorpusFiles,
    out: Path,
    settings: Mapping[str, str] | None = None,
    tell: Tell = ignore_progress,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Build a datastore from a corpus, and return the facts that are stored with it.

    The folder `out` appears only when it is complete.

    Args:
        kind: name of the drafter that will search the datastore.
        corpus: the corpus.
        out: path of the new folder.
        settings: options of the datastore by name.
        tell: called with the number of megabytes of the corpus that have been read.
        overwrite: whether the new folder may replace the files in `out`.

    Raises:
        UserError: an input does not exist or does not fit, `out` is not empty, or another process
            is building it.
    """
    known, settings = kinds(), dict(settings or {})
    if kind not in known:
        raise UnknownName("kind of datastore", kind, known)
    if not overwrite and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"'{out}' exists, allowed is a new or an empty folder")
    check_writable(out, folder=True)
    found = files(corpus.data)
    tokenizer = tokenizer_of(corpus.target, corpus.source)
    vocab = 1 + max(tokenizer.get_vocab().values())
    start = time.perf_counter()
    done = 0
    of = -(-sum(file.bytes for file in found) // MEGA)
    with replace_folder(out, overwrite) as folder:

        def read(size: int) -> None:
            nonlocal done
            done = size // MEGA
            tell(done, of=of)

        documents = Documents(found, tokenizer, read, corpus.skipped)
        figures = known[kind].build(
            documents, vocab, folder, settings, lambda doing: tell(done, doing, of)
        )
        said = {
            "drafter": kind,
            "target": corpus.target,
            "tokenizer": tokenizer_hash(tokenizer),
            "vocab": vocab,
            "files": len(found),
            "undecodable": documents.undecodable,
            "skipped": corpus.skipped.count if corpus.skipped else 0,
            "documents": documents.documents,
            "tokens": documents.tokens,
            "text_bytes": documents.text_bytes,
            "bytes": sum(path.stat().st_size for path in folder.iterdir()),
            **figures,
            "seconds": round(time.perf_counter() - start, 3),
            "data": list(map(str, corpus.data)),
            "settings": settings,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command(),
            "version": draftree.__version__,
            "commit": commit(),
        }
        (folder / CONFIG).write_text(json.dumps({DRAFTREE_ENTRY: said}, indent=2) + "\n")
    return said
