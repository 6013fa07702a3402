"""Attention path and matmuls of one decode step at the 8B shape, random weights, replayed decisions, per method.

One step is the dense part and, in every layer, the kernels of the method, captured in one CUDA graph where the method
allows it. It is not a model's decode loop: no rotary, no write of new keys, no sampling beyond argmax
(docs/performance.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvlens.gpu.bench.ceilings import COPY, TO_DEVICE
from kvlens.gpu.bench.dense import Dense
from kvlens.gpu.bench.device import Step, p95
from kvlens.gpu.bench.failures import sentence
from kvlens.gpu.bench.floors import METHODS, Rates, StepShape, Traffic, step_shape, traffic
from kvlens.gpu.bench.part import Bench, Part
from kvlens.gpu.bench.paths import Chunks, Full, Path, Retrieval, Short
from kvlens.gpu.bench.paths_other import Chess, FullOffload, HostRecall, SeKV
from kvlens.gpu.bench.rates import swept
from kvlens.gpu.bench.result import StepRow, ceiling

LABEL = "attention path and matmuls of one step, random weights, replayed decisions"
SMALLER = "leave the largest out: --contexts 8192,32768 or --batches 1"
WARM, SPARE = 12, 3 << 30
LONGEST = 20.0
"""seconds: a method whose bytes alone would take longer is left out"""

PATHS: dict[str, Callable[[Bench, StepShape, int, int], Path]] = {
    "full": Full,
    "full_offload": FullOffload,
    "streaming_llm": Short,
    "sekv": SeKV,
    "chess": Chess,
    "freekv": Retrieval,
    "sentkv": Chunks,
    "compresskv": Short,
    "blocking": partial(Retrieval, alike=True),
    "blocking_host": HostRecall,
}


def whole_step(bench: Bench, path: Path) -> Step:
    """The step as one callable on fixed tensors."""
    dense = bench.keep_alone("dense", lambda: Dense(bench))
    x = bench.device.normal(path.batch, bench.model.hidden)

    def step() -> None:
        path.begin()
        dense.step(x, path.attend)
        path.end()

    return step


def cell(bench: Bench, method: str, context: int, batch: int, rates: Rates) -> StepRow:
    """One method at one context and batch. Memory that cannot suffice is said before it is asked for."""
    shape = step_shape(method, context, rates)
    bytes_moved = traffic(shape, bench.model, batch)
    copy, link = ceiling(bench.result, COPY), ceiling(bench.result, TO_DEVICE)
    floor = bytes_moved.floor(copy, link) if copy and link else None
    bench.keep_alone("dense", lambda: Dense(bench))
    row = partial(
        StepRow,
        method,
        context,
        batch,
        floor=floor,
        device_bytes=bytes_moved.device_bytes,
        host_bytes=bytes_moved.host_bytes,
        resident_bytes=bytes_moved.resident,
        rates=rates.of(method),
        rates_from=bench.rates.source(method, rates),
    )
    unmeasured = partial(
        row,
        graph=False,
        steps=0,
        median=None,
        p95=None,
        over_floor=None,
        stall=None,
        transfer=None,
        selection=None,
        peak_bytes=None,
        note="",
    )
    needed = bytes_moved.resident + SPARE
    if needed > bench.device.free_bytes():
        return unmeasured(
            reason=(
                f"does not fit: needs {needed / 1e9:.1f} GB beside the weights, "
                f"{bench.device.free_bytes() / 1e9:.1f} GB free"
            )
        )
    wait = bytes_moved.host_bytes * bench.repeats / link if link else 0.0
    if wait > LONGEST and not bench.dry:
        return unmeasured(reason=f"left out: {bench.repeats} steps would spend {wait:.0f} s on the bus alone")
    try:
        return row(**_timed(bench, method, shape, bytes_moved, context, batch, floor))
    except Exception as problem:
        if not bench.device.alive():
            raise
        return unmeasured(reason=sentence(problem, SMALLER)[0])
    finally:
        bench.device.release()


def _timed(
    bench: Bench, method: str, shape: StepShape, moved: Traffic, context: int, batch: int, floor: float | None
) -> dict[str, Any]:
    device = bench.device
    device.reset_peak()
    path = PATHS[method](bench, shape, context, batch)
    run = _ready(bench, path, whole_step(bench, path))
    times = device.times(run, bench.repeats)
    median, peak = statistics.median(times), device.peak_bytes()
    stall = transfer = selection = None
    if moved.host_bytes:
        path.moves = False
        stall = median - statistics.median(device.times(_ready(bench, path, whole_step(bench, path)), bench.repeats))
        path.moves = True
        transfer = statistics.median(device.times(_ready(bench, path, path.recall_alone), min(50, bench.repeats)))
    if isinstance(path, Chess):
        selection = statistics.median(device.times(path.selection, min(20, bench.repeats)))
    return {
        "graph": path.graph,
        "steps": len(times),
        "median": median,
        "p95": p95(times),
        "over_floor": median / floor if floor else None,
        "stall": stall,
        "transfer": transfer,
        "selection": selection,
        "peak_bytes": peak,
        "note": path.note,
    }


def _ready(bench: Bench, path: Path, step: Step) -> Step:
    """Captured where it can be, and run until slots are full and clocks have settled."""
    run = bench.device.capture(step) if path.graph else step
    for _ in range(1 if bench.dry else WARM):
        run()
    return run


def steps(context: int, batch: int) -> Part:
    """All methods at one context and batch."""

    def measure(bench: Bench) -> Iterator[StepRow]:
        for method in METHODS:
            yield cell(bench, method, context, batch, bench.rates.of(method))

    return Part(f"steps {context} x {batch}", measure, FILES, SMALLER, replays=True)


def sweep(context: int, batch: int) -> Part:
    """Other rates than the default cells': FreeKV and blocking recall over a grid, and the methods that recall at the
    papers'."""

    def measure(bench: Bench) -> Iterator[StepRow]:
        for method, rates in swept(bench.rates, tuple(METHODS)):
            yield cell(bench, method, context, batch, rates)

    return Part(f"sweep {context} x {batch}", measure, FILES, SMALLER, replays=True)


FILES = (
    "attention_step.py",
    "calls.py",
    "ceilings.py",
    "dense.py",
    "failures.py",
    "paths.py",
    "paths_other.py",
    "rates.py",
    "replay.py",
    "zones.py",
)
