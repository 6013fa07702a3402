"""One layer of a step and a whole run pass few files: the counts that docs/architecture.md gives do not grow unseen."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from kvlens.lab.studies.passage import measure
layer, whole = measure(sys.argv[1])
print(json.dumps([sorted(layer.files), sorted(whole.files), layer.hops]))
"""
STEP = {"kvlens/engine/session.py", "kvlens/memory/reads.py", "kernels/attend.py"}


@pytest.mark.parametrize(
    ("method", "files", "hops", "run_files"), [("snapkv", 7, 13, 82), ("sekv", 30, 69, 105)], ids=["snapkv", "sekv"]
)
def test_a_layer_and_a_run_pass_few_files(method: str, files: int, hops: int, run_files: int) -> None:
    """In a process of its own: every call of the process is looked at."""
    command = [sys.executable, "-c", SCRIPT, method]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    layer, whole, counted = json.loads(ran.stdout.splitlines()[-1])
    assert set(layer) >= STEP
    assert set(whole) >= set(layer)
    assert len(layer) <= files
    assert 0 < counted <= hops
    assert len(whole) <= run_files
