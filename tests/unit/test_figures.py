"""Figures: every recorded column is described, what was not recorded is never drawn as zero, both heads are named."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from kvlens.app.figures.heads import head_histogram, head_map
from kvlens.app.figures.loss import span_bars
from kvlens.app.figures.timeline import head_timeline
from kvlens.recording.metrics import METRICS, head_label, metric_of, value_text
from kvlens.rows import HEAD_COLUMNS, KV_COLUMNS
from kvlens.text.units import counted, duration, si_bytes


@pytest.fixture
def values() -> np.ndarray:
    """[4 layers, 8 query heads], one not recorded."""
    table = np.linspace(0.0, 1.0, 32).reshape(4, 8)
    table[2, 5] = np.nan
    return table


def heatmaps(figure: go.Figure) -> list[go.Heatmap]:
    return [trace for trace in figure.data if isinstance(trace, go.Heatmap)]


def test_every_recorded_column_is_described_at_its_level() -> None:
    assert {name for name, metric in METRICS.items() if metric.level == "q"} == set(HEAD_COLUMNS)
    assert {name for name, metric in METRICS.items() if metric.level == "kv"} == set(KV_COLUMNS)
    assert all(metric.unit and metric.doc for metric in METRICS.values())


def test_a_missing_value_is_grey_and_named_never_zero(values: np.ndarray) -> None:
    figure = head_map(values, 2, metric_of("coverage"), (0, 0), "mean")
    main, missing = heatmaps(figure)
    assert np.isnan(main.z[2][5])
    assert missing.z[2][5] == 1
    assert np.isnan(missing.z[0][0])
    assert missing.texttemplate == "%{text}"
    assert [(row, column) for row, column in np.ndindex(4, 8) if missing.text[row][column] == "n/r"] == [(2, 5)]
    assert set(missing.text.ravel()) == {"", "n/r"}, "a label in a cell with a value would lie over it"
    targets = next(trace for trace in figure.data if trace.type == "scatter")
    assert "not recorded" in targets.hovertext[2 * 8 + 5]


def test_the_overlay_carries_layer_and_query_head_and_names_the_kv_head(values: np.ndarray) -> None:
    figure = head_map(values, 2, metric_of("coverage"), (0, 0), "mean")
    targets = next(trace for trace in figure.data if trace.type == "scatter")
    assert list(targets.customdata[3 * 8 + 6]) == [3, 6]
    assert targets.hovertext[3 * 8 + 6].startswith("L3 Q6 (KV1)")
    assert figure.layout.hoverdistance == -1


def test_the_selection_is_outlined_on_its_cell(values: np.ndarray) -> None:
    boxes = [
        shape
        for shape in head_map(values, 2, metric_of("coverage"), (3, 6), "mean").layout.shapes
        if shape.type == "rect"
    ]
    assert [(box.x0, box.x1, box.y0, box.y1) for box in boxes] == [(5.5, 6.5, 2.5, 3.5)]


def test_marginals_are_means_over_recorded_cells_only(values: np.ndarray) -> None:
    bars = [trace for trace in head_map(values, 2, metric_of("coverage"), (0, 0), "mean").data if trace.type == "bar"]
    assert bars[0].y[5] == pytest.approx(np.mean(values[[0, 1, 3], 5]))
    assert bars[1].x[2] == pytest.approx(np.mean(np.delete(values[2], 5)))


def test_shares_use_the_whole_range_unless_asked_to_fit(values: np.ndarray) -> None:
    small = values / 10
    assert heatmaps(head_map(small, 2, metric_of("coverage"), (0, 0), "mean"))[0].zmax == 1.0
    assert heatmaps(head_map(small, 2, metric_of("coverage"), (0, 0), "mean", fit=True))[0].zmax == pytest.approx(0.1)


def test_signed_metrics_are_symmetric_around_zero() -> None:
    assert metric_of("qcos").bounds(np.array([0.2, 0.9])) == (-1.0, 1.0)
    assert metric_of("qcos").value_range(np.array([0.2, 0.9])) == (-0.9, 0.9)


@pytest.mark.parametrize("builder", [head_map, head_histogram])
def test_a_metric_without_any_value_still_draws(builder: object) -> None:
    empty = np.full((2, 4), np.nan)
    if builder is head_map:
        assert len(heatmaps(head_map(empty, 2, metric_of("entropy"), (0, 0), "mean"))) == 2
    else:
        assert "8 not recorded" in head_histogram(empty, metric_of("entropy"), (0, 0)).layout.title.text


@pytest.mark.parametrize("layers", [2, 48])
def test_one_target_of_a_map_is_drawn_and_a_large_map_has_no_cell_text(layers: int) -> None:
    figure = head_map(np.zeros((layers, 40)), 8, metric_of("coverage"), (0, 0), "mean")
    (targets,) = (trace for trace in figure.data if trace.type == "scatter")
    assert (targets.marker.maxdisplayed, len(targets.customdata)) == (1, layers * 40)
    assert (heatmaps(figure)[0].texttemplate is None) == (layers == 48)


def test_a_timeline_has_gaps_a_cursor_and_units() -> None:
    values = np.array([0.1, np.nan, 0.3])
    figure = head_timeline(values, metric_of("coverage"), "L0 Q0 (KV0)", 2, 0, 2)
    assert figure.data[0].connectgaps is False
    assert "1 of 3 steps not recorded" in figure.layout.title.text
    assert figure.layout.xaxis.title.text == "decode step"
    assert figure.layout.yaxis.title.text == "share"
    assert [shape.x0 for shape in figure.layout.shapes if shape.type == "line"] == [2]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (5e6, "5 MB"), (7.25e9, "7.25 GB")]
)
def test_bytes_are_decimal(value: float, text: str) -> None:
    assert si_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(999.4, "999 B"), (999.7, "1 kB"), (999_499, "999 kB"), (999_700, "1 MB"), (999.9e6, "1 GB"), (3.2e12, "3.2 TB")],
)
def test_bytes_that_round_up_take_the_next_unit(value: float, text: str) -> None:
    assert si_bytes(value) == text


def test_a_mean_of_yes_and_no_is_a_share() -> None:
    corrected = metric_of("corrected")
    assert value_text(0.9565217, corrected) == "0.9565"
    figure = head_map(np.full((2, 4), 0.5), 2, corrected, None, "mean over steps 0–69")
    assert heatmaps(figure)[0].colorbar.title.text == "share"
    assert "mean (share)" in [axis.title.text for axis in (figure.layout.xaxis3, figure.layout.xaxis4)]


def test_what_is_counted_has_its_plural() -> None:
    assert [counted(n, "page") for n in (0, 1, 2000)] == ["0 pages", "1 page", "2,000 pages"]
    assert [counted(n, "copy", "copies") for n in (1.0, 3.0)] == ["1 copy", "3 copies"]


@pytest.mark.parametrize(
    ("us", "text"),
    [(999.4, "999 µs"), (999.8, "1 ms"), (612_000, "612 ms"), (999_900, "1 s"), (1.29e6, "1.29 s"), (1.5e9, "1,500 s")],
)
def test_durations_have_no_exponent(us: float, text: str) -> None:
    assert duration(us) == text


def test_not_recorded_has_one_wording() -> None:
    assert si_bytes(None) == si_bytes(float("nan")) == value_text(float("nan"), metric_of("coverage")) == "not recorded"


def test_a_query_head_is_named_with_its_kv_head() -> None:
    assert head_label(3, 5, 4) == "L3 Q5 (KV1)"


def test_bars_set_full_kv_beside_the_run_and_mark_needle_and_selection() -> None:
    frame = pd.DataFrame(
        {
            "span": [7, 2],
            "reference": [0.8, float("nan")],
            "own": [0.7, 0.1],
            "mass": [0.05, 0.6],
            "regret": [0.75, 0.0],
            "kind": ["page", "sink"],
            "tokens": ["tokens 3–9", "token 0"],
            "text": ["<b>x</b> " * 30, ""],
            "needle": [True, False],
        }
    )
    figure = span_bars(frame, "L0 Q1 (KV0)", 4, 2)
    full, own, mass = figure.data
    np.testing.assert_array_equal(full.y, [0.8, np.nan])
    assert (list(own.y), list(mass.y)) == ([0.7, 0.1], [0.05, 0.6])
    assert "recorded, own query 0.1000" in full.hovertext[1]
    assert list(full.x) == ["#7 ★", "#2"]
    assert [list(target) for target in mass.customdata] == [[7], [2]]
    assert "<b>x</b>" not in full.hovertext[0]
    assert "the needle" in full.hovertext[0]
    assert "the needle" not in full.hovertext[1]
    (frame_shape,) = figure.layout.shapes
    assert frame_shape.x0 < 1 < frame_shape.x1
    assert "step 4" in figure.layout.title.text
    assert figure.layout.yaxis.range[1] <= 1
    assert not span_bars(frame.iloc[:0], "L0 Q1 (KV0)", 4, None).layout.shapes


def test_heads_that_are_all_alike_stand_in_one_narrow_bin() -> None:
    figure = head_histogram(np.ones((2, 3)), metric_of("coverage"), (0, 0))
    assert figure.data[0].xbins.end - figure.data[0].xbins.start == pytest.approx(0.01)
    assert head_histogram(np.linspace(0, 1, 6).reshape(2, 3), metric_of("coverage"), (0, 0)).data[0].xbins.size is None
