"""Host memory for the cold tier. Behind a CUDA device it is page-locked, so that copies run by themselves: slabs of
exactly the size that is needed, registered once and divided. torch's own pinned allocator rounds every block up to a
power of two.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from kvlens.shortage import Shortage

ALIGNMENT = 16
"""bytes to which places in a slab are rounded up"""
SLACK, LEAST = 32, 1 << 20
"""a slab that nobody announced has one part in SLACK of what is held already, LEAST bytes at least: no more is left
over"""


class HostMemory(Protocol):
    """Where the cold tier lies."""

    def expect(self, size: int) -> None:
        """So many bytes are about to be taken."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory, for as long as this object is open. Raises Shortage when there is no more."""

    def close(self) -> None:
        """Nothing is copied or read here any more. Memory can be taken anew."""


def pools(host: HostMemory, layers: int, size: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """A pool for each layer, all in one piece of `host`."""
    host.expect(layers * _aligned(math.prod(size) * dtype.itemsize))
    return [host.take(size, dtype) for _ in range(layers)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


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

    register(address, bytes) locks pages and lets the device copy from them, raising RuntimeError where it cannot;
    unregister(address) gives them back. `held`: bytes locked.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister
        self._slabs: list[torch.Tensor] = []
        self._used = 0
        """bytes of the newest slab that are taken"""
        self.held = 0

    def expect(self, size: int) -> None:
        """One slab for all of it, unless it fits what is left of the last one."""
        if size > self._count_free():
            self._add(size)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(*shape, dtype=dtype)
        if size > self._count_free():
            self._add(max(size, self.held // SLACK, LEAST))
        slab = self._slabs[-1][self._used : self._used + size]
        self._used += _aligned(size)
        return slab.view(dtype).view(*shape)

    def close(self) -> None:
        """Unlock everything, while it is still memory. What was taken stays readable by the host as long as somebody
        holds it."""
        slabs, self._slabs, self._used, self.held = self._slabs, [], 0, 0
        for slab in slabs:
            self._unregister(slab.data_ptr())

    def _count_free(self) -> int:
        return len(self._slabs[-1]) - self._used if self._slabs else 0

    def _add(self, size: int) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            slab = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
            self._register(slab.data_ptr(), size)
        except (OSError, RuntimeError) as problem:
            raise Shortage(
                f"pinned host memory could not be had: {size} bytes were asked for, {self.held} are held "
                f"({problem}); raise the limit on "
                "locked memory (ulimit -l), free host memory, or take a shorter prompt."
            ) from problem
        self._slabs.append(slab)
        self._used = 0
        self.held += size


def cuda_pinned(device: torch.device) -> PinnedSlabs:
    """Slabs that CUDA devices copy from and kernels read in place: with unified addresses whatever is registered is
    mapped and portable. device: whose work is waited for before a slab is given back."""
    return PinnedSlabs(partial(_cuda_register, device), partial(_cuda_unregister, device))


def _cuda_register(device: torch.device, address: int, size: int) -> None:
    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, size, 0)
    if int(status):
        _forget_error(device)
        raise RuntimeError(f"cudaHostRegister: {runtime.cudaGetErrorString(status)}")


def _cuda_unregister(device: torch.device, address: int) -> None:
    torch.cuda.synchronize(device)  # a kernel or a replayed graph on any stream may be reading there
    if int(torch.cuda.cudart().cudaHostUnregister(address)):
        _forget_error(device)


def _forget_error(device: torch.device) -> None:
    """CUDA keeps the error of a call that failed until it is asked for, and PyTorch asks at its next launch, which
    would be blamed."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
