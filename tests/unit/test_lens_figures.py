"""The committed measurement of the lens: enough kinds and methods, made of the committed trials, and what the docs say
of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvlens import PACKAGE, methods
from kvlens.lab.bench.explain import ExplainRequest, collect
from kvlens.lab.tasks.kinds import KINDS, SOURCES

RESULTS, ROOT = PACKAGE / "lab" / "results", Path(__file__).resolve().parents[2]
TRIALS = RESULTS / "explain-smollm2-trials.jsonl"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / "explain-smollm2-kinds-10.json").read_text(encoding="utf-8"))
    return document


def _count(arms: dict[str, Any], arm: str) -> int:
    return round(arms[arm]["share"] * arms[arm]["n"])


def test_the_table_is_made_of_the_committed_trials(result: dict[str, Any]) -> None:
    points = tuple((line["method"], line["task"], line["budget"]) for line in result["lines"])
    request = ExplainRequest("smollm2", points, 1024, 50, 9_900_000)
    again = json.loads(json.dumps(collect(request, [TRIALS])))
    assert {name: again[name] for name in ("lines", "pooled", "few")} == {
        name: result[name] for name in ("lines", "pooled", "few")
    }


def test_methods_of_three_families_lose_answers_of_five_kinds_in_three_texts(result: dict[str, Any]) -> None:
    lines = [line for line in result["lines"] if line["n"]]
    assert len(lines) >= 8
    assert len({methods.get(line["method"]).family for line in lines}) >= 3
    pooled = {name: group["n"] for name, group in result["pooled"].items()}
    assert pooled["all"] == sum(line["n"] for line in lines) == sum(pooled[kind] for kind in KINDS)
    assert pooled["all"] == sum(pooled[f"text: {source}"] for source in SOURCES)
    assert min(pooled[kind] for kind in KINDS) >= 30


def test_a_trial_that_five_do_not_restore_says_why(result: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in TRIALS.read_text(encoding="utf-8").splitlines()]
    short = [row for row in rows if row["lost"] and not row["shown_top5"]]
    assert len(short) == result["few"]["n"]
    for row in short:
        assert ("fewest" in row) == row["shown_top20"]
        assert 5 < row.get("fewest", 20) <= 20


def test_the_docs_have_the_measured_figures(result: dict[str, Any]) -> None:
    everything = result["pooled"]["all"]["arms"]
    five, twenty = _count(everything, "shown_top5"), _count(everything, "shown_top20")
    lost = everything["shown_top5"]["n"]
    for name in ("lens.md", "get-started.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert re.search(rf"first five.*\| {five} \| {lost} \|", text), name
        assert re.search(rf"first twenty.*\| {twenty} \| {lost} \|", text), name
