"""The Method page of SeKV in a browser: what a hover over the map of zoom rates says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from uiserver import Open, Server, settled

from tests.synthetic.wide import write_wide

UID = "20260101-000000-zooms"
LAYERS, HEADS, KV_HEADS = 3, 9, 3


@pytest.fixture(scope="module")
def zooms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("zooms")
    write_wide(folder, LAYERS, HEADS, KV_HEADS, 6, 20, 400, uid=UID)
    started = Server(folder)
    yield started
    started.stop()


def test_a_hover_names_the_query_head_of_every_row(zooms: Server, open_page: Open) -> None:
    page = open_page(f"{zooms.url}/method?run={UID}")
    settled(page)
    chart = page.locator(".js-plotly-plot").nth(1)
    chart.scroll_into_view_if_needed()
    plot = chart.locator(".nsewdrag").first.bounding_box()
    assert plot is not None
    named: list[tuple[int, ...]] = []
    for row in range(LAYERS * HEADS):
        page.mouse.move(plot["x"] + plot["width"] / 2, plot["y"] + (row + 0.5) * plot["height"] / (LAYERS * HEADS))
        shown = chart.locator(".hoverlayer text").first
        shown.wait_for()
        page.wait_for_timeout(100)
        text = shown.text_content() or ""
        label = re.search(r"L(\d+) Q(\d+) \(KV(\d+)\)", text)
        assert label, text
        named.append(tuple(map(int, label.groups())))
    assert named == [(layer, head, head * KV_HEADS // HEADS) for layer in range(LAYERS) for head in range(HEADS)]
