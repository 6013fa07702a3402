"""The soak of docs/reliability.md in short: kills, damage and hostile files, none of which may lose, hang or crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = "from benchmarks.soak import bad, soak; found = soak(0.4, short=True); print(found); assert not bad(found)"


def test_nothing_is_lost_hangs_or_crashes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for part in ("kills: writer", "kills: recover", "kills: delete", "damage: log flip", "prompt files"):
        assert part in done.stdout
