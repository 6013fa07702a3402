"""Files and folders that only their owner may read, whatever the umask: runs, races, jobs, caches, prompts."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600
KEPT_MODE = 0o400
"""of files that never change again"""


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, with mode 0700. A folder that is there keeps its mode. Raises
    OSError."""
    missing = []
    place = path
    while not place.exists() and place != place.parent:
        missing.append(place)
        place = place.parent
    for folder in reversed(missing):
        try:
            os.mkdir(folder, FOLDER_MODE)
            os.chmod(folder, FOLDER_MODE)
        except FileExistsError:  # another process made it meanwhile
            continue
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def open_file(path: Path, flags: int = 0) -> int:
    """Return a descriptor for writing a file of mode 0600 from its beginning, made where it is missing. `flags`: more
    flags of os.open. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | flags, FILE_MODE)
    with contextlib.suppress(OSError):  # another user's file, or a file system without modes
        os.fchmod(descriptor, FILE_MODE)
    return descriptor


def close_file(path: Path) -> None:
    """Take every right on a file from others than its owner, who keeps theirs. Does nothing where that fails."""
    with contextlib.suppress(OSError):
        os.chmod(path, path.stat().st_mode & FOLDER_MODE)


def write_file(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 whole. Raises OSError."""
    with open(open_file(path), "wb") as file:
        file.write(data)
