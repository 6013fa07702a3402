"""Sweeps as the Benchmarks page reads them: trials, cells, and what the address says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from kvlens.app.figures.grid import Cell
from kvlens.lab.bench.sweepfile import parse
from kvlens.lab.results.formats import WIDE
from kvlens.lab.results.summary import NOISE, arm_name, grouped, summary
from kvlens.models.find import DEMO

NAMES = ("model", "suite", "task", "method", "budget", "length", "depth")
"""URL parameters of the page"""
FULL = "full"


@dataclass(frozen=True)
class Suite:
    """One sweep's result."""

    name: str
    """stem of its file"""
    about: dict[str, Any]
    trials: tuple[dict[str, Any], ...]

    @property
    def model(self) -> str:
        """What it was measured on."""
        return str(self.about.get("request", {}).get("model", DEMO))

    def tasks(self) -> list[str]:
        return list(dict.fromkeys(row["task"] for row in self.trials))


@dataclass(frozen=True)
class Look:
    """What is looked at. None: not chosen. `method`, `budget`, `length` and `depth` together name a cell."""

    suite: str | None = None
    task: str | None = None
    method: str | None = None
    budget: str | None = None
    length: int | None = None
    depth: float | None = None
    model: str | None = None

    @property
    def cell(self) -> Cell | None:
        """The selected cell; a missing budget is the reference's: no limit."""
        if self.method is None or self.length is None or self.depth is None:
            return None
        return self.method, self.budget or "", self.length, self.depth

    def move_to(self, cell: Cell | None) -> Look:
        """The same look at another cell, or at none."""
        method, budget, length, depth = cell or (None, None, None, None)
        return replace(self, method=method, budget=budget or None, length=length, depth=depth)

    def query(self) -> dict[str, str]:
        """URL parameters, chosen ones only."""
        values = {name: getattr(self, name) for name in NAMES}
        return {
            name: f"{value:g}" if isinstance(value, float) else str(value)
            for name, value in values.items()
            if value is not None
        }


def read_look(params: Mapping[str, str]) -> tuple[Look, list[str]]:
    """A look from URL parameters, and one phrase per parameter that could not be read."""
    problems: list[str] = []
    numbers: dict[str, Any] = {}
    for name, kind in (("length", int), ("depth", float)):
        if raw := params.get(name):
            try:
                numbers[name] = kind(raw)
            except ValueError:
                problems.append(f"{name} {raw[:40]!r} is not a number; ignored")
    texts: dict[str, Any] = {name: params.get(name) or None for name in ("model", "suite", "task", "method", "budget")}
    return Look(**texts, **numbers), problems


def suites(folder: Path) -> tuple[dict[str, Suite], list[str]]:
    """Name -> sweep, of the result files that are sweeps, and one sentence per damaged one."""
    suites_by_key: dict[str, Suite] = {}
    problems: list[str] = []
    for path in sorted(folder.glob("*.json")):
        try:
            suite = _suite(str(path), path.stat().st_mtime_ns)
        except (OSError, ValueError) as problem:
            problems.append(str(problem))
            continue
        if suite is not None:
            suites_by_key[suite.name] = suite
    return suites_by_key, problems


@st.cache_resource(max_entries=8, show_spinner=False)
def _suite(path: str, changed: int) -> Suite | None:
    """None for a result of another benchmark. Raises ValueError with one sentence."""
    file = Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        if file.stem.startswith("grid"):
            raise ValueError(f"the result file '{file.name}' is not JSON; measure it again.") from None
        return None
    if not isinstance(content, dict) or "columns" not in content:
        if file.stem.startswith("grid"):
            raise ValueError(f"the file '{file.name}' does not hold a sweep; measure it again.")
        return None
    about, rows = parse(content, file.name)
    named = ({**row, "method": arm_name(row["method"], row["dtype"])} for row in rows)
    return Suite(file.stem, about, tuple(named))


def cells(suite: Suite, task: str, difference: bool) -> pd.DataFrame:
    """One row per method, budget, length and depth of the task's trials, with `value`, `note` and `full` as
    `figures.grid` wants them.

    Prompts without a length or a depth (of files) have no cell, and neither have controls (`noise_floor`). `full`:
    exact match under full KV on the same prompts."""
    rows = [
        row
        for row in suite.trials
        if row["task"] == task and row["length"] is not None and row["depth"] is not None and not row["dtype"]
    ]
    right = {(row["length"], row["depth"], row["seed"]): row["exact"] for row in rows if row["method"] == FULL}
    table = []
    for (method, budget, length, depth), members in grouped(rows, ("method", "budget", "length", "depth")).items():
        line = summary(members)
        judged = [row for row in members if row["exact"] is not None]
        known_values = [right.get((length, depth, row["seed"])) for row in judged]
        full = sum(known_values) / len(known_values) if known_values and None not in known_values else float("nan")  # type: ignore[arg-type]
        exact = line.get("exact", float("nan"))
        line |= {
            "method": method,
            "budget": budget,
            "length": length,
            "depth": depth,
            "full": full,
            "exact": exact,
            "presets": ", ".join(line["presets"]),
            "refused": sum(row["refused"] is not None for row in members),
            "value": exact - full if difference else exact,
            "note": "" if judged else "inf." if line["infeasible"] else "refused" if members else "n/r",
        }
        table.append(line)
    return pd.DataFrame(table)


def noise_floor(suite: Suite, task: str) -> str:
    """How often full KV in another number format is right on the same prompts, in words; '' where that was not run."""
    finished = [row for row in suite.trials if row["task"] == task and row["dtype"] and row["exact"] is not None]
    if not finished:
        return ""
    right = sum(row["exact"] == 1 for row in finished)
    return f"Noise floor: full KV in {finished[0]['dtype']} is right in {right} of {len(finished)} prompts. "


def lines(suite: Suite, task: str, texts: tuple[str, ...]) -> pd.DataFrame:
    """Summaries of the task's trials by method, budget and the columns `texts`, with the budget as a number (1 = no
    limit)."""
    rows = [row for row in suite.trials if row["task"] == task]
    keys = ("method", "budget", *texts)
    table = [dict(zip(keys, key, strict=True)) | summary(members) for key, members in grouped(rows, keys).items()]
    for line in table:
        line |= {"budget_share": _share(str(line["budget"])), "presets": ", ".join(line["presets"])}
        line["kv_format"] = str(line["method"]).partition(NOISE)[2] or WIDE
    return pd.DataFrame(table)


def _share(budget: str) -> float:
    """'10%' or '0.1' as a number; 1 where there is no limit."""
    if not budget:
        return 1.0
    return float(budget.rstrip("%")) / 100 if budget.endswith("%") else float(budget)


def trials_of(suite: Suite, task: str, cell: Cell) -> list[dict[str, Any]]:
    """The cell's trials, failing first, then those that were refused, by seed."""
    method, budget, length, depth = cell
    rows = [
        row
        for row in suite.trials
        if (row["task"], row["method"], row["budget"], row["length"], row["depth"])
        == (task, method, budget, length, depth)
    ]
    return sorted(rows, key=lambda row: (2.0 if row["score"] is None else row["score"], row["seed"]))
