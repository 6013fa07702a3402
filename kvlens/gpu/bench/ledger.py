"""Bytes by our own count against what was seen. Copies by the bus's engine appear in torch.profiler with their bytes; a
zero-copy gather appears as a kernel, so its launches are counted there and its bytes by the units that arrived in
emptied slots."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvlens.gpu.bench.floors import PAGE
from kvlens.gpu.bench.part import Bench, Part
from kvlens.gpu.bench.result import LedgerRow
from kvlens.kernels.page_moves import gather
from kvlens.memory.ledger import Ledger


def measure(bench: Bench) -> list[LedgerRow]:
    return [*_copies(bench), _zero_copy(bench)]


def _events(work: Callable[[], None], bench: Bench) -> list[dict[str, Any]]:
    """What the profiler saw on the device while `work` ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        bench.device.wait()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return list(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])


def _copies(bench: Bench) -> list[LedgerRow]:
    """Pages there and back, one copy each, every one with a line in the memory's own ledger."""
    kv, ledger = bench.model.kv, Ledger()
    there = bench.device.normal(64, kv.kv_heads, 2, PAGE, kv.head_dim)
    copied = {"h2d": 0, "d2h": 0}

    def work() -> None:
        for page in range(64):
            direction, cause = ("h2d", "recall") if page % 3 else ("d2h", "offload")
            source, target = (bench.pool[page], there[page]) if direction == "h2d" else (there[page], bench.pool[page])
            source, target = source[: 1 + page % kv.kv_heads], target[: 1 + page % kv.kv_heads]
            ledger.open(0, 0, page, direction, cause, source.numel() * source.element_size(), True)
            target.copy_(source, non_blocking=True)
            copied[direction] += source.nbytes

    if bench.dry:
        work()
        return [
            LedgerRow(
                f"copies, {way}",
                ledger.total[way],
                copied[way],
                0,
                "dry run: no profiler",
                ledger.total[way] == copied[way],
            )
            for way in copied
        ]
    events = [event for event in _events(work, bench) if event.get("cat") == "gpu_memcpy"]
    found = []
    for way, name in (("h2d", "HtoD"), ("d2h", "DtoH")):
        seen = [int(event["args"]["bytes"]) for event in events if name in event["name"]]
        found.append(
            LedgerRow(
                f"copies, {way}",
                ledger.total[way],
                sum(seen),
                len(seen),
                "torch.profiler, Memcpy events",
                ledger.total[way] == sum(seen),
            )
        )
    return found


def _zero_copy(bench: Bench) -> LedgerRow:
    """Steps that gather other units each: bytes by the units named, and arrivals by looking into slots that held NaN
    before."""
    kv, at, wanted, count = bench.model.kv, bench.device.at, 32, 8
    units, slots = wanted * kv.kv_heads, torch.arange(wanted, dtype=torch.int32).repeat_interleave(kv.kv_heads).to(at)
    heads = torch.arange(units, dtype=torch.int32) % kv.kv_heads
    pages = torch.stack([torch.randperm(len(bench.pool))[:units] for _ in range(count)]).int()
    moved = torch.rand(count, units) < 0.3
    unit = torch.where(moved, pages * kv.kv_heads + heads, -1).to(at)
    keys, values = (
        torch.empty(wanted, PAGE, kv.kv_heads, kv.head_dim, dtype=torch.bfloat16, device=at).transpose(1, 2)
        for _ in range(2)
    )
    arrived = torch.zeros((), dtype=torch.int64, device=at)

    def work() -> None:
        for step in range(count):
            keys.fill_(torch.nan)
            values.fill_(torch.nan)
            gather(bench.pool, unit[step], slots, keys, values)
            for there in (keys, values):
                arrived.add_((~there.isnan()).sum() * there.element_size())

    work()  # compiled outside the profiler
    arrived.zero_()
    if bench.dry:
        work()
        launches, how = count, "dry run: bytes that arrived in emptied slots"
    else:
        launches = sum(
            event["name"].startswith("_move") for event in _events(work, bench) if event.get("cat") == "kernel"
        )
        how = f"{count} launches; bytes that arrived in emptied slots"
    counted = int(moved.sum()) * PAGE * kv.head_token_bytes
    passed = counted == int(arrived) and launches == count
    return LedgerRow("zero-copy gather", counted, int(arrived), launches, how, passed)


PART = Part("ledger", measure, ("ledger.py",), "free the host's memory; this part pins 4 GB")
