"""The player in a browser: it plays, listens to keys and clicks, and its selection is in the URL."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from playwright.sync_api import Page, expect
from uiruns import MARKUP, Runs
from uiserver import Open, Server

from kvlens.store.reader import TraceReader
from tests.synthetic import write_synthetic

MAP_LEFT = 46
"""px left of the cache map's first token"""


@pytest.fixture
def replay(server: Server, runs: Runs, open_page: Open) -> Page:
    page = open_page(f"{server.url}/replay?run={runs.whole}&step=0&layer=0&head=0")
    expect(page.locator("#player")).to_have_attribute("data-step", "0")
    return page


def step(page: Page) -> int:
    return int(page.locator("#player").get_attribute("data-step") or -1)


def test_it_plays_without_the_server(replay: Page) -> None:
    replay.wait_for_timeout(1500)
    sent: list[str] = []
    replay.on("websocket", lambda socket: sent.append(socket.url))
    replay.locator("#rate").select_option("30")
    took = replay.evaluate("""() => new Promise((resolve) => {
        const host = [...document.querySelectorAll('*')].find((e) => e.shadowRoot?.querySelector('#player'));
        const player = host.shadowRoot.querySelector('#player');
        const frames = () => Number(player.dataset.frames), [began, first] = [performance.now(), frames()];
        host.shadowRoot.querySelector('#play').click();
        const look = () => player.dataset.playing === 'true' ? requestAnimationFrame(look)
            : resolve({
                seconds: (performance.now() - began) / 1000, drawn: frames() - first,
                step: Number(player.dataset.step) });
        requestAnimationFrame(look);
    })""")
    rate = took["step"] / took["seconds"]
    print(f"played {took['step']} steps in {took['seconds']:.2f} s = {rate:.1f} steps/s, {took['drawn']} drawn")
    assert took["step"] == 59
    assert (
        took["drawn"] >= 2
    )  # between the first step and the last; how many is the machine's affair, the print says it
    assert sent == []


def test_keys_move_the_step_and_the_url_follows(replay: Page) -> None:
    replay.keyboard.press("ArrowRight")
    replay.keyboard.press("Shift+ArrowRight")
    assert step(replay) == 11
    replay.keyboard.press("ArrowLeft")
    assert step(replay) == 10
    expect(replay).to_have_url(re.compile(r"[?&]step=10(&|$)"))
    replay.keyboard.press("End")
    assert step(replay) == 59
    replay.keyboard.press("Home")
    assert step(replay) == 0
    replay.keyboard.press("]")
    expect(replay.locator("#player")).to_have_attribute("data-cell", "1,0")
    replay.keyboard.press("[")
    expect(replay.locator("#player")).to_have_attribute("data-cell", "0,0")
    replay.keyboard.press("?")
    expect(replay.locator("#help")).to_be_visible()
    replay.keyboard.press("Escape")
    expect(replay.locator("#help")).to_be_hidden()
    replay.keyboard.press("Space")
    expect(replay.locator("#player")).to_have_attribute("data-playing", "true")
    replay.keyboard.press("Space")
    expect(replay.locator("#player")).to_have_attribute("data-playing", "false")


def test_keys_work_after_coming_from_another_page(server: Server, runs: Runs, open_page: Open) -> None:
    page = open_page(f"{server.url}/heads?run={runs.whole}&step=3")
    page.get_by_role("link", name="Replay", exact=True).click()
    expect(page.locator("#player")).to_have_attribute("data-step", "3")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#player")).to_have_attribute("data-step", "4")


def test_a_click_on_a_cell_selects_the_head_everywhere(replay: Page) -> None:
    replay.get_by_text("Tables of this step").click()
    box = replay.locator("#heads").bounding_box()
    assert box is not None
    width = (box["width"] - 48) / 8
    height = (box["height"] - 50) / 3
    replay.locator("#heads").click(position={"x": 40 + 6.5 * width, "y": 8 + 2.5 * height})
    expect(replay.locator("#player")).to_have_attribute("data-cell", "2,6")
    expect(replay).to_have_url(re.compile(r"layer=2&head=6"))
    expect(replay.get_by_text("What L2 Q6 (KV1) attended at step 0")).to_be_visible()


def test_a_click_on_a_token_selects_its_span_and_escape_clears_it(replay: Page) -> None:
    replay.locator("#follow").uncheck()  # else the text may move back to the current token before the mouse is there
    replay.locator("#strip span[data-pos='40']").click()
    expect(replay.locator("#strip .picked").first).to_be_attached()
    expect(replay).to_have_url(re.compile(r"span=\d+"))
    expect(replay.locator("#token")).to_contain_text("characters")
    replay.keyboard.press("Escape")
    expect(replay.locator("#strip .picked")).to_have_count(0)
    expect(replay).not_to_have_url(re.compile(r"span="))


