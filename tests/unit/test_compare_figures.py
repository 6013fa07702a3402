"""Figures of the Compare page: values, ranges, what is not recorded."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvlens.app.compare.groups import Trial, points
from kvlens.app.figures.compare import map_table, run_maps
from kvlens.app.figures.comparepoints import AXES, quality_points
from kvlens.app.figures.comparetracks import A_AND_B, Track, lines_of, overlaid, track_table
from kvlens.app.figures.losstrack import loss_track
from kvlens.app.figures.methodmarks import mark
from kvlens.recording.metrics import metric_of

A = np.array([[0.2, 0.4], [np.nan, 1.0]], np.float32)
B = np.array([[0.5, 0.1], [0.3, 1.0]], np.float32)


def heat(figure: object) -> list[object]:
    return [trace for trace in figure.data if trace.type == "heatmap" and trace.name]  # type: ignore[attr-defined]


def test_maps_share_one_range_and_the_difference_has_its_own_around_zero() -> None:
    a, b, difference = heat(run_maps({"A": A, "B": B}, B - A, 1, metric_of("entropy"), (0, 1), "mean"))
    assert (a.zmin, a.zmax) == (b.zmin, b.zmax) == (0.0, 1.0)
    assert a.colorscale == b.colorscale != difference.colorscale
    np.testing.assert_allclose(difference.z, B - A, equal_nan=True)
    assert difference.zmid == 0
    assert difference.zmin == -difference.zmax == pytest.approx(-0.3)


def test_difference_of_equal_maps_is_not_an_empty_range() -> None:
    assert heat(run_maps({"A": B, "B": B}, B - B, 1, metric_of("coverage"), (0, 0), "mean"))[2].zmax == 1.0


def test_an_unrecorded_cell_is_grey_in_its_run_and_in_the_difference() -> None:
    figure = run_maps({"A": A, "B": B}, B - A, 1, metric_of("coverage"), (0, 0), "mean")
    masks = [trace for trace in figure.data if not trace.name]
    assert len(masks) == 2
    assert heat(figure)[0].hovertext[1][0].endswith("not recorded")
    assert heat(figure)[2].hovertext[0][0] == "B − A, L0 Q0 (KV0): 0.3000 more in B"
    assert heat(figure)[2].hovertext[0][1] == "B − A, L0 Q1 (KV0): 0.3000 less in B"


def test_six_runs_stand_in_two_rows_on_one_range_and_names_are_text() -> None:
    maps = {f"run <b>{number}</b>": A * number / 6 for number in range(1, 7)}
    figure = run_maps(maps, B - A, 1, metric_of("entropy"), (1, 0), "mean")
    found = heat(figure)
    assert all("<b>" not in str(trace.hovertext) for trace in found)
    assert [trace.name for trace in found] == [*maps, "B − A"]
    assert len({(trace.zmin, trace.zmax) for trace in found[:6]}) == 1
    assert [trace.showscale for trace in found] == [True, *[False] * 5, True]
    assert {trace.yaxis for trace in found[:4]} & {trace.yaxis for trace in found[4:]} == set()
    titles = [note.text for note in figure.layout.annotations]
    assert titles[0] == "run &lt;b&gt;1&lt;/b&gt;"
    assert len([shape for shape in figure.layout.shapes if shape.type == "rect"]) == 7
    assert len(heat(run_maps(maps, None, 1, metric_of("entropy"), (1, 0), "mean"))) == 6


def test_the_maps_table_has_units_and_both_runs() -> None:
    frame = map_table({"A": A, "B": B}, B - A, 1, metric_of("entropy"), "step 3")
    assert list(frame.columns) == [
        "layer",
        "q_head",
        "kv_head",
        "metric",
        "steps",
        "A_nats",
        "B_nats",
        "B_minus_A_nats",
    ]
    assert frame["A_nats"].isna().tolist() == [False, False, True, False]


def test_curves_of_both_runs_stand_over_each_other_and_the_rest_is_shaded() -> None:
    tracks = [
        Track("KL", "nats", (np.array([0.1, np.nan]), np.full(3, np.nan))),
        Track("Moved", "bytes", (np.arange(2.0), np.arange(3.0))),
    ]
    figure = overlaid(tracks, A_AND_B, 1, 0)
    assert [trace.name for trace in figure.data] == ["A", "B", "A", "B"]
    assert {trace.line.dash for trace in figure.data if trace.name == "B"} == {"dash"}
    assert "different contexts" in [note.text for note in figure.layout.annotations]
    bands = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert len(bands) == 2
    assert (bands[0].x0, bands[0].x1) == (0.5, 2.5)
    assert figure.data[0].hovertext == ("A, step 0: 0.1 nats", "A, step 1: not recorded")
    assert len(track_table(tracks, A_AND_B)) == 2 + 3 + 2 + 3
    assert not [shape for shape in overlaid(tracks, A_AND_B, 1, None).layout.shapes if shape.type == "rect"]


def test_a_track_that_nobody_recorded_says_so() -> None:
    figure = overlaid([Track("KL", "nats", (np.full(2, np.nan), np.full(2, np.nan)))], A_AND_B, 0, None)
    assert [note.text for note in figure.layout.annotations if note.text.startswith("not recorded")] != []
    assert not [trace for trace in figure.data if np.isfinite(np.asarray(trace.y, dtype=float)).any()]


def test_runs_of_one_method_differ_in_their_dash() -> None:
    lines = lines_of(["a", "b", "c"], ["sekv", "sekv", "full"])
    assert lines[0].color == lines[1].color == mark("sekv").color
    assert len({(line.color, line.dash) for line in lines}) == 3


@pytest.mark.parametrize("axis", list(AXES))
def test_one_prompt_is_a_hollow_marker_and_intervals_are_bars(axis: str) -> None:
    base = Trial("r1", "demo", "needle", "sekv", "", "demo", "float32", "20%", "p1", True, 2e6, 1e7, 1e3, 100.0)
    one = Trial("r3", "demo", "needle", "sekv", "", "demo", "float32", "10%", "p1", False, 1e6, 1e7, 5e2, 50.0)
    second = Trial("r2", "demo", "needle", "sekv", "", "demo", "float32", "20%", "p2", True, 2e6, 1e7, 1e3, 100.0)
    figure = quality_points(points([base, second, one]), axis, {"sekv": "SeKV"})
    (trace,) = figure.data
    assert trace.name == "SeKV"
    assert list(trace.y) == [0.0, 1.0]
    assert [symbol.endswith("-open") for symbol in trace.marker.symbol] == [True, False]
    assert trace.error_y.arrayminus[1] == pytest.approx(1 - 0.3424, abs=1e-4)
    assert figure.layout.xaxis.title.text == AXES[axis]


def test_runs_of_other_parameters_are_no_repeats_of_one_prompt() -> None:
    """CompressKV with kernel 7 is right and with kernel 1 wrong: two lines of one prompt, never one point."""
    first = ("r1", "demo", "needle", "compresskv", "", "paper", "float32", "20%", "p1")
    right = Trial(*first, True, 2e6, 1e7, 1e3, 100.0, (("kernel", "7"), ("question", "in")))
    wrong = Trial("r2", *first[1:], False, 2e6, 1e7, 1e3, 100.0, (("kernel", "1"), ("question", "in")))
    again = Trial("r3", *first[1:], True, 2e6, 1e7, 1e3, 100.0, (("kernel", "7"), ("question", "in")))
    table = points([right, wrong, again])
    assert sorted(zip(table["n"], table["exact"], strict=True)) == [(1, 0.0), (1, 1.0)]
    figure = quality_points(table, "peak_bytes", {"compresskv": "CompressKV"})
    assert {trace.name for trace in figure.data} == {"CompressKV, kernel 7", "CompressKV, kernel 1"}
    assert len({trace.line.dash for trace in figure.data}) == 2


def test_the_loss_track_marks_lost_steps_and_escapes_tokens() -> None:
    loss = pd.DataFrame(
        {
            "step": [0, 1, 3],
            "kl": [0.0, 0.1, 4.0],
            "agrees": [True, True, False],
            "ref_text": ["a", "b", "<b>x</b>"],
            "top_text": ["a", "b", "c"],
            "logprob": [-0.1, -0.2, -5.0],
            "ref_logprob": [-0.1, -0.1, -0.1],
        }
    )
    figure = loss_track(loss, 5, 3)
    kl, lost, mine, _ = figure.data
    assert list(lost.x) == [3]
    assert "&lt;b&gt;" in kl.hovertext[2]
    assert "<b>" not in kl.hovertext[2]
    assert np.isnan(mine.y[2])
    assert np.isnan(mine.y[4])
