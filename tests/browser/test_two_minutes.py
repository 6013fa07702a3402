"""The way from a lost answer to its cause, with the real model: benchmark cell, trial, verdict, hold, cost, link."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from typer.testing import CliRunner
from uiserver import Open, Server, click_panel, player, settled

from kvlens.cli.main import app

#: Runs are processes of their own; on a busy machine they take their time.
RUN_MS = 240_000


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep of one prompt, on which SeKV loses the answer at 40 % that full KV finds; no run is
    stored."""
    folder = tmp_path_factory.mktemp("measured")
    results = folder / "results"
    results.mkdir()
    asked = "--methods full,sekv --tasks multikey --budgets 40% --lengths 1024 --depths 0.4 --prompts 1 --seed 4"
    places = ["--no-traces", "--runs", str(folder / "runs"), "--out", str(results / "grid.json")]
    done = CliRunner().invoke(app, ["bench", "sweep", *asked.split(), *places])
    assert done.exit_code == 0, done.output
    content = json.loads((results / "grid.json").read_text(encoding="utf-8"))
    exact = {
        row[content["columns"].index("method")]: row[content["columns"].index("exact")] for row in content["trials"]
    }
    assert exact == {"full": 1.0, "sekv": 0.0}
    return folder


@pytest.fixture
def server_there(measured: Path, monkeypatch: pytest.MonkeyPatch, start_server: Callable[..., Server]) -> Server:
    monkeypatch.setenv("KVLENS_RESULTS", str(measured / "results"))
    return start_server(measured / "runs", warm=True)


def said(page: Page, pattern: str, place: str = ".st-key-verdict") -> re.Match[str]:
    """What the verdict's box, or another `place`, says, where it matches."""
    found = re.search(pattern, page.locator(place).inner_text(), re.DOTALL)
    assert found is not None, page.locator(place).inner_text()
    return found


def outcome(page: Page) -> list[str]:
    """Answers, figures and cost of the try that is shown."""
    expect(page.get_by_text("Answer with it held: 9138.")).to_be_visible()
    box = page.locator(".st-key-tried")
    expect(box.get_by_test_id("stMetric")).to_have_count(3)
    return [
        *box.get_by_test_id("stMetric").all_inner_texts(),
        *re.findall(r"\d+ tokens in .* budget", box.inner_text()),
    ]


def _result_is_at_the_button(page: Page) -> None:
    """The result of the hold is in view above its button, in the same column, without scrolling, on a small screen."""
    page.set_viewport_size({"width": 1280, "height": 720})
    settled(page)
    result = page.locator(".st-key-hold_result").bounding_box()
    button = page.locator(".st-key-hold_resident button").first.bounding_box()
    assert result is not None
    assert button is not None
    assert result["y"] >= 0
    assert button["y"] + button["height"] <= 720
    assert 0 <= button["y"] - (result["y"] + result["height"]) < 40
    assert abs(result["x"] - button["x"]) < 40


def _list_and_undo(page: Page, span: int) -> None:
    """A click puts the span on a list, Back takes it off again; Undo leads to the run as it was recorded, and Back to
    the outcome."""
    chip = page.get_by_role("button", name=f"span {span} · all KV heads")
    before, entries = page.url, page.evaluate("history.length")
    page.get_by_role("button", name="List it to hold").click()
    expect(chip).to_be_visible()
    expect(page).to_have_url(re.compile(f"&hold={span}$"))
    assert page.evaluate("history.length") == entries + 1
    page.go_back()
    expect(chip).to_be_hidden()
    expect(page).to_have_url(before)
    page.get_by_role("button", name="List it to drop").click()
    expect(page).to_have_url(re.compile(f"&drop={span}$"))
    page.go_back()
    expect(page).to_have_url(before)
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_text("Answer with it held")).to_be_hidden()
    expect(page).to_have_url(re.compile("&whatif=none$"))
    page.go_back()
    expect(page.get_by_text("Answer with it held")).to_be_visible()
    settled(page)


@pytest.mark.slow
def test_from_a_red_cell_to_the_answer_brought_back(server_there: Server, open_page: Open) -> None:
    page = open_page(f"{server_there.url}/benchmarks")
    grid = page.get_by_test_id("stPlotlyChart").first
    click_panel(page, grid, ".nsewdrag[data-subplot='x2y2']", 0.5, 0.5)
    expect(page.get_by_text("SeKV, budget 40%, 1,024 tokens, depth 40%: 0 of 1 right")).to_be_visible()
    page.get_by_role("button", name="Run this trial again and open it in Replay").click()

    expect(page).to_have_url(re.compile(r"/replay\?run="), timeout=RUN_MS)
    expect(player(page)).to_have_attribute("data-step", re.compile(r"\d+"))
    expect(page.get_by_text(re.compile(r"Lost at step \d+"))).to_be_visible()
    step = said(page, r"Lost at step (\d+): full KV says “(.+?)”, this run “(.+?)”").group(1)
    layer, kv_head, span = said(
        page, r"Missed most by L(\d+) KV(\d+) .*?span (\d+), tokens .*?part of the needle"
    ).groups()
    assert "not recorded" not in said(page, r"Why it was missed: (.+?)\.\n").group(1)
    page.get_by_text("More of this loss").click()
    expect(page.get_by_text("Moved to the device")).to_be_visible()
    moved = rf"Moved to the device at step {step}: .*?of which span {span}, over all heads: [\d.]+ k?B\."
    said(page, moved, "[data-testid='stMain']")
    expect(player(page)).to_have_attribute("data-step", step)
    expect(player(page)).to_have_attribute(
        "data-cell", re.compile(rf"{layer},[{4 * int(kv_head)}-{4 * int(kv_head) + 3}]")
    )
    expect(page).to_have_url(re.compile(rf"step={step}&layer={layer}&head=\d+&span={span}&metric=reference_regret"))

    page.get_by_role("button", name="Hold it resident").click()
    expect(page).to_have_url(re.compile("whatif="), timeout=RUN_MS)
    _result_is_at_the_button(page)
    shown = outcome(page)
    assert shown[0] == "Answer restored\n\nyes"
    assert re.fullmatch(r"Bytes held\n\n\d+(\.\d+)? kB", shown[2])
    assert len(shown) == 4, "the cost is a share of full KV and of the budget"

    _list_and_undo(page, int(span))

    page.locator("#copy").click()
    expect(page.locator("#copy")).to_have_text("Copied")
    link = page.evaluate("navigator.clipboard.readText()")
    fresh = open_page(link)
    assert outcome(fresh) == shown
    expect(player(fresh)).to_have_attribute("data-step", step)
    expect(player(fresh)).to_have_attribute("data-cell", str(player(page).get_attribute("data-cell")))
    expect(fresh.locator("#strip .picked").first).to_be_attached()
    assert fresh.url == link

    fresh.get_by_role("link", name="Replay it").click()
    expect(fresh.get_by_role("link", name="Back to the run it repeats")).to_be_visible()
    expect(fresh.get_by_text("Nothing was lost")).to_be_visible()
    expect(fresh).not_to_have_url(link)
    expect(player(fresh)).to_have_attribute("data-step", step)
