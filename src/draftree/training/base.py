"""Base class of training and tuning jobs."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from draftree.target.target import Target
from draftree.utils.progress import Tell, silent

LOG = logging.getLogger("draftree")
"""The logger of messages about the progress of a job."""


@dataclass(frozen=True)
class Fitted:
    """The result of a run: its figures, in words, and as tables: rows by title."""

    figures: Mapping[str, Any]
    lines: Sequence[str]
    tables: Mapping[str, list[dict[str, str]]] = field(default_factory=dict)


class Job(ABC):
    """A training or tuning. Implementations are frozen dataclasses.

    Attributes:
        options: the options of `draftree train` that it takes, beside those that say on what:
            target, data, out.
        resumes: whether it writes a folder, in which an interrupted run goes on; else a file, whole
            or not at all.
    """

    options: ClassVar[frozenset[str]]
    resumes: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def of(cls, spec: str, knobs: Sequence[str], options: Mapping[str, Any]) -> Self:
        """Return the job that options ask for; what is not among them is as its paper has it.

        Args:
            spec: the spec of what is trained or tuned, with its options.
            knobs: further ones, as key=value.
            options: some of `options`, and their values.

        Raises:
            UserError: an option or value is not allowed.
        """

    @abstractmethod
    def fit(
        self, target: str | Target, data: Sequence[Path], out: Path, tell: Tell = silent, **how: Any
    ) -> Fitted:
        """Learn from data and write the result.

        Args:
            target: the frozen model, or its name.
            data: files, or folders of them.
            out: the file or folder that is written.
            tell: receives messages about the progress.
            how: a target that is named is loaded, the attributes of `Loading`.

        Raises:
            UserError: a requested input does not exist, does not fit or is too small.
            KeyboardInterrupt: the run was interrupted.
        """


def items(spec: str, knobs: Sequence[str]) -> list[str]:
    """Return all options as key=value, those of the spec first."""
    return [*filter(None, spec.partition(":")[2].split(",")), *knobs]
