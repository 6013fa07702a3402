"""Text of others on every page: markup in a trace's tokens, checks, journal and meta, in a run's name, note and tags,
and in a race. Nothing of it becomes an element, and nothing is asked of another host."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from playwright.sync_api import expect
from uiruns import Runs
from uiserver import Open, Server, settled

from kvlens.runs import races
from kvlens.runs.races import Lane, RaceInfo
from kvlens.store.about import About, write_about

FOREIGN = (
    "![i](http://evil.example/i.png) [l](http://evil.example/l) <mark>m</mark> <a href='http://evil.example/a'>a</a> "
    ":material/home: :red[r] $x^2$ **b**"
)
SHORT = "![i](http://evil.example/i) <mark>m</mark>"
TAG = "<mark>m</mark>"
RACE = "20260101-000009-abcdef"
COUNT = """() => {
  const roots = [document];
  const found = {links: 0, images: 0, marks: 0, formulas: 0, colours: 0, text: 0};
  for (const root of roots) {
    for (const element of root.querySelectorAll("*")) if (element.shadowRoot) roots.push(element.shadowRoot);
    const has = (selector) => root.querySelectorAll(selector).length;
    found.links += [...root.querySelectorAll("a")].filter((a) =>
      (a.getAttribute("href") || a.getAttribute("xlink:href") || "").includes("evil.example")).length;
    found.images += [...root.querySelectorAll("img")].filter((i) => i.src.includes("evil.example")).length;
    found.marks += has("mark");
    found.formulas += has(".katex");
    found.colours += [...root.querySelectorAll(".stMarkdownColoredText")].filter((c) => c.textContent === "r").length;
    found.text += ((root.body || root).textContent || "").includes("evil.example") ? 1 : 0;
  }
  return found;
}"""


@pytest.fixture
def foreign(runs: Runs, tmp_path: Path) -> tuple[Path, str]:
    """A folder with two runs full of foreign text, and the uid of one."""
    for uid in (runs.whole, runs.cancelled):
        shutil.copytree(runs.folder / uid, tmp_path / uid)
        trace = tmp_path / uid / "trace.duckdb"
        trace.chmod(0o600)
        with duckdb.connect(str(trace)) as con:
            con.execute("UPDATE token SET text = $text WHERE step IS NOT NULL OR pos % 7 = 0", {"text": FOREIGN})
            con.execute("UPDATE self_check SET name = name || $text, passed = FALSE", {"text": FOREIGN})
            con.execute("UPDATE journal SET name = name || $text", {"text": FOREIGN})
            con.execute("UPDATE span SET reason = $text", {"text": FOREIGN})
            for key in ("model", "answer", "device", "output_text"):
                con.execute("UPDATE meta SET value = $text WHERE key = $key", {"text": json.dumps(FOREIGN), "key": key})
        info = tmp_path / uid / "run.json"
        content = json.loads(info.read_text(encoding="utf-8"))
        content |= dict.fromkeys(("model", "answer", "output_text"), FOREIGN)
        info.write_text(json.dumps(content), encoding="utf-8")
        write_about(tmp_path, uid, About(name=SHORT, note=FOREIGN, tags=(TAG,)))
    lanes = [Lane(method="full", uid=runs.whole, state="completed", text=FOREIGN, note=FOREIGN)]
    lanes.append(Lane(method="snapkv", state="failed", message=FOREIGN, preset=FOREIGN))
    race = RaceInfo(id=RACE, created="2026", model=FOREIGN, budget="20%", max_new=4, answer=FOREIGN, lanes=lanes)
    races.write(tmp_path, race)
    return tmp_path, runs.whole


@pytest.mark.slow
def test_nothing_of_it_is_rendered(
    foreign: tuple[Path, str], runs: Runs, open_page: Open, start_server: Callable[[Path], Server]
) -> None:
    folder, uid = foreign
    server = start_server(folder)
    query = f"run={uid}"
    places = ["", *(f"{page}?{query}" for page in ("replay", "heads", "spans", "memory", "method"))]
    places += [f"compare?run={uid}&cmp={runs.cancelled}", f"run?race={RACE}", "benchmarks"]
    shown = 0
    page = open_page(f"{server.url}/_stcore/health")
    for place in places:
        page.goto(f"{server.url}/{place}")
        expect(page.get_by_test_id("stApp")).to_be_visible()
        settled(page)
        found = page.evaluate(COUNT)
        shown += found.pop("text")
        assert found == dict.fromkeys(found, 0), place
        assert page.get_by_test_id("stException").count() == 0
    assert shown >= 5, "it is there as text"
