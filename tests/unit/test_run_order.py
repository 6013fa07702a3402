"""The order of the list of runs, in which the newest run is first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvlens.store.catalog import list_runs
from kvlens.store.catalogueentry import ABOUT
from kvlens.store.runinfo import CREATED_US, SUMMARY
from tests.synthetic import write_synthetic

SECOND = "2026-01-01T00:00:00+00:00"
UIDS = ("20260101-000000-cccccc", "20260101-000000-aaaaaa", "20260101-000000-bbbbbb")
"""in the order of writing"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for uid in UIDS:
        write_synthetic(folder, 1, 2, 1, 2, 4, uid=uid, trace_level="summary", prompt_tokens=20)
        change(folder, uid, created=SECOND)
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A copy of the runs, which a test may change."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


def change(folder: Path, name: str, **fields: Any) -> None:
    """Change fields of the run.json of the run `name`; None removes a field."""
    path = folder / name / "run.json"
    info = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps({key: value for key, value in info.items() if value is not None}), encoding="utf-8")


def test_runs_of_one_second_are_listed_newest_first(runs: Path) -> None:
    listed = list_runs(runs)
    assert listed["created"].unique().tolist() == [SECOND]
    assert listed["uid"].tolist() == [*reversed(UIDS)]
    assert listed.columns.tolist() == [*SUMMARY, *ABOUT]


@pytest.mark.parametrize("stamp", [None, "soon", -1, True, 1.5])
def test_a_run_without_a_finer_stamp_is_the_oldest_of_its_second(runs: Path, stamp: Any) -> None:
    change(runs, UIDS[2], **{CREATED_US: stamp})
    assert list_runs(runs)["uid"].tolist() == [UIDS[1], UIDS[0], UIDS[2]]


def test_the_second_decides_before_the_finer_stamp(runs: Path) -> None:
    change(runs, UIDS[0], created="2026-01-01T00:00:01+00:00", **{CREATED_US: 1})
    assert list_runs(runs)["uid"].tolist() == [UIDS[0], UIDS[2], UIDS[1]]


def test_runs_of_versions_without_a_finer_stamp_are_listed_by_uid(runs: Path) -> None:
    for uid in UIDS:
        change(runs, uid, **{CREATED_US: None})
    assert list_runs(runs)["uid"].tolist() == sorted(UIDS, reverse=True)
