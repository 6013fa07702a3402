"""A link to a run is one step of the browser's history, and Back takes it back at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qs, urlparse

import pytest
from lensruns import LensRuns, write_lens_runs
from playwright.sync_api import Page, expect
from test_benchmarks import ABOUT, trials
from uiruns import ROOT
from uiserver import Open, Server, player, showing
from uiserver import settled as at_rest

pytestmark = pytest.mark.browser

HISTORY = (ROOT / "kvlens/app/ui/common/history.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lens(tmp_path_factory: pytest.TempPathFactory) -> LensRuns:
    return write_lens_runs(tmp_path_factory.mktemp("back"))


def address(page: Page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlparse(page.url).query).items()}


def settled(page: Page, uid: str) -> None:
    """The player of the run is there, and the page has written its address."""
    page.wait_for_url(re.compile(rf"run={uid}.*metric="))
    expect(player(page)).to_have_attribute("data-step", re.compile(r"\d+"))
    at_rest(page)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, lens: LensRuns) -> Iterator[Server]:
    """With a sweep whose lost trial was stored as `lens.lost`."""
    with showing(lens.folder, tmp_path_factory.mktemp("results"), ABOUT, trials(lens.lost)) as started:
        yield started


def test_back_after_a_link_to_a_run_is_one_step(lens: LensRuns, shown: Server, open_page: Open) -> None:
    page = open_page(f"{shown.url}/benchmarks?suite=grid&task=needle&method=freekv&budget=20%25&length=1024&depth=0.9")
    link = page.get_by_role("link", name="Open in Replay")
    expect(link).to_be_visible()
    at_rest(page)
    before, entries = address(page), page.evaluate("history.length")
    link.click()
    settled(page, lens.lost)
    assert page.evaluate("history.length") == entries + 1
    there = address(page)
    assert {"step", "layer", "head", "span", "metric"} <= there.keys()
    page.go_back()
    expect(link).to_be_visible()
    expect(page).to_have_url(re.compile("/benchmarks"))
    at_rest(page)
    assert before.items() <= address(page).items(), (
        "the page is where it was; it also names the run that was looked at meanwhile"
    )
    page.go_forward()
    settled(page, lens.lost)
    assert address(page) == there


def test_a_link_leads_where_the_run_opens_by_itself(lens: LensRuns, shown: Server, open_page: Open) -> None:
    page = open_page(f"{shown.url}/replay?run={lens.repeated}")
    settled(page, lens.repeated)
    by_itself = address(page)
    page.get_by_text("More of this loss").click()
    at_rest(page)  # it opens slowly, and what a click is meant for moves meanwhile
    page.get_by_role("link", name="Add all steps to the comparison").click()
    page.get_by_role("link", name="forced").click()
    settled(page, lens.forced)
    page.goto(page.url.split("?")[0] + f"?run={lens.held}")
    settled(page, lens.held)
    page.get_by_role("link", name="Back to the run it repeats").click()
    settled(page, lens.repeated)
    assert address(page) == by_itself


def test_a_place_is_one_entry_of_the_history(lens: LensRuns, shown: Server, open_page: Open) -> None:
    """A filter that is typed, a run that is opened by a click into the table, the menu, and a pasted address that says
    less than the page."""
    page = open_page(shown.url)
    page.get_by_placeholder("Words of the prompt").fill(lens.lost)
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/?find={lens.lost}")
    at_rest(page)
    entries = page.evaluate("history.length")
    table = page.get_by_test_id("stDataFrame").locator("canvas").first
    table.click(force=True, position={"x": 350, "y": 52})
    settled(page, lens.lost)
    assert page.evaluate("history.length") == entries + 1
    page.go_back()
    page.wait_for_url(f"**/?find={lens.lost}")
    expect(table).to_be_attached()
    at_rest(page)
    page.get_by_role("link", name="Memory", exact=True).click()
    page.wait_for_url(re.compile(rf"/memory\?run={lens.lost}"))
    at_rest(page)
    assert page.evaluate("history.length") == entries + 1
    page.goto(f"{shown.url}/replay?run={lens.kept}")
    settled(page, lens.kept)
    assert page.evaluate("history.length") == entries + 2
    page.go_back()
    page.wait_for_url(re.compile("/memory"))


def test_what_the_page_left_writes_late_is_no_entry_of_its_own(shown: Server, open_page: Open) -> None:
    """The script of the page that was left writes its address over the new page's, which writes its own over that."""
    page = open_page(f"{shown.url}/_stcore/health")
    page.evaluate(HISTORY)
    entries = page.evaluate("history.length")
    for action, addresses in enumerate((("/", "/memory", "/memory?find=x", "/memory?run=y"), ("/memory?run=z",)), 1):
        page.evaluate("dispatchEvent(new Event('pointerdown'))")
        for address_written in addresses:
            page.evaluate("to => history.pushState({}, '', to)", address_written)
        assert page.evaluate("history.length") == entries + action
        assert page.url == shown.url + addresses[-1]
    page.go_back()
    assert page.url == f"{shown.url}/memory?run=y"
