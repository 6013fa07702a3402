"""The Benchmarks page's part about GPUs: result files of `kvlens bench gpu`, each with its device and date. Dry runs
are not shown."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from kvlens.app.figures.drawn import drawn
from kvlens.app.figures.gpu import kernel_shares, recording, zero_copy
from kvlens.app.ui.benchmarks.gpuoffload import show_offload
from kvlens.app.ui.benchmarks.gpusteps import show_steps
from kvlens.app.ui.benchmarks.result_files import folder
from kvlens.app.ui.common import sentences
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.widgets import error, plain
from kvlens.lab.gpu.rates import WORDS
from kvlens.lab.gpu.schema import list_files, read
from kvlens.lab.gpu.settings import title
from kvlens.lab.results.gpu import CeilingRow, CheckRow, HeadlineRow, KernelRow, LedgerRow, RecordingRow, Result
from kvlens.lab.results.offloadrow import OffloadRow

Kind = TypeVar("Kind")


def show_gpu() -> None:
    """One device's ceilings, kernels and steps; a sentence where there is none."""
    st.markdown("##### On a GPU")
    results = _results()
    if not results:
        st.info("Nothing was measured on a GPU yet. docs/evidence/performance.md says how it is measured.")
        return
    result = _choose_result(results, "gpu_device")
    _unmeasured(result)
    _checks(result)
    _ceilings(result)
    show_offload(rows(result, OffloadRow))
    _kernels(result)
    show_steps(result)
    _recording(result)
    _headlines(result)


def show_bus() -> None:
    """For the Memory page: what a device's bus was measured to reach, beside which a run's copies can be read."""
    st.markdown("##### What the bus of a GPU reaches")
    results = {name: result for name, result in _results().items() if _bus(result)}
    if not results:
        st.caption(sentences.NO_BUS)
        return
    _draw_bus(_choose_result(results, "bus_device"))
    st.caption(plain("Measured on that device, not in this run."))


def _choose_result(results: dict[str, Result], key: str) -> Result:
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
    results_by_key = {}
    for path in list_files(folder()):
        try:
            result = read(path)
        except ValueError as problem:
            error(f"{str(problem)[0].upper()}{str(problem)[1:]}")
            continue
        if not result.dry_run:
            results_by_key[str(result.device.get("name", path.stem))] = result
    return results_by_key


def rows(result: Result, kind: type[Kind], part: str = "") -> list[Kind]:
    """All rows of a kind in the parts whose names begin with `part`."""
    return [
        row
        for entry in result.entries.values()
        if entry.part.startswith(part)
        for row in entry.rows
        if isinstance(row, kind)
    ]


def _unmeasured(result: Result) -> None:
    """Parts of the benchmark that this device has not, or not whole, each with the reason; nothing where all are."""
    reasons = {
        entry.part: (entry.reason or "failed") + (f". Try: {entry.suggestion}" if entry.suggestion else "")
        for entry in result.entries.values()
        if entry.status == "failed"
    }
    parts = dict.fromkeys([*result.missing, *reasons])
    if not parts:
        return
    with st.expander(f"{len(parts)} parts of the benchmark are not measured to their end"):
        for part in parts:
            st.markdown(plain(f"{part}: {reasons.get(part, 'not begun')}."))
        st.caption("docs/evidence/performance.md says how they are measured.")


def _checks(result: Result) -> None:
    checks: list[CheckRow | LedgerRow | OffloadRow] = [*rows(result, CheckRow), *rows(result, LedgerRow)]
    checks += rows(result, OffloadRow)
    wrong = [_name(row) for row in checks if row.passed is False]
    finished = sum(row.passed is not None for row in checks)
    untold = sum(isinstance(row, CheckRow) and row.passed is None for row in checks)
    rest = f" Not compared, behind a tie: {untold}." if untold else ""
    if wrong:
        error(f"{len(wrong)} of {finished} checks failed on this device: {'; '.join(wrong)}.{rest}")
    elif finished:
        st.caption(
            plain(f"All {finished} checks of kernels, engine, list of copies and offload passed on this device.{rest}")
        )


def _name(row: CheckRow | LedgerRow | OffloadRow) -> str:
    return f"offload, {row.method}" if isinstance(row, OffloadRow) else row.name


def _draw(figure: go.Figure, key: str, alt: str) -> None:
    chart(figure, partial(drawn, figure), key.replace("_", "-"), key, alt)


def _ceilings(result: Result) -> None:
    results = rows(result, CeilingRow)
    if not results:
        return
    bus = _bus(result)
    for row, column in zip([row for row in results if row not in bus], st.columns(2), strict=False):
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
    """The kernels of runs and of the static step, not the rows by which the bus is examined."""
    results = [row for part in ("matvecs", "kernels") for row in rows(result, KernelRow, part)]
    if any(row.share is not None for row in results):
        _draw(kernel_shares(results), key="gpu_kernels", alt="Share of the ceiling each kernel reaches")
        st.caption("Blue reaches its aim of 80 %, orange does not, grey has none.")


def _recording(result: Result) -> None:
    results = rows(result, RecordingRow)
    if not results:
        return
    where = f"{title(results[0].method)} at {results[0].context // 1024}K"
    _draw(
        recording(results),
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
    entries: list[dict[str, Any]] = [
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
    if entries:
        st.dataframe(pd.DataFrame(entries), hide_index=True)
        st.caption(
            "Here, and by the floor (the ratio that bytes alone give at this shape): at the replayed rates of "
            "the same row. Shapes, "
            "devices and baselines of the papers are their own."
        )
