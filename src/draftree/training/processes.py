"""The processes that train together: those `accelerate launch` started, or this one alone.

All of them run the same command. The main one speaks and writes; what fails in one fails in all.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from draftree.boundary.files import inside, locked
from draftree.errors import DraftreeError, UserError


class Processes:
    """What this process and the others have to agree on.

    Args:
        state: of accelerate, which every process of the run has joined.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """Those of this run, joined at the first call.

        Args:
            device: what is computed on; only its type matters.
        """
        return cls(PartialState(cpu=device.type == "cpu"))

    @classmethod
    def joined(cls, device: str | None) -> Self:
        """Those of this run, before anything is on a device.

        Args:
            device: what was asked for; by default a GPU where there is one.
        """
        default = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(PartialState(cpu=_cpu_only() or (device or default) == "cpu"))

    def device(self, asked: str | None) -> str | None:
        """What this process computes on: what was asked for, but among several processes each has a device of its own.

        Raises:
            UserError: among several processes, a certain device was asked for.
        """
        if self.world == 1:
            return asked or ("cpu" if _cpu_only() else None)
        own = str(self._state.device)
        if asked not in (None, own, own.partition(":")[0]):
            raise UserError(f"device is '{asked}', but this process was launched for {own}: leave it out")
        return own

    @property
    def rank(self) -> int:
        """The number of this process."""
        return int(self._state.process_index)

    @property
    def world(self) -> int:
        """How many there are."""
        return int(self._state.num_processes)

    @property
    def main(self) -> bool:
        """Whether this is the one that speaks and writes."""
        return self.rank == 0

    def gathered(self, value: Any) -> list[Any]:
        """A value of each process."""
        return list(gather_object([value]))

    def summed(self, values: Tensor) -> Tensor:
        """The sum of each number over all processes."""
        if self.world == 1:
            return values
        whole = values.to(self._state.device)
        torch.distributed.all_reduce(whole)
        return whole

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return bool(self.summed(torch.tensor(float(flag))))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What fails inside in one process fails in all of them, behind it.

        Raises:
            DraftreeError: this process's own error, or that of the first one that has one.
        """
        own: DraftreeError | OSError | None = None
        try:
            yield
        except (DraftreeError, OSError) as error:
            own = error
        told = self.gathered(None if own is None else str(own))
        if own is not None:
            raise own
        for rank, message in enumerate(told):
            if message is not None:
                raise UserError(f"process {rank} of {self.world}: {message}")

    @contextmanager
    def alone(self, folder: Path) -> Iterator[None]:
        """Inside, no other run may write into a folder; the main process locks it for all of this one's.

        Raises:
            UserError: another run does.
        """
        with ExitStack() as held:
            with self.agreed():
                if self.main:
                    held.enter_context(locked(folder, inside(folder)))
            yield

    def same(self, value: Any, what: str) -> None:
        """Refuses to go on where the processes differ in something.

        Raises:
            UserError: it says what differs.
        """
        if len(set(self.gathered(value))) > 1:
            raise UserError(f"{what} are not the same in all {self.world} processes: every machine needs the same files")


def _cpu_only() -> bool:
    """Whether a launcher was told to use no GPU."""
    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
