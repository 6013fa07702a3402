"""Runs whose decode steps were computed with those of other prompts: lists and exports mark them, and their times are
compared with no other."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import raises_code

from kvlens.api.columns import RUNS
from kvlens.app.compare.totals import TIMES, Total, beside, totals, totals_table
from kvlens.app.ui.home.runtable import shown_runs
from kvlens.lens.listing import Search
from kvlens.lens.runlist import search_runs
from kvlens.runs.races import Entrant
from kvlens.runs.request import RunRequest
from kvlens.store.catalog import list_runs
from kvlens.store.reader import TraceReader
from kvlens.studies import storage
from kvlens.studies.figures import figures_of
from kvlens.studies.plan import StudyPlan
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.running import carry_out
from kvlens.studies.storage import StudyInfo, Trial
from kvlens.studies.table import Results
from kvlens.tables.dictionary import RUN, dictionary
from kvlens.tables.manyruns import export_runs, table_of_runs
from kvlens.text.prompts import PromptText
from kvlens.workers.lanes import BadCrew, Crew, resuming_crew
from tests.synthetic import write_synthetic

ALONE, BATCH = "20260101-000000-aaaaaa", "20260101-000001-bbbbbb"
SIZE = 4


class Silent:
    """Hears of a study (kvlens.studies.running.Audience)."""

    def report(self, phase: str, number: int, total: int) -> None:
        """Nothing of it is needed."""

    def trial(self, finished: int, total: int, *rest: Any) -> None:
        """Nothing of it is needed."""


READERS: dict[str, Any] = {"csv": pd.read_csv, "parquet": pd.read_parquet, "json": pd.read_json}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run alone, and one whose steps were those of SIZE prompts."""
    folder = tmp_path_factory.mktemp("runs")
    write_synthetic(folder, 2, 4, 2, 8, 6, seed=1, uid=ALONE)
    write_synthetic(folder, 2, 4, 2, 8, 6, seed=1, uid=BATCH, batched=SIZE)
    path = folder / BATCH / "run.json"  # a real run's batch is known when it ends
    info = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(info | {"extra": info["extra"] | {"batched": SIZE}}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("fmt", ["csv", "parquet", "json"])
@pytest.mark.parametrize("table", ["steps", "meta"])
def test_a_row_of_an_export_has_the_prompts_of_its_steps(runs: Path, table: str, fmt: str) -> None:
    out = io.BytesIO()
    export_runs([ALONE, BATCH], runs, table, fmt, out)
    frame = READERS[fmt](io.BytesIO(out.getvalue()))
    sizes = frame.groupby("uid")["batched"].first()
    assert sizes[BATCH] == SIZE
    assert pd.isna(sizes[ALONE])
    assert frame.loc[frame["batched"].isna(), "uid"].unique().tolist() == [ALONE]


def test_the_column_has_its_type_unit_and_meaning_whichever_runs_there_are(runs: Path) -> None:
    for uids in ([ALONE], [BATCH], [ALONE, BATCH]):
        out = io.BytesIO()
        export_runs(uids, runs, "steps", "parquet", out, with_run=True)
        field = pq.read_schema(io.BytesIO(out.getvalue())).field("batched")
        assert field.type == pa.int64()
        assert field.metadata[b"unit"] == b"prompts"
    assert table_of_runs([ALONE], runs, "steps").attrs["units"]["batched"] == "prompts"
    entry = dictionary().set_index(["table", "column"]).loc[("run", "batched")]
    assert (entry["unit"], entry["meaning"]) == (RUN["batched"].unit, RUN["batched"].meaning)


def test_lists_of_runs_have_it_from_run_json_and_from_the_catalogue(runs: Path) -> None:
    for _ in range(2):  # the second time from the catalogue
        listed = list_runs(runs).set_index("uid")["batched"]
        assert (listed[BATCH], pd.isna(listed[ALONE])) == (SIZE, True)
    found = search_runs(runs, Search()).set_index("uid")
    assert found.loc[BATCH, "batched"] == SIZE
    assert RUNS["batched"].unit == "prompts"


def test_the_table_of_runs_has_its_column_where_a_run_has_it(runs: Path) -> None:
    table = list_runs(runs).assign(role="")
    for uids, there in (([ALONE, BATCH], True), ([ALONE], False)):
        part = table[table["uid"].isin(uids)]
        assert ("prompts at once" in shown_runs(part, [None] * len(part))) == there


def test_times_of_common_steps_are_compared_with_no_other(runs: Path) -> None:
    with TraceReader.open(runs, ALONE) as alone, TraceReader.open(runs, BATCH) as batch:
        all_totals = {"A": totals(alone), "B": totals(batch)}
    for a, b in zip(*all_totals.values(), strict=True):
        assert (a.batched, b.batched) == (None, SIZE if b.unit in TIMES else None)
    frame = totals_table(all_totals, ("A", "B")).set_index("quantity")
    refused = beside(Total("x", "s", 1.0), Total("x", "s", 2.0, batched=SIZE))
    assert frame.loc["decoding took", "B beside A"] == refused
    assert refused != beside(Total("x", "s", 1.0), Total("x", "s", 2.0))
    assert str(SIZE) in refused
    assert frame.loc["decode steps", "B beside A"] == "the same"
    both = Total("x", "ms", 2.0, batched=8)
    assert beside(both, both) != "the same"
    assert beside(Total("x", "ms", 2.0), Total("x", "ms", 2.0)) == "the same"


def test_a_trial_of_common_steps_has_no_time_and_a_curve_takes_none(runs: Path) -> None:
    figures = {}
    for uid in (ALONE, BATCH):
        with TraceReader.open(runs, uid) as reader:
            figures[uid] = figures_of(reader)
    assert figures[ALONE]["ms_per_step"] > 0
    assert "ms_per_step" not in figures[BATCH]
    plan = StudyPlan(shared=RunRequest(model="demo"), entrants=(Entrant(method="snapkv"),), budgets=("10%", "20%"))
    trials = [
        Trial(uid, arm.key(), "completed", uid, figures=figures[uid]) for arm in plan.arms()[1:] for uid in figures
    ]
    prompts = [StudyPrompt(uid, PromptText("a text")) for uid in figures]
    results = Results(StudyInfo(id="20260101-000000-aaaaaa", created="", plan=plan), prompts, trials)
    assert results.curve("budget", "ms_per_step")["uids"].tolist() == [[ALONE], [ALONE]]
    assert results.curve("budget", "resident_share")["n"].tolist() == [2, 2]
    matrix = results.matrix().set_index("label")
    assert matrix.loc["SnapKV 10%", "ms_per_step"] == figures[ALONE]["ms_per_step"]


@pytest.mark.parametrize(("given", "size"), [((1, None, None), 3), ((1, None, 2), 2), ((2, None, None), 1)])
def test_a_study_goes_on_with_the_batch_of_the_last_time(
    tmp_path: Path, given: tuple[int, str | None, int | None], size: int
) -> None:
    plan = StudyPlan(shared=RunRequest(model="demo"), entrants=(Entrant(method="full"),))
    info = storage.create(tmp_path, plan, [])
    for crew in (Crew(batch=3), resuming_crew(*given)):
        assert carry_out(tmp_path, info.id, Silent(), lambda: False, crew=crew), "it has no prompts"
    assert storage.read(tmp_path, info.id).batch == size
    with raises_code("batch_with_workers", BadCrew):
        carry_out(tmp_path, info.id, Silent(), lambda: False, crew=Crew(2, batch=4))
    assert storage.read(tmp_path, info.id).batch == size
