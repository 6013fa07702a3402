"""How a span looks wherever it is drawn: its colour by state or by a number, its legend, its hover."""

from __future__ import annotations

import html

import numpy as np
import pandas as pd

from kvlens.app.figures.states import STATE_COLORS
from kvlens.app.figures.theme import GREY
from kvlens.rows import SPAN_STATES
from kvlens.text import words

#: How the legend calls spans without a value; heads list their strongest spans only.
UNKNOWN = "not listed or not recorded"


def shown(text: str, limit: int = 60) -> str:
    """Text of a token or span for a hover: one line, no markup."""
    flat = text.replace("\n", "⏎")
    return html.escape(flat if len(flat) <= limit else f"{flat[: limit // 2]} … {flat[-limit // 2 :]}", quote=False)


def coloraxis(spans: pd.DataFrame, column: str, label: str) -> dict[str, object] | None:
    """One colour scale for all bars or points: shares from 0, everything else over its own range. None where nothing
    has a number."""
    values = np.zeros(0) if column == "state" else spans[column].to_numpy(np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    lowest = 0.0 if column in ("mass", "reference", "own", "regret") else float(values.min())
    highest = float(values.max(initial=lowest))
    bar = {"title": {"text": label, "side": "right"}, "thickness": 12, "len": 0.9, "y": 0.45}
    return {
        "colorscale": "Cividis",
        "cmin": lowest,
        "cmax": highest if highest > lowest else lowest + 1.0,
        "colorbar": bar,
    }


def groups(spans: pd.DataFrame, column: str) -> list[tuple[str, pd.DataFrame, object]]:
    """The spans by how they are coloured: (legend entry, rows, marker colour). Numbers go over the figure's colour
    axis; grey where there is none."""
    if column == "state":
        entries: list[tuple[str, pd.DataFrame, object]] = [
            (words.state(state), spans[spans["state"] == state], STATE_COLORS[state]) for state in SPAN_STATES
        ]
        missing = spans[~spans["state"].isin(SPAN_STATES)]
    else:
        recorded = spans[column].notna()
        entries = [("recorded", spans[recorded], spans.loc[recorded, column].tolist())]
        missing = spans[~recorded]
    return [entry for entry in [*entries, (UNKNOWN, missing, GREY)] if len(entry[1])]


def span_hover(row: object, column: str, label: str) -> str:
    """A row of the table of spans: its number, tokens, the value it is coloured by, its text."""
    get = row.get  # type: ignore[attr-defined]
    start, end = int(get("tok_start")), int(get("tok_end")) - 1
    value = get(column)
    missing = value is None or value != value
    value = words.STATES.get(value, value) if column == "state" else value
    number = value if column in ("state", "tok_start") else f"{value:.4g}" if not missing else ""
    where = f"tokens {start}–{end}" if end > start else f"token {start}"
    return (
        f"span {int(get('span'))} ({html.escape(str(get('kind')), quote=False)}), {where}<br>"
        f"{label}: {UNKNOWN if missing else number}<br>{shown(str(get('text')))}"
    )
