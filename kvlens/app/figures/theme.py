"""Colours and layout shared by all figures: colour-blind safe, legible on light and dark."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

#: Okabe-Ito.
BROWN = "#8C510A"
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
#: Where a span is: in device memory, in host memory. More than 30 of CIEDE2000 apart for every colour vision.
RESIDENT, HOST = "#005096", "#82CDF5"
#: The selection has this colour everywhere.
SELECTED = VERMILION
#: 'Not recorded'.
GREY = "#9a9a9a"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY)


def finish(figure: go.Figure, height: int, *, uirevision: str, legend: bool = False) -> go.Figure:
    """Height in pixels, tight margins, transparent ground (the page's own shows through), zoom kept under
    `uirevision`."""
    figure.update_layout(
        height=height,
        margin={"l": 64, "r": 16, "t": 44, "b": 52},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        uirevision=uirevision,
        showlegend=legend,
        hoverlabel={"align": "left"},
        title={"font": {"size": 14}, "x": 0, "xanchor": "left", "y": 0.98, "yanchor": "top"},
    )
    return figure


def whole_ticks(count: int) -> dict[str, int]:
    """What an axis of that many steps needs so that no tick stands between two of them; longer ones have none there."""
    return {"dtick": 1} if count <= 24 else {}


def outline(figure: go.Figure, selected: tuple[int, int], **place: int) -> None:
    """A frame around the selected (layer, head) of a map, query or KV heads; place: row and column of its panel."""
    layer, head = selected
    figure.add_shape(
        type="rect",
        x0=head - 0.5,
        x1=head + 0.5,
        y0=layer - 0.5,
        y1=layer + 0.5,
        line={"color": SELECTED, "width": 3},
        **place,
    )


def unrecorded(figure: go.Figure, values: np.ndarray, labelled: bool, **place: int) -> None:
    """Grey over what of a map [rows, columns] is NaN, with 'n/r' where `labelled`; nothing where all is known. place:
    as for `outline`."""
    missing = np.isnan(values)
    if not missing.any():
        return
    figure.add_heatmap(
        z=np.where(missing, 1.0, np.nan),
        text=np.where(missing, "n/r", ""),  # a template alone is written into cells without a value too
        texttemplate="%{text}" if labelled else None,
        textfont={"size": 10, "color": "#111"},
        colorscale=[[0, GREY], [1, GREY]],
        showscale=False,
        hoverinfo="skip",
        xgap=1,
        ygap=1,
        **place,
    )
