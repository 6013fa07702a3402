"""Copies over the steps they ran beside: when each began and ended, and whether the engine waited for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.theme import GREY, finish
from kvlens.app.figures.transfers import CAUSE_COLORS, DIRECTIONS
from kvlens.intervals import lanes
from kvlens.text.units import counted, duration, si_bytes

#: More copies than this are not drawn one by one.
COPIES = 2500
_STEPS = ("#7f8c9a", "#b4bcc6")


def overlap(steps: pd.DataFrame, copies: pd.DataFrame) -> go.Figure:
    """Bars over time since the first step began, in ms: the engine's steps on top, below them the copies of each
    direction, coloured by cause, hatched where they ran in the background. Copies of a direction that overlap share its
    lane's height.

    Columns used: of steps step, t_us, dur_us, wait_us; of copies those that `whole` gives. Every bar has an outline one
    pixel wide, or short copies could not be seen."""
    zero = float(steps["t_us"].min())
    figure = go.Figure()
    _steps(figure, steps, zero)
    rows = ["engine steps"]
    for row, (direction, name) in enumerate(DIRECTIONS.items(), 1):
        rows.append(f"{name}<br>({direction})")
        part = copies[copies["direction"] == direction]
        start, end = part["start_us"].to_numpy(np.float64), part["end_us"].to_numpy(np.float64)
        lane = lanes(start, end)
        count = int(lane.max(initial=0)) + 1
        part = part.assign(
            at=(start - zero) / 1000, took=(end - start) / 1000, y=row + 0.8 * ((lane + 0.5) / count - 0.5)
        )
        for (cause, blocking), same in part.groupby(["cause", "blocking"], sort=True):
            color = CAUSE_COLORS.get(str(cause), "#000")
            how = "blocking" if blocking else "background"
            figure.add_bar(
                orientation="h",
                base=same["at"],
                x=same["took"],
                y=same["y"],
                width=0.8 / count,
                hoverinfo="text",
                name=f"{cause} {DIRECTIONS[direction]}, {how}",
                hovertext=[_copy_text(copy) for copy in same.itertuples()],
                marker={
                    "color": color,
                    "line": {"width": 1, "color": color},
                    "pattern": {"shape": "" if blocking else "/", "size": 5},
                },
            )
    span = (
        max(float((steps["t_us"] + steps["dur_us"]).max()), float(copies["end_us"].max()) if len(copies) else 0.0)
        - zero
    )
    finish(figure, 380, uirevision=f"overlap-{steps['step'].min()}-{steps['step'].max()}", legend=True)
    figure.update_layout(
        title_text=f"Steps {steps['step'].min()}–{steps['step'].max()}: copies beside the steps they ran with",
        barmode="overlay",
        bargap=0,
        dragmode="zoom",
        hovermode="closest",
        margin={"l": 104},
        legend={"orientation": "h", "y": -0.22, "yanchor": "top"},
    )
    pad = 0.01 * span / 1000
    figure.update_xaxes(
        title_text="ms since the first of these steps began", range=[-pad, span / 1000 + pad], zeroline=False
    )
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=rows,
        range=[len(rows) - 0.5, -0.5],
        fixedrange=True,
        showgrid=False,
        zeroline=False,
    )
    return figure


def _steps(figure: go.Figure, steps: pd.DataFrame, zero: float) -> None:
    hover = [
        f"step {step}: {duration(dur)}, of that waiting {duration(wait)}"
        for step, dur, wait in steps[["step", "dur_us", "wait_us"]].itertuples(index=False, name=None)
    ]
    figure.add_bar(
        orientation="h",
        base=(steps["t_us"] - zero) / 1000,
        x=steps["dur_us"] / 1000,
        y=[0] * len(steps),
        width=0.6,
        hovertext=hover,
        hoverinfo="text",
        name="engine step",
        showlegend=False,
        text=steps["step"].astype(str) if len(steps) <= 40 else None,
        textposition="inside",
        textangle=0,
        insidetextanchor="middle",
        textfont={"color": "#111"},
        constraintext="none",
        marker={"color": [_STEPS[int(step) % 2] for step in steps["step"]], "line": {"width": 1, "color": GREY}},
    )


def whole(parts: pd.DataFrame) -> pd.DataFrame:
    """One row per copy, in the order they began. A trace has one line for each KV head and span that a copy brought,
    all with the copy's times (`store.queries.TRANSFER_TIMES`).

    parts, columns: step, layer, kv_head, span, direction, cause, bytes, start_us, end_us, wait_us, blocking. Of the
    result: those of a copy, bytes and wait_us added up, and `brought`, in words."""
    rows = parts.groupby(["step", "direction", "cause", "start_us", "end_us"], sort=False, dropna=False)
    sums = rows.agg(bytes=("bytes", "sum"), wait_us=("wait_us", "sum"), blocking=("blocking", "any"))
    copies = sums.reset_index()
    of_copy = rows.ngroup().to_numpy()
    order = np.argsort(of_copy, kind="stable")
    lines = parts[["layer", "kv_head", "span"]].to_numpy(np.float64, na_value=np.nan)[order]
    starts = np.flatnonzero(np.diff(of_copy[order])) + 1
    copies["brought"] = [_brought(own_lines) for own_lines in np.split(lines, starts)] if len(lines) else []
    return copies.sort_values("start_us", kind="stable", ignore_index=True)


def _brought(lines: np.ndarray) -> str:
    """Return a text with the layer, the KV heads and the number of spans of one copy. lines: its layers, KV heads and
    spans [lines, 3], NaN if a line has none."""
    layers, heads, spans = (sorted({value for value in column if value == value}) for column in lines.T.tolist())
    where = f"L{int(layers[0])}" if len(layers) == 1 else counted(len(layers), "layer")
    which = ", ".join(f"KV{int(head)}" for head in heads) if heads else "all KV heads"
    if not spans:
        return f"{where} {which}"
    each = "" if len(heads) < 2 else f" in {counted(len(lines), 'part')}"
    return f"{where} {which}, " + (f"span {int(spans[0])}" if len(spans) == 1 else counted(len(spans), "span")) + each


def _copy_text(copy: Any) -> str:
    how = "blocking" if copy.blocking else "in the background"
    return (
        f"{copy.cause}, {how}: {copy.brought}<br>{si_bytes(float(copy.bytes))} in "
        f"{copy.end_us - copy.start_us} µs, of step {int(copy.step)}, waited for {copy.wait_us} µs"
    )
