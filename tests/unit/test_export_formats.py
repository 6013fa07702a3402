"""The format of an exported file: by its ending, by --format, and what is refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from support import raises_code
from test_bad_input import kvlens as end_status
from test_cli import kvlens as end_well

from kvlens.refusal import Refusal
from kvlens.runs.races import Entrant
from kvlens.runs.request import RunRequest
from kvlens.studies import storage
from kvlens.studies.plan import StudyPlan
from kvlens.text.outfile import format_of

FORMATS = ("csv", "parquet", "json")


@pytest.mark.parametrize(
    ("name", "file", "form"),
    [
        (None, None, "csv"),
        (None, "rows", "csv"),
        (None, "rows.PARQUET", "parquet"),
        (None, "rows.json", "json"),
        ("parquet", None, "parquet"),
        ("csv", "rows.csv", "csv"),
        ("csv", "rows.tsv", "csv"),
    ],
)
def test_a_format_is_the_named_one_or_that_of_the_ending(name: str | None, file: str | None, form: str) -> None:
    assert format_of(None if file is None else Path(file), name, FORMATS) == form


def test_an_ending_of_no_format_or_of_another_one_is_refused() -> None:
    with raises_code("unknown_ending", Refusal, ending="xlsx"):
        format_of(Path("rows.xlsx"), None, FORMATS)
    with raises_code("other_ending", Refusal, ending="parquet"):
        format_of(Path("rows.parquet"), "csv", FORMATS)


def test_exports_write_what_the_ending_says_and_refuse_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path / "runs"))
    plan = StudyPlan(shared=RunRequest(model="demo"), entrants=(Entrant(method="snapkv"),))
    study = storage.create(tmp_path / "runs", plan, []).id
    for file in ("a.csv", "a.parquet", "a.xlsx", "a.json", "folder/a.xls"):
        target = tmp_path / file
        known = file in ("a.csv", "a.parquet")
        if known:
            end_well("studies", "export", study, "--out", str(target))
        else:
            assert end_status(monkeypatch, "studies", "export", study, "--out", str(target)) == 1
        assert target.exists() is known
    assert not (tmp_path / "folder").exists()
    assert "prompt" in pd.read_parquet(tmp_path / "a.parquet").columns
    for file, options in (("d.xlsx", ()), ("d.parquet", ("--format", "csv"))):
        assert end_status(monkeypatch, "export", "--what", "dictionary", "--out", str(tmp_path / file), *options) == 1
        assert not (tmp_path / file).exists()
    end_well("export", "--what", "dictionary", "--out", str(tmp_path / "d.json"))
    assert json.loads((tmp_path / "d.json").read_text())
    end_well("export", "--what", "dictionary", "--out", str(tmp_path / "d.parquet"))
    assert len(pd.read_parquet(tmp_path / "d.parquet"))
