"""The Memory page: what it says of runs that move, of runs that do not, and of what was not recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from test_pages import words
from uiruns import Runs, Visit

from kvlens.app.ui.common import sentences
from kvlens.app.ui.memory import data as memorydata
from kvlens.records import PrefillRecord, StepRecord
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter
from kvlens.text.units import si_bytes
from tests.synthetic import write_synthetic

STILL, LEVEL, OPEN = "20260101-000000-still", "20260101-000001-level", "20260101-000002-open"


class Still(TraceWriter):
    """Moves nothing, as FullKV does."""

    def prefill(self, record: PrefillRecord) -> None:
        super().prefill(replace(record, transfers=[]))

    def step(self, record: StepRecord) -> None:
        none = {name: record.kv[name] * 0 for name in ("h2d_bytes", "d2h_bytes", "blocking_bytes")}
        kv = {name: value for name, value in record.kv.items() if name != "ideal_bytes"} | none
        super().step(replace(record, transfers=[], cold_bytes=0, kv=kv))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("memory-runs")
    write_synthetic(made, 2, 4, 2, 8, 12, uid=STILL, writer_class=Still)
    write_synthetic(made, 2, 4, 2, 8, 12, uid=LEVEL, trace_level="heads")
    write_synthetic(made, 2, 4, 2, 8, 300, uid=OPEN, budget_bytes=None, prompt_tokens=2000)
    return made


def charts(app: AppTest) -> dict[str, Any]:
    """Figures by title."""
    specs = [json.loads(element.proto.spec) for element in app.get("plotly_chart")]
    return {spec["layout"].get("title", {}).get("text", ""): spec for spec in specs}


def has_title(titles: Iterable[str], part: str) -> bool:
    """Return True if a chart's title contains the part."""
    return any(part in title for title in titles)


def test_without_runs_it_says_what_to_do(visit: Visit, tmp_path: Path) -> None:
    assert sentences.NO_RUNS in words(visit(tmp_path, "memory"))


def test_a_damaged_run_is_one_sentence(visit: Visit, runs: Runs) -> None:
    assert len(visit(runs.folder, "memory", run=runs.broken).error) == 1


def test_a_run_that_moves_has_every_section(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "memory", run=runs.whole, layer=1, head=5, step=3)
    text = words(app)
    for heading in (
        "What each tier held",
        "What moved",
        "What it cost",
        "Where the time went",
        "When copies ran",
        "Bytes by layer and KV head",
        "Where each span lay",
        "Moved, and not used",
        "The trace, and a timeline for Perfetto",
    ):
        assert heading in text
    titles = charts(app)
    assert len(titles) == 11
    assert [title for title in titles if title.startswith("Phases ")] != []
    assert "Waited for copies" not in {metric.label for metric in app.metric}
    assert has_title(titles, "of spans for L1 KV1 at the end")
    assert has_title(titles, "Steps 3–10: copies beside the")
    names = [curve["name"] for curve in titles["KV bytes by tier at the end of each decode step"]["data"]]
    assert any(name.startswith("budget: ") for name in names)
    assert any(name.startswith("full KV: ") for name in names)
    assert app.query_params["steps"] == "3-10"
    assert not app.exception


def test_what_was_moved_and_not_used_is_among_the_totals(visit: Visit, folder: Path, tmp_path: Path) -> None:
    uid = write_synthetic(
        tmp_path, 2, 4, 2, 20, 12, top_k=1
    )  # heads list one span each, so that some of what moved is unlisted
    app = visit(tmp_path, "memory", run=uid)
    with TraceReader.open(tmp_path, uid) as reader:
        copies = reader.moved_spans()
    idle = copies.loc[copies["verdict"] == "unlisted", "bytes"].sum()
    assert 0 < idle < copies["bytes"].sum()
    found = next(metric for metric in app.metric if metric.label == "Moved, not used")
    assert (found.value, found.delta.split(" ")[0]) == (si_bytes(float(idle)), f"{idle / copies['bytes'].sum():.1%}")
    for uid, value in ((STILL, "0 B"), (LEVEL, "not recorded")):
        app = visit(folder, "memory", run=uid)
        assert [metric.value for metric in app.metric if metric.label == "Moved, not used"] == [value]


def test_tokens_that_were_held_are_said_beside_the_budget(visit: Visit, tmp_path: Path) -> None:
    hold = {"span": 3, "tok_start": 10, "tok_end": 14, "heads": [[0, 0], [1, 1]], "from_step": 2}
    uid = write_synthetic(tmp_path, 2, 4, 2, 8, 12, hold=[hold])
    # 4 tokens for two (layer, KV head) pairs, keys and values of 64 numbers of two bytes
    text = words(visit(tmp_path, "memory", run=uid))
    assert "4 tokens are held" in text
    assert "beside the budget, 2.05 kB of keys and" in text


