"""Whole decode steps. The Hugging Face modules with random weights through kvlens/static: the same step, method code
and recall as in a run, captured in a CUDA graph. Decisions that depend on meaning are replayed (replayed.py).

One sequence, or several in one step: then the matrices are read once, and attention paths are issued sequence by
sequence. Two times are taken: the graph launched again and again, and the decode loop as it is, with what the host does
between two steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kvlens.gpu.bench.ceilings import COPY, TO_DEVICE
from kvlens.gpu.bench.decoding import LOOP, WARM, begin
from kvlens.gpu.bench.device import p95
from kvlens.gpu.bench.failures import sentence
from kvlens.gpu.bench.floors import DECODE_METHODS, Rates, decode_shape, traffic
from kvlens.gpu.bench.model import random_model
from kvlens.gpu.bench.part import HERE, Bench, Part
from kvlens.gpu.bench.rates import swept
from kvlens.gpu.bench.result import Scope, StepRow, ceiling

LABEL = (
    "whole decode steps of the Hugging Face modules, random weights, random keys and values, replayed "
    "decisions; where a step has several "
    "sequences, their attention paths are issued one by one"
)
SMALLER = "leave the longest context out: --contexts 8192,32768"
FEWER = f"{SMALLER}, or --batches 1"
SETTLE = 2
"""ungraphed steps before a capture where there are several sequences, whose launches take as many times longer"""
SPARE, SPARE_EACH = 4 << 30, 1 << 29
"""bytes left for what a step computes; and for the tables of every further sequence"""
FILES = (
    "calls.py",
    "ceilings.py",
    "decode.py",
    "decoding.py",
    "failures.py",
    "model.py",
    "offloaded.py",
    "rates.py",
    "replay.py",
    "replayed.py",
    "settings.py",
    *(f"../../static/{path.name}" for path in sorted((HERE.parents[1] / "static").glob("*.py"))),
)
RECALLING = ("sekv", "freekv", "sentkv", "blocking")
ONE_BY_ONE = (
    "attention paths issued one by one, on a stream for each sequence; in host memory the sequences share their pages"
)


@torch.inference_mode()
def cell(bench: Bench, method: str, context: int, rates: Rates, scope: Scope = "decode", batch: int = 1) -> StepRow:
    """One method at one context and batch. Memory that cannot suffice is said before it is asked for."""
    bytes_moved = traffic(decode_shape(method, context, rates), bench.model, batch)
    copy, link = ceiling(bench.result, COPY), ceiling(bench.result, TO_DEVICE)
    floor = bytes_moved.floor(copy, link) if copy and link else None
    row = partial(
        StepRow,
        method,
        context,
        batch,
        floor=floor,
        device_bytes=bytes_moved.device_bytes,
        host_bytes=bytes_moved.host_bytes,
        rates=rates.of(method),
        rates_from=bench.rates.source(method, rates),
        scope=scope,
        transfer=None,
        selection=None,
    )
    unmeasured = partial(
        row,
        graph=False,
        steps=0,
        median=None,
        p95=None,
        over_floor=None,
        stall=None,
        peak_bytes=None,
        note="",
        resident_bytes=bytes_moved.resident,
    )
    smaller = FEWER if batch > 1 else SMALLER
    try:
        bench.keep_alone("model", lambda: random_model(bench))
        # one prompt at a time is whole on the device until the method has placed it, whatever is kept then
        needed = bench.model.kv.full_kv_bytes(context) + bytes_moved.resident + SPARE + (batch - 1) * SPARE_EACH
        free = bench.device.free_bytes()
        if needed > free:
            return unmeasured(
                reason=(
                    f"does not fit: needs {needed / 1e9:.1f} GB beside the weights, {free / 1e9:.1f} GB free; {smaller}"
                )
            )
        if method == "hf_offloaded":
            from kvlens.gpu.bench import offloaded

            if (reason := offloaded.refused(bench, context, batch, link)) is not None:
                return unmeasured(reason=reason)
            found = offloaded.timed(bench, context, batch)
        else:
            found = _timed(bench, method, context, rates, scope, batch)
        return row(**found, over_floor=found["median"] / floor if floor else None)
    except Exception as problem:
        if not bench.device.alive():
            raise
        reason, suggestion = sentence(problem, smaller)
        return unmeasured(reason=reason + (f"; {suggestion}" if suggestion else ""))
    finally:
        bench.device.release()


def _timed(bench: Bench, method: str, context: int, rates: Rates, scope: Scope, batch: int) -> dict[str, Any]:
    device, graph = bench.device, not bench.dry
    made = begin(bench, method, context, rates, batch=batch)
    try:
        device.release()
        device.reset_peak()
        if scope == "compiled":
            made.decoder.compiled("eager" if bench.dry else "inductor")
        made.steps(1 if bench.dry else WARM if batch == 1 else SETTLE)
        times = made.times(graph, bench.repeats)
        before, loops = made.decoder.moved_bytes().sum(), 2 if bench.dry else LOOP
        loop = made.steps(loops)
        counted = int(made.decoder.moved_bytes().sum() - before) // loops
        peak, stall, median = device.peak_bytes(), None, statistics.median(times)
        if made.recalls and scope != "compiled":
            made.rest()
            stall = median - statistics.median(
                made.times(graph, bench.repeats if batch == 1 else max(1, bench.repeats // 4))
            )
        notes = [*(["no graph: a dry run"] if not graph else []), *([ONE_BY_ONE] if batch > 1 else [])]
        return {
            "graph": graph,
            "steps": len(times),
            "median": median,
            "p95": p95(times),
            "stall": stall,
            "peak_bytes": peak,
            "note": "; ".join(notes),
            "resident_bytes": made.resident,
            "loop": statistics.fmean(loop),
            "counted_bytes": counted,
            "kernels": made.sessions[0].kernels,
        }
    finally:
        made.close()


def decodes(context: int, batch: int) -> list[Part]:
    """All methods at one context and batch. Several sequences take long, and are two parts: what recalls is the
    second."""
    name = f"decode {context} x {batch}"
    if batch == 1:
        return [_methods(name, context, batch, tuple(DECODE_METHODS), SMALLER)]
    others = tuple(method for method in DECODE_METHODS if method not in RECALLING)
    return [
        _methods(name, context, batch, others, FEWER),
        _methods(f"{name}, recalled", context, batch, RECALLING, FEWER),
    ]


def _methods(name: str, context: int, batch: int, methods: tuple[str, ...], smaller: str) -> Part:
    def measure(bench: Bench) -> Iterator[StepRow]:
        for method in methods:
            yield cell(bench, method, context, bench.rates.of(method), batch=batch)

    return Part(name, measure, FILES, smaller, replays=True)


def sweep(context: int) -> Part:
    """Other rates than the default cells': FreeKV and blocking recall over a grid, and the methods that recall at the
    papers'."""

    def measure(bench: Bench) -> Iterator[StepRow]:
        for method, rates in swept(bench.rates, tuple(DECODE_METHODS)):
            yield cell(bench, method, context, rates)

    return Part(f"decode sweep {context}", measure, FILES, SMALLER, replays=True)


def compiled(context: int) -> Part:
    """FullKV and FreeKV with the step compiled whole before it is captured. Compiling takes minutes, so it comes
    last."""

    def measure(bench: Bench) -> list[StepRow]:
        return [cell(bench, method, context, bench.rates.of(method), "compiled") for method in ("full", "freekv")]

    return Part(f"compiled {context}", measure, FILES, SMALLER, replays=True)
