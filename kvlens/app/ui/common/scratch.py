"""Prompts on their way to a run's process: files in a folder of the server's own, gone with their run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvlens.files import write_file

_PREFIX = "kvlens-jobs-"


class Scratch:
    """A temporary folder, readable by its owner alone. The server holds its lock while it lives, so that the next one
    knows what a server that was killed left behind, and removes it."""

    def __init__(self, spared_arguments: Iterable[str] = ()) -> None:
        """spared_arguments: those of jobs that another server left and that still run; the folders of their files
        stay."""
        _clear(Path(tempfile.gettempdir()), {Path(argument).parent for argument in spared_arguments})
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        self._lock = _locked(Path(self._folder.name), os.O_CREAT)

    def file(self, name: str, text: str) -> Path:
        """A file with this text."""
        path = Path(self._folder.name) / f"{secrets.token_hex(4)}-{name}"
        write_file(path, text.encode())
        return path

    def path(self, name: str) -> Path:
        """Where a job may keep something of this name while the server lives."""
        return Path(self._folder.name) / name

    def text_of(self, argument: str) -> str | None:
        """Return the content of an argument that is a file made here; None for any other."""
        path = Path(argument)
        if path.parent != Path(self._folder.name):
            return None
        try:
            return path.read_text(encoding="utf-8")
        except OSError:
            return None

    def forget(self, arguments: Iterable[str]) -> None:
        """Removes those of `arguments` that are files made here: their run has ended."""
        for argument in arguments:
            path = Path(argument)
            if path.parent == Path(self._folder.name):
                with contextlib.suppress(OSError):
                    path.unlink()


def _locked(folder: Path, more: int = 0) -> int | None:
    """A descriptor that holds the folder's lock; None when another process does, or there is no lock."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | more, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _clear(above: Path, spared_folders: set[Path]) -> None:
    """Removes the folders of this user's servers that live no more, but for `spared_folders`."""
    for folder in above.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            if about.st_uid != os.getuid() or folder.is_symlink() or folder in spared_folders:
                continue
            fd = _locked(folder)
            if fd is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(fd)
