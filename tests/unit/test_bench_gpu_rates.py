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

from kvlens.lab.gpu import decode, decode_parts, decoding, rates
from kvlens.lab.gpu.device import DryDevice
from kvlens.lab.gpu.floors import LLAMA_8B, traffic
from kvlens.lab.gpu.headlines import compared, list_measurable
from kvlens.lab.gpu.part import Bench
from kvlens.lab.gpu.rates import Line, RateTable, read, swept, words
from kvlens.lab.gpu.report import page
from kvlens.lab.gpu.run import Request, measure
from kvlens.lab.gpu.schema import read as read_result
from kvlens.lab.gpu.settings import everything, settings

pytestmark = pytest.mark.usefixtures("quick_gc")

KNOWN = everything()
FOUND = {
    "sekv": {"miss": 0.5, "zoom": 0.2},
    "freekv": {"miss": 0.75, "correction": 0.8},
    "sentkv": {"reuse": 0.4},
    "blocking": {"miss": 0.6},
}
PAPERS = {"sekv": {"miss": 0.3, "zoom": 0.05}, "freekv": {"miss": 0.3, "correction": 0.14}}
PAPERS |= {"sentkv": {"reuse": 0.7}, "blocking": {"miss": 0.3}}
CEILINGS = [{"kind": "ceiling", "name": name, "rate": 1e9} for name in ("device copy", "pinned to device")]


def line(name: str) -> Line:
    return Line(FOUND[name], dict.fromkeys(FOUND[name], (0.0, 1.0)), 3, 99)


TABLE = RateTable({name: line(name) for name in FOUND}, "model demo")


def moved(name: str, context: int, given: Any, model: Any = LLAMA_8B) -> Any:
    shape = KNOWN[name].shape
    assert shape is not None
    return traffic(shape(model.kv, context, given), model, 1)


def file(folder: Path, **changes: Any) -> Path:
    """Rates as `kvlens bench rates` writes them; changes: method -> what stands there instead."""
    held = {}
    for method, found in FOUND.items():
        shares = {name: {"mean": value, "p10": 0.0, "p90": 1.0} for name, value in found.items()}
        held[method] = {"prompts": 3, "steps": 99, "rates": shares}
    about = {"date": "2026-01-02", "request": {"model": "demo", "tasks": ["note"], "length": 512, "budget": "20%"}}
    path = folder / "rates.json"
    path.write_text(json.dumps({"about": about, "methods": held | changes}))
    return path


# the file


def test_recorded_rates_are_read_by_name(tmp_path: Path) -> None:
    assert {name: setting.rates for name, setting in settings().items() if setting.rates} == PAPERS
    table = read(file(tmp_path))
    assert {name: table.choose(KNOWN[name]) for name in FOUND} == FOUND
    assert table.choose(KNOWN["full"]) == {}
    assert "right answers, budget 20%, 3 prompts, 99 steps" in table.describe()


def test_a_setting_that_nobody_recorded_has_the_papers_rates(tmp_path: Path) -> None:
    path = file(tmp_path)
    held = json.loads(path.read_text())
    del held["methods"]["sentkv"]
    path.write_text(json.dumps(held))
    table = read(path)
    assert table.choose(KNOWN["sentkv"]) == PAPERS["sentkv"]
    assert table.source(KNOWN["sentkv"], PAPERS["sentkv"]) == "papers"
    assert table.choose(KNOWN["freekv"]) == FOUND["freekv"]


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
        part.name: part for part in (*decode_parts.decodes(256, 1), decode_parts.sweep(256), decode_parts.compiled(256))
    }
    fixed = replace(parts["decode 256 x 1"], runs_methods=False)
    before = {name: part.sources for name, part in parts.items()} | {"fixed": fixed.sources}
    file(tmp_path)
    assert all(part.sources != before[name] for name, part in parts.items())
    assert fixed.sources == before["fixed"]


# where they are replayed


def test_whole_steps_move_what_recorded_rates_ask_for() -> None:
    assert moved("freekv", 512, FOUND["freekv"]).host_bytes != moved("freekv", 512, PAPERS["freekv"]).host_bytes
    bench = Bench(DryDevice(), (512,), (1,), {"entries": {"ceilings": {"rows": CEILINGS}}}, TABLE)
    for name in FOUND:
        row = decode.cell(bench, KNOWN[name], 512, bench.rates.choose(KNOWN[name]))
        assert (row.reason, row.rates_from, row.rates) == (None, "recorded", FOUND[name])
        assert row.counted_bytes == row.host_bytes == moved(name, 512, FOUND[name], bench.model).host_bytes


