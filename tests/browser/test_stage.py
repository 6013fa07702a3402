"""What is shown on a stage, at 1280x720: the first page's fold, the map in view, menus inside the window, text that can
be read, pictures with their key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from colourvision import contrast, parse_color
from playwright.sync_api import Page, expect
from uiruns import Runs
from uiserver import Open, Server, download, player, settled

from kvlens.app import gallery
from kvlens.app.gallery.story import story
from kvlens.lens.condition import KNOWN

WIDTH, HEIGHT = 1280, 720
SHOWN = next(loss for loss in gallery.losses() if loss.method == "sekv")
"""a loss to a summary"""


def on_stage(page: Page) -> Page:
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    settled(page)
    return page


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("stage")
    gallery.bring(SHOWN, folder)
    started = Server(folder)
    yield started
    started.stop()


def test_the_first_fold_has_the_name_a_sentence_and_a_moving_picture(
    tmp_path: Path, stage: Server, open_page: Open, start_server: Callable[..., Server]
) -> None:
    for server in (start_server(tmp_path / "empty"), stage):
        page = on_stage(open_page(server.url))
        picture = page.locator("#story")
        for part in (page.get_by_role("heading", name="kvlens"), picture):
            box = part.bounding_box()
            assert box is not None
            assert box["y"] + box["height"] < HEIGHT
        expect(picture).to_have_attribute("data-over", "true")  # the tests' browser asks for less motion
        expect(picture).to_contain_text(story().expected)
        page.locator("#again").click()
        expect(picture).to_have_attribute("data-scene", "repaired")
        expect(page.get_by_role("button", name="'s loss")).to_have_count(len(gallery.losses()))


def test_map_and_head_map_are_in_view_and_a_loss_to_a_summary_is_named(stage: Server, open_page: Open) -> None:
    page = on_stage(open_page(f"{stage.url}/replay?run={SHOWN.uid}"))
    page.keyboard.press("Escape")
    expect(player(page)).to_be_visible()
    for canvas in ("#map", "#heads"):
        box = page.locator(canvas).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= HEIGHT + 1, canvas
    expect(page.locator("#rate")).to_have_value("1")
    expect(page.locator("#mapLegend .hatched")).to_have_count(1)
    expect(page.locator(".st-key-condition")).to_contain_text(KNOWN)
    before = page.locator("#map").screenshot()
    player(page).press("w")
    assert page.locator("#map").screenshot() != before


def test_a_picture_of_the_player_has_its_key_and_its_condition(stage: Server, open_page: Open, tmp_path: Path) -> None:
    page = on_stage(open_page(f"{stage.url}/replay?run={SHOWN.uid}"))
    page.keyboard.press("Escape")
    page.locator(".st-key-player_menu button").first.click()
    name = download(page, page.get_by_role("button", name="SVG image"), tmp_path / "picture.svg")
    assert name.endswith(".svg")
    drawn = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    for word in ("summary only", "hole, 1 %", KNOWN, "smollm2", f"{SHOWN.prompt_tokens} prompt tokens", "step 2"):
        assert word in drawn, word


def test_a_save_menu_is_inside_the_window_with_all_its_buttons(stage: Server, open_page: Open) -> None:
    page = on_stage(open_page(f"{stage.url}/memory?run={SHOWN.uid}"))
    page.locator("[class*=st-key-save_] button").first.click()
    for name in ("CSV data", "Parquet data", "SVG image", "PNG image"):
        button = page.get_by_role("button", name=name)
        expect(button).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize("dark", [False, True])
def test_text_of_axes_is_read_on_its_ground(runs: Runs, server: Server, open_page: Open, dark: bool) -> None:
    page = open_page(f"{server.url}/heads?run={runs.whole}", dark)
    settled(page)
    expect(page.locator(".js-plotly-plot .xtick text").first).to_be_attached()
    texts = ".js-plotly-plot :is([class$='tick'], [class$='title']) text, .cbaxis text"
    colors = page.evaluate(
        "(texts) => [...document.querySelectorAll(texts)].filter((node) => node.textContent)"
        ".map((node) => getComputedStyle(node).fill)",
        texts,
    )
    ground = page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
    assert len(colors) > 10
    assert min(contrast(parse_color(color), parse_color(ground)) for color in colors) >= 4.5
