"""Keeps what a benchmark has measured so far, so that an interrupted run goes on."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from draftree.boundary.files import append, understood, write_text
from draftree.errors import UserError
from draftree.evaluation.cells import Cell, PromptResult
from draftree.stats import Stats, Step, Work


@dataclass(frozen=True)
class Journal:
    """The prompts that a run has done so far, in a file beside its output, so that an interrupted one can go on.

    Attributes:
        path: removed when the result was saved.
        key: what the run is; a journal of another run is started anew.
    """

    path: Path
    key: Mapping[str, Any]

    def read(self, cells: Sequence[Cell]) -> list[dict[Cell, PromptResult]]:
        """The prompts done, if the journal is of this run; a last line that was broken off is not counted."""
        lines, found = list(self._lines()), list[dict[Cell, PromptResult]]()
        if lines and lines[0] == json.loads(json.dumps(self.key)):
            with suppress(UserError), understood("what comes after it cannot be read"):
                for line in lines[1:]:
                    found.append(dict(zip(cells, map(_written, line), strict=True)))
        write_text(self.path, "".join(map(_line, [self.key, *lines[1 : 1 + len(found)]])))
        return found

    def add(self, done: Mapping[Cell, PromptResult]) -> None:
        """Notes one prompt; the journal was read before."""
        append(self.path, _line([[w.tokens, [astuple(s) for s in w.repeats]] for w in done.values()]))

    def remove(self) -> None:
        """Forgets it: the result is saved."""
        self.path.unlink(missing_ok=True)

    def _lines(self) -> Iterator[Any]:
        """The parsed lines before the first that was broken off."""
        if self.path.is_file():
            with suppress(UserError), understood("what comes after it cannot be read"):
                yield from map(json.loads, self.path.read_text("utf-8", errors="replace").splitlines())


def _line(said: Any) -> str:
    return json.dumps(said) + "\n"


def _written(line: Any) -> PromptResult:
    tokens, repeats = line
    return PromptResult(tokens, [_stats(*s) for s in repeats])


def _stats(
    tokens: int, steps: Sequence[Any], draft: float, verify: float, seconds: float, work: Sequence[Any], *rule: Any
) -> Stats:
    did = [Work(tuple(frontiers), *rest) for frontiers, *rest in work]
    return Stats(tokens, [Step(*step) for step in steps], draft, verify, seconds, did, *rule)
