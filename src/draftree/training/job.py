"""The contract of what is trained or tuned: made from options, fitted to a target and data, with a result to be shown."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from draftree.boundary.progress import Tell, silent
from draftree.models.target import Target

Remark = Callable[[str], None]
Tables = Sequence[tuple[str, list[dict[str, str]]]]
"""Titles and rows."""


class Fitted(ABC):
    """What a run came to."""

    @property
    def tables(self) -> Tables:
        """Its figures as tables; none by default."""
        return ()

    @abstractmethod
    def lines(self, out: Path) -> list[str]:
        """What it came to in a few lines of text, for the file or folder it was written to."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """All its figures."""


class Job(ABC):
    """A training or tuning. Implementations are frozen dataclasses.

    Attributes:
        options: the options of `draftree train` that it takes, beside those that say on what: target, data, out.
        resumes: whether it writes a folder, in which an interrupted run goes on; else a file, whole or not at all.
    """

    options: ClassVar[frozenset[str]]
    resumes: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def of(cls, name: str, items: Sequence[str], options: Mapping[str, Any]) -> Self:
        """The job that options ask for; what is not among them is as its paper has it.

        Args:
            name: of what is trained or tuned.
            items: its knobs, as key=value.
            options: some of `options`, and their values.

        Raises:
            UserError: a knob or value is not allowed.
        """

    @abstractmethod
    def fit(
        self,
        target: str | Target,
        data: Sequence[Path],
        out: Path,
        device: str | None = None,
        dtype: str | None = None,
        tell: Tell = silent,
        remark: Remark = lambda _: None,
    ) -> Fitted:
        """Learns from data and writes the result.

        Args:
            target: the frozen model, or its name.
            data: files, or folders of them.
            out: the file or folder that is written.
            device: to load the target to.
            dtype: of the target's weights.
            tell: told how far it is.
            remark: told what is worth a line.

        Raises:
            UserError: something that was asked for does not exist, does not fit or is too little.
            KeyboardInterrupt: the run was interrupted.
        """
