"""The ROC curves of foreseeing signals as an SVG picture for the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

SIDE, LEFT, TOP = 360, 52, 18
"""pixels: of the square, and of the room beside and above it"""
ROW = 38
"""pixels of a line of the key"""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""of Okabe and Ito (2008), told apart with all colour visions"""


def picture(curves: pd.DataFrame, areas: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture.

    Args:
        curves: of `kvlens.ledger.foresight.roc`.
        areas: of `kvlens.ledger.foresight.foresight`.
    """
    width, height = LEFT + SIDE + 360, TOP + SIDE + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13" role="img">',
        "<title>ROC curves: which signal of a step foresees that its token is lost</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#767676"/>',
        f'<path d="M{_x(0)} {_y(0)}L{_x(1)} {_y(1)}" stroke="#767676" stroke-dasharray="4 4"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        parts.append(_text(_x(share), TOP + SIDE + 18, f"{share:.0%}", "middle"))
        parts.append(_text(LEFT - 8, _y(share) + 4, f"{share:.0%}", "end"))
    parts.append(_text(_x(0.5), TOP + SIDE + 40, "kept tokens called lost", "middle"))
    turned = f'transform="rotate(-90 14 {_y(0.5)})"'
    parts.append(_text(14, _y(0.5), "lost tokens called lost", "middle", turned))
    row_of = {row["signal"]: row for row in areas}
    for place, (signal, points) in enumerate(curves.groupby("signal", sort=False)):
        color, y = COLORS[place % len(COLORS)], TOP + 20 + place * ROW
        pairs = zip(points["alarms"].tolist(), points["caught"].tolist(), strict=True)
        places = (f"{_x(alarms)} {_y(caught)}" for alarms, caught in pairs)
        parts.append(f'<path d="M{"L".join(places)}" fill="none" stroke="{color}" stroke-width="2"/>')
        row, x = row_of[str(signal)], LEFT + SIDE + 24
        parts.append(f'<path d="M{x} {y - 4}h22" stroke="{color}" stroke-width="3"/>')
        interval = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
        parts.append(_text(x + 30, y, str(signal).replace("_", " ")))
        parts.append(_text(x + 30, y + 16, f"area {row['auc']:.2f}{interval}, {row['lost']} of {row['n']} steps lost"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(share: float) -> float:
    return round(LEFT + SIDE * share, 1)


def _y(share: float) -> float:
    return round(TOP + SIDE * (1 - share), 1)


def _text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#1a1a1a" {more}>{escape(words)}</text>'
