"""Layer x query-head figures: the map with its margins, and the distribution over heads."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.theme import BLUE, SELECTED, finish, outline, unrecorded
from kvlens.recording.metrics import Metric, head_label, value_text

#: Up to this many cells each carries its number.
TEXT_CELLS = 160


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Mean over the recorded values along `axis`; NaN where there are none."""
    counts = np.isfinite(values).sum(axis=axis)
    sums = np.nansum(values, axis=axis)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def map_height(layers: int) -> int:
    """Pixels for a map of that many layers."""
    return 190 + int(np.clip(layers * 30, 300, 640))


def head_map(
    values: np.ndarray,
    kv_heads: int,
    metric: Metric,
    selected: tuple[int, int] | None,
    how: str,
    fit: bool = False,
    scale_of: np.ndarray | None = None,
) -> go.Figure:
    """Map of `values` [L, Hq] (NaN = not recorded) with the mean per query head above and per layer to the right.

    `fit`: colours span the recorded values instead of the metric's natural range; `scale_of`: those of all maps beside
    each other, so that they share a scale; None: `values`. `selected`: (layer, query head),
    outlined, or None. `how`: how the values were aggregated, for the title. Points of the overlay carry customdata
    [layer, query head], so that a click can be read back."""
    layers, heads = values.shape
    group = heads // kv_heads
    lo, hi = metric.value_range(values if scale_of is None else scale_of) if fit else metric.bounds(values)
    figure = make_subplots(
        2,
        2,
        column_widths=[0.82, 0.18],
        row_heights=[0.2, 0.8],
        shared_xaxes=True,
        shared_yaxes=True,
        horizontal_spacing=0.02,
        vertical_spacing=0.03,
    )
    share = metric.unit in ("share", "cosine", "0 or 1")  # stored to 1e-4
    text = "%{z:.2s}" if metric.unit == "bytes" else "%{z:.4~f}" if share else "%{z:.3~g}"
    bar = {"title": {"text": metric.mean_unit, "side": "right"}, "len": 0.78, "y": 0.39, "thickness": 12}
    if share:
        bar["exponentformat"] = "none"  # 0.0012, not 1.2m
    figure.add_trace(
        go.Heatmap(
            z=values,
            zmin=lo,
            zmax=hi,
            colorscale=metric.colorscale,
            reversescale=metric.diverging,
            hoverinfo="skip",
            colorbar=bar,
            xgap=1,
            ygap=1,
            texttemplate=text if values.size <= TEXT_CELLS else None,
            textfont={"size": 10},
        ),
        row=2,
        col=1,
    )
    unrecorded(figure, values, values.size <= TEXT_CELLS * 4, row=2, col=1)
    figure.add_trace(_targets(values, metric, group), row=2, col=1)
    means = {"marker_color": BLUE, "showlegend": False}
    names = [f"Q{q} (KV{q // group})" for q in range(heads)]
    per_head, per_layer = _mean(values, 0), _mean(values, 1)
    texts = [f"{name}: {value_text(v, metric)}" for name, v in zip(names, per_head, strict=True)]
    figure.add_bar(x=list(range(heads)), y=per_head, hovertext=texts, hoverinfo="text", row=1, col=1, **means)
    figure.add_bar(
        y=list(range(layers)),
        x=per_layer,
        orientation="h",
        hoverinfo="text",
        hovertext=[f"layer {i}: {value_text(v, metric)}" for i, v in enumerate(per_layer)],
        row=2,
        col=2,
        **means,
    )
    _axes(figure, layers, heads, group, metric)
    if selected is not None:
        outline(figure, selected, row=2, col=1)
    finish(figure, map_height(layers), uirevision=f"map-{layers}x{heads}")
    figure.update_layout(
        title_text=f"{metric.title}, {how}",
        clickmode="event+select",
        dragmode=False,
        hovermode="closest",
        hoverdistance=-1,
        bargap=0.25,
        margin={"b": 88},  # labels have two lines
    )
    return figure


