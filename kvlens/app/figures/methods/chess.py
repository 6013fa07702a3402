"""CHESS: the hierarchy's levels at a reconstruction, uncertainty of pages against thresholds, the share of tokens
attended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from kvlens.app.figures.theme import BLUE, GREY, ORANGE, SKY, VERMILION, finish
from kvlens.text.units import counted

LEVELS = ("grid", "chunk", "page")
UNCERTAIN, DUE = 1, 2
SEPARATED = 100.0
"""an axis is logarithmic when its values are positive and differ by more than this factor"""


@dataclass(frozen=True)
class Level:
    """One level's units at a reconstruction: tokens per unit, scores [u] (NaN: not in the hierarchy), kept [u] (0 or
    1)."""

    name: str
    width: int
    score: np.ndarray
    kept: np.ndarray

    @property
    def members(self) -> int:
        return int(np.isfinite(self.score).sum())


@dataclass(frozen=True)
class Reconstruction:
    """step: the first that attends by it. safe: sink pages, first page of the window, its end. tokens: of the
    context."""

    step: int
    levels: tuple[Level, Level, Level]
    safe: tuple[int, int, int]
    tokens: int


def strips(reconstruction: Reconstruction, question_ranges: Sequence[tuple[int, int]] = ()) -> go.Figure:
    """Three levels over token positions: a band of scores and a band of what was kept each; below, the tokens attended
    and, where known, token ranges [start, stop) that hold what is asked for."""
    figure = go.Figure()
    scores = np.concatenate([level.score[np.isfinite(level.score)] for level in reconstruction.levels])
    lo, hi = (float(scores.min()), float(scores.max())) if len(scores) else (0.0, 1.0)
    for row, level in enumerate(reconstruction.levels):
        edges = np.append(
            np.arange(len(level.score)) * level.width, min(len(level.score) * level.width, reconstruction.tokens)
        )
        hover = [
            (
                f"{level.name} {unit}, tokens {edges[unit]:.0f}–{edges[unit + 1] - 1:.0f}: score {score:.5g}, "
                f"{'kept' if is_kept else 'not kept'}"
            )
            if np.isfinite(score)
            else f"{level.name} {unit}: not in the hierarchy"
            for unit, (score, is_kept) in enumerate(zip(level.score, level.kept, strict=True))
        ]
        if not len(level.score):
            continue
        figure.add_heatmap(
            x=edges,
            y=[-2.4 * row - 0.5, -2.4 * row + 0.5],
            z=[level.score],
            text=[hover],
            hovertemplate="%{text}<extra></extra>",
            coloraxis="coloraxis",
            hoverongaps=False,
        )
        _band(figure, edges, level.kept > 0, -2.4 * row - 1.0, 0.5, ORANGE, hover)
    edges, selected, safe, hover = _attended(reconstruction)
    _band(figure, edges, selected, -7.4, 1.0, ORANGE, hover)
    _band(figure, edges, safe, -7.4, 1.0, SKY, hover)
    for start, stop in question_ranges:
        middle = (start + stop - 1) / 2
        figure.add_scatter(
            x=[middle],
            y=[-8.3],
            mode="markers",
            marker={"symbol": "triangle-up", "size": 9, "color": VERMILION},
            showlegend=False,
            hovertext=f"tokens {start}–{stop - 1} hold what is asked for",
            hoverinfo="text",
        )
    for name, color in (("kept by the hierarchy", ORANGE), ("sinks and window", SKY)):
        figure.add_scatter(
            x=[None], y=[None], mode="markers", marker={"color": color, "symbol": "square", "size": 10}, name=name
        )
    finish(figure, 360, uirevision="chess-strips", legend=True)
    counts = ", ".join(f"{int(level.kept.sum())} of {level.members} {level.name}s" for level in reconstruction.levels)
    when = "at the end of prefill" if reconstruction.step < 0 else f"before step {reconstruction.step}"
    figure.update_layout(
        title_text=f"Reconstruction {when}: kept {counts}",
        dragmode=False,
        margin_l=84,
        legend={"orientation": "h", "y": -0.22, "x": 0},
        coloraxis={
            "colorscale": "Cividis",
            "cmin": lo,
            "cmax": hi if hi > lo else lo + 1,
            "colorbar": {"title": {"text": "score (inner product)", "side": "right"}, "thickness": 12},
        },
    )
    figure.update_xaxes(title_text="token position", range=[0, reconstruction.tokens], showgrid=False, zeroline=False)
    figure.update_yaxes(
        tickvals=[0, -1.0, -2.4, -3.4, -4.8, -5.8, -7.4, *([-8.3] if question_ranges else [])],
        range=[-8.7 if question_ranges else -8.0, 0.6],
        ticktext=["grids", "kept", "chunks", "kept", "pages", "kept", "attended", "asked for"],
        showgrid=False,
        zeroline=False,
    )
    return figure


def _attended(reconstruction: Reconstruction) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Edges of the pages and of the unfinished page, which of them the hierarchy selected, which are attended
    anyway."""
    page = reconstruction.levels[2]
    sinks, window, stop = reconstruction.safe
    edges = np.append(
        np.arange(stop + 1) * page.width, [reconstruction.tokens] if reconstruction.tokens > stop * page.width else []
    )
    units = np.arange(len(edges) - 1)
    safe = (units < sinks) | (units >= window)
    kept_mask = np.zeros(len(units), bool)
    kept_mask[: len(page.kept)] = page.kept[: len(units)] > 0
    words = np.where(safe, "sink or window, always attended", np.where(kept_mask, "attended: kept", "not attended"))
    hover = [f"tokens {a:.0f}–{b - 1:.0f}: {word}" for a, b, word in zip(edges, edges[1:], words, strict=False)]
    return edges, kept_mask & ~safe, safe, hover


