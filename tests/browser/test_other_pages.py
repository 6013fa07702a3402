"""Heads, New run and the way from a click to a finished run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from playwright.sync_api import expect
from uiruns import Runs
from uiserver import Open, Server, click_panel, download, player


def test_a_click_on_the_map_selects_the_head(server: Server, runs: Runs, open_page: Open) -> None:
    page = open_page(f"{server.url}/heads?run={runs.whole}&layer=0&head=0&metric=entropy")
    chart = page.get_by_test_id("stPlotlyChart").first
    expect(page.get_by_text("Selected: L0 Q0 (KV0)")).to_be_visible()
    click_panel(page, chart, ".nsewdrag[data-subplot='x3y3'], .xy3 .nsewdrag", 4.9 / 8, 2.6 / 3)
    expect(page.get_by_text("Selected: L2 Q4 (KV1)")).to_be_visible()
    expect(page).to_have_url(re.compile("layer=2&head=4"))


def test_the_head_of_every_page_names_the_run_that_it_shows(server: Server, runs: Runs, open_page: Open) -> None:
    """An older run than the newest, from page to page and back."""
    page = open_page(f"{server.url}/heads?run={runs.cancelled}")
    named = page.get_by_test_id("stSelectbox").first.locator("input")
    for name in ("Spans", "Method", "Heads", "Memory"):
        expect(named).to_have_value(re.compile(runs.cancelled))
        page.get_by_role("link", name=name, exact=True).click()
        expect(page).to_have_url(re.compile(f"/{name.lower()}\\?run={runs.cancelled}"))
        expect(page.get_by_text("recorded to step 9").first).to_be_visible()
    expect(named).to_have_value(re.compile(runs.cancelled))


def test_statistics_download_as_csv_and_parquet(server: Server, runs: Runs, open_page: Open, tmp_path: Path) -> None:
    page = open_page(f"{server.url}/heads?run={runs.whole}")
    for name, kind, read in (("CSV", "csv", pd.read_csv), ("Parquet", "parquet", pd.read_parquet)):
        target = tmp_path / "heads"
        given = download(page, page.get_by_role("button", name=f"Per-head statistics as {name}"), target)
        assert given == f"{runs.whole}-heads.{kind}"
        table = read(target)
        assert len(table) == 3 * 8
        assert set(table["n_steps"]) == {60}
        assert list(table["kv_head"][:8]) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_file_that_is_not_utf8_is_refused_with_its_sentence(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/run")
    page.get_by_text("Upload", exact=True).click()
    page.locator("input[type=file]").set_input_files(
        {"name": "bad.txt", "mimeType": "text/plain", "buffer": b"caf\xe9 au lait"}
    )
    expect(page.get_by_text("bad.txt is not UTF-8 text (byte 3 cannot be decoded)")).to_be_visible()
    expect(page.get_by_role("button", name="Run", exact=True)).to_have_count(0)


@pytest.mark.slow
def test_the_sample_run_opens_its_replay(tmp_path: Path, open_page: Open, start_server: Callable[..., Server]) -> None:
    page = open_page(start_server(tmp_path / "empty", warm=True).url)
    page.get_by_role("button", name="Run the sample prompt").click()
    expect(page).to_have_url(re.compile(r"/run\?job="))
    job = page.url
    expect(page).to_have_url(re.compile(r"/replay\?run=2"), timeout=120_000)
    page.goto(job)
    for name in ("Method", "Heads", "Replay"):
        link = page.get_by_role("link", name=f"Open in {name}")
        expect(link).to_have_attribute("href", re.compile(rf"^/?{name.lower()}\?run=2"))
    link.click()
    expect(page).to_have_url(re.compile(r"/replay\?run=2"))
    expect(player(page)).to_have_attribute("data-step", re.compile(r"\d+"))
    expect(page.get_by_text(re.compile("Expected answer:"))).to_be_visible()
    expect(page.get_by_text(re.compile(r"self-checks passed (\d+)/\1"))).to_be_visible()
