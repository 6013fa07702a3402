"""The grids of the Benchmarks page: cells, the address, trials of a cell, the way to Replay, damaged and missing
results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from uiruns import Runs, Visit

from kvlens.app.figures.grid import grid, panels
from kvlens.app.ui.benchmarks import gridview
from kvlens.app.ui.benchmarks.griddata import Look, Suite, cells, lines, noise_floor, read_look, trials_of
from kvlens.app.ui.benchmarks.trials import came_out
from kvlens.app.ui.common import sentences
from kvlens.lab.bench import sweepfile
from kvlens.lab.results.summary import summary

ABOUT = {
    "machine": {"processor": "P", "cores": 2},
    "date": "2026-01-01",
    "torch": "2",
    "trials": 9,
    "planned": 12,
    "request": {"model": "demo"},
}


def row(
    method: str, budget: str, length: int, depth: float, seed: int, exact: float | None, **more: Any
) -> dict[str, Any]:
    done = {
        "score": exact,
        "exact": exact,
        "coverage": 0.5,
        "attended_tokens": 50.0,
        "prompt_tokens": 500,
        "resident_share": 0.2,
        "h2d_bytes_per_step": 1000.0,
        "d2h_bytes_per_step": 0.0,
        "steps": 5,
        "output": " 1111.",
        "answer": " 2222.",
        "passed": True,
    }
    about = {
        "task": "needle",
        "length": length,
        "depth": depth,
        "seed": seed,
        "index": 0,
        "method": method,
        "budget": budget,
        "preset": None,
        "overrides": {},
        "rule": "resident bytes" if budget else "none",
    }
    return dict.fromkeys(sweepfile.COLUMNS) | about | (done if exact is not None else {}) | more


def trials(uid: str | None = None) -> list[dict[str, Any]]:
    return [
        *(row("full", "", 512, depth, seed, 1.0) for depth in (0.1, 0.9) for seed in (1, 2)),
        row("freekv", "20%", 512, 0.1, 1, 1.0),
        row("freekv", "20%", 512, 0.1, 2, 0.0, uid=uid),
        row("freekv", "20%", 512, 0.9, 1, 1.0),
        row("sekv", "20%", 512, 0.1, 1, None, infeasible=0.2004),
        row("full", "", 1024, 0.1, 1, None, refused="The prompt is too long."),
    ]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLENS_RESULTS", str(tmp_path))
    return tmp_path


def test_cells_say_what_was_run_and_what_full_kv_did_on_the_same_prompts() -> None:
    suite = Suite("grid", ABOUT, tuple(trials()))
    table = cells(suite, "needle", False).set_index(["method", "length", "depth"])
    half = table.loc[("freekv", 512, 0.1)]
    assert (half["n"], half["exact"], half["full"], half["note"]) == (2, 0.5, 1.0, "")
    assert (round(half["low"], 3), round(half["high"], 3)) == (0.095, 0.905), "Wilson, 1 of 2"
    assert (table.loc[("sekv", 512, 0.1)]["note"], table.loc[("full", 1024, 0.1)]["note"]) == ("inf.", "refused")
    difference = cells(suite, "needle", True).set_index(["method", "length", "depth"])
    assert difference.loc[("freekv", 512, 0.1)]["value"] == -0.5
    assert [trial["seed"] for trial in trials_of(suite, "needle", ("freekv", "20%", 512, 0.1))] == [2, 1], (
        "failing first"
    )
    budgets = lines(suite, "needle", ("length",)).set_index(["method", "length"])["budget_share"]
    assert (budgets[("freekv", 512)], budgets[("full", 512)]) == (0.2, 1.0)


def test_the_noise_floor_is_a_line_and_no_cell() -> None:
    control = row("full in bfloat16", "", 512, 0.1, 1, 1.0, dtype="bfloat16")
    suite = Suite("grid", ABOUT, (*trials(), control, {**control, "seed": 2, "exact": 0.0}))
    plain = Suite("g", ABOUT, tuple(trials()))
    assert list(cells(suite, "needle", False)["n"]) == list(cells(plain, "needle", False)["n"])
    assert noise_floor(suite, "needle") == "Noise floor: full KV in bfloat16 is right in 1 of 2 prompts. "
    assert noise_floor(plain, "needle") == ""
    line = lines(suite, "needle", ("length",)).set_index("method").loc["full in bfloat16"]
    assert (line["n"], line["exact"]) == (2, 0.5)


def test_the_grid_has_a_panel_per_method_and_budget_and_a_target_per_cell() -> None:
    table = cells(Suite("grid", ABOUT, tuple(trials())), "needle", False)
    assert panels(table) == (["full", "freekv", "sekv"], ["20%"])
    figure = grid(table, {"freekv": "FreeKV"}, ("freekv", "20%", 512, 0.1))
    targets = [trace for trace in figure.data if trace.type == "scatter"]
    assert len(targets) == 3
    assert list(targets[1].customdata[0]) == ["freekv", "20%", 512, 0.1]
    assert "exact 0.50 (95 % 0.09 to 0.91), n = 2" in targets[1].hovertext[0]
    assert targets[1].hovertext[1].endswith("not run")
    assert "1 prompt infeasible: needs 20.1% of full KV" in targets[2].hovertext[0]
    notes = [list(map(list, trace.text)) for trace in figure.data if trace.name is None and trace.text is not None]
    said = [trace.text[0][0] for trace in figure.data if trace.name == "FreeKV 20%"]
    assert said == ["1/2", ""], "few prompts are counted, each in the ink of its cell alone"
    apart = grid(cells(Suite("grid", ABOUT, tuple(trials())), "needle", True), {}, None, difference=True)
    assert {trace.text[0][0] for trace in apart.data if trace.name == "freekv 20%"} == {"-0.50", ""}
    assert notes[1:] == [[["", "n/r"], ["", "n/r"]], [["inf.", "n/r"], ["n/r", "n/r"]]]
    inks = {trace.textfont.color: trace.z for trace in figure.data if trace.name == "FreeKV 20%"}
    assert (inks["#ffffff"][1][0], inks["#000000"][0][0]) == (1.0, 0.5), (
        "white on the blue of 1, black on the white of 0.5"
    )
    dotted = [shape for shape in figure.layout.shapes if shape.line.dash == "dot"]
    assert len(dotted) == 4, "cells of fewer than five prompts"
    assert sum(shape.line.width == 5 for shape in figure.layout.shapes) == 1, "the selected cell"


def test_a_look_survives_its_url() -> None:
    look = Look("grid", "needle", "freekv", "20%", 512, 0.1)
    assert read_look(look.query()) == (look, [])
    assert read_look({"length": "x", "depth": "0.5"})[1][0].startswith("length 'x' ")
    assert Look("grid", "needle").move_to(("full", "", 512, 0.1)).cell == ("full", "", 512, 0.1)


def test_a_files_task_is_shown_without_its_folder() -> None:
    assert gridview.task_label("ruler:/somewhere/else/vt.jsonl").replace("\\", "") == "ruler: vt.jsonl"
    assert gridview.task_label("needle") == "needle"


def test_the_summary_of_no_trial_has_no_figures() -> None:
    assert summary([]) == {"n": 0, "infeasible": 0, "rule": None, "presets": {}, "smallest_feasible": None}


def test_a_link_opens_the_cell_with_its_failing_trial_first(visit: Visit, runs: Runs, results: Path) -> None:
    sweepfile.write(results / "grid.json", ABOUT, trials(runs.whole))
    app = visit(
        runs.folder, "benchmarks", suite="grid", task="needle", method="freekv", budget="20%", length=512, depth=0.1
    )
    assert any("1 of 2 right" in box.value for box in app.markdown)
    assert "trial with seed 2: expected '2222.', came '1111.'" in " ".join(box.value for box in app.text)
    assert list(app.dataframe[0].value["seed"]) == [2, 1]
    assert not [button for button in app.button if "again" in button.label], "its trace is stored: a link, no button"
    assert app.query_params["depth"] == "0.1"


def test_a_cell_that_was_not_run_says_why_and_no_score() -> None:
    done, infeasible, refused = (trials()[place] for place in (0, 7, 8))
    assert came_out([done, infeasible]) == "1 of 1 right"
    assert re.findall(r"\d+", came_out([infeasible])) == ["1"]
    assert "none run" in came_out([infeasible])
    assert came_out([infeasible]) != came_out([refused])
    assert came_out([done | {"score": None, "exact": None}]) == "1 prompt, none judged"
    assert came_out([infeasible, refused]) == "2 prompts, none run: refused"
    assert came_out([]) == "not run"


def test_a_trial_without_a_trace_is_run_again(
    visit: Visit, runs: Runs, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweepfile.write(results / "grid.json", ABOUT, trials())
    app = visit(
        runs.folder, "benchmarks", suite="grid", task="needle", method="freekv", budget="20%", length=512, depth=0.1
    )
    asked: list[dict[str, Any]] = []

    def refuse(trial: dict[str, Any]) -> str:
        asked.append(trial)
        raise ValueError("the method 'freekv' is not installed here.")

    monkeypatch.setattr("kvlens.app.ui.benchmarks.trials.submit_trial", refuse)
    next(button for button in app.button if "again" in button.label).click().run()
    assert (asked[0]["seed"], asked[0]["method"], asked[0]["budget"], asked[0]["model"]) == (2, "freekv", "20%", "demo")
    assert "not installed here" in app.error[0].value


def test_a_click_selects_a_cell_and_a_second_one_takes_it_back(visit: Visit, runs: Runs, results: Path) -> None:
    sweepfile.write(results / "grid.json", ABOUT, trials())
    app = visit(runs.folder, "benchmarks")
    assert not any("of 2 right" in box.value for box in app.markdown)

    chosen = Look("grid", "needle")
    st.session_state["k"] = {"selection": {"points": [{"customdata": ["freekv", "20%", 512, 0.9]}]}}
    gridview._clicked("k", chosen)
    assert st.session_state["bench_look"].cell == ("freekv", "20%", 512, 0.9)
    gridview._clicked("k", st.session_state["bench_look"])
    assert st.session_state["bench_look"].cell is None


def test_what_a_link_names_and_the_sweep_does_not_have_is_said(visit: Visit, runs: Runs, results: Path) -> None:
    sweepfile.write(results / "grid.json", ABOUT, trials())
    app = visit(runs.folder, "benchmarks", suite="other", task="none", method="sekv", budget="3%", length=7, depth="x")
    said = " ".join(box.value for box in app.warning)
    for part in ("sweep 'other' is not", "task 'none' is not", "depth 'x' is not a number"):
        assert part in said.replace("\\", "")


def test_infeasible_cells_and_files_without_depth_are_said(visit: Visit, runs: Runs, results: Path) -> None:
    sweepfile.write(results / "grid.json", ABOUT, trials())
    app = visit(runs.folder, "benchmarks", task="needle", method="sekv", budget="20%", length=512, depth=0.1)
    assert "not run" in " ".join(box.value for box in app.text)
    flat = [trial | {"length": None, "depth": None, "task": "ruler:vt.jsonl"} for trial in trials()[:5]]
    sweepfile.write(results / "grid.json", ABOUT, flat)
    app = visit(runs.folder, "benchmarks")
    assert any(sentences.NO_LENGTH_AND_DEPTH in box.value for box in app.info)
    assert app.dataframe[0].value[["method", "n", "score"]].values.tolist() == [["full", 4, 1.0], ["freekv", 1, 1.0]]


@pytest.mark.parametrize("text", ["not json", "[1]", '{"about": {}, "columns": ["task"], "trials": []}'])
def test_a_damaged_sweep_is_one_sentence(visit: Visit, runs: Runs, results: Path, text: str) -> None:
    (results / "grid.json").write_text(text)
    app = visit(runs.folder, "benchmarks")
    assert len(app.error) == 1
    assert "measure it again" in app.error[0].value


def test_the_committed_grid_can_be_shown(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "benchmarks")
    assert not app.error
    assert json.loads((Path(__file__).resolve().parents[2] / "kvlens/lab/results/grid-demo.json").read_text())["trials"]


def test_many_methods_stand_in_several_rows_of_panels_and_empty_places_are_blank() -> None:
    names = [f"m{number}" for number in range(10)]
    suite = Suite("grid", ABOUT, tuple(row(name, b, 512, 0.1, 1, 1.0) for name in names for b in ("10%", "20%")))
    figure = grid(cells(suite, "needle", False), {}, None)
    titles = [note.text for note in figure.layout.annotations]
    assert [name for name in titles if name in names] == names
    assert titles.count("budget 10%") == titles.count("budget 20%") == 2
    shown = [figure.get_subplot(row, column).xaxis for row in range(1, 5) for column in range(1, 9)]
    assert [axis.visible for axis in shown] == [None] * 18 + [False] * 6 + [None] * 2 + [False] * 6
    assert [axis.showticklabels for axis in shown[:2] + shown[8:10]] == [False, False, True, True]
