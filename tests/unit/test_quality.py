"""The quality table: what it counts, that it can be resumed, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvlens.bench.intervals import wilson
from kvlens.bench.quality import QualityRequest, document, markdown, measure, summarise

SMALL = {"methods": ("full", "streaming_llm"), "tasks": ("needle",), "budgets": ("20%",), "length": 256, "prompts": 2}


def collect(kept: Path, request: QualityRequest, said: list[str] | None = None) -> tuple[dict[str, Any], list[str]]:
    run: list[str] = []
    lines: list[str] = [] if said is None else said
    result = measure(request, kept, lambda done, total, row: run.append(row["key"]), lines.append)
    return result, run


def test_wilson_by_hand() -> None:
    # 8 of 10: (0.8 + 1.9208/10 -+ 1.96 sqrt(0.016 + 0.009604)) / (1 + 0.38416)
    low, high = wilson(0.8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson(0.0, 5)[0] == 0
    assert wilson(1.0, 5)[1] == 1


def test_an_interrupted_table_goes_on_where_it_stopped(tmp_path: Path) -> None:
    kept = tmp_path / "trials.jsonl"
    whole, run = collect(kept, QualityRequest(**SMALL))
    assert len(run) == 4
    lines = kept.read_text().splitlines()
    kept.write_text(
        "\n".join(lines[:-1]) + "\n" + lines[-1][: len(lines[-1]) // 2]
    )  # killed while writing the last line
    again, run = collect(kept, QualityRequest(**SMALL))
    assert run == ["needle/256/1/streaming_llm/20%"]
    assert again["lines"] == whole["lines"]
    assert collect(kept, QualityRequest(**SMALL))[1] == []
    first = next(line for line in whole["lines"] if line["method"] == "full")
    assert (first["n"], first["exact"], first["coverage"]) == (2, 1.0, pytest.approx(1.0, abs=1e-4))
    assert first["failed_self_checks"] == 0
    table = markdown(whole)
    assert "StreamingLLM | 20%" in table
    assert "4 of 4 trials" in table


def test_trials_of_other_parameters_are_run_again_and_kept(tmp_path: Path) -> None:
    kept = tmp_path / "trials.jsonl"
    collect(kept, QualityRequest(**SMALL))
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    for row in rows:
        if row["method"] == "streaming_llm":
            row |= {"origin": "0123456789abcdef", "exact": 1.0}
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    result, run = collect(kept, QualityRequest(**SMALL), said)
    (line,) = said
    assert line.startswith("2 kept trials of streaming_llm were made with other code, weights or settings, 2 of them")
    assert run == ["needle/256/0/streaming_llm/20%", "needle/256/1/streaming_llm/20%"]
    assert next(line for line in result["lines"] if line["method"] == "streaming_llm")["n"] == 2
    assert len(kept.read_text().splitlines()) == 6
    assert collect(kept, QualityRequest(**SMALL), said)[1] == []
    assert said == [line], "what has been run again is not spoken of again"
    assert collect(kept, QualityRequest(**{**SMALL, "first_seed": 5}))[1] != []


@pytest.mark.parametrize("text", ["not a trial\n", '{"a": 1}\n', "[1]\n"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    kept = tmp_path / "trials.jsonl"
    kept.write_text(text)
    with pytest.raises(ValueError, match="does not hold trials"):
        collect(kept, QualityRequest(**SMALL))
    assert kept.read_text() == text


def test_the_committed_page_is_made_of_the_committed_figures_in_the_units_of_the_pages() -> None:
    root = Path(__file__).resolve().parents[2]
    result = json.loads((root / "benchmarks/results/quality.json").read_text(encoding="utf-8"))
    assert (page := document(result)) == (root / "docs/quality.md").read_text(encoding="utf-8")
    assert " kB |" in page
    assert "KiB" not in page


def test_infeasible_cells_say_what_they_need() -> None:
    request = QualityRequest(methods=("full", "sekv"), tasks=("needle",), budgets=("5%",), length=2048, prompts=2)
    row = {"method": "sekv", "budget": "5%", "task": "needle", "rule": "resident bytes", "infeasible": 0.1}
    lines = summarise([row, row], request)
    assert [(line["method"], line["n"], line["infeasible"]) for line in lines] == [("full", 0, 0), ("sekv", 0, 2)]
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
