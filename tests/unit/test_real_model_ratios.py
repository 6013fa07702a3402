"""Ratios of `python -m benchmarks.real_model`: inside a round, against the right arm."""

from __future__ import annotations

import pytest

from benchmarks.real_model import ratios


def test_a_ratio_is_taken_inside_its_round() -> None:
    seconds = {
        "transformers": [(2.0, 0.10), (4.0, 0.20), (8.0, 0.10)],
        "full": [(1.0, 0.11), (4.0, 0.20), (2.0, 0.15)],
        "snapkv": [(0.5, 0.22), (1.0, 0.10), (1.0, 0.15)],
        "sekv": [],
    }
    found = {(line["arm"], line["part"]): line for line in ratios(seconds)}
    assert set(found) == {(arm, part) for arm in ("full", "snapkv") for part in ("prefill", "step")}, "what did not run"
    full, placing, step = found["full", "prefill"], found["snapkv", "prefill"], found["snapkv", "step"]
    assert (full["against"], full["ratio"], full["low"], full["high"]) == ("transformers", 0.5, 0.25, 1.0)
    assert found["full", "step"]["ratio"] == pytest.approx(1.1)
    assert (placing["against"], placing["ratio"]) == ("full", 0.5)
    assert (step["low"], step["ratio"], step["high"], step["ms"]) == (0.5, 1.0, 2.0, pytest.approx(150.0))
