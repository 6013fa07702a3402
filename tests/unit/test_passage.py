"""One layer of a step passes few files: the count that docs/architecture.md describes does not grow unseen."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json
from kvlens.lab.studies.passage import measure
layer, whole = measure("snapkv")
print(json.dumps([sorted(layer.files), sorted(whole.files), layer.hops]))
"""


def test_a_layer_of_snapkv_passes_few_files() -> None:
    """In a process of its own: every call of the process is looked at."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=250, check=True)
    layer, whole, hops = json.loads(ran.stdout.splitlines()[-1])
    assert {"kvlens/engine/session.py", "kvlens/memory/reads.py", "kernels/attend.py"} <= set(layer) <= set(whole)
    assert len(layer) <= 9
    assert 0 < hops <= 21
