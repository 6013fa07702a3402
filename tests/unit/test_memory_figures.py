"""Figures of the Memory page: lines where they belong, states in the player's colours, nothing that is not recorded
drawn as zero."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvlens.app.figures import memory, states
from kvlens.app.figures.overlap import overlap, whole
from kvlens.app.ui.memory import data as memorydata
from kvlens.intervals import covered, lanes
from kvlens.rows import SPAN_STATES
from kvlens.text.words import STATE_MEANINGS, STATES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def steps() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "step": [0, 1],
            "t_us": [1000, 2000],
            "dur_us": [900, 900],
            "wait_us": [300, 0],
            "resident_bytes": [10, 12],
            "peak_bytes": [11, 13],
            "cold_bytes": [100, 100],
        }
    )


@pytest.fixture
def copies() -> pd.DataFrame:
    """A blocking copy in step 0, two in the background that overlap and run on into step 1."""
    rows = [
        (0, 0, 0, 3, "h2d", "recall", 8, 1000, 1500, 300, True),
        (0, 1, np.nan, np.nan, "h2d", "prefetch", 4, 1600, 2100, 0, False),
        (0, 1, 1, 4, "h2d", "prefetch", 4, 1700, 2200, 0, False),
    ]
    names = [
        "step",
        "layer",
        "kv_head",
        "span",
        "direction",
        "cause",
        "bytes",
        "start_us",
        "end_us",
        "wait_us",
        "blocking",
    ]
    return pd.DataFrame(rows, columns=names)


def test_the_budget_and_full_kv_are_lines_only_where_they_are_known(steps: pd.DataFrame) -> None:
    figure = memory.residency(steps, 20.0, 200.0)
    assert [curve.name for curve in figure.data[-2:]] == ["budget: 20 B", "full KV: 200 B"]
    assert list(figure.data[-2].y) == [20, 20]
    assert len(memory.residency(steps, None, None).data) == 3
    assert figure.layout.yaxis.ticksuffix == "B"


def test_a_cell_that_was_not_recorded_is_grey_and_clicks_name_their_cell() -> None:
    figure = memory.byte_map(np.array([[1.0, np.nan], [3.0, 0.0]]), "t", (1, 0), "x")
    values, missing, targets = figure.data
    assert values.zmin == 0
    assert missing.z[0][1] == 1
    assert np.isnan(missing.z[1]).all()
    assert list(targets.customdata[2]) == [1, 0]
    assert targets.hovertext[1] == "L0 KV1: not recorded"


def test_states_have_the_colours_of_the_player() -> None:
    script = (ROOT / "kvlens/player/web/color.js").read_text(encoding="utf-8")
    numbers = re.findall(r"\[(\d+), (\d+), (\d+)\]", re.search(r"STATE_COLORS = \[(.*)\];", script).group(1))
    colors = ["#{:02X}{:02X}{:02X}".format(*map(int, rgb)) for rgb in numbers]
    assert dict(zip(SPAN_STATES, colors, strict=True)) == states.STATE_COLORS
    assert SPAN_STATES == tuple(STATES) == tuple(STATE_MEANINGS)


def test_a_span_has_a_state_from_its_birth_to_its_death_only() -> None:
    spans = pd.DataFrame({"span": [7, 2], "died_step": [3, np.nan]})
    changes = pd.DataFrame(
        [(-1, 7, "cold"), (1, 7, "resident"), (2, 2, "coarse"), (0, 99, "cold")], columns=["step", "span", "state"]
    )
    grid = states.state_grid(spans, changes, 4)
    cold, resident, coarse = (SPAN_STATES.index(state) for state in ("cold", "resident", "coarse"))
    assert grid.tolist() == [[cold, resident, resident, -1], [-1, -1, coarse, coarse]]


def test_the_map_has_one_legend_entry_per_state_and_keeps_markup_as_text() -> None:
    spans = pd.DataFrame(
        {"span": [7, 2], "kind": ["a<b>", "page"], "tok_start": [0, 5], "tok_end": [5, 9], "reason": ["<i>why</i>", ""]}
    )
    figure = states.state_map(spans, np.array([[0, 3], [-1, 3]], np.int8), "t", 1, 2)
    assert [trace.name.split(":")[0] for trace in figure.data] == ["resident", "in host memory"]
    assert figure.data[0].y[0].startswith("span 7 (a&lt;b&gt;), tokens 0–4")
    assert "<i>" not in figure.data[0].y[0]
    assert "no reason recorded" in figure.data[0].y[1]
    assert len(figure.layout.shapes) == 2
    assert states.rows_at_once(40) == states.ROWS
    assert states.rows_at_once(100_000) == 20


def test_copies_that_overlap_are_drawn_beside_each_other(steps: pd.DataFrame, copies: pd.DataFrame) -> None:
    figure = overlap(steps, whole(copies))
    engine, *moved = figure.data
    assert list(engine.base) == [0, 1]
    assert {tuple(re.split(r" to |, ", bar.name)) for bar in moved} == {
        ("recall", "device", "blocking"),
        ("prefetch", "device", "background"),
    }
    background = next(bar for bar in moved if "background" in bar.name)
    assert list(background.x) == [0.5, 0.5]
    assert len(set(background.y)) == 2
    assert background.marker.pattern.shape == "/"
    assert "all KV heads" in background.hovertext[0]


def test_a_copy_is_one_bar_whatever_it_brought() -> None:
    times = {"step": 3, "direction": "h2d", "cause": "recall", "start_us": 100, "end_us": 140, "blocking": True}
    parts = pd.DataFrame(
        [
            times | {"layer": 2, "kv_head": head, "span": span, "bytes": 10, "wait_us": 5}
            for head, span in ((0, 7), (0, 8), (1, 7))
        ]
        + [times | {"start_us": 90, "layer": 2, "kv_head": 1, "span": 4, "bytes": 7, "wait_us": 0}]
    )
    first, second = whole(parts).itertuples()
    assert (first.start_us, first.bytes, first.brought) == (90, 7, "L2 KV1, span 4")
    assert (second.bytes, second.wait_us) == (30, 15)
    assert second.brought == "L2 KV0, KV1, 2 spans in 3 parts"
    assert whole(parts.iloc[:0]).empty


def test_unwaited_moving_time_is_a_lower_bound_step_by_step(steps: pd.DataFrame, copies: pd.DataFrame) -> None:
    sums = memorydata.overlap(steps, copies)
    assert (sums.moving, sums.blocking, sums.background, sums.waited) == (1100, 500, 600, 300)
    assert sums.unwaited == (800 - 300) + 200 + 100  # inside step 0, inside step 1, between them
    none = memorydata.overlap(steps, copies.iloc[:0])
    assert (none.moving, none.unwaited) == (0, 0)


def test_use_adds_up_and_the_curve_ends_at_one() -> None:
    copies = pd.DataFrame(
        {
            "step": [0, 0, 1, 1],
            "verdict": ["listed", "unlisted", "listed", "pending"],
            "bytes": [10, 30, 60, 5],
            "largest_mass": [0.5, np.nan, 0.2, np.nan],
            "at_most": [np.nan, 0.01, np.nan, np.nan],
        }
    )
    bars = memory.use_of_copies(copies, 2)
    assert sum(float(np.sum(bar.y)) for bar in bars.data) == 105
    curve = memory.mass_curve(copies).data[0]
    assert list(curve.x) == [0.01, 0.2, 0.5]
    assert list(curve.y) == pytest.approx([0.3, 0.9, 1.0])


def test_a_curve_of_thousands_of_masses_is_drawn_where_it_bends() -> None:
    rng = np.random.default_rng(1)
    mass = 10 ** rng.uniform(-5, 0, 20_000)
    copies = pd.DataFrame({"step": 0, "verdict": "listed", "bytes": 1, "largest_mass": mass, "at_most": np.nan})
    curve = memory.mass_curve(copies).data[0]
    assert len(curve.x) < 2000
    assert curve.y[-1] == 1.0
    for x, y in zip(curve.x, curve.y, strict=True):
        assert y == pytest.approx((mass <= x).mean())
    assert np.diff(np.log10(curve.x)).max() < 0.02


def test_stretches_of_time_are_covered_once_and_spread_over_free_lanes() -> None:
    rng = np.random.default_rng(0)
    start = rng.integers(0, 200, 60)
    end = start + rng.integers(0, 40, 60)
    marked = np.zeros(300, bool)
    for a, b in zip(start, end, strict=True):
        marked[a:b] = True
    assert covered(start, end) == marked.sum()
    assert covered(np.empty(0), np.empty(0)) == 0
    chosen = lanes(start, end)
    for lane in range(chosen.max() + 1):
        mine = sorted(zip(start[chosen == lane], end[chosen == lane], strict=True))
        assert all(b <= c for (_, b), (c, _) in itertools.pairwise(mine))
    busiest = max(int(((start <= t) & (end > t)).sum()) for t in range(300))
    assert chosen.max() + 1 <= busiest + 5  # stretches of no length take a lane as well
