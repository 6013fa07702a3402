"""Files of what is made before a run is asked for (kvlens.runs.readahead), beside the readings: how long a reading
took, which the first run that finds it counts as its own, and runs of full KV, which move to the runs that ask for
them."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from kvlens.files import write_file
from kvlens.runs.preparing import READINGS

REFERENCES = "references"
"""folder beside the readings"""


def note_time(reading: Path, ns: int) -> None:
    """Write down nanoseconds beside a reading; 0: the run that made it has counted them. A full disk costs a run the
    time of its reading, nothing else."""
    with contextlib.suppress(OSError):
        if ns:
            write_file(_beside(reading), str(ns).encode())
        else:
            _beside(reading).unlink(missing_ok=True)


def take_time(reading: Path) -> int:
    """Return the nanoseconds that nobody has counted yet, and take them away; 0: none."""
    path = _beside(reading)
    try:
        ns = int(path.read_bytes())
        path.unlink()
    except (OSError, ValueError):
        return 0
    return max(0, ns)


def _beside(reading: Path) -> Path:
    return reading.with_suffix(".ahead")


def references() -> Path | None:
    """Return the folder of references that were made ahead; None where nothing is read ahead."""
    named = os.environ.get(READINGS)
    return None if not named else Path(named) / REFERENCES


def move_reference(uid: str, folder: Path, runs_dir: Path) -> bool:
    """Move a stored run between folders, into place as a whole; return False where that fails, and nothing is left
    behind then."""
    passing = runs_dir / f".{uid}.{os.getpid()}"
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / uid, passing)
        os.replace(passing, runs_dir / uid)
    except OSError:
        with contextlib.suppress(OSError):
            shutil.rmtree(passing)
        return False
    return True