def test_token_text_is_shown_literally(replay: Page) -> None:
    cell = replay.locator("#strip span[data-pos='299']")
    expect(cell).to_have_text(MARKUP)
    expect(cell.locator("b")).to_have_count(0)
    expect(replay.locator("#strip .needle").first).to_be_attached()


def test_a_long_prompt_is_shown_in_a_window_that_the_map_moves(server: Server, runs: Runs, open_page: Open) -> None:
    page = open_page(f"{server.url}/replay?run={runs.long}&step=0")
    cells = page.locator("#strip span[data-pos]")
    expect(cells).to_have_count(2048)
    expect(page.locator("#strip span[data-pos='3200']")).to_be_attached()
    page.locator("#map").click(position={"x": MAP_LEFT + 5, "y": 60})
    expect(page.locator("#strip span[data-pos='20']")).to_be_visible()
    expect(page.locator("#follow")).not_to_be_checked()
    expect(cells).to_have_count(2048)


def test_colours_follow_the_mode_and_the_step(replay: Page) -> None:
    cell = replay.locator("#strip span[data-pos='1']")
    expect(replay.locator("#legend")).to_contain_text("rebuilt")
    shown = replay.locator("#legend .pair", has_text="resident").locator(".swatch")
    resident = shown.evaluate("e => e.style.backgroundColor")
    assert cell.evaluate("e => e.style.backgroundColor") == resident, "it begins with states"
    states = replay.locator("#legend .pair .swatch").evaluate_all("all => all.map(e => e.style.backgroundColor)")
    assert len(states) > 1
    assert len(set(states)) == len(states), "no two states have one colour"
    replay.locator("#mode").select_option("surprisal")
    expect(replay.locator("#legend")).to_contain_text("nats")
    assert cell.evaluate("e => e.style.backgroundColor") != resident
    replay.locator("#mode").select_option("head")
    expect(replay.locator("#legend")).to_contain_text("selected head")


def test_the_link_button_copies_a_link_that_restores_the_view(replay: Page, open_page: Open) -> None:
    replay.keyboard.press("Shift+ArrowRight")
    expect(replay).to_have_url(re.compile("step=10"))
    replay.locator("#copy").click()
    expect(replay.locator("#copy")).to_have_text("Copied")
    link = replay.evaluate("navigator.clipboard.readText()")
    assert link == replay.url
    expect(open_page(link).locator("#player")).to_have_attribute("data-step", "10")


def test_dark_pages_have_light_text(server: Server, runs: Runs, open_page: Open) -> None:
    page = open_page(f"{server.url}/replay?run={runs.whole}&step=0", dark=True)
    expect(page.locator("#player")).to_have_attribute("data-step", "0")
    color = page.locator("#now").evaluate("e => getComputedStyle(e).color")
    ground = page.get_by_test_id("stApp").evaluate("e => getComputedStyle(e).backgroundColor")
    light, dark = (sum(map(int, re.findall(r"\d+", text)[:3])) for text in (color, ground))
    assert light > 600 > 150 > dark


def test_jumps_move_step_head_span_and_url(server: Server, runs: Runs, open_page: Open) -> None:
    page = open_page(f"{server.url}/replay?run={runs.whole}&step=0&layer=0&head=0")
    player = page.locator("#player")
    expect(player).to_have_attribute("data-cell", "0,0")
    expect(page.get_by_role("button", name="next correction")).to_be_disabled()
    page.get_by_text("Tables of this step").click()
    page.get_by_role("button", name="first loss").click()
    expect(player).to_have_attribute("data-step", "45")
    expect(player).to_have_attribute("data-cell", "2,6")
    expect(page).to_have_url(re.compile(r"step=45&layer=2&head=6&span=7"))
    expect(page.get_by_text("What L2 Q6 (KV1) attended at step 45")).to_be_visible()
    expect(page.locator("#strip .picked").first).to_be_attached()
    page.keyboard.press("Home")
    assert step(page) == 0
    page.keyboard.press("n")
    assert step(page) == 45
    page.keyboard.press("Home")
    page.keyboard.press("Shift+n")
    first = step(page)
    page.keyboard.press("Shift+n")
    assert step(page) > first
    page.keyboard.press("Shift+p")
    assert step(page) == first


