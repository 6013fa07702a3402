"""Processes of jobs: started by this server, or left by one that was killed. Each is known by its id and the moment it
began, so that another process that got the same id is neither taken for it nor killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kvlens.app.ui.common.warm import COMMAND, warm

Environment = Mapping[str, str]
"""variables that a job's process has beside the server's own"""
#: Seconds a cancelled process gets to store what it has before it is killed.
GRACE_S = 15.0
_LOOK_S = 0.1


class Process(Protocol):
    """What the queue asks of a job's process."""

    @property
    def pid(self) -> int | None:
        """The leader of the process group; None while it is being forked."""

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and those it started."""


class Cold(subprocess.Popen[bytes]):
    """A process that was started from nothing, in a group of its own."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        if self.poll() is None:
            signal_group(self.pid, number)


class Left:
    """A process that a server left behind. It is no child, so its exit status is not known: 0 stands for it."""

    def __init__(self, pid: int, start_stamp: str) -> None:
        self.pid: int | None = pid
        self._start_stamp = start_stamp

    def poll(self) -> int | None:
        """Return 0 when it is gone."""
        return None if is_alive(self.pid, self._start_stamp) else 0

    def wait(self, timeout: float | None = None) -> int:
        """Return 0 when it is gone. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_LOOK_S)
        return 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its group, unless its id is another process's now."""
        if self.pid is not None and self.poll() is None:
            signal_group(self.pid, number)


def start_process(argv: list[str], environment: Environment, output: int) -> Process:
    """Return the job's process, a group of its own, so that cancelling reaches its workers. `output`: descriptor of the
    file that stdout and stderr are written to. The process that forks jobs begins with the first job or the first
    change of the New run form."""
    if argv[: len(COMMAND)] == COMMAND:
        warm.prepare()
    return warm.start(argv, environment, output) or start_cold(argv, environment, output)


def start_cold(argv: list[str], environment: Environment, output: int) -> Cold:
    """Return the same, started from nothing. Raises OSError."""
    return Cold(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
    )


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to the group of a process; silent where it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def stop(process: Process) -> None:
    """Ask a process to end, and kill it after GRACE_S seconds."""
    process.signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.signal(signal.SIGKILL)


def beginning(pid: int) -> str | None:
    """Return what tells this process from an earlier or later one of the same id: the boot and the moment of its start.
    None where it does not run, or has ended and waits for its parent."""
    if sys.platform != "linux":
        listing = ["ps", "-o", "lstart=", "-p", str(pid)]
        return subprocess.run(listing, capture_output=True, text=True, check=False).stdout.strip() or None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot} {fields[19]}"


def is_alive(pid: int | None, start_stamp: str | None) -> bool:
    """Return True if the process that began at this stamp still runs."""
    return pid is not None and start_stamp is not None and beginning(pid) == start_stamp
