"""A search for the fewest bytes: what each set took, and what it left of the divergence at the step of loss."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.theme import BLUE, GREEN, SELECTED, finish
from kvlens.text.units import counted, si_bytes

COLUMNS = ("try", "(layer, KV head, span)", "held (bytes)", "KL (nats)", "restored")


BITS_COLUMNS = ("try", "(layer, KV head, K or V)", "more (bytes)", "KL (nats)", "restored")
"""of a search for the fewest bits"""


def fewest_bytes(tests: pd.DataFrame, full_kv_bytes: int | None) -> go.Figure:
    """Bytes across, KL upwards, a mark per set that was held or stored in more bits: filled where the answer is back.
    The one of fewest bytes among these is ringed. `tests`: columns COLUMNS or BITS_COLUMNS."""
    figure = go.Figure()
    number, size, held, kl, back = (tests[name] for name in tests.columns[: len(COLUMNS)])
    noun, nouns, bytes_title = "span", "spans", "held (bytes)"
    if BITS_COLUMNS[1] in tests:
        noun, nouns, bytes_title = "set of keys or values", "sets of keys or values", "more (bytes)"
    share = (lambda b: f", {b / full_kv_bytes:.2%} of full KV") if full_kv_bytes else (lambda b: "")
    hover = [
        f"try {n}: {counted(int(s), noun, nouns)} of single KV heads<br>{si_bytes(b)}{share(b)}<br>KL {k:.3g} nats"
        for n, s, b, k in zip(number, size, held, kl, strict=True)
    ]
    for restored, name, symbol, color in (
        (True, "the answer is back", "circle", GREEN),
        (False, "it is not", "circle-open", BLUE),
    ):
        here = (back == restored).tolist()
        figure.add_scatter(
            x=held[here],
            y=kl[here],
            name=name,
            mode="markers",
            marker={"symbol": symbol, "size": 9, "color": color, "line": {"width": 2}},
            hovertext=[text for text, shown in zip(hover, here, strict=True) if shown],
            hoverinfo="text",
        )
    if back.any():
        least = tests[back].nsmallest(1, bytes_title)
        figure.add_scatter(
            x=least[bytes_title],
            y=least["KL (nats)"],
            name="fewest bytes",
            mode="markers",
            marker={"symbol": "circle-open", "size": 18, "color": SELECTED, "line": {"width": 2}},
            hoverinfo="skip",
        )
    finish(figure, 240, uirevision="fewest", legend=True)
    figure.update_layout(
        title_text="Every set that was tried: bytes, and what it left of KL", legend={"orientation": "h", "y": 1.02}
    )
    figure.update_layout(legend={"yanchor": "bottom", "x": 1, "xanchor": "right"}, dragmode=False)
    figure.update_xaxes(title_text=bytes_title, rangemode="tozero", tickformat="~s")
    figure.update_yaxes(title_text="KL (nats)", rangemode="tozero")
    return figure
