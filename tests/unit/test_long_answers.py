"""The study of long answers: exact ends, tokens that equal full KV's, and trials that are not run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlens import methods
from kvlens.lab.studies import long_answers
from kvlens.lab.studies.long_answers import METHODS, PLANS, Plan, equal_tokens, lines_of, measure, table
from kvlens.statistics import wilson
from kvlens.tasks.countdown import COUNTDOWN


def row(method: str, prompt: int, **figures: Any) -> dict[str, Any]:
    """A row of a trial that ended, right and equal to full KV's unless figures say otherwise."""
    usual = {"right": True, "named": True, "counted": 96, "preset": "paper", "ids": [1, 2, 3, 4]}
    return {"prompt": prompt, "method": method, **usual, **figures}


def test_a_line_counts_right_ends_and_tokens_that_equal_full_kvs() -> None:
    rows = [row("full", number, preset=None) for number in range(4)]
    rows += [row("h2o", 0), row("h2o", 1, right=False, named=False, ids=[1, 2, 9, 4])]
    rows += [row("h2o", 2, right=False, ids=[7], counted=8)]
    rows += [{"prompt": 3, "method": "h2o", "refused": "too small"}]
    full, h2o = lines_of(PLANS["countdown"], rows)
    assert (full["method"], full["n"], full["right"], full["presets"], full["equal_tokens"]) == ("full", 4, 4, [], 4)
    assert (h2o["n"], h2o["right"], h2o["counted"], h2o["equal_tokens"]) == (3, 1, pytest.approx(200 / 3), 2)
    assert (h2o["whole"], h2o["named"]) == (2, 2), "the third names the number behind eight entries"
    assert (h2o["low"], h2o["high"]) == pytest.approx(wilson(1 / 3, 3))
    assert h2o["presets"] == ["paper"]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table(PLANS["countdown"], [full, h2o]).splitlines()
    ]
    assert [line[2] for line in cells[2:]] == ["4 of 4", "1 of 3"]
    assert cells[3][3:] == ["6 to 79 %", "2", "2", "67", "2"]


@pytest.mark.parametrize(
    ("ids", "tokens"), [([1, 2, 3], 3), ([1, 2, 9], 2), ([9, 2, 3], 0), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)]
)
def test_tokens_are_equal_until_the_first_that_differs(ids: list[int], tokens: int) -> None:
    assert equal_tokens(ids, [1, 2, 3]) == tokens


def test_the_methods_evict_while_they_decode() -> None:
    assert METHODS[0] == methods.REFERENCE
    assert {methods.get(name).family for name in METHODS[1:]} == {"decode_eviction"}


def test_a_trial_of_the_file_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(COUNTDOWN, 900, 4)
    monkeypatch.setattr(long_answers, "MODEL", "demo")
    monkeypatch.setattr(long_answers, "METHODS", ("full", "streaming_llm"))
    out = tmp_path / "rows.json"
    stored = measure(plan, 2, 2, 10, out)
    assert json.loads(out.read_text()) == stored
    assert [(each["prompt"], each["method"]) for each in stored["rows"]] == [
        (0, "full"),
        (0, "streaming_llm"),
        (1, "full"),
        (1, "streaming_llm"),
    ]
    assert all(1 <= len(each["ids"]) <= 4 and not each["right"] for each in stored["rows"])
    peaks = [each["peak_bytes"] for each in stored["rows"]]
    assert peaks[1] < peaks[0]
    marked = stored["rows"][:1] + [{**each, "end": "kept"} for each in stored["rows"][1:]]
    out.write_text(json.dumps(stored | {"rows": marked[1:]}))
    again = measure(plan, 2, 1, 10, out)["rows"]
    assert [each["end"] == "kept" for each in again] == [False, True, True, True]
    assert again[0] == {**stored["rows"][0], "date": again[0]["date"]}
