"""A model that a process keeps in memory: whoever loads the same files again is given it, as are processes forked from
it. One at a time, on the CPU, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import ready

Files = tuple[tuple[str, int, int], ...]
"""(path, bytes, time of change) of a model's files"""
_kept: dict[str, tuple[Files, Any]] = {}


def files_of(name: str) -> Files:
    """The files that are loaded; () where they do not lie ready in a folder of this machine."""
    try:
        folder = ready(name)
    except UnsupportedModel:
        return ()
    if folder is None:
        return ()
    paths = sorted(path for kind in ("*.safetensors", "*.json") for path in Path(folder).glob(kind))
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


def find_model(name: str) -> Any:
    """The LoadedModel of this name, if it is kept and its files are what they were; else None."""
    if name not in _kept:
        return None
    files, loaded = _kept[name]
    return loaded if files == files_of(name) else None


def keep_model(name: str, loaded: Any) -> None:
    """Keeps a model in place of the one before."""
    _kept.clear()
    _kept[name] = files_of(name), loaded
