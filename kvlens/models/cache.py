"""The user's folder of converted models: each made once, whole or not at all, by one process at a time.

It is below `kvlens.files.cache_dir`. A model is made in a folder beside its place, which is renamed when it is
complete. What a process left behind that died is removed by the next that makes the same model.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlens.files import cache_dir, make_folder, open_file, write_file
from kvlens.models.errors import UnsupportedModel

Told = Callable[[str, int, int], None]
"""what is being done ('convert'), done and total"""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def models_dir() -> Path:
    """Where the converted models lie."""
    return cache_dir() / "models"


def key_of(path: Path) -> str:
    """What a local file is known by: its name, and a hash of place, size and time of change; a changed file is another
    model."""
    real_path = path.resolve()
    stat = real_path.stat()
    digest = hashlib.sha256(f"{real_path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    return f"{path.stem[:60]}-{digest[:12]}"


def is_made(folder: Path) -> bool:
    """Whether a folder of the cache is a complete model: it gets its name only then."""
    return (folder / "config.json").is_file()


def make_once(key: str, make: Callable[[Path], None]) -> Path:
    """The folder of a model, made by `make(empty folder)` where it is not there.

    Two processes at once: the second waits and takes what the first made. Raises UnsupportedModel with one sentence
    where the cache cannot be written or has no room; nothing is left then.
    """
    place = models_dir() / key
    if is_made(place):
        return place
    with _writing(place.parent):
        make_folder(place.parent)
        with _locked(place.with_name(f".{key}.lock")):
            if is_made(place):
                return place
            for leftover in place.parent.glob(f".{key}.*.part"):
                shutil.rmtree(leftover, ignore_errors=True)
            part = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".part", dir=place.parent))
            try:
                make(part)
                os.rename(part, place)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return place


def write_json(path: Path, content: object) -> None:
    """A small file, whole or not at all."""
    with _writing(path.parent):
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            write_file(temporary, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive among processes; the lock ends with the process that holds it, however it ends."""
    with open(open_file(path), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise UnsupportedModel(
                f"there is no room for the converted model in '{folder}': free some, or name another folder by "
                "$KVLENS_CACHE.",
                code="no_room",
                folder=str(folder),
            ) from error
        raise UnsupportedModel(
            f"the cache of models '{folder}' cannot be written ({error.strerror or error}): name another folder by "
            "$KVLENS_CACHE."
        ) from error
