"""CUDA's streams and events on the CPU, without a device: work that was issued waits in queues, and a drawn schedule
runs it.

Within a stream work runs in order; between streams nothing is ordered but by marks. So whatever the code under test
forgot to order does run in the wrong order under some schedule.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvlens.link.copies import Mark, Stream, Streams
from kvlens.link.cuda_link import CudaLink
from kvlens.link.host_memory import PinnedSlabs
from kvlens.link.transfers import TransferLog

COPY_NS = 1000
"""what a piece of work takes on the fake clock"""


class FakeMark:
    def __init__(self, device: FakeDevice, timed: bool) -> None:
        self.device, self.timed, self.at = device, timed, -1

    def reached(self) -> bool:
        return self.at >= 0

    def synchronize(self) -> None:
        self.device.until(self.reached)

    def elapsed_ns(self, later: Mark) -> int:
        assert isinstance(later, FakeMark)
        assert (self.timed, later.timed) == (True, True), "CUDA refuses the time of an event that was made without one"
        assert min(self.at, later.at) >= 0, "CUDA refuses the time of an event that is not reached"
        return later.at - self.at


class FakeStream:
    """`eager`: the host itself is the stream: work is done when issued, and a wait drives the others until the mark is
    reached."""

    def __init__(self, device: FakeDevice, name: str, eager: bool = False) -> None:
        self.device, self.name, self.eager = device, name, eager
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def _issue(self, ready: Callable[[], bool], work: Callable[[], None]) -> None:
        if self.eager:
            self.device.until(ready)
            work()
            return
        self.queue.append((ready, work))
        self.device.play()

    def mark(self, timed: bool = False) -> FakeMark:
        mark = FakeMark(self.device, timed)
        self._issue(lambda: True, lambda: setattr(mark, "at", self.device.now))
        return mark

    def wait(self, mark: Mark) -> None:
        if (self.name, "waits") not in self.device.broken:
            self._issue(mark.reached, lambda: None)

    def run(self, work: Callable[[], None]) -> None:
        def timed() -> None:
            with torch.inference_mode():
                work()
            self.device.now += COPY_NS
            self.device.done.append(self.name)

        self._issue(lambda: True, timed)

    def synchronize(self) -> None:
        self.device.until(lambda: not self.queue)


@dataclass
class FakeDevice:
    """seed draws the schedule. eager: the model's stream is the host, for runs of the engine, whose tensors are
    computed at once. lazy: side streams run only when somebody waits for them. broken: {(stream, 'waits')}: that stream
    ignores what it should wait for.
    """

    seed: int = 0
    eager: bool = False
    lazy: bool = False
    broken: frozenset[tuple[str, str]] = frozenset()
    now: int = 0
    done: list[str] = field(default_factory=list)
    """streams in the order in which their work was done"""
    refused_after: int | None = None
    """bytes of pinned memory there are; None: no limit"""
    pinned: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.compute, *rest = self.all = [
            FakeStream(self, n, self.eager and n == "compute") for n in ("compute", "h2d", "d2h", "spread")
        ]
        self.streams = Streams(self.compute, *rest)

    def play(self) -> None:
        """Something or nothing happens."""
        if not self.lazy:
            for _ in range(self.random.choice((0, 0, 0, 1, 3))):
                self._one()

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self._one(), "nothing can go on, and what is waited for is not reached"

    def finish(self) -> None:
        for stream in self.all:
            stream.synchronize()

    def _one(self) -> bool:
        ready = [stream for stream in self.all if stream.queue and stream.queue[0][0]()]
        if ready:
            self.random.choice(ready).queue.popleft()[1]()
        return bool(ready)

    # ---- pinned memory
    def register(self, address: int, size: int) -> None:
        if self.refused_after is not None and sum(self.pinned.values()) + size > self.refused_after:
            raise RuntimeError("cudaHostRegister: out of memory")
        self.pinned[address] = size

    def link(self, ledger: TransferLog) -> CudaLink:
        return CudaLink(ledger, self.streams, PinnedSlabs(self.register, self.pinned.pop))


def only(stream: Stream) -> FakeStream:
    """A stream of a FakeDevice, as one."""
    assert isinstance(stream, FakeStream)
    return stream
