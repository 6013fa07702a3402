"""SentKVCompress's figures: axes named, what is unknown grey and never zero, bars that add up."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from kvlens.app.figures.methods import sentkv as figures


def axis_titles(figure: go.Figure) -> list[str]:
    return [
        axis.title.text for axes in (figure.select_xaxes(), figure.select_yaxes()) for axis in axes if axis.title.text
    ]


def test_reuse_begins_where_something_was_wanted() -> None:
    reused = np.full((5, 2, 2), np.nan)
    reused[1:4] = 0.5
    figure = figures.reuse_over_steps(reused, reused + 0.1, 2)
    assert [list(trace.x) for trace in figure.data] == [[1, 2, 3]] * 2
    np.testing.assert_allclose(figure.data[1].y, 0.6)
    assert [title.split()[0] for title in axis_titles(figure)] == ["decode", "share"]
    assert not figures.reuse_over_steps(reused * np.nan, reused * np.nan, 0).data[0].x.size


def test_a_layer_that_selects_nothing_is_grey() -> None:
    values = np.array([[np.nan, np.nan], [0.2, 0.4]])
    figure = figures.reuse_map(values, values)
    maps = [trace for trace in figure.data if isinstance(trace, go.Heatmap)]
    assert len(maps) == 4
    assert maps[1].z[0][0] == 1
    assert np.isnan(maps[1].z[1][0])
    assert "nothing wanted" in maps[0].text[0][0]
    assert axis_titles(figure) == ["KV head", "KV head", "layer"]


def test_bars_add_up_to_what_moved_and_what_was_attended() -> None:
    moved, ideal = np.array([30.0, 20.0]), np.array([30.0, 5.0])
    figure = figures.moved_and_ideal(moved, ideal)
    np.testing.assert_array_equal(np.sum([trace.y for trace in figure.data], 0), moved)
    assert "20 B in all" in figure.data[0].hovertext[1]
    parts = np.array([[4.0, 2, 10], [np.nan, np.nan, np.nan]])
    attended = figures.attended(parts, 0)
    assert [trace.y[0] for trace in attended.data] == [4, 2, 10]
    assert np.isnan(attended.data[0].y[1])
    assert axis_titles(attended) == ["decode step", "tokens"]


def test_lengths_are_stacked_by_what_cut_them() -> None:
    figure = figures.lengths({"at .": [12, 12, 14], "no boundary": [14]}, 14, 8)
    assert [(trace.name, list(trace.x), list(trace.y)) for trace in figure.data] == [
        ("at .", [12, 14], [2, 1]),
        ("no boundary", [14], [1]),
    ]
    assert axis_titles(figure) == ["length (tokens)", "chunks"]
    assert {note.text for note in figure.layout.annotations} == {"L", "L − Δ", "L + Δ"}
