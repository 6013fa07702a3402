"""Rows of another preset in a published quality table: a study with the trials of the table, and where the table has
them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvlens.engine.engine import Engine
from kvlens.engine.models import load
from kvlens.lab.bench.quality import QualityRequest
from kvlens.lab.bench.qualitypage import markdown
from kvlens.lab.bench.tablestudy import study_name
from kvlens.lab.bench.trialprompts import Prompts, Trial
from kvlens.lab.bench.trials import carry_out
from kvlens.lab.studies import preset_rows
from kvlens.studies import storage

TABLE = QualityRequest(
    model="demo", methods=("full", "sekv", "chess"), tasks=("needle",), budgets=("10%", "40%"), length=300, prompts=2
)
REQUEST = preset_rows.preset_request(TABLE, "sekv", "no-coarse")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[preset_rows.Row]]:
    folder = tmp_path_factory.mktemp("variants")
    return folder, preset_rows.measure(REQUEST, folder)


def test_the_study_has_the_trials_that_the_engine_alone_gives(measured: tuple[Path, list[preset_rows.Row]]) -> None:
    torch.set_num_threads(1)
    engine = Engine(load("demo", "cpu", "float32"))
    prompts = Prompts(engine, TABLE.first_seed, ("sekv",))
    rows = [row for row in measured[1] if row["budget"] == "40%"]
    for (task, length, depth, seed, index), row in zip(TABLE.places(), rows, strict=True):
        trial = Trial(task, length, depth, seed, index, "sekv", "40%", "in")
        alone = carry_out(engine, prompts, trial, preset="no-coarse")
        shared = alone.keys() & row.keys()
        assert {"exact", "coverage", "attended_tokens", "resident_share", "output", "preset"} <= shared
        assert {name: row[name] for name in shared} == {name: alone[name] for name in shared}


def test_the_study_goes_on_and_runs_no_full_kv(measured: tuple[Path, list[preset_rows.Row]]) -> None:
    folder, rows = measured
    study = study_name(preset_rows.KIND, REQUEST)
    stored = storage.read_trials(folder, study)
    assert len(stored) == len(rows) == 4
    assert {arm.method for arm in storage.read(folder, study).plan.arms()} == {"sekv"}
    assert preset_rows.measure(REQUEST, folder) == preset_rows.collect(REQUEST, folder) == rows
    assert storage.read_trials(folder, study) == stored
    assert preset_rows.collect(preset_rows.preset_request(TABLE, "sekv", "paper"), folder) == []


def test_a_line_is_of_its_preset_alone(measured: tuple[Path, list[preset_rows.Row]]) -> None:
    """A budget that the preset cannot keep is infeasible: the row has the preset's name."""
    small, large = preset_rows.variants(measured[1], "no-coarse")
    assert (small["budget"], small["n"], small["infeasible"], small["presets"]) == ("10%", 0, 2, {"no-coarse": 2})
    assert (large["budget"], large["n"], large["infeasible"], large["presets"]) == ("40%", 2, 0, {"no-coarse": 2})
    assert large["variant"] == small["variant"] == "no-coarse"
    assert len(large["lost"]) == 2 - 2 * large["exact"]


def test_stored_trials_become_rows_behind_the_methods_own(
    measured: tuple[Path, list[preset_rows.Row]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"task": "needle", "n": 0, "infeasible": 1, "smallest_feasible": 0.4, "rule": "", "dtype": ""}
    about = {"presets": {}, "request": json.loads(TABLE.model_dump_json()), "trials": 1, "planned": 1}
    about |= {"date": "2026-01-01", "machine": {"processor": "P", "cores": 2}, "torch": "1", "transformers": "2"}
    lines = [plain | {"method": name, "budget": budget} for name in ("sekv", "chess") for budget in TABLE.budgets]
    (tmp_path / "table.json").write_text(json.dumps({"about": about, "lines": lines}))
    monkeypatch.setattr(preset_rows, "RESULTS", tmp_path)
    monkeypatch.setattr(preset_rows, "quality_request", lambda path: TABLE)
    arguments = ["x", "table", "sekv", "no-coarse", "--runs", str(measured[0]), "--collect"]
    monkeypatch.setattr("sys.argv", arguments)
    preset_rows.main()
    preset_rows.main()
    result = json.loads((tmp_path / "table.json").read_text())
    assert [(line["variant"], line["budget"]) for line in result["variants"]] == [
        ("no-coarse", "10%"),
        ("no-coarse", "40%"),
    ]
    names = [line.split("|")[1].strip() for line in markdown(result).splitlines() if line.startswith("| ")][1:]
    assert [name.endswith("no-coarse") for name in names] == [False, False, True, True, False, False]
