"""What a link to a run says: the place the page would come to, or the run alone where it cannot be opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from lensruns import SPAN, STEP, write_lens_runs

from kvlens.app.ui.common import data, places
from kvlens.app.ui.common.state import Selection
from kvlens.store.reader import TraceReader


def test_a_link_says_the_whole_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = write_lens_runs(tmp_path)
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path))
    place = places.in_run(runs.lost)
    assert list(place) == ["run", "step", "layer", "head", "span", "metric"]
    assert place["step"] == str(STEP), "a lost run opens at its step of loss"
    with TraceReader.open(tmp_path, runs.held) as reader:
        assert places.in_run(runs.held) == data.fit(reader, Selection(run=runs.held))[0].query()
    beyond = places.in_run(
        runs.held, Selection(run=runs.lost, step=10_000, layer=1, head=0, span=SPAN, metric="nonsense")
    )
    assert (beyond["run"], beyond["step"], beyond["span"]) == (runs.held, "11", str(SPAN))
    assert beyond["metric"] != "nonsense"


def test_a_run_that_cannot_be_opened_is_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path))
    assert places.in_run("20260301-000000-gone") == {"run": "20260301-000000-gone"}
