"""Tables behind charts: what a figure draws as rows, and text that a spreadsheet would run."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pyarrow.parquet as pq

from kvlens.app.figures.drawn import drawn, map_frame, unit_name
from kvlens.app.figures.heads import head_map
from kvlens.app.ui.common.chart import table_file
from kvlens.recording.metrics import metric_of


def test_curves_become_rows_named_by_the_axes() -> None:
    figure = go.Figure([go.Scatter(x=[0, 1], y=[2.0, np.nan], name="a"), go.Bar(x=[5], y=[7.0], name="b")])
    figure.update_xaxes(title_text="decode step").update_yaxes(title_text="KV<br>(bytes)")
    frame = drawn(figure)
    assert list(frame.columns) == ["series", "decode step", "KV (bytes)"]
    assert frame["series"].tolist() == ["a", "a", "b"]
    assert frame["KV (bytes)"].isna().tolist() == [False, True, False]


def test_a_map_becomes_one_row_per_cell_without_what_only_takes_clicks() -> None:
    values = np.array([[0.5, np.nan, 0.25, 0.0]], np.float32)
    frame = drawn(head_map(values, 2, metric_of("coverage"), (0, 0), "mean"))
    cells = frame[frame["share"].notna() | frame["layer"].notna()]
    assert cells["share"].dropna().tolist() == [0.5, 0.25, 0.0]
    assert (cells["layer"] == 0).sum() >= 4


def test_cells_given_by_their_edges_stand_at_the_lower_one() -> None:
    figure = go.Figure(go.Heatmap(x=[0, 4, 8], y=[0, 1], z=[[0.5, 0.7]], colorbar={"title": {"text": "share"}}))
    figure.update_xaxes(title_text="token").update_yaxes(title_text="layer")
    assert drawn(figure).to_dict("list") == {"series": ["", ""], "token": [0, 4], "layer": [0, 0], "share": [0.5, 0.7]}


def test_a_map_frame_names_heads_and_unit() -> None:
    frame = map_frame(np.array([[1.0, 2.0, 3.0, np.nan]]), 2, metric_of("entropy"), "mean")
    assert list(frame.columns) == ["layer", "q_head", "kv_head", "entropy_mean_nats"]
    assert frame["kv_head"].tolist() == [0, 0, 1, 1]
    assert frame["entropy_mean_nats"].isna().tolist() == [False, False, False, True]


def test_units_are_said_once() -> None:
    assert unit_name(metric_of("h2d_bytes")) == "h2d_bytes"
    assert unit_name(metric_of("h2d_bytes"), "mean") == "h2d_bytes_mean"
    assert unit_name(metric_of("coverage"), "step_3") == "coverage_step_3_share"


def test_text_that_begins_like_a_formula_is_disarmed_in_csv_alone() -> None:
    texts = ["=1+1", "+a", "-b", "@c", "plain", "a=b"]
    frame = pd.DataFrame({"text": texts, "bytes": [-1, 2, 3, 4, 5, 6]})
    written = pd.read_csv(io.BytesIO(table_file(frame, "csv")))
    assert written["text"].tolist() == ["'=1+1", "'+a", "'-b", "'@c", "plain", "a=b"]
    assert written["bytes"].tolist() == [-1, 2, 3, 4, 5, 6]
    assert pq.read_table(io.BytesIO(table_file(lambda: frame, "parquet"))).column("text").to_pylist() == texts
