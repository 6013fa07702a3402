"""FreeKV's figures: query similarity, corrections, pages found on the device and pages moved. NaN is 'not recorded'.

Shapes: N steps, L layers, H_kv KV heads. Cubes are [N, L, H_kv], as `TraceReader.kv_cube` gives them.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.theme import BLUE, GREEN, GREY, ORANGE, SELECTED, finish, outline, unrecorded
from kvlens.text.units import counted

#: Up to this many cells each carries its number.
TEXT_CELLS = 160


def kv_map(
    values: np.ndarray, title: str, unit: str, selected: tuple[int, int], natural: tuple[float, float] | None = None
) -> go.Figure:
    """Map of `values` [L, H_kv] over layers and KV heads; the selected (layer, KV head) outlined. Colours span
    `natural`, or the values."""
    layers, heads = values.shape
    finite = values[np.isfinite(values)]
    lo, hi = natural or ((float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0))
    words = [[f"layer {i}, KV head {j}: {_text(values[i, j])}" for j in range(heads)] for i in range(layers)]
    small = values.size <= TEXT_CELLS
    figure = go.Figure(
        go.Heatmap(
            z=values,
            zmin=lo,
            zmax=hi if hi > lo else lo + 1,
            colorscale="Cividis",
            xgap=1,
            ygap=1,
            hovertext=words,
            hoverinfo="text",
            texttemplate="%{z:.2f}" if small else None,
            textfont={"size": 10},
            colorbar={"title": {"text": unit, "side": "right"}, "thickness": 12},
        )
    )
    unrecorded(figure, values, small)
    outline(figure, selected)
    finish(figure, 190 + int(np.clip(layers * 30, 180, 640)), uirevision=f"freekv-{title}")
    figure.update_layout(title_text=title, dragmode=False)
    figure.update_xaxes(title_text="KV head", dtick=1 if heads <= 16 else None, showgrid=False, zeroline=False)
    every = max(1, layers // 16)
    figure.update_yaxes(title_text="layer", range=[layers - 0.5, -0.5], dtick=every, showgrid=False, zeroline=False)
    return figure


def similarity_timeline(cube: np.ndarray, tau: float | None, selected: tuple[int, int]) -> go.Figure:
    """Query similarity per step: mean over layers and KV heads with the band from the 10th to the 90th percentile, the
    selected KV head, and the threshold."""
    flat = cube.reshape(len(cube), -1)
    recorded = np.flatnonzero(np.isfinite(flat).any(1))
    rows = flat[recorded]
    low, mean, high = np.nanpercentile(rows, 10, axis=1), np.nanmean(rows, axis=1), np.nanpercentile(rows, 90, axis=1)
    figure = go.Figure()
    figure.add_scatter(x=recorded, y=high, mode="lines", line={"width": 0}, hoverinfo="skip", showlegend=False)
    figure.add_scatter(
        x=recorded,
        y=low,
        mode="lines",
        line={"width": 0},
        fill="tonexty",
        fillcolor="rgba(0,114,178,0.18)",
        hoverinfo="skip",
        name="10th to 90th percentile",
    )
    hover = [
        f"step {s}: mean {m:.3f}, 10 % below {a:.3f}, 10 % above {b:.3f}"
        for s, m, a, b in zip(recorded, mean, low, high, strict=True)
    ]
    figure.add_scatter(
        x=recorded,
        y=mean,
        mode="lines+markers",
        name="mean over KV heads",
        line={"color": BLUE},
        marker={"size": 4},
        hovertext=hover,
        hoverinfo="text",
    )
    layer, head = selected
    head_values = cube[:, layer, head]
    if np.isfinite(head_values).any():
        label = f"layer {layer}, KV head {head}"
        figure.add_scatter(
            x=np.arange(len(cube)),
            y=head_values,
            mode="lines+markers",
            name=f"{label} (selected)",
            line={"color": SELECTED, "width": 1.5},
            marker={"size": 4},
            hovertext=[f"step {s}: {_text(v)}, {label}" for s, v in enumerate(head_values)],
            hoverinfo="text",
        )
    if tau is not None:
        figure.add_hline(
            y=tau, line={"color": GREY, "dash": "dash"}, annotation_text=f"τ = {tau:g}", annotation_position="top left"
        )
    _steps(figure, len(cube), "Query similarity per decode step", "freekv-similarity")
    figure.update_yaxes(title_text="cosine")
    return figure


def correction_timeline(cube: np.ndarray) -> go.Figure:
    """Share of KV heads corrected: per step over all layers, and below it per step and layer. `cube` of 0, 1 and
    NaN."""
    steps, layers, _ = cube.shape
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.35, 0.65], vertical_spacing=0.06)
    overall, by_layer = _mean(cube.reshape(steps, -1), 1), _mean(cube, 2).T
    hover = [f"step {s}: {_text(v)} of the KV heads corrected" for s, v in enumerate(overall)]
    figure.add_bar(
        x=np.arange(steps),
        y=overall,
        marker={"color": GREEN, "line": {"width": 0}},
        hovertext=hover,
        hoverinfo="text",
        showlegend=False,
        row=1,
        col=1,
    )
    figure.add_trace(
        go.Heatmap(
            z=by_layer,
            zmin=0,
            zmax=1,
            colorscale="Cividis",
            colorbar={"title": {"text": "share of KV heads", "side": "right"}, "thickness": 12, "len": 0.6, "y": 0.3},
            hovertemplate="step %{x}, layer %{y}: %{z:.2f} of the KV heads corrected<extra></extra>",
        ),
        row=2,
        col=1,
    )
    finish(figure, 230 + int(np.clip(layers * 22, 160, 420)), uirevision="freekv-corrections")
    figure.update_layout(title_text="Corrections per decode step", dragmode=False, bargap=0.15)
    figure.update_xaxes(range=[-0.5, max(0.5, steps - 0.5)], showgrid=False, zeroline=False)
    figure.update_xaxes(title_text="decode step", row=2, col=1)
    figure.update_yaxes(title_text="share", range=[0, 1.02], row=1, col=1)
    every = max(1, layers // 16)
    figure.update_yaxes(
        title_text="layer", autorange="reversed", dtick=every, showgrid=False, zeroline=False, row=2, col=1
    )
    return figure


def pages(hits: np.ndarray, blocking: np.ndarray, background: np.ndarray) -> go.Figure:
    """Selected pages per step, summed over layers and KV heads: on the device already, blocking, brought in the
    background. [N] each."""
    figure = go.Figure()
    parts = (
        ("on the device already (hit)", hits, BLUE, ""),
        ("miss, blocking", blocking, GREEN, ""),
        ("miss, moved in the background", background, ORANGE, "/"),
    )
    for label, values, color, pattern in parts:
        hover = [f"step {s}: {counted(v, 'page')}, {label}" for s, v in enumerate(values)]
        figure.add_bar(
            x=np.arange(len(values)),
            y=values,
            name=label,
            hovertext=hover,
            hoverinfo="text",
            marker={"color": color, "pattern": {"shape": pattern, "size": 5}, "line": {"width": 0}},
        )
    _steps(figure, len(hits), "Selected pages per decode step, all layers and KV heads", "freekv-pages")
    figure.update_layout(barmode="stack", bargap=0.15)
    figure.update_yaxes(title_text="pages", rangemode="tozero")
    return figure


def reuse_by_similarity(similarity: np.ndarray, hits: np.ndarray, misses: np.ndarray, tau: float | None) -> go.Figure:
    """What speculation rests on: by query similarity (bins of 0.1), the share of the pages a KV head selected that were
    on the device from the selection before, and how many (step, layer, KV head) fell into the bin. Cubes of one
    shape."""
    recorded = np.isfinite(similarity) & (hits + misses > 0)
    x, hit, all_pages = similarity[recorded], hits[recorded], (hits + misses)[recorded]
    edges = np.linspace(-1, 1, 21)
    place = np.clip(np.digitize(x, edges) - 1, 0, 19)
    cases = np.bincount(place, minlength=20)
    share = np.bincount(place, hit, 20) / np.maximum(np.bincount(place, all_pages, 20), 1)
    shown = np.flatnonzero(cases)
    middle = (edges[:-1] + edges[1:])[shown] / 2
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.65, 0.35], vertical_spacing=0.06)
    ranges = [f"{edges[i]:.1f} to {edges[i + 1]:.1f}" for i in shown]
    words = [
        f"similarity {r}: {s:.3f} of the pages were there, {n} cases"
        for r, s, n in zip(ranges, share[shown], cases[shown], strict=True)
    ]
    for row, y, color in ((1, share[shown], BLUE), (2, cases[shown], GREY)):
        figure.add_bar(
            x=middle,
            y=y,
            width=0.09,
            hovertext=words,
            hoverinfo="text",
            marker={"color": color, "line": {"width": 0}},
            showlegend=False,
            row=row,
            col=1,
        )
    if tau is not None:
        figure.add_vline(x=tau, line={"color": SELECTED, "dash": "dash"}, annotation_text=f"τ = {tau:g}", row=1, col=1)
    finish(figure, 380, uirevision="freekv-reuse")
    figure.update_layout(title_text="Pages kept from the last selection, by query similarity", dragmode=False)
    figure.update_yaxes(title_text="share of pages", range=[0, 1.02], row=1, col=1)
    figure.update_yaxes(title_text="cases", rangemode="tozero", row=2, col=1)
    low = max(-1.0, float(edges[shown[0]]) - 0.05) if len(shown) else -1.0
    figure.update_xaxes(range=[low, 1.02])
    figure.update_xaxes(title_text="query similarity of the KV head (cosine)", row=2, col=1)
    return figure


def _steps(figure: go.Figure, n_steps: int, title: str, name: str) -> None:
    finish(figure, 340, uirevision=name, legend=True)
    legend = {"orientation": "h", "y": -0.28, "yanchor": "top"}
    figure.update_layout(title_text=title, legend=legend, dragmode=False, hovermode="closest")
    figure.update_xaxes(title_text="decode step", range=[-0.5, max(0.5, n_steps - 0.5)])


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Mean of what was recorded; NaN where nothing was."""
    counts = np.isfinite(values).sum(axis)
    return np.where(counts > 0, np.nansum(values, axis) / np.maximum(counts, 1), np.nan)


def _text(value: float) -> str:
    return f"{value:.3f}" if np.isfinite(value) else "not recorded"
