"""All quality tables of a model as one: columns, ranks, costs, and the lost trials behind a cell."""

from __future__ import annotations

from typing import Any

import pytest

from kvlens.app.figures.qualitymatrix import cells, matrix, shade
from kvlens.lab.bench.quality import lost


def line(method: str, budget: str, exact: float | None, **more: Any) -> dict[str, Any]:
    shared = {"task": "niah_single", "n": 4 if exact is not None else 0, "infeasible": 0 if exact is not None else 4}
    figures = {"resident_share": 0.2, "attended_share": 0.3, "selection_recall": 0.5} if exact is not None else {}
    return {"method": method, "budget": budget, "exact": exact, **shared, **figures, **more}


def result(question: str, *lines: dict[str, Any]) -> dict[str, Any]:
    request = {"model": "m", "tasks": ["niah_single"], "length": 1024, "budgets": ["10%", "20%"], "question": question}
    return {"about": {"request": request}, "lines": list(lines)}


POINTS = (
    ("snapkv", "10%", 0.5),
    ("snapkv", "20%", 1.0),
    ("quest", "10%", 0.5),
    ("quest", "20%", 0.75),
    ("h2o", "10%", None),
    ("h2o", "20%", 0.0),
)
KNOWN = result("in", line("full", "", 1.0), *(line(*point) for point in POINTS))
AFTER = result("after", line("snapkv", "20%", 0.25), line("quest", "20%", 0.5, resident_share=0.8, read_share=0.1))


def test_a_row_per_method_a_column_per_question_and_budget_and_the_best_first() -> None:
    frame = matrix(cells([KNOWN, AFTER]))
    columns = [
        "niah_single, 1,024 tokens, question known, 10%",
        "niah_single, 1,024 tokens, question known, 20%",
        "niah_single, 1,024 tokens, question after, 20%",
    ]
    assert [name for name in frame.columns if "tokens," in name] == columns
    assert list(frame["method"]) == ["full", "quest", "snapkv", "h2o"]
    table = frame.set_index("method")
    assert list(table.loc["snapkv", columns]) == [0.5, 1.0, 0.25]
    assert list(table.loc["full", columns[:2]]) == [1.0, 1.0], "without a limit it stands in every column of its table"
    assert table["mean rank"]["quest"] == pytest.approx((1.5 + 2 + 1) / 3)
    assert table["mean rank"]["snapkv"] == pytest.approx((1.5 + 1 + 2) / 3)
    assert table["mean rank"][["h2o", "full"]].isna().all(), "one lacks a column, one is held to nothing"
    assert table["resident"]["quest"] == pytest.approx((0.2 + 0.2 + 0.8) / 3)
    assert table["read"]["quest"] == 0.1, "tables that were measured before bytes read were do not count as 0"
    assert table["read"].drop("quest").isna().all()


def test_of_some_columns_the_rank_is_among_these() -> None:
    found = {key: cell for key, cell in cells([KNOWN, AFTER]).items() if cell.budget == "20%"}
    table = matrix(found).set_index("method")
    assert [name for name in table.columns if name.endswith("10%")] == []
    assert table["mean rank"]["snapkv"] == pytest.approx((1 + 2) / 2)
    assert {cell.subject for cell in found.values()} == {"niah_single"}


def test_a_cost_that_no_method_has_is_no_column() -> None:
    frame = matrix(cells([KNOWN]))
    assert list(frame.columns[-3:]) == ["resident", "attended", "selection recall"]
    assert "read" not in frame.columns


def test_a_cell_names_the_trials_that_were_lost_as_they_are_made_again() -> None:
    rows = [
        {"index": at, "depth": 0.0, "seed": at, "exact": float(at == 1), "answer": " 12", "output": " 9"}
        | {"preset": "fit", "overrides": {}}
        for at in (2, 1, 0)
    ]
    assert [row["index"] for row in lost(rows)] == [0, 2], "in their order"
    found = cells([result("after", line("snapkv", "20%", 0.5, lost=lost(rows)))])
    (cell,) = found.values()
    first, second = cell.lost
    assert (first["seed"], first["index"], first["depth"], second["index"]) == (0, 0, 0.0, 2)
    assert (first["question"], first["model"], first["budget"], first["output"]) == ("after", "m", "20%", " 9")
    assert (second["task"], second["length"], second["seed"]) == ("niah_single", 1024, 2)


def test_a_control_in_another_number_format_names_no_trials() -> None:
    wrong = [{"index": 0, "seed": 1, "depth": 0.5}]
    ((name, _), cell), *_ = cells([result("in", line("full", "", 0.5, dtype="bfloat16", lost=wrong))]).items()
    assert name != "full"
    assert cell.lost == []


def test_the_more_are_right_the_bluer() -> None:
    assert shade(float("nan")) == shade(0.0) == ""
    assert shade(1.0).endswith("0.75)")
    assert shade(0.4) != shade(0.5)


def test_of_free_text_less_is_better_and_nothing_is_lost() -> None:
    request = {"model": "m", "length": 1024, "budgets": ["20%"], "tokens": 64}
    found = [("full", "", "bfloat16", 0.01), ("snapkv", "20%", "float32", 0.5), ("quest", "20%", "float32", 0.125)]
    lines = [
        {"method": name, "budget": budget, "dtype": dtype, "kl": kl, "n": 10, "resident_share": 0.2}
        for name, budget, dtype, kl in found
    ]
    text = {"about": {"request": request}, "lines": lines}
    name = "free text: KL (nats), 1,024 tokens, 20%"
    table = matrix(cells([KNOWN, text])).set_index("method")
    assert dict(table[name].dropna()) == {"full in bfloat16": 0.01, "snapkv": 0.5, "quest": 0.125}
    assert table["mean rank"]["quest"] == pytest.approx((1.5 + 2) / 2), "by exact match alone"
    cell = cells([text])["quest", name]
    assert (cell.measure, cell.lost) == ("kl", [])
