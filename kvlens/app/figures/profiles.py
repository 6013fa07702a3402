"""Values of thousands of spans along the text, as lines and bands: a browser draws one path where a mark for each span
would be thousands.

Spans come as `starts` and `stops` (tokens) in the order of the text; a value is drawn over the tokens of its span.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

#: More spans than this are drawn as a line, fewer as a mark each.
MOST_MARKS = 400


def stretches(starts: np.ndarray, stops: np.ndarray, is_known: np.ndarray) -> list[np.ndarray]:
    """Return the indices of spans that follow one another without a gap and have a value, a stretch per array."""
    if not len(starts):
        return []
    breaks = np.flatnonzero((starts[1:] != stops[:-1]) | (is_known[1:] != is_known[:-1])) + 1
    return [part for part in np.split(np.arange(len(starts)), breaks) if is_known[part[0]]]


def add_line(
    figure: go.Figure,
    starts: np.ndarray,
    stops: np.ndarray,
    values: np.ndarray,
    hover: Sequence[str],
    name: str,
    color: str,
) -> None:
    """Draw `values`, a step of a line per span; NaN leaves a gap. hover: a text per span; empty: none."""
    x: list[float] = []
    y: list[float] = []
    texts: list[str] = []
    for part in stretches(starts, stops, np.isfinite(values)):
        last = int(part[-1])
        x += [*starts[part].tolist(), float(stops[last]), np.nan]
        y += [*values[part].tolist(), float(values[last]), np.nan]
        texts += [hover[i] for i in (*part.tolist(), last, last)] if hover else []
    figure.add_scatter(
        x=np.array(x),
        y=np.array(y),
        mode="lines",
        name=name,
        legendgroup=name,
        line={"color": color, "width": 1.5, "shape": "hv"},
        hovertext=texts or None,
        hoverinfo="text" if hover else "skip",
    )


def add_band(
    figure: go.Figure,
    starts: np.ndarray,
    stops: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    name: str,
    color: str,
    *,
    opacity: float = 1.0,
) -> None:
    """Fill between `low` and `high` of every span; NaN in either leaves a gap. The legend's entry is that of the line
    `name`, and hides both."""
    xs, ys, gap = [np.empty(0)], [np.empty(0)], np.array([np.nan])
    for part in stretches(starts, stops, np.isfinite(low) & np.isfinite(high)):
        edges = np.stack([starts[part], stops[part]], 1).ravel()
        xs += [edges, edges[::-1], gap]
        ys += [np.repeat(high[part], 2), np.repeat(low[part], 2)[::-1], gap]
    figure.add_scatter(
        x=np.concatenate(xs),
        y=np.concatenate(ys),
        mode="lines",
        fill="toself",
        fillcolor=color,
        opacity=opacity,
        line={"color": color, "width": 0},
        hoverinfo="skip",
        legendgroup=name,
        showlegend=False,
    )
