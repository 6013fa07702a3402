"""kvlens bench explain on few trials: what is held, what comes back, and that an interrupted measurement goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import raises_code

from kvlens import methods
from kvlens.engine.engine import Engine
from kvlens.engine.models import load
from kvlens.instruments import Loss, Oracle
from kvlens.lab.bench import kept as keeping
from kvlens.lab.bench.explain import ExplainRequest, collect, explain_trial, measure
from kvlens.lab.bench.lostcase import Case
from kvlens.lab.bench.provenance import about
from kvlens.lab.bench.trialprompts import Prompts, Trial
from kvlens.lab.commands.results import beside, results, write
from kvlens.lab.results.explain_few import begun_share, shortfalls
from kvlens.lab.results.explain_table import ARMS, FULL_KV, OWN_QUERY, document, markdown, summarise
from kvlens.lens.attribution import attribute_records

POINTS = (("streaming_llm", "multikey", "10%"), ("chess", "multikey", "10%"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    kept = tmp_path_factory.mktemp("explain") / "trials.jsonl"
    return kept, measure(ExplainRequest(points=POINTS, length=512, lost=3), kept, told.append), told


def test_what_is_attributed_brings_answers_back_and_chance_does_not(
    measured: tuple[Path, dict[str, Any], list[dict[str, Any]]],
) -> None:
    lines = measured[1]["lines"]
    assert [(line["method"], line["n"]) for line in lines] == [("streaming_llm", 3), ("chess", 3)]
    for line in lines:
        assert line["arms"]["everywhere"]["share"] == 1.0
        assert line["arms"]["shown_top5"]["share"] > line["arms"]["random5"]["share"]
        assert line["arms"]["shown_top20"]["share"] == 1.0
    assert measured[1]["pooled"]["all"]["n"] == 6
    assert measured[1]["about"]["masses"] == FULL_KV


def test_a_second_call_runs_nothing_again(measured: tuple[Path, dict[str, Any], list[dict[str, Any]]]) -> None:
    kept, first, told = measured
    assert len(kept.read_text().splitlines()) == len(told)
    again: list[dict[str, Any]] = []
    second = measure(ExplainRequest(points=POINTS, length=512, lost=3), kept, again.append)
    assert again == []
    assert second["lines"] == first["lines"]
    assert "| StreamingLLM, defaults, multikey, 10% | 3 (" in document([second])
    for line in second["lines"]:
        line["arms"] = {arm: share for arm, share in line["arms"].items() if not arm.startswith("shown")}
    assert "| n (triples) | random 5 |" in document([second]), "a ranking that was not measured is no column"


def test_files_of_several_processes_are_one_table_and_a_trial_counts_once(
    measured: tuple[Path, dict[str, Any], list[dict[str, Any]]], tmp_path: Path
) -> None:
    kept, first, _ = measured
    lines = kept.read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[::2]))
    (tmp_path / "b.jsonl").write_text("".join([*lines[1::2], lines[0].replace("-", "~")]))
    request = ExplainRequest(points=POINTS, length=512, lost=3)
    result = collect(request, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert result["lines"] == first["lines"]
    assert result["pooled"] == first["pooled"]
    made = {
        "kvlens": "9",
        "torch": "8",
        "transformers": "7",
        "date": "2030-01-02",
        "machine": {"processor": "P", "cores": 3},
    }
    gpu = made | {"machine": {"processor": "P", "cores": 3, "gpu": "G"}, "date": "2030-01-01"}
    rows = [json.loads(line) | {"made": gpu if place else made} for place, line in enumerate(lines)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about_rows = collect(request, [tmp_path / "c.jsonl"])["about"]
    assert {name: about_rows[name] for name in made} == made
    assert about_rows["trials_by_device"] == {"P, 3 cores, torch 8": 1, "G, torch 8": len(rows) - 1}


def test_a_prompt_without_controls_holds_five_and_twenty_alone(
    measured: tuple[Path, dict[str, Any], list[dict[str, Any]]],
) -> None:
    row = next(row for row in measured[2] if row["lost"] and row["method"] == "chess")
    engine = Engine(load("demo"))
    trial = Trial("multikey", 512, row["depth"], row["seed"], row["index"], "chess", "10%")
    plain = explain_trial(engine, Prompts(engine, 9_500_000), trial, controls=False)
    assert sorted(arm for arm in ARMS if arm in plain) == ["shown_top20", "shown_top5"]
    assert {arm: row[arm] for arm in ARMS if arm in plain} == {arm: plain[arm] for arm in ARMS if arm in plain}
    assert plain["ranking"] == row["ranking"]
    assert len(row["ranking"]) == min(20, len({tuple(triple) for triple in row["ranking"]}))
    assert 0 <= row["in_needle"] <= 5


@pytest.mark.parametrize("needed", range(6, 21))
def test_the_fewest_triples_that_restore_are_found_by_bisection(needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.__new__(Case)
    monkeypatch.setattr("kvlens.lab.bench.lostcase.holds_of", lambda triples, spans: triples)
    monkeypatch.setattr(case, "answers", lambda holds: len(holds) >= needed, raising=False)
    assert case._count_fewest({}, [(0, 0, span) for span in range(64)]) == needed


def test_the_page_has_the_fresh_table_in_place_of_one_of_the_same_model_and_length(
    measured: tuple[Path, dict[str, Any], list[dict[str, Any]]], tmp_path: Path
) -> None:
    fresh = json.loads(json.dumps(measured[1]))
    older, other = ({"about": fresh["about"] | {"length": length}, "lines": []} for length in (512, 1024))
    write(tmp_path / "explain-older.json", older)
    write(tmp_path / "explain-other.json", other)
    for name in ("fresh.json", "explain-older.json"):
        write(tmp_path / name, fresh)
        assert beside(tmp_path / name, "explain", fresh) == [fresh, other]


def test_a_fresh_table_leaves_one_of_other_methods_or_budgets_on_its_page(tmp_path: Path) -> None:
    def table(names: list[str], budgets: list[str]) -> dict[str, Any]:
        return {"about": {"request": {"model": "demo", "length": 512, "methods": names, "budgets": budgets}}}

    fresh = table(["full", "quest"], ["20%"])
    for number, (names, budgets, stays) in enumerate(
        ((["full", "snapkv"], ["20%"], True), (["full", "quest"], ["40%"], True), (["quest"], ["20%"], False))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        stored = table(names, budgets)
        write(folder / "quality-stored.json", stored)
        assert beside(folder / "quality-fresh.json", "quality", fresh) == ([fresh, stored] if stays else [fresh])


def test_a_method_runs_as_in_the_tables_by_the_papers_proportions_where_its_numbers_do_not_fit() -> None:
    engine = Engine(load("demo"))
    trial = Trial("multikey", 512, 0.1, 9_500_000, 0, "shadowkv", "20%")
    row = explain_trial(engine, Prompts(engine, 9_500_000), trial)
    assert row["lost"]
    assert (row["preset"], row["everywhere"]) == ("fit", True)
    assert row["overrides"]["outliers"] < methods.make_parameters(methods.get("shadowkv"), "demo", {}).outliers


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"method": "chess"}) + "\n")
    with raises_code("no_trials", file=other.name):
        measure(ExplainRequest(points=POINTS, length=512, lost=1), other, lambda row: None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"points": (("nothing", "multikey", "10%"),)}, "nothing"),
        ({"points": (("chess", "multikey", "64MB"),)}, "share of full KV"),
        ({"lost": 0}, "--lost"),
    ],
)
def test_bad_requests_get_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ExplainRequest(**changes)


def test_shares_are_of_the_lost_trials_only() -> None:
    point = ("chess", "multikey", "10%")
    row = {"method": point[0], "task": point[1], "budget": point[2], "candidates": 10}
    back = {arm: arm != "random1" for arm in ARMS}
    rows = [
        row | {"lost": False},
        row | {"lost": True} | back,
        row | {"lost": True} | back | {"everywhere": False, "step_top1": False},
    ]
    line = next(summarise(rows, [point]))
    assert (line["prompts"], line["n"]) == (3, 2)
    assert line["arms"]["step_top1"]["share"] == 0.5
    assert line["of_everywhere"]["step_top1"] == {
        "share": 1.0,
        "low": pytest.approx(0.2065, abs=1e-3),
        "high": 1.0,
        "n": 1,
    }


def test_an_arm_that_was_measured_on_fewer_says_so() -> None:
    point = ("chess", "multikey", "10%")
    row = {"method": point[0], "task": point[1], "budget": point[2], "candidates": 10, "lost": True}
    back: dict[str, Any] = dict.fromkeys(ARMS, True)
    lines = list(summarise([row | back, row | back | {"shown_top1": None}], [point]))
    said = about(("chess",), "demo") | {"model": "demo", "length": 2048}
    (text,) = (line for line in markdown({"about": said, "lines": lines}).splitlines() if line.startswith("| CHESS"))
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    assert cells[1] == "2 (10)"
    assert [cell.endswith(", 1 of 2") for cell in cells[2:]] == [True] + [False] * (len(cells) - 3)


def test_regret_of_a_record_is_the_mean_over_the_group_by_hand() -> None:
    def step(agrees: bool, full: list[list[float]]) -> tuple[Loss, Oracle]:
        shape = np.array(full, np.float32)[None]
        loss = Loss(0, "", 0, "", agrees, 0.0, 0.0, 0.0, 0.0, 0)
        span = np.broadcast_to(np.array([3, 7], np.int32), shape.shape).copy()
        return loss, Oracle(span, shape, np.full_like(shape, 0.25), np.zeros(shape.shape[:2], np.float32))

    records = [
        step(True, [[1, 1]] * 4),
        step(False, [[0.75, 0], [0.25, 0], [0, 0], [0, 0]]),
        step(False, [[0, 0], [0, 0], [0, 0.5], [0, 0.5]]),
    ]
    assert attribute_records(records, 2, every_lost_step=False) == [((0, 0, 3), 0.25)]
    assert attribute_records(records, 2, every_lost_step=True) == [((0, 0, 3), 0.25), ((0, 1, 7), 0.25)]


def test_a_kept_file_that_is_no_text_is_a_sentence_and_stays(tmp_path: Path) -> None:
    kept = tmp_path / "trials.jsonl"
    kept.write_bytes(b"PAR1\xff\xfe\n")
    with raises_code("no_trials", file="trials.jsonl"):
        keeping.read(kept, ("lost",), lambda row: True)
    assert kept.read_bytes() == b"PAR1\xff\xfe\n"


def test_the_committed_page_is_made_of_the_committed_figures_the_real_model_first() -> None:
    root = Path(__file__).resolve().parents[2]
    found = results(root / "kvlens/lab/results", "explain")
    page = document(found)
    assert page == (root / "docs/evidence/lens-quality.md").read_text(encoding="utf-8")
    assert len(found) > 1
    assert page.index("## smollm2") < page.index("## demo")


def test_only_the_table_with_full_kvs_masses_is_headed_shown() -> None:
    line = {"method": "chess", "task": "multikey", "budget": "10%", "presets": [], "n": 1, "candidates": 2}
    line["arms"] = {"shown_top5": {"share": 1.0, "low": 0.2, "high": 1.0, "n": 1}}
    said = about(("chess",), "demo") | {"model": "demo", "length": 512, "scopes": {"shown": ""}}
    own, full = (document([{"about": said | {"masses": masses}, "lines": [line]}]) for masses in (OWN_QUERY, FULL_KV))
    assert "| shown, top 5 |" in full
    assert "| shown, top 5 |" not in own
    headings = [[row for row in page.splitlines() if row.startswith("## ")] for page in (own, full)]
    assert headings[0] != headings[1]


def test_what_is_known_where_five_are_too_few_is_counted_by_hand() -> None:
    row = {"lost": True, "shown_top5": False, "in_needle": 5, "needle_spans": 2, "answer": " 12 May 1950"}
    row["ranking"] = [[head // 2, 0, head % 2] for head in range(20)]
    rows = [
        {"lost": False},
        row | {"shown_top5": True},
        row | {"shown_top20": True, "fewest": 7, "few_output": " on 12 May 1850."},
        row | {"shown_top20": True, "fewest": 12, "few_output": " in June", "in_needle": 4},
        row | {"shown_top20": False, "few_output": " 12 M"},
    ]
    few = shortfalls(rows)
    assert {name: few[name] for name in ("n", "twenty", "fewest", "cut", "outputs", "later")} == {
        "n": 3,
        "twenty": 2,
        "fewest": [9.5, 7, 12],
        "cut": 1,
        "outputs": 3,
        "later": 1,
    }
    assert few["in_needle"] == pytest.approx(14 / 3)
    assert [begun_share(text, "12 May 1950") for text in ("12 May 1950", "x", "")] == [1.0, 0.0, 0.0]
