"""CompressKV's figures: which heads retrieve, what each layer may keep, which prompt tokens each layer kept.

L layers, Hq query heads, n prompt tokens. NaN = not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlens.app.figures.heads import TEXT_CELLS
from kvlens.app.figures.theme import BLUE, GREY, ORANGE, finish
from kvlens.app.figures.tokenstrip import MARK, shown_token
from kvlens.recording.metrics import head_label

#: A map of more cells than this joins neighbouring positions.
CELLS = 300_000


def head_maps(
    maps: Sequence[tuple[str, np.ndarray]], group: int, outlined: np.ndarray, unit: str, same_scale: bool
) -> go.Figure:
    """Score maps [L, Hq] side by side, each with its title; `outlined` bool [L, Hq] are outlined in all of them.
    same_scale: one colour range for all, else each its own. `unit`: of the scores, beside the colour bars."""
    layers, heads = maps[0][1].shape
    figure = make_subplots(
        1, len(maps), subplot_titles=[title for title, _ in maps], shared_yaxes=True, horizontal_spacing=0.11
    )
    finite = [values[np.isfinite(values)] for _, values in maps]
    top = max((float(part.max(initial=0)) for part in finite), default=0)
    for column, (title, values) in enumerate(maps, 1):
        column_top = float(finite[column - 1].max(initial=0))
        hover = [
            [
                f"{title}<br>{head_label(layer, head, group)}: {_score(values[layer, head], unit)}"
                + ("<br>chose the tokens" if outlined[layer, head] else "")
                for head in range(heads)
            ]
            for layer in range(layers)
        ]
        x = 1.0 if column == len(maps) else figure.get_subplot(1, column).xaxis.domain[1]
        figure.add_heatmap(
            z=values,
            zmin=0,
            zmax=(top if same_scale else column_top) or 1.0,
            colorscale="Cividis",
            text=hover,
            hoverinfo="text",
            xgap=1,
            ygap=1,
            texttemplate="%{z:.2~g}" if values.size <= TEXT_CELLS else None,
            textfont={"size": 10},
            hoverongaps=False,
            colorbar={"title": {"text": unit, "side": "right"}, "thickness": 10, "x": x + 0.005, "xanchor": "left"},
            row=1,
            col=column,
        )
        for layer, head in np.argwhere(outlined):
            figure.add_shape(
                type="rect",
                x0=head - 0.47,
                x1=head + 0.47,
                y0=layer - 0.45,
                y1=layer + 0.45,
                line={"color": MARK, "width": 2},
                row=1,
                col=column,
            )
        shown = list(range(0, heads, max(1, heads // 8)))
        figure.update_xaxes(
            title_text="query head over its KV head",
            tickvals=shown,
            ticktext=[f"Q{q}<br>KV{q // group}" for q in shown],
            tickangle=0,
            showgrid=False,
            zeroline=False,
            row=1,
            col=column,
        )
    every = max(1, layers // 16)
    figure.update_yaxes(
        range=[layers - 0.5, -0.5], tickvals=list(range(0, layers, every)), showgrid=False, zeroline=False
    )
    figure.update_yaxes(title_text="layer", row=1, col=1)
    finish(figure, 180 + int(np.clip(layers * 30, 180, 560)), uirevision=f"compresskv-heads-{unit}")
    figure.update_layout(dragmode=False, margin={"r": 80, "t": 40, "b": 70})
    return figure


def layer_budgets(tokens: np.ndarray, errors: np.ndarray | None, floor: int, most: int) -> go.Figure:
    """Prompt tokens kept per layer [L] as bars, with the floor m, the ceiling M and the layers' average; above them
    each layer's share of the compression error (None: not recorded, and the panel is left out)."""
    layers = list(range(len(tokens)))
    rows = 1 if errors is None else 2
    figure = make_subplots(
        rows, 1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[1.0] if rows == 1 else [0.35, 0.65]
    )
    if errors is not None:
        hover = [f"layer {layer}: {value:.3f} of the error" for layer, value in zip(layers, errors, strict=True)]
        figure.add_bar(x=layers, y=errors, marker_color=ORANGE, hovertext=hover, hoverinfo="text", row=1, col=1)
        figure.update_yaxes(title_text="error (share)", rangemode="tozero", nticks=4, row=1, col=1)
    hover = [f"layer {layer}: {value:.0f} prompt tokens" for layer, value in zip(layers, tokens, strict=True)]
    figure.add_bar(x=layers, y=tokens, marker_color=BLUE, hovertext=hover, hoverinfo="text", row=rows, col=1)
    lines = [(floor, "floor", "dash"), (most, "ceiling", "dash"), (float(tokens.mean()), "average", "dot")]
    for value, name, dash in lines:
        figure.add_hline(
            y=value,
            line={"color": MARK if dash == "dash" else GREY, "width": 1.5, "dash": dash},
            row=rows,
            col=1,
            annotation_text=f"{name} {value:.4g}",
            annotation_position="right",
            annotation_font_size=11,
        )
    figure.update_yaxes(
        title_text="prompt tokens kept", range=[0, 1.12 * max(most, float(tokens.max()), 1.0)], row=rows, col=1
    )
    figure.update_xaxes(title_text="layer", dtick=max(1, len(layers) // 16), row=rows, col=1)
    finish(figure, 430 if rows == 2 else 340, uirevision="compresskv-budgets")
    figure.update_layout(dragmode=False, bargap=0.3, margin={"r": 110})
    return figure


def kept_map(
    retained: np.ndarray, needles: Sequence[tuple[int, int]], texts: Sequence[str], window_from: int
) -> go.Figure:
    """Draw which prompt tokens each layer retained. retained: [L, n] of 0 and 1; needles: token ranges [start, end) to
    mark; texts: of each token; window_from: first position of the observation window. Long prompts show the share kept
    of neighbouring positions."""
    layers, n = retained.shape
    width = -(-layers * n // CELLS)
    starts = list(range(0, n, width))
    values = np.add.reduceat(retained, starts, axis=1) / np.diff([*starts, n])
    where = [_place(a, min(a + width, n), texts) for a in starts]
    if width == 1:
        hover = [
            [f"layer {row}, {place}: {'kept' if values[row, i] else 'dropped'}" for i, place in enumerate(where)]
            for row in range(layers)
        ]
    else:
        hover = [
            [f"layer {row}, {place}: {values[row, i]:.0%} kept" for i, place in enumerate(where)]
            for row in range(layers)
        ]
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=[a + (width - 1) / 2 for a in starts],
            zmin=0,
            zmax=1,
            colorscale="Cividis",
            text=hover,
            hoverinfo="text",
            colorbar={"title": {"text": "kept (share)", "side": "right"}, "thickness": 12, "tickvals": [0, 0.5, 1]},
        )
    )
    for start, end in needles:
        figure.add_shape(
            type="rect", x0=start - 0.5, x1=end - 0.5, y0=-0.5, y1=layers - 0.5, line={"color": MARK, "width": 1.5}
        )
        figure.add_annotation(
            x=(start + end - 1) / 2, y=-0.5, text="needle", showarrow=False, yanchor="bottom", font={"color": MARK}
        )
    if window_from < n:
        figure.add_annotation(x=n - 1, y=-0.5, text="window", showarrow=False, yanchor="bottom", xanchor="right")
    joined = f", {width} neighbouring positions joined" if width > 1 else ""
    finish(figure, 170 + int(np.clip(layers * 22, 130, 480)), uirevision="compresskv-kept")
    figure.update_layout(title_text=f"Prompt tokens kept, by layer{joined}", dragmode="zoom")
    figure.update_xaxes(title_text="prompt position (tokens)", showgrid=False, zeroline=False, range=[-0.5, n - 0.5])
    figure.update_yaxes(
        title_text="layer",
        range=[layers - 0.5, -0.9],
        tickvals=list(range(0, layers, max(1, layers // 16))),
        showgrid=False,
        zeroline=False,
        fixedrange=True,
    )
    return figure


def _score(value: float, unit: str) -> str:
    return f"{value:.4g} ({unit})" if np.isfinite(value) else "not recorded"


def _place(start: int, end: int, texts: Sequence[str]) -> str:
    return f"position {start}, {shown_token(texts[start])}" if end == start + 1 else f"positions {start}–{end - 1}"
