"""Where each span lay at each step for one KV head: a map of spans over steps, in the player's colours."""

from __future__ import annotations

import html

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.theme import BROWN, GREEN, HOST, ORANGE, PURPLE, RESIDENT, SELECTED, finish, whole_ticks
from kvlens.rows import SPAN_STATES
from kvlens.text.words import STATE_MEANINGS, STATES

#: As in ui/player/color.js; tests hold the two together.
STATE_COLORS = {
    "resident": RESIDENT,
    "coarse": ORANGE,
    "reconstructed": GREEN,
    "cold": HOST,
    "evicted": PURPLE,
    "partial": "#F0E442",
    "quantised": BROWN,
    "partly_recalled": "#7B7FD4",
    "rewritten": "#C4476B",
}
#: A map holds at most this many cells and rows.
CELLS, ROWS = 200_000, 120


def rows_at_once(n_steps: int) -> int:
    """How many spans one map shows."""
    return max(20, min(ROWS, CELLS // max(1, n_steps)))


def state_grid(spans: pd.DataFrame, changes: pd.DataFrame, n_steps: int) -> np.ndarray:
    """int8 [spans, steps]: index into SPAN_STATES at the end of each step, -1 where the span was not there yet or no
    longer.

    `spans` (columns span, died_step) gives the rows; `changes` (step, span, state) is ordered by step, birth included
    (step -1: the end of prefill)."""
    grid = np.full((len(spans), n_steps), -1, np.int8)
    row_of = {int(span): row for row, span in enumerate(spans["span"])}
    for step, span, state in zip(changes["step"], changes["span"], changes["state"], strict=True):
        if int(span) in row_of and state in SPAN_STATES:
            grid[row_of[int(span)], max(0, int(step)) :] = SPAN_STATES.index(state)
    for row, died in enumerate(spans["died_step"]):
        if died == died and died is not None:
            grid[row, max(0, int(died)) :] = -1
    return grid


def span_label(span: object) -> str:
    """A row of the span table on one line of hover: number, kind, tokens at birth, why it is there."""
    get = span.get  # type: ignore[attr-defined]
    reason = html.escape(" ".join(str(get("reason") or "no reason recorded").split()), quote=False)
    if len(reason) > 90:
        cut = reason.rfind(" ", 0, 90)
        cut = cut if cut > 0 else 90
        reason = f"{reason[:cut]}<br>{reason[cut + 1 :]}"
    kind = html.escape(str(get("kind")), quote=False)
    start, last = int(get("tok_start")), int(get("tok_end")) - 1
    tokens = f"token {start}" if start == last else f"tokens {start}–{last}"
    return f"span {int(get('span'))} ({kind}), {tokens}<br>{reason}"


def state_map(spans: pd.DataFrame, grid: np.ndarray, title: str, step: int, selected: int | None) -> go.Figure:
    """Map of `grid` [spans, steps] with one row per row of `spans` (span, kind, tok_start, tok_end, reason), one colour
    and legend entry per state that occurs. A line marks `step`, a frame the selected span."""
    figure = go.Figure()
    names = [span_label(row) for _, row in spans.iterrows()]
    steps = np.arange(grid.shape[1])
    for code, state in enumerate(SPAN_STATES):
        here = grid == code
        if here.any():
            color = STATE_COLORS[state]
            figure.add_heatmap(
                x=steps,
                y=names,
                z=np.where(here, np.float32(1), np.float32(np.nan)),
                colorscale=[[0, color], [1, color]],
                showscale=False,
                showlegend=True,
                name=f"{STATES[state]}: {STATE_MEANINGS[state]}",
                hoverongaps=False,
                ygap=1 if len(names) <= 60 else 0,
                hovertemplate=f"step %{{x}}: <b>{STATES[state]}</b><br>%{{y}}<extra></extra>",
            )
    height = 170 + int(np.clip(len(names) * 10, 180, 640))
    finish(figure, height, uirevision=f"states-{title}", legend=True)
    every = max(1, -(-len(names) // 30))
    shown = list(range(0, len(names), every))
    starts, ids = spans["tok_start"].tolist(), spans["span"].tolist()
    figure.update_layout(
        title_text=title,
        dragmode=False,
        margin={"l": 118},
        legend={"orientation": "h", "y": -60 / (height - 96), "yanchor": "top"},
    )
    figure.update_xaxes(
        title_text="decode step",
        range=[-0.5, max(0.5, grid.shape[1] - 0.5)],
        showgrid=False,
        zeroline=False,
        **whole_ticks(grid.shape[1]),
    )
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=names,
        range=[len(names) - 0.5, -0.5],
        tickmode="array",
        tickvals=[names[i] for i in shown],
        ticktext=[f"#{int(ids[i])} at {int(starts[i])}" for i in shown],
        tickfont={"size": 10},
        title_text="span, at its first token",
        showgrid=False,
        zeroline=False,
    )
    figure.add_vline(x=step, line={"color": SELECTED, "width": 2})
    if selected is not None and selected in ids:
        row = ids.index(selected)
        figure.add_shape(
            type="rect",
            x0=-0.5,
            x1=grid.shape[1] - 0.5,
            y0=row - 0.5,
            y1=row + 0.5,
            line={"color": SELECTED, "width": 2},
        )
    return figure
