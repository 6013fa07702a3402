"""The cells of a grid of prompts by lengths and depths: colours, text and edges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from kvlens.text.units import counted, si_bytes

#: Red where answers are lost, blue where they are right; every cell also carries its number.
RED_TO_BLUE = ((0.0, "#b2182b"), (0.25, "#f4a582"), (0.5, "#f7f7f7"), (0.75, "#92c5de"), (1.0, "#2166ac"))


#: Cells of fewer prompts are drawn with a dotted edge and count: a share of three prompts says no more than they do.
FEW = 5


def color_axis(difference: bool) -> dict[str, Any]:
    title = "exact match<br>minus full KV" if difference else "exact match"
    return {
        "colorscale": RED_TO_BLUE,
        "cmin": -1 if difference else 0,
        "cmax": 1,
        "colorbar": {
            "title": {"text": title, "side": "top"},
            "thickness": 12,
            "tickformat": "+.1f" if difference else ".1f",
            "x": 1.03,
        },
    }


def cell_words(cell: pd.Series, difference: bool) -> str:
    """What a cell says: '2/3' of few prompts, else the share; '' where there is none."""
    value, n = float(cell["value"]), int(cell["n"])
    if np.isnan(value):
        return ""
    if difference:
        return f"{value:+.2f}"
    return f"{round(value * n)}/{n}" if 0 < n < FEW else f"{value:.2f}"


def white_text(shares: np.ndarray) -> np.ndarray:
    """Where white is easier to read than black on the colour of `shares` (places on the colour scale, 0..1); False
    where NaN."""
    stops = [place for place, _ in RED_TO_BLUE]
    channels = [[int(color[position : position + 2], 16) / 255 for _, color in RED_TO_BLUE] for position in (1, 3, 5)]
    linear = [((np.interp(shares, stops, channel) + 0.055) / 1.055) ** 2.4 for channel in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return np.nan_to_num(luminance, nan=1.0) < 0.179


def cell_edge(x: int, y: int, axes: tuple[str, str], line: dict[str, Any]) -> dict[str, Any]:
    """A rectangle around a cell. Shapes are put into the layout all at once: one by one, hundreds of them take
    seconds."""
    return {
        "type": "rect",
        "x0": x - 0.48,
        "x1": x + 0.48,
        "y0": y - 0.48,
        "y1": y + 0.48,
        "line": line,
        "xref": axes[0],
        "yref": axes[1],
    }


def hover_text(target: list[Any], cell: pd.Series | None, titles: dict[str, str]) -> str:
    name, budget, length, depth = target
    lines = [
        f"{titles.get(name, name)}, {f'budget {budget}' if budget else 'no limit'}",
        f"{length:,} tokens, depth {depth:.0%}",
    ]
    if cell is None or not (cell["n"] or cell["infeasible"] or cell["refused"]):
        return "<br>".join([*lines, "not run"])
    if cell["n"]:
        lines.append(f"exact {cell['exact']:.2f} (95 % {cell['low']:.2f} to {cell['high']:.2f}), n = {int(cell['n'])}")
        if cell["full"] == cell["full"]:
            lines.append(f"full KV on the same prompts: {cell['full']:.2f}")
        lines.append(
            f"coverage {cell['coverage']:.2f}, attended {cell['attended_share']:.1%}, resident "
            f"{cell['resident_share']:.1%}"
        )
        if pd.notna(cell["read_share"]):
            lines.append(f"reads {si_bytes(cell['read_bytes_per_step'])} per step, {cell['read_share']:.1%} of full KV")
        lines.append(f"to device {si_bytes(cell['h2d_bytes_per_step'])} per step")
    if cell["infeasible"]:
        # up: to the nearest it could read as the very budget that is too small
        least = math.ceil(cell["smallest_feasible"] * 1000 - 1e-6) / 1000
        lines.append(f"{counted(cell['infeasible'], 'prompt')} infeasible: needs {least:.1%} of full KV")
    if cell["refused"]:
        lines.append(f"{counted(cell['refused'], 'prompt')} refused by the model")
    return "<br>".join([*lines, "click: its trials"])
