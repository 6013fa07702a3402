"""Runs as figures: maps side by side on one colour range, and the difference of two of them on its own."""

from __future__ import annotations

import html
from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.heads import map_height
from kvlens.app.figures.theme import finish, outline, unrecorded
from kvlens.recording.metrics import Metric, head_label, value_text
from kvlens.text.units import si_bytes

#: Up to this many cells each carries its number.
TEXT_CELLS = 96
#: Height that a layer's number takes.
TICK_PIXELS = 14


def run_maps(
    maps: Mapping[str, np.ndarray],
    difference: np.ndarray | None,
    kv_heads: int,
    metric: Metric,
    selected: tuple[int, int],
    how: str,
) -> go.Figure:
    """Maps of runs by name [L, Hq] (NaN = not recorded, grey) on one colour range, and B - A, where given, on a
    symmetric one of its own around 0.

    `selected`: (layer, query head), outlined in all. `how`: how the values came about, for the title."""
    panels = list(maps.items()) + ([("B − A", difference)] if difference is not None else [])
    layers, heads = panels[0][1].shape
    group, (rows, columns) = heads // kv_heads, _grid(len(panels))
    figure = make_subplots(
        rows,
        columns,
        shared_yaxes=True,
        horizontal_spacing=0.05 if columns < 4 else 0.03,
        vertical_spacing=0.15 if rows > 1 else None,
        subplot_titles=[_title(name, len(panels)) for name, _ in panels],
    )
    lo, hi = metric.bounds(np.stack(list(maps.values())))
    shared = {"zmin": lo, "zmax": hi, "colorscale": metric.colorscale, "reversescale": metric.diverging}
    for number, (name, values) in enumerate(panels):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        signed = difference is not None and number == len(maps)
        scale = _around_zero(values) if signed else shared
        figure.add_heatmap(
            z=values,
            name=name,
            showscale=signed or number == 0,
            colorbar=_bar(f"{metric.unit}, B − A" if signed else metric.unit, 1 if signed else 0),
            xgap=1,
            ygap=1,
            hoverinfo="text",
            hovertext=_hover(values, name, metric, group, signed),
            textfont={"size": 10},
            texttemplate=_template(metric) if values.size * columns <= 3 * TEXT_CELLS else None,
            **scale,
            **place,
        )
        unrecorded(figure, values, values.size <= 4 * TEXT_CELLS, **place)
        outline(figure, selected, **place)
    _axes(figure, layers, heads, group, rows)
    finish(figure, rows * _height(layers, rows), uirevision=f"compare-{layers}-{heads}")
    figure.update_layout(
        title_text=f"{metric.title}, {how}", dragmode=False, margin={"t": 66, "r": 70 if difference is None else 150}
    )
    figure.update_annotations(font_size=12)
    return figure


def _grid(panels: int) -> tuple[int, int]:
    """Rows and columns: four beside each other, more in two rows."""
    return (1, panels) if panels <= 4 else (2, -(-panels // 2))


def _height(layers: int, rows: int) -> int:
    """Pixels of a row of maps; where there are two, each is lower."""
    return min(map_height(layers), 500) if rows == 1 else 110 + 6 * layers


def _title(name: str, panels: int) -> str:
    """A run's name over its map, cut where maps are narrow."""
    most = 150 // min(panels, 5)
    return html.escape(name if len(name) <= most else f"{name[: most - 1]}…")


def _around_zero(difference: np.ndarray) -> dict[str, object]:
    magnitudes = np.abs(difference[np.isfinite(difference)])
    most = float(magnitudes.max(initial=0.0)) or 1.0
    return {"zmin": -most, "zmax": most, "zmid": 0, "colorscale": "RdBu", "reversescale": True}


def _bar(unit: str, number: int) -> dict[str, object]:
    """The colour bars stand side by side at the right."""
    return {"title": {"text": unit, "side": "right"}, "thickness": 11, "x": 1.005 + 0.065 * number, "len": 1.0}


def _template(metric: Metric) -> str:
    """Three maps stand side by side, so a share has two decimals there; the hover has more."""
    return {"bytes": "%{z:.2s}", "share": "%{z:.2~f}"}.get(metric.unit, "%{z:.2~g}")


def _hover(values: np.ndarray, name: str, metric: Metric, group: int, signed: bool) -> list[list[str]]:
    def describe(value: float) -> str:
        if not signed or not np.isfinite(value):
            return value_text(value, metric)
        word = "more in B" if value > 0 else "less in B" if value < 0 else "the same"
        return f"{value_text(abs(value), metric)} {word}"

    name = html.escape(name)  # Plotly reads markup in hovers, and a run's name comes out of its trace
    return [
        [f"{name}, {head_label(layer, head, group)}: {describe(float(value))}" for head, value in enumerate(row)]
        for layer, row in enumerate(values)
    ]


def _axes(figure: go.Figure, layers: int, heads: int, group: int, rows: int) -> None:
    every = max(1, heads // 8)
    shown = list(range(0, heads, every))
    labels = [f"Q{q}<br>KV{q // group}" for q in shown]
    figure.update_xaxes(
        range=[-0.5, heads - 0.5], tickvals=shown, ticktext=labels, tickangle=0, showgrid=False, zeroline=False
    )
    figure.update_xaxes(title_text="query head over its KV head", row=rows)
    figure.update_yaxes(
        range=[layers - 0.5, -0.5],
        tickvals=list(range(0, layers, -(-TICK_PIXELS * layers // (_height(layers, rows) - 120)))),
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(title_text="layer", col=1)


def map_table(
    maps: Mapping[str, np.ndarray], difference: np.ndarray | None, kv_heads: int, metric: Metric, how: str
) -> pd.DataFrame:
    """What `run_maps` draws, one row per layer and query head."""
    layers, heads = next(iter(maps.values())).shape
    layer, head = np.divmod(np.arange(layers * heads), heads)
    unit = metric.unit.replace(" ", "_")
    columns = {
        "layer": layer,
        "q_head": head,
        "kv_head": head // (heads // kv_heads),
        "metric": metric.name,
        "steps": how,
    }
    drawn = maps if difference is None else {**maps, "B_minus_A": difference}
    return pd.DataFrame({**columns, **{f"{name}_{unit}": values.ravel() for name, values in drawn.items()}})


def value_of(value: float, unit: str) -> str:
    """A value of a curve as it is printed."""
    if not np.isfinite(value):
        return "not recorded"
    return si_bytes(value) if unit == "bytes" else f"{value:.4g} {unit}"
