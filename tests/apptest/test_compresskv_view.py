"""CompressKV's view of the Method page over real small runs, and its figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from support import task_prompt
from test_pages import words
from uiruns import Visit

from kvlens.app.figures.methods import compresskv as figures
from kvlens.app.figures.tokenstrip import token_strip
from kvlens.app.methods.compresskv import normalised
from kvlens.app.ui.common import sentences
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest


def charts(app: AppTest) -> list[Any]:
    return list(app.get("plotly_chart"))


@pytest.fixture(scope="module")
def made(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Runs on the demo model: as calibrated, without a calibration, without a budget."""
    folder = tmp_path_factory.mktemp("compresskv-runs")
    prompt, _ = task_prompt(demo, "needle", 512, seed=1)
    uids = {}
    bare = {"heads": "all", "layers": "equal", "peek": False}
    for name, budget, overrides in (("calibrated", "0.25", {}), ("bare", "0.25", bare), ("whole", "1.0", {})):
        request = RunRequest(method="compresskv", budget=budget, max_new=6, overrides=overrides)
        uids[name] = carry_out(request, prompt.source, folder, lambda *args: None, lambda: False)[0]
    return folder, uids


def test_calibrated_run_shows_heads_budgets_and_tokens(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    app = visit(folder, "method", run=uids["calibrated"])
    text = words(app)
    assert len(charts(app)) == 4
    assert "heads=srh, at most 4 per layer" in text
    assert re.search(r"would score [\d.]+", text)
    assert "the layers kept L0:" in text
    assert sentences.LAST_TOKEN_IN_WINDOW in text
    app.radio[0].set_value("raw").run()
    assert not app.exception
    assert "answer copied" in words(app)
    app.slider[0].set_value(0).run()
    assert not app.exception


def test_a_run_without_calibration_says_what_was_not_recorded(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    app = visit(folder, "method", run=uids["bare"])
    text = words(app)
    assert sentences.NO_HEAD_SCORES in text
    assert "for every layer (layers=equal)" in text
    assert sentences.NO_LAYER_ERRORS in text
    assert "the tokens kept (peek=false)" in text
    assert len(charts(app)) == 3


def test_a_run_that_dropped_nothing_shows_all_tokens_kept(visit: Visit, made: tuple[Path, dict[str, str]]) -> None:
    folder, uids = made
    app = visit(folder, "method", run=uids["whole"])
    assert len(charts(app)) == 4
    assert "Of the needle's" in words(app)


def test_l1_normalisation() -> None:
    np.testing.assert_allclose(normalised(np.array([[1.0, 3.0], [0.0, 4.0]])), [[1 / 8, 3 / 8], [0, 1 / 2]])
    assert normalised(np.zeros((2, 2))).tolist() == [[0, 0], [0, 0]]


def test_token_texts_are_shown_literally() -> None:
    kept = np.array([[1.0, 0.0]])
    figure = token_strip(kept, None, 5, ["<b>x</b>", " \n"], [])
    assert list(figure.layout.xaxis.ticktext) == ["&lt;b&gt;x&lt;/b&gt;", "␣⏎"]
    assert "&lt;b&gt;" in figures.kept_map(kept, [], ["<b>", "y"], 2).data[0].text[0][0]


def test_long_prompts_are_joined_and_shares_are_right() -> None:
    rng = np.random.default_rng(0)
    kept = (rng.random((32, 20_001)) < 0.3).astype(float)
    figure = figures.kept_map(kept, [(5, 9)], ["t"] * 20_001, 19_990)
    z = np.asarray(figure.data[0].z)
    width = -(-kept.size // figures.CELLS)
    assert z.shape == (32, -(-20_001 // width))
    np.testing.assert_allclose(z[:, 0], kept[:, :width].mean(1))
    np.testing.assert_allclose(z[:, -1], kept[:, (z.shape[1] - 1) * width :].mean(1))
    assert "3 neighbouring positions joined" in figure.layout.title.text


def test_budget_lines_stand_where_they_are() -> None:
    figure = figures.layer_budgets(np.array([16.0, 40.0]), np.array([0.2, 0.8]), 16, 84)
    assert [shape.y0 for shape in figure.layout.shapes] == [16, 84, 28]
    assert len(figures.layer_budgets(np.array([16.0, 40.0]), None, 16, 84).data) == 1


@pytest.mark.parametrize("page", ["replay", "heads"])
def test_other_pages_open_its_runs(visit: Visit, made: tuple[Path, dict[str, str]], page: str) -> None:
    folder, uids = made
    assert not visit(folder, page, run=uids["calibrated"], step=2, layer=1).error
