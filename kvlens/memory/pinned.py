"""Host memory for the cold tier. Behind a CUDA device it is page-locked, so that copies run by themselves: slabs of exactly the size
that is needed, registered once and divided. torch's own pinned allocator rounds every block up to a power of two.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvlens.shortage import Shortage

ALIGNMENT = 16
"""bytes to which places in a slab are rounded up"""
SLACK, LEAST = 32, 1 << 20
"""a slab that nobody announced has one part in SLACK of what is held already, LEAST bytes at least: no more is left over"""


class HostMemory(Protocol):
    """Where the cold tier lies."""

    def expect(self, size: int) -> None:
        """So many bytes are about to be taken."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory, for as long as this object is open. Raises Shortage when there is no more."""

    def close(self) -> None:
        """The run is over; nothing is copied here any more."""


class Pageable:
    """Ordinary host memory."""

    def expect(self, size: int) -> None:
        """Taken as it comes."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def close(self) -> None:
        """Goes with the tensors."""


class PinnedSlabs:
    """Page-locked host memory.

    register(address, bytes) locks pages and lets the device copy from them, raising RuntimeError where it cannot; unregister(address)
    gives them back. `held`: bytes locked.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister
        self._slabs: list[torch.Tensor] = []
        self._used = 0
        """bytes of the newest slab that are taken"""
        self.held = 0

    def expect(self, size: int) -> None:
        """One slab for all of it, unless it fits what is left of the last one."""
        if size > self._left():
            self._add(size)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(*shape, dtype=dtype)
        if size > self._left():
            self._add(max(size, self.held // SLACK, LEAST))
        found = self._slabs[-1][self._used : self._used + size]
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return found.view(dtype).view(*shape)

    def close(self) -> None:
        """Unlock everything. What was taken stays readable as long as somebody holds it."""
        while self._slabs:
            self._unregister(self._slabs.pop().data_ptr())
        self._used = self.held = 0

    def _left(self) -> int:
        return len(self._slabs[-1]) - self._used if self._slabs else 0

    def _add(self, size: int) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            slab = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
            self._register(slab.data_ptr(), size)
        except (OSError, RuntimeError) as problem:
            raise Shortage(
                f"pinned host memory could not be had: {size} bytes were asked for, {self.held} are held ({problem}); raise the limit on "
                "locked memory (ulimit -l), free host memory, or take a shorter prompt."
            ) from problem
        self._slabs.append(slab)
        self._used = 0
        self.held += size


def cuda_pinned() -> PinnedSlabs:
    """Slabs that every CUDA device can copy from."""
    return PinnedSlabs(_cuda_register, _cuda_unregister)


def _cuda_register(address: int, size: int) -> None:
    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, size, 0)
    if int(status):
        raise RuntimeError(f"cudaHostRegister: {runtime.cudaGetErrorString(status)}")


def _cuda_unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
