"""What the CUDA link asks of a device: queues of work that run in order, and marks in them. Small, so that all of the
link's logic runs on a CPU over streams that a test schedules as it likes (tests/fakestreams.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a stream. It is reached when everything issued there before it is done."""

    def reached(self) -> bool:
        """Asks, without waiting."""

    def synchronize(self) -> None:
        """The host waits until it is reached."""

    def elapsed_ns(self, later: Mark) -> int:
        """Nanoseconds from this mark to another; both timed and reached."""


class Stream(Protocol):
    """Work that runs in the order in which it was issued, beside the host and the other streams."""

    def mark(self, timed: bool = False) -> Mark:
        """A mark behind everything issued so far."""

    def wait(self, mark: Mark) -> None:
        """What is issued here from now on begins when `mark` is reached. The host goes on at once."""

    def run(self, work: Callable[[], None]) -> None:
        """Issue the work here. The host goes on at once."""

    def synchronize(self) -> None:
        """The host waits until everything issued here is done."""


@dataclass(frozen=True)
class Streams:
    """compute: where the model runs; h2d, d2h: copies to and from the device; spread: what came through a staging
    buffer goes to its slots while the next copy arrives in the other buffer."""

    compute: Stream
    h2d: Stream
    d2h: Stream
    spread: Stream


class CudaMark:
    """A CUDA event, recorded."""

    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)
        self.event.record(stream)

    def reached(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_ns(self, later: Mark) -> int:
        assert isinstance(later, CudaMark)
        return round(self.event.elapsed_time(later.event) * 1e6)


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def mark(self, timed: bool = False) -> CudaMark:
        return CudaMark(self._stream, timed)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def synchronize(self) -> None:
        self._stream.synchronize()


def cuda_streams(device: torch.device) -> Streams:
    """The stream that the device's work is issued to now is the model's; the others are new."""
    own = torch.cuda.current_stream(device)
    return Streams(CudaStream(own), *(CudaStream(torch.cuda.Stream(device)) for _ in range(3)))
