"""Every chart of every page hands out its numbers: the files can be made, hold rows, and name what their columns are."""

from __future__ import annotations

import io

import pandas as pd
import pyarrow.parquet as pq
import pytest
from uiruns import Runs, Visit

from kvlens.ui import chart as module
from kvlens.ui.chart import Data, table_file

PAGES = ("heads", "method")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Data]:
    """key -> data of every chart that was drawn."""
    found: dict[str, Data] = {}
    real = module.buttons
    monkeypatch.setattr(module, "buttons", lambda data, name, key: (found.update({key: data}), real(data, name, key)))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_chart_of_a_page_hands_out_csv_and_parquet(visit: Visit, runs: Runs, asked: dict[str, Data], page: str) -> None:
    app = visit(runs.folder, page, run=runs.whole, layer=1, head=5, step=7)
    assert len(asked) >= len(app.get("plotly_chart"))
    for key, data in asked.items():
        table = pq.read_table(io.BytesIO(table_file(data, "parquet")))
        written = pd.read_csv(io.BytesIO(table_file(data, "csv")))
        assert table.num_rows == len(written) > 0, key
        assert list(written.columns) == table.column_names, key
        assert not {"x", "y", "value", "0", "1"} & set(table.column_names), (key, table.column_names)
