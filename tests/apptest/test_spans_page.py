"""The Spans page: every section, the preview marked as one, what was not recorded said, selections by link, row and
click."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from test_pages import words
from uiruns import MARKUP, Runs, Visit

from kvlens.app.data.spanmap import settings
from kvlens.app.figures.spancolors import UNKNOWN
from kvlens.app.ui.common import sentences
from kvlens.app.ui.spans import map as spansmap
from kvlens.records import PrefillRecord
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter
from kvlens.text.words import STATES
from tests.synthetic import write_synthetic

PLAIN, FEW, SILENT = "20260101-000000-plain", "20260101-000001-fewer", "20260101-000002-silent"


class NoKeys(TraceWriter):
    """Records no span keys, as earlier schemas did."""

    def prefill(self, record: PrefillRecord) -> None:
        super().prefill(replace(record, span_keys=None))


class NoSurprisal(NoKeys):
    def prefill(self, record: PrefillRecord) -> None:
        super().prefill(replace(record, tokens=[replace(token, surprisal=None) for token in record.tokens]))


PCA, CUT = "PCA of mean span keys", "how it was cut and placed"
"""titles of a chart and of a column"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("span-runs")
    write_synthetic(made, 2, 4, 2, 8, 24, uid=PLAIN, writer_class=NoKeys, trace_level="heads", prompt_tokens=300)
    write_synthetic(made, 2, 4, 2, 8, 6, uid=FEW, prompt_tokens=300)
    write_synthetic(made, 2, 4, 2, 8, 24, uid=SILENT, writer_class=NoSurprisal, prompt_tokens=300)
    return made


def figures(app: AppTest) -> dict[str, Any]:
    """Figures by title."""
    specs = [json.loads(element.proto.spec) for element in app.get("plotly_chart")]
    return {spec["layout"]["title"]["text"]: spec for spec in specs}


def names(spec: Any) -> list[str]:
    return [trace.get("name", "") for trace in spec["data"]]


BOUNDARIES = "Surprisal of each token, and where segmenters cut the text"


def test_without_runs_it_says_what_to_do(visit: Visit, tmp_path: Path) -> None:
    assert sentences.NO_RUNS in words(visit(tmp_path, "spans"))


def test_a_damaged_run_is_one_sentence(visit: Visit, runs: Runs) -> None:
    assert len(visit(runs.folder, "spans", run=runs.broken).error) == 1


def test_every_section_of_a_run(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "spans", run=runs.whole, step=5, layer=1, head=2, span=4)
    charts, text = figures(app), words(app)
    readers = {
        "Mass on the span, Full attention by the run's own query, mean of steps",
        "Mass on the span, This run, mean of steps",
        "Mass on the span, L1 Q2",
    }
    assert set(charts) == {BOUNDARIES, f"{PCA}, L1 KV0", "Lengths of 22 spans", *readers}
    others = [
        "entropy (SeKV)",
        "entropy as printed (SeKV)",
        "pages (CHESS)",
        "chunks (CHESS)",
        "grids (CHESS)",
        "pages (FreeKV)",
        "sentence chunks (SentKVCompress)",
    ]
    assert [name for name in names(charts[BOUNDARIES]) if name in others] == others
    assert "Spans at step 5, for L1 Q2 (KV0)" in text
    assert "Needle, tokens 5–11" in text
    assert "previews" in text
    assert sentences.PCA_DISTANCES in text
    table = next(frame.value for frame in app.dataframe if "regret (share)" in frame.value)
    with TraceReader.open(runs.folder, runs.whole) as reader:
        oracle = reader.oracle(5, 1, 2).set_index("span")
        states = reader.span_states(5, 1, 0).set_index("span")["state"]
        spans = reader.spans().set_index("span")
    for row in table.to_dict("records"):
        if row["span"] in oracle.index:
            assert row["own-query mass (share)"] == pytest.approx(oracle.at[row["span"], "own"])
            assert np.isnan(row["full KV's mass (share)"])  # this run has no reference
            assert row["regret (share)"] == pytest.approx(oracle.at[row["span"], "regret"])
        assert row["state"] == STATES[states[row["span"]]]
        assert row[CUT] == spans.at[row["span"], "reason"]
    assert [row["span"] for row in table.to_dict("records") if row[""] == "●"] == [4]
    assert spans.at[4, "reason"] in [element.value for element in app.text]


def test_the_what_if_is_marked_and_in_the_link(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "spans", run=runs.whole)
    assert "did not cut" in words(app)
    assert "alpha" not in app.query_params
    app.slider[0].set_value(-1.0).run()
    text = words(app)
    assert "PREVIEW, alpha -1: threshold" in text
    made_of = r"PREVIEW threshold -?\d+\.\d\d nats: mean \d+\.\d\d, deviation \d+\.\d\d, alpha -1"
    assert any(re.fullmatch(made_of, name) for name in names(figures(app)[BOUNDARIES]))
    assert "PREVIEW: alpha -1" in names(figures(app)[BOUNDARIES])
    assert app.query_params["alpha"] == "-1"
    again = visit(runs.folder, "spans", run=runs.whole, alpha="-1")
    assert "PREVIEW, alpha -1: threshold" in words(again)


def test_a_link_that_cannot_be_read_is_one_sentence_each(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "spans", run=runs.whole, alpha="much", color="taste")
    said = [box.value.replace("\\", "") for box in app.warning]
    assert [re.findall(r"'(\w+)'.* (\w+)\.$", sentence) for sentence in said] == [[("taste", "mass")], [("much", "1")]]