def _targets(values: np.ndarray, metric: Metric, group: int) -> go.Scatter:
    """Points that take hover and click, because a heat map reports no selection to Streamlit 1.67. One of them is drawn
    and is almost invisible: Plotly finds the others by their places.

    customdata is a list of lists: a typed array comes back from the browser as an object."""
    layers, heads = values.shape
    rows, columns = np.divmod(np.arange(values.size), heads)
    hover = [
        f"{head_label(int(r), int(c), group)}<br>{value_text(float(values[r, c]), metric)}"
        for r, c in zip(rows, columns, strict=True)
    ]
    size = float(np.clip(min(620 / heads, 520 / layers), 6, 40))
    unchanged = {"marker": {"opacity": 0.004}}
    return go.Scatter(
        x=columns,
        y=rows,
        mode="markers",
        hovertext=hover,
        hoverinfo="text",
        customdata=np.stack([rows, columns], axis=1).tolist(),
        marker={"symbol": "square", "size": size, "color": "#000", "opacity": 0.004, "maxdisplayed": 1},
        selected=unchanged,
        unselected=unchanged,
        showlegend=False,
    )


def _axes(figure: go.Figure, layers: int, heads: int, group: int, metric: Metric) -> None:
    every = max(1, heads // 16)
    shown = list(range(0, heads, every))
    labels = [f"Q{q}<br>KV{q // group}" for q in shown]
    figure.update_xaxes(range=[-0.5, heads - 0.5], showgrid=False, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    figure.update_xaxes(
        tickvals=shown, ticktext=labels, tickangle=0, title_text="query head over its KV head", row=2, col=1
    )
    figure.update_yaxes(
        range=[layers - 0.5, -0.5],
        tickvals=list(range(0, layers, max(1, layers // 16))),
        title_text="layer",
        row=2,
        col=1,
    )
    figure.update_yaxes(title_text="mean", rangemode="tozero", nticks=3, row=1, col=1)
    if metric.unit == "share":
        figure.update_xaxes(exponentformat="none", row=2, col=2)
        figure.update_yaxes(exponentformat="none", row=1, col=1)
    figure.update_xaxes(range=None, autorange=True, title_text=f"mean ({metric.mean_unit})", nticks=4, row=2, col=2)
    place = {
        "type": "line",
        "xref": "x3",
        "yref": "y3 domain",
        "y0": 0,
        "y1": 1,
        "line": {"color": "#ffffff", "width": 2},
    }
    between = np.arange(group, heads, group) - 0.5  # one assignment: each call of `add_vline` searches the figure
    figure.layout.shapes = [{**place, "x0": float(x), "x1": float(x)} for x in between]


def head_histogram(values: np.ndarray, metric: Metric, selected: tuple[int, int]) -> go.Figure:
    """How `values` [L, Hq] spread over query heads; a line marks the selected head. Unrecorded heads are left out and
    counted."""
    flat = values[np.isfinite(values)]
    # equal values have a narrow bin of their own, which the chart's library would make as wide as the values are large
    alike = len(flat) > 0 and bool(np.ptp(flat) == 0)
    bins = {"start": flat[0] - 0.005, "end": flat[0] + 0.005, "size": 0.01} if alike else None
    figure = go.Figure(
        go.Histogram(
            x=flat, nbinsx=30, xbins=bins, marker_color=BLUE, hovertemplate="%{x}: %{y} query heads<extra></extra>"
        )
    )
    selected_value = float(values[selected])
    if np.isfinite(selected_value):
        figure.add_vline(x=selected_value, line={"color": SELECTED, "width": 2})
    finish(figure, 260, uirevision="histogram")
    missing = int(values.size - flat.size)
    note = f", {missing} not recorded" if missing else ""
    figure.update_layout(title_text=f"Spread over {flat.size} query heads{note}", bargap=0.05)
    figure.update_xaxes(title_text=metric.label)
    figure.update_yaxes(title_text="query heads", rangemode="tozero")
    return figure
