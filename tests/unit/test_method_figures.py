"""Figures of transfers and journals: nothing is lost in stacking, and what is none is never drawn as zero."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from kvlens.app.figures.journal import CELLS, curves, line_colors, vector_map
from kvlens.app.figures.ranking import ranking
from kvlens.app.figures.transfers import bytes_by_cause, waiting
from kvlens.rows import CAUSES


@pytest.fixture
def table() -> pd.DataFrame:
    """Two causes over steps -1, 0 and 2."""
    rows = [
        (-1, "d2h", "offload", 999, 999, 1, 500, 500),
        (0, "h2d", "recall", 100, 60, 2, 40, 10),
        (2, "h2d", "recall", 50, 0, 1, 20, 0),
        (2, "d2h", "leave", 30, 0, 1, 5, 0),
    ]
    return pd.DataFrame(
        rows, columns=["step", "direction", "cause", "bytes", "blocking_bytes", "n", "moving_us", "wait_us"]
    )


def test_the_stack_holds_every_byte_of_decoding_once(table: pd.DataFrame) -> None:
    figure = bytes_by_cause(table, 4)
    assert [tuple(re.split(r" to |, ", bar.name)) for bar in figure.data] == [
        ("leave", "host memory", "background"),
        ("recall", "device", "blocking"),
        ("recall", "device", "background"),
    ]
    assert sum(float(np.sum(bar.y)) for bar in figure.data) == 180
    assert list(figure.data[1].y) == [60, 0]
    assert figure.data[1].marker.pattern.shape != figure.data[2].marker.pattern.shape
    assert figure.data[1].marker.color == figure.data[2].marker.color
    assert figure.layout.yaxis.ticksuffix == "B"


def test_every_cause_has_its_colour(table: pd.DataFrame) -> None:
    for cause in CAUSES:
        assert bytes_by_cause(table.assign(cause=cause), 4).data[0].marker.color != "#000"


def test_times_are_milliseconds_and_a_step_without_copies_is_zero(table: pd.DataFrame) -> None:
    moving, wait = waiting(table, 4).data
    assert list(moving.y) == [0.04, 0, 0.025, 0]
    assert list(wait.y) == [0.01, 0, 0, 0]


def test_a_curve_has_gaps_where_a_value_is_none() -> None:
    figure = curves({"L0": ([0, 1], [0.5, np.nan]), "L1": ([0, 1], [1.0, 2.0])}, "margin (share)")
    assert figure.data[0].connectgaps is False
    assert figure.data[0].hovertext[1] == "L0, decode step 1: none"
    assert "1 of 4 values none" in figure.layout.title.text
    assert figure.layout.yaxis.title.text == "margin (share)"
    assert len(set(line_colors(40))) == 40


def test_vectors_of_other_lengths_are_neither_padded_nor_zero() -> None:
    figure = vector_map([np.array([1.0, np.nan, 3.0]), np.array([2.0])], [4, 6], "v", "step")
    values, none = figure.data
    assert list(values.y) == [4, 5, 6]
    assert np.isnan(values.z[1]).all()
    assert np.isnan(values.z[2][1])
    assert none.z[0][1] == 1
    assert np.isnan(none.z[1:]).all()


def test_a_map_of_nothing_and_a_huge_one_are_drawn() -> None:
    assert vector_map([], [], "v", "step").data[0].z.shape == (0, 0)
    rows = [np.zeros(1000)] * (2 * CELLS // 1000)
    figure = vector_map(rows, list(range(len(rows))), "v", "step")
    assert figure.data[0].z.size <= CELLS
    assert "1 in 2 steps shown" in figure.layout.title.text


def test_each_of_few_rows_has_one_tick_and_the_end_of_prefill_its_name() -> None:
    axis = vector_map([np.ones(2), np.ones(2)], [-1, 1], "v", "step").layout.yaxis
    assert list(axis.tickvals) == [-1, 0, 1]
    assert list(axis.ticktext) == ["end of prefill", "0", "1"]
    assert vector_map([np.ones(2)], [-1], "v", "layer").layout.yaxis.ticktext == ("-1",)
    assert vector_map([np.ones(2)] * 25, list(range(25)), "v", "step").layout.yaxis.tickvals is None


def test_markup_in_a_name_stays_text() -> None:
    name = "<a href='x'>y</a>"
    for figure in (curves({"": ([0], [1.0])}, name), vector_map([np.ones(2)], [0], name, "step")):
        assert "<a" not in figure.to_json().replace("\\u003c", "<")


def test_a_ranking_tells_chosen_spans_from_the_others() -> None:
    frame = pd.DataFrame(
        {
            "span": [7, 3],
            "score": [2.5, -1.0],
            "chosen": [True, False],
            "rank": [1, 2],
            "place": ["tokens 1–9", "tokens 10–30"],
        }
    )
    figure = ranking(frame, "L0 KV0 at step 4", lines={"Q0": 1.0})
    assert list(figure.data[0].y) == [2.5]
    assert list(figure.data[1].y) == [-1.0]
    assert figure.data[1].hovertext[0] == "2. span 3, tokens 10–30: score -1"
    assert figure.layout.shapes[0].y0 == 1.0
    assert figure.layout.xaxis.title.text == "rank (1 = best)"
    assert figure.layout.yaxis.title.text.startswith("score (")


@pytest.mark.parametrize(("steps", "tick"), [(1, 1), (24, 1), (25, None)])
def test_no_tick_stands_between_two_steps_of_a_short_run(table: pd.DataFrame, steps: int, tick: int | None) -> None:
    assert bytes_by_cause(table[table["step"] < steps], steps).layout.xaxis.dtick == tick
