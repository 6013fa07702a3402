"""The Method page: title from the catalogue, a view per method, and the generic view of all others."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest
from test_pages import words
from uiruns import Runs, Visit

from kvlens import methods
from kvlens.app.ui import method as methodview
from kvlens.app.ui.common import parts, sentences
from kvlens.app.ui.method.cuts import by_span, of_head, shares
from kvlens.app.ui.method.journal import listing, long
from kvlens.instruments import CutRow
from kvlens.records import PrefillRecord, StepRecord
from kvlens.rows import JournalRow
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter
from kvlens.text.units import si_bytes
from tests.synthetic import write_synthetic

BARE, TALKER, STILL = "20260101-000000-bare", "20260101-000001-talker", "20260101-000002-still"
DROPPER = "20260101-000003-dropper"
HOSTILE = "<a href='https://example.com'>x</a> **y**"


class Bare(TraceWriter):
    """Logs no journal, no ranking, no cut and no transfer."""

    def prefill(self, record: PrefillRecord) -> None:
        super().prefill(replace(record, transfers=[], journal=[]))

    def step(self, record: StepRecord) -> None:
        super().step(replace(record, transfers=[], journal=[], cuts=[], scores=None))


class Dropper(TraceWriter):
    """Drops tokens of the prompt by a score when prefill ends, and notes nothing."""

    def prefill(self, record: PrefillRecord) -> None:
        numbers = {"dropped": [5, 2], "pos": [9, 30], "rank": [12, 31]}
        lists = {name: np.array(values, np.int32) for name, values in numbers.items()}
        row = CutRow(-1, 0, 1, 40, 11, 0.75, np.array([1, 2]), **lists, score=np.array([0.5, 0.25], np.float32))
        super().prefill(replace(record, transfers=[], journal=[], cuts=[row]))

    def step(self, record: StepRecord) -> None:
        super().step(replace(record, transfers=[], journal=[], cuts=[], scores=None))


class Talker(TraceWriter):
    """Logs names of every shape a method may use."""

    def step(self, record: StepRecord) -> None:
        at = record.step
        extra = [
            JournalRow(at, layer, head, "per head", np.array([at + head, np.nan]))
            for layer in (0, 1)
            for head in (0, 1)
        ]
        extra += [
            JournalRow(at, layer, head, "per head number", np.array([at * head])) for layer in (0, 1) for head in (0, 1)
        ]
        extra += [
            JournalRow(at, None, None, "growing", np.arange(at, dtype=float)),
            JournalRow(at, None, None, "nothing", np.array([])),
        ]
        extra += [JournalRow(at, None, None, HOSTILE, np.array([np.nan]))]
        if at == 3:
            extra += [JournalRow(at, layer, None, "once per layer", np.array([layer])) for layer in (0, 1)]
        super().step(replace(record, journal=[*record.journal, *extra]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a method that is not installed and so has the generic view."""
    made = tmp_path_factory.mktemp("method-runs")
    write_synthetic(made, 2, 4, 2, 8, 12, uid=BARE, method="elsewhere", writer_class=Bare)
    write_synthetic(made, 2, 4, 2, 8, 12, uid=TALKER, method="elsewhere", writer_class=Talker)
    write_synthetic(made, 2, 4, 2, 8, 12, uid=DROPPER, method="elsewhere", writer_class=Dropper)
    write_synthetic(made, 2, 4, 2, 8, 12, uid=STILL, method="elsewhere", trace_level="summary")
    return made


def pick(app: AppTest, name: str) -> AppTest:
    box = next(widget for widget in app.selectbox if widget.label == "Show")
    box.set_value(name).run()
    assert not app.exception
    assert not app.error
    return app


def charts(app: AppTest) -> list[Any]:
    return list(app.get("plotly_chart"))


def test_without_runs_it_says_what_to_do(visit: Visit, tmp_path: Path) -> None:
    assert sentences.NO_RUNS in words(visit(tmp_path, "method"))


