"""What tells the runs of a race apart that have one method."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from kvlens.runs import races
from kvlens.store.errors import TraceError


def lane_differences(runs_dir: Path) -> dict[str, str]:
    """Return uid -> the parameters that tell the run from other lanes of its method in its race, 'sinks 4'. Other runs
    are left out, and so are races that cannot be read."""
    folder = runs_dir / races.FOLDER
    return _differences(runs_dir, folder.stat().st_mtime_ns) if folder.is_dir() else {}


@lru_cache(maxsize=4)
def _differences(runs_dir: Path, changed_ns: int) -> dict[str, str]:
    """Return what `lane_differences` does. changed_ns: when the folder of races was changed last."""
    differences: dict[str, str] = {}
    for race_id in races.ids(runs_dir):
        try:
            lanes = races.read(runs_dir, race_id).lanes
        except TraceError:
            continue
        differences |= {lane.uid: lane.differs for lane in lanes if lane.uid is not None and lane.differs}
    return differences
