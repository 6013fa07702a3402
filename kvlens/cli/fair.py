"""What `kvlens whatif --fair` changes of a run, and what it prints of its segments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlens.runs.storing import Stored


def change_of(folder: Path, uid: str) -> dict[str, str]:
    """Return what `--fair` changes of a stored run."""
    from kvlens.lens.fair import fair_change
    from kvlens.store.reader import TraceReader

    with TraceReader.open(folder, uid) as reader:
        return fair_change(reader.meta)


def kept_lines(folder: Path, uid: str, repeat: Stored) -> list[str]:
    """Return the share that each segment kept before and after, of a repeat that was not cancelled."""
    from kvlens.lens.fair import fair_lines, fair_table
    from kvlens.store.reader import TraceReader

    if repeat.status != "completed":
        return []
    with TraceReader.open(folder, uid) as reader, TraceReader.open(folder, repeat.uid) as repeat_reader:
        return fair_lines(fair_table(reader, repeat_reader))
