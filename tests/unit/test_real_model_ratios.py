"""Ratios of `python -m benchmarks.real_model`: inside a round, against the right arm."""

from __future__ import annotations

import pytest

from benchmarks import real_model
from benchmarks.cold_start import once
from benchmarks.real_model import Times, keep_lines, measure, ratios


def times(prefill: float, step: float, after: float = 0.0, total: float = 1.0) -> Times:
    return {"prefill": prefill, "step": step, "after": after, "total": total}


def test_a_ratio_is_taken_inside_its_round() -> None:
    seconds = {
        "transformers": [times(2.0, 0.10), times(4.0, 0.20), times(8.0, 0.10)],
        "full": [times(1.0, 0.11), times(4.0, 0.20), times(2.0, 0.15)],
        "full, recorded": [times(1.1, 0.1, 0.5, 2.0), times(4.0, 0.2, 1.0, 3.0), times(2.0, 0.15, 0.5, 2.5)],
        "snapkv": [times(0.5, 0.22), times(1.0, 0.10), times(1.0, 0.15)],
        "sekv": [],
    }
    found = {(line["arm"], line["part"]): line for line in ratios(seconds)}
    assert {arm for arm, _ in found} == {"full", "full, recorded", "snapkv"}, "what did not run"
    assert [part for arm, part in found if arm == "full"] == ["prefill", "step", "total"]
    assert [part for arm, part in found if arm == "full, recorded"] == ["prefill", "step", "after", "total"]
    assert [part for arm, part in found if arm == "snapkv"] == ["prefill", "step"]
    full, placing, step = found["full", "prefill"], found["snapkv", "prefill"], found["snapkv", "step"]
    assert (full["against"], full["ratio"], full["low"], full["high"]) == ("transformers", 0.5, 0.25, 1.0)
    assert found["full", "step"]["ratio"] == pytest.approx(1.1)
    assert (placing["against"], placing["ratio"]) == ("full", 0.5)
    assert (step["low"], step["ratio"], step["high"], step["ms"]) == (0.5, 1.0, 2.0, pytest.approx(150.0))
    after, total = found["full, recorded", "after"], found["full, recorded", "total"]
    assert (after["low"], after["ratio"], after["high"]) == (0.25, 0.25, 0.5), "shares of FullKV's prefill"
    assert (total["ratio"], total["high"]) == (2.5, 3.0)


def test_lines_that_were_not_measured_again_stay_with_their_date() -> None:
    about = {"model": "m", "prompt_tokens": 9, "steps": 2, "budget": "20%", "machine": {"cores": 2}}
    before = {
        "about": about | {"date": "then", "presets": {"full": None, "snapkv": "paper"}},
        "ratios": [{"arm": "full", "ratio": 1.0}, {"arm": "snapkv", "ratio": 2.0}],
    }
    now = {"about": about | {"date": "now", "presets": {"full": None}}, "ratios": [{"arm": "full", "ratio": 3.0}]}
    assert keep_lines(before, now) == [{"date": "then", "arm": "snapkv", "ratio": 2.0}]
    assert now["about"]["presets"] == {"full": None, "snapkv": "paper"}


def test_a_file_of_another_sitting_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []
    monkeypatch.setattr(real_model.Engine, "run", lambda *given: measured.append(given))
    monkeypatch.setattr(real_model.Engine, "read", lambda *given, **named: measured.append(given))
    about = {"model": "demo", "prompt_tokens": 9, "steps": 2, "budget": "20%", "machine": {}, "date": "then"}
    with pytest.raises(SystemExit, match="--out"):
        measure("demo", 256, 1, [], lambda line: None, {"about": about | {"presets": {}}, "ratios": []})
    assert not measured


def test_a_process_that_fails_is_no_cold_start() -> None:
    with pytest.raises(RuntimeError, match="ended with 1"):
        once(["run", "no-such-prompt.json", "--model", "demo", "--progress-json"])
