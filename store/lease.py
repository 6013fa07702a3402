"""The lease of a run: an advisory lock on ``runs/<uid>/lock`` that the kernel frees when its holder dies, however it
dies.

A process id would not do: ids are reused. The id written into the file is for display only. POSIX only, local file
systems only.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from kvlens.files import FILE_MODE
from kvlens.store.errors import RunBusy, TraceError
from kvlens.store.files import PLAIN

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
