"""All quality tables of a model as one: a row per method, a column per task, length, order of the question and budget,
and of free text one per length and budget. Results as kvlens.lab.bench.quality and kvlens.lab.bench.freetext write
them; no Streamlit, no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvlens.app.figures.methodmarks import mark
from kvlens.lab.results.summary import arm_name

TEXT = "free text"
FREE_TEXT = f"{TEXT}: KL (nats)"
ORDERS = {"in": "question known", "after": "question after"}
COSTS = {
    "resident_share": "resident",
    "read_share": "read",
    "attended_share": "attended",
    "selection_recall": "selection recall",
}
"""figures of a method beside its matches, means over the columns it has: as lines name them -> as the table does"""
FEW = 0.05
"""of exact match, above which a colour is seen"""


@dataclass(frozen=True)
class Cell:
    """One method in one column: what was asked for, and its line."""

    request: dict[str, Any]
    line: dict[str, Any]
    budget: str
    """of its column: a method without a limit stands in every budget's"""

    @property
    def subject(self) -> str:
        """What was asked: a task, or free text."""
        return str(self.line.get("task", TEXT))

    @property
    def measure(self) -> str:
        """What is shown of it: exact match, or KL of free text, of which less is better."""
        return "kl" if "kl" in self.line else "exact"

    @property
    def lost(self) -> list[dict[str, Any]]:
        """The trials whose answer was wrong, as the Benchmarks page's lists of trials know them. () of a control in
        another number format, which the app does not run, and of free text, which is right or wrong nowhere."""
        if self.line.get("dtype") or self.measure == "kl":
            return []
        known_fields = {name: self.line[name] for name in ("method", "budget", "task")}
        more = {"model": self.request["model"], "length": self.request["length"]}
        rest: dict[str, Any] = {"exact": 0.0, "score": 0.0, "infeasible": None, "refused": None, "uid": None}
        rest |= {"preset": None, "overrides": {}, "output": ""}
        question = {"question": self.request.get("question", "in")}
        return [known_fields | more | question | rest | row for row in self.line.get("lost") or ()]


def column(request: dict[str, Any], line: dict[str, Any]) -> str:
    """How a line's column is called; a method without a limit stands in all of its table's."""
    if "task" not in line:
        return f"{FREE_TEXT}, {request['length']:,} tokens, {line['budget']}"
    order = ORDERS[request.get("question", "in")]
    return f"{line['task']}, {request['length']:,} tokens, {order}, {line['budget']}"


def cells(results: Iterable[dict[str, Any]]) -> dict[tuple[str, str], Cell]:
    """(method, column) -> its cell, in the order of the tables; a line without a budget is a cell of every budget of
    its table."""
    cells_by_key = {}
    for result in results:
        request = result["about"]["request"]
        for line in result["lines"]:
            for budget in [line["budget"]] if line["budget"] else request["budgets"]:
                name = arm_name(line["method"], _control(line))
                cells_by_key[name, column(request, line | {"budget": budget})] = Cell(request, line, budget)
    return cells_by_key


def _control(line: dict[str, Any]) -> str:
    """The number format of a control, '' of what a table is about: free text names that of every line."""
    dtype = str(line.get("dtype", ""))
    return "" if "kl" in line and dtype == "float32" else dtype


def matrix(cells_by_key: Mapping[tuple[str, str], Cell]) -> pd.DataFrame:
    """`cells`, or some of them -> method, family, exact match (of free text KL) in each column, `mean rank`, and COSTS,
    but for those that no method has; methods without a limit, then the best rank first.

    A rank is a method's place in a column of exact matches among those held to its budget, ties sharing the mean of
    theirs; `mean rank` is of those that have a value in every such column. NaN: infeasible there, or not run."""
    names, columns = list(dict.fromkeys(n for n, _ in cells_by_key)), list(dict.fromkeys(c for _, c in cells_by_key))
    costs = {
        key: title
        for key, title in COSTS.items()
        if any(cell.line.get(key) is not None for cell in cells_by_key.values())
    }
    rows = []
    for name in names:
        own_lines = {c: cells_by_key[name, c].line for c in columns if (name, c) in cells_by_key}
        row: dict[str, Any] = {"method": name, "family": mark(name).family}
        row |= {c: cells_by_key[name, c].line.get(cells_by_key[name, c].measure) for c in own_lines}
        for key, title in costs.items():
            values = [line[key] for line in own_lines.values() if line.get(key) is not None]
            row[title] = sum(values) / len(values) if values else None
        rows.append(row)
    shown = ["method", "family", *columns, *costs.values()]
    frame = pd.DataFrame(rows, columns=shown).astype(dict.fromkeys(shown[2:], float))
    held = frame["method"].isin({n for n, c in cells_by_key if cells_by_key[n, c].line["budget"]})
    matches = [c for c in columns if not c.startswith(FREE_TEXT)]
    ranks = frame.loc[held, matches].rank(ascending=False, method="average")
    frame.insert(2, "mean rank", ranks.mean(axis=1, skipna=False))
    best = frame[matches].mean(axis=1)
    order = frame.assign(held=held, best=-best).sort_values(["held", "mean rank", "best", "method"]).index
    return frame.loc[order].reset_index(drop=True)


def shade(value: Any) -> str:
    """The background of an exact match, as CSS: the more the bluer, in light and dark."""
    return "" if pd.isna(value) or value < FEW else f"background-color: rgba(66, 133, 217, {0.75 * value:.2f})"
