"""The list of runs: looked through, grouped by prompt, opened by a click, named, tagged, deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import streamlit as st
from lensruns import LensRuns, write_lens_runs
from streamlit.testing.v1 import AppTest
from test_pages import words
from uiruns import Visit, redate

from kvlens.app.ui.home.runtable import table_key
from kvlens.app.ui.home.ticked_runs import _repeats
from kvlens.store.about import FILE, About, read_about, write_about
from kvlens.store.runinfo import Lease
from tests.synthetic import write_synthetic


@pytest.fixture
def lens(tmp_path: Path) -> LensRuns:
    return write_lens_runs(tmp_path)


def uids(app: AppTest) -> list[str]:
    return [uid for table in app.dataframe for uid in table.value["run"]]


def choose(app: AppTest, *rows: int, cell: bool = False) -> AppTest:
    """Ticks rows of the first table, or clicks into one."""
    selection: dict[str, Any] = {"rows": [], "columns": [], "cells": []}
    selection |= {"cells": [[rows[0], "output"]]} if cell else {"rows": list(rows)}
    app.session_state[table_key(list(app.dataframe[0].value["run"]))] = {"selection": selection}
    app.run()
    assert not app.exception, app.exception
    return app


def button(app: AppTest, label: str) -> Any:
    return next(each for each in app.button if each.label == label)


def test_what_is_looked_for_is_in_the_address_and_a_link_restores_it(visit: Visit, lens: LensRuns) -> None:
    write_about(lens.folder, lens.kept, About(name="the <b>calm</b> one", tags=("show",)))
    app = visit(lens.folder)
    assert set(uids(app)) == {lens.lost, lens.repeated, lens.kept, lens.plain}
    app.selectbox(key="outcome").set_value("lost").run()
    assert set(uids(app)) == {lens.lost, lens.repeated}
    for asked, found in (
        ({"outcome": "lost"}, {lens.lost, lens.repeated}),
        ({"find": "CALM b"}, {lens.kept}),
        ({"tag": "show"}, {lens.kept}),
        ({"method": "full"}, {lens.full}),
        ({"method": "SeKV", "model": "synthetic", "find": "4172"}, {lens.lost, lens.repeated, lens.kept, lens.plain}),
    ):
        assert set(uids(visit(lens.folder, **asked))) == found, asked


def test_nothing_found_is_a_sentence_and_a_way_back(visit: Visit, lens: LensRuns) -> None:
    app = visit(lens.folder, find="nowhere", outcome="lost")
    assert not app.dataframe
    assert "7 runs matches" in words(app)
    button(app, "Show all runs").click().run()
    assert len(uids(app)) == 4
    assert "find" not in app.query_params


def test_by_prompt_each_is_there_once_with_how_many_are_right(visit: Visit, tmp_path: Path) -> None:
    about: dict[str, Any] = {"answer": "4172", "task": None, "prompt_tokens": 80}
    answers = (("What?", " 4172."), ("Which?", " no"), ("What?", " 99"), ("What?", "4172"))
    for number, (text, output) in enumerate(answers):
        uid = f"20260101-00000{number}-answer"
        write_synthetic(tmp_path, 2, 4, 2, 4, 8, uid=uid, output_text=output, prompt_text=text, **about)
        redate(tmp_path / uid / "run.json", f"2026-01-01T00:00:0{number}+00:00")
    app = visit(tmp_path, by_prompt="true")
    assert [len(table.value) for table in app.dataframe] == [3, 1]
    said = [caption.value for caption in app.caption if caption.value.startswith("Expected")]
    assert said == [
        "Expected 4172; 2 of 3 right; 3 of 3 left full KV",
        "Expected 4172; 0 of 1 right; 1 of 1 left full KV",
    ]
    links = [link.proto for link in app.get("page_link") if link.proto.page == "compare"]
    assert [link.query_string.count("%2C") for link in links] == [2]


def test_a_click_opens_and_ticks_choose(visit: Visit, lens: LensRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    went: list[tuple[str, str]] = []
    monkeypatch.setattr(st, "switch_page", lambda page, query_params: went.append((page, query_params["run"])))
    app = visit(lens.folder)
    shown = uids(app)
    choose(app, 2, cell=True)
    assert went == [("pages/replay.py", shown[2])]
    app = choose(visit(lens.folder), 0, 1)
    assert len(went) == 1
    assert "2 runs" in words(app)
    (link,) = (link.proto for link in app.get("page_link") if link.proto.label == "Compare")
    assert link.query_string == f"runs={shown[0]}%2C{shown[1]}"


def test_a_run_is_named_and_the_pickers_say_so(visit: Visit, lens: LensRuns) -> None:
    app = visit(lens.folder)
    uid = uids(app)[0]
    choose(app, 0)
    app.text_input(key=f"about_name_{uid}").set_value("the *port*")
    app.text_area(key=f"about_note_{uid}").set_value("<script>x</script>")
    app.multiselect(key=f"about_tags_{uid}").set_value([])
    button(app, "Save").click().run()
    assert not app.error
    assert read_about(lens.folder / uid) == About(name="the *port*", note="<script>x</script>")
    row = visit(lens.folder).dataframe[0].value.set_index("run").loc[uid]
    assert (row["name"], row["note"]) == ("the *port*", "<script>x</script>")
    picker = visit(lens.folder, "replay", run=uid).selectbox(key="run_picker_Replay")
    assert any(label.startswith("the *port* · ") and label.endswith(uid) for label in picker.options)


def test_a_damaged_about_is_one_sentence_and_hides_nothing(visit: Visit, lens: LensRuns) -> None:
    (lens.folder / lens.kept / FILE).write_text("{")
    app = visit(lens.folder)
    assert set(uids(app)) == {lens.lost, lens.repeated, lens.kept, lens.plain}
    assert [lens.kept in box.value.replace("\\", "") for box in app.error] == [True]


def test_runs_are_deleted_with_their_repeats_and_one_in_use_stays(visit: Visit, lens: LensRuns) -> None:
    app = visit(lens.folder)
    shown = uids(app)
    repeated, kept = shown.index(lens.repeated), shown.index(lens.kept)
    choose(app, kept, repeated)
    app.checkbox(key="runs_delete_repeats").set_value(True).run()
    with Lease(lens.folder / lens.kept):
        app.button(key="runs_delete").click().run()
    assert lens.kept in app.error[0].value.replace("\\", "")
    left = {path.name for path in lens.folder.iterdir() if path.is_dir()}
    assert left == {lens.lost, lens.kept, lens.plain, lens.full}


def test_a_try_of_another_budget_is_a_repeat_as_a_hold_is() -> None:
    rows = {"hold": [False, True, False, False], "forced": [False] * 4, "changed": [None, None, True, None]}
    table = pd.DataFrame({"uid": ["run", "held", "cheaper", "again"], "parent": [None, "run", "run", "run"]} | rows)
    assert _repeats(table, ["run"]) == ["held", "cheaper"]


def test_runs_that_differ_in_a_parameter_have_other_names_in_lists_and_pickers(visit: Visit, tmp_path: Path) -> None:
    values = {"20260301-000000-low": 0.7, "20260301-000001-high": 0.9}
    for uid, tau in values.items():
        about: dict[str, Any] = {
            "method": "freekv",
            "preset": None,
            "config": {"tau": tau},
            "request": {"overrides": {"tau": tau}},
        }
        write_synthetic(tmp_path, 2, 4, 2, 4, 8, uid=uid, prompt_tokens=80, **about)
    app = visit(tmp_path)
    assert dict(zip(app.dataframe[0].value["run"], app.dataframe[0].value["method"], strict=True)) == {
        uid: f"FreeKV tau {tau}" for uid, tau in values.items()
    }
    app = visit(tmp_path, "replay", run=next(iter(values)))
    for uid, tau in values.items():
        (label,) = (label for label in app.selectbox(key="run_picker_Replay").options if uid in label)
        assert f"tau {tau}" in label
    app = visit(tmp_path, "compare", runs=",".join(values))
    for key in ("compare_a", "compare_b"):
        assert sorted(app.selectbox(key=key).options) == ["FreeKV tau 0.7", "FreeKV tau 0.9"]
    assert all(
        any(f"tau {tau}" in label for label in app.multiselect(key="compare_runs").options) for tau in values.values()
    )
