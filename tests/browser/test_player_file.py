"""A replay file in a browser: from the disk and inside another page. It plays, and sends no request."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playerpage import ReplayFile
from playwright.sync_api import Browser, FrameLocator, Locator, Page, expect
from uiruns import MARKUP, Runs
from uiserver import Open, Server, download

from kvlens.player.page import player_html
from kvlens.store.reader import TraceReader

Parts = Page | FrameLocator
"""where the replay is"""


@pytest.fixture(scope="module")
def document(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "a replay.html"
    with TraceReader.open(runs.folder, runs.whole) as reader:
        path.write_text(player_html(reader), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Browser, document: Path) -> Iterator[Callable[[str, bool], Parts]]:
    """opened('file' or 'frame', dark): the replay, alone or in an iframe without an origin of its own. At the end: no
    error, and no request but the one for the file."""
    problems: list[str] = []
    requests: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(f"uncaught: {error}"))
    page.on("console", lambda message: problems.append(message.text) if message.type != "log" else None)
    page.on("request", lambda sent: requests.append(sent.url))

    def shown(where: str, dark: bool = False) -> Parts:
        page.emulate_media(color_scheme="dark" if dark else "light")
        if where == "file":
            page.goto(document.as_uri())
            return page
        inside = html.escape(document.read_text(encoding="utf-8"), quote=True)
        page.set_content(f'<iframe sandbox="allow-scripts" width="1240" height="1100" srcdoc="{inside}"></iframe>')
        return page.frame_locator("iframe")

    yield shown
    page.wait_for_timeout(300)
    context.close()
    assert problems == []
    assert set(requests) <= {document.as_uri()}


def step(replay: Parts) -> int:
    return int(replay.locator("#player").get_attribute("data-step") or -1)


def picture(canvas: Locator) -> str:
    return str(canvas.evaluate("canvas => canvas.toDataURL()"))


@pytest.mark.parametrize("where", ["file", "frame"])
def test_it_opens_at_the_loss_and_a_step_and_a_head_change_the_map(
    opened: Callable[..., Parts], runs: Runs, where: str
) -> None:
    replay = opened(where)
    expect(replay.locator("#player")).to_have_attribute("data-run", runs.whole)
    loss = step(replay)
    expect(replay.locator("#player [data-jump=loss]")).to_have_attribute("title", f"first loss: step {loss} (N, P)")
    expect(replay.locator("#verdict p").first).to_contain_text(f"step {loss}.")
    expect(replay.locator("#strip .now")).to_have_count(1)
    maps = [replay.locator(name) for name in ("#map", "#heads", "#tracks")]
    before = [picture(canvas) for canvas in maps]
    replay.locator("[data-act=back]").click()
    assert step(replay) == loss - 1
    assert all(now != then for now, then in zip([picture(canvas) for canvas in maps], before, strict=True))
    title = replay.locator("#mapTitle").inner_text()
    here = replay.locator("#player").get_attribute("data-cell")
    replay.locator("#heads").click(position={"x": 60 if not str(here).endswith(",0") else 400, "y": 20})
    expect(replay.locator("#player")).not_to_have_attribute("data-cell", str(here))
    expect(replay.locator("#mapTitle")).not_to_have_text(title)


@pytest.mark.parametrize("where", ["file", "frame"])
def test_it_plays_and_keys_and_hover_work(opened: Callable[..., Parts], where: str) -> None:
    replay = opened(where)
    player = replay.locator("#player")
    expect(player).to_have_attribute("data-step", str(step(replay)))
    player.press("Home")
    assert step(replay) == 0
    player.press("ArrowRight")
    player.press("Shift+ArrowRight")
    assert step(replay) == 11
    replay.locator("#strip span[data-pos='40']").hover()
    expect(replay.locator("#token")).to_contain_text("#40 ")
    replay.locator("#strip span[data-pos='40']").click()
    expect(replay.locator("#strip .picked").first).to_be_attached()
    player.press("Escape")
    expect(replay.locator("#strip .picked")).to_have_count(0)
    replay.locator("#rate").select_option("60")
    replay.locator("#play").click()
    expect(player).to_have_attribute("data-playing", "false")
    assert step(replay) == 59
    replay.locator("#scrub").fill("7")
    assert step(replay) == 7


def test_token_text_is_shown_literally_and_dark_follows_the_browser(opened: Callable[..., Parts]) -> None:
    light = opened("file")
    cell = light.locator("#strip span[data-pos='299']")
    expect(cell).to_have_text(MARKUP)
    expect(cell.locator("b")).to_have_count(0)
    ground = "() => getComputedStyle(document.body).backgroundColor"
    before = light.locator("body").evaluate(ground)
    shown = picture(light.locator("#map"))
    dark = opened("file", True)
    expect(dark.locator("#strip .now")).to_have_count(1)
    assert dark.locator("body").evaluate(ground) != before
    assert picture(dark.locator("#map")) != shown


def test_replay_hands_out_the_file(server: Server, runs: Runs, open_page: Open, tmp_path: Path) -> None:
    page = open_page(f"{server.url}/replay?run={runs.whole}")
    file = tmp_path / "replay.html"
    download(page, page.get_by_role("button", name="Replay (HTML)"), file)
    handed = ReplayFile(file.read_text(encoding="utf-8"))
    assert handed.messages()[0][0]["uid"] == runs.whole
    assert handed.links == []
