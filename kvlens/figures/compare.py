"""Two runs as figures: maps side by side on one colour range with their difference on its own, curves over each other,
and many runs as points of quality against bytes or attended tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.figures.heads import map_height
from kvlens.figures.metrics import Metric, head_label, value_text
from kvlens.figures.theme import GREY, SELECTED, finish
from kvlens.text.units import si_bytes

#: Up to this many cells each carries its number.
TEXT_CELLS = 96
#: Transparent, so that only hover is left of a cell.
_PLAIN = [[0, GREY], [1, GREY]]


def ab_maps(
    a: np.ndarray, b: np.ndarray, kv_heads: int, metric: Metric, selected: tuple[int, int], how: str
) -> go.Figure:
    """Maps of A and B [L, Hq] (NaN = not recorded, grey) on one colour range, and B - A on a symmetric one of its own
    around 0.

    `selected`: (layer, query head), outlined in all three. `how`: how the values came about, for the title."""
    heads = a.shape[1]
    group = heads // kv_heads
    lo, hi = metric.bounds(np.stack([a, b]))
    difference = b - a
    known = np.abs(difference[np.isfinite(difference)])
    most = float(known.max(initial=0.0)) or 1.0
    figure = make_subplots(1, 3, shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=("A", "B", "B − A"))
    shared = {"zmin": lo, "zmax": hi, "colorscale": metric.colorscale, "reversescale": metric.diverging}
    own = {"zmin": -most, "zmax": most, "zmid": 0, "colorscale": "RdBu", "reversescale": True}
    for column, (name, values, scale) in enumerate((("A", a, shared), ("B", b, shared), ("B − A", difference, own)), 1):
        unit = f"{metric.unit}, B − A" if column == 3 else metric.unit
        bar = {
            "title": {"text": unit, "side": "right"},
            "thickness": 11,
            "x": {1: -0.5, 2: 0.645, 3: 1.005}[column],
            "len": 1.0,
        }
        figure.add_heatmap(
            z=values,
            name=name,
            showscale=column > 1,
            colorbar=bar,
            xgap=1,
            ygap=1,
            hoverinfo="text",
            row=1,
            col=column,
            hovertext=_hover(values, name, metric, group, signed=column == 3),
            textfont={"size": 10},
            texttemplate=_template(metric) if values.size <= TEXT_CELLS else None,
            **scale,
        )
        if np.isnan(values).any():
            figure.add_heatmap(
                z=np.where(np.isnan(values), 1.0, np.nan),
                colorscale=_PLAIN,
                showscale=False,
                xgap=1,
                ygap=1,
                hoverinfo="skip",
                texttemplate="n/r" if values.size <= 4 * TEXT_CELLS else None,
                textfont={"size": 10, "color": "#111"},
                row=1,
                col=column,
            )
        layer, head = selected
        figure.add_shape(
            type="rect",
            x0=head - 0.5,
            x1=head + 0.5,
            y0=layer - 0.5,
            y1=layer + 0.5,
            line={"color": SELECTED, "width": 3},
            row=1,
            col=column,
        )
    _axes(figure, a.shape[0], heads, group)
    finish(figure, map_height(a.shape[0]), uirevision=f"compare-{a.shape}")
    figure.update_layout(title_text=f"{metric.title}, {how}", dragmode=False, margin={"t": 66, "r": 70})
    figure.update_annotations(font_size=12)
    return figure


def _template(metric: Metric) -> str:
    """Three maps stand side by side, so a share has two decimals there; the hover has more."""
    return {"bytes": "%{z:.2s}", "share": "%{z:.2~f}"}.get(metric.unit, "%{z:.2~g}")


def _hover(values: np.ndarray, name: str, metric: Metric, group: int, signed: bool) -> list[list[str]]:
    def said(value: float) -> str:
        if not signed or not np.isfinite(value):
            return value_text(value, metric)
        word = "more in B" if value > 0 else "less in B" if value < 0 else "the same"
        return f"{value_text(abs(value), metric)} {word}"

    return [
        [f"{name}, {head_label(layer, head, group)}: {said(float(value))}" for head, value in enumerate(row)]
        for layer, row in enumerate(values)
    ]


def _axes(figure: go.Figure, layers: int, heads: int, group: int) -> None:
    every = max(1, heads // 8)
    shown = list(range(0, heads, every))
    labels = [f"Q{q}<br>KV{q // group}" for q in shown]
    figure.update_xaxes(
        range=[-0.5, heads - 0.5],
        tickvals=shown,
        ticktext=labels,
        tickangle=0,
        showgrid=False,
        zeroline=False,
        title_text="query head over its KV head",
    )
    figure.update_yaxes(
        range=[layers - 0.5, -0.5],
        tickvals=list(range(0, layers, max(1, layers // 16))),
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(title_text="layer", col=1)


def map_table(a: np.ndarray, b: np.ndarray, kv_heads: int, metric: Metric, how: str) -> pd.DataFrame:
    """What `ab_maps` draws, one row per layer and query head."""
    layer, head = np.divmod(np.arange(a.size), a.shape[1])
    unit = metric.unit.replace(" ", "_")
    columns = {
        "layer": layer,
        "q_head": head,
        "kv_head": head // (a.shape[1] // kv_heads),
        "metric": metric.name,
        "steps": how,
    }
    return pd.DataFrame(
        {**columns, f"A_{unit}": a.ravel(), f"B_{unit}": b.ravel(), f"B_minus_A_{unit}": (b - a).ravel()}
    )


def value_of(value: float, unit: str) -> str:
    """A value of a curve as it is printed."""
    if not np.isfinite(value):
        return "not recorded"
    return si_bytes(value) if unit == "bytes" else f"{value:.4g} {unit}"
