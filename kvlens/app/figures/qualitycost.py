"""One picture of a quality table: exact match against bytes on the device, a line per method. A Vega-Lite spec, because
a pointer over a line has to dim the others; no Streamlit, no files."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlens.app.figures.methodmarks import FAMILY_COLORS, mark
from kvlens.lab.results.names import limit_words
from kvlens.lab.results.summary import arm_titles
from kvlens.statistics import wilson

COST = "resident_share"
"""column of kvlens.app.figures.quality.table on the horizontal axis"""


def cost_rows(frame: pd.DataFrame, titles: dict[str, str]) -> pd.DataFrame:
    """Return one row per method and budget: method (its title), family, budget (what it was held to), exact (over the
    prompts of all tasks), low, high (95 % Wilson), n (prompts) and share (bytes on the device, mean over tasks). A
    budget under which a task has no judged prompt is left out: its share of right answers would be of other tasks than
    its neighbours'.

    Args:
        frame: as kvlens.app.figures.quality.table makes it.
        titles: method -> its title.
    """
    titles = arm_titles(titles, frame["method"])
    judged = frame[frame["exact"].notna() & frame[COST].notna() & (frame["n"] > 0)]
    rows = []
    tasks = frame["task"].nunique()
    for (name, budget), part in judged.groupby(["method", "budget"], sort=False):
        if part["task"].nunique() < tasks:
            continue
        n = int(part["n"].sum())
        exact = float((part["exact"] * part["n"]).sum() / n)
        low, high = wilson(exact, n)
        family = mark(str(name)).family.replace("_", " ")
        title = titles.get(str(name), str(name))
        limit = limit_words(str(budget), part["rule"])
        limit = "no limit" if limit in ("", "none") else limit
        rows.append((title, family, limit, exact, low, high, n, float(part[COST].mean())))
    columns = ["method", "family", "budget", "exact", "low", "high", "n", "share"]
    table = pd.DataFrame(rows, columns=columns).drop_duplicates()
    return table.sort_values(["method", "share"], kind="stable", ignore_index=True)


def quality_cost(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the spec of the picture. rows: of `cost_rows`."""
    families = [name for name in FAMILY_COLORS if name.replace("_", " ") in set(rows["family"])]
    x = {
        "field": "share",
        "type": "quantitative",
        "title": "Peak KV bytes on the device, share of full KV",
        "axis": {"format": "%", "values": [0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 1.25, 1.5]},
        "scale": {"type": "sqrt"},
    }
    y = {
        "field": "exact",
        "type": "quantitative",
        "title": "Right answers, share of prompts",
        "axis": {"format": "%"},
        "scale": {"domain": [0, 1]},
    }
    color = {
        "field": "family",
        "type": "nominal",
        "title": None,
        "legend": {"orient": "top", "columns": 4},
        "scale": {
            "domain": [name.replace("_", " ") for name in families],
            "range": [FAMILY_COLORS[name] for name in families],
        },
    }
    dimmed = {"condition": {"param": "pointed", "value": 1}, "value": 0.08}
    hidden = {"condition": {"param": "pointed", "empty": False, "value": 1}, "value": 0}
    detail = {"field": "method", "type": "nominal"}
    pointed = {
        "name": "pointed",
        "select": {"type": "point", "fields": ["method"], "on": "pointerover", "nearest": True, "clear": "pointerout"},
    }
    tooltip = [
        {"field": "method", "type": "nominal"},
        {"field": "budget", "type": "nominal"},
        {"field": "exact", "type": "quantitative", "format": ".2f", "title": "right"},
        {"field": "low", "type": "quantitative", "format": ".2f", "title": "95 % from"},
        {"field": "high", "type": "quantitative", "format": ".2f", "title": "to"},
        {"field": "n", "type": "quantitative", "title": "prompts"},
        {"field": "share", "type": "quantitative", "format": ".1%", "title": "resident"},
    ]
    encoding = {"x": x, "y": y, "color": color, "detail": detail}
    return {
        "height": 430,
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 1.6}, "encoding": {**encoding, "opacity": dimmed}},
            {
                "mark": {"type": "rule", "strokeWidth": 1.2},
                "encoding": {**encoding, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "opacity": hidden},
            },
            {
                "params": [pointed],
                "mark": {"type": "point", "filled": True, "size": 46},
                "encoding": {**encoding, "opacity": dimmed, "tooltip": tooltip},
            },
            {
                "transform": [
                    {
                        "window": [{"op": "row_number", "as": "place"}],
                        "sort": [{"field": "share", "order": "descending"}],
                        "groupby": ["method"],
                    },
                    {"filter": "datum.place == 1"},
                ],
                "mark": {"type": "text", "dy": -12, "fontSize": 13, "fontWeight": "bold"},
                "encoding": {**encoding, "text": {"field": "method"}, "opacity": hidden},
            },
        ],
    }
