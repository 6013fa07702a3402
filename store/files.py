"""Files of a run's folder as they were made, and the lease of its writer: ordinary files, in the folder itself, of a
bounded size.

A folder that came from elsewhere may hold anything under the names a run uses: a link to a file outside, which would be
shown or overwritten, or a pipe, which never ends. Nothing of a run is opened but through here, DuckDB's files aside,
which `ordinary` is asked about first.

A run has one writer: it holds the lease, an advisory lock on ``runs/<uid>/lock`` that the kernel frees when its holder
dies, however it dies. A process id would not do: ids are reused. The id written into the file is for display only.
POSIX only, local file systems only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from types import TracebackType

from kvlens.files import FILE_MODE, open_file
from kvlens.store.errors import RunBusy, TraceError

#: A pipe is not waited for, a link is not followed, a child process does not inherit the file.
PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_BYTES = 16 << 20


def ordinary(path: Path) -> bool:
    """Whether an ordinary file is there: not a link, a pipe, a socket, a device or a folder."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_plain(path: Path, most: int = _MOST_BYTES) -> bytes:
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
    fd = open_file(path, PLAIN)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(fd)


#: A probe by a reader holds a shared lock for an instant; a writer that meets one tries again for so long.
_RETRY_S = 0.25


class Lease:
    """The right to write one run. Holds until ``release`` or the end of the process."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "lock"
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | PLAIN, FILE_MODE)
        except OSError as error:
            raise TraceError(
                f"The lock of run {run_dir.name} cannot be opened ({error.strerror}); check the runs folder."
            ) from error
        deadline = time.monotonic() + _RETRY_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(self._fd)
                raise RunBusy(
                    f"Run {run_dir.name} is in use by another process (pid {holder}); wait until it ends or "
                    f"choose another run."
                ) from error
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:  # a full disk: the lock itself holds, only the display is lost
            pass

    def release(self) -> None:
        """Gives the run back; harmless when done twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_held(run_dir: Path) -> bool:
    """Whether some process, this one included, is writing the run now."""
    try:
        fd = os.open(run_dir / "lock", os.O_RDONLY | PLAIN)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)