def _band(
    figure: go.Figure, edges: np.ndarray, marked: np.ndarray, middle: float, height: float, color: str, hover: list[str]
) -> None:
    """Units that are marked, in one colour; the ground shows where they are not."""
    figure.add_heatmap(
        x=edges,
        y=[middle - height / 2, middle + height / 2],
        z=[np.where(marked, 1.0, np.nan)],
        colorscale=[[0, color], [1, color]],
        showscale=False,
        text=[hover],
        hovertemplate="%{text}<extra></extra>",
        hoverongaps=False,
    )


def uncertainty(
    pages: Sequence[int], entropy: np.ndarray, varentropy: np.ndarray, why: np.ndarray, thresholds: tuple[float, float]
) -> go.Figure:
    """Judged pages [n]: mean entropy against varentropy, thresholds as dashed lines (NaN: none), pages that triggered
    marked."""
    figure = go.Figure()
    kinds = (
        ("reconstructed: uncertain", UNCERTAIN, VERMILION, "x"),
        ("reconstructed: its turn", DUE, ORANGE, "diamond"),
        ("not", 0, BLUE, "circle"),
    )
    judged = np.isfinite(entropy)
    for name, code, color, symbol in kinds:
        positions = np.flatnonzero(judged & (why == code)).tolist()
        if not positions:
            continue
        hover = [
            f"page {pages[i]}: entropy {entropy[i]:.4g} nats, varentropy {varentropy[i]:.4g} nats², {name}"
            for i in positions
        ]
        figure.add_scatter(
            x=entropy[positions],
            y=varentropy[positions],
            mode="markers",
            name=f"{name} ({len(positions)})",
            hovertext=hover,
            hoverinfo="text",
            marker={"color": color, "symbol": symbol, "size": 9},
        )
    for value, add in zip(thresholds, (figure.add_vline, figure.add_hline), strict=True):
        if np.isfinite(value):
            add(value, line={"color": GREY, "dash": "dash"})
    finish(figure, 360, uirevision="chess-uncertainty", legend=True)
    figure.update_layout(
        title_text=f"{counted(int(judged.sum()), 'page')} of generated tokens",
        dragmode=False,
        hovermode="closest",
        legend={"orientation": "h", "y": -0.25, "x": 0},
    )
    for values, limit, update, title in (
        (entropy[judged], thresholds[0], figure.update_xaxes, "mean entropy (nats)"),
        (varentropy[judged], thresholds[1], figure.update_yaxes, "varentropy (nats²)"),
    ):
        shown_values = np.append(values, limit if np.isfinite(limit) else [])
        wide = (
            bool(len(shown_values)) and shown_values.min() > 0 and shown_values.max() / shown_values.min() > SEPARATED
        )
        update(title_text=f"{title}, log scale" if wide else title, type="log" if wide else "linear")
        if not wide:
            update(rangemode="tozero")
    return figure


def attended_share(share: np.ndarray, rebuilt: Sequence[int]) -> go.Figure:
    """Share of the tokens in memory that a step attends [steps] (NaN = not recorded), dotted lines where a
    reconstruction took effect."""
    steps = np.arange(len(share))
    hover = [f"step {step}: {value:.2%} attended" for step, value in zip(steps, share, strict=True)]
    figure = go.Figure(
        go.Scatter(
            x=steps,
            y=share,
            mode="lines+markers",
            line={"color": BLUE, "width": 1.8},
            marker={"size": 5},
            connectgaps=False,
            hovertext=hover,
            hoverinfo="text",
        )
    )
    for step in rebuilt:
        figure.add_vline(step, line={"color": GREY, "dash": "dot", "width": 1})
    finish(figure, 360, uirevision="chess-share")
    inside = sum(step >= 0 for step in rebuilt)
    figure.update_layout(
        title_text=f"Tokens attended; {counted(inside, 'reconstruction')} while decoding, dotted",
        dragmode=False,
        hovermode="closest",
    )
    figure.update_xaxes(title_text="decode step", range=[-0.5, max(0.5, len(share) - 0.5)])
    figure.update_yaxes(title_text="share of tokens in memory", tickformat=".1%", rangemode="tozero")
    return figure
