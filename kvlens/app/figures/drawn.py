"""The numbers that a figure draws, as a table: for charts whose data exist in no other form than the figure."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlens.recording.metrics import Metric

_TAG = re.compile(r"<[^>]*>")


def drawn(figure: go.Figure) -> pd.DataFrame:
    """One row per point, bar or cell of every trace: `series` (the trace's name), then what the axes are, named by
    their titles, which carry the units; of a heat map also the value, named by its colour bar. Traces that exist for
    the pointer alone are left out."""
    parts = [part for trace in figure.data if _visible(trace) and len(part := _rows(figure, trace))]
    if not parts:
        return pd.DataFrame({"series": pd.Series(dtype="str")})
    frame = pd.concat(parts, ignore_index=True)
    for name in frame.columns:
        if frame[name].dtype == object:
            frame[name] = [None if value is None or value != value else str(value) for value in frame[name]]
    return frame


def unit_name(metric: Metric, how: str = "") -> str:
    """Column name of a metric in a table: what it is, how it was summed up, its unit: 'entropy_mean_nats'."""
    parts = (metric.name, how, metric.unit.replace(" ", "_"))
    return "_".join(part for part in parts if part and not (part == metric.unit and metric.name.endswith(f"_{part}")))


def map_frame(values: np.ndarray, kv_heads: int, metric: Metric, how: str) -> pd.DataFrame:
    """One row per layer and query head of a map `values` [L, Hq]; `how`: 'mean', 'max', 'step 7'. NaN stays empty: not
    recorded."""
    heads = values.shape[1]
    layer, head = np.divmod(np.arange(values.size), heads)
    columns = {"layer": layer, "q_head": head, "kv_head": head // (heads // kv_heads)}
    return pd.DataFrame({**columns, unit_name(metric, how.replace(" ", "_")): values.ravel()})


def _visible(trace: Any) -> bool:
    """False for the almost invisible squares that take clicks, for maps of one colour, which only mask 'not recorded'
    cells, and for bands, whose points are the corners of an area."""
    if trace.type == "scatter" and trace.fill == "toself":
        return False
    if trace.type == "heatmap":
        return len({colour for _, colour in trace.colorscale or ((0, "low"), (1, "high"))}) > 1
    opacity = getattr(getattr(trace, "marker", None), "opacity", None)
    return not (isinstance(opacity, float) and opacity < 0.01)


def _rows(figure: go.Figure, trace: Any) -> pd.DataFrame:
    x_title, y_title = _title(figure, trace, "x"), _title(figure, trace, "y")
    if x_title == y_title:
        x_title, y_title = f"x: {x_title}", f"y: {y_title}"
    name = trace.name or ""
    if trace.type == "heatmap":
        z = np.asarray(trace.z)
        x, y = _cells(trace.x, z.shape[1]), _cells(trace.y, z.shape[0])
        value = _plain(trace.colorbar.title.text) or "value"
        return pd.DataFrame(
            {"series": name, x_title: np.tile(x, len(y)), y_title: np.repeat(y, len(x)), value: z.ravel()}
        )
    if trace.type == "histogram":
        coordinates, title = (trace.x, x_title) if trace.x is not None else (trace.y, y_title)
        return pd.DataFrame({"series": name, title: list(coordinates)})
    x, y = _values(trace.x, trace.y), _values(trace.y, trace.x)
    return pd.DataFrame({"series": name, x_title: x, y_title: y})


def _cells(edges: Any, count: int) -> list[Any]:
    """Where the cells of a map stand on one axis; where the axis has edges, each cell's lower one."""
    return list(range(count)) if edges is None else list(edges)[:count]


def _values(values: Any, other_axis: Any) -> list[Any]:
    """A trace's coordinates; counted from 0 where only the other axis has coordinates."""
    if values is not None:
        return list(values)
    return list(range(0 if other_axis is None else len(other_axis)))


def _title(figure: go.Figure, trace: Any, axis: str) -> str:
    """What an axis of a trace shows, by its title; 'x' or 'y' where it has none."""
    number = (getattr(trace, f"{axis}axis", None) or axis)[1:]
    text = figure.layout[f"{axis}axis{number}"].title.text
    return _plain(text) or axis


def _plain(text: str | None) -> str:
    return " ".join(_TAG.sub(" ", text or "").split())
