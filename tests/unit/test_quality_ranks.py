"""A quality table ranked: who stands where, and what is said of budgets that none could keep."""

from __future__ import annotations

from typing import Any

from kvlens.app.figures.quality import table
from kvlens.app.figures.qualityranks import ATTENDED, FREE, ranked


def line(method: str, budget: str, exact: float | None, rule: str = "resident bytes", task: str = "needle") -> Any:
    return {
        "method": method,
        "budget": budget,
        "task": task,
        "rule": rule,
        "n": 30 if exact is not None else 0,
        "infeasible": 0 if exact is not None else 30,
        "smallest_feasible": None if exact is not None else 0.155,
        "exact": exact,
        "low": None if exact is None else max(0.0, exact - 0.1),
        "high": None if exact is None else min(1.0, exact + 0.1),
        "coverage": 0.5,
        "attended_share": 0.1,
        "resident_share": 0.1,
        "h2d_bytes_per_step": 0.0,
    }


LINES = [
    line("full", "", 1.0, "none"),
    line("snapkv", "10%", 0.1),
    line("snapkv", "20%", 0.3),
    line("freekv", "10%", None),
    line("freekv", "20%", 0.9),
    line("quest", "10%", 0.4, ATTENDED),
    line("quest", "20%", 0.3, ATTENDED),
    line("h2o", "5%", 0.2),
]
TITLES = {"full": "FullKV", "snapkv": "SnapKV", "freekv": "FreeKV", "quest": "Quest", "h2o": "H2O"}


def test_the_best_at_the_largest_budget_stands_first() -> None:
    figure = ranked(table(LINES), TITLES)
    best_last = figure.layout.yaxis.categoryarray
    assert list(best_last[::-1]) == ["FullKV", "FreeKV", "Quest *", "SnapKV", "H2O"]


def test_a_method_that_nothing_holds_to_the_budget_is_marked() -> None:
    figure = ranked(table([*LINES, line("magicpig", "20%", 0.93, FREE)]), TITLES | {"magicpig": "MagicPIG"})
    assert "MagicPIG †" in figure.layout.yaxis.categoryarray
    assert "FullKV" in figure.layout.yaxis.categoryarray


def test_every_trial_has_its_point_and_its_interval() -> None:
    figure = ranked(table(LINES), TITLES)
    found = {trace.name: trace for trace in figure.data}
    assert set(found) == {"budget 5%", "budget 10%", "budget 20%", "no limit", "infeasible"}
    ten = found["budget 10%"]
    assert dict(zip(ten.y, ten.x, strict=True)) == {"SnapKV": 0.1, "Quest *": 0.4}
    assert [round(value, 6) for value in ten.error_x.array] == [0.1, 0.1]
    assert len({trace.marker.symbol for trace in found.values()}) == 5
    (says,) = found["infeasible"].hovertext
    assert says == "FreeKV: infeasible at 10%, needs 16%"


def test_tasks_stand_side_by_side_with_one_legend() -> None:
    more = [line("snapkv", "20%", 0.6, task="list"), line("freekv", "10%", None, task="list")]
    figure = ranked(table([*LINES, *more]), TITLES)
    assert [note.text for note in figure.layout.annotations] == ["needle", "list"]
    named = [trace.name for trace in figure.data if trace.showlegend]
    assert len(named) == len(set(named))
