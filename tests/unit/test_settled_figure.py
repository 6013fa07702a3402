"""A settled figure: nothing in it makes Plotly draw it twice, and it says what the figure says."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from plotly.subplots import make_subplots

from kvlens.app.figures.settled import FAINT, GROUNDS, INKS, MOST_BESIDE, Settled
from kvlens.app.figures.theme import finish

ROOT = Path(__file__).resolve().parents[2]


def sent(figure: go.Figure, theme: str = "light", *, selectable: bool = False) -> dict[str, Any]:
    """What the browser gets, by the way that Streamlit takes."""
    text = pio.to_json(Settled(figure, theme, selectable=selectable).to_dict(), validate=False)
    spec: dict[str, Any] = json.loads(text)
    return spec


def test_no_typed_array_and_no_template_is_sent() -> None:
    figure = go.Figure(go.Heatmap(z=np.arange(6, dtype=np.float32).reshape(2, 3)))
    errors = {"type": "data", "array": np.array([0.5, 0.25])}
    figure.add_scatter(x=np.arange(2), y=np.array([1.5, np.nan]), error_y=errors, marker={"size": np.array([3, 4])})
    figure.update_layout(xaxis={"tickvals": np.arange(3)})
    spec = sent(figure)
    assert "bdata" not in json.dumps(spec)
    assert "template" not in spec["layout"]
    assert spec["layout"]["datarevision"] == 1
    cells, points = spec["data"]
    assert cells["z"] == [[0, 1, 2], [3, 4, 5]]
    assert points["y"] == [1.5, None]
    assert points["error_y"]["array"] == [0.5, 0.25]
    assert points["marker"]["size"] == [3, 4]
    assert spec["layout"]["xaxis"]["tickvals"] == [0, 1, 2]


def test_the_figure_itself_stays_as_it_is() -> None:
    figure = finish(go.Figure(go.Scatter(x=np.arange(3), y=np.arange(3.0))), 200, uirevision="kept")
    before = figure.to_json()
    sent(figure)
    assert figure.to_json() == before


@given(arrays(st.sampled_from([np.float32, np.float64]), 12, elements=st.floats(-1e9, 1e9, width=32)))
def test_numbers_keep_six_digits_and_nine(values: np.ndarray) -> None:
    got = np.array(sent(go.Figure(go.Scatter(y=values)))["data"][0]["y"], np.float64)
    within = 5e-6 if values.dtype == np.float32 else 5e-9
    np.testing.assert_allclose(got, values.astype(np.float64), rtol=within * 1.001, atol=0)


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-310, 1e308, -1.7976931348623157e308])
def test_numbers_at_the_ends_of_the_format_are_sent(value: float) -> None:
    got = sent(go.Figure(go.Scatter(y=np.array([value, 1.0]))))["data"][0]["y"]
    assert got[1] == 1.0
    assert got[0] == pytest.approx(value, rel=1e-8, abs=1e-300)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_style_is_the_page_s_and_gives_way_to_the_figure(theme: str) -> None:
    figure = make_subplots(2, 1)
    figure.add_bar(x=[1, 2], y=["a", "b"], orientation="h", row=1, col=1)
    figure.add_scatter(x=[1, 2], y=[3, 4], row=2, col=1)
    figure.update_xaxes(showgrid=True, row=2, col=1)
    figure.update_layout(title_text="Bytes", hovermode="x")
    layout = sent(figure, theme)["layout"]
    assert layout["font"]["color"] == INKS[theme]
    assert layout["hoverlabel"]["bgcolor"] == GROUNDS[theme][0]
    assert layout["title"]["font"]["weight"] == "bold"
    assert layout["hovermode"] == "x"
    assert layout["xaxis"]["showgrid"] is False
    assert layout["xaxis2"]["showgrid"] is True
    assert layout["yaxis"]["showgrid"] is False
    assert "showgrid" not in layout["yaxis2"]
    assert layout["yaxis2"]["gridcolor"] == FAINT
    assert layout["yaxis2"]["automargin"] is True


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"yaxis_title_text": "bytes"}, {"l": 92, "b": 52, "r": 16}),
        ({"xaxis_title_text": "step", "margin_l": 220}, {"l": 220, "b": 72, "r": 16}),
        ({"legend": {"orientation": "h", "y": -0.2}, "showlegend": True}, {"l": 64, "b": 100, "r": 16}),
        ({"coloraxis": {"cmin": 0}}, {"l": 64, "b": 52, "r": 110}),
        ({"showlegend": True}, {"l": 64, "b": 52, "r": 75 + 5 * len("rest of the model")}),
    ],
)
def test_margins_have_room_from_the_beginning(layout: dict[str, Any], expected: dict[str, int]) -> None:
    figure = finish(go.Figure(go.Scatter(x=[1], y=[2], name="rest of the model")), 300, uirevision="room")
    margin = sent(figure.update_layout(layout))["layout"]["margin"]
    assert {side: margin[side] for side in expected} == expected


def test_a_long_name_leaves_room_for_the_chart() -> None:
    figure = go.Figure(go.Scatter(x=[1], y=[2], name="n" * 200)).update_layout(showlegend=True)
    assert sent(figure)["layout"]["margin"]["r"] == MOST_BESIDE


def test_times_are_sent_as_texts() -> None:
    times = np.array(["2026-11-29T12:00"], "datetime64[ns]")
    assert sent(go.Figure(go.Scatter(x=times, y=[1])))["data"][0]["x"][0].startswith("2026-11-29T12:00:00")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_those_of_the_page(theme: str) -> None:
    page = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text(encoding="utf-8"))["theme"][theme]
    assert INKS[theme] == page["textColor"]
    assert GROUNDS[theme] == (page["backgroundColor"], page["borderColor"])


def test_clicks_that_select_are_set_before_the_first_draw() -> None:
    figure = go.Figure(go.Scatter(x=[1], y=[2]))
    assert "clickmode" not in sent(figure)["layout"]
    assert sent(figure, selectable=True)["layout"]["clickmode"] == "event+select"
