"""What drafters share that search a datastore: a folder built from a corpus, with a note of what it is and for whom."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree.drafters.base import Method
from draftree.tree import Ints

Documents = Iterable[Ints]
"""Token ids of one document after another, each read once."""


@dataclass(frozen=True)
class Stored(Method):
    """The knobs of a method with a datastore.

    Attributes:
        datastore: its folder, built by `draftree datastore build`.
    """

    datastore: str = ""

    @classmethod
    @abstractmethod
    def build(
        cls, documents: Documents, vocab: int, folder: Path, settings: Mapping[str, str], tell: Callable[[str], None]
    ) -> dict[str, Any]:
        """Builds a datastore's files in a folder that exists and is empty.

        Args:
            documents: of the corpus; a continuation never runs from one into the next.
            vocab: number of token ids.
            folder: where they are written.
            settings: how, by name, as text (`--set` on the command line).
            tell: told what it is doing.

        Returns:
            Figures for the note beside the files: counts and bytes, by name.

        Raises:
            UserError: a setting is not known, or the corpus is empty.
        """
