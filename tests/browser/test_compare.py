"""Compare in a browser: one cursor moves both runs, a link restores the view, charts and reports come as files."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pairruns import PARTED, PairRuns, write_pair
from playwright.sync_api import Page, expect
from uiserver import Open, Server, choose, download, settled

from kvlens.app.report import report_bytes
from kvlens.store.reader import TraceReader

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairRuns:
    return write_pair(tmp_path_factory.mktemp("compare-runs"))


@pytest.fixture(scope="module")
def at(pair: PairRuns) -> object:
    started = Server(pair.folder)
    yield started
    started.stop()


def token(page: Page, box: str) -> str:
    """Text of the outlined token of a strip."""
    return page.locator(f"#{box} .now").inner_text()


def test_a_step_moves_both_runs_and_a_link_restores_it(pair: PairRuns, at: Server, open_page: Open) -> None:
    page = open_page(f"{at.url}/compare?run={pair.run}&cmp={pair.reference}&step=3&layer=1&head=2&metric=coverage")
    view = page.locator("#player")
    expect(view).to_have_attribute("data-step", "3")
    expect(page.locator("#stripP span[data-pos]")).to_have_count(300)
    expect(page.locator("#stripA span[data-pos]")).to_have_count(30)
    expect(view).to_have_attribute("data-cell", "1,2")
    expect(page.locator("#context")).to_have_text("the same context in both runs")
    assert token(page, "stripA") == token(page, "stripB") != ""
    expect(page.locator("#cell")).to_contain_text(re.compile(r"A 0\.\d{4} · B 0\.\d{4} · 0\.\d{4} less in B"))
    before = token(page, "stripA")
    view.focus()
    page.keyboard.press("ArrowRight")
    expect(view).to_have_attribute("data-step", "4")
    expect(page).to_have_url(re.compile(r"step=4\b"))
    assert token(page, "stripA") == token(page, "stripB") != before
    page.get_by_role("button", name="first divergence").click()
    expect(view).to_have_attribute("data-step", str(PARTED))
    assert token(page, "stripB") == "<i>" != token(page, "stripA")
    expect(page.locator("#stripB [data-parted=here]")).to_have_count(1)
    expect(page.locator("#stripB [data-parted=after]")).to_have_count(30 - PARTED - 1)
    page.keyboard.press("End")
    expect(view).to_have_attribute("data-apart", "true")
    expect(page.locator("#context")).to_have_text(f"different contexts since step {PARTED}")
    expect(page).to_have_url(re.compile(r"step=29\b"))
    again = open_page(page.url)
    expect(again.locator("#player")).to_have_attribute("data-step", "29")
    expect(again.locator("#player")).to_have_attribute("data-cell", "1,2")
    assert f"run={pair.reference}&" in again.url
    assert f"against={pair.run}" in again.url


def test_of_three_runs_two_are_played_and_nothing_is_sent(pair: PairRuns, at: Server, open_page: Open) -> None:
    three = f"{pair.run},{pair.reference},{pair.plain}"
    page = open_page(f"{at.url}/compare?runs={three}&run={pair.run}", dark=True)
    view = page.locator("#player")
    expect(page.locator(".answers tbody tr")).to_have_count(3)
    expect(view).to_have_count(0)
    page.get_by_text("Step by step: SeKV …sekv (B) and FullKV (A)").click()
    expect(view).to_have_attribute("data-step", str(PARTED))
    expect(page.locator(".answers tbody tr").first).to_contain_text("full KV itself")
    expect(page.locator("#nowA")).to_contain_text("A · FullKV")
    expect(page.locator("#nowB")).to_contain_text("B · SeKV …sekv")
    expect(page.locator(".st-key-compare_maps .hm")).to_have_count(4)
    page.get_by_role("button", name="First step").click()
    expect(page).to_have_url(re.compile(r"step=0\b"))
    settled(page)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    page.get_by_role("button", name="Play or pause").click()
    expect(view).to_have_attribute("data-step", "29")
    expect(view).to_have_attribute("data-playing", "false")
    assert [url for url in sent if "/static/" not in url] == [], (
        "but for the page's own files, which come when they come"
    )


def test_another_metric_and_another_head_redraw_all_three_maps(pair: PairRuns, at: Server, open_page: Open) -> None:
    page = open_page(f"{at.url}/compare?run={pair.run}&cmp={pair.reference}&step=2&layer=0&head=0&metric=coverage")
    view = page.locator("#player")
    expect(view).to_have_attribute("data-cell", "0,0")
    page.locator("#mapD").click(position={"x": 330, "y": 60})
    expect(view).not_to_have_attribute("data-cell", "0,0")
    expect(page).not_to_have_url(re.compile(r"head=0\b"))
    metric = page.get_by_role("combobox", name="Metric of maps and curves")
    metric.scroll_into_view_if_needed()
    settled(page)  # scrolling closes what a click has opened
    choose(page, metric, "Attention entropy (nats)")
    expect(page.locator("#scale")).to_contain_text("Attention entropy in A and B")
    expect(page).to_have_url(re.compile(r"metric=entropy\b"))


def test_a_chart_is_saved_as_image_and_as_data(pair: PairRuns, at: Server, open_page: Open, tmp_path: Path) -> None:
    page = open_page(f"{at.url}/compare?run={pair.run}&cmp={pair.reference}&step=2&layer=1&head=3&metric=coverage")
    page.get_by_text("Maps of all runs over steps").click()
    expect(page.locator(".st-key-compare_maps .js-plotly-plot .main-svg").first).to_be_visible()
    menu = page.locator(".st-key-save_compare_maps").get_by_role("button")
    starts = {"SVG image": b"<svg", "PNG image": b"\x89PNG", "CSV data": b'"layer","q_head"', "Parquet data": b"PAR1"}
    for name, start in starts.items():
        settled(page)  # a menu that opens while the page is made anew is closed by that
        menu.scroll_into_view_if_needed()
        menu.click()
        file = tmp_path / "chart"
        given = download(page, page.get_by_role("button", name=name), file)
        assert Path(given).stem == f"compare-{pair.run}-{pair.reference}-coverage"
        assert file.read_bytes().startswith(start)
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name=name)).to_have_count(0)


def test_the_maps_at_the_step_are_saved_as_they_stand(
    pair: PairRuns, at: Server, open_page: Open, tmp_path: Path
) -> None:
    page = open_page(
        f"{at.url}/compare?run={pair.run}&cmp={pair.reference}&step=2&layer=1&head=3&metric=coverage", dark=True
    )
    expect(page.locator("#player")).to_have_attribute("data-step", "2")
    page.get_by_role("button", name="Save").nth(1).click()  # after that of the answers
    file = tmp_path / "maps.png"
    given = download(page, page.get_by_role("button", name="PNG image"), file)
    assert given == f"compare-{pair.run}-{pair.reference}-coverage-step-2.png"
    width, height = (int.from_bytes(file.read_bytes()[at : at + 4], "big") for at in (16, 20))
    assert width > 2000
    assert height > 900
    assert len(file.read_bytes()) > 40_000
    given = download(page, page.get_by_role("button", name="SVG image"), file)
    assert given == f"compare-{pair.run}-{pair.reference}-coverage-step-2.svg"
    drawn = ElementTree.parse(file).getroot()
    size = [float(part) for part in str(drawn.get("viewBox")).split()]
    assert size == pytest.approx([0, 0, width / 2, height / 2], abs=1), "as large as the other"
    texts = {element.text for element in drawn.iter(f"{SVG}text")}
    assert {"L0", "KV0", "decode step", "Coverage (share) at step 2"} <= texts
    assert len(list(drawn.iter(f"{SVG}rect"))) > 3 * 3 * 4, "a cell each, three maps"
    assert not list(drawn.iter(f"{SVG}image"))
    page.locator("#player").press("ArrowRight")
    expect(page.locator("#player")).to_have_attribute("data-step", "3")


def test_the_report_opens_by_itself(pair: PairRuns, at: Server, open_page: Open, tmp_path: Path) -> None:
    page = open_page(f"{at.url}/compare?run={pair.run}&cmp={pair.reference}")
    file = tmp_path / "report.html"
    download(page, page.get_by_role("button", name="Report (HTML)"), file)
    report = open_page(file.as_uri())
    plots = report.locator(".plot").count()
    assert plots >= 8
    expect(report.locator(".js-plotly-plot")).to_have_count(plots)
    expect(report.get_by_text("<i>").first).to_be_visible()
    assert report.evaluate("document.querySelectorAll('main i').length") == 0


def test_markup_in_a_report_never_runs(pair: PairRuns, open_page: Open, tmp_path: Path) -> None:
    with TraceReader.open(pair.folder, pair.run) as reader:
        reader.meta = reader.meta.model_copy(
            update={
                "answer": "<img src=x onerror=\"document.title='broken'\">",
                "task": "<script>document.title='broken'</script>",
            }
        )
        (tmp_path / "report.html").write_bytes(report_bytes(reader))
    page = open_page((tmp_path / "report.html").as_uri())
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    assert "broken" not in page.title()
