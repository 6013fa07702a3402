"""How long a prompt that was read ahead took, in a file beside its reading: the first run that finds the reading counts
the time as its own, and takes the file away."""

from __future__ import annotations

import contextlib
from pathlib import Path

from kvlens.files import write_file


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
