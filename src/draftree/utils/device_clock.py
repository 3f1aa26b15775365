"""Time work on a device by events, without making the host wait."""

import time
from typing import Any, Protocol, final

import torch


class DeviceClock(Protocol):
    """Measure time on a device by marks in its queue of work."""

    def mark(self) -> Any:
        """Return a mark that the device reaches after all work that was queued so far."""

    def seconds(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks.

        The host must already know that the device has passed both.
        """


@final
class HostClock:
    """Measure the time of work that is complete when a call returns."""

    def mark(self) -> float:
        """Return the current time in seconds."""
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        """Return the seconds between two marks."""
        return last - first


@final
class EventClock:
    """Measure time on a GPU's current stream by CUDA events.

    Args:
        device: the GPU; by default torch's current one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def mark(self) -> Any:
        """Return an event that the device reaches after all work that was queued so far."""
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record(*([] if self._device is None else [cuda.current_stream(self._device)]))
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """Return the seconds between two events; CUDA raises an error if one is not complete."""
        return float(first.elapsed_time(last)) / 1e3


def clock_of(device: torch.device) -> DeviceClock:
    """Return the clock for a device."""
    return EventClock(device) if device.type == "cuda" else HostClock()
