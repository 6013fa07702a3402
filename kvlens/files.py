"""Files of this machine, written for their owner and read within bounds.

What kvlens writes only its owner may read, whatever the umask: runs, races, jobs, caches, prompts. Files that come from
elsewhere are ordinary files of a size that is looked at first, and JSON that is not nested without end. A pipe or a
device, which would block the reader or never end, is refused.

A run's folder may come from elsewhere and hold anything under the names that a run uses, also a link to a file outside,
which would be shown or overwritten. What is in such a folder is read and written as plain files: ordinary files in the
folder itself. DuckDB opens its own files, after `ordinary` was asked about them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER_MODE = 0o700
FILE_MODE = 0o600
KEPT_MODE = 0o400
"""of files that never change again"""
PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""flags of plain files: a pipe is not waited for, a link is not followed, a child process does not inherit the file"""
MOST_PLAIN = 16 << 20
"""bytes of a plain file"""


def cache_dir() -> Path:
    """Return the user's folder of what kvlens makes once, $KVLENS_CACHE, else $XDG_CACHE_HOME/kvlens, else
    ~/.cache/kvlens. It need not exist."""
    named = os.environ.get("KVLENS_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvlens"


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


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an OSError that names no file, as of a full disk, gets the name of this one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_file(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 whole. Raises OSError."""
    with naming(path), open(open_file(path), "wb") as file:
        file.write(data)


def keep_newest(folder: Path, most_bytes: int, suffix: str) -> None:
    """Remove the oldest files of a folder until the rest has at most `most_bytes`. Files without `suffix` are parts:
    killed writers leave some, and the newest one, which may be in work, stays. Raises OSError."""
    files = sorted(folder.glob("*"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    newest_part = next((file for file in files if file.suffix != suffix), None)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > most_bytes and file != newest_part:
            file.unlink(missing_ok=True)


MOST_JSON = 256 << 20
"""bytes of a JSON file; the largest tokenizers have some 40 MB"""
DENSE_FROM, DENSE_SHARE = 1 << 30, 8
"""a file of more bytes than the first is on the disk with more than one part in the second, unless it has holes"""


class RefusedFile(ValueError):
    """A file that is not read. `code`: not_ordinary | too_large | full_of_holes | not_json | nested_too_deep."""

    def __init__(self, code: str, path: Path, problem: str) -> None:
        super().__init__(f"{code}: '{path}' {problem}.")
        self.code, self.path = code, path


def check_ordinary(path: Path, most: int | None = None) -> None:
    """Raise RefusedFile for a pipe, a socket or a device, for more than `most` bytes, and for a large file that is
    mostly holes. Links are followed. Raises OSError if there is no such file."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise RefusedFile("not_ordinary", path, "is no ordinary file: give a file, not a pipe, a device or a folder")
    if most is not None and about.st_size > most:
        raise RefusedFile(
            "too_large", path, f"has {about.st_size:,} bytes, at most {most:,} are read: give a part of it"
        )
    if about.st_size > DENSE_FROM and about.st_blocks * 512 * DENSE_SHARE < about.st_size:
        raise RefusedFile(
            "full_of_holes", path, f"claims {about.st_size:,} bytes and holds {about.st_blocks * 512:,}: fetch it again"
        )


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of an ordinary file of at most `most` bytes. Raises RefusedFile, and OSError."""
    check_ordinary(path, most)
    with open(path, "rb") as file:
        return file.read(most)


def load_json(path: Path, most: int = MOST_JSON) -> Any:
    """Return the value of a JSON file. Raises RefusedFile, and OSError."""
    try:
        return json.loads(read_bounded(path, most).decode("utf-8-sig"))
    except RecursionError:
        raise RefusedFile("nested_too_deep", path, "is nested too deep to be read: write it flat") from None
    except RefusedFile:
        raise
    except ValueError as error:
        raise RefusedFile("not_json", path, f"is not valid JSON ({str(error)[:120]}): mend or replace it") from None


def ordinary(path: Path) -> bool:
    """Whether an ordinary file is there: not a link, a pipe, a socket, a device or a folder."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_plain(path: Path, most: int = MOST_PLAIN) -> bytes:
    """The content of an ordinary file. Raises FileNotFoundError, and OSError with the reason for a link, a pipe and a
    file of more than `most` bytes."""
    try:
        fd = os.open(path, os.O_RDONLY | PLAIN)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError("it is a link, which is not followed") from error
        raise
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise OSError("it is not an ordinary file")
        if about.st_size > most:
            raise OSError(f"it has {about.st_size:,} bytes, kvlens writes {most:,} at most")
        return file.read(most + 1)[:most]


def discard(path: Path) -> None:
    """Delete a file that may not be there. A file system that cannot be written refuses it even then: that is no news
    beside the error that led here."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Return when the folder's entries are on the disk: a file made or renamed in it outlives a loss of power. File
    systems that cannot do it are left alone."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def replace_plain(target: Path, temporary: Path, data: bytes, durable: bool) -> None:
    """Replace a file whole: readers see the old content or the new, and after a loss of power too. With `durable`, the
    new one is on the disk when this returns. Raises OSError; `temporary` is gone then."""
    try:
        write_plain(temporary, data, durable)
        os.replace(temporary, target)
    except BaseException:
        discard(temporary)
        raise
    if durable:
        sync_folder(target.parent)


def write_plain(path: Path, data: bytes, durable: bool) -> None:
    """Writes a file of its owner alone whole, not through a link. With `durable`, returns when the bytes are on the
    disk."""
    with naming(path), open(open_file(path, PLAIN), "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())
