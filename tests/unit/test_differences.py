"""What lists name of runs of one method: the settings that differ among them, and no conditions."""

from __future__ import annotations

from pathlib import Path

import pytest
from lensruns import without_facts
from typer.testing import CliRunner

import kvlens
from kvlens.app.compare.names import short_names
from kvlens.cli.main import app
from kvlens.lens.listing import Listing, Search, differences_in
from kvlens.lens.runlist import search_runs
from kvlens.methods import FIT, get, make_parameters
from kvlens.methods.differences import BUDGET, DTYPE, QUESTION, SEED, RunSettings, tell_apart, varied
from kvlens.store.outcomefacts import parameter_texts
from kvlens.store.reader import TraceReader, list_runs
from tests.synthetic import write_synthetic

FreeKV = get("freekv")
CONDITIONS = {BUDGET: "20%", QUESTION: "in", DTYPE: "float32", SEED: "0"}


def settings(requested: str = "", conditions: dict[str, str] | None = None, **parameters: str) -> RunSettings:
    return RunSettings(parameters, frozenset(requested.split()), CONDITIONS | (conditions or {}))


def test_a_name_that_is_absent_somewhere_differs() -> None:
    assert varied([{"a": 1, "b": "x"}, {"a": "1", "b": "y", "c": 0}]) == ["b", "c"]
    assert varied([]) == []


def test_what_differs_within_a_group_is_named_with_the_value_of_each() -> None:
    runs = [
        settings("tau", tau="0.7", window="16"),
        settings("", tau="0.9", window="32"),
        settings("tau", tau="0.9", window="16"),
        None,
    ]
    assert tell_apart(["a", "a", "b", "a"], runs) == ["tau 0.7", "tau 0.9", "", ""]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (BUDGET, "40%", "40%"),
        (QUESTION, "after", "question after"),
        (DTYPE, "bfloat16", "in bfloat16"),
        (SEED, "7", "seed 7"),
    ],
)
def test_settings_besides_parameters_are_named_where_a_list_wants_them(name: str, value: str, expected: str) -> None:
    runs = [settings(), settings(conditions={name: value})]
    assert tell_apart("aa", runs)[1] == expected
    assert tell_apart("aa", runs, ()) == ["", ""]


def _write(folder: Path, number: int, overrides: dict[str, object], **meta: object) -> str:
    config = {**parameter_texts(vars(make_parameters(FreeKV, None, {}))), **overrides, **dict(meta.pop("fitted", {}))}  # type: ignore[call-overload]
    about = {"method": "freekv", "preset": FIT, "config": config, "request": {"overrides": overrides}, "budget": "0.35"}
    uid = f"20260301-00000{number}-free"
    return write_synthetic(folder, 2, 4, 2, 4, 8, prompt_tokens=80, uid=uid, **(about | meta))  # type: ignore[arg-type]


def test_lists_name_what_was_set_and_not_what_a_preset_computed(tmp_path: Path) -> None:
    low = _write(tmp_path, 0, {"tau": 0.7}, fitted={"page": 8})
    high = _write(tmp_path, 1, {"tau": 0.9}, fitted={"page": 16})
    repeat = _write(tmp_path, 2, {"tau": 0.9, "page": 16}, parent=high)
    asked = _write(tmp_path, 3, {"tau": 0.9}, seed=4)
    expected = {low: "tau 0.7, seed 0", high: "tau 0.9, seed 0", repeat: "tau 0.9, seed 0", asked: "tau 0.9, seed 4"}
    listed = search_runs(tmp_path, Search())
    assert dict(zip(listed["uid"], listed["differs"], strict=True)) == expected
    without_facts(tmp_path, low, high, repeat, asked)
    table = list_runs(tmp_path)
    listed_runs = Listing(tmp_path).read(table["uid"].tolist())
    words = differences_in(table.to_dict("records"), listed_runs, ())
    assert dict(zip(table["uid"], words, strict=True)) == {
        low: "tau 0.7",
        **dict.fromkeys((high, repeat, asked), "tau 0.9"),
    }
    readers = [TraceReader.open(tmp_path, uid) for uid in (low, high)]
    assert [name.rpartition(" ")[0] for name in short_names(readers)] == ["FreeKV tau", "FreeKV tau"]
    assert search_runs(tmp_path, Search(low))["differs"].tolist() == [""]


def test_parameters_that_leave_the_preset_are_set_ones(tmp_path: Path) -> None:
    """As those of a study's arm, which are set after the preset was chosen."""
    changed = _write(tmp_path, 0, {}, preset=None, fitted={"tau": 0.31})
    usual = _write(tmp_path, 1, {}, preset=None)
    words = dict(search_runs(tmp_path, Search())[["uid", "differs"]].itertuples(index=False, name=None))
    assert words == {changed: "tau 0.31", usual: f"tau {FreeKV.Parameters().tau}"}


def test_runs_of_a_study_that_varies_a_parameter_have_other_names(tmp_path: Path) -> None:
    values = {"freekv": {"tau": (0.7, 0.9)}}
    kvlens.study(
        "needle@length=120@prompts=1",
        ["freekv"],
        ["60%"],
        values=values,
        model="demo",
        max_new=2,
        runs=tmp_path,
        progress=False,
        trace_level="summary",
    )
    frame = kvlens.runs(method="freekv", runs=tmp_path)
    assert sorted(frame["differs"]) == ["tau 0.7", "tau 0.9"]
    assert "differs" in frame.attrs["columns"]
    listed = CliRunner().invoke(app, ["runs", "--runs", str(tmp_path)], env={"COLUMNS": "400"})
    assert [listed.stdout.count(f"freekv tau {tau}") for tau in (0.7, 0.9)] == [1, 1]
