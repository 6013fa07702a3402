"""SeKV's figures: where and when spans are expanded, how they lie in host memory, how a KV head ranked them at a step.

Spans come as a table with one row per span (`span`, `tok_start`, `tokens` and what each function names); KV heads are
those of all layers.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.profiles import MOST_MARKS, add_band, add_line
from kvlens.app.figures.theme import BLUE, GREEN, GREY, ORANGE, SELECTED, SKY, finish
from kvlens.recording.metrics import head_label
from kvlens.text.units import si_bytes

KEYS, VALUES = BLUE, ORANGE
MOST_CELLS = 150_000
"""cells of a map over steps; a run with more shows means over the query heads of a KV head, or of a layer"""


def zoom_over_steps(cube: np.ndarray, group: int, selected: tuple[int, int], step: int) -> go.Figure:
    """Zoom rate [steps, L, Hq] as a map: a column per decode step, a row per query head, layers apart; NaN (grey) = not
    recorded. Beyond MOST_CELLS a row is the mean of a KV head's or of a layer's query heads."""
    q_heads = cube.shape[2]
    size = next((size for size in (1, group) if cube.size // size <= MOST_CELLS), q_heads)
    cube = _mean_of_heads(cube, size)
    steps, layers, heads = cube.shape
    values = cube.reshape(steps, layers * heads).T
    names = [_row_label(row // heads, row % heads, size, group, q_heads) for row in range(layers * heads)]
    top = float(np.nanmax(values, initial=0.0)) if np.isfinite(values).any() else 0.0
    figure = go.Figure(
        go.Heatmap(
            z=values.astype(np.float32),
            y=names,
            zmin=0,
            zmax=top or 1.0,
            colorscale="Cividis",
            hovertemplate="step %{x}, %{y}: %{z:.3f}<extra></extra>",
            hoverongaps=False,
            colorbar={"title": {"text": "share of spans", "side": "right"}, "thickness": 12},
        )
    )
    if (missing := np.isnan(values)).any():
        figure.add_heatmap(
            z=np.where(missing, 1.0, np.nan).astype(np.float32),
            y=names,
            colorscale=[[0, GREY], [1, GREY]],
            showscale=False,
            hoverinfo="skip",
        )
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": "#ffffff", "width": 1.5}}
    borders = [layer * heads - 0.5 for layer in range(1, layers)]
    figure.update_layout(shapes=[{**across, "y0": border, "y1": border} for border in borders])
    row = selected[0] * heads + selected[1] // size
    figure.add_shape(
        type="rect", x0=-0.5, x1=steps - 0.5, y0=row - 0.5, y1=row + 0.5, line={"color": SELECTED, "width": 1.5}
    )
    figure.add_vline(x=step, line={"color": SELECTED, "width": 1.5})
    finish(figure, 190 + int(np.clip(layers * heads * 5, 220, 460)), uirevision="sekv-zoom-steps")
    figure.update_layout(title_text="Zoom rate over steps", dragmode=False)
    every = max(1, layers // 16)
    figure.update_yaxes(
        title_text={1: "query heads, by layer", q_heads: "layers"}.get(size, "KV heads, by layer"),
        range=[layers * heads - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
        title_standoff=34,
        tickvals=[],  # on a tick Plotly's hover shows the text of the tick in place of the row's name
    )
    beside = {"xref": "paper", "x": 0, "xanchor": "right", "xshift": -4, "showarrow": False}
    for layer in range(0, layers, every):
        figure.add_annotation(text=f"L{layer}", y=layer * heads + (heads - 1) / 2, **beside)
    figure.update_xaxes(
        title_text="decode step",
        range=[-0.5, steps - 0.5],
        showgrid=False,
        zeroline=False,
        dtick=1 if steps <= 24 else None,
    )
    return figure


def rank_histogram(rank_k: np.ndarray, rank_v: np.ndarray, most: int | None) -> go.Figure:
    """How many (span, layer, KV head) have which rank, keys beside values. most: R_max, marked by a line."""
    figure = go.Figure()
    for name, ranks, color in (("keys", rank_k, KEYS), ("values", rank_v, VALUES)):
        distinct_ranks, counts = np.unique(ranks[np.isfinite(ranks)].astype(int), return_counts=True)
        share = counts / max(1, counts.sum())
        hover = [f"rank {r}: {n} {name} ({s:.0%})" for r, n, s in zip(distinct_ranks, counts, share, strict=True)]
        figure.add_bar(
            x=distinct_ranks,
            y=counts,
            name=name,
            marker={"color": color, "line": {"width": 0}},
            hovertext=hover,
            hoverinfo="text",
        )
    if most is not None:
        figure.add_vline(x=most + 0.5, line={"color": SELECTED, "width": 1.5, "dash": "dot"})
        figure.add_annotation(
            x=most + 0.5, y=1, yref="paper", yanchor="bottom", text=f"R_max = {most}", showarrow=False, xanchor="right"
        )
    finish(figure, 300, uirevision="sekv-ranks", legend=True)
    figure.update_layout(
        title_text="Rank of a span's keys and values", barmode="group", bargap=0.15, dragmode=False, legend=_LEGEND
    )
    largest = max([0.0 if most is None else float(most), *rank_k[np.isfinite(rank_k)], *rank_v[np.isfinite(rank_v)]])
    figure.update_xaxes(title_text="rank (components kept)", range=[0.4, largest + 0.9])
    figure.update_yaxes(title_text="spans × KV heads", rangemode="tozero")
    return figure


def per_span(table: pd.DataFrame, columns: dict[str, str], title: str, unit: str) -> go.Figure:
    """Means over KV heads at each span's place in the text, with the range over KV heads; gaps where nothing was
    recorded. A mark per span, or a line and a band where spans are more than `MOST_MARKS`.

    columns: label -> column; of a column c the table has c, c_min and c_max."""
    figure = go.Figure()
    starts, tokens = table["tok_start"].to_numpy(), table["tokens"].to_numpy()
    for (label, column), color, shift in zip(columns.items(), (KEYS, VALUES, GREEN, SKY), (-1, 1, -2, 2), strict=False):
        mean, low, high = (table[name].to_numpy(np.float64) for name in (column, f"{column}_min", f"{column}_max"))
        hover = [
            f"span {span}, tokens {a}–{a + n - 1}: {label} {m:.3g} {unit}, {lo:.3g} to {hi:.3g} over KV heads"
            for span, a, n, m, lo, hi in zip(table["span"], starts, tokens, mean, low, high, strict=True)
        ]
        if len(table) > MOST_MARKS:
            add_band(figure, starts, starts + tokens, low, high, label, color, opacity=0.25)
            add_line(figure, starts, starts + tokens, mean, hover, label, color)
            continue
        figure.add_scatter(
            x=starts + tokens / 2 + 2 * shift,
            y=mean,
            mode="markers",
            name=label,
            marker={"color": color, "size": 7},
            hovertext=hover,
            hoverinfo="text",
            error_y={
                "type": "data",
                "array": high - mean,
                "arrayminus": mean - low,
                "color": color,
                "thickness": 1,
                "width": 0,
            },
        )
    finish(figure, 300, uirevision=f"sekv-{title}", legend=True)
    figure.update_layout(title_text=title, dragmode=False, legend=_LEGEND)
    where = "" if len(table) > MOST_MARKS else ", middle of the span"
    figure.update_xaxes(title_text=f"position in the text (tokens){where}")
    figure.update_yaxes(title_text=unit, rangemode="tozero")
    return figure


def span_bytes(table: pd.DataFrame) -> go.Figure:
    """Bytes of each span in host memory, all layers and KV heads, drawn over the tokens it covers: as factors and raw,
    stacked, against its exact keys and values. Columns: factor_bytes, raw_form_bytes, exact_bytes."""
    figure = go.Figure()
    starts, tokens, exact = (table[name].to_numpy() for name in ("tok_start", "tokens", "exact_bytes"))
    below = np.zeros(len(table))
    for column, label, color in (("factor_bytes", "as factors", BLUE), ("raw_form_bytes", "raw", ORANGE)):
        held = table[column].to_numpy()
        hover = [
            f"span {span}, {n} tokens: {si_bytes(size)} {label}, exact {si_bytes(whole)}"
            for span, n, size, whole in zip(table["span"], tokens, held.tolist(), exact.tolist(), strict=True)
        ]
        if len(table) > MOST_MARKS:
            add_band(figure, starts, starts + tokens, below, below + held, label, color)
            below = below + held
            top = np.where(held > 0, below, np.nan)
            add_line(figure, starts, starts + tokens, top, hover, label, color)
            continue
        figure.add_bar(
            x=starts,
            y=held,
            width=tokens,
            offset=0,
            name=label,
            hovertext=hover,
            hoverinfo="text",
            marker={"color": color, "line": {"width": 0.5, "color": "#ffffff"}},
        )
    name = "exact keys and values"
    if len(table) > MOST_MARKS:
        add_line(figure, starts, starts + tokens, exact.astype(np.float64), (), name, SELECTED)
    else:
        figure.add_scatter(
            x=[x for a, n in zip(starts.tolist(), tokens.tolist(), strict=True) for x in (a, a + n, None)],
            y=[y for whole in exact.tolist() for y in (whole, whole, None)],
            mode="lines",
            name=name,
            line={"color": SELECTED, "width": 2},
            hoverinfo="skip",
        )
    finish(figure, 320, uirevision="sekv-bytes", legend=True)
    figure.update_layout(title_text="Bytes of spans in host memory", barmode="stack", dragmode=False, legend=_LEGEND)
    figure.update_xaxes(title_text="position in the text (tokens)")
    figure.update_yaxes(title_text="bytes", tickformat="~s", ticksuffix="B", rangemode="tozero")
    return figure


_LEGEND = {"orientation": "h", "y": -0.3, "yanchor": "top"}


def _mean_of_heads(cube: np.ndarray, size: int) -> np.ndarray:
    """Return the mean [steps, L, Hq // size] over `size` neighbouring query heads; NaN where none was recorded."""
    if size == 1:
        return cube
    parts = cube.reshape(*cube.shape[:2], -1, size)
    finite = np.isfinite(parts)
    sums, counts = np.where(finite, parts, 0.0).sum(-1), finite.sum(-1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _row_label(layer: int, row: int, size: int, group: int, q_heads: int) -> str:
    if size == 1:
        return head_label(layer, row, group)
    return f"L{layer}, mean of its query heads" if size == q_heads else f"L{layer} KV{row}, mean of its query heads"
