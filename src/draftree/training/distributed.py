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
from draftree.utils.files import lock_file_in, lock_output


class Processes:
    """Coordinate the processes of a training run.

    Args:
        state: accelerate's state of the process group.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state

    @classmethod
    def on(cls, device: torch.device | str | None) -> Self:
        """Return the processes of this run; the first call joins the process group.

        Args:
            device: device of the computations, of which only the type matters; by default a GPU if
                available.
        """
        kind = str(device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
        return cls(PartialState(cpu=_cpu_only() or kind == "cpu"))

    def device(self, asked: str | None) -> str | None:
        """Return the device of this process.

        For a single process it is `asked`. If there are several processes, each has its own device.

        Raises:
            UserError: there are several processes, and `asked` is not the device of this one.
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
        """Return the number of this process, from 0."""
        return int(self._state.process_index)

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return int(self._state.num_processes)

    @property
    def main(self) -> bool:
        """Return whether this is the main process, which prints and writes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the value that each process passes, in the order of the processes."""
        return list(gather_object([value]))

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum of a tensor over all processes."""
        if self.world == 1:
            return values
        whole = values.to(self._state.device)
        torch.distributed.all_reduce(whole)
        return whole

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return bool(self.sum(torch.tensor(float(flag))))

    @contextmanager
    def share_errors(self) -> Iterator[None]:
        """Return a context at whose end an error in one process is raised in all processes.

        Raises:
            DraftreeError: the error of this process, or that of the first process that has one.
        """
        own: DraftreeError | OSError | None = None
        try:
            yield
        except (DraftreeError, OSError) as error:
            own = error
        told = self.gather(None if own is None else str(own))
        if own is not None:
            raise own
        for rank, message in enumerate(told):
            if message is not None:
                raise UserError(f"process {rank} of {self.world}: {message}")

    @contextmanager
    def alone(self, folder: Path) -> Iterator[None]:
        """Return a context in which no other run can write into a folder.

        The main process locks it for all processes of this run.

        Raises:
            UserError: another run is writing into the folder.
        """
        with ExitStack() as held:
            with self.share_errors():
                if self.main:
                    held.enter_context(lock_output(folder, lock_file_in(folder)))
            yield

    def same(self, value: Any, what: str) -> None:
        """Raise an error if a value differs between the processes.

        Raises:
            UserError: the value differs; the message calls it `what`.
        """
        if len(set(self.gather(value))) > 1:
            raise UserError(
                f"{what} are not the same in all {self.world} processes: every machine needs the same files"
            )


def _cpu_only() -> bool:
    """Return whether accelerate's launcher was started with the option to use no GPU."""
    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")


def accelerator_of(device: torch.device, out: Path, track: str) -> Accelerator:
    """Return accelerate's object for a model that is already on its device.

    Precision and gradient accumulation are handled by draftree itself.

    Args:
        device: device of the model.
        out: folder of the run.
        track: name of an experiment tracker that accelerate supports; empty for none.
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
    """Raise an error if an experiment tracker is not installed.

    Raises:
        UserError: the tracker is not installed. The message lists the installed and the supported
            ones.
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
