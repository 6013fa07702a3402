"""``runs/<uid>/run.json``, what a run is and how far it got, replaced atomically so that readers never see half of it;
and the lease of the writer of the run.

A run has one writer: it holds the lease, an advisory lock on ``runs/<uid>/lock`` that the kernel frees when its holder
dies, however it dies. A process id would not do: ids are reused. The id written into the file is for display only.
POSIX only, local file systems only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from kvlens.files import FILE_MODE, KEPT_MODE, PLAIN, ordinary, read_plain, replace_plain, write_file
from kvlens.store.errors import RunBusy, RunNotFound, TraceError, UnreadableRun, first_line
from kvlens.text.plaintext import clean_text, plain

_UID = re.compile(r"[0-9a-z][0-9a-z-]{5,63}")
#: A probe by a reader holds a shared lock for an instant; a writer that meets one tries again for so long.
_RETRY_S = 0.25

#: The summary fields of run.json and what each holds, in the order of ``list_runs``.
SUMMARY: dict[str, type] = {
    "uid": str,
    "status": str,
    "created": str,
    "model": str,
    "method": str,
    "preset": str,
    "stand_in": str,
    "budget": str,
    "dtype": str,
    "task": str,
    "prompt_tokens": float,
    "steps": float,
    "max_new": float,
    "duration_s": float,
    "peak_bytes": float,
    "full_kv_bytes": float,
    "budget_bytes": float,
    "h2d_bytes": float,
    "d2h_bytes": float,
    "disk_bytes": float,
    "batched": float,
    "output_text": str,
    "error": str,
    "reference": str,
    "parent": str,
    "forced": bool,
    "reference_key": str,
    "hold": bool,
    "drop": bool,
    "changed": bool,
}

#: Microseconds since 1970, UTC, at which run.json was first written: the order of runs with an equal `created`. Runs of
#: earlier versions have none.
CREATED_US = "created_us"

#: Fields that the run's course decides; the others are copied from its meta when it begins.
_MEASURED = ("steps", "duration_s", "peak_bytes", "h2d_bytes", "d2h_bytes", "disk_bytes")
_OF_COURSE = {*_MEASURED, "batched", "uid", "status", "created", "output_text", "error", "hold", "drop", "changed"}
_FROM_META = tuple(name for name in SUMMARY if name not in _OF_COURSE)


def new_uid() -> str:
    """A run id that sorts by time (UTC) and does not collide."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def is_uid(uid: str) -> bool:
    """Return True for a well-formed id, which no path separator or dot can be part of."""
    return isinstance(uid, str) and _UID.fullmatch(uid) is not None


def check_uid(uid: str) -> str:
    """Return `uid` if it is a well-formed run id. Raises RunNotFound `no_run_id`."""
    if not is_uid(uid):
        raise RunNotFound(
            f"{str(uid)[:80]!r} is not a run id; ids look like 20261121-013501-4f9a2c and are listed by `kvlens runs`.",
            code="no_run_id",
        )
    return uid


def run_dir(runs_dir: Path, uid: str) -> Path:
    """The folder of an existing run."""
    path = Path(runs_dir) / check_uid(uid)
    if not path.is_dir():
        raise RunNotFound(f"There is no run {uid} in {runs_dir}; list the runs with `kvlens runs`.")
    return path


def now() -> str:
    """Return this moment, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def first_info(meta: dict[str, Any]) -> dict[str, Any]:
    """run.json of a run that begins, from its meta."""
    return {
        "schema_version": meta["schema_version"],
        "uid": meta["run_uid"],
        "status": "created",
        "created": meta["created"],
        CREATED_US: time.time_ns() // 1_000,
        **{name: meta.get(name) for name in _FROM_META},
        "hold": bool(meta.get("hold") or meta.get("drop")),  # lists tell such runs from a method's own
        **{name: True for name in ("drop", "changed") if meta.get(name)},
        "trace_level": meta["trace_level"],
        "pid": os.getpid(),
        "error": None,
    }


def save_prompt(folder: Path, meta: dict[str, Any]) -> None:
    """Moves `prompt_text` out of the meta into prompt.txt, and leaves its hash."""
    prompt = meta.pop("prompt_text", None)
    if prompt is not None:
        text = clean_text(str(prompt))
        write_file(folder / "prompt.txt", text.encode())
        meta.setdefault("prompt_sha256", hashlib.sha256(text.encode()).hexdigest())


def write_info(folder: Path, info: dict[str, Any], durable: bool = False) -> None:
    """Replaces run.json; with `durable`, not before its bytes are on disk."""
    target, temporary = folder / "run.json", folder / f".run.json.{os.getpid()}"
    replace_plain(target, temporary, json.dumps(plain(info), ensure_ascii=False, indent=1).encode(), durable)


def read_info(folder: Path) -> dict[str, Any]:
    """run.json of a run, or UnreadableRun with the reason."""
    uid = folder.name
    try:
        info = json.loads(read_plain(folder / "run.json").decode("utf-8"))
    except FileNotFoundError as error:
        raise UnreadableRun(f"Run {uid} has no run.json; restore the file from a copy.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableRun(
            f"run.json of run {uid} cannot be read ({first_line(error)}); restore it from a copy."
        ) from error
    if not isinstance(info, dict) or not isinstance(info.get("status"), str):
        raise UnreadableRun(f"run.json of run {uid} does not describe a run; restore it from a copy.")
    return info


def freeze(folder: Path) -> None:
    """Takes the write permission from a finished run's data."""
    for name in ("trace.duckdb", "prompt.txt"):
        if ordinary(folder / name):
            with contextlib.suppress(OSError):
                os.chmod(folder / name, KEPT_MODE)


def config_hash(config: Any) -> str:
    """Identifies a method's configuration across runs."""
    return hashlib.sha256(json.dumps(plain(config), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
