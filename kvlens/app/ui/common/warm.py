"""Processes that need no start of their own: forked from one that has imported torch and transformers already.

That one (kvlens.cli.warm) begins with the first job or the first change of the New run form. It ends with the server,
after KVLENS_WARM_IDLE seconds without a job (ten minutes unless set), or when a person releases it. Where it cannot be
(not Linux, a CUDA device, which a fork may not share, KVLENS_WARM=off), is occupied, or was begun before the sources
were changed, a job starts from nothing as `subprocess` has it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvlens import PACKAGE

PARENT = "kvlens.cli.warm"
COMMAND = [sys.executable, "-m", "kvlens"]
"""what argv begins with where it can be served"""
IMPORTED = ("KVLENS_MODEL", "HF_", "OMP_", "GOMP_", "MKL_", "PYTHON", "TORCH", "TRITON", "CUDA")
"""beginnings of the environment variables that are read when modules are imported"""
SOURCES = PACKAGE


class Forked:
    """One job's process, as far as subprocess.Popen is asked for: pid, poll, wait; and `signal`, to its whole group.
    `stdout` is what it prints, where it does not print to a file of the caller's."""

    def __init__(self, channel: socket.socket, output: int, ended: Callable[[], None]) -> None:
        self.stdout = open(output, encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115
        self._lock, self._ended, self._then = threading.Lock(), threading.Event(), ended
        self._pid: int | None = None
        self._code: int | None = None
        self._signals: list[signal.Signals] = []
        threading.Thread(target=self._watch, args=(channel,), name="kvlens-forked", daemon=True).start()

    @property
    def begun(self) -> bool:
        """The process was there. False after the end: the one that forks was lost before."""
        return self._pid is not None

    @property
    def pid(self) -> int | None:
        """The process; None until it is forked."""
        return self._pid

    def poll(self) -> int | None:
        """Exit status as `wait` has it; None while the process runs, or has not begun."""
        return self.wait(0) if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Exit status as subprocess has it; that of a killed process where nobody told it. Raises TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
        return -int(signal.SIGKILL) if self._code is None else self._code

    def signal(self, number: signal.Signals) -> None:
        """Sent to the process and those it started; as soon as it is there."""
        with self._lock:
            if self._pid is None:
                self._signals.append(number)
            elif not self._ended.is_set():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, number)

    def _watch(self, channel: socket.socket) -> None:
        try:
            pid = int(channel.recv(64) or "")
            with self._lock:
                self._pid = pid
            for number in self._signals:
                self.signal(number)
            self._code = int(channel.recv(64) or "")
        except (OSError, ValueError):  # the one that forks is gone
            channel.close()
        finally:
            self._then()
            self._ended.set()


@dataclass(frozen=True)
class WarmStatus:
    """The process that forks, as a page shows it."""

    busy: bool
    resident_bytes: int | None
    """None: not known"""


def resident_bytes(pid: int) -> int | None:
    """Return the bytes of memory that a process has resident; None where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


class Warm:
    """The process that forks, and what it was begun with. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parent: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._state: object = None
        self._busy = False

    def prepare(self) -> None:
        """Begins it, unless it is there."""
        with self._lock:
            if able() and not self._usable() and not self._busy:
                self._end()
                self._begin()

    def start(
        self, argv: list[str], environment: Mapping[str, str] = MappingProxyType({}), output: int | None = None
    ) -> Forked | None:
        """The job's process, with these variables beside the server's; None where it has to be started from nothing.
        output: the descriptor that it prints to; None: a pipe, see Forked."""
        if argv[: len(COMMAND)] != COMMAND:
            return None
        with self._lock:
            if not able() or self._busy or self._channel is None or not self._usable():
                return None
            reading, writing = os.pipe()
            order = {
                "argv": argv[len(COMMAND) - 1 :],
                "environment": {**os.environ, **environment},
                "directory": os.getcwd(),
            }
            try:
                socket.send_fds(self._channel, [json.dumps(order).encode()], [writing if output is None else output])
            except OSError:
                os.close(reading)
                self._end()
                return None
            finally:
                os.close(writing)
            self._busy = True
            return Forked(self._channel, reading, self._free)

    def release(self) -> None:
        """End it and give back its memory, unless a job runs in it."""
        with self._lock:
            if not self._busy:
                self._end()

    def status(self) -> WarmStatus | None:
        """Return whether it is at work and what it holds; None where there is none."""
        parent = self._parent
        if parent is None or parent.poll() is not None:
            return None
        return WarmStatus(self._busy, resident_bytes(parent.pid))

    def _free(self) -> None:
        self._busy = False

    def _usable(self) -> bool:
        alive = self._parent is not None and self._parent.poll() is None
        return alive and self._channel is not None and self._channel.fileno() >= 0 and self._state == state()

    def _begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = {**os.environ}
            environment.setdefault("HF_HUB_OFFLINE", "1")  # as every run sets it before it imports
            self._parent = subprocess.Popen(
                [sys.executable, "-m", PARENT, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
            )
        self._channel, self._state = ours, state()

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._parent is not None:
            self._parent.terminate()
            self._parent.wait()
        self._parent = self._channel = None


def able() -> bool:
    """Whether processes can be forked here from one that has imported everything."""
    off = os.environ.get("KVLENS_WARM") == "off"
    return sys.platform == "linux" and not off and not os.path.exists("/dev/nvidiactl")


def state() -> object:
    """What imported modules depend on: the newest source file, and part of the environment."""
    folders = os.walk(SOURCES, followlinks=True)  # kernels and store are links in a checkout
    sources = (Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py"))
    newest = max((path.stat().st_mtime_ns for path in sources), default=0)
    return newest, sorted((name, value) for name, value in os.environ.items() if name.startswith(IMPORTED))


warm = Warm()
"""the one of this server process"""
