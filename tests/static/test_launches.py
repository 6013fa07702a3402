"""Kernels are compiled and loaded when they are first launched, which no capture allows: after step 1 no step may
launch another binary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
KERNELS = {
    "full": {"split", "_merge"},
    "chess": {"bias_of_slots", "table_of_pages"},
    "freekv": {"plan_zone", "_move", "bias_of_slots"},
    "sentkv": {"plan_zone", "_gather_tokens"},
    "sekv": {"plan_zone", "_gather_tokens", "_list", "rebuild_tile", "_fill", "bias_of_slots"},
}
"""some of what each method's steps launch"""


@pytest.mark.slow
def test_no_step_after_step_1_launches_what_was_not_launched_before() -> None:
    path = os.pathsep.join(str(folder) for folder in (TESTS.parent, TESTS, TESTS / "static"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, str(TESTS / "staticlaunches.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = {case.partition("-")[0]: steps for case, steps in json.loads(done.stdout.splitlines()[-1]).items()}
    assert found.keys() == KERNELS.keys()
    for method, steps in found.items():
        assert KERNELS[method] <= {launch.partition(" ")[0] for launch in steps[1]}
        assert all(step == steps[1] for step in steps[2:])
