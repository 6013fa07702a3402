"""SentKVCompress's figures: lengths of chunks, reuse over steps and heads, what truncation cost, what a step attended.

Cubes are [steps, L, H_kv]; NaN = not recorded, or nothing was wanted there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.theme import BLUE, GREEN, GREY, ORANGE, SELECTED, SERIES, SKY, finish
from kvlens.text.units import si_bytes

#: What the paper reports (sec. 1, abstract).
PAPER_REUSE = 0.7
_LEGEND = {"traceorder": "normal", "orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"}


def lengths(by_cut: dict[str, Sequence[int]], target_length: int, deviation: int) -> go.Figure:
    """How many chunks have which length, stacked by what cut them: name of the cut -> lengths in tokens. Lines: L and L
    ± Δ."""
    figure = go.Figure()
    colors = [*SERIES, SELECTED, "#F0E442", "#000000"]
    for i, (name, values) in enumerate(by_cut.items()):
        distinct_lengths, counts = np.unique(np.asarray(values, int), return_counts=True)
        hover = [
            f"{n} chunk{'' if n == 1 else 's'} of {length} tokens, {name}"
            for length, n in zip(distinct_lengths, counts, strict=True)
        ]
        color = GREY if name.startswith("no ") else colors[i % len(colors)]
        figure.add_bar(
            x=distinct_lengths,
            y=counts,
            name=name,
            marker={"color": color, "line": {"width": 0}},
            hovertext=hover,
            hoverinfo="text",
        )
    for position, text in (
        (target_length, "L"),
        (target_length - deviation, "L − Δ"),
        (target_length + deviation, "L + Δ"),
    ):
        figure.add_vline(x=position, line={"color": "#555555", "width": 1, "dash": "dot"})
        figure.add_annotation(x=position, y=1, yref="paper", yanchor="bottom", text=text, showarrow=False)
    finish(figure, 320, uirevision="sentkv-lengths", legend=True)
    figure.update_layout(
        title_text="Lengths of chunks",
        barmode="stack",
        bargap=0.1,
        dragmode=False,
        margin={"t": 74},
        legend={**_LEGEND, "y": 1.08},
    )
    figure.update_xaxes(title_text="length (tokens)", rangemode="tozero")
    figure.update_yaxes(title_text="chunks", rangemode="tozero")
    return figure


def reuse_over_steps(reused: np.ndarray, could: np.ndarray, step: int) -> go.Figure:
    """Reuse rate per step, mean over (layer, KV head): as it was, and as it could have been without truncation."""
    figure = go.Figure()
    for name, cube, color in (("reused", reused, BLUE), ("reusable without truncation", could, ORANGE)):
        flat = cube.reshape(len(cube), -1)
        steps = np.flatnonzero(np.isfinite(flat).any(1))
        mean = np.nanmean(flat[steps], 1) if steps.size else np.empty(0)
        hover = [f"step {s}: {m:.3f} {name}" for s, m in zip(steps, mean, strict=True)]
        figure.add_scatter(
            x=steps,
            y=mean,
            name=name,
            mode="lines+markers",
            line={"color": color},
            marker={"size": 5},
            hovertext=hover,
            hoverinfo="text",
        )
    figure.add_hline(
        y=PAPER_REUSE,
        line={"color": "#777777", "width": 1, "dash": "dot"},
        annotation_text="the paper's 70 %",
        annotation_position="top right",
    )
    figure.add_vline(x=step, line={"color": SELECTED, "width": 1.5})
    finish(figure, 320, uirevision="sentkv-reuse-steps", legend=True)
    figure.update_layout(title_text="Reuse rate over steps", dragmode=False, legend=_LEGEND)
    figure.update_xaxes(title_text="decode step", range=[-0.5, len(reused) - 0.5])
    figure.update_yaxes(title_text="share of wanted tokens", range=[0, 1.02])
    return figure


def reuse_map(reused: np.ndarray, could: np.ndarray) -> go.Figure:
    """Mean over steps by layer and KV head [L, H_kv], as it was beside what could have been; grey = the layer selects
    nothing."""
    layers, heads = reused.shape
    titles = ("reused", "reusable without truncation")
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.06, subplot_titles=titles)
    for column, (values, title) in enumerate(zip((reused, could), titles, strict=True), 1):
        hover = [
            [f"L{layer} KV{head}: {_number(values[layer, head])} {title}" for head in range(heads)]
            for layer in range(layers)
        ]
        figure.add_heatmap(
            z=values,
            zmin=0,
            zmax=1,
            colorscale="Cividis",
            text=hover,
            hoverinfo="text",
            hoverongaps=False,
            xgap=1,
            ygap=1,
            texttemplate="%{z:.2f}" if values.size <= 80 else None,
            showscale=column == 2,
            row=1,
            col=column,
            colorbar={"title": {"text": "share of wanted tokens", "side": "right"}, "thickness": 12},
        )
        if (missing := np.isnan(values)).any():
            figure.add_heatmap(
                z=np.where(missing, 1.0, np.nan),
                colorscale=[[0, GREY], [1, GREY]],
                showscale=False,
                hoverinfo="skip",
                xgap=1,
                ygap=1,
                row=1,
                col=column,
            )
        every = max(1, heads // 8)
        figure.update_xaxes(
            title_text="KV head",
            tickvals=list(range(0, heads, every)),
            showgrid=False,
            zeroline=False,
            row=1,
            col=column,
        )
    figure.update_yaxes(range=[layers - 0.5, -0.5], dtick=max(1, layers // 16), showgrid=False, zeroline=False)
    figure.update_yaxes(title_text="layer", row=1, col=1)
    finish(figure, 190 + int(np.clip(layers * 26, 160, 520)), uirevision="sentkv-reuse-map")
    figure.update_layout(title_text="Reuse rate by KV head, mean over steps", dragmode=False, margin={"t": 70})
    return figure


def moved_and_ideal(moved: np.ndarray, ideal: np.ndarray) -> go.Figure:
    """Bytes to the device per step [steps], all layers and heads: what had to move, and what truncation moved on
    top."""
    steps = np.arange(len(moved))
    extra = moved - ideal
    figure = go.Figure()
    for name, values, color in (("had to move", ideal, BLUE), ("moved again by truncation", extra, ORANGE)):
        hover = [
            f"step {s}: {si_bytes(float(v))} {name}, {si_bytes(float(m))} in all"
            for s, v, m in zip(steps, values, moved, strict=True)
        ]
        figure.add_bar(
            x=steps,
            y=values,
            name=name,
            marker={"color": color, "line": {"width": 0}},
            hovertext=hover,
            hoverinfo="text",
        )
    finish(figure, 320, uirevision="sentkv-moved", legend=True)
    figure.update_layout(
        title_text="Bytes to device per step", barmode="stack", bargap=0.15, dragmode=False, legend=_LEGEND
    )
    figure.update_xaxes(title_text="decode step", rangemode="tozero")
    figure.update_yaxes(title_text="bytes (B)", rangemode="tozero", tickformat="~s")
    return figure


def attended(parts: np.ndarray, step: int) -> go.Figure:
    """Tokens one reader attended per step [steps, 3]: sinks, open chunk, tokens of closed chunks."""
    steps = np.arange(len(parts))
    figure = go.Figure()
    for i, (name, color) in enumerate((("sinks", SKY), ("open chunk", GREEN), ("closed chunks", BLUE))):
        hover = [f"step {s}: {_number(v)} tokens, {name}" for s, v in zip(steps, parts[:, i], strict=True)]
        figure.add_bar(
            x=steps,
            y=parts[:, i],
            name=name,
            marker={"color": color, "line": {"width": 0}},
            hovertext=hover,
            hoverinfo="text",
        )
    figure.add_vline(x=step, line={"color": SELECTED, "width": 1.5})
    finish(figure, 320, uirevision="sentkv-attended", legend=True)
    figure.update_layout(
        title_text="Tokens attended per step", barmode="stack", bargap=0.15, dragmode=False, legend=_LEGEND
    )
    figure.update_xaxes(title_text="decode step", rangemode="tozero")
    figure.update_yaxes(title_text="tokens", rangemode="tozero")
    return figure


def _number(value: float) -> str:
    return f"{value:.4g}" if np.isfinite(value) else "nothing wanted"
