"""Base class of training and tuning jobs."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from draftree.target.target import Target
from draftree.utils.progress_callback import Tell, ignore_progress

LOG = logging.getLogger("draftree")
"""Logger for messages about the progress of a job."""


@dataclass(frozen=True)
class Fitted:
    """Store the result of a job: figures by name, lines of text, and tables of rows by title."""

    figures: Mapping[str, Any]
    lines: Sequence[str]
    tables: Mapping[str, list[dict[str, str]]] = field(default_factory=dict)


class Job(ABC):
    """Define a training or tuning job; implementations are frozen dataclasses.

    Attributes:
        options: names of the options of `draftree train` that the job accepts, in addition to
            target, data and out.
        resumes: whether the job writes a folder in which an interrupted run can be resumed.
            Otherwise it writes a single file when it is complete.
    """

    options: ClassVar[frozenset[str]]
    resumes: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def of(cls, spec: str, knobs: Sequence[str], options: Mapping[str, Any]) -> Self:
        """Return the job for given options; the others have the values of the method's paper.

        Args:
            spec: spec of the drafter or policy to train or tune.
            knobs: further options of the drafter or policy, as key=value.
            options: values of some of the options in `options`.

        Raises:
            UserError: an option or value is not allowed.
        """

    @abstractmethod
    def fit(
        self,
        target: str | Target,
        data: Sequence[Path],
        out: Path,
        tell: Tell = ignore_progress,
        **how: Any,
    ) -> Fitted:
        """Train on data, and write the result.

        Args:
            target: the frozen model, or its name.
            data: files and folders of training data.
            out: file or folder to write.
            tell: called with the progress.
            how: options for loading a target that is given by name; see `Loading`.

        Raises:
            UserError: an input does not exist, does not fit or is too small.
            KeyboardInterrupt: the run was interrupted.
        """


def items(spec: str, knobs: Sequence[str]) -> list[str]:
    """Return the options in a spec and the further options as key=value, in this order."""
    return [*filter(None, spec.partition(":")[2].split(",")), *knobs]
