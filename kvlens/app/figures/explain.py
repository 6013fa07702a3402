"""How good the lens is, as a figure: of lost answers, the share that comes back by what is held. Lines as
kvlens.lab.results.explain_table writes them; no Streamlit, no files."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from kvlens.app.figures.theme import finish
from kvlens.lab.results.explain_table import ARMS

LABELS = {
    "random1": "1 at<br>random",
    "random5": "5 at<br>random",
    "random20": "20 at<br>random",
    "shown_top1": "top 1,<br>as shown",
    "shown_top5": "top 5,<br>as shown",
    "shown_top20": "top 20,<br>as shown",
    "effect_top1": "top 1,<br>effect",
    "effect_top5": "top 5,<br>effect",
    "effect_top20": "top 20,<br>effect",
    "step_top1": "top 1,<br>regret,<br>step of loss",
    "step_top5": "top 5,<br>regret,<br>step of loss",
    "step_top20": "top 20,<br>regret,<br>step of loss",
    "steps_top1": "top 1,<br>regret,<br>lost steps",
    "steps_top5": "top 5,<br>regret,<br>lost steps",
    "steps_top20": "top 20,<br>regret,<br>lost steps",
    "everywhere": "needle,<br>all heads",
}
"""arm -> label, in the order they are drawn, of those that were measured"""


def table(lines: list[dict[str, Any]]) -> pd.DataFrame:
    """A row per point and arm: method, task, budget, held, n (lost trials), restored_share, low, high (95 % Wilson
    interval)."""
    rows = [
        {
            "method": line["method"],
            "task": line["task"],
            "budget": line["budget"],
            "held": arm,
            "n": share["n"],
            "restored_share": share["share"],
            "low": share["low"],
            "high": share["high"],
        }
        for line in lines
        for arm in ARMS
        if (share := line["arms"].get(arm)) is not None
    ]
    return pd.DataFrame(rows, columns=["method", "task", "budget", "held", "n", "restored_share", "low", "high"])


def restored(frame: pd.DataFrame, titles: dict[str, str]) -> go.Figure:
    """Points over what was held, the share restored in colour and in words; the interval on hover. `titles`: method ->
    its title."""
    points = list(dict.fromkeys(zip(frame["method"], frame["task"], frame["budget"], strict=True)))
    names = [f"{titles.get(method, method)}, {task} {budget}" for method, task, budget in points]
    cells = {(row["method"], row["task"], row["budget"], row["held"]): row for row in frame.to_dict("records")}
    labels = {arm: label for arm, label in LABELS.items() if arm in set(frame["held"])}
    rows = [[cells.get((*point, arm)) for arm in labels] for point in points]
    figure = go.Figure(
        go.Heatmap(
            x=list(labels.values()),
            y=names,
            z=[[None if cell is None else cell["restored_share"] for cell in row] for row in rows],
            customdata=[["not run" if cell is None else _share_words(cell) for cell in row] for row in rows],
            hovertemplate="%{y}<br>%{customdata}<extra></extra>",
            zmin=0,
            zmax=1,
            colorscale="Cividis",
            xgap=2,
            ygap=2,
            colorbar={"title": {"text": "restored (share)"}, "thickness": 12},
        )
    )
    _inked(figure, names, list(labels.values()), rows)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="held exactly resident from step 0, everything else as it was", side="bottom")
    finish(figure, 130 + 38 * len(points), uirevision="explain")
    return figure.update_layout(margin={"l": 190, "b": 92})


def _inked(figure: go.Figure, names: list[str], labels: list[str], rows: list[list[dict[Any, Any] | None]]) -> None:
    """Numbers in the cells, black on the bright half of the scale and white on the dark; a heat map itself has one
    colour of text."""
    places = [
        (label, name, cell)
        for name, row in zip(names, rows, strict=True)
        for label, cell in zip(labels, row, strict=True)
    ]
    for ink, bright in (("#000000", True), ("#ffffff", False)):
        own_rows = [place for place in places if (place[2] is not None and place[2]["restored_share"] > 0.5) == bright]
        figure.add_scatter(
            x=[label for label, _, _ in own_rows],
            y=[name for _, name, _ in own_rows],
            mode="text",
            hoverinfo="skip",
            showlegend=False,
            text=["n/r" if cell is None else f"{cell['restored_share']:.2f}" for _, _, cell in own_rows],
            textfont={"size": 11, "color": ink},
        )


def _share_words(cell: dict[Any, Any]) -> str:
    return (
        f"{cell['restored_share']:.2f} of {cell['n']} lost answers restored (95 % {cell['low']:.2f} to "
        f"{cell['high']:.2f})"
    )
