"""Base class of tunings, which fit a policy to a drafter, a target and data."""

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from draftree import tuning
from draftree.drafters.base import Drafter
from draftree.engine import PUBLISHED, target_name, target_of
from draftree.errors import UserError
from draftree.formats.known_checkpoints import find_published
from draftree.registry import build, files, in_file
from draftree.target.target import Target
from draftree.training.base import Fitted, Job
from draftree.utils.files import check_writable, lock_file_in, lock_output
from draftree.utils.progress_callback import Tell, ignore_progress


@dataclass(frozen=True)
class Tuning(Job):
    """A job that fits a policy to a drafter.

    Attributes:
        drafter: the spec or folder of the drafter with which the policy will draft.
    """

    drafter: str

    @final
    @override
    def fit(
        self,
        target: str | Target,
        data: Sequence[Path],
        out: Path,
        tell: Tell = ignore_progress,
        **how: Any,
    ) -> Fitted:
        if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise UserError(f"a policy's training was started in {world} processes, allowed is 1")
        if self.drafter == PUBLISHED:
            found = find_published(target_name(target))
            return replace(self, drafter=found).fit(target, data, out, tell, **how)
        method = build("drafter", self.drafter)
        check_writable(out, folder=self.resumes)
        with lock_output(out, lock_file_in(out) if self.resumes else None):
            self.check(out)
            tell(0, "loading")
            model = target_of(target, **how)
            return self.tune(model, method.open(model), data, out, tell)

    @abstractmethod
    def check(self, out: Path) -> None:
        """Check that `out` contains no result; this runs before anything is loaded.

        Raises:
            UserError: `out` contains a result.
        """

    @abstractmethod
    def tune(
        self, target: Target, drafter: Drafter[Any], data: Sequence[Path], out: Path, tell: Tell
    ) -> Fitted:
        """Fit the policy and write the result, while no other process may write to `out`."""


def tunable_policies() -> tuple[str, ...]:
    """Return the names of the policies that can be tuned."""
    return files(tuning)


@cache
def part(name: str) -> type[Tuning]:
    """Return the tuning class in the file with the given name."""
    return in_file(tuning, name, Tuning)
