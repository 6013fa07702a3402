"""What memory held and what was moved: residency over steps, bytes by layer and KV head, and what is recorded of the
use of them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.theme import (
    BLUE,
    GREEN,
    GREY,
    HOST,
    ORANGE,
    PURPLE,
    RESIDENT,
    SKY,
    finish,
    outline,
    unrecorded,
    whole_ticks,
)
from kvlens.text.units import si_bytes

#: Up to this many cells each carries its number.
TEXT_CELLS = 120
#: Of a curve of more points than this the last of each cell is drawn: CELLS cells a decade of mass, CELLS over all
#: bytes.
CURVE_POINTS, CELLS = 500, 200
#: What the records say of the use of a copy -> how the legend says it, and its colour.
VERDICTS = {
    "listed": ("among the top spans while it could be read", BLUE),
    "unlisted": ("moved, and never among the top spans", ORANGE),
    "pending": ("had not arrived when the run ended", GREY),
    "no span": ("the copy names no span", PURPLE),
    "not recorded": ("top spans were not recorded", SKY),
}


def residency(steps: pd.DataFrame, budget: float | None, full: float | None) -> go.Figure:
    """Bytes at the end of each decode step on the device and in host memory, the largest on the device inside the step,
    and lines for the budget and for full KV where they are known. Columns used: step, resident_bytes, peak_bytes,
    cold_bytes."""
    figure = go.Figure()
    curves = (
        ("peak_bytes", "peak on the device inside the step", GREEN, "dot", 2.6),
        ("resident_bytes", "on the device", RESIDENT, "solid", 2.0),
        ("cold_bytes", "in host memory", HOST, "solid", 3.0),
    )
    for column, label, color, dash, width in curves:
        hover = [
            f"step {step}: {si_bytes(float(value))} {label}"
            for step, value in zip(steps["step"], steps[column], strict=True)
        ]
        figure.add_scatter(
            x=steps["step"],
            y=steps[column],
            name=label,
            mode="lines" if len(steps) > 1 else "markers",
            hovertext=hover,
            hoverinfo="text",
            line={"color": color, "width": width, "dash": dash},
        )
    last = max(0.5, float(steps["step"].max()) + 0.5) if len(steps) else 0.5
    for value, label, color, dash in ((budget, "budget", ORANGE, "dash"), (full, "full KV", GREY, "longdashdot")):
        if value is not None:
            text = f"{label}: {si_bytes(value)}"
            figure.add_scatter(
                x=[-0.5, last],
                y=[value, value],
                name=text,
                mode="lines",
                hovertext=text,
                hoverinfo="text",
                line={"color": color, "width": 2, "dash": dash},
            )
    finish(figure, 360, uirevision="residency", legend=True)
    figure.update_layout(
        title_text="KV bytes by tier at the end of each decode step",
        dragmode=False,
        hovermode="closest",
        hoverdistance=40,
        legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
    )
    figure.update_xaxes(title_text="decode step", range=[-0.5, last], **whole_ticks(round(last)))
    figure.update_yaxes(title_text="bytes", tickformat="~s", ticksuffix="B", rangemode="tozero")
    return figure


def map_height(layers: int) -> int:
    """Pixels for a map of that many layers."""
    return 130 + int(np.clip(layers * 26, 200, 560))


def byte_map(values: np.ndarray, title: str, selected: tuple[int, int], uirevision: str) -> go.Figure:
    """Map of bytes [L, H_kv] (NaN = not recorded, grey); the selected (layer, KV head) is outlined. Points of the
    overlay carry customdata [layer, KV head], so that a click can be read back."""
    layers, heads = values.shape
    top = float(np.nanmax(values, initial=0.0))
    figure = go.Figure(
        go.Heatmap(
            z=values,
            zmin=0,
            zmax=top if top > 0 else 1,
            colorscale="Cividis",
            hoverinfo="skip",
            xgap=1,
            ygap=1,
            texttemplate="%{text}" if values.size <= TEXT_CELLS else None,
            textfont={"size": 11},
            text=[[si_bytes(float(v)) if np.isfinite(v) else "" for v in row] for row in values]
            if values.size <= TEXT_CELLS
            else None,
            colorbar={
                "title": {"text": "bytes", "side": "right"},
                "thickness": 12,
                "tickformat": "~s",
                "ticksuffix": "B",
            },
        )
    )
    unrecorded(figure, values, values.size <= 4 * TEXT_CELLS)
    rows, columns = np.divmod(np.arange(values.size), heads)
    hover = [
        f"L{r} KV{c}: {si_bytes(float(values[r, c]))}" for r, c in zip(rows.tolist(), columns.tolist(), strict=True)
    ]
    unchanged = {"marker": {"opacity": 0.004}}
    figure.add_scatter(
        x=columns,
        y=rows,
        mode="markers",
        hovertext=hover,
        hoverinfo="text",
        customdata=np.stack([rows, columns], axis=1).tolist(),
        marker={
            "symbol": "square",
            "size": float(np.clip(min(420 / heads, 520 / layers), 6, 60)),
            "color": "#000",
            "opacity": 0.004,
            "maxdisplayed": 1,
        },
        selected=unchanged,
        unselected=unchanged,
        showlegend=False,
    )
    outline(figure, selected)
    finish(figure, map_height(layers), uirevision=uirevision)
    figure.update_layout(
        title_text=title, clickmode="event+select", dragmode=False, hovermode="closest", hoverdistance=-1
    )
    shown = list(range(0, heads, max(1, heads // 16)))
    figure.update_xaxes(
        range=[-0.5, heads - 0.5],
        tickvals=shown,
        ticktext=[f"KV{h}" for h in shown],
        title_text="KV head",
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(
        range=[layers - 0.5, -0.5],
        tickvals=list(range(0, layers, max(1, layers // 16))),
        title_text="layer",
        showgrid=False,
        zeroline=False,
    )
    return figure


def use_of_copies(copies: pd.DataFrame, n_steps: int) -> go.Figure:
    """Stacked bars of the bytes moved to the device per decode step, by verdict. Columns used: step, verdict, bytes."""
    figure = go.Figure()
    for verdict, (label, color) in VERDICTS.items():
        part = copies[(copies["verdict"] == verdict) & (copies["step"] >= 0)].groupby("step")["bytes"].sum()
        if len(part):
            hover = [f"step {step}: {si_bytes(float(value))} {label}" for step, value in part.items()]
            figure.add_bar(
                x=part.index,
                y=part.to_numpy(),
                name=label,
                hovertext=hover,
                hoverinfo="text",
                marker={"color": color, "line": {"width": 0}},
            )
    finish(figure, 360, uirevision="use-of-copies", legend=True)
    figure.update_layout(
        title_text="Bytes moved to the device per decode step, by recorded use",
        barmode="stack",
        bargap=0.15,
        dragmode=False,
        hovermode="closest",
        legend={"orientation": "h", "y": -0.24, "yanchor": "top"},
    )
    figure.update_xaxes(
        title_text="decode step of the copy", range=[-0.5, max(0.5, n_steps - 0.5)], **whole_ticks(n_steps)
    )
    figure.update_yaxes(title_text="bytes", tickformat="~s", ticksuffix="B", rangemode="tozero")
    return figure


def mass_curve(copies: pd.DataFrame) -> go.Figure:
    """Share of the judged bytes whose span got at most x of any query head's attention while it could be read; an
    unlisted copy stands at its bound. Where points are many, the last of each cell is drawn. Columns used: verdict,
    bytes, largest_mass, at_most."""
    judged = copies[copies["verdict"].isin(("listed", "unlisted"))]
    mass = judged["largest_mass"].fillna(judged["at_most"]).to_numpy(np.float64)
    order = np.argsort(mass, kind="stable")
    total = max(1.0, float(judged["bytes"].sum()))
    share = np.cumsum(judged["bytes"].to_numpy(np.float64)[order]) / total
    x = np.clip(mass[order], 1e-5, 1.0)
    x, share = _last_of_each(x, x, share)
    if x.size > CURVE_POINTS:
        x, share = _last_of_each(np.floor(CELLS * np.log10(x)) * 10 * CELLS + np.floor(CELLS * share), x, share)
    figure = go.Figure(
        go.Scatter(
            x=x,
            y=share,
            mode="lines+markers",
            marker={"size": 4},
            line={"color": BLUE, "width": 2, "shape": "hv"},
            hoverinfo="text",
            hovertext=[
                f"{b:.1%} of the bytes: no query head gave the span more than {a:.2g}"
                for a, b in zip(x, share, strict=True)
            ],
        )
    )
    finish(figure, 360, uirevision="mass-curve")
    figure.update_layout(title_text="How much attention the moved bytes got", dragmode=False, hovermode="closest")
    figure.update_xaxes(
        title_text="largest mass any query head of the KV head put on the span (share)", type="log", range=[-5.1, 0.1]
    )
    figure.update_xaxes(
        tickvals=[1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0], ticktext=["≤ 10⁻⁵", "10⁻⁴", "10⁻³", "0.01", "0.1", "1"]
    )
    figure.update_yaxes(title_text="share of bytes", range=[-0.02, 1.04], tickformat=".0%")
    return figure


def _last_of_each(key: np.ndarray, *columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the rows of `columns` after which `key` changes, and the last row."""
    last = np.append(np.flatnonzero(np.diff(key)), key.size - 1) if key.size else np.empty(0, np.int64)
    return tuple(column[last] for column in columns)
