"""Curves over decode steps."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from kvlens.app.figures.theme import BLUE, SELECTED, finish, whole_ticks
from kvlens.recording.metrics import Metric, value_text


def head_timeline(values: np.ndarray, metric: Metric, label: str, step: int, start: int, stop: int) -> go.Figure:
    """One head's `values` [steps] (NaN = not recorded: a gap) with a cursor at `step` and the range [start, stop)
    shaded.

    Each point's customdata is its step, so that a click can be read back."""
    steps = np.arange(values.size)
    hover = [f"step {step}: {value_text(float(value), metric)}" for step, value in zip(steps, values, strict=True)]
    curve = go.Scatter(
        x=steps,
        y=values,
        mode="lines+markers",
        line={"color": BLUE, "width": 1.8},
        marker={"size": 7, "opacity": 0.35},
        connectgaps=False,
        customdata=steps.tolist(),
        hovertext=hover,
        hoverinfo="text",
    )
    figure = go.Figure(curve)
    if (start, stop) != (0, values.size):
        figure.add_vrect(x0=start - 0.5, x1=stop - 0.5, fillcolor="#888888", opacity=0.15, line_width=0)
    figure.add_vline(x=step, line={"color": SELECTED, "width": 2})
    finish(figure, 260, uirevision=f"timeline-{metric.name}")
    missing = int(np.isnan(values).sum())
    note = f", {missing} of {values.size} steps not recorded" if missing else ""
    figure.update_layout(
        title_text=f"{label}: {metric.title}{note}",
        clickmode="event+select",
        dragmode=False,
        hovermode="closest",
        hoverdistance=-1,
    )
    figure.update_xaxes(title_text="decode step", range=[-0.5, max(0.5, values.size - 0.5)], **whole_ticks(values.size))
    figure.update_yaxes(title_text=metric.unit)
    if metric.lo is not None and metric.hi is not None:
        pad = 0.03 * (metric.hi - metric.lo)
        figure.update_yaxes(range=[metric.lo - pad, metric.hi + pad])
    elif metric.lo == 0.0:
        figure.update_yaxes(rangemode="tozero")
    return figure