def test_a_damaged_run_is_one_sentence(visit: Visit, runs: Runs) -> None:
    assert len(visit(runs.folder, "method", run=runs.broken).error) == 1


def test_the_title_comes_from_the_catalogue(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "method", run=runs.whole)
    assert app.subheader[0].value == "SeKV"
    assert app.query_params["run"] == runs.whole
    assert not app.exception


def test_a_method_that_is_not_installed_has_its_name_and_the_generic_view(visit: Visit, folder: Path) -> None:
    app = visit(folder, "method", run=TALKER)
    assert app.subheader[0].value == "elsewhere"
    assert sentences.METHOD_NOT_LISTED in words(app)
    assert "What moved" in words(app)
    assert "While decoding:" in words(app)
    assert len(charts(app)) == 7
    table = next(frame.value for frame in app.dataframe if "meaning" in frame.value).set_index("name")
    assert table.loc["head_share", "noted"].startswith("end of prefill")
    assert table.loc["best_score", "noted"] == "steps 0–7 per layer"
    assert table.loc["once per layer", "noted"] == "step 3 per layer"
    assert table.loc["growing", "length"] == "0–7"
    assert set(table["meaning"]) == {"not described"}


NAMES = (
    "best_score",
    "expanded",
    "growing",
    "head_share",
    "nothing",
    "once per layer",
    "per head",
    "per head number",
    "threshold",
    HOSTILE,
)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_journal_can_be_shown(visit: Visit, folder: Path, name: str) -> None:
    app = pick(visit(folder, "method", run=TALKER), name)
    assert len(charts(app)) == 7
    assert "<a href" not in charts(app)[-1].proto.spec


def test_a_run_that_moved_and_noted_nothing_says_so(visit: Visit, folder: Path) -> None:
    app = visit(folder, "method", run=BARE)
    text = words(app)
    assert sentences.NOTHING_MOVED in text
    assert sentences.NO_COPY in text
    assert "noted nothing" in text
    (only,) = (json.loads(chart.proto.spec) for chart in charts(app))
    assert only["layout"]["yaxis"]["title"]["text"].startswith("bytes read")
    with TraceReader.open(folder, BARE) as reader:
        each = reader.kv_cube("read_bytes").sum((1, 2))
        assert f"{si_bytes(float(each.mean()))} per step, mean, {each.mean() / reader.meta.full_kv_bytes:.1%}" in text


