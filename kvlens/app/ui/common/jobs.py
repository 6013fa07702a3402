"""Runs in subprocesses: one at a time, queued, with progress. Plain Python; the pages only look at it.

The manager belongs to the server process, not to a browser session, so a job goes on when its tab is closed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from kvlens.app.ui.common.scratch import Scratch
from kvlens.app.ui.common.warm import Forked, warm
from kvlens.runs.readings import FOLDER

LOG_LINES = 60
RACE_LINES = tuple(f'{{"phase": "{phase}"' for phase in ("frame", "maps", "lane", "race"))
"""how lines of a race begin: they are kept as they are, for the browser"""
#: Seconds a cancelled process gets to store what it has before it is killed.
GRACE_S = 15.0
Process: TypeAlias = "subprocess.Popen[str] | Forked"
Environment = Mapping[str, str]
"""variables that a job's process has beside the server's own"""
Starter = Callable[[list[str], Environment], Process]


@dataclass
class Job:
    """One requested run. `state`: queued | running | done | failed | cancelled."""

    id: str
    argv: list[str]
    title: str
    created: float
    """seconds since the epoch"""
    state: str = "queued"
    phase: str = ""
    """convert | load | check | reference | prefill | place | decode | surprisal | effect | again | search | store, as
    the run reports it"""
    done: int = 0
    total: int = 0
    """tokens (prefill, surprisal), steps (decode)"""
    tokens_per_s: float | None = None
    uid: str | None = None
    """of the stored run, once there is one; of a race that of full KV"""
    race: str | None = None
    """id of the stored race, once it has ended"""
    lines: list[str] = field(default_factory=list)
    """what a race says of its lanes, as it says it; only grows"""
    message: str | None = None
    """one sentence on why it failed"""
    would_do: dict[str, str] = field(default_factory=dict)
    """options of `kvlens run`, without dashes, and values that would have it run; {} where none is known"""
    note: str | None = None
    """one sentence on which parameters it runs with, where that is worth knowing"""
    about: str | None = None
    """uid of the stored run that this one repeats"""
    then: str | None = None
    """page that opens by itself when the run is done, for whoever watched it"""
    started: float | None = None
    ended: float | None = None
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))

    @property
    def active(self) -> bool:
        """Queued, running, or asked to stop and not yet gone."""
        return self.ended is None


def start_process(argv: list[str], environment: Environment) -> Process:
    """The engine's process: own group, so that cancelling reaches its workers; stderr joins stdout in the log."""
    return warm.start(argv, environment) or start_cold(argv, environment)


def start_cold(argv: list[str], environment: Environment) -> subprocess.Popen[str]:
    """The same, from nothing."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        bufsize=1,
        start_new_session=True,
        env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
    )


class JobManager:
    """A queue with one worker. All public methods may be called from any thread."""

    def __init__(self, start: Starter = start_process) -> None:
        self._start = start
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._process: Process | None = None
        self._running: str | None = None
        self._folder = Scratch()
        self._worker = threading.Thread(target=self._work, name="kvlens-jobs", daemon=True)
        self._worker.start()

    def scratch(self, name: str, text: str) -> Path:
        """A file for a job's input, in a folder that goes when the server does."""
        return self._folder.file(name, text)

    def submit(self, argv: list[str], title: str, about: str | None = None, then: str | None = None) -> str:
        """Queues a run; returns the job's id. `about`, `then`: see Job."""
        job = Job(secrets.token_hex(4), argv, title, time.time(), about=about, then=then)
        with self._lock:
            self._jobs[job.id] = job
        self._queue.put(job.id)
        return job.id

    def get(self, job_id: str) -> Job | None:
        with self._lock:
            return self._jobs.get(job_id)

    def jobs(self) -> list[Job]:
        """Newest first."""
        with self._lock:
            return sorted(self._jobs.values(), key=lambda job: job.created, reverse=True)

    def position(self, job_id: str) -> int:
        """How many queued or running jobs are before this one."""
        with self._lock:
            jobs = list(self._jobs.values())
        own_rows = next((job for job in jobs if job.id == job_id), None)
        return sum(1 for job in jobs if own_rows is not None and job.active and job.created < own_rows.created)

    def cancel(self, job_id: str) -> None:
        """A queued job is dropped; a running one is asked to stop (SIGTERM), then killed after GRACE_S seconds."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None or not job.active:
                return
            job.state = "cancelled"
            process = self._process if self._running == job_id else None
        if process is not None:
            _signal(process, signal.SIGTERM)
            threading.Thread(target=_kill_later, args=(process,), daemon=True).start()
        else:
            job.ended = time.time()
            self._folder.forget(job.argv)

    def shutdown(self) -> None:
        """Stops the worker and what it runs."""
        for job in self.jobs():
            self.cancel(job.id)
        self._queue.put(None)

    def _work(self) -> None:
        while (job_id := self._queue.get()) is not None:
            job = self.get(job_id)
            if job is not None and job.state == "queued":
                self._run(job)

    def _run(self, job: Job) -> None:
        job.started = time.time()
        environment = {FOLDER: str(self._folder.path("readings"))}
        try:
            with self._lock:
                if job.state != "queued":
                    return
                self._process, self._running = self._start(job.argv, environment), job.id
                job.state = "running"
            code = self._follow(job, self._process)
            if isinstance(self._process, Forked) and not self._process.begun and job.state == "running":
                self._process = start_cold(job.argv, environment)
                code = self._follow(job, self._process)
        except OSError as error:
            code = -1
            job.message = f"The run could not be started: {error}."
        with self._lock:
            self._process = self._running = None
            job.ended = time.time()
            self._folder.forget(job.argv)
            if job.state == "running":
                job.state = "done" if code == 0 and job.uid else "failed"
                if job.state == "failed" and job.message is None:
                    job.message = _why(code)

    def _follow(self, job: Job, process: Process) -> int:
        """Reads what the process says until it ends; its exit status."""
        assert process.stdout is not None
        for line in process.stdout:
            self._read(job, line.rstrip("\n"))
        return process.wait()

    @staticmethod
    def _read(job: Job, line: str) -> None:
        """A progress object moves the bar, a line of a race is kept unread; any other line goes to the log."""
        if line.startswith(RACE_LINES):
            job.lines.append(line)
            return
        report: Any = None
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                report = json.loads(line)
        if not isinstance(report, dict) or "phase" not in report:
            job.log.append(line)
            return
        if report["phase"] == "error":
            job.message = str(report.get("message", "The run failed without saying why."))
            job.would_do = {str(name): str(value) for name, value in (report.get("would_do") or {}).items()}
        elif report["phase"] == "note":
            job.note = str(report.get("message") or "") or None
        elif report["phase"] == "done":
            job.uid = str(report.get("uid") or "") or None
            job.race = str(report.get("race") or "") or None
        else:
            job.phase = str(report["phase"])
            job.done, job.total = int(report.get("done") or 0), int(report.get("total") or 0)
            rate = report.get("tokens_per_s")
            job.tokens_per_s = float(rate) if rate is not None else None


def _why(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        hint = " (often: out of memory)" if name == "SIGKILL" else ""
        return f"The run's process was ended by {name}{hint}."
    return f"The run's process ended with exit code {code} and gave no reason."


def _signal(process: Process, number: signal.Signals) -> None:
    if isinstance(process, Forked):
        process.signal(number)
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _kill_later(process: Process) -> None:
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
