"""Store measurements of a benchmark as they are made, so that an interrupted run can resume."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from draftree.errors import UserError
from draftree.evaluation.grid import Cell, PromptResult
from draftree.metrics import Stats, Step, Work
from draftree.request import Request
from draftree.utils.files import append, as_user_error, write_text


@dataclass(frozen=True)
class Journal:
    """Record the finished prompts of a run in a file, so that an interrupted run can be resumed.

    Attributes:
        path: file of the journal, next to the run's output; it is removed once the result is saved.
        key: description of the run. A journal with another description is replaced by a new one.
    """

    path: Path
    key: Mapping[str, Any]

    def read(self, cells: Sequence[Cell]) -> list[dict[Cell, PromptResult]]:
        """Return the results of each finished prompt by cell, if the journal belongs to this run.

        An incomplete last line is removed. If there is no journal of this run, one is created.
        """
        lines, done = list[str](), list[dict[Cell, PromptResult]]()
        with suppress(UserError), as_user_error("what comes after it cannot be read"):
            key, *lines = self.path.read_text("utf-8", errors="replace").splitlines()
            if json.loads(key) == json.loads(json.dumps(self.key)):
                for line in lines:
                    done.append(dict(zip(cells, map(_parse_result, json.loads(line)), strict=True)))
        write_text(
            self.path, "".join(f"{line}\n" for line in (json.dumps(self.key), *lines[: len(done)]))
        )
        return done

    def add(self, done: Mapping[Cell, PromptResult]) -> None:
        """Append the results of one prompt; `read` must have been called before."""
        append(
            self.path,
            json.dumps([[w.tokens, [astuple(s) for s in w.repeats]] for w in done.values()]) + "\n",
        )

    def remove(self) -> None:
        """Delete the journal's file once the result is saved."""
        self.path.unlink(missing_ok=True)


def hash_prompts(requests: Sequence[Request]) -> str:
    """Return a hash of the prompts of requests."""
    prompts = [list(map(int, request.prompt)) for request in requests]
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def files_of(spec: str) -> list[tuple[str, int, int]]:
    """Return the name, size and time of change of each file of a drafter's checkpoint or datastore.

    Args:
        spec: spec of a drafter; paths are parts of it.
    """
    places = (Path(part) for part in re.split(r"[+:,=]", spec) if part)
    found = [
        file
        for place in places
        if place.exists()
        for file in (sorted(place.rglob("*")) if place.is_dir() else [place])
        if file.is_file()
    ]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in found]


def _parse_result(line: Any) -> PromptResult:
    tokens, repeats = line
    return PromptResult(tokens, [_stats(*s) for s in repeats])


def _stats(
    tokens: int,
    steps: Sequence[Any],
    draft: float,
    verify: float,
    seconds: float,
    work: Sequence[Any],
    *rule: Any,
) -> Stats:
    did = [Work(tuple(frontiers), *rest) for frontiers, *rest in work]
    return Stats(tokens, [Step(*step) for step in steps], draft, verify, seconds, did, *rule)
