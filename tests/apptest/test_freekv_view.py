"""FreeKV's view over real runs of the demo model: corrected and speculated, one step only, nothing selected, summaries
only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from test_pages import words
from uiruns import Visit

from kvlens.app.figures.methods import freekv as figures
from kvlens.store.reader import TraceReader


def charts(app: AppTest) -> list[str]:
    return [str(chart.proto.spec) for chart in app.get("plotly_chart")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """(folder of runs, what was asked -> run id)."""
    from kvlens.demo.encode import demo_encode
    from kvlens.demo.tasks import make_prompt
    from kvlens.runs.carrying import carry_out
    from kvlens.runs.request import RunRequest
    from kvlens.text.prompts import PromptText

    made = tmp_path_factory.mktemp("freekv")
    source = PromptText(make_prompt("multikey", 600, 0.5, 1, demo_encode()).text)
    asked: dict[str, dict[str, Any]] = {
        "some": {"budget": "40%", "overrides": {"tau": "0.5", "dense_layers": "1"}, "max_new": 20, "ignore_eos": True},
        "one": {"budget": "40%", "max_new": 1},
        "all": {"budget": "40%", "overrides": {"recall": "all"}, "max_new": 6, "ignore_eos": True},
        "nothing": {"budget": "1.0", "max_new": 4},
        "summary": {"budget": "40%", "max_new": 4, "trace_level": "summary"},
    }
    uids = {}
    for name, settings in asked.items():
        request = RunRequest(model="demo", method="freekv", **settings)
        uids[name], status, _ = carry_out(request, source, made, lambda phase, done, total: None, lambda: False)
        assert status == "completed"
    return made, uids


def test_everything_is_shown_and_the_sums_add_up(visit: Visit, folder: tuple[Path, dict[str, str]]) -> None:
    made, uids = folder
    app = visit(made, "method", run=uids["some"], layer=2, head=5)
    text, shown = words(app), charts(app)
    assert len(shown) == 9
    for title in (
        "Query similarity by KV head",
        "Corrections",
        "Hits and misses",
        "Does similarity tell",
        "What moved",
        "What it cost",
    ):
        assert title in text
    with TraceReader.open(made, uids["some"]) as reader:
        corrected, similarity = reader.head_cube("corrected")[1:, 1:, ::4], reader.kv_cube("similarity")
        assert np.isnan(similarity[0]).all()
        assert np.isnan(similarity[:, 0]).all(), "layer 0 is dense"
        np.testing.assert_array_equal(corrected, similarity[1:, 1:] < 0.5)
        qcos = reader.head_cube("qcos")[1:, 1:].reshape(19, 5, 2, 4).mean(-1)
        np.testing.assert_allclose(similarity[1:, 1:], qcos, atol=1.1e-4)  # both are stored to four decimals
        moved, blocking = reader.kv_cube("h2d_bytes"), reader.kv_cube("blocking_bytes")
        np.testing.assert_array_equal(moved, reader.kv_cube("n_recalled") * 2 * 16 * 32 * 4)
        np.testing.assert_array_equal(blocking[1:, 1:], np.where(corrected == 1, moved[1:, 1:], 0))
        np.testing.assert_array_equal(blocking[0], moved[0])
        table = reader.transfer_times()
        assert set(table.loc[table["direction"] == "h2d", "cause"]) == {"recall", "correction", "prefetch"}
    assert f"Correction rate {corrected.mean():.3f} of 190 decisions" in text
    assert "τ = 0.5" in "".join(shown).encode().decode("unicode_escape")


@pytest.mark.parametrize(
    ("name", "said", "count"),
    [
        ("one", "One decode step: nothing was speculated yet.", 3),
        ("all", "Not shown: without reuse of pages (recall=all)", 8),
        ("nothing", "All tokens stayed on the device", 1),
        ("summary", "keeps whole-run statistics only", 1),
    ],
)
def test_what_was_not_recorded_is_said(
    visit: Visit, folder: tuple[Path, dict[str, str]], name: str, said: str, count: int
) -> None:
    app = visit(folder[0], "method", run=folder[1][name])
    assert said in words(app)
    assert len(charts(app)) == count


def test_the_map_keeps_what_was_not_recorded_apart_from_zero() -> None:
    values = np.array([[np.nan, np.nan], [0.0, 1.0]])
    figure = figures.kv_map(values, "Rate", "share", (1, 0), (0.0, 1.0))
    heat, missing = figure.data
    assert np.isnan(heat.z[0]).all()
    assert missing.z[0].tolist() == [1.0, 1.0]
    assert missing.texttemplate == "%{text}", "a template alone is drawn over the cells that were recorded"
    assert np.array(missing.text).tolist() == [["n/r", "n/r"], ["", ""]]
    assert heat.hovertext[0][0] == "layer 0, KV head 0: not recorded"
    assert heat.hovertext[1][0] == "layer 1, KV head 0: 0.000"


def test_reuse_is_weighed_by_pages() -> None:
    """Two cases in the bin 0.9 to 1: 3 of 4 and 0 of 2 pages kept are 3 of 6; one without pages counts nowhere."""
    similarity = np.array([[[0.95, 0.92, -0.35, 0.91]]])
    hits, misses = np.array([[[3.0, 0, 1, 0]]]), np.array([[[1.0, 2, 1, 0]]])
    share, cases = figures.reuse_by_similarity(similarity, hits, misses, 0.8).data
    assert list(share.y) == [0.5, 0.5]
    assert list(cases.y) == [1, 2]
    np.testing.assert_allclose(list(share.x), [-0.35, 0.95])


def test_corrections_per_step_leave_out_what_was_not_decided() -> None:
    cube = np.array([[[np.nan, np.nan], [np.nan, np.nan]], [[np.nan, np.nan], [1.0, 0.0]]])
    bars, heat = figures.correction_timeline(cube).data
    assert np.isnan(bars.y[0])
    assert bars.y[1] == 0.5
    assert heat.z[1][1] == 0.5
    assert np.isnan(heat.z[0]).all()
