"""The Benchmarks page's part about GPUs: result files of `kvlens bench gpu`, each with its device and date. Dry runs
are not shown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from kvlens.figures.drawn import drawn
from kvlens.figures.gpu import kernel_shares, recording, step_times, zero_copy
from kvlens.gpu.bench.offloadrow import OffloadRow
from kvlens.gpu.bench.rates import WORDS, words
from kvlens.gpu.bench.result import (
    CeilingRow,
    CheckRow,
    HeadlineRow,
    KernelRow,
    LedgerRow,
    RecordingRow,
    Result,
    StepRow,
)
from kvlens.gpu.bench.schema import measured, read
from kvlens.gpu.bench.settings import title
from kvlens.ui.benchmarks.gpuoffload import show_offload
from kvlens.ui.benchmarks.measured import folder
from kvlens.ui.common.chart import chart
from kvlens.ui.common.widgets import error, plain

Kind = TypeVar("Kind")
SCOPES = {"decode": "Whole decode steps", "compiled": "Whole steps, compiled"}
"""what was timed -> title; a result has those that were measured"""


def show_gpu() -> None:
    """One device's ceilings, kernels and steps; a sentence where there is none."""
    st.markdown("##### On a GPU")
    results = _results()
    if not results:
        st.info("Nothing was measured on a GPU yet: run `kvlens bench gpu` on a machine with one.")
        return
    result = _one(results, "gpu_device")
    if result.missing:
        st.warning(plain(f"Not measured yet: {', '.join(result.missing)}; run kvlens bench gpu again."))
    _failures(result)
    _ceilings(result)
    show_offload(rows(result, OffloadRow))
    _kernels(result)
    _steps(result)
    _recording(result)
    _headlines(result)


def show_bus() -> None:
    """For the Memory page: what a device's bus was measured to reach, beside which a run's copies can be read."""
    st.markdown("##### What the bus of a GPU reaches")
    results = {name: result for name, result in _results().items() if _bus(result)}
    if not results:
        st.caption(
            "No GPU's bus was measured yet: run `kvlens bench gpu` on a machine with one. This run's own "
            "copies are timed above."
        )
        return
    _draw_bus(_one(results, "bus_device"))
    st.caption(plain("Measured on that device by kvlens bench gpu, not in this run."))


def _one(results: dict[str, Result], key: str) -> Result:
    """The result to show, chosen where there are several, with on what it was measured."""
    names = list(results)
    result = results[str(st.selectbox("Device", names, key=key) if len(names) > 1 else names[0])]
    st.caption(
        plain(
            f"{result.device.get('name')}, driver {result.device.get('driver')}, torch {result.versions.get('torch')}, "
            f"measured {result.updated}; clocks as found: {result.device.get('clocks')}. {result.note}"
        )
    )
    return result


def _results() -> dict[str, Result]:
    """Device -> result, dry runs left out; a file that is none is one sentence."""
    found = {}
    for path in measured(folder()):
        try:
            result = read(path)
        except ValueError as problem:
            error(f"{str(problem)[0].upper()}{str(problem)[1:]}")
            continue
        if not result.dry_run:
            found[str(result.device.get("name", path.stem))] = result
    return found


def rows(result: Result, kind: type[Kind], part: str = "") -> list[Kind]:
    """All rows of a kind in the parts whose names begin with `part`."""
    return [
        row
        for entry in result.entries.values()
        if entry.part.startswith(part)
        for row in entry.rows
        if isinstance(row, kind)
    ]


def _failures(result: Result) -> None:
    for entry in result.entries.values():
        if entry.status == "failed":
            st.warning(
                plain(
                    f"{entry.part}: {entry.reason or 'failed'}"
                    + (f". Try: {entry.suggestion}." if entry.suggestion else "")
                )
            )
    checks: list[CheckRow | LedgerRow] = [*rows(result, CheckRow), *rows(result, LedgerRow)]
    wrong, done = [row.name for row in checks if not row.passed], len(checks)
    wrong += [f"offload, {row.method}" for row in rows(result, OffloadRow) if not row.passed]
    if wrong:
        error(f"{len(wrong)} of {done} checks failed on this device: {'; '.join(wrong)}.")
    elif done:
        st.caption(plain(f"All {done} checks of kernels, engine and ledger passed on this device."))


def _draw(figure: go.Figure, key: str, alt: str) -> None:
    chart(figure, partial(drawn, figure), key.replace("_", "-"), key, alt)


def _ceilings(result: Result) -> None:
    found = rows(result, CeilingRow)
    if not found:
        return
    bus = _bus(result)
    for row, column in zip([row for row in found if row not in bus], st.columns(2), strict=False):
        value = f"{row.rate / 1e12:.2f} TB/s" if row.unit == "B/s" else f"{row.rate / 1e12:.0f} TFLOP/s"
        column.metric(plain(row.name), value, help=row.setting)
    _draw_bus(result)


