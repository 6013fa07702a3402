"""The quality table: what it counts, that it can be resumed, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvlens import methods
from kvlens.lab.bench.joined import joined
from kvlens.lab.bench.quality import QualityRequest, measure, summarise
from kvlens.lab.bench.quality import collect as collected
from kvlens.lab.bench.qualitypage import ORDER, document, markdown
from kvlens.lab.bench.trials import settings
from kvlens.lab.commands.results import beside, results, write
from kvlens.lab.results.names import measured_on
from kvlens.statistics import wilson
from kvlens.store.errors import RunNotFound
from kvlens.studies import storage

SMALL: dict[str, Any] = {
    "methods": ("full", "streaming_llm"),
    "tasks": ("needle",),
    "budgets": ("20%",),
    "length": 256,
    "prompts": 2,
}


def collect(
    folder: Path, request: QualityRequest, said: list[str] | None = None
) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Measure -> the result, and (index, method, number format) of the trials that were run."""
    run: list[tuple[Any, ...]] = []
    lines: list[str] = [] if said is None else said

    def watch(done: int, total: int, row: dict[str, Any]) -> None:
        run.append((row["index"], row["method"], row["dtype"]))

    return measure(request, folder, watch, lines.append), run


def trials_file(folder: Path) -> Path:
    """The one resumable file of the one study in a folder."""
    (study,) = storage.ids(folder)
    return storage.folder_of(folder, study) / storage.TRIALS


