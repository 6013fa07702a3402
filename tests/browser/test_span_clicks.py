"""The Spans page in a browser: clicks on a token, a bar and a point select the span, and a link brings it back."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Page, expect
from uiruns import Runs
from uiserver import Open, Server, settled

from kvlens.store.reader import TraceReader


def spans_of(runs: Runs) -> dict[int, tuple[int, int]]:
    """Token ranges of the prompt's spans, the window's aside, which changes from step to step."""
    with TraceReader.open(runs.folder, runs.whole) as reader:
        table = reader.spans()
        table = table[(table["born_step"] < 0) & (table["kind"] != "window")]
    return {
        int(s): (int(a), int(b)) for s, a, b in zip(table["span"], table["tok_start"], table["tok_end"], strict=True)
    }


def where(page: Page, title: str, trace: str, span: int) -> tuple[float, float]:
    """Middle of a span's mark in a trace of the figure with this title, in pixels of the window."""
    chart = page.get_by_test_id("stPlotlyChart").filter(has_text=title)
    settled(page)  # a chart that changes is made anew, and the old one stands beside it for a moment
    expect(chart).to_have_count(1)
    chart.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    found = chart.locator(".js-plotly-plot").evaluate(
        """(plot, [name, span]) => {
            const trace = plot._fullData.find((item) => item.name === name);
            const axis = (id) => plot._fullLayout[id.replace(/^([xy])/, "$1axis")];
            const x = axis(trace.xaxis), y = axis(trace.yaxis);
            const at = trace.customdata.findIndex((item) => item[0] === span);
            const bar = trace.type === "bar";
            const box = plot.getBoundingClientRect();
            const px = x._offset + x.d2p(bar ? trace.base[at] + trace.x[at] / 2 : trace.x[at]);
            const py = y._offset + y.d2p(trace.y[at]);
            return [box.left + px, box.top + py];
        }""",
        [trace, span],
    )
    return float(found[0]), float(found[1])


def click(page: Page, at: tuple[float, float], span: int, tokens: tuple[int, int]) -> None:
    """A click selects a span: its text is shown and the address names it."""
    page.mouse.move(*at)
    page.wait_for_timeout(300)
    page.mouse.click(*at)
    expect(page.get_by_text(heading(span, tokens))).to_be_visible()
    expect(page).to_have_url(re.compile(f"span={span}(&|$)"))


def heading(span: int, tokens: tuple[int, int]) -> str:
    return f"Span {span}: tokens {tokens[0]}–{tokens[1] - 1}"


def test_clicks_select_spans_and_the_link_brings_them_back(server: Server, runs: Runs, open_page: Open) -> None:
    spans = spans_of(runs)
    page = open_page(f"{server.url}/spans?run={runs.whole}&step=5&layer=1&head=2&color=tok_start")
    expect(page.get_by_text("No span is selected")).to_be_visible()
    boundaries, keys = "Surprisal of each token, and where segmenters cut the text", "PCA of mean span keys, L1 KV0"

    longest = max(spans, key=lambda span: spans[span][1] - spans[span][0])
    click(page, where(page, boundaries, "recorded", longest), longest, spans[longest])
    other = next(span for span, (first, last) in spans.items() if span not in (0, longest) and last - first > 3)
    click(page, where(page, boundaries, "surprisal", other), other, spans[other])
    click(page, where(page, keys, "recorded", longest), longest, spans[longest])

    again = open_page(page.url)
    expect(again.get_by_text(heading(longest, spans[longest]))).to_be_visible()
    expect(again.get_by_text("Spans at step 5, for L1 Q2 (KV0)")).to_be_visible()


@pytest.mark.slow
def test_umap_replaces_pca_when_its_process_is_done(server: Server, runs: Runs, open_page: Open) -> None:
    page = open_page(f"{server.url}/spans?run={runs.whole}&step=5&layer=0&head=0")
    expect(page.get_by_text("PCA of mean span keys, L0 KV0")).to_be_visible()
    page.get_by_test_id("stButtonGroup").get_by_text("UMAP").click()
    expect(page.get_by_text("UMAP is being computed in a process of its own")).to_be_visible()
    expect(page.get_by_text("UMAP of mean span keys, L0 KV0")).to_be_visible(timeout=200_000)
    expect(page).to_have_url(re.compile("proj=umap"))
    stored = json.loads(
        (runs.folder / runs.whole / "maps" / "umap-l0-kv0-n15-d0.1-s0.json").read_text(encoding="utf-8")
    )
    assert set(stored["spans"]) > set(spans_of(runs))  # the window has a key too
    assert len(stored["points"]) == len(stored["spans"])
