"""The processes of a distributed training run (accelerate), or a single process.

All of them run the same command. The main one speaks and writes; what fails in one fails in all.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, LoggerType, gather_object
from torch import Tensor

from draftree.errors import DraftreeError, UserError
from draftree.utils.files import inside, locked


class Processes:
    """This process of a run among the others, and what they agree on.

    Args:
        state: of accelerate, which every process of the run has joined.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state

    @classmethod
    def on(cls, device: torch.device | str | None) -> Self:
        """Return the processes of this run, joined at the first call.

        Args:
            device: what is computed on, by default a GPU where there is one; only its type matters.
        """
        kind = str(device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
        return cls(PartialState(cpu=_cpu_only() or kind == "cpu"))

    def device(self, asked: str | None) -> str | None:
        """Return the device of this process.

        It is the one asked for, but each of several processes has a device of its own.

        Raises:
            UserError: a device was requested for several processes.
        """
        if self.world == 1:
            return asked or ("cpu" if _cpu_only() else None)
        own = str(self._state.device)
        if asked not in (None, own, own.partition(":")[0]):
            raise UserError(
                f"device is '{asked}', but this process was launched for {own}: leave it out"
            )
        return own

    @property
    def rank(self) -> int:
        """Return the number of this process."""
        return int(self._state.process_index)

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return int(self._state.num_processes)

    @property
    def main(self) -> bool:
        """Return True for the process that prints and writes."""
        return self.rank == 0

    def gathered(self, value: Any) -> list[Any]:
        """Return a value of each process."""
        return list(gather_object([value]))

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum of each number over all processes."""
        if self.world == 1:
            return values
        whole = values.to(self._state.device)
        torch.distributed.all_reduce(whole)
        return whole

    def any(self, flag: bool) -> bool:
        """Return True where the flag is set in any process."""
        return bool(self.summed(torch.tensor(float(flag))))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Make an error inside in one process an error in all of them, after it.

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
        """Open a context in which no other run may write into a folder.

        The main process locks it for all processes of this run.

        Raises:
            UserError: another run does.
        """
        with ExitStack() as held:
            with self.agreed():
                if self.main:
                    held.enter_context(locked(folder, inside(folder)))
            yield

    def same(self, value: Any, what: str) -> None:
        """Refuse to go on if a value differs between the processes.

        Raises:
            UserError: the value differs; the message names it.
        """
        if len(set(self.gathered(value))) > 1:
            raise UserError(
                f"{what} are not the same in all {self.world} processes: every machine needs the same files"
            )


def _cpu_only() -> bool:
    """Return True where a launcher was told to use no GPU."""
    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")


def accelerator_of(device: torch.device, out: Path, track: str) -> Accelerator:
    """Return an accelerator for models that are on their devices already.

    Precision and gradient accumulation are draftree's own.

    Args:
        device: of the models.
        out: the run's folder.
        track: the name of a tracker that accelerate knows; none where it is empty.
    """
    # A method may leave some weights out of a step (a head it did not draw); where no process uses
    # one, none waits for it.
    wrapped = DistributedDataParallelKwargs(find_unused_parameters=True)
    return Accelerator(
        device_placement=False,
        mixed_precision="no",
        cpu=device.type == "cpu",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        log_with=track or None,
        project_dir=out,
        kwargs_handlers=[wrapped],
    )


def check_tracker(name: str) -> None:
    """Refuse a tracker that is not installed.

    Raises:
        UserError: it names those that are, and those accelerate knows.
    """
    own = set(LOGGER_TYPE_TO_CLASS) - {
        str(kind) for kind in LoggerType
    }  # registered with accelerate by other code
    installed = sorted({str(kind) for kind in get_available_trackers()} | own)
    if name and name not in installed:
        known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
        raise UserError(
            f"tracker is '{name}', installed are {', '.join(installed) or 'none'} of {known}"
        )
