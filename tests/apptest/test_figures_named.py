"""Figures of pages that are named for what they are: times, budgets, maps beside each other, labels, prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_pages import words
from uiruns import Visit

from kvlens.store.reader import TraceReader
from kvlens.tables.latency import latency, phase_means
from kvlens.text.units import duration, si_bytes
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("named")
    return folder, write_synthetic(folder, 2, 4, 2, 12, 14, seed=3, prompt_tokens=200, needle=[[30, 60]])


def test_both_times_of_memory_say_which_steps_they_are_of(visit: Visit, written: tuple[Path, str]) -> None:
    folder, uid = written
    app = visit(folder, "memory", run=uid)
    with TraceReader.open(folder, uid) as reader:
        per_token, means, steps = latency(reader).per_token, phase_means(reader), reader.n_steps
    assert duration(sum(means.values())) != duration(per_token)
    (metric,) = (metric for metric in app.metric if metric.value == duration(per_token))
    assert metric.label.endswith("after the first")
    assert f"all {steps} steps" in words(app)


def test_replay_gives_the_budget_as_a_share_of_full_kv(visit: Visit, written: tuple[Path, str]) -> None:
    folder, uid = written
    with TraceReader.open(folder, uid) as reader:
        budget, full = reader.meta.budget_bytes, reader.meta.full_kv_bytes
    assert budget is not None
    assert full is not None
    text = words(visit(folder, "replay", run=uid))
    assert f"held to {si_bytes(budget)}, {budget / full:.1%} of full KV" in text
    assert f"({si_bytes(full)})" in text


def test_the_two_maps_of_a_span_share_one_scale(visit: Visit, written: tuple[Path, str]) -> None:
    folder, uid = written
    app = visit(folder, "spans", run=uid)
    figures = [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]
    maps = [figure for figure in figures if "mean of steps" in str(figure["layout"].get("title", {}).get("text"))]
    assert len(maps) == 2
    scales = [(trace["zmin"], trace["zmax"]) for figure in maps for trace in figure["data"] if trace.get("zmax")]
    assert len(scales) == 2
    assert scales[0] == scales[1]
    for figure in maps:
        assert {figure["layout"][axis].get("exponentformat") for axis in ("xaxis4", "yaxis")} == {"none"}


def test_names_of_parameters_are_read_without_backslashes(visit: Visit, written: tuple[Path, str]) -> None:
    app = visit(written[0], "run")
    labels = [box.label for kind in (app.number_input, app.selectbox, app.text_input, app.checkbox) for box in kind]
    assert any(re.fullmatch(r"\w+_\w+.*", label) for label in labels), "some parameter has an underscore"
    assert not [label for label in labels if re.search(r"\\[_(]", label)]
