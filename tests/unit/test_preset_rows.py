"""Rows of another preset in a published quality table: which trials they are made of, and where the table has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlens.lab.bench.quality import QualityRequest
from kvlens.lab.bench.qualitypage import markdown
from kvlens.lab.studies import preset_rows

REQUEST = QualityRequest(
    model="demo", methods=("full", "sekv", "chess"), tasks=("multikey",), budgets=("10%", "20%"), length=512, prompts=2
)


def _row(trial: Any, exact: float, preset: str = "no-coarse") -> dict[str, Any]:
    place = {name: getattr(trial, name) for name in ("task", "index", "budget", "method", "seed", "depth")}
    figures = {"attended_tokens": 50.0, "prompt_tokens": 500, "passed": True, "rule": "resident bytes", "overrides": {}}
    return place | {"preset": preset, "exact": exact, "score": exact, "output": "x", "answer": "y"} | figures


def test_a_line_counts_the_trials_of_its_preset_once_each() -> None:
    trials = preset_rows.trials_of(REQUEST, "sekv")
    rows = [_row(trial, float(trial.budget == "20%")) for trial in trials]
    rows += [_row(trials[0], 0.0), _row(trials[0], 1.0, "paper")]
    lines = preset_rows.variants(rows, REQUEST, "sekv", "no-coarse")
    assert [(line["budget"], line["n"], line["exact"], line["variant"]) for line in lines] == [
        ("10%", 2, 0.0, "no-coarse"),
        ("20%", 2, 1.0, "no-coarse"),
    ]
    assert len(lines[0]["lost"]) == 2


def test_kept_trials_become_rows_behind_the_methods_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"task": "multikey", "n": 0, "infeasible": 1, "smallest_feasible": 0.4, "rule": "", "dtype": ""}
    about = {"presets": {}, "request": json.loads(REQUEST.model_dump_json()), "trials": 1, "planned": 1}
    about |= {"date": "2026-01-01", "machine": {"processor": "P", "cores": 2}, "torch": "1", "transformers": "2"}
    lines = [plain | {"method": name, "budget": budget} for name in ("sekv", "chess") for budget in ("10%", "20%")]
    (tmp_path / "table.json").write_text(json.dumps({"about": about, "lines": lines}))
    kept = tmp_path / "kept.jsonl"
    trials = preset_rows.trials_of(REQUEST, "sekv")
    kept.write_text("".join(json.dumps(_row(trial, 1.0)) + "\n" for trial in trials))
    monkeypatch.setattr(preset_rows, "RESULTS", tmp_path)
    monkeypatch.setattr(preset_rows, "quality_request", lambda path: REQUEST)
    monkeypatch.setattr("sys.argv", ["x", "table", "sekv", "no-coarse", "--kept", str(kept), "--collect"])
    preset_rows.main()
    preset_rows.main()
    result = json.loads((tmp_path / "table.json").read_text())
    assert [(line["variant"], line["n"]) for line in result["variants"]] == [("no-coarse", 2)] * 2
    names = [line.split("|")[1].strip() for line in markdown(result).splitlines() if line.startswith("| ")][1:]
    assert [name.endswith("no-coarse") for name in names] == [False, False, True, True, False, False]