def test_wilson_by_hand() -> None:
    # 8 of 10: (0.8 + 1.9208/10 -+ 1.96 sqrt(0.016 + 0.009604)) / (1 + 0.38416)
    low, high = wilson(0.8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson(0.0, 5)[0] == 0
    assert wilson(1.0, 5)[1] == 1


def test_an_interrupted_table_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole, run = collect(tmp_path, QualityRequest(**SMALL))
    assert len(run) == 6
    kept = trials_file(tmp_path)
    lines = kept.read_text().splitlines()
    kept.write_text(
        "\n".join(lines[:-1]) + "\n" + lines[-1][: len(lines[-1]) // 2]
    )  # killed while writing the last line
    again, run = collect(tmp_path, QualityRequest(**SMALL))
    assert run == [(1, "full", "bfloat16")]
    assert again["lines"] == whole["lines"]
    assert collect(tmp_path, QualityRequest(**SMALL))[1] == []
    first, _, other = whole["lines"]
    assert 0.9 < first["read_share"] <= 1
    assert 0 < other["read_share"] <= other["resident_share"] <= 0.2
    read, attended = (other[name] / first[name] for name in ("read_bytes_per_step", "attended_tokens"))
    assert read == pytest.approx(attended), "neither reads an index"
    assert (first["n"], first["exact"], first["coverage"]) == (2, 1.0, pytest.approx(1.0, abs=1e-4))
    assert first["failed_self_checks"] == 0
    table = markdown(whole)
    assert "StreamingLLM | 20%" in table
    assert "FullKV in bfloat16 (noise floor) | none" in table
    assert "6 of 6 trials" in table


def test_trials_of_other_parameters_are_run_again(tmp_path: Path) -> None:
    collect(tmp_path, QualityRequest(**SMALL))
    kept = trials_file(tmp_path)
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    arm = next(arm.key() for arm in QualityRequest(**SMALL).arms() if arm.method == "streaming_llm")
    for row in rows:
        if row["arm"] == arm:
            row |= {"origin": "0123456789abcdef"}
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    result, run = collect(tmp_path, QualityRequest(**SMALL), said)
    assert len(said) == 1
    assert run == [(0, "streaming_llm", ""), (1, "streaming_llm", "")]
    assert next(line for line in result["lines"] if line["method"] == "streaming_llm")["n"] == 2
    assert len(kept.read_text().splitlines()) == 8
    assert collect(tmp_path, QualityRequest(**SMALL), said)[1] == []
    assert len(said) == 1, "what has been run again is not spoken of again"
    assert collect(tmp_path, QualityRequest(**{**SMALL, "first_seed": 5, "prompts": 1}))[1] != []


def test_the_committed_page_is_made_of_the_committed_figures_in_the_units_of_the_pages() -> None:
    root = Path(__file__).resolve().parents[2]
    page = document(*(results(root / "kvlens/lab/results", kind) for kind in ("quality", "text")))
    assert page == (root / "docs/evidence/quality.md").read_text(encoding="utf-8")
    assert " kB |" in page
    assert "KiB" not in page


def test_infeasible_cells_say_what_they_need() -> None:
    request = QualityRequest(methods=("full", "sekv"), tasks=("needle",), budgets=("5%",), length=2048, prompts=2)
    row = {"method": "sekv", "budget": "5%", "task": "needle", "rule": "resident bytes", "infeasible": 0.1}
    lines = summarise([row | {"dtype": ""}] * 2, request)
    assert [(line["method"], line["dtype"], line["n"], line["infeasible"]) for line in lines] == [
        ("full", "", 0, 0),
        ("full", "bfloat16", 0, 0),
        ("sekv", "", 0, 2),
    ]
    machine = {"processor": "P", "cores": 2}
    about = {
        "machine": machine,
        "trials": 2,
        "planned": 4,
        "date": "d",
        "torch": "t",
        "transformers": "t",
        "request": request.model_dump(),
    }
    table = markdown({"about": about, "lines": lines})
    assert "infeasible, needs 10%" in table
    assert "not run" in table


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tasks": ("nonsense",)}, "unknown task"),
        ({"methods": ("magic",)}, "unknown method 'magic'"),
        ({"budgets": ("64MB",)}, "shares of full KV"),
        ({"budgets": ("x",)}, "not understood"),
        ({"prompts": 0}, "greater than or equal"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        QualityRequest(**{**SMALL, **change})


def test_a_stopped_table_is_collected_with_whole_prompts_only(tmp_path: Path) -> None:
    request = QualityRequest(**SMALL)
    with pytest.raises(RunNotFound):
        collected(request, tmp_path)
    whole, _ = collect(tmp_path, request)
    assert collected(request, tmp_path)["lines"] == whole["lines"]
    kept = trials_file(tmp_path)
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    for row in rows:
        row["origin"] = "0123456789abcdef"
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    half = collected(request, tmp_path)
    assert (half["about"]["trials"], half["about"]["planned"]) == (3, 6)
    assert [line["n"] for line in half["lines"]] == [1, 1, 1], "the second prompt lacks a method"
    assert set(half["about"]["origins"].values()) == {"0123456789abcdef"}, "what the trials were made with"
    more = QualityRequest(**{**SMALL, "methods": (*SMALL["methods"], "snapkv")})
    assert [line["n"] for line in collected(more, tmp_path)["lines"]] == [1, 1, 1, 0], "a method that came later"
    arm = next(arm.key() for arm in request.arms() if arm.method == "streaming_llm")
    kept.write_text(
        "".join(json.dumps(row) + "\n" for row in rows if row["arm"] == arm and "/0" not in row["prompt"][-2:])
    )
    assert collected(request, tmp_path)["about"]["trials"] == 1


def of(
    model: str,
    question: str,
    *arms: dict[str, Any],
    tasks: tuple[str, ...] = ("needle",),
    budgets: tuple[str, ...] = ("20%",),
) -> dict[str, Any]:
    """A result of FullKV, a line for each of `arms`."""
    line = {"method": "full", "budget": "", "task": tasks[0], "rule": "none", "n": 4, "infeasible": 0, "exact": 1.0}
    line |= {"low": 0.5, "high": 1.0, "coverage": 1.0, "attended_share": 1.0, "resident_share": 1.03}
    line |= {"h2d_bytes_per_step": 0.0}
    about: dict[str, Any] = {"machine": {"processor": "P", "cores": 2}, "trials": 4, "planned": 4, "date": "d"}
    about |= {"torch": "t", "transformers": "t"}
    asked = {"model": model, "tasks": list(tasks), "length": 1024, "question": question, "budgets": list(budgets)}
    return {"about": about | {"request": asked}, "lines": [line | arm for arm in arms or ({},)]}


LENGTH = 1024
RECALL, FLOOR = "selection recall", "FullKV in bfloat16 (noise floor)"
UNASKED = "No question is asked"


def heading(model: str, known: str, more: str = "") -> str:
    """Return the heading of a table: model, length and condition."""
    return f"## {model}, {LENGTH:,} tokens, {ORDER[known]}{more}"


def headings(page: str) -> list[str]:
    return [text for text in page.splitlines() if text.startswith("## ")]


def test_the_page_has_the_toy_last_and_says_what_was_not_measured() -> None:
    arm = {"dtype": "bfloat16", "selection_recall": 0.5, "read_share": 0.125, "presets": {"paper": 3, "fit": 1}}
    page = document([of("demo", "in"), of("real", "after"), of("real", "in", arm, {})])
    assert headings(page) == [heading("real", "in"), heading("real", "after"), heading("demo (a toy)", "in")]
    rows = [text for text in page.splitlines() if text.startswith("| ")]
    start, cell = "| method | budget | preset | needle: exact (95 %), n | coverage |", "1.00 (0.50-1.00), 4"
    both, moved = "resident, of float32 KV | resident, of 16-bit KV", "to device per step"
    without = [
        f"{start} attended | {both} | {moved} |",
        f"| FullKV | none | defaults | {cell} | 1.00 | 100.0% | 103.0% | — | 0 B |",
    ]
    assert rows == [
        f"{start} {RECALL} | attended | {both} | read | {moved} |",
        f"| {FLOOR} | none | paper 3, fit 1 | {cell} | 1.00 | 0.50 | 100.0% | — | 103.0% | 12.5% | 0 B |",
        f"| FullKV | none | defaults | {cell} | 1.00 | — | 100.0% | 103.0% | — | — | 0 B |",
        *without,
        *without,
    ]
    assert page.count("no\nevidence") == 1


def test_tables_that_differ_in_their_tasks_alone_are_named_by_them_and_stand_side_by_side(tmp_path: Path) -> None:
    found = [of("real", "in"), of("real", "after"), of("real", "in", tasks=("list", "count"))]
    assert headings(document(found)) == [
        heading("real", "in", ": list, count"),
        heading("real", "in", ": needle"),
        heading("real", "after"),
    ]
    for number, one in enumerate(found):
        write(tmp_path / f"quality-{number}.json", one)
    again = of("real", "in", tasks=("count", "list"))
    assert beside(tmp_path / "again.json", "quality", again) == [again, *found[:2]], "it takes the place of its like"


def test_tables_that_differ_in_their_methods_alone_are_named_by_them() -> None:
    first, second = of("real", "in"), of("real", "in")
    for result, names in ((first, ["full", "quest"]), (second, ["kivi", "quest", "tova"])):
        result["about"]["request"] = result["about"]["request"] | {"methods": names, "budgets": ["20%"]}
    second["about"]["torch"] = "another"
    assert headings(document([first, second])) == [
        heading("real", "in", ": needle at 20%, methods from FullKV on"),
        heading("real", "in", ": needle at 20%, methods from KIVI on"),
    ]
    second["about"]["request"] |= {"budgets": ["5%", "20%"]}
    assert headings(document([first, second])) == [
        heading("real", "in", ": needle at 20%, methods from FullKV on"),
        heading("real", "in", ": needle at 5%, 20%, methods from KIVI on"),
    ], "also where their budgets differ"


def test_tables_that_differ_in_their_budgets_alone_are_one(tmp_path: Path) -> None:
    """A later sitting at other budgets; one with another torch is a table of its own, and both name their budgets."""
    later = of("real", "in", {}, {"method": "quest", "budget": "40%"}, {"method": "quest", "budget": "5%"})
    later["about"] |= {"date": "e", "request": later["about"]["request"] | {"budgets": ["40%", "5%"]}}
    early = of("real", "in", {}, {"method": "quest", "budget": "20%"}, {"method": "kivi", "budget": "20%"})
    assert joined([early]) == [early]
    (whole,) = joined([later, early])
    assert [(line["method"], line["budget"]) for line in whole["lines"]] == [
        ("full", ""),
        ("quest", "5%"),
        ("quest", "20%"),
        ("quest", "40%"),
        ("kivi", "20%"),
    ]
    assert whole["about"]["request"]["budgets"] == ["5%", "20%", "40%"]
    assert (whole["about"]["trials"], whole["about"]["planned"]) == (8, 8)
    assert measured_on(whole["about"]) == "d (40%, 5%: e)"
    assert headings(document([later, early])) == [heading("real", "in")]
    later["about"]["torch"] = "another"
    assert headings(document([later, early])) == [
        heading("real", "in", ": needle at 20%"),
        heading("real", "in", ": needle at 40%, 5%"),
    ]
    for number, one in enumerate((early, later)):
        write(tmp_path / f"quality-{number}.json", one)
    again = of("real", "in", budgets=("10%", "20%"))
    assert beside(tmp_path / "again.json", "quality", again) == [again, later], "20 % is measured again"


def test_what_is_no_table_is_not_joined() -> None:
    odd: list[dict[str, Any]] = [{}, {"about": {"request": {"budgets": ["x"]}}, "lines": []}, {}]
    assert joined(odd) == odd
    stray = of("real", "in", {"task": "another"})
    bare = of("real", "in", budgets=())
    assert joined([stray, stray, bare, bare]) == [stray, stray, bare, bare]


def test_sittings_with_a_budget_in_common_stay_apart() -> None:
    early, later = of("real", "in", {"exact": 0.1}), of("real", "in", {"exact": 0.9})
    assert joined([early, later]) == [early, later]


def test_a_sitting_that_lacks_a_method_joins_the_others() -> None:
    early, later = of("real", "in"), of("real", "in", {"method": "quest"}, budgets=("5%",))
    early["about"]["request"]["methods"], later["about"]["request"]["methods"] = ["full", "quest"], ["quest"]
    for order in ([early, later], [later, early]):
        (whole,) = joined(order)
        assert whole["about"]["request"]["methods"] == ["full", "quest"]
        assert whole["about"]["request"]["budgets"] == ["5%", "20%"]
    for result, presets in ((early, {"full": None}), (later, {"quest": "paper"})):
        result["about"]["presets"] = presets
    assert joined([early, later])[0]["about"]["presets"] == {"full": None, "quest": "paper"}
    later["about"]["request"]["methods"] = ["quest", "kivi"]
    assert joined([early, later]) == [early, later]
    del later["about"]["request"]["methods"]
    assert joined([early, later]) == [early, later]


def test_what_no_budget_holds_has_one_row() -> None:
    rows = [{"method": "magicpig", "budget": budget, "rule": "none"} for budget in ("5%", "20%")]
    page = markdown(of("real", "in", *rows, {"method": "kivi", "budget": "5%", "rule": "resident bytes"}))
    assert [line.split(" | ")[1] for line in page.splitlines() if line.startswith(("| MagicPIG", "| KIVI"))] == [
        "none",
        "5%",
    ]


def test_free_text_at_several_budgets_is_named_by_them_and_explained_once() -> None:
    root = Path(__file__).resolve().parents[2]
    one = results(root / "kvlens/lab/results", "text")[0]
    request = one["about"]["request"]
    other = {**one, "about": {**one["about"], "request": {**request, "budgets": ["5%", "40%"]}}}
    about = f"## {request['model']}, free text, {request['length']:,} tokens of context"
    assert headings(document([], [one])) == [about]
    page = document([], [one, other])
    assert headings(page) == [f"{about}: at {', '.join(request['budgets'])}", f"{about}: at 5%, 40%"]
    assert page.count(UNASKED) == 1
    newer = {**one, "about": {**one["about"], "request": {**request, "methods": ["qfilters", "xkv"]}}}
    budgets = ", ".join(request["budgets"])
    assert headings(document([], [one, newer])) == [
        f"{about}: at {budgets}, methods from FullKV on",
        f"{about}: at {budgets}, methods from Q-Filters on",
    ]


@pytest.mark.parametrize(
    ("method", "budget", "rule"),
    [
        ("snapkv", "20%", ({}, "resident bytes")),
        ("quest", "20%", ({"keep": 0.2}, "attended tokens")),
        ("quest", "100%", ({"keep": 1.0}, "attended tokens")),
        ("magicpig", "20%", ({}, "none")),
        ("full", "", ({}, "none")),
    ],
)
def test_a_budget_holds_a_method_by_the_rule_that_it_has(method: str, budget: str, rule: tuple[object, str]) -> None:
    assert settings(methods.get(method), "smollm2", budget)[1:] == rule
