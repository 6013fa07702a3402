"""The trace store's figures on this machine: query times on a synthetic run of 512 steps with 32 layers of 32 query
heads, bytes per step, and what a step costs the engine's thread.

    python -m benchmarks.store [--steps 512] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from kvlens.meta import RunMeta
from kvlens.records import StepRecord
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter
from tests.synthetic import write_synthetic


class _TimedWriter(TraceWriter):
    """Times what the engine's thread spends per step."""

    pause_s = 0.0
    last: _TimedWriter
    """the writer of the latest run"""

    def begin(self, meta: RunMeta) -> None:
        self.seconds: list[float] = []
        _TimedWriter.last = self
        super().begin(meta)

    def step(self, record: StepRecord) -> None:
        start = time.perf_counter()
        super().step(record)
        self.seconds.append(time.perf_counter() - start)
        time.sleep(self.pause_s)


class _PacedWriter(_TimedWriter):
    """As `_TimedWriter`, with a decode step's time between two steps; else records come faster than any engine makes
    them."""

    pause_s = 0.02


def machine() -> str:
    """The machine in one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    versions = f"Python {platform.python_version()}, duckdb {duckdb.__version__}"
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {versions}"


def _median_ms(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """First call and median of the rest, in ms."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times[0], statistics.median(times[1:])


def _write(
    folder: Path, layers: int, q_heads: int, kv_heads: int, steps: int, top_k: int, level: str, kind: type[TraceWriter]
) -> tuple[str, dict[str, float]]:
    start = time.perf_counter()
    uid = write_synthetic(
        folder, layers, q_heads, kv_heads, steps, spans=64, top_k=top_k, trace_level=level, writer_class=kind
    )
    put = np.array(_TimedWriter.last.seconds) * 1e6
    size = (folder / uid / "trace.duckdb").stat().st_size
    return uid, {
        "put_us_median": round(float(np.median(put)), 1),
        "put_us_p99": round(float(np.percentile(put, 99)), 1),
        "waits_for_disk": _TimedWriter.last._flusher.stalls,
        "kb_per_step": round(size / steps / 1e3, 1),
        "file_mb": round(size / 1e6, 2),
        "write_s": round(time.perf_counter() - start, 2),
    }


def _queries(reader: TraceReader, repeats: int) -> dict[str, tuple[float, float]]:
    step, layer, head = reader.n_steps // 2, reader.n_layers // 2, reader.q_heads // 3
    calls: dict[str, Callable[[], object]] = {
        "one step, one head's spans": lambda: reader.head_spans(step, layer, head),
        "one step, span states": lambda: reader.span_states(step, layer, 0),
        "one step, events and transfers": lambda: (reader.events(step=step), reader.transfers(step=step)),
        "heatmap, whole run": lambda: reader.head_summary("entropy"),
        "heatmap, range of steps": lambda: reader.head_summary("entropy", step - 64, step + 64),
        "one head's timeline": lambda: reader.head_timeline(layer, head),
        "one head's span mass": lambda: reader.span_mass(layer, head),
        "head table": lambda: reader.head_table(),
        "cube of one metric": lambda: reader.head_cube("mass_coarse"),
        "mean span mass, 64 steps": lambda: reader.mean_span_mass(step - 32, step + 32),
    }
    return {name: _median_ms(call, repeats) for name, call in calls.items()}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark, prints it, and writes JSON only where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    result: dict[str, Any] = {
        "machine": machine(),
        "steps": options.steps,
        "top_k": 32,
        "data": "synthetic",
        "runs": {},
        "queries_ms": {},
    }
    print(result["machine"])
    with tempfile.TemporaryDirectory(prefix="kvlens-bench-") as name:
        folder = Path(name)
        small, big = (6, 8, 4), (32, 32, 8)
        fast, paced = _TimedWriter, _PacedWriter
        cases = (
            (small, "spans", 16, paced),
            (small, "spans", 16, fast),
            (small, "summary", 16, paced),
            (big, "heads", 32, fast),
            (big, "spans", 32, paced),
        )
        for shape, level, k, kind in cases:
            uid, figures = _write(folder, *shape, options.steps, k, level, kind)
            label = (
                f"{shape[0]} layers x {shape[1]} query heads, level {level}, top {k}, {kind.pause_s * 1e3:.0f} ms "
                f"between steps"
            )
            result["runs"][label] = figures
            print(f"{label}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
        start = time.perf_counter()
        with TraceReader.open(folder, uid) as reader:
            opened = (time.perf_counter() - start) * 1e3
            print(f"open: {opened:.1f} ms")
            for query, (first_item, median) in _queries(reader, options.repeats).items():
                result["queries_ms"][query] = {"first": round(first_item, 1), "median": round(median, 1)}
                print(f"{query}: {median:.1f} ms (first call {first_item:.1f})")
        result["queries_ms"]["open"] = {"first": round(opened, 1)}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
