"""One mass has one value wherever it is read, and a query head's regret is the sum of its spans'."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from kvlens.app.figures.heads import head_map
from kvlens.app.ui.replay.lensbars import regret_words
from kvlens.recording.metrics import METRICS
from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceReader]:
    folder = tmp_path_factory.mktemp("digits")
    uid = write_synthetic(folder, 2, 4, 2, 8, 6, seed=3, top_k=8)
    with TraceReader.open(folder, uid) as opened:
        yield opened


def test_a_mass_that_two_tables_hold_reads_alike(reader: TraceReader) -> None:
    compared = 0
    for step, layer, head in np.ndindex(8, 2, 4):
        fine = reader.oracle(step, layer, head).set_index("span")["mass"]
        top = reader.head_spans(step, layer, head).set_index("span")["mass"]
        series = reader.span_mass(layer, head)
        series = series[series["step"] == step].set_index("span")["mass"]
        common = top.index.intersection(fine.index)
        compared += len(common)
        assert (top[common] == fine[common]).all()
        assert (series[common] == fine[common]).all()
    assert compared > 50


def test_the_regret_of_a_head_is_printed_as_the_sum_of_its_parts(reader: TraceReader) -> None:
    for step, layer, head in np.ndindex(8, 2, 4):
        listed = float(reader.oracle(step, layer, head)["regret"].sum())
        parts = [float(number) for number in re.findall(r"\d\.\d{4}", regret_words(reader, step, layer, head, listed))]
        assert len(parts) == 3
        assert parts[2] == pytest.approx(parts[0] + parts[1], abs=1e-9)
        assert parts[2] >= parts[0]


def test_a_map_prints_shares_to_the_digits_that_are_stored() -> None:
    figure = head_map(np.full((2, 4), 0.12345678), 2, METRICS["coverage"], None, "mean")
    (heat,) = [trace for trace in figure.data if trace.type == "heatmap"]
    assert ".4~f" in heat.texttemplate
