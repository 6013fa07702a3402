"""What a job's process prints, read as it grows: progress, lines of a race, reasons, and all other lines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlens.app.ui.common import sentences
from kvlens.app.ui.common.job import Job
from kvlens.app.ui.common.jobprocess import Process
from kvlens.files import make_folder
from kvlens.runs.races import LANE_CUT_SHORT, UNFINISHED

RACE_LINES = tuple(f'{{"phase": "{phase}"' for phase in ("frame", "maps", "lane", "race"))
"""how lines of a race begin: they are kept as they are, for the browser"""
STORED = '"stored": true'
LOST = '"agrees": false'
"""of a frame whose token is not full KV's"""
_POLL_S = 0.05
_CHUNK = 1 << 20


def follow(path: Path, process: Process) -> Iterator[str | None]:
    """Yield the lines of a log until its process has ended; None now and then while there is no new one. A log that is
    gone has no lines."""
    rest = b""
    with open(os.devnull if not path.is_file() else path, "rb") as file:
        while True:
            over = process.poll() is not None  # before the last look: what it printed is there by then
            chunk = file.read(_CHUNK)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line.decode("utf-8", "replace")
            if chunk:
                continue
            if over:
                break
            yield None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    if rest and _is_whole(rest):
        yield rest.decode("utf-8", "replace")


def _is_whole(line: bytes) -> bool:
    """Return False for a report that was cut short when its process was killed."""
    try:
        return not line.startswith(b"{") or bool(json.loads(line))
    except ValueError:
        return False


def read_line(job: Job, line: str) -> None:
    """A progress object moves the bar, a line of a race is kept unread; any other line goes to the log."""
    if line.startswith(RACE_LINES):
        job.lines.append(line)
        job.lost = job.lost or (line.startswith(RACE_LINES[0]) and LOST in line)
        if line.startswith(RACE_LINES[2]) and STORED in line:
            job.stored = str(json.loads(line)["uid"])
        return
    report: Any = None
    if line.startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):
            report = json.loads(line)
    if not isinstance(report, dict) or "phase" not in report:
        job.log.append(line)
        return
    if report["phase"] == "error":
        job.message = str(report.get("message", sentences.NO_REASON))
        job.would_do = {str(name): str(value) for name, value in (report.get("would_do") or {}).items()}
    elif report["phase"] == "note":
        job.note = str(report.get("message") or "") or None
    elif report["phase"] == "done":
        job.uid = str(report.get("uid") or "") or None
        job.race = str(report.get("race") or "") or None
        job.study = str(report.get("study") or "") or job.study
    elif report["phase"] == "study":
        job.study = str(report.get("study") or "") or None
    else:
        if job.phase != report["phase"]:
            job.phase_began = time.time()
        job.phase = str(report["phase"])
        job.done, job.total = int(report.get("done") or 0), int(report.get("total") or 0)
        rate = report.get("tokens_per_s")
        job.tokens_per_s = float(rate) if rate is not None else None


def close_lanes(job: Job) -> None:
    """End the lanes of a race whose process is gone, so that none reads as running."""
    if not job.lines:
        return
    race = json.loads(job.lines[0])
    states = {number: {**lane, "state": "waiting"} for number, lane in enumerate(race.get("lanes", ()))}
    for line in job.lines:
        if line.startswith(RACE_LINES[2]):
            lane = json.loads(line)
            states[lane["lane"]] = lane
    for number, lane in states.items():
        if lane["state"] in UNFINISHED:
            state = "cancelled" if job.state == "cancelled" else "failed"
            missing = {"uid": None, "message": None, "right": None, "lost": None, "text": "", **lane}
            ended = {**missing, "phase": "lane", "lane": number, "state": state}
            if state == "failed":
                ended["message"] = LANE_CUT_SHORT
            job.lines.append(json.dumps({"phase": "lane", **ended}))


def why(code: int) -> str:
    """Return one sentence on the end of a process that gave no reason."""
    if code == 128 + signal.SIGTERM:
        code = -signal.SIGTERM
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        hint = " (often: out of memory)" if name == "SIGKILL" else ""
        return f"The run's process was ended by {name}{hint}."
    if code == 0:
        return "The run's process ended and gave no reason."
    return f"The run's process ended with exit code {code} and gave no reason."


def can_write(folder: Path) -> bool:
    """Return True if files can be made in a folder, which is made where it is missing."""
    try:
        make_folder(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
