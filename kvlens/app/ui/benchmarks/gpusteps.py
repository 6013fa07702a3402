"""The Benchmarks page's part about whole decode steps on a GPU: what was timed, at which context and batch."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from kvlens.app.figures.gpu import step_times
from kvlens.app.ui.common import sentences
from kvlens.app.ui.common.chart import chart
from kvlens.app.ui.common.widgets import plain
from kvlens.lab.gpu.rates import words
from kvlens.lab.gpu.settings import title
from kvlens.lab.results.gpu import Result, StepRow

SCOPES = {"decode": "Whole decode steps", "compiled": "Whole steps, compiled"}
"""what was timed -> title; a result has those that were measured"""


def show_steps(result: Result) -> None:
    """Times and floors of one scope at one context and batch, and the sweeps; nothing where none was measured."""
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
        request = st.segmented_control(
            "What was timed",
            scopes,
            default=scope,
            format_func=lambda scope: SCOPES[scope],
            key="gpu_scope",
            required=True,
        )
        scope = str(request or scope)
    rows = [row for row in every if row.scope == scope]
    cells = {f"{c // 1024}K x {b}": (c, b) for c, b in sorted({(row.context, row.batch) for row in rows})}
    cell = st.segmented_control(
        "Context and batch", list(cells), default=next(iter(cells)), key=f"gpu_cell_{scope}", required=True
    )
    context, batch = cells.get(str(cell), next(iter(cells.values())))
    data = _step_table([row for row in rows if (row.context, row.batch) == (context, batch)])
    name = f"gpu-steps-{scope}-{context}-{batch}"
    chart(step_times(rows, context, batch), data, name, "gpu_steps", "Time of one step by method, with its floor")
    st.caption(plain(f"{SCOPES[scope]}. {result.note} The floor counts bytes at the rates measured on this device."))
    st.dataframe(data, hide_index=True)
    _sweeps(result, scope)


def _sweeps(result: Result, scope: str) -> None:
    """What no random weights can decide, at other rates."""
    rows = [
        row
        for name, entry in result.entries.items()
        if "sweep" in name
        for row in entry.rows
        if isinstance(row, StepRow) and row.scope == scope
    ]
    if rows:
        head_item = rows[0]
        st.caption(plain(f"At other rates, the papers' among them, {head_item.context // 1024}K x {head_item.batch}:"))
        st.dataframe(_step_table(rows), hide_index=True)


def _step_table(step_rows: Sequence[StepRow]) -> pd.DataFrame:
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
                sentences.LOOP_TIME: ms(row.loop),
                "floor (ms)": ms(row.floor),
                "achieved / floor": row.over_floor,
                "stall (ms)": ms(row.stall),
                "over the bus per step, by the rates (GB)": gb(row.host_bytes),
                "by the run's counter (GB)": gb(row.counted_bytes),
                "peak on the device (GB)": gb(row.peak_bytes),
                "notes": "; ".join(part for part in (row.note, row.reason or "") if part),
            }
            for row in step_rows
        ]
    )