@pytest.mark.parametrize("color", ["own", "regret", "state", "tok_start", "mean_surprisal"])
def test_spans_have_the_colour_that_was_asked_for(visit: Visit, runs: Runs, color: str) -> None:
    app = visit(runs.folder, "spans", run=runs.whole, color=color, step=5)
    assert app.query_params["color"] == color
    drawn = figures(app)
    for spec in drawn.values():
        if color == "state" and not spec["layout"]["title"]["text"].startswith(("Lengths", "Mass")):
            assert {"resident", "summary only"} <= set(names(spec))
    assert not app.exception


def test_the_shared_selection_is_changed_here(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "spans", run=runs.whole, step=5, layer=0, head=0)
    next(box for box in app.selectbox if box.label == "Query head").set_value(5).run()
    next(box for box in app.number_input if box.label == "Step").set_value(9).run()
    assert "Spans at step 9, for L0 Q5 (KV1)" in words(app)
    assert (app.query_params["step"], app.query_params["head"]) == ("9", "5")
    assert any("mean span keys, L0 KV1" in title for title in figures(app))


def test_text_of_tokens_is_never_markup(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "spans", run=runs.whole)
    spec = figures(app)[BOUNDARIES]
    hover = [text for trace in spec["data"] for text in (trace.get("hovertext") or []) if isinstance(text, str)]
    assert not [text for text in hover if MARKUP in text]
    assert [text for text in hover if "&lt;b&gt;x" in text]


def test_keys_that_were_not_recorded_are_said(visit: Visit, folder: Path) -> None:
    app = visit(folder, "spans", run=PLAIN)
    text = words(app)
    assert sentences.NO_SPAN_KEYS in text
    assert sentences.NO_REFERENCE_MASS in text
    table = next(frame.value for frame in app.dataframe if "regret (share)" in frame.value)
    assert table["mass (share)"].isna().all()
    assert len(figures(app)) == 2


def test_few_spans_have_no_umap(visit: Visit, folder: Path) -> None:
    app = visit(folder, "spans", run=FEW, proj="umap")
    assert "too few for UMAP" in words(app)
    assert any(title.startswith(PCA) for title in figures(app))
    assert "proj" not in app.query_params


def test_without_surprisal_nothing_is_cut(visit: Visit, folder: Path) -> None:
    app = visit(folder, "spans", run=SILENT)
    assert "surprisals" in words(app)
    assert names(figures(app)[BOUNDARIES])[2:] == ["recorded", UNKNOWN]
    assert not app.slider
    assert any("regret (share)" in frame.value for frame in app.dataframe)


def test_a_long_text_is_shown_in_parts(visit: Visit, tmp_path: Path) -> None:
    uid = write_synthetic(tmp_path, 1, 2, 1, 3, 60, prompt_tokens=5000)
    app = visit(tmp_path, "spans", run=uid)
    slider = next(widget for widget in app.slider if widget.label.startswith("First of the 4,096"))
    slider.set_value(700).run()
    assert figures(app)[BOUNDARIES]["layout"]["xaxis"]["range"] == [699.5, 4795.5]


def test_a_stored_umap_is_shown_and_a_missing_one_is_made_while_pca_stands_in(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 4, 24, prompt_tokens=300)
    begun: list[Path] = []

    class Waiting:
        """Begins and never ends."""

        def job(self, out: Path) -> Any:
            from kvlens.app.ui.common.jobs import Job

            return Job("1", [], "UMAP", 0.0, state="running", phase="import", started=0.0) if out in begun else None

        def start(self, out: Path, *_: Any) -> None:
            begun.append(out)

    monkeypatch.setattr(spansmap, "maps", Waiting)
    app = visit(tmp_path, "spans", run=uid, proj="umap", layer=1, head=0)
    assert "loading umap-learn" in words(app)
    assert any("mean span keys, L1 KV0" in title for title in figures(app))
    with TraceReader.open(tmp_path, uid) as reader:
        spans, _, _ = reader.span_keys(1, 0) or (np.empty(0), None, None)
    points = np.random.default_rng(0).normal(size=(len(spans), 2))
    begun[0].parent.mkdir()
    begun[0].write_text(json.dumps({**settings(1, 0, 15), "spans": spans.tolist(), "points": points.tolist()}))
    app = visit(tmp_path, "spans", run=uid, proj="umap", layer=1, head=0)
    drawn = figures(app)["UMAP of mean span keys, L1 KV0"]
    assert sum(len(trace["customdata"]) for trace in drawn["data"] if trace.get("customdata")) == len(spans)
    assert "A distance in UMAP is neither attention" in words(app)
    assert (app.query_params["proj"], app.query_params["neighbors"]) == ("umap", "15")


def test_a_umap_that_failed_says_why_and_can_be_tried_again(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 4, 24, prompt_tokens=300)
    tries: list[Path] = []

    class Failing:
        def job(self, out: Path) -> Any:
            from kvlens.app.ui.common.jobs import Job

            return Job("1", [], "UMAP", 0.0, state="failed", message="No module named 'umap'", started=0.0, ended=1.0)

        def start(self, out: Path, *_: Any) -> None:
            tries.append(out)

    monkeypatch.setattr(spansmap, "maps", Failing)
    app = visit(tmp_path, "spans", run=uid, proj="umap")
    assert "UMAP failed, PCA is shown: No module named 'umap'" in app.error[0].value.replace("\\", "")
    next(button for button in app.button if button.label == "Try UMAP again").click().run()
    assert len(tries) == 1
