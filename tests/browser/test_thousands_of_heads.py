"""Pages of a run with 80 x 64 query heads, 2,000 spans and 32,000 tokens: they are drawn, are sent what is in view, and
answer a click with the head under it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from uiserver import Open, Server, settled

from tests.synthetic.wide import write_wide

UID = "20260101-000000-wide"
LAYERS, HEADS, STEPS = 80, 64, 24
MOST_MB = {"replay": 6.0, "spans": 6.0, "heads": 6.0, "memory": 12.0, "method": 12.0}
"""what a page may be sent; all cubes of the run take 68 MB at 200 steps"""
BUSY_MS = 300_000
"""for what takes seconds alone: several groups of tests may share two cores"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("wide")
    write_wide(folder, LAYERS, HEADS, 8, STEPS, 2000, 32_000, seed=1, uid=UID)
    started = Server(folder)
    yield started
    started.stop()


def open_counted(open_page: Open, url: str) -> tuple[Page, list[int]]:
    """Open a page and return it with the sizes of what its socket was sent."""
    sent: list[int] = []
    page = open_page("about:blank")
    page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: sent.append(len(frame))))
    page.goto(url)
    return page, sent


@pytest.mark.slow
def test_replay_draws_the_maps_and_a_click_selects_the_head_under_it(wide: Server, open_page: Open) -> None:
    page, sent = open_counted(open_page, f"{wide.url}/replay?run={UID}&step=3&layer=0&head=0")
    expect(page.locator("#player")).to_have_attribute("data-cell", "0,0", timeout=BUSY_MS)
    settled(page)
    assert sum(sent) < MOST_MB["replay"] * 1e6
    for name in ("#heads", "#map"):
        colours = page.locator(name).evaluate(
            """(e) => new Set(new Uint32Array(
                e.getContext('2d').getImageData(0, 0, e.width, e.height).data.buffer)).size"""
        )
        assert colours > 8, f"{name} is drawn"
    box = page.locator("#heads").bounding_box()
    assert box is not None
    width, height = (box["width"] - 48) / HEADS, (box["height"] - 50) / LAYERS
    page.locator("#heads").click(position={"x": 40 + 37.5 * width, "y": 8 + 61.5 * height})
    expect(page.locator("#player")).to_have_attribute("data-cell", "61,37")
    expect(page).to_have_url(re.compile(r"layer=61&head=37"))
    expect(page.locator("#mapTitle")).to_have_text("cache map, L61 KV4")


def click_point(page: Page, title: str, number: int) -> tuple[int, int]:
    """Click a point of the trace that takes clicks, of which one mark is drawn; return the place of the point."""
    plot = page.get_by_test_id("stPlotlyChart").filter(has_text=title).locator(".js-plotly-plot")
    plot.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    x, y, left, top, drawn = plot.evaluate(
        """(plot, number) => {
            const trace = plot._fullData.find((item) => item.marker?.maxdisplayed === 1);
            const axis = (id) => plot._fullLayout[id.replace(/^([xy])/, "$1axis")];
            const x = axis(trace.xaxis), y = axis(trace.yaxis), box = plot.getBoundingClientRect();
            const marks = plot.querySelectorAll(`.trace${trace.uid} .point`).length;
            return [trace.x[number], trace.y[number], box.left + x._offset + x.d2p(trace.x[number]),
                    box.top + y._offset + y.d2p(trace.y[number]), marks];
        }""",
        number,
    )
    assert drawn <= 1
    page.mouse.move(left, top)
    page.wait_for_timeout(300)
    page.mouse.click(left, top)
    return int(x), int(y)


@pytest.mark.slow
def test_a_click_on_a_cell_without_a_mark_selects_its_head(wide: Server, open_page: Open) -> None:
    page = open_page(f"{wide.url}/heads?run={UID}&step=3&layer=0&head=0&metric=coverage")
    expect(page.get_by_test_id("stPlotlyChart").first).to_be_visible(timeout=BUSY_MS)
    settled(page)
    assert click_point(page, "query head over its KV head", 61 * HEADS + 37) == (37, 61)
    expect(page).to_have_url(re.compile(r"layer=61&head=37"), timeout=BUSY_MS)


@pytest.mark.slow
def test_a_click_on_a_token_without_a_mark_selects_its_span(wide: Server, open_page: Open) -> None:
    page = open_page(f"{wide.url}/spans?run={UID}&step=3&layer=61&head=37")
    expect(page.get_by_test_id("stPlotlyChart").first).to_be_visible(timeout=BUSY_MS)
    settled(page)
    token, _ = click_point(page, "Surprisal of each token", 1234)
    expect(page).to_have_url(re.compile(r"span=\d+"), timeout=BUSY_MS)
    settled(page)
    heading = page.get_by_role("heading", name=re.compile(r"^Span \d")).inner_text()
    first, last = map(int, re.findall(r"tokens (\d+)–(\d+)", heading)[0])
    assert first <= token <= last


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spans", "heads", "memory", "method"])
def test_a_page_is_drawn_without_an_error_from_what_is_in_view(name: str, wide: Server, open_page: Open) -> None:
    page, sent = open_counted(open_page, f"{wide.url}/{name}?run={UID}&step=3&layer=61&head=37")
    expect(page.get_by_test_id("stPlotlyChart").first).to_be_visible(timeout=BUSY_MS)
    settled(page)
    expect(page.get_by_test_id("stAlertContentError")).to_have_count(0)
    expect(page.get_by_test_id("stException")).to_have_count(0)
    print(f"{name}: {sum(sent) / 1e6:.2f} MB")
    assert sum(sent) < MOST_MB[name] * 1e6
