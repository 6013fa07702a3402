"""Vectors that methods noted: curves of single numbers, maps of longer ones. NaN is 'none' and never drawn as zero."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from kvlens.app.figures.theme import BLUE, GREY, SERIES, finish

#: A map of more cells than this shows every n-th row.
CELLS = 300_000
#: A map with at most this many rows has a tick for each row.
NAMED_ROWS = 24


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], name: str, x_title: str = "decode step"
) -> go.Figure:
    """One curve per label: (x, y), gaps where y is NaN. `name`: the quantity with its unit, on the axis. Many curves
    (layers, in order) are coloured along Cividis, a few each by its own colour."""
    name = html.escape(name, quote=False)  # Plotly reads markup in titles, and names come from the trace
    figure = go.Figure()
    for (label, (x, y)), color in zip(series.items(), line_colors(len(series)), strict=True):
        hover = [f"{label + ', ' if label else ''}{x_title} {a:g}: {_number(b)}" for a, b in zip(x, y, strict=True)]
        figure.add_scatter(
            x=list(x),
            y=list(y),
            name=label,
            mode="lines+markers",
            line={"color": color, "width": 1.8},
            marker={"size": 5},
            connectgaps=False,
            hovertext=hover,
            hoverinfo="text",
        )
    finish(figure, 360, uirevision=f"journal-{name}", legend=len(series) > 1)
    missing = int(sum(np.isnan(np.asarray(y, np.float64)).sum() for _, y in series.values()))
    note = f", {missing} of {sum(len(y) for _, y in series.values())} values none" if missing else ""
    figure.update_layout(title_text=f"{name}{note}", dragmode=False, hovermode="closest")
    figure.update_xaxes(title_text=x_title)
    figure.update_yaxes(title_text=name)
    return figure


def vector_map(
    rows: Sequence[np.ndarray], labels: Sequence[int], name: str, row_title: str, index_title: str = "index"
) -> go.Figure:
    """Map of vectors (of any lengths) over their index, one row per label (a step or a layer; of two vectors of a label
    the last). Where a vector ends, or a label has none, the ground shows; NaN inside one is grey. `name`: the quantity
    with its unit, beside the colour bar."""
    name = html.escape(name, quote=False)
    width = max((len(row) for row in rows), default=0)
    first_label, last = min(labels, default=0), max(labels, default=-1)
    if (last - first_label + 1) * width <= CELLS:  # a step without a vector is an empty row, not a taller neighbour
        lookup = dict(zip(labels, rows, strict=True))
        labels = range(first_label, last + 1)
        rows = [lookup.get(label, np.empty(0)) for label in labels]
    every = max(1, -(-len(rows) * width // CELLS))
    kept_rows, names = list(rows)[::every], list(labels)[::every]
    values = np.full((len(kept_rows), width), np.nan)
    inside = np.zeros(values.shape, bool)
    for place, row in enumerate(kept_rows):
        values[place, : len(row)] = row
        inside[place, : len(row)] = True
    finite = values[np.isfinite(values)]
    lo, hi = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    signed = lo < 0 < hi
    if signed:
        hi = max(-lo, hi)
        lo = -hi
    figure = go.Figure(
        go.Heatmap(
            z=values,
            y=names,
            zmin=lo,
            zmax=hi if hi > lo else lo + 1,
            colorscale="RdBu" if signed else "Cividis",
            reversescale=signed,
            hovertemplate=f"{row_title} %{{y}}, {index_title} %{{x}}: %{{z:.5g}}<extra></extra>",
            hoverongaps=False,
            colorbar={"title": {"text": name if len(name) <= 40 else "value", "side": "right"}, "thickness": 12},
        )
    )
    if (none := inside & np.isnan(values)).any():
        figure.add_heatmap(
            z=np.where(none, 1.0, np.nan),
            y=names,
            colorscale=[[0, GREY], [1, GREY]],
            showscale=False,
            hoverongaps=False,
            hovertemplate=f"{row_title} %{{y}}, {index_title} %{{x}}: none<extra></extra>",
        )
    finish(figure, 190 + int(np.clip(len(kept_rows) * 14, 180, 460)), uirevision=f"journal-{name}")
    thinned = f", 1 in {every} {row_title}s shown" if every > 1 else ""
    grey = ", grey: none" if none.any() else ""
    figure.update_layout(title_text=f"{name}{thinned}{grey}", dragmode=False)
    figure.update_xaxes(title_text=index_title, showgrid=False, zeroline=False, dtick=1 if width <= 24 else None)
    figure.update_yaxes(title_text=row_title, autorange="reversed", showgrid=False, zeroline=False, tickformat="d")
    if len(names) <= NAMED_ROWS:  # Plotly may put its own ticks between two rows
        figure.update_yaxes(tickvals=names, ticktext=[_row_text(label, row_title) for label in names])
    return figure


def _row_text(label: int, row_title: str) -> str:
    """Return the name of a map's row. Step -1 holds the notes from the end of prefill."""
    return "end of prefill" if row_title == "step" and label == -1 else str(label)


def line_colors(count: int) -> list[str]:
    """Colours of that many curves."""
    if count <= 1:
        return [BLUE] * count
    if count <= len(SERIES):
        return list(SERIES[:count])
    return [str(color) for color in sample_colorscale("Cividis", np.linspace(0, 1, count).tolist())]


def _number(value: float) -> str:
    return f"{value:.5g}" if np.isfinite(value) else "none"
