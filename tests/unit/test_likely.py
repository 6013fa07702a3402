"""How long a run will take and how large its trace will be, by those that are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlens.app.ui.common.likely import MOST, likely, remaining_s
from kvlens.runs.preflight import TOKEN_BYTES


def stored(folder: Path, number: int, extra: object, **changes: Any) -> None:
    uid = f"20260101-00000{number}-likely"
    info = {
        "status": "completed",
        "created": f"2026-01-01T00:00:0{number}+00:00",
        "model": "m",
        "method": "a",
        "prompt_tokens": 1000,
        "steps": 10,
        "disk_bytes": 2_000_000,
        "extra": extra,
    }
    (folder / uid).mkdir(parents=True)
    (folder / uid / "run.json").write_text(json.dumps(info | changes))


def test_by_the_method_s_own_runs_where_there_are_any(tmp_path: Path) -> None:
    stored(tmp_path, 1, {"prefill_s": 2.0, "decode_s": 1.0})
    stored(tmp_path, 2, {"prefill_s": None, "decode_s": 3.0})
    stored(tmp_path, 3, {"prefill_s": 4.0, "decode_s": 2.0}, prompt_tokens=2000, disk_bytes=2_000_000)
    stored(tmp_path, 4, {"prefill_s": 9.0, "decode_s": 9.0}, method="b")
    stored(tmp_path, 5, {"prefill_s": 9.0, "decode_s": 90.0}, hold=True)
    stored(tmp_path, 6, {"prefill_s": 9.0, "decode_s": 90.0}, status="failed")
    found = likely(tmp_path, "m", "a", 3000, 20, 1_000)
    assert found is not None
    assert (found.prefill_s, found.decode_s, found.runs, found.same_method) == (6.0, 4.0, 3, True)
    assert found.trace_bytes == 2_000_000 + 2000 * TOKEN_BYTES + 10 * 1_000
    other = likely(tmp_path, "m", "c", 1000, 10, 1_000)
    assert other is not None
    assert (other.runs, other.same_method) == (4, False)
    assert likely(tmp_path, "another", "a", 1000, 10, 1_000) is None


def test_the_surprisals_are_part_of_reading_the_prompt_whenever_they_were_computed(tmp_path: Path) -> None:
    stored(tmp_path, 1, {"prefill_s": 2.0, "surprisal_s": 0.5, "decode_s": 1.0})
    stored(tmp_path, 2, {"prefill_s": 2.5, "surprisal_s": None, "decode_s": 1.0})
    found = likely(tmp_path, "m", "a", 2000, 10, 1_000)
    assert found is not None
    assert (found.prefill_s, found.decode_s) == (5.0, 1.0)


def test_a_run_of_a_batch_says_nothing_of_a_run_alone(tmp_path: Path) -> None:
    stored(tmp_path, 0, {"decode_s": 1.0})
    for number in range(1, MOST + 1):
        stored(tmp_path, number, {"decode_s": 30.0, "batched": 3})
    found = likely(tmp_path, "m", "a", 1000, 10, 1_000)
    assert found is not None
    assert (found.decode_s, found.runs) == (1.0, 1)


@pytest.mark.parametrize("extra", [None, [], {"decode_s": "long"}, {"decode_s": -1}, {"prefill_s": 1.0}])
def test_a_run_that_says_too_little_counts_for_nothing(tmp_path: Path, extra: object) -> None:
    stored(tmp_path, 1, extra)
    assert likely(tmp_path, "m", "a", 1000, 10, 1_000) is None


def test_without_times_of_prefill_only_the_steps_are_known(tmp_path: Path) -> None:
    stored(tmp_path, 1, {"prefill_s": None, "decode_s": 1.0})
    found = likely(tmp_path, "m", "a", 1000, 10, 1_000)
    assert found is not None
    assert found.prefill_s is None


def test_every_phase_of_a_compared_run_is_counted(tmp_path: Path) -> None:
    times = {"load_s": 3.0, "decode_s": 2.0, "full_kv_s": 1.0, "effect_s": 7.0}
    stored(tmp_path, 1, times, method="sekv", duration_s=5.0)
    stored(tmp_path, 2, {"prefill_s": 4.0, "surprisal_s": 1.0, "decode_s": 1.0}, method="full", duration_s=6.5)
    found = likely(tmp_path, "m", "sekv", 2000, 20, 1_000, against=True)
    assert found is not None
    assert found.phases == {
        "load": 3.0,
        "prefill": 8.0,
        "check": 4.0,
        "reference": 2.0,
        "surprisal": 2.0,
        "place": 4.0,
        "decode": 6.0,
        "effect": 7.0,
    }
    assert found.total_s == 29.0, "effects come only if the answer is lost"
    left = found.after(frozenset({"prefill", "surprisal", "reference"}))
    assert (left.total_s, left.prefill_s) == (17.0, None), "what was read before the run was asked for"
    alone = likely(tmp_path, "m", "sekv", 2000, 20, 1_000)
    assert alone is not None
    assert not {"check", "reference", "effect"} & alone.phases.keys()


def test_what_remains_follows_the_phase_that_is_under_way() -> None:
    phases = {"load": 3.0, "reference": 10.0, "decode": 20.0, "effect": 7.0, "store": 1.0}
    assert remaining_s(phases, "load", 0, 1, 1.0, lost=False) == 2.0 + 10.0 + 20.0 + 1.0
    assert remaining_s(phases, "decode", 5, 20, 4.0, lost=False) == 12.0 + 1.0
    assert remaining_s(phases, "decode", 5, 20, 4.0, lost=True) == 12.0 + 7.0 + 1.0
    assert remaining_s(phases, "convert", 1, 2, 4.0, lost=False) is None
    assert remaining_s({}, "decode", 1, 2, 4.0, lost=False) is None
    assert remaining_s({"decode": 20.0, "store": 1.0}, "effect", 0, 1, 4.0, lost=True) is None
