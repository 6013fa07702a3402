"""SeKV's figures: what is drawn is what was given; gaps stay gaps; axes have units."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from kvlens.app.figures.methods import sekv as figures


def table(**columns: list[float]) -> pd.DataFrame:
    frame = pd.DataFrame(
        {
            "span": [2, 3],
            "tok_start": [4, 30],
            "tokens": [20, 40],
            "factor_bytes": [100, 0],
            "raw_form_bytes": [0, 400],
            "exact_bytes": [200, 400],
        }
    )
    for name, values in columns.items():
        frame[name] = values
        frame[f"{name}_min"], frame[f"{name}_max"] = np.array(values) - 1, np.array(values) + 2
    return frame


def labelled(figure: object) -> bool:
    layout = figure.layout
    return all(axis.title.text for axis in (layout.xaxis, layout.yaxis))


def test_the_zoom_map_has_a_row_per_query_head_and_grey_where_nothing_was_recorded() -> None:
    cube = np.arange(24, dtype=float).reshape(3, 2, 4) / 24
    cube[1, 0, 2] = np.nan
    figure = figures.zoom_over_steps(cube, 2, (1, 3), 2)
    shown = figure.data[0]
    assert shown.z.shape == (8, 3)
    assert shown.z[7, 2] == np.float32(cube[2, 1, 3])
    assert (shown.y[7], shown.y[2]) == ("L1 Q3 (KV1)", "L0 Q2 (KV1)")
    assert np.isnan(shown.z[2, 1])
    assert not shown.hoverongaps
    assert np.isfinite(figure.data[1].z).sum() == 1
    assert shown.zmax == pytest.approx(23 / 24)
    assert labelled(figure)


def test_a_layer_is_named_beside_the_middle_of_its_rows() -> None:
    layout = figures.zoom_over_steps(np.zeros((2, 3, 9)), 3, (0, 0), 0).layout
    assert [(note.text, note.y) for note in layout.annotations] == [("L0", 4), ("L1", 13), ("L2", 22)]
    assert not layout.yaxis.tickvals, "a hover on a tick would show its text in place of the row's name"


def test_a_map_without_zoom_is_empty_and_not_an_error() -> None:
    assert figures.zoom_over_steps(np.full((2, 1, 2), np.nan), 1, (0, 0), 0).data[0].zmax == 1


def test_ranks_are_counted_per_whole_number_and_missing_ones_left_out() -> None:
    figure = figures.rank_histogram(np.array([1, 1, 3, np.nan]), np.array([2.0, 2, 2, 2]), 8)
    assert list(figure.data[0].x) == [1, 3]
    assert list(figure.data[0].y) == [2, 1]
    assert list(figure.data[1].y) == [4]
    assert figure.data[0].hovertext[0] == "rank 1: 2 keys (67%)"
    assert "R_max = 8" in [note.text for note in figure.layout.annotations]
    assert labelled(figure)


def test_a_span_without_error_leaves_a_gap() -> None:
    figure = figures.per_span(table(err_k=[0.1, np.nan]), {"keys": "err_k"}, "Error", "relative Frobenius error")
    assert np.isnan(figure.data[0].y[1])
    assert list(figure.data[0].error_y.array[:1]) == pytest.approx([2.0])
    assert list(figure.data[0].error_y.arrayminus[:1]) == pytest.approx([1.0])
    assert figure.layout.yaxis.title.text == "relative Frobenius error"
    assert labelled(figure)


def test_bytes_lie_over_the_tokens_they_belong_to() -> None:
    figure = figures.span_bytes(table())
    factors, raw, exact = figure.data
    assert list(factors.x) == [4, 30]
    assert list(factors.width) == [20, 40]
    assert list(factors.y) == [100, 0]
    assert list(raw.y) == [0, 400]
    assert list(exact.x) == [4, 24, None, 30, 70, None]
    assert list(exact.y) == [200, 200, None, 400, 400, None]
    assert labelled(figure)


def test_hundreds_of_spans_are_a_line_and_a_band_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MOST_MARKS", 1)
    spans = table(err_k=[0.1, 0.3]).assign(tok_start=[4, 24])
    band, line = figures.per_span(spans, {"keys": "err_k"}, "Error", "relative Frobenius error").data
    assert list(line.x[:-1]) == [4, 24, 64]
    assert list(line.y[:-1]) == pytest.approx([0.1, 0.3, 0.3])
    assert np.isnan(line.y[-1])
    assert line.hovertext[0] != line.hovertext[1]
    assert list(band.x[:-1]) == [4, 24, 24, 64, 64, 24, 24, 4]
    assert list(band.y[:-1]) == pytest.approx([2.1, 2.1, 2.3, 2.3, -0.7, -0.7, -0.9, -0.9])
    apart = figures.per_span(spans.assign(tok_start=[4, 30]), {"keys": "err_k"}, "Error", "error").data[1]
    assert np.isnan(apart.y[2]), "text between two spans is a gap"
    unknown = figures.per_span(table(err_k=[0.1, np.nan]), {"keys": "err_k"}, "Error", "error").data[1]
    assert list(unknown.x[:-1]) == [4, 24]


def test_bytes_of_hundreds_of_spans_are_stacked_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MOST_MARKS", 1)
    spans = table().assign(tok_start=[4, 24], factor_bytes=[100, 50])
    factors, top, raw, both, exact = figures.span_bytes(spans).data
    assert list(factors.y[:4]) == [100, 100, 50, 50]
    assert list(top.y[:3]) == [100, 50, 50]
    assert list(raw.y[:8]) == [100, 100, 450, 450, 50, 50, 100, 100]
    assert list(both.x[:2]) == [24, 64], "a line stands where there are bytes"
    assert list(both.y[:2]) == [450, 450]
    assert list(exact.y[:3]) == [200, 400, 400]


def test_a_map_of_thousands_of_query_heads_has_a_row_per_kv_head_then_per_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cube = np.arange(24, dtype=float).reshape(3, 2, 4) / 24
    cube[1, 0, 2] = np.nan
    monkeypatch.setattr(figures, "MOST_CELLS", 12)
    grouped = figures.zoom_over_steps(cube, 2, (1, 3), 2).data[0]
    assert grouped.z.shape == (4, 3)
    assert grouped.z[3, 2] == pytest.approx(cube[2, 1, 2:].mean())
    assert grouped.z[1, 1] == np.float32(cube[1, 0, 3]), "what was not recorded is left out of the mean"
    assert re.findall(r"[\d.]+", grouped.y[3]) == ["1", "1"]
    monkeypatch.setattr(figures, "MOST_CELLS", 6)
    assert figures.zoom_over_steps(cube, 2, (1, 3), 2).data[0].z.shape == (2, 3)
