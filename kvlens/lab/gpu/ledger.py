"""Bytes by our own count against what was seen. Copies by the bus's engine appear in torch.profiler with their bytes,
those of the engine's own decode under every method that moves KV among them; a zero-copy gather appears as a kernel, so
its launches are counted there and its bytes by the units that arrived in emptied slots."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvlens.lab.gpu.failures import sentence
from kvlens.lab.gpu.floors import PAGE
from kvlens.lab.gpu.kernels.page_moves import gather
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.gpu.piecewise import piecewise
from kvlens.lab.gpu.tier import MOVES, SMALLER, Ground, Sink, Way, moving
from kvlens.lab.results.gpu import LedgerRow
from kvlens.link.cuda_link import copying_piecewise
from kvlens.link.transfers import TransferLog

STEPS = 4
"""of the engine's decode, whose every kernel is in the profile"""
WAYS = {"h2d": "HtoD", "d2h": "DtoH"}
"""direction -> what the profiler calls it"""


def measure(bench: Bench) -> Iterator[LedgerRow]:
    yield from _copies(bench)
    yield _zero_copy(bench)
    yield from _engine(bench)


def _events(work: Callable[[], object], bench: Bench) -> list[dict[str, Any]]:
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
    """Pages there and back, one copy each, every one with a line in the memory's own ledger. The pool is made first:
    what fills it is copied as well, and is none of these."""
    kv, ledger, pool = bench.model.kv, TransferLog(), bench.pool
    present = bench.device.normal(64, kv.kv_heads, 2, PAGE, kv.head_dim)
    copied = {"h2d": 0, "d2h": 0}

    def work() -> None:
        for page in range(64):
            direction, cause = ("h2d", "recall") if page % 3 else ("d2h", "offload")
            source, target = (pool[page], present[page]) if direction == "h2d" else (present[page], pool[page])
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
    ledger_rows = []
    for way, name in WAYS.items():
        visited = [int(event["args"]["bytes"]) for event in events if name in event["name"]]
        ledger_rows.append(
            LedgerRow(
                f"copies, {way}",
                ledger.total[way],
                sum(visited),
                len(visited),
                "torch.profiler, Memcpy events",
                ledger.total[way] == sum(visited),
            )
        )
    return ledger_rows


def _engine(bench: Bench) -> Iterator[LedgerRow]:
    """Rows of the ledger, as a trace would have them, against the copies of the link."""
    device, steps = str(bench.device.at), 2 if bench.dry else STEPS
    ground = Ground.build(device, "float32", steps)
    for way in (replace(way, steps=steps) for way in bench.keep("moving", moving)):
        label = f"engine, {way.title}, {steps} steps"
        try:
            yield from _of_engine(bench, way, ground, label)
        except Exception as problem:
            if not bench.device.alive():
                raise
            yield LedgerRow(f"{label}: {sentence(problem, SMALLER)[0]}", 0, 0, 0, "it failed", False)


def _of_engine(bench: Bench, way: Way, ground: Ground, label: str) -> Iterator[LedgerRow]:
    sink = Sink()
    if bench.dry:
        with piecewise() as copied:
            way.run(ground, sink)
        visited = {side: (copied.bytes[side], copied.copies[side]) for side in WAYS}
        how = "dry run: bytes that a link wrote piece by piece"
    else:
        with copying_piecewise():
            visited, rest = beside_the_model(_events(partial(way.run, ground, sink), bench))
        how = f"torch.profiler, Memcpy events beside the model's stream; on it {rest} B of tokens and tables"
        how += "; scattered tokens copied one by one, which runs fetch by one launch"
    for side, (results, count) in visited.items():
        yield LedgerRow(f"{label}, {side}", sink.bytes[side], results, count, how, sink.bytes[side] == results)


def beside_the_model(events: Sequence[dict[str, Any]]) -> tuple[dict[str, tuple[int, int]], int]:
    """Copies between host and device by direction, (bytes, copies), that ran on other streams than the model's, which
    is the one with most kernels: the link has its own. And the bytes of those that ran on it."""
    kernels = Counter(event["args"]["stream"] for event in events if event.get("cat") == "kernel")
    model = kernels.most_common(1)[0][0] if kernels else None
    results, rest = {}, 0
    for side, name in WAYS.items():
        copies = [event["args"] for event in events if event.get("cat") == "gpu_memcpy" and name in event["name"]]
        link = [int(args["bytes"]) for args in copies if args["stream"] != model]
        results[side] = sum(link), len(link)
        rest += sum(int(args["bytes"]) for args in copies if args["stream"] == model)
    return results, rest


def _zero_copy(bench: Bench) -> LedgerRow:
    """Steps that gather other units each: bytes by the units named, and arrivals by looking into slots that held NaN
    before."""
    kv, position, target, count = bench.model.kv, bench.device.at, 32, 8
    units, slots = (
        target * kv.kv_heads,
        torch.arange(target, dtype=torch.int32).repeat_interleave(kv.kv_heads).to(position),
    )
    heads = torch.arange(units, dtype=torch.int32) % kv.kv_heads
    pages = torch.stack([torch.randperm(len(bench.pool))[:units] for _ in range(count)]).int()
    moved = torch.rand(count, units) < 0.3
    unit = torch.where(moved, pages * kv.kv_heads + heads, -1).to(position)
    keys, values = (
        torch.empty(target, PAGE, kv.kv_heads, kv.head_dim, dtype=torch.bfloat16, device=position).transpose(1, 2)
        for _ in range(2)
    )
    arrived = torch.zeros((), dtype=torch.int64, device=position)

    def work() -> None:
        for step in range(count):
            keys.fill_(torch.nan)
            values.fill_(torch.nan)
            gather(bench.pool, unit[step], slots, keys, values)
            for present in (keys, values):
                arrived.add_((~present.isnan()).sum() * present.element_size())

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


PART = Part(
    "ledger",
    measure,
    ("ledger.py", "piecewise.py", "tier.py", *MOVES),
    "free the host's memory; this part pins 4 GB",
    runs_methods=True,
)