def test_the_range_of_the_timeline_is_in_the_link(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "memory", run=runs.whole, steps="5-6")
    assert has_title(charts(app), "Steps 5–6: copies beside the")
    slider = next(widget for widget in app.slider if widget.label == "Steps, first and last")
    slider.set_value((10, 12)).run()
    assert has_title(charts(app), "Steps 10–12: copies beside the")
    assert app.query_params["steps"] == "10-12"


def test_the_size_of_the_trace_stands_beside_that_of_attention_weights(visit: Visit, folder: Path) -> None:
    text = words(visit(folder, "memory", run=OPEN))
    size = (folder / OPEN / "trace.duckdb").stat().st_size
    with TraceReader.open(folder, OPEN) as reader:
        weights = 2 * 4 * int(reader.tokens()["step"].isna().sum()) * 2
    for part in (size, size / 8, weights):
        assert si_bytes(part) in text


def test_another_kv_head_is_chosen_for_all_pages(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "memory", run=runs.whole, layer=0, head=0)
    next(box for box in app.selectbox if box.label == "KV head").set_value(1).run()
    next(box for box in app.selectbox if box.label == "Layer").set_value(2).run()
    assert has_title(charts(app), "of spans for L2 KV1 at the end")
    assert (app.query_params["layer"], app.query_params["head"]) == ("2", "4")


def test_every_map_can_be_shown(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "memory", run=runs.whole)
    box = next(widget for widget in app.selectbox if widget.label == "Bytes")
    assert sentences.MOVED_TO_DEVICE in box.options
    for name in list(box.options):
        next(widget for widget in app.selectbox if widget.label == "Bytes").select(name).run()
        assert f"{name[0].upper()}{name[1:]}" in charts(app)


def test_a_run_that_moved_nothing_says_so_once_per_section(visit: Visit, folder: Path) -> None:
    app = visit(folder, "memory", run=STILL)
    said = [box.value for box in app.info]
    assert len(said) == 5
    assert any(sentences.NOTHING_MOVED in sentence for sentence in said)
    assert sentences.NOTHING_MOVED_IN_VAIN in said[-1]
    assert sentences.NOTHING_IN_HOST_MEMORY in words(app)
    assert len(charts(app)) == 5


def test_the_use_of_what_moved_is_not_guessed(visit: Visit, folder: Path) -> None:
    app = visit(folder, "memory", run=LEVEL)
    assert sentences.USE_NOT_KNOWN in words(app)
    box = next(widget for widget in app.selectbox if widget.label == "Bytes")
    assert not [name for name in box.options if "never" in name]


def test_no_limit_is_said_and_long_runs_show_some_spans(visit: Visit, folder: Path) -> None:
    app = visit(folder, "memory", run=OPEN, step=0)
    assert sentences.NO_LIMIT_SET in words(app)
    assert [metric.value for metric in app.metric if metric.label == "Budget"] == ["no limit"]
    assert "120 of 302 spans" in words(app)
    slider = next(widget for widget in app.slider if widget.label.startswith("First of the 120"))
    slider.set_value(150).run()
    assert "numbers 150 to 269" in words(app)


def test_a_run_without_figures_per_step_keeps_its_totals(visit: Visit, runs: Runs) -> None:
    app = visit(runs.folder, "memory", run=runs.summary)
    assert sentences.ON_DEVICE in charts(app)
    assert not app.exception


def test_bytes_by_head_add_up_to_the_run(runs: Runs) -> None:
    with TraceReader.open(runs.folder, runs.whole) as reader:
        copies = reader.moved_spans()
        frame = memorydata.head_bytes(reader, copies)
        assert frame["h2d_bytes_total"].sum() == reader.steps()["h2d_bytes"].sum()
        assert frame["unlisted_bytes_total"].sum() == copies.loc[copies["verdict"] == "unlisted", "bytes"].sum()
        values = memorydata.as_map(frame, "resident_bytes_mean", 3, 2)
        assert values.shape == (3, 2)
        assert (values > 0).all()


def test_a_raced_run_says_that_its_waits_are_short(visit: Visit, folder: Path, tmp_path: Path) -> None:
    write_synthetic(tmp_path, 2, 4, 2, 8, 12, uid=STILL, raced=5)
    assert "5 lanes" in words(visit(tmp_path, "memory", run=STILL))
    assert "5 lanes" not in words(visit(folder, "memory", run=LEVEL))


def test_a_run_of_a_batch_says_that_its_steps_were_of_all(visit: Visit, folder: Path, tmp_path: Path) -> None:
    write_synthetic(tmp_path, 2, 4, 2, 8, 12, uid=STILL, batched=7)
    assert "7 prompts" in words(visit(tmp_path, "memory", run=STILL))
    assert "7 prompts" not in words(visit(folder, "memory", run=LEVEL))
