"""CHESS's view of the Method page over real small runs, and its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from support import task_prompt
from test_pages import words
from uiruns import Visit

from kvlens.app.figures.methods import chess as figures
from kvlens.app.ui.common import sentences
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.text.prompts import PromptText


def charts(app: AppTest) -> list[Any]:
    return list(app.get("plotly_chart"))


@pytest.fixture(scope="module")
def made(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Runs on the demo model: with triggers, without, whole-run statistics only, and one that fills no page."""
    folder = tmp_path_factory.mktemp("chess-runs")
    prompt, _ = task_prompt(demo, "list", 512, seed=1)
    uids = {}
    for name, overrides, level, source in (
        ("dynamic", {"threshold_entropy": 0.0, "threshold_varentropy": 0.0}, "spans", prompt.source),
        ("never", {"trigger": "never"}, "spans", prompt.source),
        ("summary", {}, "summary", prompt.source),
        ("tiny", {"page": 32}, "spans", PromptText("The code is")),
    ):
        request = RunRequest(method="chess", max_new=26, overrides=overrides, trace_level=level, ignore_eos=True)
        uids[name] = carry_out(request, source, folder, lambda *args: None, lambda: False)[0]
    return folder, uids


def test_reconstructions_triggers_and_shares_are_shown(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    app = visit(folder, "method", run=uids["dynamic"])
    text = words(app)
    assert "of full KV in float32 with page vectors" in text
    assert sentences.NOTHING_COPIED in text
    assert "above 0 nats and above 0 nats² (dashed)" in text.replace("\\", "")
    assert len(charts(app)) == 4
    app.select_slider[0].set_value(app.select_slider[0].options[-1]).run()
    assert not app.exception


def test_a_run_without_triggers_has_one_selection(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    app = visit(folder, "method", run=uids["never"])
    assert not app.select_slider
    assert sentences.NEVER_REBUILT in words(app).replace("\\", "")


def test_not_recorded_is_said_as_such(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    assert "not recorded" in words(visit(folder, "method", run=uids["summary"]))
    text = words(visit(folder, "method", run=uids["tiny"]))
    assert sentences.NO_SELECTION in text
    assert sentences.NO_PAGE_COMPLETED in text


def level(name: str, width: int, score: list[float], kept: list[float]) -> figures.Level:
    return figures.Level(name, width, np.array(score), np.array(kept))


def test_strips_show_what_was_kept_and_what_is_attended_anyway() -> None:
    """Four pages of 4 tokens, the first a sink, the last the window, one token more; page 2 is kept."""
    nan = np.nan
    levels = (
        level("grid", 16, [2.0], [1.0]),
        level("chunk", 8, [1.0, 3.0], [0.0, 1.0]),
        level("page", 4, [nan, 1.0, 3.0], [0, 0, 1]),
    )
    figure = figures.strips(figures.Reconstruction(-1, levels, (1, 3, 4), 17), [(9, 11)])
    assert figure.layout.title.text.partition(": ")[2] == "kept 1 of 1 grids, 1 of 2 chunks, 1 of 2 pages"
    bands = {trace.y[0]: trace for trace in figure.data if trace.type == "heatmap"}
    assert list(bands[-7.9].x) == [0, 4, 8, 12, 16, 17]
    selected, safe = (trace.z[0] for trace in figure.data if trace.type == "heatmap" and trace.y[0] == -7.9)
    np.testing.assert_array_equal(np.isfinite(selected), [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(np.isfinite(safe), [1, 0, 0, 1, 1])
    assert [trace.x[0] for trace in figure.data if trace.type == "scatter" and trace.y[0] == -8.3] == [9.5]
    assert bands[-5.3].text[0][0].startswith("page 0: ")
    assert figure.data[0].text[0][0] == "grid 0, tokens 0–15: score 2, kept"


def test_unjudged_pages_are_not_drawn_and_thresholds_are() -> None:
    figure = figures.uncertainty(
        [7, 8, 9], np.array([np.nan, 0.5, 2.0]), np.array([np.nan, 0.1, 0.4]), np.array([0, 0, 1]), (1.0, 0.2)
    )
    assert figure.layout.title.text.startswith("2 pages ")
    assert {trace.name: list(trace.x) for trace in figure.data} == {
        "reconstructed: uncertain (1)": [2.0],
        "not (1)": [0.5],
    }
    assert [(shape.x0, shape.y0) for shape in figure.layout.shapes] == [(1.0, 0), (0, 0.2)]
    wide = figures.uncertainty([1, 2], np.array([0.001, 2.0]), np.array([0.0, 0.4]), np.zeros(2), (np.nan, np.nan))
    assert (wide.layout.xaxis.type, wide.layout.yaxis.type) == ("log", "linear")


def test_shares_not_recorded_are_gaps() -> None:
    figure = figures.attended_share(np.array([0.1, np.nan, 0.2]), [-1, 2])
    assert not figure.data[0].connectgaps
    assert "1 reconstruction while" in figure.layout.title.text
