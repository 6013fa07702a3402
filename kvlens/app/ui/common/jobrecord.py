"""Files of jobs, beside the runs: what a server that was started again knows of the jobs of one that was killed.

`jobs/<id>.json` names the job and its process, `jobs/<id>.log` holds what the process printed. Both go when the job
ends while its server lives, or when the next server has read how it ended."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from kvlens.app.ui.common.jobprocess import beginning, is_alive
from kvlens.files import make_folder, open_file, read_plain, write_file

FOLDER = "jobs"
"""of the runs' folder; too short a name to be a run's"""
_ID = re.compile(r"[0-9a-f]{8}")
_MOST_BYTES = 1 << 20


class ProcessName(BaseModel):
    """A process, and the moment it began."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int
    start_stamp: str

    def is_alive(self) -> bool:
        """Return True if it runs."""
        return is_alive(self.pid, self.start_stamp)


JOB_FIELDS = ("id", "argv", "title", "created", "started", "about", "then", "process")
"""of a job, that its file holds as they are"""


class JobRecord(BaseModel):
    """One job as its file holds it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    title: str
    argv: list[str]
    created: float
    started: float | None = None
    about: str | None = None
    then: str | None = None
    cancelled: bool = False
    process: ProcessName | None = None
    """None: it had not begun"""
    server: ProcessName | None = None
    """the one whose queue it is in"""

    def is_running(self) -> bool:
        """Return True if the job's process runs."""
        return self.process is not None and self.process.is_alive()


def name_process(pid: int) -> ProcessName | None:
    """Return the process of this id as it runs now; None where none does."""
    start_stamp = beginning(pid)
    return None if start_stamp is None else ProcessName(pid=pid, start_stamp=start_stamp)


def write_record(folder: Path, record: JobRecord) -> None:
    """Replace the file of a job. A folder that cannot be written loses the record, not the job."""
    temporary = folder / f".{record.id}.{os.getpid()}"
    with contextlib.suppress(OSError):
        make_folder(folder)
        write_file(temporary, record.model_dump_json().encode("utf-8", "replace"))
        os.replace(temporary, folder / f"{record.id}.json")


@contextlib.contextmanager
def log_opened(folder: Path, job_id: str) -> Iterator[int]:
    """Open the file that a job's process prints to while the block runs: a descriptor. Raises OSError."""
    make_folder(folder)
    descriptor = open_file(log_file(folder, job_id), os.O_APPEND | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def log_file(folder: Path, job_id: str) -> Path:
    """Return the place of a job's log."""
    return folder / f"{job_id}.log"


def forget_record(folder: Path, job_id: str) -> None:
    """Remove a job's files."""
    for path in (folder / f"{job_id}.json", log_file(folder, job_id)):
        with contextlib.suppress(OSError):
            path.unlink()


def left_records(folder: Path) -> Iterator[JobRecord]:
    """Yield the jobs of servers that run no more, oldest first. A file that is no record is left alone."""
    records = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            record = JobRecord.model_validate_json(read_plain(path, _MOST_BYTES))
        except (OSError, ValidationError):
            continue
        if record.id == path.stem and _ID.fullmatch(record.id) and not (record.server and record.server.is_alive()):
            records.append(record)
    yield from sorted(records, key=lambda record: record.created)
