"""The folder that runs are stored in."""

from __future__ import annotations

import os
from pathlib import Path

from kvlens.refusal import Refusal


class FolderMissing(Refusal):
    """A folder of runs that was named does not exist."""

    code = "folder_missing"


def runs_folder(chosen: str | Path | None = None) -> Path:
    """Return `chosen`, else $KVLENS_RUNS, else ./runs."""
    return Path(chosen or os.environ.get("KVLENS_RUNS") or "runs")


def listed_folder(named_folder: str | Path | None = None) -> Path:
    """Return `runs_folder`, to list its runs; the folder that is used where none is named may not exist yet. Raises
    FolderMissing for a named folder that does not exist."""
    folder = runs_folder(named_folder)
    if named_folder and not folder.is_dir():
        sentence = f"there is no folder {folder}; give --runs the folder that the runs were written to."
        raise FolderMissing(sentence, folder=str(folder))
    return folder
