"""The loss-ledger study: its trials, its tables, and their place in the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlens.lab.studies.ledger_page import BEGIN, END, tables, write_page
from kvlens.lab.studies.ledger_table import summarise, tracks_of
from kvlens.lab.studies.loss_ledger import TASKS, is_usual, trial_of
from kvlens.lab.studies.rocpicture import picture
from kvlens.ledger.account import LossLedger, Share
from kvlens.ledger.foresight import area, foresight, roc

NOTHING = {"varentropy": None, "query_change": None, "fetched": None, "unread": None}


def row(index: int, method: str, shares: tuple[Share, ...] = (), **more: Any) -> dict[str, Any]:
    ledger = LossLedger((0,), 6.0, -4.0, shares, 10.0 - sum(share.logits for share in shares), 4, 0.0)
    steps = [{"lost": False, "entropy": 1.0} | NOTHING, {"lost": True, "entropy": 2.0} | NOTHING]
    lost = {"ledger": ledger.to_json(), "signals": steps, "peak_bytes": 400, "full_bytes": 1000} if shares else {}
    base = {"method": method, "task": TASKS[0], "question": "in", "index": index, "lost": bool(shares)}
    return base | {"right": not shares} | lost | more


def share(cause: str, logits: float, restored: bool) -> Share:
    return Share(cause, logits, logits, 1, 1.0, (0, 0, 1), restored)


ROWS = [
    row(0, "sekv", (share("not_asked", 7.0, True), share("refused", 2.0, False))),
    row(1, "sekv", (share("not_asked", 2.0, False), share("refused", 8.0, False))),
    row(0, "snapkv", (share("evicted_after", 10.0, True),)),
    row(1, "snapkv"),
    row(0, "frontier", frontier_bytes=100, full_bytes=1000),
]


def test_trials_go_round_over_tasks_and_places_of_the_question() -> None:
    trials = [trial_of(index, "snapkv", 512, "20%") for index in range(6)]
    assert {(trial.task, trial.question) for trial in trials} == {
        (task, place) for task in TASKS for place in ("in", "after")
    }
    assert len({trial.seed for trial in trials}) == 6


def test_rows_of_a_preset_that_was_usual_before_do_not_count() -> None:
    """SeKV's router for SmolLM2 came later than its first ledgers."""
    kept = [row(0, "sekv", preset=preset) for preset in ("paper", "smollm2", "fit")]
    assert [is_usual(each, "smollm2") for each in kept] == [False, True, True]
    assert is_usual(row(0, "streaming_llm", preset=None), "smollm2")
    assert is_usual(row(0, "frontier", preset=None), "smollm2")
    assert not is_usual(row(0, "a_plugin_that_is_not_here", preset=None), "smollm2")


def test_tables_count_shares_repairs_and_distances() -> None:
    document = summarise(ROWS)
    sekv, snapkv = document["methods"]
    assert (sekv["n"], sekv["within"], snapkv["n"], snapkv["asked"]) == (2, 1, 1, 2)
    assert sekv["shares"]["not_asked"] == pytest.approx(0.45)
    assert sum(sekv["shares"].values()) == pytest.approx(1.0)
    repairs = document["repairs"]
    assert (repairs["several"], repairs["largest_only"], repairs["another_only"]) == (2, 1, 0)
    assert [(place["restored"], place["n"]) for place in repairs["by_place"]] == [(1, 2), (0, 2)]
    assert document["frontier"][0]["share"] == pytest.approx(0.1)
    assert {line["method"]: line["times_lost"] for line in document["frontier"][1:]} == {"sekv": 4.0, "snapkv": 4.0}


def test_the_area_is_the_chance_that_a_lost_step_has_the_larger_signal() -> None:
    generator = np.random.default_rng(3)
    values, lost = generator.integers(0, 6, 40).astype(float), generator.random(40) < 0.4
    pairs = [(a > b) + (a == b) / 2 for a in values[lost] for b in values[~lost]]
    assert area(values, lost) == pytest.approx(np.mean(pairs))
    assert area(values, np.ones(40, bool)) is None


def test_the_curve_encloses_the_area_and_has_one_point_per_value() -> None:
    generator = np.random.default_rng(3)
    values, lost = generator.integers(0, 6, 40).astype(float), generator.random(40) < 0.4
    steps = [{"lost": bool(gone), "entropy": value} for value, gone in zip(values, lost, strict=True)]
    points = roc([steps[:25], steps[25:]])
    assert set(points["signal"]) == {"entropy"}
    assert points["threshold"].tolist() == [np.inf, *np.unique(values)[::-1]]
    for row in points.itertuples():
        called = values >= row.threshold
        assert (row.caught, row.alarms) == (pytest.approx(called[lost].mean()), pytest.approx(called[~lost].mean()))
    assert np.trapezoid(points["caught"], points["alarms"]) == pytest.approx(area(values, lost))
    assert roc([[step for step in steps if step["lost"]]]).empty, "no kept step"
    assert picture(points, foresight([steps], draws=5)).count("<path") == 3


def test_a_signal_that_no_step_has_has_no_area() -> None:
    lines = {
        line["signal"]: line for line in foresight([row(0, "a", (share("stale", 1.0, True),))["signals"]], draws=5)
    }
    assert lines["entropy"]["auc"] == 1.0
    assert (lines["unread"]["n"], lines["unread"]["auc"]) == (0, None)


def test_tables_stand_between_the_marks_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "ledger.md"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    document = summarise(ROWS) | {"about": {"model": "m", "length": 512, "budget": "20%", "presets": {"sekv": "paper"}}}
    write_page(page, document)
    text = page.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "old" not in text
    assert text.count("| SnapKV |") == 2
    assert text.count("| SeKV (untrained router) |") == 2
    page.write_text("no marks")
    with pytest.raises(ValueError, match=BEGIN):
        write_page(page, document)


def test_the_committed_page_is_made_of_the_committed_figures() -> None:
    root = Path(__file__).resolve().parents[2]
    document = json.loads((root / "kvlens/lab/results/loss_ledger.json").read_text(encoding="utf-8"))
    assert tables(document) in (root / "docs/evidence/ledger.md").read_text(encoding="utf-8")
    lines = (root / "kvlens/lab/results/loss_ledger_trials.jsonl").read_text(encoding="utf-8").splitlines()
    tracks = tracks_of([row for row in map(json.loads, lines) if is_usual(row, "smollm2")])
    assert picture(roc(tracks), document["signals"]) == (root / "docs/evidence/roc.svg").read_text(encoding="utf-8")