def test_spans_are_shown_as_the_head_ranked_them(visit: Visit, folder: Path) -> None:
    app = visit(folder, "method", run=TALKER, step=2, layer=1, head=2)
    with TraceReader.open(folder, TALKER) as reader:
        found = reader.scores(2, 1, 2 // (reader.q_heads // reader.kv_heads))
    said = f"of {found.attrs['candidates']} candidates the {len(found)} best are recorded, {found['chosen'].sum()} of"
    assert said in words(app)
    drawn = next(json.loads(chart.proto.spec) for chart in charts(app) if "ranked them" in chart.proto.spec)
    assert "L1 KV1 at step 2" in drawn["layout"]["title"]["text"]
    assert len(found) > 0


def test_a_run_without_figures_per_step_keeps_its_journal(visit: Visit, folder: Path) -> None:
    assert len(charts(visit(folder, "method", run=STILL, layer=0, head=0))) == 6


def test_what_a_ranking_dropped_is_drawn_with_the_line_of_the_cut(visit: Visit, folder: Path) -> None:
    app = visit(folder, "method", run=DROPPER, layer=0, head=2)
    text = words(app)
    assert "What was evicted" in text
    assert "L0 KV1 evicted 7 tokens of" in text
    assert "noted nothing" not in text
    drawn = [json.loads(chart.proto.spec) for chart in charts(app)]
    assert len(drawn) == 3, "nothing was evicted while decoding; the last is what was read"
    titles = [axis["title"]["text"] for axis in (drawn[1]["layout"]["yaxis"], drawn[1]["layout"]["yaxis2"])]
    assert [title.partition(" (")[0] for title in titles] == ["tokens", "score"]
    other = words(visit(folder, "method", run=DROPPER, layer=1, head=0))
    assert "L1 KV0 evicted 0 tokens" in other


def test_a_cut_by_span_is_of_one_kv_head(folder: Path) -> None:
    with TraceReader.open(folder, DROPPER) as reader:
        spans, rows = reader.spans(), reader.all_cuts()
        table = by_span(spans, of_head(rows, 0, 1)).set_index("span")
        assert table["dropped"].drop([1, 2]).eq(0).all()
        assert table.loc[[1, 2], ["dropped", "score", "cut"]].to_numpy().tolist() == [[5, 0.5, 0.75], [2, 0.25, 0.75]]
        assert table["cut"].eq(0.75).all()
        assert by_span(spans, of_head(rows, 1, 1))["dropped"].sum() == 0
        share, names, order = shares(reader, rows)
        assert names == ["L0 KV0", "L0 KV1", "L1 KV0", "L1 KV1"]
        assert share.sum() == share[1].sum()
        assert share[1, order.index(1)] == 5 / table.loc[1, "tokens"]


def test_meanings_come_from_the_method(visit: Visit, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {
        "name": "elsewhere",
        "title": "Elsewhere",
        "summary": "keeps it",
        "paper": "P",
        "journal_names": {"threshold": "a share"},
        "presets": {"made up": {"coarse": False}, "paper": {}},
    }
    monkeypatch.setattr(parts, "installed_entry", lambda name: entry)
    app = pick(visit(folder, "method", run=TALKER), "threshold")
    assert app.subheader[0].value == "Elsewhere"
    assert "threshold: a share" in words(app)
    assert "keeps it." in words(app)
    with TraceReader.open(folder, TALKER) as reader:
        assert reader.meta.preset == "made up"
    assert "up sets coarse=False; what is said" in words(app)


def maps(reader: TraceReader) -> None:
    """A view of a method of its own."""
    for metric in ("zoom_rate", "similarity", "corrected"):
        parts.head_map(reader, metric, f"Map of {metric}")


def test_a_method_with_a_view_of_its_own_may_use_the_map(
    visit: Visit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methodview, "view", lambda name: maps)
    app = visit(folder, "method", run=TALKER, layer=1, head=3)
    text = words(app)
    assert "What moved" not in text
    assert len(charts(app)) == 2
    assert "Selected: L1 Q3 (KV1)" in text
    assert "Corrected was not recorded" in text


def test_a_view_lies_beside_its_method_and_an_absent_one_falls_through() -> None:
    views = Path(inspect.getfile(methodview)).parents[2] / "methods"
    for name in methods.registry():
        own = (views / f"{name}.py").exists()
        assert methodview.view(name).__module__ == (
            f"kvlens.app.methods.{name}" if own else methodview.generic.__name__
        )
    assert methodview.view("of a plugin that is gone").__module__ == methodview.generic.__name__
    assert sum(methodview.view(name).__module__.startswith("kvlens.app.methods.") for name in methods.registry()) >= 5


def test_a_journal_is_handed_out_number_by_number(folder: Path) -> None:
    with TraceReader.open(folder, TALKER) as reader:
        frame = reader.journal()
        table = long(frame)
        assert len(table) == sum(map(len, frame["values"]))
        assert list(table.columns) == ["step", "layer", "kv_head", "name", "index", "value"]
        growing = table[(table["name"] == "growing") & (table["step"] == 5)]
        assert growing["index"].tolist() == growing["value"].tolist() == [0, 1, 2, 3, 4]
        assert long(reader.journal("absent")).empty
        assert isinstance(listing(frame, {}), pd.DataFrame)
