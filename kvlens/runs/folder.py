"""The folder that runs are stored in."""

from __future__ import annotations

import os
from pathlib import Path


def runs_folder(chosen: str | Path | None = None) -> Path:
    """Return `chosen`, else $KVLENS_RUNS, else ./runs."""
    return Path(chosen or os.environ.get("KVLENS_RUNS") or "runs")