def _bus(result: Result) -> list[CeilingRow]:
    return [row for row in rows(result, CeilingRow) if row.name != "device copy" and row.unit == "B/s"]


def _draw_bus(result: Result) -> None:
    _draw(
        zero_copy(_bus(result)),
        key="gpu_bus",
        alt="Rates over the bus, copies and zero-copy gather by number of programs",
    )


def _kernels(result: Result) -> None:
    found = rows(result, KernelRow)
    if any(row.share is not None for row in found):
        _draw(kernel_shares(found), key="gpu_kernels", alt="Share of the ceiling each kernel reaches")
        st.caption("Blue reaches its aim of 80 %, orange does not, grey has none.")


def _steps(result: Result) -> None:
    every = [
        row
        for name, entry in result.entries.items()
        if "sweep" not in name
        for row in entry.rows
        if isinstance(row, StepRow)
    ]
    scopes = [scope for scope in SCOPES if any(row.scope == scope for row in every)]
    if not scopes:
        return
    scope = scopes[0]
    if len(scopes) > 1:
        asked = st.segmented_control(
            "What was timed",
            scopes,
            default=scope,
            format_func=lambda scope: SCOPES[scope],
            key="gpu_scope",
            required=True,
        )
        scope = str(asked or scope)
    found = [row for row in every if row.scope == scope]
    cells = {f"{c // 1024}K x {b}": (c, b) for c, b in sorted({(row.context, row.batch) for row in found})}
    cell = st.segmented_control(
        "Context and batch", list(cells), default=next(iter(cells)), key=f"gpu_cell_{scope}", required=True
    )
    context, batch = cells.get(str(cell), next(iter(cells.values())))
    data = _step_table([row for row in found if (row.context, row.batch) == (context, batch)])
    name = f"gpu-steps-{scope}-{context}-{batch}"
    chart(step_times(found, context, batch), data, name, "gpu_steps", "Time of one step by method, with its floor")
    st.caption(plain(f"{SCOPES[scope]}. {result.note} The floor counts bytes at the rates measured on this device."))
    st.dataframe(data, hide_index=True)
    _sweeps(result, scope)


def _sweeps(result: Result, scope: str) -> None:
    """What no random weights can decide, at other rates."""
    found = [
        row
        for name, entry in result.entries.items()
        if "sweep" in name
        for row in entry.rows
        if isinstance(row, StepRow) and row.scope == scope
    ]
    if found:
        first = found[0]
        st.caption(plain(f"At other rates, the papers' among them, {first.context // 1024}K x {first.batch}:"))
        st.dataframe(_step_table(found), hide_index=True)


def _step_table(found: Sequence[StepRow]) -> pd.DataFrame:
    def ms(value: float | None) -> float | None:
        return None if value is None else round(1e3 * value, 3)

    def gb(value: int | None) -> float | None:
        return None if value is None else value / 1e9

    return pd.DataFrame(
        [
            {
                "method": title(row.method),
                "replayed rates": words(row.rates, row.rates_from),
                "sequences": row.batch,
                "steps": row.steps,
                "in a CUDA graph": row.graph,
                "attended by": "k1" if row.kernels == "triton" else "PyTorch",
                "median (ms)": ms(row.median),
                "95th percentile (ms)": ms(row.p95),
                "in the decode loop, mean (ms)": ms(row.loop),
                "floor (ms)": ms(row.floor),
                "achieved / floor": row.over_floor,
                "stall (ms)": ms(row.stall),
                "over the bus per step, by the rates (GB)": gb(row.host_bytes),
                "by the run's counter (GB)": gb(row.counted_bytes),
                "peak on the device (GB)": gb(row.peak_bytes),
                "notes": "; ".join(part for part in (row.note, row.reason or "") if part),
            }
            for row in found
        ]
    )


def _recording(result: Result) -> None:
    found = rows(result, RecordingRow)
    if not found:
        return
    where = f"{title(found[0].method)} at {found[0].context // 1024}K"
    _draw(
        recording(found),
        key="gpu_recording",
        alt="Time of one step with more and less recorded, in a graph and without",
    )
    st.caption(
        plain(
            f"What recording adds to a whole step of {where}: nothing, numbers per query head, the mass of "
            f"every span besides. The recorder "
            "and the store on the host are not in it."
        )
    )


def _headlines(result: Result) -> None:
    found: list[dict[str, Any]] = [
        {
            "headline": row.name,
            "replayed rates": WORDS[row.rates_from],
            "quantity": row.quantity,
            "paper": row.paper,
            "here": "not measured" if row.ours is None else f"{row.ours:.2f}",
            "by the floor": row.floor,
            "at": row.where,
        }
        for row in rows(result, HeadlineRow)
    ]
    if found:
        st.dataframe(pd.DataFrame(found), hide_index=True)
        st.caption(
            "Here, and by the floor (the ratio that bytes alone give at this shape): at the replayed rates of "
            "the same row. Shapes, "
            "devices and baselines of the papers are their own."
        )
