"""Which rates `kvlens bench gpu` replays: recorded ones where there are any, the papers' else, and which it says they
are."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlens.gpu.bench import attention_step, decode, rates
from kvlens.gpu.bench.device import DryDevice
from kvlens.gpu.bench.floors import DECODE_METHODS, LLAMA_8B, METHODS, USED, Rates, decode_shape, step_shape, traffic
from kvlens.gpu.bench.headlines import HEADLINES, compared
from kvlens.gpu.bench.part import Bench
from kvlens.gpu.bench.rates import PAPERS, RECORDED, Line, RateTable, read, swept, words
from kvlens.gpu.bench.report import page
from kvlens.gpu.bench.run import Request, measure
from kvlens.gpu.bench.schema import read as read_result

FOUND = {
    "sekv": Rates(miss=0.5, zoom=0.2),
    "freekv": Rates(miss=0.75, correction=0.8),
    "sentkv": Rates(reuse=0.4),
    "blocking": Rates(miss=0.6),
}
CEILINGS = [{"kind": "ceiling", "name": name, "rate": 1e9} for name in ("device copy", "pinned to device")]


def line(method: str) -> Line:
    return Line(FOUND[method], dict.fromkeys(USED[method], (0.0, 1.0)), 3, 99)


TABLE = RateTable({method: line(method) for method in RECORDED}, "model demo")


def file(folder: Path, **changes: Any) -> Path:
    """Rates as `kvlens bench rates` writes them; changes: method -> what stands there instead."""
    held = {}
    for method, found in FOUND.items():
        shares = {name: {"mean": value, "p10": 0.0, "p90": 1.0} for name, value in found.of(method).items()}
        held[method] = {"prompts": 3, "steps": 99, "rates": shares}
    about = {"date": "2026-01-02", "request": {"model": "demo", "tasks": ["note"], "length": 512, "budget": "20%"}}
    path = folder / "rates.json"
    path.write_text(json.dumps({"about": about, "methods": held | changes}))
    return path


# the file


def test_recorded_rates_are_read_by_method(tmp_path: Path) -> None:
    table = read(file(tmp_path))
    assert {method: table.of(method) for method in RECORDED} == FOUND
    assert table.of("blocking_host") == FOUND["blocking"]
    assert table.of("full") == PAPERS
    assert "tasks note of 512 tokens, right answers, budget 20%, 3 prompts, 99 steps" in table.told()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"freekv": {"prompts": 3, "steps": 9, "rates": {"miss": {"mean": 0.3, "p10": 0, "p90": 1}}}},
            "'correction' is missing",
        ),
        (
            {"sentkv": {"prompts": 3, "steps": 9, "rates": {"reuse": {"mean": 1.5, "p10": 0, "p90": 1}}}},
            "reuse of sentkv is 1.5, not a share",
        ),
        (
            {"sentkv": {"prompts": 3, "steps": 9, "rates": {"reuse": {"mean": math.nan, "p10": 0, "p90": 1}}}},
            "reuse of sentkv is nan, not a",
        ),
        (
            {"blocking": {"prompts": 3, "steps": 9, "rates": {"miss": {"mean": True, "p10": 0, "p90": 1}}}},
            "miss of blocking is True, not a",
        ),
        ({"sekv": []}, "list indices must be"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=r"make it anew with kvlens bench rates\.$") as said:
        read(file(tmp_path, **changes))
    assert str(said.value).startswith(f"'rates.json' does not hold recorded rates ({why}")
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("text", ["not json", "[1]", "{}", '{"about": {}, "methods": 3}'])
def test_a_file_of_something_else_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "rates.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"^'rates.json' does not hold recorded rates \(.*\): make it anew with kvlens bench rates\.$"
    ):
        read(tmp_path / "rates.json")


def test_without_a_file_the_papers_rates_are_replayed_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "FILE", tmp_path / "rates.json")
    said: list[str] = []
    path = measure(Request(tmp_path, 10, ("headlines",), True, (256,), (1,)), said.append)
    assert said[0] == rates.MISSING
    assert rates.MISSING in read_result(path).note
    assert {row.rates_from for row in read_result(path).entries["headlines"].rows} == {"none", "papers"}  # type: ignore[union-attr]
    file(tmp_path)
    said.clear()
    assert (
        "recorded (model demo"
        in read_result(measure(Request(tmp_path, 10, ("headlines",), True, (256,), (1,)), said.append)).note
    )
    assert rates.MISSING not in said


def test_other_rates_make_what_replays_them_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "FILE", tmp_path / "rates.json")
    parts = {
        part.name: part
        for part in (attention_step.steps(256, 1), *decode.decodes(256, 1), attention_step.sweep(256, 1))
    }
    fixed = replace(parts["steps 256 x 1"], replays=False)
    before = {name: part.sources for name, part in parts.items()} | {"fixed": fixed.sources}
    file(tmp_path)
    assert all(part.sources != before[name] for name, part in parts.items())
    assert fixed.sources == before["fixed"]


# where they are replayed


def test_a_default_cell_replays_its_methods_recorded_rates() -> None:
    bench = Bench(DryDevice(), (512,), (1,), {"entries": {"ceilings": {"rows": CEILINGS}}}, TABLE)
    rows = {row.method: row for row in attention_step.steps(512, 1).run(bench)}  # type: ignore[union-attr]
    assert list(rows) == list(METHODS)
    for method, row in rows.items():
        used = FOUND.get("blocking" if method == "blocking_host" else method, PAPERS).of(method)
        assert (row.rates, row.rates_from) == (used, "recorded" if used else "none")
    assert rows["freekv"].host_bytes == traffic(step_shape("freekv", 512, FOUND["freekv"]), bench.model, 1).host_bytes
    assert rows["freekv"].host_bytes != traffic(step_shape("freekv", 512, PAPERS), bench.model, 1).host_bytes


def test_whole_steps_move_what_recorded_rates_ask_for() -> None:
    bench = Bench(DryDevice(), (512,), (1,), {"entries": {"ceilings": {"rows": CEILINGS}}}, TABLE)
    for method in decode.RECALLING:
        row = decode.cell(bench, method, 512, bench.rates.of(method))
        assert (row.reason, row.rates_from) == (None, "recorded")
        assert (
            row.counted_bytes
            == row.host_bytes
            == traffic(decode_shape(method, 512, FOUND[method]), bench.model, 1).host_bytes
        )


@pytest.mark.parametrize("part", ["decode", "compiled"])
def test_whole_steps_are_asked_for_at_recorded_rates(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(
        decode, "cell", lambda bench, method, context, given, *more, **named: asked.setdefault(method, given)
    )
    bench = Bench(DryDevice(), (256,), (2,), {"entries": {}}, TABLE)
    for each in decode.decodes(256, 2) if part == "decode" else [decode.compiled(256)]:
        list(each.run(bench))
    assert set(asked) == (set(DECODE_METHODS) if part == "decode" else {"full", "freekv"})
    assert all(given == TABLE.of(method) for method, given in asked.items())


def test_sweeps_keep_their_grid_and_gain_the_papers_rates() -> None:
    grid = swept(RateTable(), tuple(METHODS))
    assert [(method, *found.of(method).values()) for method, found in grid] == [
        row
        for miss in (0.1, 0.3, 1.0)
        for row in (("blocking", miss), *(("freekv", miss, rate) for rate in (0.0, 0.14, 0.5)))
    ]
    found = swept(TABLE, tuple(METHODS))
    assert found[: len(grid)] == grid
    at_papers = [method for method, given in found if TABLE.source(method, given) == "papers"]
    assert at_papers == ["blocking", "freekv", "sekv", "sentkv", "blocking_host"]
    assert [method for method, _ in swept(TABLE, tuple(DECODE_METHODS))[len(grid) :]] == ["sekv", "sentkv"]


def test_a_row_says_where_its_rates_come_from() -> None:
    assert TABLE.source("freekv", FOUND["freekv"]) == "recorded"
    assert TABLE.source("blocking_host", FOUND["blocking"]) == "recorded"
    assert TABLE.source("freekv", PAPERS) == RateTable().source("freekv", PAPERS) == "papers"
    assert TABLE.source("freekv", Rates(miss=0.75)) == "set"
    assert TABLE.source("blocking", Rates(correction=0.9)) == "papers", "it depends on misses alone"
    assert TABLE.source("full", PAPERS) == "none"
    assert words({"miss": 0.51234, "correction": 0.8}, "recorded") == "miss 0.512, correction 0.8 (recorded)"
    assert words({}, "none") == ""


@pytest.mark.parametrize("method", RECORDED)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("context", [256, 8192, 131072])
def test_any_rate_can_be_replayed(method: str, share: float, context: int) -> None:
    shape = step_shape(method, context, Rates(share, share, min(share, 0.9), share))
    places = context // {"sentkv": 16, "sekv": 64}.get(method, 32)
    assert 1 <= shape.missed <= shape.wanted
    assert shape.wanted + shape.missed <= places or (shape.missed, shape.wanted) == (1, places)


def test_zooms_beyond_128_spans_are_not_cut() -> None:
    assert step_shape("sekv", 131072, Rates(zoom=0.2)).wanted == math.ceil(0.2 * 2048)


# headlines and tables


def test_a_headline_stands_at_both_rates_with_its_floor_at_the_same() -> None:
    headline = next(h for h in HEADLINES if h.name == "FreeKV against blocking recall, whole steps")
    steps = [
        {
            "method": method,
            "context": 32768,
            "batch": 1,
            "median": time,
            "peak_bytes": 1,
            "scope": "decode",
            "rates": given.of(method),
        }
        for method, time, given in (
            ("blocking", 0.03, FOUND["blocking"]),
            ("freekv", 0.02, FOUND["freekv"]),
            ("blocking", 0.01, PAPERS),
        )
    ]
    found = {row.rates_from: row for row in compared(LLAMA_8B, steps, 3e12, 52e9, TABLE) if row.name == headline.name}
    assert list(found) == ["papers", "recorded"]
    assert found["recorded"].ours == pytest.approx(1.5)
    assert found["papers"].ours is None, "FreeKV was not measured at the papers'"
    for source, given in (("papers", {"blocking": PAPERS, "freekv": PAPERS}), ("recorded", FOUND)):
        over, under = (
            traffic(decode_shape(m, 32768, given[m]), LLAMA_8B, 1).floor(3e12, 52e9) for m in ("blocking", "freekv")
        )
        assert found[source].floor == pytest.approx(over / under)  # type: ignore[index]
    assert found["papers"].floor != found["recorded"].floor


def test_headlines_without_rates_stand_once() -> None:
    names = [row.name for row in compared(LLAMA_8B, [], 3e12, 52e9, TABLE)]
    assert names.count("CHESS against FullKV at 32K") == 1
    assert names.count("SeKV memory at 128K") == 2
    assert [row.name for row in compared(LLAMA_8B, [], 3e12, 52e9, RateTable())] == [
        headline.name for headline in HEADLINES
    ]


def test_tables_show_both_where_they_differ() -> None:
    both, papers = page([], TABLE), page([], RateTable())
    assert "| FreeKV | correction | 0.14 | 0.80 (0.00 to 1.00) |" in both
    assert "| SeKV | zoom | 0.05 (ours) | 0.20 (0.00 to 1.00) |" in both
    assert both.count("| FreeKV, the papers' rates | 5.23") == both.count("| FreeKV, recorded rates |") == 2
    assert "| FullKV | 5.36" in both
    assert "recorded rates |" not in papers
    assert papers.count("| FreeKV, the papers' rates | 5.23") == 2
    assert rates.MISSING in papers


def test_replayed_corrections_are_drawn_at_the_recorded_rate() -> None:
    bench = Bench(DryDevice(), (1024,), (1,), {"entries": {}}, TABLE)
    with torch.inference_mode():
        made = decode.begin(bench, "freekv", 1024, bench.rates.of("freekv"))
    assert float(made.replays[0].fires.float().mean()) == pytest.approx(0.8, abs=0.05)
    assert made.replays[0].missed / made.replays[0].wanted == 0.75
    made.close()
