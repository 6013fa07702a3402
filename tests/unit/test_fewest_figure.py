"""The chart of a search for the fewest bytes."""

from __future__ import annotations

import re

import pandas as pd

from kvlens.app.figures.fewest import BITS_COLUMNS, COLUMNS, fewest_bytes


def test_every_set_is_a_mark_and_the_cheapest_that_sufficed_is_ringed() -> None:
    rows = [(1, 1, 800, 3.0, False), (2, 4, 3200, 0.01, True), (3, 2, 1600, 0.2, True), (4, 2, 1600, 2.5, False)]
    figure = fewest_bytes(pd.DataFrame(rows, columns=list(COLUMNS)), 160_000)
    back, not_back, ring = figure.data
    assert ["not" in trace.name for trace in (back, not_back)] == [False, True]
    assert (list(back.x), list(back.y)) == ([3200, 1600], [0.01, 0.2])
    assert (list(not_back.x), list(not_back.y)) == ([800, 1600], [3.0, 2.5])
    assert (list(ring.x), list(ring.y)) == ([1600], [0.2])
    assert back.hovertext[1] == "try 3: 2 spans of single KV heads<br>1.6 kB, 1.00% of full KV<br>KL 0.2 nats"
    assert back.marker.symbol != not_back.marker.symbol


def test_nothing_is_ringed_where_nothing_sufficed() -> None:
    figure = fewest_bytes(pd.DataFrame([(1, 1, 800, 3.0, False)], columns=list(COLUMNS)), None)
    assert [len(trace.hovertext) for trace in figure.data] == [0, 1], "those that suffice, the others"
    assert figure.data[1].hovertext[0] == "try 1: 1 span of single KV heads<br>800 B<br>KL 3 nats"


def test_a_search_for_bits_counts_sides_and_bytes_more() -> None:
    rows = [(1, 8, 4000, 0.0, True), (2, 1, 500, 0.1, True), (3, 2, 300, 2.0, False)]
    figure = fewest_bytes(pd.DataFrame(rows, columns=list(BITS_COLUMNS)), None)
    assert list(figure.data[2].x) == [500]
    assert re.findall(r"\d+ k?B|(?<=: )\d+", figure.data[0].hovertext[0]) == ["8", "4 kB"]
    assert figure.layout.xaxis.title.text == BITS_COLUMNS[2]
