"""What the device and the bus can do at best, measured with the libraries' own calls; every other figure is held
against these."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from kvlens.lab.gpu.device import Step
from kvlens.lab.gpu.kernels.page_moves import gather_torch, move_triton
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.results.gpu import CeilingRow

COPY, MATMUL, TO_DEVICE, TO_HOST, ZERO_COPY = (
    "device copy",
    "bf16 matmul",
    "pinned to device",
    "device to pinned",
    "zero-copy gather",
)
CTAS = (1, 2, 4, 8, 12, 16, 24, 32, 64)


def measure(bench: Bench) -> Iterator[CeilingRow]:
    for ceilings in (_device, _host_copies, _zero_copy):
        yield from ceilings(bench)


def _row(bench: Bench, name: str, setting: str, step: Step, amount: float, flops: bool = False) -> CeilingRow:
    seconds = statistics.median(bench.device.times(step, 3 if bench.dry else 30))
    return CeilingRow(name, setting, seconds, amount, "FLOP/s" if flops else "B/s", amount / seconds)


def _device(bench: Bench) -> Iterator[CeilingRow]:
    size = 1 << (16 if bench.dry else 31)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=bench.device.at)
    target = torch.empty_like(source)
    yield _row(bench, COPY, f"{size >> 20} MiB, bytes read and written", lambda: target.copy_(source), 2 * size)
    n = 64 if bench.dry else 8192
    a, b, c = (bench.device.normal(n, n) for _ in range(3))
    yield _row(bench, MATMUL, f"{n} x {n} x {n}, random data", lambda: torch.matmul(a, b, out=c), 2 * n**3, flops=True)


def _host_copies(bench: Bench) -> Iterator[CeilingRow]:
    count = 1 << (14 if bench.dry else 28)
    host, device = bench.device.pinned(count), bench.device.normal(count)
    setting = f"{2 * count >> 20} MiB"
    yield _row(bench, TO_DEVICE, setting, lambda: device.copy_(host, non_blocking=True), 2 * count)
    yield _row(bench, TO_HOST, setting, lambda: host.copy_(device, non_blocking=True), 2 * count)


def _zero_copy(bench: Bench) -> Iterator[CeilingRow]:
    kv, count = bench.model.kv, 16 if bench.dry else 4096
    unit_bytes = 32 * kv.head_token_bytes
    keys = bench.device.normal(count // kv.kv_heads, 32, kv.kv_heads, kv.head_dim).transpose(1, 2)
    values = torch.empty_like(keys)
    heads = torch.arange(count, dtype=torch.int32) % kv.kv_heads
    unit = (torch.randperm(len(bench.pool))[:count].int() * kv.kv_heads + heads).to(bench.device.at)
    slot = (torch.arange(count, dtype=torch.int32) // kv.kv_heads).to(bench.device.at)
    for ctas in CTAS[:2] if bench.dry else CTAS:

        def step(ctas: int = ctas) -> None:
            if bench.dry:
                gather_torch(bench.pool, unit, slot, keys, values)
            else:
                move_triton(bench.pool, unit, slot, keys, values, to_pool=False, ctas=ctas)

        yield _row(bench, ZERO_COPY, f"{count} units of {unit_bytes >> 10} KiB, {ctas} CTAs", step, count * unit_bytes)


PART = Part(
    "ceilings", measure, ("ceilings.py",), "free the device's and the host's memory; this part takes 5 GB of each"
)