def test_a_click_on_a_bar_selects_its_span(server: Server, runs: Runs, open_page: Open) -> None:
    page = open_page(f"{server.url}/replay?run={runs.whole}")
    expect(page).to_have_url(re.compile(r"span=7"))
    page.locator("#wanted").click(position={"x": 60, "y": 38 + 1.5 * 23})  # the second row
    expect(page).not_to_have_url(re.compile(r"span=7"))
    picked = re.search(r"span=(\d+)", page.url)
    assert picked is not None
    expect(page.locator("#now")).to_contain_text(f"span {picked[1]}")


def test_the_map_shows_holes_and_a_click_on_one_goes_to_its_step_and_span(
    server: Server, runs: Runs, open_page: Open
) -> None:
    with TraceReader.open(runs.folder, runs.whole) as reader:
        lost = reader.oracle_head(2, 6)
        hole = lost.loc[lost["unread"].idxmax()]
        steps, tokens = reader.n_steps, len(reader.tokens())
        place = reader.spans().set_index("span").loc[int(hole["span"])]
    page = open_page(f"{server.url}/replay?run={runs.whole}&step=0&layer=2&head=6&span=0")
    expect(page.locator("#player")).to_have_attribute("data-cell", "2,6")
    expect(page.locator("#mapTitle")).to_have_text("cache map, L2 KV1")
    expect(page.locator("#mapLegend")).to_contain_text("hole")
    box = page.locator("#map").bounding_box()
    assert box is not None
    middle = (place["tok_start"] + place["tok_end"]) / 2
    where = {
        "x": MAP_LEFT + middle / tokens * (box["width"] - MAP_LEFT - 10),
        "y": 12 + (hole["step"] + 0.5) / steps * (box["height"] - 42),
    }
    page.locator("#map").hover(position=where)
    expect(page.locator("#token")).to_contain_text(f"step {int(hole['step'])} ")
    expect(page.locator("#token")).to_contain_text("which this run did not attend")
    red, green, blue = page.locator("#map").evaluate(
        "(e, at) => [...e.getContext('2d').getImageData(at.x * devicePixelRatio, at.y * devicePixelRatio, 1, 1).data]",
        where,
    )[:3]
    assert red > 1.5 * max(green, blue), "a hole is red"
    page.locator("#map").click(position=where)
    expect(page.locator("#player")).to_have_attribute("data-step", str(int(hole["step"])))
    expect(page).to_have_url(re.compile(rf"span={int(hole['span'])}(&|$)"))


def test_the_map_is_moved_by_keys_and_by_dragging(replay: Page) -> None:
    canvas = replay.locator("#map")
    whole = canvas.evaluate("e => e.toDataURL()")
    replay.keyboard.press("w")
    near = canvas.evaluate("e => e.toDataURL()")
    replay.keyboard.press("a")
    left = canvas.evaluate("e => e.toDataURL()")
    box = canvas.bounding_box()
    assert box is not None
    replay.mouse.move(box["x"] + 200, box["y"] + 60)
    replay.mouse.down()
    replay.mouse.move(box["x"] + 300, box["y"] + 60, steps=3)
    replay.mouse.up()
    dragged = canvas.evaluate("e => e.toDataURL()")
    assert len({whole, near, left, dragged}) == 4
    assert step(replay) == 0, "dragging picks nothing"
    canvas.dblclick(position={"x": 200, "y": 14})
    replay.keyboard.press("Escape")
    replay.mouse.move(0, 0)
    assert canvas.evaluate("e => e.toDataURL()") == whole, "all of it again"


def test_a_question_that_was_fed_after_its_context_is_marked_as_one(
    tmp_path: Path, start_server: Callable[[Path], Server], open_page: Open
) -> None:
    uid = write_synthetic(tmp_path, 2, 4, 2, 10, 20, seed=1, prompt_tokens=60)
    trace = tmp_path / uid / "trace.duckdb"
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        con.execute("INSERT INTO meta VALUES ('question', '\"after\"'), ('question_tokens', '4')")
    page = open_page(f"{start_server(tmp_path).url}/replay?run={uid}&step=3")
    expect(page.locator("#strip .boundary")).to_have_text(["question, fed step by step", "generated"])
    marked = page.locator("#strip .asked")
    expect(marked).to_have_count(4)
    assert marked.evaluate_all("cells => cells.map((e) => Number(e.dataset.pos))") == [60, 61, 62, 63]
    assert marked.first.evaluate("e => getComputedStyle(e).textDecorationStyle") == "dotted"
    expect(page.locator("#now")).to_contain_text("step 3, the question's: token #63")
    page.locator("#strip span[data-pos='62']").hover()
    expect(page.locator("#token")).to_contain_text("the question's, fed at step 2")
    page.locator("#strip span[data-pos='64']").hover()
    expect(page.locator("#token")).to_contain_text("generated at step 4")