def test_whole_steps_are_asked_for_at_recorded_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(
        decode_parts,
        "cell",
        lambda bench, setting, context, given, *more, **named: asked.setdefault(setting.name, given),
    )
    bench = Bench(DryDevice(), (256,), (2,), {"entries": {}}, TABLE)
    for each in decode_parts.decodes(256, 2):
        list(each.run(bench))
    assert set(asked) == set(KNOWN)
    assert all(given == TABLE.choose(KNOWN[name]) for name, given in asked.items())
    for each in (decode_parts.compiled(256), decode_parts.ways(256)):
        asked.clear()
        list(each.run(bench))
        assert set(asked) == {setting.name for setting in decode_parts.compared(bench)}
        assert all(given == TABLE.choose(KNOWN[name]) for name, given in asked.items())


def test_sweeps_keep_their_grid_and_gain_the_papers_rates() -> None:
    grid = [(setting.name, dict(given)) for setting, given in swept(RateTable(), tuple(settings()))]
    assert grid == [
        *(("freekv", {"miss": miss, "correction": rate}) for miss in (0.1, 0.3, 1.0) for rate in (0.0, 0.14, 0.5)),
        *(("blocking", {"miss": miss}) for miss in (0.1, 0.3, 1.0)),
    ]
    found = [(setting.name, dict(given)) for setting, given in swept(TABLE, tuple(settings()))]
    assert found[: len(grid)] == grid
    assert {name for name, given in found if TABLE.source(KNOWN[name], given) == "papers"} == set(FOUND)


def test_a_row_says_where_its_rates_come_from() -> None:
    freekv = KNOWN["freekv"]
    assert TABLE.source(freekv, FOUND["freekv"]) == "recorded"
    assert TABLE.source(freekv, PAPERS["freekv"]) == RateTable().source(freekv, PAPERS["freekv"]) == "papers"
    assert TABLE.source(freekv, {"miss": 0.75, "correction": 0.1}) == "set"
    assert TABLE.source(KNOWN["full"], {}) == "none"
    assert words({"miss": 0.51234, "correction": 0.8}, "recorded") == "miss 0.512, correction 0.8 (recorded)"
    assert words({}, "none") == ""


# headlines and tables


def test_a_headline_stands_at_both_rates_with_its_floor_at_the_same() -> None:
    headline = next(h for h in list_measurable() if (h.over[0], h.over[2]) == ("blocking", 1))
    steps = [
        {"method": name, "context": 32768, "batch": 1, "median": time, "peak_bytes": 1, "rates": given}
        for name, time, given in (
            ("blocking", 0.03, FOUND["blocking"]),
            ("freekv", 0.02, FOUND["freekv"]),
            ("blocking", 0.01, PAPERS["blocking"]),
        )
    ]
    found = {row.rates_from: row for row in compared(LLAMA_8B, steps, 3e12, 52e9, TABLE) if row.name == headline.name}
    assert list(found) == ["papers", "recorded"]
    assert found["recorded"].ours == pytest.approx(1.5)
    assert found["papers"].ours is None, "FreeKV was not measured at the papers'"
    for source, given in (("papers", PAPERS), ("recorded", FOUND)):
        over, under = (moved(name, 32768, given[name]).floor(3e12, 52e9) for name in ("blocking", "freekv"))
        assert found[source].floor == pytest.approx(over / under)  # type: ignore[index]
    assert found["papers"].floor != found["recorded"].floor


def test_headlines_without_rates_stand_once() -> None:
    names = [row.name for row in compared(LLAMA_8B, [], 3e12, 52e9, TABLE)]
    assert names.count("CHESS against FullKV at 32K") == 1
    assert names.count("SeKV memory at 128K") == 2
    assert [row.name for row in compared(LLAMA_8B, [], 3e12, 52e9, RateTable())] == [h.name for h in list_measurable()]


def test_tables_show_both_where_they_differ() -> None:
    both, papers = page([], TABLE), page([], RateTable())
    assert "| FreeKV | correction | 0.14 | 0.80 (0.00 to 1.00) |" in both
    assert "| SeKV (untrained router) | zoom | 0.05 (ours) | 0.20 (0.00 to 1.00) |" in both
    assert both.count("| FreeKV, the papers' rates | 5.23") == both.count("| FreeKV, recorded rates |") == 1
    assert "| FullKV | 5.36" in both
    assert "recorded rates |" not in papers
    assert papers.count("| FreeKV, the papers' rates | 5.23") == 1
    assert rates.MISSING in papers


def test_replayed_corrections_are_drawn_at_the_recorded_rate() -> None:
    bench = Bench(DryDevice(), (1024,), (1,), {"entries": {}}, TABLE)
    with torch.inference_mode():
        made = decoding.begin(bench, KNOWN["freekv"], 1024, bench.rates.choose(KNOWN["freekv"]))
    assert float(made.replays[0].waits.float().mean()) == pytest.approx(0.8, abs=0.05)
    assert made.replays[0].missed / made.replays[0].wanted == 0.75
    made.close()
