"""Why scattered tokens come slower than pages. One launch reads rows of pinned host memory in place, anywhere in it: of
several lengths, in memory that was allocated in several ways. Launches of the same bytes in fewer rows show whether the
number of rows is the limit."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from kvlens.kernels.compat import jit, tl
from kvlens.lab.gpu.ceilings import TO_DEVICE
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.results.gpu import KernelRow, ceiling
from kvlens.link.host_memory import cuda_pinned

POOL, DRY_POOL = 4 << 30, 1 << 20
"""bytes of host memory in which rows lie"""
ROWS = ((256, 16), (512, 16), (1024, 8), (4096, 2), (16384, 1))
"""bytes of a row, and rows that a program has under way"""
TOTALS, DRY_TOTALS = (512 * 512, 4096 * 512, 65536 * 512), (4096 * 4,)
"""bytes of one launch: of 512, 4,096 and 65,536 tokens at 512 bytes a token and KV head"""
CTAS = 64
LISTS = 8
"""launches on other rows each, so that nothing is read twice"""


@jit
def _gather(source_ptr, listed_ptr, target_ptr, count, D: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: N rows at a time, every num_programs-th N of them."""
    d = tl.arange(0, D)
    for start in range(tl.program_id(0) * N, count, tl.num_programs(0) * N):
        i = start + tl.arange(0, N)
        live = i < count
        row = tl.load(listed_ptr + i, mask=live, other=0)
        numbers = tl.load(
            source_ptr + row[:, None] * D + d[None, :], mask=live[:, None], other=0, eviction_policy="evict_first"
        )
        tl.store(target_ptr + i[:, None].to(tl.int64) * D + d[None, :], numbers, mask=live[:, None])


@contextmanager
def register_pages(bench: Bench, size: int) -> Iterator[torch.Tensor]:
    """As a run has it: pages of 4 KiB, registered."""
    slabs = cuda_pinned(bench.device.at)
    yield slabs.take((size // 2,), torch.int16)
    bench.device.wait()
    slabs.close()


@contextmanager
def register_huge(bench: Bench, size: int) -> Iterator[torch.Tensor]:
    """Pages of 2 MiB, registered."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    slab = torch.frombuffer(memory, dtype=torch.int16)
    slab[::2048] = 1
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(slab.data_ptr(), size, 0)):
        raise RuntimeError("host memory could not be registered")
    yield slab
    bench.device.wait()
    runtime.cudaHostUnregister(slab.data_ptr())


@contextmanager
def take_of_torch(bench: Bench, size: int) -> Iterator[torch.Tensor]:
    """By torch's own allocator."""
    yield bench.device.pinned(size // 2, dtype=torch.int16)


MEMORY = {
    "registered pages": register_pages,
    "registered huge pages": register_huge,
    "torch's pinned memory": take_of_torch,
}


def measure(bench: Bench) -> Iterator[KernelRow]:
    size = DRY_POOL if bench.dry else POOL
    for name, take in MEMORY.items():
        if bench.dry and take is not take_of_torch:
            continue
        with take(bench, size) as pool:
            pool[:: mmap.PAGESIZE // 2] = 1
            for row_bytes, tokens in ROWS:
                for total in DRY_TOTALS if bench.dry else TOTALS:
                    seconds = bench.device.per_call(_steps(bench, pool, row_bytes, tokens, total), 10)
                    limit = ceiling(bench.result, TO_DEVICE)
                    yield KernelRow(
                        "row gather",
                        f"{total >> 10} KiB in rows of {row_bytes} B, {name}",
                        seconds,
                        total,
                        total / seconds,
                        TO_DEVICE,
                        None if limit is None else total / seconds / limit,
                    )


def _steps(bench: Bench, pool: torch.Tensor, row_bytes: int, tokens: int, total: int) -> list[Callable[[], None]]:
    rows, count = pool.view(-1, row_bytes // 2), total // row_bytes
    target = torch.empty(count, row_bytes // 2, dtype=torch.int16, device=bench.device.at)
    lists = [torch.randint(0, len(rows), (count,)).to(bench.device.at) for _ in range(LISTS)]
    return [partial(_read, bench, rows, listed, target, tokens) for listed in lists]


def _read(bench: Bench, rows: torch.Tensor, listed: torch.Tensor, target: torch.Tensor, tokens: int) -> None:
    if bench.dry:
        torch.index_select(rows, 0, listed, out=target)
    else:
        gather_rows(rows, listed, target, tokens)


def gather_rows(rows: torch.Tensor, listed: torch.Tensor, target: torch.Tensor, tokens: int) -> None:
    """Copy rows [R, D] listed int64 [n] into target [n, D]. tokens: rows that a program has under way. The rows have to
    be pinned where the target is on CUDA; D is a power of two."""
    count, dim = target.shape
    warps = max(1, min(8, tokens * dim // 512))
    _gather[(min(CTAS, -(-count // tokens)),)](rows, listed, target, count, D=dim, N=tokens, num_warps=warps)


PART = Part("row gathers", measure, ("row_gathers.py",), "free the host's memory; this part pins 4 GB")
