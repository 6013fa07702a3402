"""Every chart of a page is drawn once: Streamlit hands its figure to Plotly twice, and Plotly finds no difference."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from uiruns import Runs
from uiserver import Open, Server, settled

COUNT = """
// a font that arrives late makes Plotly draw again; that is another matter, so no font is seen to arrive
class Fonts extends Set {
  ready = Promise.resolve(this);
  load() { return Promise.resolve([]); }
  check() { return true; }
  addEventListener() {}
  removeEventListener() {}
}
Object.defineProperty(document, "fonts", { value: new Fonts() });
window.again = [];
window.charts = 0;
// a chart is seen when its first drawing has begun
new MutationObserver(() => {
  for (const chart of document.querySelectorAll(".js-plotly-plot")) {
    if (chart.counted || !chart.on) continue;
    chart.counted = true;
    window.charts += 1;
    chart.on("plotly_beforeplot", () => window.again.push(chart.layout.title?.text ?? ""));
  }
}).observe(document, { childList: true, subtree: true, attributes: true });
"""


@pytest.mark.parametrize("name", ["heads", "memory", "method", "spans"])
def test_no_chart_is_drawn_again(name: str, server: Server, runs: Runs, open_page: Open) -> None:
    page = open_page("about:blank")
    page.add_init_script(COUNT)
    page.goto(f"{server.url}/{name}?run={runs.whole}&layer=0&head=0")
    expect(page.get_by_test_id("stPlotlyChart").first).to_be_visible()
    settled(page)
    page.wait_for_timeout(1000)
    assert page.evaluate("window.charts") == page.get_by_test_id("stPlotlyChart").count() > 1
    assert page.evaluate("window.again") == []
