"""Whole decode steps. A Llama with random weights through kvlens/lab/gpu/static: the same step, method code and recall
as in a run, captured in a CUDA graph. Where a method says at which rates it decides by meaning, those decisions are
replayed (replayed.py); every other method decides by itself. Beside them transformers alone (plain.py).

One sequence, or several in one step: then the matrices are read once. Two times are taken: the graph launched again and
again, and the decode loop as it is, with what the host does between two steps.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

from kvlens.lab.gpu import plain
from kvlens.lab.gpu.ceilings import COPY, TO_DEVICE
from kvlens.lab.gpu.decoding import HOST_LED, LOOP, WARM, begin
from kvlens.lab.gpu.device import p95
from kvlens.lab.gpu.failures import sentence
from kvlens.lab.gpu.floors import traffic
from kvlens.lab.gpu.model import random_model
from kvlens.lab.gpu.part import HERE, Bench
from kvlens.lab.gpu.settings import BASELINES, Rates, Setting
from kvlens.lab.results.gpu import Scope, StepRow, Way, ceiling

LABEL = (
    "whole decode steps, random weights, random keys and values; each row says how its layers are computed; where a "
    "row names rates, decisions are replayed"
)
SMALLER = "leave the longest context out: --contexts 8192,32768"
FEWER = f"{SMALLER}, or --batches 1"
SETTLE = 2
"""ungraphed steps before a capture where there are several sequences, whose launches take as many times longer"""
SPARE, SPARE_EACH = 4 << 30, 1 << 29
"""bytes left for what a step computes; and for the tables of every further sequence"""
FILES = (
    "ceilings.py",
    "decode.py",
    "decode_parts.py",
    "decoding.py",
    "failures.py",
    "model.py",
    "plain.py",
    "rates.py",
    "replayed.py",
    "settings.py",
    *(f"static/{path.name}" for path in sorted((HERE / "static").glob("*.py"))),
)
ONE_BY_ONE = (
    "attention paths issued one by one, on a stream for each sequence; in host memory the sequences share their pages"
)
TOGETHER = "one launch attends for all sequences"
UNKNOWN = "no floor: the method does not say what its step moves"


@torch.inference_mode()
def cell(
    bench: Bench,
    setting: Setting,
    context: int,
    rates: Rates,
    scope: Scope = "decode",
    batch: int = 1,
    way: Way = "fused",
) -> StepRow:
    """One setting at one context and batch. Memory that cannot suffice is said before it is asked for."""
    kv = bench.model.kv
    moved = None if setting.shape is None else traffic(setting.shape(kv, context, rates), bench.model, batch)
    copy, link = ceiling(bench.result, COPY), ceiling(bench.result, TO_DEVICE)
    floor = moved.floor(copy, link) if moved and copy and link else None
    resident = moved.resident if moved else batch * kv.full_kv_bytes(context)
    row = partial(
        StepRow,
        setting.name,
        context,
        batch,
        floor=floor,
        device_bytes=moved.device_bytes if moved else None,
        host_bytes=moved.host_bytes if moved else None,
        rates=dict(rates),
        rates_from=bench.rates.source(setting, rates),
        scope=scope,
        way="modules" if setting.name in BASELINES else way,
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
        resident_bytes=resident,
    )
    smaller = FEWER if batch > 1 else SMALLER
    try:
        bench.keep_alone("model", lambda: random_model(bench))
        if (reason := _too_large(bench, setting, context, batch, resident, link)) is not None:
            return unmeasured(reason=reason)
        if setting.name in BASELINES:
            results = plain.timed(bench, setting.name, context, batch)
        else:
            results = _timed(bench, setting, context, rates, scope, batch, way)
        if moved is None:
            results["note"] = "; ".join(part for part in (results["note"], UNKNOWN) if part)
        return row(**results, over_floor=results["median"] / floor if floor else None)
    except Exception as problem:
        if not bench.device.alive():
            raise
        reason, suggestion = sentence(problem, smaller)
        return unmeasured(reason=reason + (f"; {suggestion}" if suggestion else ""))
    finally:
        bench.device.release()


def _too_large(
    bench: Bench, setting: Setting, context: int, batch: int, resident: int, link: float | None
) -> str | None:
    """Why it is not tried. One prompt at a time is whole on the device until the method has placed it, whatever is kept
    then."""
    needed = bench.model.kv.full_kv_bytes(context) + resident + SPARE + (batch - 1) * SPARE_EACH
    free, smaller = bench.device.free_bytes(), FEWER if batch > 1 else SMALLER
    if needed > free:
        return f"does not fit: needs {needed / 1e9:.1f} GB beside the weights, {free / 1e9:.1f} GB free; {smaller}"
    return plain.refused(bench, setting.name, context, batch, link)


def _timed(
    bench: Bench, setting: Setting, context: int, rates: Rates, scope: Scope, batch: int, way: Way
) -> dict[str, Any]:
    device, graph = bench.device, not bench.dry and way != HOST_LED
    repeats = bench.repeats if way != HOST_LED else max(2, bench.repeats // 10 // batch)
    result = begin(bench, setting, context, rates, batch=batch, way=way)
    try:
        device.release()
        device.reset_peak()
        if scope == "compiled":
            torch.compiler.reset()  # each method is another step, and torch compiles eight of one function at most
            result.decoder.compiled("eager" if bench.dry else "inductor")
        result.steps(1 if bench.dry else WARM if batch == 1 else SETTLE)
        times = result.times(graph, repeats)
        previous, loops = result.decoder.moved_bytes().sum(), 2 if bench.dry else min(LOOP, repeats)
        loop = result.steps(loops)
        counted = int(result.decoder.moved_bytes().sum() - previous) // loops
        peak, stall, median = device.peak_bytes(), None, statistics.median(times)
        if result.recalls and scope != "compiled" and way != HOST_LED:
            result.rest()
            stall = median - statistics.median(
                result.times(graph, bench.repeats if batch == 1 else max(1, bench.repeats // 4))
            )
        notes = [*(["no graph: a dry run"] if bench.dry else []), *([_issued(result.decoder)] if batch > 1 else [])]
        return {
            "graph": graph,
            "steps": len(times),
            "median": median,
            "p95": p95(times),
            "stall": stall,
            "peak_bytes": peak,
            "note": "; ".join(notes),
            "resident_bytes": result.resident,
            "loop": statistics.fmean(loop),
            "counted_bytes": counted,
            "kernels": result.sessions[0].kernels,
        }
    finally:
        result.close()


def _issued(decoder: Any) -> str:
    """Return how the attention of several sequences is launched."""
    together = decoder.seam.together
    return TOGETHER if together is not None and together.attends else ONE_BY_ONE
