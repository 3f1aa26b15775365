"""Base class of drafters that search a datastore: a folder built from a corpus.

The note is the entry of the folder's `config.json` that is ours, as a trained drafter has one.
Token ids mean nothing without the tokenizer they come from, so the note has a hash of it, and no
other tokenizer's datastore is opened.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftree.drafters.base import Method
from draftree.errors import UserError
from draftree.formats.checkpoint import CONFIG, Checkpoint
from draftree.target.target import Target
from draftree.tree import Ints
from draftree.utils.files import Entries

Documents = Iterable[Ints]
"""Token ids of one document after another; each document is read once."""


@dataclass(frozen=True)
class DatastoreMethod(Method):
    """The options of a method with a datastore.

    Attributes:
        datastore: the folder of the datastore, built by `draftree datastore build`.
    """

    datastore: str = ""

    @classmethod
    @abstractmethod
    def build(
        cls,
        documents: Documents,
        vocab: int,
        folder: Path,
        settings: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        """Build a datastore's files in a folder that exists and is empty.

        Args:
            documents: the documents of the corpus. Continuations end at the end of a document.
            vocab: number of token ids.
            folder: the folder to which the files are written.
            settings: settings of the build as text, by name (`--set` on the command line).
            tell: receives messages about the progress.

        Returns:
            Figures for the note stored with the files: counts and bytes, by name.

        Raises:
            UserError: a setting is not known, or the corpus is empty.
        """

    def store(self, target: Target) -> Path | None:
        """Return the folder of the datastore, after a check that it fits the target.

        Return None if no datastore is named.

        Raises:
            UserError: there is no datastore of this kind, it was built for another tokenizer, or it
                has token ids beyond the target's vocabulary.
        """
        if not self.datastore:
            return None
        folder = Path(self.datastore)
        said, kind = read_note(folder), self.kind()
        if said["drafter"] != kind:
            raise UserError(
                f"'{folder}' is a datastore for '{said['drafter']}', needed is one for '{kind}'"
            )
        if (own := tokenizer_hash(target.tokenizer)) != said.get("tokenizer"):
            raise UserError(
                f"datastore '{folder}' holds tokens of the tokenizer of '{said.get('target')}' ({said.get('tokenizer')}), but "
                f"target '{target.name}' has another ({own}): build one for it (draftree datastore build --kind {kind} "
                f"--target {target.name} --data … --out FOLDER)"
            )
        fits_vocabulary(
            folder, Entries(said, folder / CONFIG).get("vocab", int, 0, least=0), target
        )
        return folder


def read_note(folder: Path) -> dict[str, Any]:
    """Return the note of a datastore, which is draftree's entry in its `config.json`.

    Raises:
        UserError: the folder is not a datastore.
    """
    if not folder.is_dir():
        raise UserError(
            f"datastore '{folder}' does not exist: a folder was expected that draftree datastore build has made"
        )
    said = Checkpoint.at(folder).about
    if "drafter" not in said or "tokenizer" not in said:
        raise UserError(
            f"'{folder}' is not a datastore: its config.json does not name a drafter and a tokenizer"
        )
    return said


def fits_vocabulary(where: Path, vocab: int, target: Target) -> None:
    """Check that all token ids are in the target's vocabulary.

    Raises:
        UserError: a token id is too large; the message gives the size of the vocabulary.
    """
    if vocab > target.decoder.vocab:
        raise UserError(
            f"datastore '{where}' has token ids up to {vocab - 1}, allowed are those below the vocabulary of target "
            f"'{target.name}': {target.decoder.vocab}"
        )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the parts of a tokenizer that determine token ids.

    They are vocabulary, merges and added tokens. For a fast tokenizer they are read from its
    serialisation. Padding and truncation are not included, because calls change them.
    """
    if tokenizer.is_fast:
        fast: Any = tokenizer
        whole = json.loads(fast.backend_tokenizer.to_str())
        model = whole["model"]
        added = [(token["id"], token["content"]) for token in whole["added_tokens"]]
        said = [model.get("type"), model.get("vocab"), model.get("merges"), added]
    else:
        said = [tokenizer.get_vocab(), sorted(tokenizer.get_added_vocab().items())]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
